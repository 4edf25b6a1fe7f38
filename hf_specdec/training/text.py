"""Training on plain text: the target continues the beginnings of documents; some rows are the documents themselves."""

from __future__ import annotations

import hashlib
import json
import random
import reprlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.hub.files import read_utf8
from hf_specdec.training.answer_files import (
    BATCHES_PER_FILE,
    AnswerSettings,
    Task,
    end_ids,
    read_answers,
    training_rows,
    write_files,
)
from hf_specdec.training.continuation import Prompt
from hf_specdec.training.data import check_documents, documents_hash, mix, pack_text, plain_rows
from hf_specdec.training.features import fingerprint
from hf_specdec.training.options import TrainOptions
from hf_specdec.training.source import HELD_OUT, RowSource, Written, check_width, trained_mode

DOCUMENT_LENGTH = 2000  # characters per document of a .txt file
HELD_OUT_SHARE, MOST_HELD_OUT = 8, 128  # one held-out row for this many rows to train on, and at most so many
TEMPERATURES = (0.0, 0.0, 0.0, 0.8)


@dataclass(frozen=True)
class Corpus:
    """Text to train on if neither --text nor --data is given.

    Attributes:
        description: for the drafter's record.
        read: returns training and held-out documents.
    """

    description: str
    read: Callable[[], tuple[list[str], list[str]]]


class TextSource(RowSource):
    """Beginnings of documents that the target continues, and a share of rows of the documents themselves."""

    option = "text"

    def __init__(
        self,
        options: TrainOptions,
        corpus: Corpus | None,
        tokenizer: PreTrainedTokenizerBase,
        dtype: torch.dtype,
    ) -> None:
        self.options, self.tokenizer, self.dtype = options, tokenizer, dtype
        self.new_tokens = options.new_tokens or 192
        corpus = chosen_corpus(options.text, corpus)
        self.description, (self.texts, held_out) = corpus.description, corpus.read()
        self.train_ids, self.held_out_ids = tokenizer(self.texts)["input_ids"], tokenizer(held_out)["input_ids"]
        self.documents = self.train_ids + self.held_out_ids
        self.plain: Any = None

    @property
    def identity(self) -> list[str]:
        return [documents_hash(each) for each in (self.train_ids, self.held_out_ids)]

    def check(self, target: PreTrainedModel) -> None:
        options = self.options
        width = options.prompt_tokens[1] + self.new_tokens
        check_width(width, "--prompt-tokens and --new-tokens together", target)
        for documents in (self.train_ids, self.held_out_ids):
            check_documents(documents, options.prompt_tokens[0])
        if options.plain_share:
            self.plain = pack_text(self.train_ids, width, separator_id=self.tokenizer.eos_token_id)
            plain_rows(options.rows, len(self.plain), options.plain_share)

    def write(self, target: PreTrainedModel, processes: PartialState) -> Written:
        options = self.options
        settings = AnswerSettings(TEMPERATURES, max_new_tokens=self.new_tokens, seed=options.seed)
        num_held_out = min(MOST_HELD_OUT, -(-options.rows // HELD_OUT_SHARE))

        def written(documents: list[list[int]], count: int, held_out: bool) -> list[dict[str, Any]]:
            folder = write_continuations(
                target,
                documents,
                options.work_dir,
                settings,
                count=count,
                prompt_lengths=(options.prompt_tokens[0], options.prompt_tokens[1]),
                held_out=held_out,
                worker=(processes.process_index, processes.num_processes),
                max_minutes=None if held_out else options.write_minutes,
            )
            processes.wait_for_everyone()
            return read_answers(folder, f"give more time than --write-minutes {options.write_minutes:g}.")[:count]

        own = written(self.train_ids, options.rows, False)
        held_out = training_rows(written(self.held_out_ids, num_held_out, True))
        rows: Any = training_rows(own)
        if self.plain is not None:
            rows = mix(rows, self.plain, options.plain_share)
        ended = sum(row["ended"] for row in own) / len(own)
        record = {
            "rows_written_by_target": len(own),
            "tokens_written_by_target": sum(len(row["answer_ids"]) for row in own),
            "share_of_rows_that_end": round(ended, 3),
            "rows_of_plain_text": len(rows) - len(own),
        }
        return Written(rows, held_out, record, trained_mode(self.tokenizer, self.texts), ended)


def write_continuations(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    folder: Path,
    settings: AnswerSettings,
    *,
    count: int,
    prompt_lengths: tuple[int, int],
    held_out: bool = False,
    worker: tuple[int, int] = (0, 1),
    max_minutes: float | None = None,
) -> Path:
    """Lets the target continue the beginnings of documents, and writes the texts to disk as JSONL.

    Args:
        model: the target.
        documents: token ids of the documents whose beginnings are the prompts.
        folder: parent of the folder of the files, which is named after target, documents and settings. A line is a
            text: `prompt_ids`; `answer_ids`, the continuation; `ended`, whether it ends with an end-of-text token.
        settings: of the continuations.
        count: texts to write.
        prompt_lengths: shortest and longest prompt in tokens; all prompts of a file have the same length.
        held_out: recorded with the settings: the texts are not to be trained on.
        worker: (rank, number of workers); this call writes every n-th file.
        max_minutes: no file is begun after this time.

    Returns:
        The folder of the files.

    Raises:
        ValueError: no document is long enough for a prompt.
    """
    check_documents(documents, prompt_lengths[0])
    by_length, ends = sorted(documents, key=len), end_ids(model)
    size, longest = settings.batch_size * BATCHES_PER_FILE, min(prompt_lengths[1], len(by_length[-1]) - 1)

    def task(number: int, draw: random.Random) -> Task:
        # One length per file, so that no prompt is padded.
        length = random.Random(f"{settings.seed} {number // size}").randint(prompt_lengths[0], longest)
        fitting = range(bisect_right(by_length, length, key=len), len(by_length))
        prompt = list(by_length[random.Random(f"{settings.seed} document {number}").choice(fitting)][:length])
        answer = yield Prompt(prompt, settings.max_new_tokens, settings.temperature_of(number), ends)
        return [{"prompt_ids": prompt, "answer_ids": answer, "ended": answer[-1] in ends}]

    origin = {"documents": documents_hash(documents), "prompt_lengths": list(prompt_lengths), "held_out": held_out}
    name = hashlib.sha256(repr((fingerprint(model), settings, origin)).encode()).hexdigest()[:12]
    own = folder / f"continuations-{name}"
    write_files(model, count, task, own, settings, origin, worker=worker, max_minutes=max_minutes)
    return own


def chosen_corpus(text: Path | None, default: Corpus | None) -> Corpus:
    """The text of --text, or else the default; one of them is given."""
    if text is not None:
        return Corpus(str(text), partial(read_text, text))
    assert default is not None
    return default


def read_text(file: Path) -> tuple[list[str], list[str]]:
    """Training and held-out documents of a .jsonl file with a field "text", or of a .txt file; every 50th held out.

    Raises:
        ValueError: the file is not UTF-8, a line is not a JSON object with a text, or there are fewer than 2 documents.
    """
    text = read_utf8(file)
    if file.suffix == ".jsonl":
        # Not splitlines(), which also splits at characters that JSON strings may contain.
        lines = enumerate(text.split("\n"), 1)
        documents = [_document(line, f"Line {number} of {str(file)!r}") for number, line in lines if line.strip()]
    else:
        documents = [text[start : start + DOCUMENT_LENGTH] for start in range(0, len(text), DOCUMENT_LENGTH)]
    if len(documents) < 2:
        raise ValueError(
            f"{str(file)!r} holds {len(documents)} documents (lines of .jsonl, {DOCUMENT_LENGTH} characters of .txt), "
            "and the first is held out, so nothing is left to train on: give more text."
        )
    held_out = documents[::HELD_OUT]
    return [document for index, document in enumerate(documents) if index % HELD_OUT], held_out


def _document(line: str, place: str) -> str:
    """The text of a line of JSON; `place` is the file and line for errors."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON: {error.msg}, column {error.colno}.") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        raise ValueError(f'{place} must be a JSON object with a string "text", not {reprlib.repr(entry)}.')
    text: str = entry["text"]
    return text
