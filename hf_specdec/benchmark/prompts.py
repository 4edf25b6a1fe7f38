"""Prompt sets: the bundled one, a JSONL file, or published sets by name through `datasets`.

A set is a list of `Prompt`s with groups, so that the speedup can be shown per group, such as code and chat.
`hf_specdec/chat_template.py` decides about the chat template.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hf_specdec import chat_template
from hf_specdec.chat_template import Message, Thinking
from hf_specdec.drafting.registry import unknown_name
from hf_specdec.hub.files import read_utf8
from hf_specdec.version import install_command

SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
# Spec-Bench's six groups: the eight categories of MT-Bench are one of them.
SPEC_BENCH_GROUPS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")


@dataclass(frozen=True)
class Prompt:
    """A prompt and its group in the set.

    Attributes:
        text: the user message; the last one of a conversation.
        group: its name.
        before: the earlier messages of a conversation.
    """

    text: str
    group: str
    before: tuple[Message, ...] = ()


@dataclass(frozen=True)
class NamedSet:
    """A published set, and its prompt column.

    Attributes:
        repo: dataset on the Hub, or a builder of `datasets` such as "json".
        split: of it.
        field: column of the prompt; dots for nested columns; of a list (of turns) the first entry is used.
        config: of the dataset.
        template: around the prompt.
        files: for builders.
        group: of a row; None for the set's own name.
    """

    repo: str
    split: str
    field: str
    config: str | None = None
    template: str = "{}"
    files: str | None = None
    group: Callable[[Any], str] | None = None


NAMED_SETS: dict[str, NamedSet] = {
    "spec-bench": NamedSet(
        "json",
        "train",
        "turns",
        files=SPEC_BENCH,
        group=lambda row: row["category"] if row["category"] in SPEC_BENCH_GROUPS else "mt_bench",
    ),
    "mt-bench": NamedSet("HuggingFaceH4/mt_bench_prompts", "train", "prompt", group=lambda row: str(row["category"])),
    "humaneval": NamedSet("openai/openai_humaneval", "test", "prompt"),
    "gsm8k": NamedSet("openai/gsm8k", "test", "question", config="main"),
    "math-500": NamedSet("HuggingFaceH4/MATH-500", "test", "problem"),
    "alpaca": NamedSet("tatsu-lab/alpaca", "train", "instruction"),
    "nq": NamedSet("google-research-datasets/nq_open", "validation", "question"),
    "wmt-23": NamedSet(
        "haoranxu/WMT23-Test",
        "test",
        "de-en.de",
        config="de-en",
        template="Translate this from German to English:\n{}",
    ),
    "cnn-dm": NamedSet(
        "abisee/cnn_dailymail", "test", "article", config="3.0.0", template="Summarize this article:\n{}"
    ),
}


def load_prompts(source: str, limit: int | None = None) -> list[Prompt]:
    """The prompts of a set, from all groups in turn, so that a limit includes every group.

    Args:
        source: a JSONL file, or a name in `NAMED_SETS`.
        limit: most prompts; None for all.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: there is no set of this name, or a line has no prompt.
        ImportError: the set needs `datasets`, or a package that `datasets` needs for downloads, which is not installed.
        OSError: a named set cannot be downloaded.
    """
    path = Path(source)
    if path.is_file():
        prompts = read_jsonl(path)
    elif source in NAMED_SETS:
        prompts = read_named(source, NAMED_SETS[source])
    elif path.suffix or len(path.parts) > 1:
        raise FileNotFoundError(
            f"There is no prompt file {source!r}. Give a JSONL file, or a named set: {', '.join(sorted(NAMED_SETS))}."
        )
    else:
        raise unknown_name("prompt set", source, NAMED_SETS)
    return _interleave(prompts)[:limit]


def read_jsonl(path: Path) -> list[Prompt]:
    """Reads lines of {"prompt": text}, with an optional "group".

    The keys "turns" and "category" are read too, and "source" up to its first slash. A line may also be a conversation,
    {"messages": [{"role": ..., "content": ...}, ...]}: its last user message is the prompt, and every earlier user
    message must have an answer.

    Raises:
        ValueError: a line is not a JSON object or has no prompt, or the file has no prompts.
    """
    prompts = []
    # Not splitlines(), which also splits at characters that JSON strings may contain.
    for number, line in enumerate(read_utf8(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error}. Each line must be an object with a prompt.") from error
        text: str | None = None
        before: tuple[Message, ...] = ()
        if isinstance(fields, dict) and "messages" in fields:
            text, before = _last_question(fields["messages"], where)
        elif isinstance(fields, dict):
            text = _first(next((fields[key] for key in ("prompt", "turns", "text") if key in fields), None))
        if not isinstance(text, str) or not text:
            raise ValueError(
                f'{where} has no prompt: {line[:80]!r}. Each line must be an object with a text "prompt" (or "turns"), '
                'or with "messages".'
            )
        group = fields.get("group") or fields.get("category") or str(fields.get("source") or path.stem).split("/")[0]
        prompts.append(Prompt(text, str(group), before))
    if not prompts:
        raise ValueError(f"{path} holds no prompts; each line must be an object with a text 'prompt'.")
    return prompts


def _last_question(messages: Any, where: str) -> tuple[str | None, tuple[Message, ...]]:
    """The last user message of a conversation, and all messages before it."""
    try:
        history = [{"role": str(message["role"]), "content": str(message["content"])} for message in messages]
    except (TypeError, KeyError) as error:
        raise ValueError(f'{where}: "messages" must be a list of objects with "role" and "content".') from error
    while history and history[-1]["role"] != "user":
        history.pop()
    roles = [message["role"] for message in history if message["role"] != "system"]
    if roles[::2].count("user") != len(roles[::2]) or roles[1::2].count("assistant") != len(roles[1::2]):
        raise ValueError(
            f"{where}: user and assistant messages must alternate, but the roles are {', '.join(roles)}. Let "
            "`hf-specdec write` answer the questions first; it writes the messages with their answers."
        )
    return (history[-1]["content"], tuple(history[:-1])) if history else (None, ())


def read_named(name: str, known: NamedSet) -> list[Prompt]:
    """The prompts of a named set, in its order; raises ImportError and OSError as `load_prompts` does."""
    files = {} if known.files is None else {"data_files": known.files}
    try:
        from datasets import load_dataset

        rows = load_dataset(known.repo, known.config, split=known.split, **files)
    except ImportError as error:  # `datasets`, or a package that it imports for downloads but does not require
        raise ImportError(
            f"The prompt set {name!r} is read with `datasets` and, from a URL, `aiohttp`, but {error}: "
            f"{install_command('bench')}. Prompts from a JSONL file need neither."
        ) from error
    except (OSError, ValueError) as error:  # `datasets` raises ValueError if its cache lacks the set
        raise OSError(
            f"The prompt set {name!r} ({known.files or known.repo}, split {known.split!r}) cannot be read: {error}. It "
            "is downloaded on first use: try again online, or give --prompts a JSONL file."
        ) from error
    prompts = []
    for row in rows:
        value = _first(functools.reduce(operator.getitem, known.field.split("."), row))
        prompts.append(Prompt(known.template.format(value), name if known.group is None else known.group(row)))
    return prompts


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def _interleave(prompts: Iterable[Prompt]) -> list[Prompt]:
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.group, []).append(prompt)
    return [prompt for turn in zip_longest(*groups.values()) for prompt in turn if prompt is not None]


def render(prompt: Prompt, tokenizer: Any, *, chat: bool, thinking: Thinking) -> str:
    """The text to tokenise: the prompt unchanged, or in the tokenizer's chat template."""
    if not chat:
        return prompt.text
    question = {"role": "user", "content": prompt.text}
    return chat_template.render([*prompt.before, question], tokenizer, thinking=thinking)
