"""The base ablations of SpecBlock (Table 2 of the paper) on the bundled target.

    python examples/train_drafter.py --method specblock ...      # writes the rows that are trained on here
    python examples/ablate_specblock.py --work-dir build/specblock

Every variant is trained with the same seed, rows and number of steps, far fewer than for the bundled drafter. It then
drafts for the same held-out prompts with the same budget. Rank-guided branching does not change training: its variant
is the drafter with all parts and a fixed number of candidates at every position.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from bundle import TINY
from harness import DEVICE, about, load_inputs, load_target, mean_acceptance_length, write_json
from transformers import TrainingArguments, set_seed

from hf_specdec import load_drafter
from hf_specdec.drafting.drafter import always_drafting
from hf_specdec.methods.specblock.training import SpecBlockStep, new_drafter
from hf_specdec.training.answer_files import RECIPE_FILE, read_answers, training_rows
from hf_specdec.training.features import cache_states
from hf_specdec.training.optimizer import MuonWithAdamW
from hf_specdec.training.trainer import DrafterTrainer
from hf_specdec.training.vocabulary import frequent_tokens

FIXED = "without rank-guided branching"
# Options of the drafter and of the training step.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all parts": ({}, {}),
    "without prefix broadcast": ({"prefix_broadcast": False}, {}),
    "without layer-wise shift": ({"layer_wise_shift": False}, {}),
    "without valid-prefix mask": ({}, {"valid_prefix": False}),
}


def measure(model: Any, drafter: Any, prompts: list[Any], new_tokens: int) -> float:
    """The mean acceptance length over all prompts."""
    calls = []
    with always_drafting():
        for inputs in prompts:
            model.generate(**inputs, assistant_model=drafter, max_new_tokens=new_tokens, do_sample=False)
            calls.append(drafter.stats)
    return mean_acceptance_length(calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=TINY.target)
    parser.add_argument("--work-dir", type=Path, default=Path("build/specblock"), help="of train_drafter.py")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=6e-3)
    parser.add_argument("--draft-vocab-size", type=int, default=3072)
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--tree-budget", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--record", action="store_true", help="write the figures into the bundled drafter's card")
    arguments = parser.parse_args()

    model, tokenizer = load_target(arguments.target, torch.float32)
    prompts = load_inputs(tokenizer, TINY.prompts, arguments.num_prompts)
    recipes = arguments.work_dir.glob(f"continuations-*/{RECIPE_FILE}")
    folders = [file.parent for file in recipes if not json.loads(file.read_text())["held_out"]]
    if not folders:
        raise SystemExit(
            f"{arguments.work_dir} contains no training data: run train_drafter.py with this --work-dir first."
        )
    written = max(map(read_answers, folders), key=len)
    rows = training_rows(written).shuffle(seed=0).select(range(arguments.rows))
    vocab_size = model.get_input_embeddings().num_embeddings
    vocabulary, _ = frequent_tokens(rows, arguments.draft_vocab_size, vocab_size)

    lengths: dict[str, float] = {}
    for name, (drafter_options, step_options) in VARIANTS.items():
        started = time.perf_counter()
        set_seed(0)
        drafter = new_drafter(model, vocabulary, warm_start=True, **drafter_options)
        step = SpecBlockStep(drafter, model, rank_start=0.5, slot_weights="by_count", window=128, **step_options)
        DrafterTrainer(
            drafter,
            step,
            TrainingArguments(
                output_dir=str(arguments.work_dir / "ablations"),
                max_steps=arguments.steps,
                per_device_train_batch_size=arguments.batch_size,
                lr_scheduler_type="linear",
                warmup_steps=arguments.steps // 25,
                bf16=True,
                use_cpu=DEVICE == "cpu",
                save_strategy="no",
                logging_steps=arguments.steps,
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=cache_states(step.reader, rows, arguments.work_dir),
            optimizers=(MuonWithAdamW(drafter, arguments.learning_rate), None),
        ).train()
        drafter.eval()
        drafter.set_options(tree_budget=arguments.tree_budget)
        lengths[name] = measure(model, drafter, prompts, arguments.new_tokens)
        print(f"{name}: mean acceptance length {lengths[name]:.3f}, {time.perf_counter() - started:.0f} s", flush=True)
        if name == "all parts":
            for width in (2, 4):
                drafter.set_options(branching=[width] * 4, beam_width=width)
                fixed = measure(model, drafter, prompts, arguments.new_tokens)
                lengths[f"{FIXED}, {width} everywhere"] = fixed
                print(f"{FIXED}, {width} everywhere: mean acceptance length {fixed:.3f}", flush=True)

    record = {
        "mean_acceptance_length": lengths,
        "training": f"{arguments.steps} steps of {arguments.batch_size} rows each",
        "prompts": f"{len(prompts)} held-out prompts, {arguments.new_tokens} new tokens, greedy",
        "tree_budget": arguments.tree_budget,
        **about(),
    }
    print(json.dumps(record, indent=2))
    write_json(arguments.json, record)
    if arguments.record:
        bundled = load_drafter(TINY.folder / "specblock")
        bundled.training_record = (bundled.training_record or {}) | {"ablations": record}
        bundled.write_records(TINY.folder / "specblock")


if __name__ == "__main__":
    main()
