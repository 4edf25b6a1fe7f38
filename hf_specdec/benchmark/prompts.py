"""Prompt sets: the bundled one, a JSONL file, or the field's sets by name through `datasets`.

A set is a list of `Prompt`s with a group each, so that a speedup can be told for code and for chat apart. What a chat
template makes of them is decided in `hf_specdec/chat_template.py`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_specdec import chat_template
from hf_specdec.chat_template import Message, Thinking
from hf_specdec.drafters.registry import unknown_name

SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
# Spec-Bench's six groups: the eight categories of MT-Bench are one of them.
SPEC_BENCH_GROUPS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")


@dataclass(frozen=True)
class Prompt:
    """What is asked, and which group of the set it belongs to.

    Attributes:
        text: the question; of a conversation the last one.
        group: its name.
        before: what was said before it, where it is part of a conversation.
    """

    text: str
    group: str
    before: tuple[Message, ...] = ()


@dataclass(frozen=True)
class NamedSet:
    """Where a published set lies, and what in it is the prompt.

    Attributes:
        repo: dataset on the Hub, or a builder of `datasets` such as "json".
        split: of it.
        field: column of the prompt; dots lead into nested columns, and of a list (of turns) the first entry counts.
        config: of the dataset.
        template: around the prompt.
        group_field: column that names the group; the set's own name where None.
        files: for builders.
        groups: group by value of that column, for those that go by another name.
        other_group: of all values that `groups` does not have; None for the value itself.
    """

    repo: str
    split: str
    field: str
    config: str | None = None
    template: str = "{}"
    group_field: str | None = None
    files: str | None = None
    groups: Mapping[str, str] = dataclasses.field(default_factory=dict)
    other_group: str | None = None


NAMED_SETS: dict[str, NamedSet] = {
    "spec-bench": NamedSet(
        "json",
        "train",
        "turns",
        files=SPEC_BENCH,
        group_field="category",
        groups={name: name for name in SPEC_BENCH_GROUPS},
        other_group="mt_bench",
    ),
    "mt-bench": NamedSet("HuggingFaceH4/mt_bench_prompts", "train", "prompt", group_field="category"),
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
    """The prompts of a set, groups taking turns so that a limit leaves every group its share.

    Args:
        source: a JSONL file, or a name in `NAMED_SETS`.
        limit: most prompts; None for all.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: no set goes by this name, or a line has no prompt.
        ImportError: a named set is asked for and `datasets`, or what it downloads with, is not installed.
        OSError: a named set cannot be reached.
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
    return _taking_turns(prompts)[:limit]


def read_jsonl(path: Path) -> list[Prompt]:
    """Lines of {"prompt": text}, with an optional "group"; "turns" and "category" are read too, "source" by its root.

    A line may be a conversation instead, {"messages": [{"role": ..., "content": ...}, ...]}: its last question is the
    prompt, and every question before it must have its answer.

    Raises:
        ValueError: a line is no JSON object or has no prompt, or there is none at all.
    """
    prompts = []
    # Not splitlines(): JSON may hold what else that takes for the end of a line.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
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
    """The last message of a conversation up to its last question, and those before it."""
    try:
        said = [{"role": str(message["role"]), "content": str(message["content"])} for message in messages]
    except (TypeError, KeyError) as error:
        raise ValueError(f'{where}: "messages" must be a list of objects with "role" and "content".') from error
    while said and said[-1]["role"] != "user":
        said.pop()
    roles = [message["role"] for message in said if message["role"] != "system"]
    if roles[::2].count("user") != len(roles[::2]) or roles[1::2].count("assistant") != len(roles[1::2]):
        raise ValueError(
            f"{where}: questions and answers must take turns, but the roles are {', '.join(roles)}. Let "
            "`hf-specdec write` answer the questions first; it writes the messages with their answers."
        )
    return (said[-1]["content"], tuple(said[:-1])) if said else (None, ())


def read_named(name: str, known: NamedSet) -> list[Prompt]:
    """The prompts of a set of this description, in its order; raises ImportError and OSError as `load_prompts` does."""
    files = {} if known.files is None else {"data_files": known.files}
    try:
        from datasets import load_dataset

        rows = load_dataset(known.repo, known.config, split=known.split, **files)
    except ImportError as error:  # of `datasets`, or from within: it does not itself require what it downloads with
        raise ImportError(
            f"The prompt set {name!r} is read with `datasets` and, from a URL, `aiohttp`, but {error}: pip install "
            "'hf_specdec[bench]'. Prompts from a JSONL file need neither."
        ) from error
    except (OSError, ValueError) as error:  # `datasets` raises either, by what it finds in its cache
        raise OSError(
            f"The prompt set {name!r} ({known.files or known.repo}, split {known.split!r}) cannot be read: {error}. It "
            "is downloaded on first use: try again online, or give --prompts a JSONL file."
        ) from error
    prompts = []
    for row in rows:
        value = _first(_at(row, known.field))
        group = name if known.group_field is None else str(row[known.group_field])
        group = known.groups.get(group, known.other_group or group)
        prompts.append(Prompt(known.template.format(value), group))
    return prompts


def _at(row: Any, field: str) -> Any:
    for key in field.split("."):
        row = row[key]
    return row


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def _taking_turns(prompts: Iterable[Prompt]) -> list[Prompt]:
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.group, []).append(prompt)
    longest = max(map(len, groups.values()))
    return [own[turn] for turn in range(longest) for own in groups.values() if turn < len(own)]


def render(prompt: Prompt, tokenizer: Any, *, chat: bool, thinking: Thinking) -> str:
    """The text that is tokenised: the prompt as it is, or as the tokenizer's chat template wraps it."""
    if not chat:
        return prompt.text
    question = {"role": "user", "content": prompt.text}
    return chat_template.render([*prompt.before, question], tokenizer, thinking=thinking)
