"""Training on conversations: the target answers every user message in its chat template (`conversation_answers.py`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.training.answer_files import (
    RECIPE_FILE,
    AnswerSettings,
    check_answers,
    is_answers,
    read_answers,
    training_rows,
)
from hf_specdec.training.conversation_answers import check_template, dataset_id, read_conversations, write_answers
from hf_specdec.training.data import documents_hash
from hf_specdec.training.filters import useful_answers
from hf_specdec.training.options import TrainOptions
from hf_specdec.training.source import HELD_OUT, RowSource, Written, check_width, trained_mode

MODE_DOCUMENTS = 200  # documents from which the kind of text is determined


class ConversationSource(RowSource):
    """Conversations whose user messages the target answers, and folders of earlier answers."""

    option = "data"

    def __init__(self, options: TrainOptions, tokenizer: PreTrainedTokenizerBase) -> None:
        assert options.data is not None, "TextSource is for the other case"
        check_template(tokenizer)
        self.tokenizer, self.description = tokenizer, " ".join(options.data)
        self.settings = AnswerSettings(
            temperatures=tuple(options.temperature),
            max_new_tokens=options.new_tokens or 384,
            max_length=options.max_length,
            seed=options.seed,
        )
        self.work_dir, self.mix, self.sources = options.work_dir, options.mix, options.data
        self.excluded = [
            list(tokenizer(message["content"], add_special_tokens=False)["input_ids"])
            for conversation in (read_conversations(options.exclude) if options.exclude is not None else [])
            for message in conversation.messages
        ]
        self.answered = [Path(source) for source in options.data if is_answers(source)]
        self.unanswered = {source: read_conversations(source) for source in options.data if not is_answers(source)}
        answers = [row for folder in self.answered for row in read_answers(folder)]
        self.documents = [row["prompt_ids"] + row["answer_ids"] for row in answers]
        questions = [
            tokenizer.apply_chat_template([dict(message)], return_dict=False)
            for conversations in self.unanswered.values()
            for conversation in conversations
            for message in conversation.messages
            if message["role"] == "user"
        ]
        self.documents += [list(ids) for ids in questions]

    @property
    def identity(self) -> list[str]:
        settings = hashlib.sha256(
            repr((self.settings, [*self.unanswered.values()], self.excluded, *(self.mix or ()))).encode()
        ).hexdigest()
        return [documents_hash(self.documents), settings]

    def check(self, target: PreTrainedModel) -> None:
        for folder in self.answered:
            check_answers(folder, target, self.tokenizer)
        if self.unanswered:
            check_width(self.settings.max_length, "--max-length", target)

    def write(self, target: PreTrainedModel, processes: PartialState) -> Written:
        folders = {source: Path(source) for source in self.sources if source not in self.unanswered}
        worker = (processes.process_index, processes.num_processes)
        for source, conversations in self.unanswered.items():
            name = hashlib.sha256(repr((source, conversations, self.settings)).encode()).hexdigest()[:12]
            folder = folders[source] = self.work_dir / f"answers-{name}"
            dataset = dataset_id(source)
            write_answers(target, self.tokenizer, conversations, folder, self.settings, dataset=dataset, worker=worker)
        processes.wait_for_everyone()
        written = []
        for source, folder in folders.items():
            rows = read_answers(folder)
            written += [
                row | {"source": source, "opening": each} for row, each in zip(rows, openings_of(rows), strict=True)
            ]
        answers, dropped, num_cut = useful_answers(written, self.excluded)
        if dropped or num_cut:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items()) or "none"
            processes.print(
                f"{len(written) - len(answers):,} of {len(written):,} rows are not trained on: {reasons}; {num_cut:,} "
                "are cut where they loop"
            )
        openings = [row["opening"] for row in answers]
        held_out_openings = set(list(dict.fromkeys(openings))[::HELD_OUT])
        if len(held_out_openings) == len(set(openings)):
            raise ValueError(
                f"{self.description} holds {len(held_out_openings)} conversation. The first and every {HELD_OUT}th "
                "after it are held out, so nothing is left to train on: give more."
            )
        splits: tuple[list[Any], list[Any]] = [], []
        for beginning, row in zip(openings, answers, strict=True):
            splits[beginning in held_out_openings].append(row)
        if self.mix is not None:
            splits = self._mixed(splits[0], self.mix), splits[1]
        texts = [self.tokenizer.decode(row["prompt_ids"] + row["answer_ids"]) for row in answers[:MODE_DOCUMENTS]]
        mode = trained_mode(self.tokenizer, texts) | {"chat_template": True}
        ended = sum(row["ended"] for row in answers) / len(answers)
        recipes = [json.loads((each / RECIPE_FILE).read_text()) for each in folders.values()]
        record = {
            "rows_written_by_target": len(written),
            "rows_left_out": dropped,
            "rows_cut_at_a_loop": num_cut,
            "tokens_written_by_target": sum(len(row["answer_ids"]) for row in answers),
            "share_of_rows_that_end": round(ended, 3),
            **({} if self.mix is None else {"mix": self.mix, "rows_after_mixing": len(splits[0])}),
            "temperatures": sorted({value for recipe in recipes for value in recipe["temperatures"]}),
        }
        datasets = list(dict.fromkeys(recipe["dataset"] for recipe in recipes if recipe.get("dataset")))
        train, held_out = (training_rows(split) for split in splits)
        return Written(train, held_out, record, mode, ended, datasets)

    def _mixed(self, rows: list[Any], shares: Sequence[float]) -> list[Any]:
        """As many rows of each source as give the shares of --mix, none twice; in their order."""
        numbers = [[at for at, row in enumerate(rows) if row["source"] == source] for source in self.sources]
        counts = mixed_counts([len(own) for own in numbers], shares)
        if 0 in counts:
            sizes = ", ".join(f"{source!r} {len(own)}" for source, own in zip(self.sources, numbers, strict=True))
            raise ValueError(
                f"--mix {' '.join(map(str, shares))} leaves a source without rows to train on; there are {sizes}. "
                "Give more conversations of the smallest, or other shares."
            )
        draw = torch.Generator().manual_seed(self.settings.seed)
        chosen = []
        for own, count in zip(numbers, counts, strict=True):
            chosen += [own[at] for at in torch.randperm(len(own), generator=draw)[:count].tolist()]
        return [rows[at] for at in sorted(chosen)]


def openings_of(rows: Sequence[dict[str, Any]]) -> list[tuple[int, ...]]:
    """The first prompt of the conversation of each row, by which rows are split.

    All turns of a conversation, and its answers at other temperatures, are in the same split.

    Args:
        rows: in the order of their conversations and turns.
    """
    openings: list[tuple[int, ...]] = []
    for row in rows:
        openings.append(openings[-1] if row["turn"] and openings else tuple(row["prompt_ids"]))
    return openings


def mixed_counts(counts: Sequence[int], shares: Sequence[float]) -> list[int]:
    """How many of these rows give a mixture with these shares, as large as possible without using one twice.

    Examples:
        >>> mixed_counts([1000, 90], [0.7, 0.3])
        [210, 90]
    """
    largest = min(count / share for count, share in zip(counts, shares, strict=True))
    return [min(count, round(largest * share)) for count, share in zip(counts, shares, strict=True)]
