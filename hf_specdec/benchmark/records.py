"""Records: the output of a run, one JSON object per line, from which reports are made.

`Environment` comes first, then a `Call` per `generate` call, `Table`s and `Note`s. `figures.py` computes the figures
from the calls; they are not stored, so a report can always be made again from its records.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from hf_specdec.hub.files import read_utf8


@dataclass(frozen=True)
class Environment:
    """The circumstances of the run.

    Attributes:
        target: name of the model.
        device: its kind and name.
        dtype: of the target.
        attention: implementation of the target.
        threads: of torch on the host.
        versions: by package.
        date: ISO.
        command: of the run.
        prompts: their number, and the set.
        settings: of the run.
        copy_bytes_per_s: bytes read and written by a large copy on the device, per second.
        weight_bytes: of the target, read in one forward.
        variants: settings by name, in order.
    """

    target: str
    device: str
    dtype: str
    attention: str
    threads: int
    versions: dict[str, str]
    date: str
    command: str
    prompts: str
    settings: dict[str, Any]
    copy_bytes_per_s: float
    weight_bytes: int
    variants: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Difference:
    """The first difference of an output from plain decoding's.

    Attributes:
        row: of the batch.
        index: of the new token.
        top2_gap: between the target's two largest logits there, computed in one forward over the common text. Only if
            it is small can floating-point rounding change the argmax.
    """

    row: int
    index: int
    top2_gap: float


@dataclass(frozen=True)
class Call:
    """One `generate` call.

    Attributes:
        variant: its name.
        temperature: 0 for greedy.
        batch_size: rows.
        repeat: its number.
        batch: number of its batch of prompts.
        groups: of the prompts.
        prompt_tokens: of each row, without padding.
        new_tokens: of each row, end of text included.
        seconds: the whole call, by the host's clock.
        ttft_s: until the first new token.
        identical: whether every row equals plain decoding's; None when sampled.
        difference: of the first row that differs.
        peak_bytes: largest memory above the memory in use before the call; None if unknown.
        per_round: [row][round], accepted drafted tokens; empty for variants without statistics.
        num_draft_tokens: drafted and verified.
        num_target_forwards: after the prefill.
        num_foreseen, num_path_drafts, num_path_kept: as in `SpeculationStats`.
        stages_s: seconds by stage.
        swept_from: see `Variant`.
        budget: of a swept variant.
    """

    variant: str
    temperature: float
    batch_size: int
    repeat: int
    batch: int
    groups: list[str]
    prompt_tokens: list[int]
    new_tokens: list[int]
    seconds: float
    ttft_s: float
    identical: bool | None = None
    difference: Difference | None = None
    peak_bytes: int | None = None
    per_round: list[list[int]] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_target_forwards: int = 0
    num_foreseen: int = 0
    num_path_drafts: int = 0
    num_path_kept: int = 0
    stages_s: dict[str, float] = field(default_factory=dict)
    swept_from: str | None = None
    budget: int | None = None


@dataclass(frozen=True)
class Table:
    """An additional table of a drafter: see `Drafter.report_tables`."""

    variant: str
    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Note:
    """Information that a reader needs, for example that a variant could not be measured, and why."""

    text: str


Record: TypeAlias = Environment | Call | Table | Note
_KINDS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in (Environment, Call, Table, Note)}


def write(records: Iterable[Record], path: Path) -> None:
    """Writes records as JSON lines."""
    path.write_text("".join(line(record) + "\n" for record in records), encoding="utf-8")


def line(record: Record) -> str:
    """One record as a line of JSON, its kind first."""
    return json.dumps({"kind": type(record).__name__.lower(), **dataclasses.asdict(record)}, ensure_ascii=False)


def read(path: Path) -> list[Record]:
    """Reads a file written by `write`.

    Raises:
        ValueError: a line is not a record of this version.
    """
    records: list[Record] = []
    # Not splitlines(), which also splits at characters that JSON strings may contain.
    for number, text in enumerate(read_utf8(path).split("\n"), start=1):
        if not text:
            continue
        try:
            fields = json.loads(text)
            kind = _KINDS[fields.pop("kind")]
            if fields.get("difference"):
                fields["difference"] = Difference(**fields["difference"])
            records.append(kind(**fields))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number} is not a record of hf_specdec.benchmark ({error!r}): {text[:80]!r}. Give the "
                ".jsonl file of a run of this version."
            ) from error
    return records
