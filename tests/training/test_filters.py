"""Rows that are not worth training on are left out, and counted by their reason."""

from __future__ import annotations

import random

import pytest

from hf_specdec.training.filters import useful_answers


def row(answer, prompt=(1, 2, 3)):
    return {"prompt_ids": list(prompt), "answer_ids": list(answer)}


def drawn(length, seed):
    return random.Random(seed).choices(range(1000), k=length)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([7], "empty"),
        (drawn(20, 2) + drawn(13, 3), "held_out"),
        (drawn(30, 5)[:20] + drawn(5, 6), "near_duplicate"),
    ],
)
def test_a_row_is_left_out_for_its_reason(answer, reason):
    first = row(drawn(30, 5))
    assert useful_answers([first, row(answer)], held_out=[drawn(13, 3)]) == ([first], {reason: 1}, 0)


def test_an_answer_is_cut_before_it_says_the_same_for_the_fourth_time():
    begun, loop = drawn(20, 1), drawn(9, 2)
    written = row(begun + loop * 5) | {"ended": True}
    assert useful_answers([written]) == ([row(begun + loop * 3 + loop[:7]) | {"ended": False}], {}, 1)


@pytest.mark.parametrize(
    "answer",
    [
        [7, 8],
        drawn(8, 1) * 3,
        drawn(20, 2) + drawn(13, 3)[:12],
        drawn(30, 5)[:20] + drawn(20, 6),
    ],
)
def test_a_row_just_within_the_bounds_stays(answer):
    rows = [row(drawn(30, 5)), row(answer)]
    assert useful_answers(rows, held_out=[drawn(13, 3)]) == (rows, {}, 0)


def test_a_held_out_text_in_the_prompt_counts_too():
    assert useful_answers([row([4, 5], prompt=drawn(13, 3))], held_out=[drawn(13, 3)]) == ([], {"held_out": 1}, 0)


def test_later_turns_of_one_conversation_are_not_duplicates_of_its_first():
    first = row(drawn(40, 1))
    later = row(drawn(40, 2), prompt=first["prompt_ids"] + first["answer_ids"])
    assert useful_answers([first, later])[1] == {}
