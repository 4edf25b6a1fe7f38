"""Records of an invented run: every kind of record, many variants with long names, and known figures."""

from __future__ import annotations

import random

from hf_specdec.benchmark.records import Call, Difference, Environment, Note, Record, Table
from hf_specdec.benchmark.variants import COMPILED, PLAIN

NEW = 40
METHODS = [
    "ddtree (dflash)", "ddtree (medusa)", "dflash (dflash)", "eagle3", "specblock", "specbound", "specbranch",
    "causal_lm_tree", "causal_lm_chain", "ngram tree_budget=31",
]  # fmt: skip


def environment(**fields: object) -> Environment:
    """Of that run; `fields` replace its own."""
    return Environment(
        **{
            "target": "someone/a-target",
            "device": "A machine, 2 cores",
            "dtype": "float32",
            "attention": "sdpa",
            "threads": 2,
            "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
            "date": "2026-11-21",
            "command": "hf-specdec bench --quick",
            "prompts": "8 of prompts.jsonl",
            "settings": {"new tokens": NEW},
            "copy_bytes_per_s": 2e10,
            "weight_bytes": 20_000_000,
            "variants": {},
        }
        | fields
    )  # type: ignore[arg-type]


def call(variant: str, **fields: object) -> Call:
    """A call of ten tokens in a second, without speculation; `fields` replace its own."""
    return Call(
        **{
            "variant": variant,
            "temperature": 0.0,
            "batch_size": 1,
            "repeat": 0,
            "batch": 0,
            "groups": ["code"],
            "prompt_tokens": [20],
            "new_tokens": [10],
            "seconds": 1.0,
            "ttft_s": 0.1,
            "identical": True,
        }
        | fields
    )  # type: ignore[arg-type]


def run(num_prompts: int = 8, repeats: int = 2) -> list[Record]:
    """A whole run: two baselines, ten methods, a sweep, two temperatures, six groups."""
    draw = random.Random(0)
    groups = ["mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"]
    records: list[Record] = [environment(), Note("plain, compiled, batch size 4, was not measured: no compiler.")]
    for temperature in (0.0, 1.0):
        for repeat in range(repeats):
            for batch in range(num_prompts):
                shared = {
                    "temperature": temperature, "repeat": repeat, "batch": batch, "groups": [groups[batch % 6]],
                    "new_tokens": [NEW], "prompt_tokens": [30 + 9 * batch],
                    "identical": None if temperature else True,
                }  # fmt: skip
                for index, variant in enumerate([PLAIN, COMPILED, *METHODS]):
                    records.append(_call(draw, variant, index, shared))
                for index, variant in enumerate(METHODS[:3]):
                    for budget in (4, 8, 16, 32, 64):
                        own = _call(draw, f"{variant} @ {budget}", index + budget // 8, shared)
                        records.append(
                            call(**{**vars(own), "swept_from": variant, "budget": budget})  # type: ignore[arg-type]
                        )
    first = next(index for index, own in enumerate(records) if isinstance(own, Call) and own.variant == METHODS[0])
    records[first] = call(
        **{**vars(records[first]), "identical": False, "difference": Difference(0, 3, 1e-6)}  # type: ignore[arg-type]
    )
    records.append(Table(METHODS[4], "rank head", ["bucket", "precision"], [["0", "0.8"], ["1", "0.6"]]))
    return records


def _call(draw: random.Random, variant: str, index: int, shared: dict[str, object]) -> Call:
    seconds = (1.5 + draw.random()) / (1 + 0.2 * index)
    fields: dict[str, object] = {"seconds": seconds, "ttft_s": 0.05, **shared}
    if index > 1:
        accepted = [draw.randint(0, 4 + index % 8) for _ in range(10)]
        stage = (seconds - 0.06) / 5
        fields |= {
            "per_round": [accepted], "num_draft_tokens": 160, "num_target_forwards": 10, "peak_bytes": 10**6 * index,
            "stages_s": {"prefill": 0.05, **dict.fromkeys(("draft", "tree", "verify", "accept", "commit"), stage)},
        }  # fmt: skip
    return call(variant, **fields)
