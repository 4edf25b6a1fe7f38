"""The command `hf-specdec write`: training text for drafters, from conversations that the target answers.

It writes JSONL with the answered `messages` and their token ids. `hf-specdec train --data` reads the folder, for any
number of drafters. Without conversations, --questions lets the target generate them. The same command continues a
stopped run; several processes (`torchrun`, `accelerate launch`) share the conversations.

--pack also writes the token ids of all answers in the folder to another one, in a tenth of the bytes, and
`train --data` reads that too. Alone, `hf-specdec write --output FOLDER --pack`, it packs what is there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers.hf_argparser import HfArg

from hf_specdec.drafting.targets import target_tokenizer
from hf_specdec.hub.saving import check_writable, going_on
from hf_specdec.training.answer_files import RECIPE_FILE, AnswerSettings, answer_rows, check_apart, pack_answers
from hf_specdec.training.conversation_answers import (
    check_template,
    dataset_id,
    read_conversations,
    write_answers,
    write_invented,
)
from hf_specdec.training.number_type import chosen_bfloat16
from hf_specdec.training.options import AnswerOptions, Count, Share, parse
from hf_specdec.training.source import load_target
from hf_specdec.training.text import read_text


@dataclass(kw_only=True)
class WriteOptions(AnswerOptions):
    """Options of `hf-specdec write`."""

    sources = ("data", "questions")
    target: str = HfArg(default="", help="folder or Hub id of the model to draft for; not needed for --pack alone")
    data: str | None = HfArg(default=None, help='JSONL with "messages", or the Hub id of such a dataset')
    questions: Count | None = HfArg(
        default=None, help="instead of --data: number of user messages that the target invents"
    )
    texts: Path | None = HfArg(
        default=None, help="with --questions: .jsonl (field text) or .txt; the target invents a request about each text"
    )
    follow_ups: Share = HfArg(
        default=0.0, help="share of conversations in which the target invents one more user message and answers it"
    )
    max_new_tokens: Count = HfArg(default=384, help="most tokens of an answer")
    batch_size: Count = HfArg(default=32, help="conversations per forward")
    pack: str | None = HfArg(
        default=None,
        help="folder for the packed answers of the folder --output; without a value: packed, in that folder",
        metadata={"nargs": "?", "const": ""},
    )

    json: bool = HfArg(default=False, help="print the counts as JSON, and all else on stderr")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.texts is not None and self.questions is None:
            raise ValueError("argument --texts: has no effect without --questions, the number of requests to invent")
        if not self.target and not (self.data is None and self.questions is None):
            raise ValueError("the following arguments are required with --data and --questions: --target")


def main(argv: Sequence[str], *, program: str = "hf-specdec write") -> None:
    """Writes answers to all conversations.

    Args:
        argv: the options; `--help` lists them.
        program: the command without the options, for `--help`.

    Raises:
        OSError: the conversations or the target cannot be read.
        ValueError: a conversation, an option or the tokenizer is not valid; says which.
    """
    packs = any(argument.partition("=")[0] == "--pack" for argument in argv)
    options = parse(WriteOptions, argv, program, __doc__, required=not packs)
    packed = Path(options.pack) if options.pack else options.output / "packed"
    is_first = True
    if options.pack is not None:
        check_apart(options.output, packed)
        check_writable(packed)
    with redirect_stdout(sys.stderr if options.json else sys.stdout):
        if options.data is not None or options.questions is not None:
            is_first = _write(options)
        if options.pack is not None and is_first:
            files = pack_answers(options.output, packed)
            print(f"{packed}: {sum(file.stat().st_size for file in files):,} bytes in {len(files)} files")
    if options.json and is_first:
        print(json.dumps(counts(options.output) | {"packed": None if options.pack is None else str(packed)}, indent=2))


def _write(options: WriteOptions) -> bool:
    """Whether this is the first of the processes; all answers are written."""
    conversations = read_conversations(options.data) if options.data is not None else []
    texts = [each for split in read_text(options.texts) for each in split] if options.texts is not None else []
    # The first process to finish waits for the others, up to hours.
    processes = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=1))
    if processes.is_main_process:
        check_writable(options.output)
    tokenizer = target_tokenizer(options.target)
    check_template(tokenizer)  # before the target is loaded
    bf16 = chosen_bfloat16(processes, [options.output / RECIPE_FILE]) if options.bf16 is None else options.bf16
    target = load_target(options.target, torch.bfloat16 if bf16 else torch.float32)
    settings = AnswerSettings(
        tuple(options.temperature),
        options.follow_ups,
        options.max_new_tokens,
        options.max_length,
        options.batch_size,
        options.seed,
    )
    worker = (processes.process_index, processes.num_processes)
    with going_on(lambda: f"{summary(options.output)}, and are kept; the same command writes the others"):
        if options.questions is not None:
            write_invented(target, tokenizer, options.questions, options.output, settings, texts=texts, worker=worker)
        else:
            dataset = dataset_id(str(options.data))
            write_answers(target, tokenizer, conversations, options.output, settings, dataset=dataset, worker=worker)
    processes.wait_for_everyone()
    processes.print(summary(options.output))
    processes.destroy_process_group()
    return processes.is_main_process


def counts(folder: Path) -> dict[str, Any]:
    """The answers in a folder in numbers."""
    rows = answer_rows(folder)
    num_tokens = sum(len(row["answer_ids"]) for row in rows)
    ended = sum(row["ended"] for row in rows) / max(1, len(rows))
    return {"folder": str(folder), "answers": len(rows), "tokens": num_tokens, "complete": ended}


def summary(folder: Path) -> str:
    """One line to print about the answers in a folder."""
    return "{folder}: {answers:,} answers of {tokens:,} tokens; {complete:.0%} are complete".format(**counts(folder))
