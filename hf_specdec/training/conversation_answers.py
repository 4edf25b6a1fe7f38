"""Training text from conversations: the target answers every user message in its own chat template.

A conversation is a list of messages `{"role": ..., "content": ...}`. Answers in the data are not used, because a
drafter has to predict its target's answers. Each answer gives one row: the tokens of the conversation before it, and
its own tokens; only those are trained on. The command is in `write.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.chat_template import Message
from hf_specdec.drafting.registry import is_hub_id
from hf_specdec.hub.files import read_utf8
from hf_specdec.training.answer_files import AnswerSettings, Task, end_ids, template_hash, write_files
from hf_specdec.training.continuation import Prompt
from hf_specdec.training.data import datasets_package

QUESTION_TOKENS = 160
# How a request about a text may begin; the target writes the rest of the line, so that no two requests are alike.
REQUESTS = ("Summarize", "Rewrite the", "Translate the following", "Extract", "Explain this", "Find", "Shorten")
REQUEST_TOKENS = 40
ROLES = ("system", "user", "assistant")
TRAIN_ON_TEXT = "Train on text instead, with `hf-specdec train --text`."


@dataclass(frozen=True)
class Conversation:
    """Messages without answers.

    Attributes:
        messages: an optional system message, then user messages.
        group: a label, under which results may be reported.
    """

    messages: tuple[Message, ...]
    group: str


def read_conversations(source: str) -> list[Conversation]:
    """Reads objects with a list "messages" and an optional "group"; assistant messages are left out.

    Args:
        source: a JSONL file, or an argument of `datasets.load_dataset`: a Hub id or a folder, whose split "train" is
            read.

    Raises:
        OSError: the source cannot be read.
        ValueError: an entry is not an object with messages, has an unknown role, a message that is not text, or no user
            message. The error names the entry.
    """
    path = Path(source)
    if path.is_file():
        lines = enumerate(read_utf8(path).split("\n"), start=1)
        entries = ((f"{path}, line {number}", _parsed(line, number, path)) for number, line in lines if line.strip())
    elif path.suffix in (".json", ".jsonl"):
        raise FileNotFoundError(f"There is no file {source!r}. Give a JSONL file, or the id of a dataset on the Hub.")
    else:
        rows = datasets_package().load_dataset(source, split="train")
        entries = ((f"{source}, row {number}", row) for number, row in enumerate(rows))
    conversations = [_conversation(entry, where, path.stem) for where, entry in entries]
    if not conversations:
        raise ValueError(f'{source} holds no conversations; each entry must be an object with a list "messages".')
    return conversations


def dataset_id(source: str) -> str | None:
    """The source if it is a Hub id; None for files and folders."""
    return source if is_hub_id(source) and not source.endswith((".json", ".jsonl")) else None


def _parsed(line: str, number: int, path: Path) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {number} is not JSON: {error}. Each line must be an object with messages."
        ) from error


def _conversation(fields: Any, where: str, default_group: str) -> Conversation:
    messages = fields.get("messages") if isinstance(fields, dict) else None
    if not isinstance(messages, list):
        raise ValueError(f'{where} has no list "messages": {fields!r:.80}.')
    asked = []
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise ValueError(f"{where}, message {index}: role {role!r} is unknown; roles are {', '.join(ROLES)}.")
        if role == "assistant":
            continue
        if not isinstance(message.get("content"), str):
            raise ValueError(f"{where}, message {index}: content must be text, not {message.get('content')!r:.80}.")
        if role == "system" and index > 0:
            raise ValueError(f"{where}, message {index}: a system message may only be the first one.")
        asked.append({"role": role, "content": message["content"]})
    if not any(message["role"] == "user" for message in asked):
        raise ValueError(f"{where} has no user message, so there is no answer to write.")
    return Conversation(tuple(asked), str(fields.get("group", default_group)))


def write_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    folder: str | Path,
    settings: AnswerSettings,
    *,
    dataset: str | None = None,
    worker: tuple[int, int] = (0, 1),
) -> list[Path]:
    """Lets the target answer every user message, and writes the answers to disk as JSONL.

    Args:
        model: the target.
        tokenizer: its tokenizer, with a chat template.
        conversations: to answer.
        folder: of the files. A line is an answer: `group`; `turn`, from 0; `temperature`; `prompt_ids`, the
            conversation before the answer in the chat template; `answer_ids`; `ended`, whether they end with an
            end-of-text token; `messages`, including the answer. The settings are in `recipe.json`.
        settings: of the answers.
        dataset: Hub id of the conversations, for the cards of drafters trained on the answers.
        worker: (rank, number of workers); this call writes every n-th file.

    Returns:
        The files of this worker.

    Raises:
        ValueError: the folder holds answers with other settings, or the tokenizer has no chat template.
    """
    writer = _Writer(model, tokenizer, settings)

    def task(number: int, draw: Random) -> Task:
        return writer.answer(conversations[number], number, draw)

    asked = hashlib.sha256(repr(list(conversations)).encode()).hexdigest()
    origin = {"chat_template": template_hash(tokenizer), "conversations": asked, "dataset": dataset}
    return write_files(model, len(conversations), task, Path(folder), settings, origin, worker=worker)


def write_invented(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    folder: str | Path,
    settings: AnswerSettings,
    *,
    texts: Sequence[str] = (),
    worker: tuple[int, int] = (0, 1),
) -> list[Path]:
    """Lets the target invent user messages and answer them; the files are those of `write_answers`.

    An assistant model was trained on conversations, so it continues the opening of a user message with a request like
    those of its training data. With `texts` it continues a verb such as "Summarize", and a text follows the request.
    Messages without an end are dropped. Source: Magpie, arXiv 2406.08464, Section 2.

    Args:
        model: the target.
        tokenizer: its tokenizer, with a chat template.
        count: messages to invent; slightly fewer are kept, and a later call may ask for more.
        folder: of the files.
        settings: of the answers.
        texts: what the requests are about, one each; at most as many requests are written.
        worker: (rank, number of workers); this call writes every n-th file.

    Returns:
        The files of this worker.

    Raises:
        ValueError: as for `write_answers`, or the chat template has no tokens before or after a user message.
    """
    writer = _Writer(model, tokenizer, settings)
    around_user_message(tokenizer, [])  # refuses a template before the folder is made

    def task(number: int, draw: Random) -> Task:
        return writer.invent(number, texts[number] if texts else "", draw)

    count, about = min(count, len(texts)) if texts else count, hashlib.sha256(repr(list(texts)).encode()).hexdigest()
    origin = {"chat_template": template_hash(tokenizer), "conversations": "invented", "texts": about}
    return write_files(model, count, task, Path(folder), settings, origin, worker=worker)


def check_template(tokenizer: PreTrainedTokenizerBase, way_out: str = TRAIN_ON_TEXT) -> None:
    """Raises ValueError, with this way out, if the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"The tokenizer of {tokenizer.name_or_path!r} has no chat template, so its model cannot answer "
            f"conversations. {way_out}"
        )


class _Writer:
    """Continues conversations in the chat template of a target."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: AnswerSettings) -> None:
        check_template(tokenizer)
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.ends = end_ids(model)

    def answer(self, conversation: Conversation, number: int, draw: Random) -> Task:
        """Answers all user messages, and with `follow_ups` perhaps one more that is invented; returns the rows."""
        settings, temperature, rows = self.settings, self.settings.temperature_of(number), []
        history = [message for message in conversation.messages if message["role"] == "system"]
        questions = [message for message in conversation.messages if message["role"] == "user"]
        last = len(questions) - 1
        for turn, question in enumerate(questions):  # grows by an invented one
            history.append(question)
            ids = self.tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=False)
            if len(ids) >= settings.max_length:  # later turns would be longer
                break
            room = min(settings.max_new_tokens, settings.max_length - len(ids))
            answer = yield Prompt(ids, room, temperature, self.ends)
            ended = answer[-1] in self.ends
            text = self.tokenizer.decode(answer, skip_special_tokens=True)
            history.append({"role": "assistant", "content": text})
            rows.append(
                {
                    "group": conversation.group,
                    "turn": turn,
                    "temperature": temperature,
                    "prompt_ids": list(ids),
                    "answer_ids": answer,
                    "ended": ended,
                    "messages": list(history),
                }
            )
            if turn == last and ended and draw.random() < settings.follow_ups:
                message = yield from self.user_message(history)
                if message:
                    questions.append({"role": "user", "content": message})
        return rows

    def user_message(self, history: Sequence[Message], beginning: str = "") -> Generator[Prompt, list[int], str]:
        """The next user message of a conversation, as the target invents it; "" for one without an end.

        Args:
            history: the messages before it.
            beginning: its first words; it then ends with its first line or colon.
        """
        opening, end = around_user_message(self.tokenizer, history)
        begun = self.tokenizer(beginning, add_special_tokens=False)["input_ids"]
        ends, most = {*self.ends, end}, QUESTION_TOKENS
        if beginning:
            ends, most = ends | self.line_ends, REQUEST_TOKENS
        ids = yield Prompt([*opening, *begun], most, 1.0, ends)
        return self.tokenizer.decode([*begun, *ids], skip_special_tokens=True).strip() if ids[-1] in ends else ""

    @cached_property
    def line_ends(self) -> set[int]:
        """The tokens with the end of a line, or a colon."""
        return {token for token in range(len(self.tokenizer)) if set(":\n") & set(self.tokenizer.decode([token]))}

    def invent(self, number: int, about: str, draw: Random) -> Task:
        """Invents a user message, with a text that it is about unless that is "", and answers it; returns the rows."""
        message = yield from self.user_message([], REQUESTS[number % len(REQUESTS)] if about else "")
        if not message:
            return []
        text, group = (f"{message}\n\n{about}", "texts") if about else (message, "invented")
        return (yield from self.answer(Conversation(({"role": "user", "content": text},), group), number, draw))


def around_user_message(tokenizer: PreTrainedTokenizerBase, history: Sequence[Message]) -> tuple[list[int], int]:
    """The tokens before the next user message of a conversation, and the token id that ends it.

    Raises:
        ValueError: the chat template has none.
    """
    mark = "(mark)"
    messages = [*history, {"role": "user", "content": mark}]
    before, _, after = str(tokenizer.apply_chat_template(messages, tokenize=False)).rpartition(mark)
    opening, ending = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))
    if not opening or not ending:
        raise ValueError(
            f"The chat template of {tokenizer.name_or_path!r} has no tokens {'after' if opening else 'before'} a "
            "question, so its model cannot generate one. Give conversations with --data."
        )
    return list(opening), ending[0]
