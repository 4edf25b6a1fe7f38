"""One measured `generate` call: its times, its memory, and its first difference from plain decoding."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_specdec.benchmark.records import Call, Difference
from hf_specdec.benchmark.variants import PLAIN, Variant
from hf_specdec.decoding.devices import abilities, wait_for

FASTER, TRIAL_TOKENS = 1.1, 4
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def keep_faster_number_type(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> str | None:
    """Converts a target on a CPU from a low precision to float32 if plain decoding is faster so, by `FASTER`.

    On processors without such instructions, products in bfloat16 take several times as long as in float32.

    Args:
        model: the target, in the number type in which it was published.
        inputs: [batch, seq] int64 prompts and mask, of a short trial.

    Returns:
        A line that says what was found; None if there was nothing to choose.
    """
    own = model.dtype
    name = str(own).removeprefix("torch.")
    if model.device.type != "cpu" or own not in (torch.bfloat16, torch.float16):
        return None
    plain, seconds = Variant(PLAIN, "plain"), {}
    # Not `model.to`: what is kept in float32, such as rotary frequencies, would come back rounded.
    low = [parameter for parameter in model.parameters() if parameter.dtype == own]
    for dtype in (own, torch.float32):
        for parameter in low:
            parameter.data = parameter.data.to(dtype)
        seconds[dtype] = min(generate(model, inputs, plain, 0.0, TRIAL_TOKENS)[1] for _ in range(2))
    ratio = seconds[own] / seconds[torch.float32]
    if ratio > FASTER:
        return f"number type: float32, in which plain decoding is {ratio:.1f} times as fast here as in {name}"
    for parameter in low:
        parameter.data = parameter.data.to(own)
    return f"number type: {name}, its own; plain decoding in float32 is {ratio:.2f} times as fast"


class Clock(BaseStreamer):
    """A streamer that records when tokens arrive. The benchmark uses it for all variants."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.prompt_seen = False
        self.started = time.perf_counter()
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        now = time.perf_counter()
        if not self.prompt_seen:  # generate puts the prompt first
            self.prompt_seen = True
            return
        self.times += [now] * max(1, value.numel() // self.batch)

    def end(self) -> None:
        """Does nothing: all tokens were recorded when they arrived."""


def generate(
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    variant: Variant,
    temperature: float,
    new_tokens: int,
    seed: int = 0,
) -> tuple[Tensor, float, Clock]:
    """Runs one call.

    Args:
        model: the target.
        inputs: [batch, seq] int64 prompts and mask.
        variant: of decoding.
        temperature: 0 is greedy.
        new_tokens: maximum per row.
        seed: of torch.

    Returns:
        new ids [batch, new] int64, seconds of the whole call, and its clock.
    """
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    if not temperature:
        # None, because transformers warns about sampling settings of the target that greedy search ignores.
        sampling = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    variant.begin()
    assistant = {} if variant.drafter is None else {"assistant_model": variant.drafter}
    clock = Clock(len(inputs["input_ids"]))
    torch.manual_seed(seed)
    wait_for(model.device)
    with variant.products(model):
        started = clock.started = time.perf_counter()
        output = model.generate(
            **inputs,
            **variant.arguments,
            **assistant,
            **sampling,
            max_new_tokens=new_tokens,
            streamer=clock,
        )
        wait_for(model.device)
        seconds = time.perf_counter() - started
    return output[:, inputs["input_ids"].shape[1] :], seconds, clock


def measure(
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    variant: Variant,
    *,
    temperature: float,
    new_tokens: int,
    seed: int,
    **details: Any,
) -> tuple[Call, Tensor]:
    """Runs one call; returns its record, with `details` that are known before, and the new ids [batch, new]."""
    new_ids, seconds, clock = generate(model, inputs, variant, temperature, new_tokens, seed)
    call = Call(
        variant=variant.name,
        temperature=temperature,
        batch_size=len(new_ids),
        prompt_tokens=inputs["attention_mask"].sum(1).tolist(),
        new_tokens=lengths(new_ids, model),
        seconds=seconds,
        ttft_s=clock.times[0] - clock.started,
        swept_from=variant.swept_from,
        budget=variant.settings.get("tree_budget") if variant.swept_from else None,
        **details,
    )
    if variant.drafter is not None and (stats := variant.drafter.stats) is not None:
        call = replace(
            call,
            per_round=[list(row) for row in stats.per_step_accepted],
            num_draft_tokens=stats.num_draft_tokens,
            num_target_forwards=stats.num_target_forwards,
            num_foreseen=stats.num_foreseen,
            num_path_drafts=stats.num_path_drafts,
            num_path_kept=stats.num_path_kept,
            stages_s=stats.stage_time_s,
        )
    return call, new_ids


def lengths(new_ids: Tensor, model: PreTrainedModel) -> list[int]:
    """New tokens of each row, up to its end of text and including it."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        return [new_ids.shape[1]] * len(new_ids)
    is_end = torch.isin(new_ids, torch.tensor(ends, device=new_ids.device))
    first = is_end.int().argmax(1)
    return torch.where(is_end.any(1), first + 1, new_ids.shape[1]).tolist()


def compare(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], new_ids: Tensor, plain_ids: Tensor
) -> Difference | None:
    """The first difference from the ids of plain decoding [batch, new]; None if there is none."""
    width = max(new_ids.shape[1], plain_ids.shape[1])
    missing = -1  # no token: a row that ended early differs from a row that continues
    own, plain = (
        torch.nn.functional.pad(ids, (0, width - ids.shape[1]), value=missing) for ids in (new_ids, plain_ids)
    )
    differs = own != plain
    if not bool(differs.any()):
        return None
    row = int(differs.any(1).int().argmax())
    index = int(differs[row].int().argmax())
    mask = inputs["attention_mask"][row].bool()
    text = torch.cat([inputs["input_ids"][row][mask], plain[row, :index]])
    with torch.no_grad():
        top2 = model(input_ids=text[None]).logits[0, -1].float().topk(2).values.tolist()
    return Difference(row, index, top2[0] - top2[1])


class Memory:
    """Peak memory during a call, above the memory in use before it.

    On CUDA this is memory allocated by torch; on a CPU under Linux it is resident memory of the process, whose peak the
    kernel can reset; elsewhere it is unknown. Do not use it for timed calls: it first returns cached memory to the
    system, which must then be allocated again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before: int | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
        elif abilities(device).host_memory:
            with suppress(OSError):  # the file is missing or not writable
                if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc
                    libc.malloc_trim(0)
                _CLEAR_REFS.write_text("5", encoding="ascii")  # resets the peak, see proc(5)
                self.before = _resident("VmRSS")

    def peak_bytes(self) -> int | None:
        """Bytes; None if unknown."""
        if self.before is None:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return max(0, _resident("VmHWM") - self.before)


def _resident(name: str) -> int:
    for row in _STATUS.read_text(encoding="ascii").splitlines():
        if row.startswith(f"{name}:"):
            return int(row.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {name}")
