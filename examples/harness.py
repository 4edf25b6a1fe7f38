"""Shared by the measuring examples: the target, held-out prompts, tables and records."""

from __future__ import annotations

import json
import platform
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from bundle import inputs_of
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec.benchmark.prompts import read_jsonl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def wide_console(width: int = 120) -> Console:
    """A console of at least this width: tables stay legible in logs."""
    console = Console()
    console.width = max(console.width, width)
    return console


def load_target(name: str, dtype: torch.dtype | str | None = None) -> tuple[Any, Any]:
    """Target and tokenizer, on `DEVICE`.

    Args:
        name: Hub id or folder.
        dtype: of the weights, "auto" for the checkpoint's own; None for bfloat16 on CUDA and float32 elsewhere.
    """
    dtype = dtype or (torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(DEVICE).eval()
    return model, AutoTokenizer.from_pretrained(name)


def load_inputs(tokenizer: Any, prompts: Path, limit: int = 0) -> list[Any]:
    """Arguments of `generate` for `limit` prompts of a JSONL file, spread over it, on `DEVICE`; 0 for all."""
    read = read_jsonl(prompts)
    chosen = read[:: max(1, len(read) // (limit or len(read)))][: limit or None]
    return [inputs_of(tokenizer, prompt).to(DEVICE) for prompt in chosen]


def mean_acceptance_length(calls: Iterable[Any]) -> float:
    """1 + accepted drafts per round over the statistics of several calls."""
    calls = list(calls)
    accepted = sum(stats.num_accepted_draft_tokens for stats in calls)
    return round(1 + accepted / sum(stats.num_spec_steps for stats in calls), 3)


def acceptance_for(accepted: float, length: int) -> float:
    """The acceptance rate at which drafts of `length` tokens have `accepted` ones on average, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = sum(middle**place for place in range(1, length + 1))
        low, high = (middle, high) if mean < accepted else (low, middle)
    return low


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile; of one value, the value."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return low, median, high


def table_of(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table with the first column on the left and all others on the right."""
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == headings[0] else "right")
    for row in rows:
        table.add_row(*row)
    return table


def about(device: str = DEVICE) -> dict[str, str]:
    """The part of a record on how it was measured: command, hardware, versions and date."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "hardware": f"{device}, {platform.machine()}, {torch.get_num_threads()} threads",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "date": date.today().isoformat(),
    }


def write_json(path: Path | None, record: dict[str, Any]) -> None:
    """Writes a record, if there is a path."""
    if path is not None:
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
