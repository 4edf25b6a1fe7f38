"""Conversations as training text: what is read, and that the answers are the target's own."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoTokenizer

from hf_specdec.training.chat import answers, read_conversations, write_answers
from tests.targets import EOS, VOCAB, fresh_target

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
TALK = {"messages": [{"role": "user", "content": "a = 1"}], "group": "code"}


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained("examples/tiny-code/target")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def target(tokenizer):
    return fresh_target(dtype=torch.float64, attention="sdpa", vocab_size=len(tokenizer))


def conversations(tmp_path, *talks):
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    return read_conversations(file)


def talk(*texts, system=None):
    first = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": first + [{"role": "user", "content": text} for text in texts]}


def test_answers_of_a_ragged_batch_are_those_of_plain_generate():
    target = fresh_target(dtype=torch.float64, attention="sdpa")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (3, 9, 5, 12)]
    greedy = answers(target, prompts, [10] * 4, 0.0)
    # Whatever the first row says third ends texts from now on, so that rows leave the batch at different times.
    target.generation_config.eos_token_id = [EOS, greedy[0][2]]
    written = answers(target, prompts, [10, 10, 4, 10], 0.0)
    for prompt, answer, room in zip(prompts, written, [10, 10, 4, 10], strict=True):
        alone = target.generate(torch.tensor([prompt]), max_new_tokens=room, do_sample=False)
        assert answer == alone[0, len(prompt) :].tolist()
    assert len({len(answer) for answer in written}) > 1


def test_sampled_answers_follow_the_target():
    target = fresh_target(dtype=torch.float64, attention="sdpa")
    prompt = [5, 9, 2, 7]
    probs = (target(torch.tensor([prompt])).logits[0, -1] / 0.7).softmax(-1)
    draws = 20_000
    torch.manual_seed(3)
    tokens = torch.tensor([answer[0] for answer in answers(target, [prompt] * draws, [1] * draws, 0.7)])
    counts = torch.bincount(tokens, minlength=len(probs))
    # Five sigma for each token: a false alarm in about one run of 20,000.
    assert ((counts - draws * probs).abs() <= 5 * (draws * probs * (1 - probs)).sqrt() + 1).all()


def test_each_user_message_gets_an_answer_and_later_turns_see_the_earlier_answers(target, tokenizer, tmp_path):
    data = conversations(tmp_path, talk("x = 1", "why", system="Say it short."), talk("y"))
    rows = write_answers(target, tokenizer, data, tmp_path, max_new_tokens=5, batch_size=2)
    assert [(row["turn"], len(row["messages"])) for row in rows] == [(0, 3), (0, 2), (1, 5)]
    for row in rows:
        prompt = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, return_dict=False)
        assert row["prompt_ids"] == list(prompt)
        alone = target.generate(torch.tensor([row["prompt_ids"]]), max_new_tokens=5, do_sample=False)
        assert row["answer_ids"] == alone[0, len(prompt) :].tolist()
        assert row["messages"][-1]["content"] == tokenizer.decode(row["answer_ids"], skip_special_tokens=True)
    assert rows[2]["messages"][2] == rows[0]["messages"][2]


def test_answers_of_the_data_are_not_used(tmp_path):
    given = [*TALK["messages"], {"role": "assistant", "content": "no"}, {"role": "user", "content": "b"}]
    (read,) = conversations(tmp_path, {"messages": given})
    assert [message["content"] for message in read.messages] == ["a = 1", "b"]
    assert read.group == "talks", "the file's name where no group is given"


def test_interrupted_writing_goes_on_and_workers_share_the_work(target, tokenizer, tmp_path):
    data = conversations(tmp_path, *[talk(f"x = {number}") for number in range(5)])
    settings = {"max_new_tokens": 4, "batch_size": 2, "temperature": 0.9}
    whole = write_answers(target, tokenizer, data, tmp_path / "whole", **settings)
    second = write_answers(target, tokenizer, data, tmp_path / "parts", worker=(1, 2), **settings)
    assert second == whole[2:4]
    (part,) = (tmp_path / "parts").glob("*/part-*")
    written = part.stat().st_mtime_ns
    assert write_answers(target, tokenizer, data, tmp_path / "parts", **settings) == whole
    assert part.stat().st_mtime_ns == written, "a part that is there is not written again"


def test_an_answer_ends_where_the_row_is_full_and_no_turn_follows(target, tokenizer, tmp_path):
    data = conversations(tmp_path, talk("x = 1", "why"))
    prompt = tokenizer.apply_chat_template(list(data[0].messages[:1]), add_generation_prompt=True, return_dict=False)
    (row,) = write_answers(target, tokenizer, data, tmp_path, max_new_tokens=50, max_length=len(prompt) + 3)
    assert len(row["answer_ids"]) == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"talks.jsonl, line 2 is not JSON"),
        ('{"text": "x"}', r'line 2 has no list "messages"'),
        ('{"messages": [{"role": "robot", "content": "x"}]}', r"line 2, message 0: role 'robot' is unknown"),
        ('{"messages": [{"role": "user", "content": 3}]}', r"line 2, message 0: content must be text, not 3"),
        ('{"messages": [{"role": "system", "content": "x"}]}', r"line 2 has no user message"),
        (
            '{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]}',
            r"line 2, message 1: a system message may only be the first one",
        ),
    ],
)
def test_lines_that_cannot_be_used_are_named(tmp_path, line, message):
    file = tmp_path / "talks.jsonl"
    file.write_text(json.dumps(TALK) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_conversations(file)
