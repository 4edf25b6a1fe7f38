"""Rounds without a draft, as many as a policy likes: what a drafter reads afterwards is longer, row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_specdec.decoding.exchange import DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.policies import DraftingPolicy
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.methods.merged import MergedDrafter
from hf_specdec.methods.ssd import SSDDrafter
from tests.chains import assisted_loop
from tests.method_table import (
    METHODS,
    make_causal_lm,
    make_causal_lm_chain,
    make_ngram,
    make_specbranch,
    make_suffix,
)
from tests.targets import make_target

NEW = 40
SCHEDULES = {"from the start": [7, 1, 12, 0, 3], "at once": [0, 2, 0, 20, 1], "short": [1], "long": [0, 0, 30]}


class Pausing(DraftingPolicy):
    """Skips so many rounds before each one that drafts; the last number goes on."""

    def __init__(self, pauses: list[int]) -> None:
        super().__init__()
        self.pauses, self.skipped = list(pauses), 0
        self.drafted: list[bool] = []  # of each round

    def choose(self, generator: TreeCandidateGenerator, context: DraftContext) -> DraftTree:
        self.drafted.append(self.skipped == self.pauses[0])
        if not self.drafted[-1]:
            self.skipped += 1
            return DraftTree.root_only(context.root_ids)
        self.skipped, self.pauses = 0, self.pauses[1:] or self.pauses
        return generator.draft(context)


def batch(rows: int = 6) -> dict[str, Any]:
    """Prompts of 5 tokens, of which the last rows have four, three, two and one."""
    ids = torch.randint(3, 60, (rows, 5), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : max(0, 5 + row - rows)] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}


def ending_early(target: Any, arguments: dict[str, Any], row: int) -> dict[str, Any]:
    """With an end of text that one row writes at once, the others as late as possible."""
    written = target.generate(**arguments)[:, arguments["input_ids"].shape[1] :].tolist()
    others = [tokens for at, tokens in enumerate(written) if at != row]
    end = max(written[row][:3], key=lambda token: min([*tokens, token].index(token) for tokens in others))
    return {**arguments, "eos_token_id": end}


def paused(drafter: Drafter, pauses: list[int], monkeypatch: pytest.MonkeyPatch) -> Drafter:
    if isinstance(drafter, torch.nn.Module):
        drafter.to(torch.float64)
    monkeypatch.setattr(type(drafter), "drafting_policy", lambda self, model, batch, stats: Pausing(pauses))
    return drafter


@pytest.mark.parametrize("leaving", [True, False], ids=["rows leave", "rows stay"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("method", METHODS)
def test_pauses_of_any_length_change_nothing(
    method: str, schedule: str, leaving: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not leaving:
        monkeypatch.setattr("hf_specdec.decoding.loop.SpeculativeDecoding.may_drop_rows", False)
    target = make_target("llama", "sdpa")
    drafter = paused(METHODS[method](target), SCHEDULES[schedule], monkeypatch)
    for row in (0, 5):
        arguments = ending_early(target, batch(), row)
        assisted = target.generate(**arguments, assistant_model=drafter)
        assert assisted.tolist() == target.generate(**arguments).tolist(), row


def merged_chain(target: Any) -> MergedDrafter:
    return MergedDrafter(make_causal_lm(target, noise=0.0), make_suffix(target), make_ngram(target), tree_budget=64)


# Drafters that are the target itself: whatever they have read, they foresee all that it writes.
PERFECT = {
    "causal_lm_chain": lambda target: make_causal_lm_chain(target, noise=0.0),
    "causal_lm_tree": lambda target: make_causal_lm(target, noise=0.0),
    "specbranch": lambda target: make_specbranch(target, noise=0.0, h_rad=False),
    "specbranch in turn": lambda target: make_specbranch(target, noise=0.0, h_rad=False, parallel=False),
    "ssd": lambda target: SSDDrafter(make_causal_lm(target, noise=0.0), tree_budget=8, trial=False),
    "merged": merged_chain,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PERFECT)
def test_after_a_pause_every_row_is_read_to_its_end(name: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_specdec.decoding.loop.SpeculativeDecoding.may_drop_rows", False)
    target = make_target("llama", "sdpa")
    policy = Pausing(SCHEDULES[schedule])
    drafter = PERFECT[name](target)
    monkeypatch.setattr(type(drafter), "drafting_policy", lambda self, model, batch, stats: policy)
    arguments = ending_early(target, batch(), 0)
    assisted = target.generate(**arguments, assistant_model=drafter)
    assert assisted.tolist() == target.generate(**arguments).tolist()
    assert drafter.stats is not None
    for row in drafter.stats.per_step_accepted:  # its last round may end with its root
        assert [count > 0 for count in row[:-1]] == policy.drafted[: len(row) - 1]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [name for name in PERFECT if name != "merged"])  # whose best path may be another's
def test_in_the_loop_of_transformers_too(name: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target("llama", "sdpa")
    policy = Pausing(SCHEDULES[schedule])
    drafter = PERFECT[name](target)
    monkeypatch.setattr(type(drafter), "drafting_policy", lambda self, model, batch, stats: policy)
    arguments = batch(1)
    with assisted_loop(), pytest.warns(UserWarning, match="drafts chains"):
        assisted = target.generate(**arguments, assistant_model=drafter)
    assert assisted.tolist() == target.generate(**arguments).tolist()
    assert drafter.stats is not None
    (row,) = drafter.stats.per_step_accepted
    assert [count > 0 for count in row[:-1]] == policy.drafted[: len(row) - 1]
