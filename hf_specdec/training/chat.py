"""Training text from conversations: the target answers every user message in its own chat template.

A conversation is a list of messages in the usual layout, `{"role": ..., "content": ...}`. Answers that the data holds
are not used, because a drafter must foresee what its target says. One answer gives one row: the tokens of the
conversation up to it, and its own, the only ones that a loss should be taken of. The command is in `write.py`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, TopPLogitsWarper

from hf_specdec.chat_template import Message
from hf_specdec.drafters.card import is_hub_id
from hf_specdec.training.data import datasets_package
from hf_specdec.training.features import fingerprint
from hf_specdec.training.progress import TokenProgress

RECIPE_FILE = "recipe.json"
QUESTIONS_PER_FILE = 64  # made up together
QUESTION_TOKENS, QUESTION_TOP_P = 160, 0.95
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Conversation:
    """Who says what, without the answers that are still to be written.

    Attributes:
        messages: an optional system message, then user messages.
        group: a name that figures are given by.
    """

    messages: tuple[Message, ...]
    group: str

    @property
    def num_turns(self) -> int:
        """Answers to write."""
        return sum(message["role"] == "user" for message in self.messages)


def read_conversations(source: str) -> list[Conversation]:
    """Reads objects with a list "messages" and an optional "group"; assistant messages are left out.

    Args:
        source: a JSONL file, or what `datasets.load_dataset` takes: a Hub id or a folder, of which the split "train" is
            read.

    Raises:
        OSError: the source cannot be read.
        ValueError: an entry is no object with messages, names an unknown role, holds a message that is no text, or has
            no user message to answer. The entry is named.
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
    """The Hub id that `read_conversations` reads a source by; None for files and folders."""
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
    kept = []
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
        kept.append({"role": role, "content": message["content"]})
    if not any(message["role"] == "user" for message in kept):
        raise ValueError(f"{where} has no user message, so there is no answer to write.")
    return Conversation(tuple(kept), str(fields.get("group", default_group)))


def write_questions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    folder: str | Path,
    *,
    seed: int = 0,
    worker: tuple[int, int] = (0, 1),
) -> None:
    """Lets the target make up questions, and keeps them on disk: where a user's message would begin, it writes one.

    An assistant was trained on conversations, and writes such as it was trained on, of all kinds. Questions that come
    to no end are dropped. Files depend on their number and the seed alone, as those of `write_answers`.
    Source: Magpie, arXiv 2406.08464, Section 2.

    Args:
        model: the target.
        tokenizer: its tokenizer, with a chat template.
        count: to ask for, rounded up to whole files; a few less are kept.
        folder: where the files go; `read_questions` reads them.
        seed: of sampling.
        worker: (rank, number of workers); this call writes every n-th file.

    Raises:
        ValueError: the tokenizer has no chat template, or one in which a question has no beginning or end.
    """
    check_template(tokenizer)
    opening, ends = _around_question(tokenizer)
    ends |= end_ids(model)
    own, (rank, workers) = Path(folder), worker
    own.mkdir(parents=True, exist_ok=True)
    numbers = range(rank, -(-count // QUESTIONS_PER_FILE), workers)
    files = {number: own / f"questions-{seed}-{number:06d}.jsonl" for number in numbers}
    missing = {number: file for number, file in files.items() if not file.exists()}
    stream = None if rank == 0 else io.StringIO()
    with TokenProgress("target asks", len(missing) * QUESTIONS_PER_FILE * QUESTION_TOKENS, stream=stream) as progress:
        for number, file in missing.items():
            draw = torch.Generator(model.device).manual_seed(seed * 1_000_003 + number)
            room = [QUESTION_TOKENS] * QUESTIONS_PER_FILE
            prompts = [opening] * QUESTIONS_PER_FILE
            written = answers(model, prompts, room, 1.0, draw, progress, top_p=QUESTION_TOP_P, ends=ends)
            progress.skip(sum(room) - sum(map(len, written)))
            texts = [tokenizer.decode(ids[:-1]).strip() for ids in written if ids[-1] in ends]
            lines = [{"messages": [{"role": "user", "content": text}], "group": "own"} for text in texts if text]
            _write_lines(file, lines)


def read_questions(folder: str | Path, count: int, *, seed: int = 0) -> list[Conversation]:
    """The questions that `write_questions` wrote when it was asked for as many, none twice."""
    files = [Path(folder) / f"questions-{seed}-{number:06d}.jsonl" for number in range(-(-count // QUESTIONS_PER_FILE))]
    read = [each for file in files if file.stat().st_size for each in read_conversations(str(file))]
    return list({each.messages[0]["content"]: each for each in read}.values())


def _around_question(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], set[int]]:
    """The tokens before a user's first message, and those that may end it."""
    mark = "(mark)"
    text = str(tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False))
    before, _, after = text.partition(mark)
    opening, ending = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))
    if not opening or not ending:
        raise ValueError(
            f"In the chat template of {tokenizer.name_or_path!r} a question has no "
            f"{'end' if opening else 'beginning'} of its own, so its model cannot make one up. Give conversations."
        )
    return list(opening), {ending[0]}


@dataclass(frozen=True)
class AnswerSettings:
    """How answers are written.

    Attributes:
        temperature: 0 is greedy.
        max_new_tokens: of one answer; a longer one is cut.
        max_length: most tokens of a conversation with its answer: an answer that would pass it is cut, and a turn that
            leaves no room for an answer is not asked.
        batch_size: conversations per forward and file.
        seed: of sampling.
    """

    temperature: float = 0.0
    max_new_tokens: int = 384
    max_length: int = 768
    batch_size: int = 32
    seed: int = 0


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
    """Lets the target answer every user message, and keeps the answers on disk as JSONL.

    One batch of conversations is one file. A file depends on its number and the recipe alone, so an interrupted call
    goes on where it stopped, and several processes can share the work.

    Args:
        model: the target.
        tokenizer: its tokenizer, with a chat template.
        conversations: what is to be answered.
        folder: where the files go. A line is an answer: `group`; `turn`, from 0; `prompt_ids`, the conversation up to
            the answer as the template renders it; `answer_ids`; `ended`, whether they end with an
            end-of-text token; `messages`, the answer included. How they were written is in `recipe.json`.
        settings: of the answers.
        dataset: Hub id of the conversations, which drafters trained on the answers name on their cards.
        worker: (rank, number of workers); this call writes every n-th file.

    Returns:
        The files of this worker.

    Raises:
        ValueError: the folder holds answers that were written otherwise, or the tokenizer has no chat template.
    """
    check_template(tokenizer)
    recipe = {
        "target": fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "chat_template": _template_hash(tokenizer),
        "conversations": hashlib.sha256(repr(list(conversations)).encode()).hexdigest(),
        "dataset": dataset,
        **asdict(settings),
    }
    own = Path(folder)
    own.mkdir(parents=True, exist_ok=True)
    _check_recipe(own / RECIPE_FILE, recipe)
    rank, workers = worker
    size = settings.batch_size
    batches = [conversations[start : start + size] for start in range(0, len(conversations), size)]
    files = {number: own / f"answers-{number:06d}.jsonl" for number in range(rank, len(batches), workers)}
    missing = [number for number, file in files.items() if not file.exists()]
    turns = sum(each.num_turns for number in missing for each in batches[number])
    stream = None if rank == 0 else io.StringIO()  # one process tells of its share
    with TokenProgress("target answers", turns * settings.max_new_tokens, stream=stream) as progress:
        for number in missing:
            draw = torch.Generator(model.device).manual_seed(settings.seed * 1_000_003 + number)
            rows = _answer_batch(model, tokenizer, batches[number], settings, draw, progress)
            _write_lines(files[number], rows)
    return list(files.values())


def _write_lines(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Writes JSONL under its final name only when it is whole."""
    unfinished = file.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    unfinished.rename(file)


def is_answers(source: str) -> bool:
    """Whether `source` is a folder that `write_answers` wrote into."""
    return (Path(source) / RECIPE_FILE).is_file()


def read_answers(folder: Path) -> list[dict[str, Any]]:
    """The answers that lie in a folder by now, as `write_answers` describes them.

    Raises:
        ValueError: there are none yet.
    """
    files = sorted(folder.glob("answers-*.jsonl"))
    answers = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").split("\n") if line]
    if not answers:
        raise ValueError(f"{str(folder)!r} holds no answers yet. Let `hf-specdec write` go on with it first.")
    return answers


def check_answers(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError if another model wrote the answers in a folder, or wrote them in another chat template."""
    recipe = json.loads((folder / RECIPE_FILE).read_text())
    if recipe["target"] != fingerprint(model, getattr(torch, recipe["dtype"])):
        raise ValueError(
            f"The answers in {str(folder)!r} were not written by target {model.name_or_path!r}: its config or weights "
            "differ. A drafter must foresee what its own target says: let `hf-specdec write` answer again with it."
        )
    if recipe["chat_template"] != _template_hash(tokenizer):
        raise ValueError(
            f"The answers in {str(folder)!r} were written in another chat template than the one of "
            f"{tokenizer.name_or_path!r} now. Put that one back, or let `hf-specdec write` answer again."
        )


def _template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    return hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError if there is no chat template to ask in."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"The tokenizer of {tokenizer.name_or_path!r} has no chat template, so its model cannot be asked in "
            "conversations. Train on text instead, with `hf-specdec train --text`."
        )


def _check_recipe(file: Path, recipe: dict[str, Any]) -> None:
    """Writes the recipe beside the answers, or compares it with the one that is there."""
    if not file.exists():
        file.write_text(json.dumps(recipe, indent=2) + "\n")
    earlier = json.loads(file.read_text())
    changed = [
        f"{name} {earlier.get(name)!r}, now {value!r}" for name, value in recipe.items() if earlier.get(name) != value
    ]
    if changed:
        raise ValueError(
            f"{str(file.parent)!r} holds answers that were written otherwise: {'; '.join(changed)}. Give what they "
            "were written with, to go on, or another folder."
        )


def _answer_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: Sequence[Conversation],
    settings: AnswerSettings,
    draw: torch.Generator,
    progress: TokenProgress,
) -> Iterator[dict[str, Any]]:
    """Answers the first user message of all conversations, then the second, and so on."""
    talks = [[message for message in each.messages if message["role"] == "system"] for each in batch]
    questions = [[message for message in each.messages if message["role"] == "user"] for each in batch]
    for turn in range(max(map(len, questions))):
        asked = []
        for index, own in enumerate(questions):
            if turn >= len(own):
                continue
            talks[index].append(own[turn])
            ids = tokenizer.apply_chat_template(talks[index], add_generation_prompt=True, return_dict=False)
            if len(ids) < settings.max_length:
                asked.append((index, list(ids)))
            else:
                progress.skip((len(own) - turn) * settings.max_new_tokens)
                questions[index] = own[:turn]  # the later turns would be longer still
        if not asked:
            return
        prompts = [ids for _, ids in asked]
        room = [min(settings.max_new_tokens, settings.max_length - len(ids)) for ids in prompts]
        written = answers(model, prompts, room, settings.temperature, draw, progress)
        progress.skip(len(asked) * settings.max_new_tokens - sum(map(len, written)))
        for (index, ids), answer in zip(asked, written, strict=True):
            text = tokenizer.decode(answer, skip_special_tokens=True)
            talks[index].append({"role": "assistant", "content": text})
            yield {
                "group": batch[index].group,
                "turn": turn,
                "prompt_ids": ids,
                "answer_ids": answer,
                "ended": answer[-1] in end_ids(model),
                "messages": list(talks[index]),
            }


@torch.no_grad()
def answers(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    room: Sequence[int],
    temperature: float,
    draw: torch.Generator,
    progress: TokenProgress,
    *,
    top_p: float = 1.0,
    ends: Set[int] | None = None,
) -> list[list[int]]:
    """Continues prompts of different lengths to the end of text; rows that have ended leave the batch.

    Args:
        model: the target.
        prompts: token ids.
        room: most tokens of each answer.
        temperature: 0 is greedy.
        draw: on the model's device, for sampling.
        progress: told of every token.
        top_p: of sampling, the share of the likeliest tokens that is drawn from.
        ends: tokens that end an answer; those of the model where None.

    Returns:
        The tokens of each answer, with the end-of-text token where it came.
    """
    ends = end_ids(model) if ends is None else ends
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    written: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))
    cache = DynamicCache(config=model.config)
    while True:
        logits = model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        chosen = _choose(logits, temperature, top_p, draw).tolist()
        for row, token in zip(rows, chosen, strict=True):
            written[row].append(token)
        progress.add(len(rows))
        left = [
            place
            for place, (row, token) in enumerate(zip(rows, chosen, strict=True))
            if token not in ends and len(written[row]) < room[row]
        ]
        if not left:
            return written
        ids = torch.tensor([[chosen[place]] for place in left], device=model.device)
        if len(left) < len(rows):
            kept = torch.tensor(left, device=model.device)
            cache.batch_select_indices(kept)
            mask, positions, rows = mask[kept], positions[kept], [rows[place] for place in left]
        mask = torch.cat([mask, mask.new_ones(len(left), 1)], 1)
        positions = positions[:, -1:] + 1


def end_ids(model: PreTrainedModel) -> set[int]:
    """The tokens that end a text."""
    end = model.generation_config.eos_token_id
    return {end} if isinstance(end, int) else set(end or ())


def _choose(logits: Tensor, temperature: float, top_p: float, draw: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_p < 1:
        logits = TopPLogitsWarper(top_p)(None, logits)
    return torch.multinomial(logits.softmax(-1), 1, generator=draw).squeeze(1)
