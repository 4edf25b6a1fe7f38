"""The parts of the speed suite that run on the bundled model: `auto`, `exact` and `host`."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_specdec.benchmark.variants import BUNDLED, Variant, discover, distinct
from hf_specdec.drafting.registry import unknown_name
from hf_specdec.hub.loading import load_drafter

from .exactness import compare, untrained
from .host_time import host_time

if TYPE_CHECKING:
    from .__main__ import Bench

Row = dict[str, Any]


def bundled(bench: Bench) -> tuple[PreTrainedModel, dict[str, list[torch.Tensor]]]:
    """The bundled target, and prompts [1, seq] by group."""
    model = AutoModelForCausalLM.from_pretrained(BUNDLED / "target", dtype=bench.dtype).to(bench.device)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    groups: dict[str, list[torch.Tensor]] = {}
    for line in map(json.loads, (BUNDLED / "prompts.jsonl").read_text(encoding="utf-8").splitlines()):
        ids = tokenizer(line["prompt"], return_tensors="pt")["input_ids"].to(bench.device)
        groups.setdefault(line["source"].split("/")[0], []).append(ids)
    chosen = bench.options.groups or sorted(groups)
    return model, {name: groups[name] for name in groups if name in chosen}


def asked_for(variants: Sequence[str] | None, names: Iterable[str]) -> list[str]:
    """Those of `names` that `--variants` lists, or all of them; ValueError if it lists another name."""
    known = list(names)
    for name in variants or ():
        if name not in known:
            raise unknown_name("--variants", name, known)
    return [name for name in known if name in (variants or known)]


def _with_budget(variant: Variant, nodes: int) -> dict[str, Any]:
    assert variant.drafter is not None
    takes_budget = hasattr(variant.drafter.options, "tree_budget")
    return {**variant.settings, "tree_budget": nodes} if takes_budget else {**variant.settings}


def exact_variants(bench: Bench, model: PreTrainedModel) -> list[Variant]:
    """Drafters for the part `exact`: all bundled ones and `untrained` ones, or those named by `--variants`.

    Raises:
        ValueError: a name in `--variants` is unknown.
    """
    nodes = bench.options.nodes[-1]
    variants = [*distinct(discover(BUNDLED, model)[0]), *untrained(model, nodes)]
    names = asked_for(bench.options.variants, [variant.name for variant in variants])
    return [replace(each, settings=_with_budget(each, nodes)) for each in variants if each.name in names]


def exact(bench: Bench) -> list[Row]:
    """Greedy output of every drafter compared with plain decoding, by mode; see `exactness.py`."""
    model, groups = bundled(bench)
    prompts = {name: group[: bench.options.prompts_per_group] for name, group in groups.items()}
    return compare(model, exact_variants(bench, model), bench.modes, prompts, bench.options.new_tokens)


def auto(bench: Bench) -> list[Row]:
    """`tree_budget="auto"` compared with fixed budgets and plain decoding, by group of prompts."""
    model, groups = bundled(bench)
    drafter = load_drafter(str(BUNDLED / "dflash"), target=model)
    budgets: list[Any] = [8, 16, 32, 64, "auto"]
    rows = []
    for warming_up in (True, False):
        for group, prompts in groups.items():
            seconds: dict[Any, list[float]] = {budget: [] for budget in ["plain", *budgets]}
            for prompt in prompts[: 1 if warming_up else bench.options.prompts_per_group]:
                inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
                best = dict.fromkeys(seconds, float("inf"))
                outputs = []
                for repeat in range(bench.options.repeats):
                    for budget in seconds if repeat % 2 == 0 else reversed(seconds):
                        arguments = {}
                        if budget != "plain":
                            drafter.set_options(tree_budget=budget)
                            arguments["assistant_model"] = drafter
                        bench.wait()
                        began = time.perf_counter()
                        output = model.generate(
                            **inputs, max_new_tokens=bench.options.new_tokens, do_sample=False, **arguments
                        )
                        bench.wait()
                        best[budget] = min(best[budget], time.perf_counter() - began)
                        outputs.append(output.tolist())
                if bench.dtype == torch.float32:
                    assert all(output == outputs[0] for output in outputs), (
                        f"{group}: outputs differ for {prompt.tolist()}"
                    )
                for budget, taken in best.items():
                    seconds[budget].append(taken)
            if warming_up:
                continue
            speedups = {
                str(budget): [plain / own for plain, own in zip(seconds["plain"], seconds[budget], strict=True)]
                for budget in budgets
            }
            means = {budget: statistics.fmean(values) for budget, values in speedups.items()}
            best_fixed = max(value for budget, value in means.items() if budget != "auto")
            rows.append(
                {"part": "auto", "group": group, "prompts": len(seconds["plain"])}
                | {f"speedup {budget}": value for budget, value in means.items()}
                | {"auto_over_best": means["auto"] / best_fixed, "slowest_auto": min(speedups["auto"])}
            )
    return rows


def host(bench: Bench) -> list[Row]:
    """Time of a DDTree round outside the forwards, on a CPU; see `host_time.py`."""
    model, groups = bundled(bench)
    drafter: Any = load_drafter(str(BUNDLED / "dflash"), target=model, tree_budget=bench.options.nodes[0])
    prompts = [prompt for group in groups.values() for prompt in group[: bench.options.prompts_per_group]]
    return host_time(model, drafter, prompts, bench.options.new_tokens, bench.options.repeats)
