"""Training on plain text: the target continues the beginnings of documents; some rows are the documents themselves."""

from __future__ import annotations

import json
import multiprocessing
import os
import reprlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.training.data import (
    check_documents,
    documents_hash,
    mix,
    pack_text,
    plain_rows,
    write_continuations,
)
from hf_specdec.training.options import TrainOptions
from hf_specdec.training.source import HELD_OUT, Source, Written, check_width, load_target, trained_mode

DOCUMENT_LENGTH = 2000  # characters per document of a .txt file
ROWS_PER_BATCH = 128  # prompts per batch of continuations
HELD_OUT_SHARE = 8  # one held-out row for this many rows to train on, at most one batch


@dataclass(frozen=True)
class Corpus:
    """Text to train on if neither --text nor --data is given.

    Attributes:
        description: for the drafter's record.
        read: returns training and held-out documents.
    """

    description: str
    read: Callable[[], tuple[list[str], list[str]]]


class TextSource(Source):
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
            # For the most rows that may be written; batches are complete.
            plain_rows(-(-options.rows // ROWS_PER_BATCH) * ROWS_PER_BATCH, len(self.plain), options.plain_share)

    def write(self, target: PreTrainedModel, processes: PartialState) -> Written:
        options = self.options
        workers = options.writers or (torch.get_num_threads() if target.device.type == "cpu" else 1)
        workers = min(workers, -(-options.rows // ROWS_PER_BATCH))
        settings: dict[str, Any] = {
            "folder": options.work_dir,
            "prompt_lengths": tuple(options.prompt_tokens),
            "new_tokens": self.new_tokens,
            "batch_size": ROWS_PER_BATCH,
        }
        wanted = {"num_rows": options.rows, "max_minutes": options.write_minutes, "seed": options.seed}
        with processes.main_process_first():
            if not processes.is_main_process:
                workers, wanted["max_minutes"] = 1, 0.0  # only read the rows of the main process
            own = _continuations(target, (options.target, self.dtype), self.train_ids, workers, settings | wanted)
            held_out = write_continuations(
                target,
                self.held_out_ids,
                num_rows=min(ROWS_PER_BATCH, -(-options.rows // HELD_OUT_SHARE)),
                temperatures=(0.0,),
                held_out=True,
                **settings,
            )
        rows = own if self.plain is None else mix(own, self.plain, options.plain_share)
        ended = sum(row["input_ids"][row["length"] - 1] == self.tokenizer.eos_token_id for row in own) / len(own)
        record = {
            "rows_written_by_target": len(own),
            "tokens_written_by_target": sum(own["length"]) - sum(own["first_anchor"]),
            "share_of_rows_that_end": round(ended, 3),
            "rows_of_plain_text": len(rows) - len(own),
        }
        return Written(rows, held_out, record, trained_mode(self.tokenizer, self.texts), ended)


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
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"Line {line} of {str(file)!r} is not UTF-8: byte 0x{error.object[error.start]:02x}. Convert the file "
            "first, for example with iconv."
        ) from error
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


def _write_share(
    rank: int, workers: int, target: tuple[str, torch.dtype], documents: Path, settings: dict[str, Any]
) -> None:
    """A process that writes continuations. On CPUs two processes with one thread write faster than one with two."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # in case it is not inherited from `_ignoring_sigint`
    signal.signal(signal.SIGTERM, lambda *ended: sys.exit(1))  # so that the progress bar releases its semaphore
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:  # if the main process is killed, its writers must end too
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    ids = json.loads(documents.read_text())
    write_continuations(load_target(*target), ids, worker=(rank, workers), **settings)


@contextmanager
def _ignoring_sigint() -> Iterator[None]:
    """Processes started here ignore SIGINT: their parent gets it too and ends them.

    They inherit this, so that it also holds while they import.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _continuations(
    target: PreTrainedModel,
    source: tuple[str, torch.dtype],
    documents: list[list[int]],
    workers: int,
    settings: dict[str, Any],
) -> Any:
    """The target's continuations of the documents' beginnings, written by `workers` processes.

    `source` is path and dtype of the target, for several processes.
    """
    if workers > 1:
        context = multiprocessing.get_context("spawn")
        # A file and not a pipe, which would block this process if a writer fails to start.
        file = settings["folder"] / "documents.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(documents))
        shares = [
            context.Process(target=_write_share, args=(rank, workers, source, file, settings), daemon=True)
            for rank in range(workers)
        ]
        try:
            with _ignoring_sigint():
                for share in shares:
                    share.start()
            for share in shares:
                share.join()
        finally:  # after Ctrl-C some still write
            for share in shares:
                if share.is_alive():
                    share.terminate()
                    share.join()
        if any(share.exitcode for share in shares):
            raise SystemExit("A process that wrote continuations failed; its error is above.")
        settings = settings | {"max_minutes": 0.0}  # only read the rows
    return write_continuations(target, documents, **settings)
