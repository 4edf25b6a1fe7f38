"""The harness: interleaves and repeats all variants, so that a busy machine slows all of them equally."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError
from transformers import PreTrainedModel

from hf_specdec.benchmark import calls
from hf_specdec.benchmark.prompts import Prompt
from hf_specdec.benchmark.records import Call, Note, Record, Table
from hf_specdec.benchmark.variants import COMPILED, PLAIN, Variant
from hf_specdec.progress import Progress

SEED = 0


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
        temperatures: 0 is greedy.
        batch_sizes: rows per call.
        new_tokens: maximum per row.
        repeats: of every call.
        sweep_prompts: number of prompts for swept variants, at the first temperature.
        chat: whether prompts were rendered with the chat template, which already adds the special tokens.
    """

    temperatures: Sequence[float] = (0.0, 1.0)
    batch_sizes: Sequence[int] = (1,)
    new_tokens: int = 128
    repeats: int = 3
    sweep_prompts: int = 8
    chat: bool = False


def warm_up(
    model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], variants: Iterable[Variant], new_tokens: int
) -> Iterator[tuple[Variant, str | None]]:
    """Runs every variant once on the longest prompts, so that caches and kernels are ready for all prompts.

    Yields:
        Each variant, and None or the reason why it cannot be measured here.
    """
    longest = max(batches, key=_length)
    for variant in variants:
        if not variant.batches and len(longest["input_ids"]) > 1:
            yield variant, "supports only one prompt at a time"
            continue
        try:
            calls.generate(model, longest, variant, 0.0, new_tokens, SEED)
        except (TorchDynamoException, InductorError) as error:
            if variant.name != COMPILED:
                raise
            # A machine without a compiler: the report says that the baseline is missing.
            yield variant, str(error).strip().splitlines()[0]
        else:
            yield variant, None


def peak_bytes(model: PreTrainedModel, inputs: dict[str, Tensor], variant: Variant, new_tokens: int) -> int | None:
    """Peak memory of a call after warm-up, above the memory in use before it; None if unknown."""
    memory = calls.Memory(model.device)
    calls.generate(model, inputs, variant, 0.0, new_tokens, SEED)
    return memory.peak_bytes()


def run(
    model: PreTrainedModel,
    tokenizer: Any,
    variants: Sequence[Variant],
    prompts: Sequence[tuple[str, Prompt]],
    settings: Settings,
    progress: Progress,
) -> Iterator[Record]:
    """Measures all variants on all prompts.

    Args:
        model: the target.
        tokenizer: of the target.
        variants: must include plain eager decoding.
        prompts: rendered text with the prompt it was made from.
        settings: of the run.
        progress: counts the calls.

    Yields:
        A `Call` per call, and a `Note` for everything that could not be measured.
    """
    for size in settings.batch_sizes:
        batches = [prompts[start : start + size] for start in range(0, len(prompts) - size + 1, size)]
        if not batches:
            yield Note(f"Batch size {size} was not measured: there are only {len(prompts)} prompts.")
            continue
        if size * len(batches) < len(prompts):
            yield Note(
                f"Batch size {size}: {len(prompts) - size * len(batches)} prompts fill no batch and were not used."
            )
        inputs = [
            tokenise(tokenizer, [text for text, _ in batch], chat=settings.chat).to(model.device) for batch in batches
        ]
        usable, peaks = [], {}
        longest = max(inputs, key=_length)
        for variant, problem in warm_up(model, inputs, variants, settings.new_tokens):
            progress.update()
            if problem is None:
                usable.append(variant)
                if variant.swept_from is None:
                    peaks[variant.name] = peak_bytes(model, longest, variant, settings.new_tokens)
            elif variant.swept_from is None:
                yield Note(f"{variant.name}, batch size {size}, was not measured: {problem}.")
        for temperature in settings.temperatures:
            for repeat in range(settings.repeats):
                for number, (batch, own) in enumerate(zip(batches, inputs, strict=True)):
                    in_sweep = number * size < settings.sweep_prompts and temperature == settings.temperatures[0]
                    for call in _in_turn(
                        model,
                        own,
                        progress,
                        [variant for variant in usable if in_sweep or variant.swept_from is None],
                        temperature=temperature,
                        new_tokens=settings.new_tokens,
                        repeat=repeat,
                        batch=number,
                        groups=[prompt.group for _, prompt in batch],
                    ):
                        yield replace(call, peak_bytes=peaks.get(call.variant))


def _in_turn(
    model: PreTrainedModel,
    inputs: dict[str, Tensor],
    progress: Progress,
    variants: Sequence[Variant],
    **details: Any,
) -> Iterator[Call]:
    """Runs all variants on the same prompts in a new random order, then compares their outputs."""
    seed = hash((details["repeat"], details["batch"])) % 2**31
    order = random.Random(seed).sample(variants, len(variants))
    measured = {}
    for variant in order:
        measured[variant.name] = calls.measure(model, inputs, variant, seed=seed, **details)
        progress.update()
    plain_ids = measured[PLAIN][1]
    for variant in variants:
        call, new_ids = measured[variant.name]
        if call.temperature == 0:
            difference = calls.compare(model, inputs, new_ids, plain_ids)
            call = replace(call, identical=difference is None, difference=difference)
        yield call


def tokenise(tokenizer: Any, texts: list[str], *, chat: bool) -> Any:
    """Left-padded inputs with an attention mask; with `chat`, no special tokens are added to the texts."""
    if tokenizer.pad_token_id is None and len(texts) > 1:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return tokenizer(
        texts,
        return_tensors="pt",
        padding=len(texts) > 1,
        return_attention_mask=True,
        return_token_type_ids=False,
        add_special_tokens=not chat,
    )


def tables(
    variants: Iterable[Variant], model: PreTrainedModel, inputs: Sequence[dict[str, Tensor]]
) -> Iterator[Record]:
    """Additional tables of the drafters (`Drafter.report_tables`), which may run the target on the prompts again."""
    seen: set[int] = set()
    for variant in variants:
        if variant.drafter is None or id(variant.drafter) in seen:
            continue
        seen.add(id(variant.drafter))
        for title, columns, rows in variant.drafter.report_tables(model, inputs):
            yield Table(variant.name, title, columns, rows)


def _length(inputs: dict[str, Tensor]) -> int:
    return inputs["input_ids"].shape[1]


def device_name(device: torch.device) -> str:
    """Name of a device; for a CPU its model and cores from /proc, if available."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        return module.get_device_name(device) if hasattr(module, "get_device_name") else str(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        return str(device)
    return f"{models[0]}, {len(models)} cores" if models else str(device)
