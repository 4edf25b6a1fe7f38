"""Training rows from conversations: the target's chat template is applied, and the target writes the answers.

A conversation is a list of messages in the usual layout, `{"role": ..., "content": ...}`. After each user message the
target writes its own answer; answers that the data holds are not used, because a drafter must foresee what its target
says. One answer gives one row: the tokens of the conversation up to it, then its own, of which alone losses are taken.
How rows are packed is in `data.py`; the target's hidden states for them are in `features.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.training.features import fingerprint

ROLES = ("system", "user", "assistant")
Message = dict[str, str]


@dataclass(frozen=True)
class Conversation:
    """Who says what, without the answers that are still to be written.

    Attributes:
        messages: an optional system message, then user messages.
        group: a name that figures are given by.
    """

    messages: tuple[Message, ...]
    group: str


def read_conversations(file: str | Path) -> list[Conversation]:
    """Reads JSONL lines of `{"messages": [...]}`, with an optional "group"; assistant messages are left out.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is no JSON object with messages, names an unknown role, holds a message that is no text, or
            has no user message to answer. The line is named.
    """
    path = Path(file)
    conversations = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            conversations.append(_conversation(line, f"{path}, line {number}", path.stem))
    if not conversations:
        raise ValueError(f'{path} holds no conversations; each line must be an object with a list "messages".')
    return conversations


def _conversation(line: str, where: str, default_group: str) -> Conversation:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}. Each line must be an object with messages.") from error
    messages = fields.get("messages") if isinstance(fields, dict) else None
    if not isinstance(messages, list):
        raise ValueError(f'{where} has no list "messages": {line[:80]!r}.')
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


@torch.no_grad()
def write_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    folder: str | Path,
    *,
    temperature: float = 0.0,
    max_new_tokens: int = 384,
    max_length: int = 768,
    batch_size: int = 32,
    worker: tuple[int, int] = (0, 1),
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Lets the target answer every user message, and keeps the answers on disk.

    One batch of conversations is one part on disk. A part depends on its number and the recipe alone, so an interrupted
    call goes on where it stopped, and several processes can share the work.

    Args:
        model: the target.
        tokenizer: its tokenizer, with a chat template.
        conversations: what is to be answered.
        folder: parent of the cache; a subfolder is named after the recipe, which is written into it as `recipe.json`.
        temperature: 0 is greedy.
        max_new_tokens: of one answer; a longer one is cut.
        max_length: most tokens of a conversation with its answer; an answer that would pass it is cut, and a turn
            that leaves no room for an answer is not asked.
        batch_size: conversations per part.
        worker: (rank, number of workers); this call writes every n-th part and returns its own parts only.
        seed: of sampling.

    Returns:
        One dict per answer: `group`; `turn`, from 0; `prompt_ids`, the conversation up to the answer as the template
        renders it; `answer_ids`, with the end-of-text token if there is one; and `messages`, the answer included.
    """
    recipe = {
        "target": fingerprint(model),
        "chat_template": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest(),
        "conversations": hashlib.sha256(repr([each.messages for each in conversations]).encode()).hexdigest(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "max_length": max_length,
        "batch_size": batch_size,
        "seed": seed,
    }
    name = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
    own = Path(folder) / f"answers-{name}"
    own.mkdir(parents=True, exist_ok=True)
    (own / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")
    rank, workers = worker
    batches = [conversations[start : start + batch_size] for start in range(0, len(conversations), batch_size)]
    rows, tokens, started = [], 0, time.monotonic()
    progress = tqdm(total=len(range(rank, len(batches), workers)), desc="target answers", unit="batch")
    for number in range(rank, len(batches), workers):
        part = own / f"part-{number:06d}.jsonl"
        if not part.exists():
            torch.manual_seed(seed * 1_000_003 + number)
            written = list(_answer_batch(model, tokenizer, batches[number], temperature, max_new_tokens, max_length))
            unfinished = own / f"unfinished-{number:06d}-{os.getpid()}"
            unfinished.write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")
            unfinished.rename(part)
            tokens += sum(len(row["answer_ids"]) for row in written)
            progress.set_postfix_str(f"{tokens} tokens, {tokens / (time.monotonic() - started):.0f} tokens/s")
        rows += [json.loads(line) for line in part.read_text(encoding="utf-8").splitlines()]
        progress.update()
    progress.close()
    return rows


def _answer_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: Sequence[Conversation],
    temperature: float,
    max_new_tokens: int,
    max_length: int,
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
            if len(ids) < max_length:
                asked.append((index, list(ids)))
            else:
                questions[index] = own[:turn]  # the later turns would be longer still
        if not asked:
            return
        prompts = [ids for _, ids in asked]
        room = [min(max_new_tokens, max_length - len(ids)) for ids in prompts]
        for (index, ids), answer in zip(asked, answers(model, prompts, room, temperature), strict=True):
            text = tokenizer.decode(answer, skip_special_tokens=True)
            talks[index].append({"role": "assistant", "content": text})
            yield {
                "group": batch[index].group,
                "turn": turn,
                "prompt_ids": ids,
                "answer_ids": answer,
                "messages": list(talks[index]),
            }


def answers(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], room: Sequence[int], temperature: float
) -> list[list[int]]:
    """Continues prompts of different lengths to the end of text; rows that have ended leave the batch.

    Args:
        model: the target.
        prompts: token ids.
        room: most tokens of each answer.
        temperature: 0 is greedy.

    Returns:
        The tokens of each answer, with the end-of-text token where it came.
    """
    end = model.generation_config.eos_token_id
    end_ids = {end} if isinstance(end, int) else set(end or ())
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
        chosen = _choose(logits, temperature).tolist()
        for row, token in zip(rows, chosen, strict=True):
            written[row].append(token)
        left = [
            place
            for place, (row, token) in enumerate(zip(rows, chosen, strict=True))
            if token not in end_ids and len(written[row]) < room[row]
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


def _choose(logits: Tensor, temperature: float) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits.float() / temperature).softmax(-1), 1).squeeze(1)
