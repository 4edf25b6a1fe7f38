"""Files of text that a target wrote: JSONL in a folder, with the settings in `recipe.json`.

A line is one answer, or the continuation of a document. A text depends only on its number and the recipe (and, by
rounding, on the texts beside it), so an interrupted call can be continued, and several processes can share the work. A
file in progress is `answers-*.part.jsonl`: its texts are in the order in which they were finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.progress import Progress
from hf_specdec.training.continuation import Prompt, continued
from hf_specdec.training.data import datasets_package
from hf_specdec.training.features import fingerprint
from hf_specdec.training.packed_rows import pack_rows, read_packed
from hf_specdec.training.source import Rows

RECIPE_FILE, PART_SUFFIX = "recipe.json", ".part.jsonl"
BATCHES_PER_FILE = 8  # so that waiting prompts take the places of ended ones for most of the time
Task = Generator[Prompt, list[int], list[dict[str, Any]]]  # one text or conversation; returns its rows


@dataclass(frozen=True)
class AnswerSettings:
    """Settings of the answers.

    Attributes:
        temperatures: of the answers; texts take them in turn. 0 is greedy.
        follow_ups: share of conversations in which the target invents one more user message and answers it.
        max_new_tokens: of one answer; longer answers are cut.
        max_length: most tokens of a conversation with its answer: longer answers are cut, and turns without space for
            an answer are skipped.
        batch_size: texts per forward; a file has `BATCHES_PER_FILE` times as many.
        seed: of sampling.
    """

    temperatures: tuple[float, ...] = (0.0,)
    follow_ups: float = 0.0
    max_new_tokens: int = 384
    max_length: int = 768
    batch_size: int = 32
    seed: int = 0

    def temperature_of(self, number: int) -> float:
        """The temperature of a text, by its number."""
        return self.temperatures[number % len(self.temperatures)]


def write_files(
    model: PreTrainedModel,
    count: int,
    task: Callable[[int, Random], Task],
    folder: Path,
    settings: AnswerSettings,
    origin: dict[str, Any],
    *,
    worker: tuple[int, int] = (0, 1),
    max_minutes: float | None = None,
) -> list[Path]:
    """Writes the files that are missing.

    Each text is on disk when it is finished, so a stopped call loses only those that the target was writing.

    Args:
        model: the target.
        count: texts to write. A later call that asks for more adds files; the last file of the earlier call stays as
            short as it was.
        task: makes the text of a number; it draws with this generator.
        folder: of the files.
        settings: of the answers.
        origin: what else decides on the texts, for the recipe.
        worker: (rank, number of workers); this call writes every n-th file.
        max_minutes: no file is begun after this time.

    Returns:
        The files of this worker.

    Raises:
        ValueError: the folder holds answers with other settings.
    """
    recipe = {
        "target": fingerprint(model), "dtype": str(model.dtype).removeprefix("torch."), **origin, **asdict(settings)
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    _check_recipe(folder / RECIPE_FILE, json.loads(json.dumps(recipe)))
    size, (rank, workers) = settings.batch_size * BATCHES_PER_FILE, worker
    files = {number: folder / f"answers-{number:06d}.jsonl" for number in range(rank, -(-count // size), workers)}
    missing = {
        file: range(number * size, min((number + 1) * size, count))
        for number, file in files.items()
        if not file.exists()
    }
    begun, total = time.monotonic(), sum(map(len, missing.values()))
    with Progress("target writes", total, unit="texts", shown=rank == 0) as progress:
        for file, numbers in missing.items():
            started = time.monotonic()
            if max_minutes is not None and started - begun >= 60 * max_minutes:
                break
            part = _Part(file)
            left = [number for number in numbers if number not in part.rows]
            progress.update(len(numbers) - len(left))
            draws = [Random(f"{settings.seed} text {number}") for number in left]
            tasks = [
                _kept(task(number, draw), number, part, progress) for number, draw in zip(left, draws, strict=True)
            ]
            num_tokens = sum(continued(model, tasks, draws, settings.batch_size))
            part.finish()
            progress.set_postfix_str(
                f"{num_tokens / (time.monotonic() - started):.0f} tokens of answers/s", refresh=False
            )
    return list(files.values())


class _Part:
    """A file in progress.

    Attributes:
        rows: of each finished text, by its number.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.path = file, file.with_suffix(PART_SUFFIX)
        self.rows: dict[int, list[dict[str, Any]]] = {}
        if self.path.exists():
            for row in _read_rows(self.path):
                self.rows.setdefault(row["number"], []).append(row)
            if self.rows:
                self.rows.popitem()  # the rows of the last text may be incomplete; it is written again
            self._write(self.rows)

    def append(self, number: int, rows: list[dict[str, Any]]) -> None:
        self.rows[number] = [{"number": number} | row for row in rows]
        with self.path.open("a", encoding="utf-8") as part:
            part.write(_lines(self.rows[number]))

    def finish(self) -> None:
        self._write(sorted(self.rows))
        self.path.replace(self.file)

    def _write(self, numbers: Iterable[int]) -> None:
        _write_whole(self.path, "".join(_lines(self.rows[number]) for number in numbers))


def _kept(task: Task, number: int, part: _Part, progress: Progress) -> Generator[Prompt, list[int], int]:
    """A task whose rows are on disk when it ends; returns the number of tokens in their answers."""
    rows = yield from task
    part.append(number, rows)
    progress.update()
    return sum(len(row["answer_ids"]) for row in rows)


def _lines(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a file; the last line of a file in progress may be incomplete, and is left out."""
    *lines, last = file.read_text(encoding="utf-8").split("\n")
    if last and not file.name.endswith(PART_SUFFIX):
        lines.append(last)
    return [json.loads(line) for line in lines if line]


def _write_whole(file: Path, text: str) -> None:
    """Writes a file that gets its name when it is complete: other processes may read it, and a call may be stopped."""
    unfinished = file.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)


def is_answers(source: str) -> bool:
    """Whether `source` is a folder of `write_files`."""
    return (Path(source) / RECIPE_FILE).is_file()


def read_answers(
    folder: Path, way_out: str = "run `hf-specdec write` with this --output first."
) -> list[dict[str, Any]]:
    """The answers in a folder; `write_answers` and `write_continuations` have their keys, packed rows no `messages`.

    Raises:
        ValueError: there are none.
    """
    answers = answer_rows(folder)
    if not answers:
        raise ValueError(f"{str(folder)!r} holds no answers yet: {way_out}")
    return answers


def answer_rows(folder: Path) -> list[dict[str, Any]]:
    """The answers in a folder: of its JSONL, of files in progress too, and of packed rows."""
    rows = [row for file in sorted(folder.glob("answers-*.jsonl")) for row in _read_rows(file)]
    return rows + [row for file in sorted(folder.glob("rows-*.xz")) for row in read_packed(file)]


def pack_answers(folder: Path, packed: Path) -> list[Path]:
    """Writes the answers in a folder, and their recipe, to a folder of packed rows; see `packed_rows.py`.

    Returns:
        The files with the rows.

    Raises:
        ValueError: there are no answers, or `packed` is `folder`, or holds more rows or such of another recipe.
    """
    check_apart(folder, packed)
    rows, recipe = read_answers(folder), json.loads((folder / RECIPE_FILE).read_text())
    if (held := len(answer_rows(packed))) > len(rows):
        raise ValueError(
            f"{str(packed)!r} holds {held:,} rows, and {str(folder)!r} only {len(rows):,}, so that some would be lost: "
            "give another folder to --pack."
        )
    packed.mkdir(parents=True, exist_ok=True)
    _check_recipe(packed / RECIPE_FILE, recipe)
    return pack_rows(rows, packed)


def check_apart(folder: Path, packed: Path) -> None:
    """Raises ValueError if packed rows are to be written to the folder of their answers."""
    if packed.resolve() == folder.resolve():
        raise ValueError(
            f"--pack {str(packed)!r} is the folder of the answers, which would be read twice: give another."
        )


def check_answers(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError if the answers in a folder were written by another model or in another chat template."""
    recipe = json.loads((folder / RECIPE_FILE).read_text())
    if recipe["target"] != fingerprint(model, getattr(torch, recipe["dtype"])):
        raise ValueError(
            f"The answers in {str(folder)!r} were not written by target {model.name_or_path!r}: its config or weights "
            "differ. A drafter has to learn from its own target: write new answers with it, with `hf-specdec write`."
        )
    if recipe["chat_template"] != template_hash(tokenizer):
        raise ValueError(
            f"The answers in {str(folder)!r} were written in another chat template than the present one of "
            f"{tokenizer.name_or_path!r}. Restore that template, or write new answers with `hf-specdec write`."
        )


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the tokenizer's chat template, for the recipe."""
    return hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()


def _check_recipe(file: Path, recipe: dict[str, Any]) -> None:
    """Writes the recipe next to the answers, or compares it with the existing one."""
    if not file.exists():
        _write_whole(file, json.dumps(recipe, indent=2) + "\n")
    earlier = json.loads(file.read_text())
    changed = [
        f"{name} {earlier.get(name)!r}, now {value!r}" for name, value in recipe.items() if earlier.get(name) != value
    ]
    if changed:
        raise ValueError(
            f"{str(file.parent)!r} holds answers that were written with other settings: {'; '.join(changed)}. To "
            "continue, give the settings of these answers; otherwise give another folder."
        )


def end_ids(model: PreTrainedModel) -> set[int]:
    """The tokens that end a text."""
    end = model.generation_config.eos_token_id
    return {end} if isinstance(end, int) else set(end or ())


def training_rows(answers: Sequence[dict[str, Any]]) -> Rows:
    """Rows of text and answer, with the columns of `data.py`; only the answer is trained on."""
    rows: Rows = datasets_package().Dataset.from_dict(
        {
            "input_ids": [row["prompt_ids"] + row["answer_ids"] for row in answers],
            "first_anchor": [len(row["prompt_ids"]) for row in answers],
            "length": [len(row["prompt_ids"]) + len(row["answer_ids"]) for row in answers],
        }
    )
    return rows
