"""ATLAS: an adaptive drafter and one that stays, merged; it learns from the rounds and tokens that are its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_specdec.adaptation import AdaptiveDrafter, AlwaysUpdate
from hf_specdec.adaptation.recording import Query
from hf_specdec.methods.merged import MergedDrafter
from tests.adaptation.test_adaptive_drafter import GREEDY, finish_update, prompts, weights_of
from tests.method_table import make_specblock
from tests.scripted import right_for
from tests.targets import fresh_target


class Recording(AdaptiveDrafter):
    """Keeps the queries."""

    def finish_query(self, query: Query) -> None:
        self.queries = [*getattr(self, "queries", []), query]
        super().finish_query(query)


@pytest.mark.parametrize("budget", [12, "auto"])
def test_output_stays_the_targets_own_while_the_adaptive_source_learns(budget: Any) -> None:
    target = fresh_target("llama", "sdpa", torch.float64)
    static, drafter = make_specblock(target).double(), make_specblock(target).double()
    before, stream = weights_of(drafter), prompts(5)
    alone = [target.generate(prompt, **GREEDY) for prompt in stream]
    with AdaptiveDrafter(target, drafter, policy=AlwaysUpdate(1), learning_rate=0.05) as adaptive:
        merged = MergedDrafter(static, adaptive, tree_budget=budget)
        assert merged.names == ("specblock 1", "specblock 2")
        for prompt, expected in zip(stream, alone, strict=True):
            assert torch.equal(target.generate(prompt, assistant_model=merged, **GREEDY), expected)
            finish_update(adaptive)
    assert adaptive.adaptation.updates
    assert any(not torch.equal(weight, before[name]) for name, weight in weights_of(drafter).items())
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(static).items())
    if budget != "auto":  # drafting that does not pay pauses, here too
        assert merged.stats.by_source["specblock 2"].num_drafts > 0


def test_it_records_the_part_of_the_path_that_it_has_proposed_itself() -> None:
    target = fresh_target("llama", "sdpa", torch.float64)
    prompt = prompts(1)[0]
    alone = target.generate(prompt, **GREEDY)
    script = right_for(3, alone)
    with Recording(target, make_specblock(target).double(), policy=AlwaysUpdate(10)) as adaptive:
        merged = MergedDrafter(script, adaptive, tree_budget=40)
        text = target.generate(prompt, assistant_model=merged, **GREEDY)
        assert torch.equal(text, alone)
        (query,) = adaptive.queries
    assert merged.stats.num_accepted_draft_tokens > 0
    assert query.num_accepted == merged.stats.by_source["specblock"].num_accepted_tokens
    assert query.num_accepted < merged.stats.num_accepted_draft_tokens
    row = query.rows[0]
    whole = row["input_ids"]
    assert whole.tolist() == text[0, : len(whole)].tolist()
    states = target.model(whole[None]).last_hidden_state[0]
    torch.testing.assert_close(row["last_hidden"], states)
    # Every state that is learnt from lies at a token of the text, and what the target chose there comes after it.
    for state in query.target_hidden:
        assert ((states - state).abs().amax(1) < 1e-9).any()
    following = {int(token) for token in whole[prompt.shape[1] :]}
    assert {int(token) for token in query.chosen_ids} <= following
