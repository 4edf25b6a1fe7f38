"""The time of a round of targets with recurrent layers, relative to a softmax target of the same sizes, on a CPU.

The targets count upwards and the drafter knows it (`speed/scripted.py`), so that acceptance is the same for all. All
targets take turns, call by call, and ratios are computed within a turn.

    python examples/measure_states.py --hidden-size 512 1024
"""

from __future__ import annotations

import argparse
import platform
import statistics
from datetime import date
from typing import Any

import torch
import transformers
from speed.scripted import ScriptedDrafter, counting_target, rate_for

LAYERS, VOCAB, PROMPT, NEW_TOKENS = 12, 8192, 64, 48
DEPTH, LENGTH = 8, 3.0  # of the drafts, and how many tokens a round gives on average


def configs(hidden: int) -> dict[str, Any]:
    """Softmax attention in every layer; and three of four layers with states."""
    shape = {
        "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": LAYERS,
        "num_attention_heads": hidden // 64, "num_key_value_heads": max(1, hidden // 256), "head_dim": 64,
        "max_position_embeddings": 1024, "tie_word_embeddings": False,
    }  # fmt: skip
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    delta = {
        "linear_num_key_heads": hidden // 128, "linear_num_value_heads": hidden // 64, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "layer_types": kinds * (LAYERS // 4),
    }  # fmt: skip
    mamba = {
        "mamba_n_heads": hidden // 32, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1, "mamba_expand": 2,
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 3 * hidden,
        "layer_types": kinds * (LAYERS // 4),
    }  # fmt: skip
    return {
        "softmax (Qwen3)": transformers.Qwen3Config(**shape),
        "gated delta rule (Qwen3.5)": transformers.Qwen3_5TextConfig(**shape, **delta),
        "Mamba-2 (Granite 4)": transformers.GraniteMoeHybridConfig(**shape, **mamba),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--hidden-size", type=int, nargs="+", default=[512, 1024], help="multiples of 256")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
          f"transformers {transformers.__version__}, {date.today()}; float32, {LAYERS} layers")  # fmt: skip
    for hidden in arguments.hidden_size:
        targets, drafters = {}, {}
        prompt = torch.randint(3, VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(0))
        call = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": NEW_TOKENS, "do_sample": False}
        for name, config in configs(hidden).items():
            targets[name] = counting_target(config, "cpu", torch.float32)
            drafters[name] = ScriptedDrafter(tree_budget=arguments.nodes, depth=DEPTH, rate=rate_for(LENGTH, DEPTH))
        rounds: dict[str, list[float]] = {name: [] for name in targets}
        for repeat in range(arguments.repeats + 1):
            for name, target in targets.items():
                target.generate(prompt, **call, assistant_model=drafters[name])
                stats = drafters[name].stats
                assert stats is not None
                spent = sum(stats.stage_time_s.values()) - stats.stage_time_s["prefill"]
                if repeat:  # the first one warms up
                    rounds[name].append(1000 * spent / stats.num_spec_steps)
        base = rounds["softmax (Qwen3)"]
        for name, times in rounds.items():
            ratios = [each / softmax for each, softmax in zip(times, base, strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4)
            weights = targets[name].num_parameters() / targets["softmax (Qwen3)"].num_parameters()
            print(f"hidden {hidden:5}  {name:28} {statistics.median(times):6.1f} ms a round, "
                  f"{statistics.median(ratios):.2f}x softmax ({low:.2f}-{high:.2f}), "
                  f"with {weights:.2f}x its weights")  # fmt: skip


if __name__ == "__main__":
    main()
