r"""What a useless source costs a merged drafter, and what a look-up in a long index takes.

    python examples/measure_merged.py --target "$(python examples/smollm2.py | tail -1)" \
        --drafter examples/smollm2-135m/dflash --prompts examples/smollm2-135m/held_out.jsonl

It prints two tables. The first compares the drafter alone with the drafter merged with a useless source, prompt by
prompt, once the merged drafter has seen `--warm-rounds` rounds: one source drafts random tokens at no cost and states
that they are likely, the other is the drafter's own network with random weights. The second has the time of a draft of
the suffix look-up by the number of indexed tokens; the index holds random words of a few tokens, so that it matches.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bundle import TINY
from harness import about, load_inputs, load_target, quartiles, table_of, wide_console, write_json
from transformers import PreTrainedModel

from hf_specdec import (
    DraftContext,
    Drafter,
    DrafterOptions,
    DraftTree,
    TargetModel,
    TreeCandidateGenerator,
    load_drafter,
)
from hf_specdec.methods.lookup import SuffixDrafter
from hf_specdec.methods.merged import MergedDrafter

NODES = 8  # of a useless draft


@dataclass(slots=True, kw_only=True)
class RandomOptions(DrafterOptions):
    """A useless source has no options."""

    method = "random"


class RandomDrafter(Drafter):
    """Drafts a chain of random tokens, and states that each is followed with probability 0.9."""

    options_class = RandomOptions

    def __init__(self) -> None:
        self.options = RandomOptions()

    def check_target(self, model: PreTrainedModel) -> None:
        """Fits any target."""

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return RandomGenerator(target.model.get_input_embeddings().num_embeddings)


class RandomGenerator(TreeCandidateGenerator):
    """One call of a `RandomDrafter`."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.generator = vocab_size, torch.Generator().manual_seed(0)

    def draft(self, context: DraftContext) -> DraftTree:
        batch = len(context.root_ids)
        drawn = torch.randint(self.vocab_size, (batch, NODES), generator=self.generator).tolist()
        chains = [[root, *row] for root, row in zip(context.root_ids.tolist(), drawn, strict=True)]
        parents = [list(range(-1, NODES))] * batch
        logprobs = [[-0.105 * depth for depth in range(NODES + 1)]] * batch
        return DraftTree.from_lists(chains, parents, path_logprobs=logprobs)


def speeds(model: Any, inputs: Any, drafters: dict[str, Drafter], new_tokens: int) -> dict[str, float]:
    """Tokens per second of one call with each drafter, in random order."""
    found = {}
    for name, drafter in random.sample(list(drafters.items()), len(drafters)):
        start = time.perf_counter()
        output = model.generate(**inputs, assistant_model=drafter, max_new_tokens=new_tokens, do_sample=False)
        found[name] = (output.shape[1] - inputs["input_ids"].shape[1]) / (time.perf_counter() - start)
    return found


def lookup_ms(model: Any, inputs: Any, tokens: int, new_tokens: int) -> float:
    """Milliseconds of a draft of the suffix look-up whose index holds this number of tokens."""
    drafter = SuffixDrafter()
    words = random.Random(0)
    vocabulary = [[words.randrange(model.config.vocab_size) for _ in range(3)] for _ in range(1000)]
    drafter.index.add([token for _ in range(tokens // 3) for token in words.choice(vocabulary)])
    model.generate(**inputs, assistant_model=drafter, max_new_tokens=new_tokens, do_sample=False)
    assert drafter.stats is not None
    return 1e3 * drafter.stats.draft_time_s / drafter.stats.num_spec_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=TINY.target)
    parser.add_argument("--drafter", default=str(TINY.folder / "dflash"))
    parser.add_argument("--prompts", type=Path, default=TINY.prompts)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--warm-rounds", type=int, default=50)
    parser.add_argument("--tree-budget", type=int, default=8)
    parser.add_argument("--index-tokens", type=int, nargs="+", default=[1_000, 10_000, 99_999])
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()

    console = wide_console(100)
    model, tokenizer = load_target(arguments.target, torch.float32)
    prompts = load_inputs(tokenizer, arguments.prompts)[: 4 * arguments.num_prompts]
    options = {"tree_budget": arguments.tree_budget}

    untrained: Any = load_drafter(arguments.drafter, model)
    torch.manual_seed(0)
    for parameter in untrained.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    sources = {"random tokens": RandomDrafter(), "the network with random weights": untrained}
    alone = load_drafter(arguments.drafter, model, **options)
    merged = {f"with {name}": MergedDrafter(load_drafter(arguments.drafter, model), source, **options)
              for name, source in sources.items()}  # fmt: skip
    drafters: dict[str, Drafter] = {"alone": alone, **merged}
    remaining = iter(prompts)
    rounds = dict.fromkeys(drafters, 0)
    while min(rounds.values()) < arguments.warm_rounds:
        speeds(model, next(remaining), drafters, arguments.new_tokens)
        for name, drafter in drafters.items():
            rounds[name] += drafter.stats.num_spec_steps if drafter.stats else 0
    measured = [speeds(model, next(remaining), drafters, arguments.new_tokens) for _ in range(arguments.num_prompts)]
    cost = {}
    for name in merged:
        low, middle, high = quartiles([each[name] / each["alone"] for each in measured])
        cost[name] = {"median": middle, "first quartile": low, "third quartile": high}
    rows = [(name, *(f"{value:.3f}" for value in row.values())) for name, row in cost.items()]
    after = min(rounds.values())
    title = f"tokens per second over the drafter alone, {arguments.num_prompts} prompts, after {after} rounds"
    console.print(table_of(title, ("merged", "median", "first quartile", "third quartile"), rows))

    inputs = prompts[0]
    look_ups = {tokens: statistics.median(lookup_ms(model, inputs, tokens, arguments.new_tokens) for _ in range(5))
                for tokens in arguments.index_tokens}  # fmt: skip
    rows = [(f"{tokens:,}", f"{value:.3f}") for tokens, value in look_ups.items()]
    console.print(table_of("the suffix look-up, median of 5 calls", ("indexed tokens", "ms of a draft"), rows))
    write_json(arguments.json, {"useless_source": cost, "look_up_ms": look_ups} | about())


if __name__ == "__main__":
    main()
