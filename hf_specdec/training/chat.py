"""Training text from conversations: the target answers every user message in its own chat template.

A conversation is a list of messages `{"role": ..., "content": ...}`. Answers in the data are not used, because a
drafter has to predict its target's answers. Each answer gives one row: the tokens of the conversation before it, and
its own tokens; only those are trained on. The command is in `write.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.chat_template import Message
from hf_specdec.drafters.card import is_hub_id
from hf_specdec.training.continuation import Prompt, continued
from hf_specdec.training.data import datasets_package
from hf_specdec.training.features import fingerprint
from hf_specdec.training.progress import INTERVAL_S

RECIPE_FILE = "recipe.json"
QUESTION_TOKENS = 160
BATCHES_PER_FILE = 8  # so that waiting conversations take the places of ended ones for most of the time
# How a request about a text may begin; the target writes the rest of the line, so that no two requests are alike.
REQUESTS = ("Summarize", "Rewrite the", "Translate the following", "Extract", "Explain this", "Find", "Shorten")
REQUEST_TOKENS = 40
ROLES = ("system", "user", "assistant")
TRAIN_ON_TEXT = "Train on text instead, with `hf-specdec train --text`."
Task = Generator[Prompt, list[int], list[dict[str, Any]]]  # one conversation; returns its rows


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
        lines = enumerate(path.read_text(encoding="utf-8").split("\n"), start=1)
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


@dataclass(frozen=True)
class AnswerSettings:
    """Settings of the answers.

    Attributes:
        temperatures: of the answers; conversations take them in turn. 0 is greedy.
        follow_ups: share of conversations in which the target invents one more user message and answers it.
        max_new_tokens: of one answer; longer answers are cut.
        max_length: most tokens of a conversation with its answer: longer answers are cut, and turns without space for
            an answer are skipped.
        batch_size: conversations per forward; a file has `BATCHES_PER_FILE` times as many.
        seed: of sampling.
    """

    temperatures: tuple[float, ...] = (0.0,)
    follow_ups: float = 0.0
    max_new_tokens: int = 384
    max_length: int = 768
    batch_size: int = 32
    seed: int = 0

    def temperature_of(self, number: int) -> float:
        """The temperature of a conversation, by its number."""
        return self.temperatures[number % len(self.temperatures)]


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

    A file depends only on its number and the recipe, so an interrupted call can be continued, and several processes can
    share the work.

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
    size = settings.batch_size * BATCHES_PER_FILE
    writer = _Writer(model, tokenizer, settings)

    def tasks(draw: torch.Generator, number: int) -> list[Task]:
        part = range(number * size, min((number + 1) * size, len(conversations)))
        return [writer.answer(conversations[index], index, draw) for index in part]

    origin = {"conversations": hashlib.sha256(repr(list(conversations)).encode()).hexdigest(), "dataset": dataset}
    return _write_files(writer, -(-len(conversations) // size), tasks, folder, origin, worker)


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
        count: messages to invent; slightly fewer are kept. A later call that asks for more adds files; the last file of
            the earlier call stays as short as it was.
        folder: of the files.
        settings: of the answers.
        texts: what the requests are about, one each; at most as many requests are written.
        worker: (rank, number of workers); this call writes every n-th file.

    Returns:
        The files of this worker.

    Raises:
        ValueError: as for `write_answers`, or the chat template has no tokens before or after a user message.
    """
    writer, size = _Writer(model, tokenizer, settings), settings.batch_size * BATCHES_PER_FILE
    around_user_message(tokenizer, [])  # refuses a template before the folder is made

    def tasks(draw: torch.Generator, number: int) -> list[Task]:
        part = range(number * size, min((number + 1) * size, count))
        return [writer.invent(index, texts[index] if texts else "", draw) for index in part]

    count = min(count, len(texts)) if texts else count
    origin = {"conversations": "invented", "texts": hashlib.sha256(repr(list(texts)).encode()).hexdigest()}
    return _write_files(writer, -(-count // size), tasks, folder, origin, worker)


def _write_files(
    writer: _Writer,
    num_files: int,
    tasks: Callable[[torch.Generator, int], list[Task]],
    folder: str | Path,
    origin: dict[str, Any],
    worker: tuple[int, int],
) -> list[Path]:
    """Writes the files that are missing; `tasks` makes the conversations of a file from its number."""
    model, settings = writer.model, writer.settings
    recipe = {
        "target": fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "chat_template": _template_hash(writer.tokenizer),
        **origin,
        **asdict(settings),
    }
    own, (rank, workers) = Path(folder), worker
    own.mkdir(parents=True, exist_ok=True)
    _check_recipe(own / RECIPE_FILE, json.loads(json.dumps(recipe)))
    files = {number: own / f"answers-{number:06d}.jsonl" for number in range(rank, num_files, workers)}
    missing = {number: file for number, file in files.items() if not file.exists()}
    with tqdm(missing.items(), "target writes", unit=" files", disable=rank > 0, mininterval=INTERVAL_S) as progress:
        for number, file in progress:
            draw = torch.Generator(model.device).manual_seed(settings.seed * 1_000_003 + number)
            started, written = time.perf_counter(), continued(model, tasks(draw, number), draw, settings.batch_size)
            rows = [row for conversation in written for row in conversation]
            _write_whole(file, "".join(json.dumps(row) + "\n" for row in rows))
            num_tokens = sum(len(row["answer_ids"]) for row in rows)
            progress.set_postfix_str(f"{num_tokens / (time.perf_counter() - started):.0f} tokens of answers/s")
    return list(files.values())


def _write_whole(file: Path, text: str) -> None:
    """Writes a file that gets its name when it is complete: other processes may read it, and a call may be stopped."""
    unfinished = file.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)


def is_answers(source: str) -> bool:
    """Whether `source` is a folder of `write_answers`."""
    return (Path(source) / RECIPE_FILE).is_file()


def read_answers(folder: Path) -> list[dict[str, Any]]:
    """The answers in a folder, see `write_answers` for their keys.

    Raises:
        ValueError: there are none.
    """
    files = sorted(folder.glob("answers-*.jsonl"))
    answers = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").split("\n") if line]
    if not answers:
        raise ValueError(f"{str(folder)!r} holds no answers yet: run `hf-specdec write` with this --output first.")
    return answers


def check_answers(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError if the answers in a folder were written by another model or in another chat template."""
    recipe = json.loads((folder / RECIPE_FILE).read_text())
    if recipe["target"] != fingerprint(model, getattr(torch, recipe["dtype"])):
        raise ValueError(
            f"The answers in {str(folder)!r} were not written by target {model.name_or_path!r}: its config or weights "
            "differ. A drafter has to learn from its own target: write new answers with it, with `hf-specdec write`."
        )
    if recipe["chat_template"] != _template_hash(tokenizer):
        raise ValueError(
            f"The answers in {str(folder)!r} were written in another chat template than the present one of "
            f"{tokenizer.name_or_path!r}. Restore that template, or write new answers with `hf-specdec write`."
        )


def _template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    return hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()


def check_template(tokenizer: PreTrainedTokenizerBase, way_out: str = TRAIN_ON_TEXT) -> None:
    """Raises ValueError, with this way out, if the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"The tokenizer of {tokenizer.name_or_path!r} has no chat template, so its model cannot answer "
            f"conversations. {way_out}"
        )


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


class _Writer:
    """Continues conversations in the chat template of a target."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: AnswerSettings) -> None:
        check_template(tokenizer)
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.ends = end_ids(model)

    def answer(self, conversation: Conversation, number: int, draw: torch.Generator) -> Task:
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
            if turn == last and ended and torch.rand((), generator=draw, device=draw.device) < settings.follow_ups:
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

    def invent(self, number: int, about: str, draw: torch.Generator) -> Task:
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


def end_ids(model: PreTrainedModel) -> set[int]:
    """The tokens that end a text."""
    end = model.generation_config.eos_token_id
    return {end} if isinstance(end, int) else set(end or ())
