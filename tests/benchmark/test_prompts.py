from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hf_specdec.benchmark.prompts import NAMED_SETS, NamedSet, Prompt, load_prompts, read_named, render
from hf_specdec.benchmark.run import tokenise
from tests.targets import tiny_tokenizer


def write(path: Path, *lines: Any) -> str:
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(path)


def test_groups_take_turns_so_that_a_limit_leaves_each_its_share(tmp_path: Path) -> None:
    lines = [{"prompt": f"a{index}", "group": "a"} for index in range(3)] + [{"turns": ["b0", "b1"], "category": "b"}]
    source = write(tmp_path / "own.jsonl", *lines)
    assert load_prompts(source) == [Prompt("a0", "a"), Prompt("b0", "b"), Prompt("a1", "a"), Prompt("a2", "a")]
    assert load_prompts(source, 2) == [Prompt("a0", "a"), Prompt("b0", "b")]


def test_without_a_group_the_source_or_the_files_name_is_it(tmp_path: Path) -> None:
    source = write(tmp_path / "own.jsonl", {"prompt": "x", "source": "torch/nn.py"}, {"prompt": "y"})
    assert load_prompts(source) == [Prompt("x", "torch"), Prompt("y", "own")]


def test_prompts_may_hold_any_character_that_json_allows(tmp_path: Path) -> None:
    text = "one\u2028two\u2029three\u0085four"
    (tmp_path / "own.jsonl").write_text(json.dumps({"prompt": text}, ensure_ascii=False), encoding="utf-8")
    assert load_prompts(str(tmp_path / "own.jsonl")) == [Prompt(text, "own")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "x"}', "{"], "own.jsonl, line 2 is not JSON"),
        (['{"text": ""}'], "line 1 has no prompt"),
        (["[1]"], "line 1 has no prompt"),
        (['{"messages": [{"role": "assistant", "content": "x"}]}'], "line 1 has no prompt"),
        (['{"messages": "x"}'], 'line 1: "messages" must be a list of objects with "role" and "content"'),
        (
            ['{"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]}'],
            "line 1: user and assistant messages must alternate, but the roles are user, user. Let `hf-specdec write`",
        ),
        ([], "holds no prompts"),
    ],
)
def test_a_file_that_is_no_prompt_set_raises(tmp_path: Path, lines: list[str], message: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message):
        load_prompts(str(path))


def test_a_file_that_is_missing_and_a_name_that_nobody_knows_raise() -> None:
    with pytest.raises(FileNotFoundError, match=r"no prompt file 'nowhere/own.jsonl'"):
        load_prompts("nowhere/own.jsonl")
    with pytest.raises(ValueError, match="Unknown prompt set 'gsm'. Did you mean 'gsm8k'"):
        load_prompts("gsm")


def test_a_named_set_offline_says_what_to_do() -> None:
    pytest.importorskip("datasets")
    with pytest.raises(
        OSError, match=r"'gsm8k' \(openai/gsm8k, split 'test'\) cannot be read: .*give --prompts a JSONL"
    ):
        load_prompts("gsm8k")


def test_a_named_set_without_datasets_names_the_extra(lacking: Callable[[str], None]) -> None:
    lacking("datasets")
    with pytest.raises(ImportError, match=r"pip install '\.\[bench\]' in a checkout of hf_specdec"):
        load_prompts("alpaca")


def test_a_named_set_without_what_datasets_downloads_with_names_the_extra(lacking: Callable[[str], None]) -> None:
    pytest.importorskip("datasets")
    lacking("s3fs")
    with pytest.raises(ImportError, match=r"'own' .*Install s3fs.*pip install '\.\[bench\]' in a checkout.* JSONL"):
        read_named("own", NamedSet("json", "train", "prompt", files="s3://bucket/prompts.jsonl"))


# What a row of each set looks like, as its dataset card says.
ROWS = {
    "spec-bench": {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
    "mt-bench": {"prompt": ["first", "second"], "prompt_id": 1, "category": "writing", "reference": []},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "first", "test": ""},
    "gsm8k": {"question": "first", "answer": "1"},
    "math-500": {"problem": "first", "solution": "1"},
    "alpaca": {"instruction": "first", "input": "", "output": ""},
    "nq": {"question": "first", "answer": ["1"]},
    "wmt-23": {"de-en": {"de": "first", "en": "zuerst"}},
    "cnn-dm": {"article": "first", "highlights": "", "id": "1"},
}


@pytest.mark.parametrize("name", NAMED_SETS)
def test_every_named_set_finds_its_prompt(name: str, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    known = NAMED_SETS[name]
    write(tmp_path / f"{known.split}.jsonl", ROWS[name])  # `datasets` reads the split from a file of its name
    (prompt,) = read_named(name, replace(known, repo=str(tmp_path), config=None, files=None))
    assert prompt.text.endswith("first")
    assert prompt.group == {"spec-bench": "mt_bench", "mt-bench": "writing"}.get(name, name)


def test_a_prompt_is_used_as_it_is_or_in_the_chat_template() -> None:
    tokenizer = tiny_tokenizer().__class__(tokenizer_object=tiny_tokenizer()._tokenizer)
    tokenizer.chat_template = "<{{ messages[0].content }}>"
    prompt = Prompt("ab", "own")
    assert render(prompt, tokenizer, chat=False, thinking="default") == "ab"
    assert render(prompt, tokenizer, chat=True, thinking="default") == "<ab>"


def test_the_last_question_of_a_conversation_is_the_prompt_behind_what_was_said_before(tmp_path: Path) -> None:
    said = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in said]
    (prompt,) = load_prompts(write(tmp_path / "own.jsonl", {"messages": messages, "group": "talk"}))
    assert prompt == Prompt("c", "talk", tuple(messages[:3]))
    tokenizer = tiny_tokenizer().__class__(tokenizer_object=tiny_tokenizer()._tokenizer)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert render(prompt, tokenizer, chat=True, thinking="default") == "sabc"


def test_text_of_a_chat_template_gets_no_second_begin_of_text() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer()._tokenizer, bos_token="z")
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="z $A", special_tokens=[("z", 25)])
    tokenizer.chat_template = "z{{ messages[0].content }}"
    for chat in (True, False):
        text = render(Prompt("ab", "own"), tokenizer, chat=chat, thinking="default")
        assert tokenise(tokenizer, [text], chat=chat)["input_ids"].tolist() == [[25, 0, 1]]
