"""Training text from conversations: the target answers every user message in its own chat template.

A conversation is a list of messages `{"role": ..., "content": ...}`. Answers in the data are not used, because a
drafter has to predict its target's answers. Each answer gives one row: the tokens of the conversation before it, and
its own tokens; only those are trained on. The command is in `write.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, TopPLogitsWarper

from hf_specdec.chat_template import Message
from hf_specdec.drafters.card import is_hub_id
from hf_specdec.training.data import datasets_package
from hf_specdec.training.features import fingerprint
from hf_specdec.training.progress import token_progress

RECIPE_FILE = "recipe.json"
QUESTIONS_PER_FILE = 64  # generated as one batch
QUESTION_TOKENS, QUESTION_TOP_P = 160, 0.95
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Conversation:
    """Messages without answers.

    Attributes:
        messages: an optional system message, then user messages.
        group: a label, under which results may be reported.
    """

    messages: tuple[Message, ...]
    group: str

    @property
    def num_turns(self) -> int:
        """Number of answers to write."""
        return sum(message["role"] == "user" for message in self.messages)


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


def write_questions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    folder: str | Path,
    *,
    seed: int = 0,
    worker: tuple[int, int] = (0, 1),
) -> None:
    """Lets the target generate questions, and writes them to disk: it continues the start of a user message.

    An assistant model was trained on conversations, so it writes questions like those of its training data. Questions
    without an end are dropped. A file depends only on its number and the seed, as in `write_answers`.
    Source: Magpie, arXiv 2406.08464, Section 2.

    Args:
        model: the target.
        tokenizer: its tokenizer, with a chat template.
        count: questions to generate, rounded up to complete files; slightly fewer are kept.
        folder: of the files, for `read_questions`.
        seed: of sampling.
        worker: (rank, number of workers); this call writes every n-th file.

    Raises:
        ValueError: the tokenizer has no chat template, or its template has no tokens before or after a question.
    """
    check_template(tokenizer)
    opening, ends = _around_question(tokenizer)
    ends |= end_ids(model)
    own, (rank, workers) = Path(folder), worker
    own.mkdir(parents=True, exist_ok=True)
    numbers = range(rank, -(-count // QUESTIONS_PER_FILE), workers)
    files = {number: own / f"questions-{seed}-{number:06d}.jsonl" for number in numbers}
    missing = {number: file for number, file in files.items() if not file.exists()}
    total = len(missing) * QUESTIONS_PER_FILE * QUESTION_TOKENS
    with token_progress("target writes questions", total, shown=rank == 0) as progress:
        for number, file in missing.items():
            draw = torch.Generator(model.device).manual_seed(seed * 1_000_003 + number)
            room = [QUESTION_TOKENS] * QUESTIONS_PER_FILE
            prompts = [opening] * QUESTIONS_PER_FILE
            written = answers(model, prompts, room, 1.0, draw, progress, top_p=QUESTION_TOP_P, ends=ends)
            progress.total -= sum(room) - sum(map(len, written))
            texts = [tokenizer.decode(ids[:-1]).strip() for ids in written if ids[-1] in ends]
            lines = [{"messages": [{"role": "user", "content": text}], "group": "own"} for text in texts if text]
            _write_lines(file, lines)


def read_questions(folder: str | Path, count: int, *, seed: int = 0) -> list[Conversation]:
    """The questions of `write_questions` for this `count`, without duplicates."""
    files = [Path(folder) / f"questions-{seed}-{number:06d}.jsonl" for number in range(-(-count // QUESTIONS_PER_FILE))]
    read = [each for file in files if file.stat().st_size for each in read_conversations(str(file))]
    return list({each.messages[0]["content"]: each for each in read}.values())


def _around_question(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], set[int]]:
    """The tokens before a user's first message, and the token ids that end it."""
    mark = "(mark)"
    text = str(tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False))
    before, _, after = text.partition(mark)
    opening, ending = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))
    if not opening or not ending:
        raise ValueError(
            f"The chat template of {tokenizer.name_or_path!r} has no tokens {'after' if opening else 'before'} a "
            "question, so its model cannot generate one. Give conversations with --data."
        )
    return list(opening), {ending[0]}


@dataclass(frozen=True)
class AnswerSettings:
    """Settings of the answers.

    Attributes:
        temperature: 0 is greedy.
        max_new_tokens: of one answer; longer answers are cut.
        max_length: most tokens of a conversation with its answer: longer answers are cut, and turns without space for
            an answer are skipped.
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
    """Lets the target answer every user message, and writes the answers to disk as JSONL.

    One batch of conversations is one file. A file depends only on its number and the recipe, so an interrupted call can
    be continued, and several processes can share the work.

    Args:
        model: the target.
        tokenizer: its tokenizer, with a chat template.
        conversations: to answer.
        folder: of the files. A line is an answer: `group`; `turn`, from 0; `prompt_ids`, the conversation before the
            answer in the chat template; `answer_ids`; `ended`, whether they end with an end-of-text token;
            `messages`, including the answer. The settings are in `recipe.json`.
        settings: of the answers.
        dataset: Hub id of the conversations, for the cards of drafters trained on the answers.
        worker: (rank, number of workers); this call writes every n-th file.

    Returns:
        The files of this worker.

    Raises:
        ValueError: the folder holds answers with other settings, or the tokenizer has no chat template.
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
    with token_progress("target answers", turns * settings.max_new_tokens, shown=rank == 0) as progress:
        for number in missing:
            draw = torch.Generator(model.device).manual_seed(settings.seed * 1_000_003 + number)
            rows = _answer_batch(model, tokenizer, batches[number], settings, draw, progress)
            _write_lines(files[number], rows)
    return list(files.values())


def _write_lines(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Writes JSONL; the file gets its final name when it is complete."""
    unfinished = file.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    unfinished.rename(file)


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


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError if the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"The tokenizer of {tokenizer.name_or_path!r} has no chat template, so its model cannot answer "
            "conversations. Train on text instead, with `hf-specdec train --text`."
        )


def _check_recipe(file: Path, recipe: dict[str, Any]) -> None:
    """Writes the recipe next to the answers, or compares it with the existing one."""
    if not file.exists():
        file.write_text(json.dumps(recipe, indent=2) + "\n")
    earlier = json.loads(file.read_text())
    changed = [
        f"{name} {earlier.get(name)!r}, now {value!r}" for name, value in recipe.items() if earlier.get(name) != value
    ]
    if changed:
        raise ValueError(
            f"{str(file.parent)!r} holds answers that were written with other settings: {'; '.join(changed)}. To "
            "continue, give the settings of these answers; otherwise give another folder."
        )


def _answer_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: Sequence[Conversation],
    settings: AnswerSettings,
    draw: torch.Generator,
    progress: tqdm,
) -> Iterator[dict[str, Any]]:
    """Answers the first user message of all conversations, then the second, and so on."""
    histories = [[message for message in each.messages if message["role"] == "system"] for each in batch]
    questions = [[message for message in each.messages if message["role"] == "user"] for each in batch]
    for turn in range(max(map(len, questions))):
        asked = []
        for index, own in enumerate(questions):
            if turn >= len(own):
                continue
            histories[index].append(own[turn])
            ids = tokenizer.apply_chat_template(histories[index], add_generation_prompt=True, return_dict=False)
            if len(ids) < settings.max_length:
                asked.append((index, list(ids)))
            else:
                progress.total -= (len(own) - turn) * settings.max_new_tokens
                questions[index] = own[:turn]  # later turns would be longer
        if not asked:
            return
        prompts = [ids for _, ids in asked]
        room = [min(settings.max_new_tokens, settings.max_length - len(ids)) for ids in prompts]
        written = answers(model, prompts, room, settings.temperature, draw, progress)
        progress.total -= len(asked) * settings.max_new_tokens - sum(map(len, written))
        for (index, ids), answer in zip(asked, written, strict=True):
            text = tokenizer.decode(answer, skip_special_tokens=True)
            histories[index].append({"role": "assistant", "content": text})
            yield {
                "group": batch[index].group,
                "turn": turn,
                "prompt_ids": ids,
                "answer_ids": answer,
                "ended": answer[-1] in end_ids(model),
                "messages": list(histories[index]),
            }


@torch.no_grad()
def answers(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    room: Sequence[int],
    temperature: float,
    draw: torch.Generator,
    progress: tqdm,
    *,
    top_p: float = 1.0,
    ends: Set[int] | None = None,
) -> list[list[int]]:
    """Continues prompts of different lengths to the end of text; rows that have ended are removed from the batch.

    Args:
        model: the target.
        prompts: token ids.
        room: most tokens of each answer.
        temperature: 0 is greedy.
        draw: on the model's device, for sampling.
        progress: counts every token.
        top_p: of sampling.
        ends: tokens that end an answer; None for those of the model.

    Returns:
        The tokens of each answer, including the end-of-text token if it was generated.
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
        progress.update(len(rows))
        unfinished = [
            index
            for index, (row, token) in enumerate(zip(rows, chosen, strict=True))
            if token not in ends and len(written[row]) < room[row]
        ]
        if not unfinished:
            return written
        ids = torch.tensor([[chosen[index]] for index in unfinished], device=model.device)
        if len(unfinished) < len(rows):
            selected = torch.tensor(unfinished, device=model.device)
            cache.batch_select_indices(selected)
            mask, positions, rows = mask[selected], positions[selected], [rows[index] for index in unfinished]
        mask = torch.cat([mask, mask.new_ones(len(unfinished), 1)], 1)
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
