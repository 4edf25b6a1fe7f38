"""The command `hf-specdec write`: training text for drafters, from conversations that the target answers.

It writes JSONL with the answered `messages` and their token ids. `hf-specdec train --data` reads the folder, for any
number of drafters. Without conversations, --questions lets the target generate them. The same command continues a
stopped run; several processes (`torchrun`, `accelerate launch`) share the conversations.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import AutoTokenizer

from hf_specdec.training.chat import (
    AnswerSettings,
    check_template,
    dataset_id,
    read_conversations,
    read_questions,
    write_answers,
    write_questions,
)
from hf_specdec.training.command import check_output
from hf_specdec.training.number_type import chosen_bfloat16
from hf_specdec.training.option_types import not_negative_float, positive_int, seed_number
from hf_specdec.training.source import load_target


def main(argv: Sequence[str], *, program: str = "hf-specdec write") -> None:
    """Writes answers to all conversations.

    Args:
        argv: the options; `--help` lists them.
        program: the command without the options, for `--help`.

    Raises:
        OSError: the conversations or the target cannot be read.
        ValueError: a conversation, an option or the tokenizer is not valid; says which.
    """
    arguments = _parser(program).parse_args(argv)
    check_output(arguments.output)
    conversations = [] if arguments.data is None else read_conversations(arguments.data)
    # The first process to finish waits for the others, up to hours.
    processes = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=1))
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    check_template(tokenizer)  # before the target is loaded
    bf16 = chosen_bfloat16(processes) if arguments.bf16 is None else arguments.bf16
    target = load_target(arguments.target, torch.bfloat16 if bf16 else torch.float32)
    settings = AnswerSettings(
        arguments.temperature, arguments.max_new_tokens, arguments.max_length, arguments.batch_size, arguments.seed
    )
    worker = (processes.process_index, processes.num_processes)
    if arguments.data is None:
        folder = arguments.output / "questions"
        write_questions(target, tokenizer, arguments.questions, folder, seed=arguments.seed, worker=worker)
        processes.wait_for_everyone()
        conversations = read_questions(folder, arguments.questions, seed=arguments.seed)
    dataset = None if arguments.data is None else dataset_id(arguments.data)
    write_answers(target, tokenizer, conversations, arguments.output, settings, dataset=dataset, worker=worker)
    processes.wait_for_everyone()
    processes.print(summary(arguments.output))
    processes.destroy_process_group()


def summary(folder: Path) -> str:
    """One line to print about the answers in a folder."""
    files = folder.glob("answers-*.jsonl")
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    num_tokens = sum(len(row["answer_ids"]) for row in rows)
    ended = sum(row["ended"] for row in rows) / max(1, len(rows))
    return f"{folder}: {len(rows):,} answers of {num_tokens:,} tokens; {ended:.0%} are complete"


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--target", required=True, help="folder or Hub id of the model that answers")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", help='JSONL with "messages", or the Hub id of such a dataset')
    source.add_argument("--questions", type=positive_int, help="number of questions that the target generates itself")
    parser.add_argument("--output", type=Path, required=True, help="folder for the answers")
    parser.add_argument("--temperature", type=not_negative_float, default=0.0, help="0 is greedy")
    parser.add_argument("--max-new-tokens", type=positive_int, default=384, help="most tokens of an answer")
    parser.add_argument(
        "--max-length", type=positive_int, default=768, help="most tokens of a conversation with its answer"
    )
    parser.add_argument("--batch-size", type=positive_int, default=32, help="conversations per forward and file")
    parser.add_argument("--seed", type=seed_number, default=0, help="of sampling")
    parser.add_argument(
        "--bf16", action=argparse.BooleanOptionalAction, help="dtype of the target; default: the faster one here"
    )
    return parser
