"""Merged drafters: what the one tree holds, who is asked, and what is counted of whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_specdec import load_drafter
from hf_specdec.decoding.trace import Trace
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.methods.lookup import NGramDrafter, SuffixDrafter
from hf_specdec.methods.merged import MergedDrafter, ScoreCalibration, SourceGain
from hf_specdec.visualize import terminal_tree
from hf_specdec.visualize.tree import tree_legend, tree_svg
from tests.method_table import (
    make_causal_lm_chain,
    make_ddtree,
    make_medusa,
    make_ngram,
    make_specbound,
    make_specbranch,
)
from tests.scripted import StubDrafter, fixed_tree, right_for
from tests.targets import make_target, one_prompt
from tests.watched import Watched

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("llama", "sdpa")


def stating(token_ids: list[int], parents: list[int], path_logprobs: list[float]) -> StubDrafter:
    """The same tree below every root, with these probabilities."""

    def draft(context: Any) -> DraftTree:
        rows = range(len(context.lengths))
        return DraftTree.from_lists(
            [[int(context.root_ids[row]), *token_ids] for row in rows],
            [[-1, *parents] for _ in rows],
            path_logprobs=[[0.0, *path_logprobs] for _ in rows],
        )

    return StubDrafter(draft)


def paths_of(tree: DraftTree, row: int = 0) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, tree.num_nodes):
        if tree.valid[row, node]:
            paths.append((*paths[int(tree.parents[row, node])], int(tree.token_ids[row, node])))
    return paths[1:]


def test_the_tree_is_the_union_of_prefixes_likeliest_first(target: PreTrainedModel) -> None:
    one = stating([10, 11, 12], [0, 1, 0], [-0.1, -0.3, -2.0])
    other = stating([10, 13, 14], [0, 1, 0], [-0.5, -0.6, -1.0])
    watched = Watched(MergedDrafter(one, other, tree_budget=16))
    target.generate(**one_prompt(), **GREEDY, assistant_model=watched)
    tree = watched.rounds[0].tree
    assert set(paths_of(tree)) == {(10,), (10, 11), (12,), (10, 13), (14,)}
    assert tree.path_logprobs is not None
    stated = tree.path_logprobs[0].tolist()
    assert stated == sorted(stated, reverse=True)

    watched = Watched(MergedDrafter(one, other, tree_budget=2))
    target.generate(**one_prompt(), **GREEDY, assistant_model=watched)
    assert paths_of(watched.rounds[0].tree) == [(10,), (10, 13)], "0.9 and 0.9 * 0.9 lead"
    assert all(each.tree.num_nodes <= 3 for each in watched.rounds)


def test_what_only_one_source_knows_is_accepted(target: PreTrainedModel) -> None:
    """One source is right about the first token alone, the other about all four; each errs a lot besides."""
    script = target.generate(**one_prompt(), **GREEDY)
    short, long = right_for(1, script), right_for(4, script)
    merged = MergedDrafter(short, long, tree_budget=40)
    output = target.generate(**one_prompt(), **GREEDY, assistant_model=merged)
    assert output.tolist() == script.tolist()
    assert merged.stats is not None
    assert max(merged.stats.per_step_accepted[0]) == 4
    first, second = (merged.stats.by_source[name] for name in ("stub 1", "stub 2"))
    rounds = merged.stats.num_spec_steps
    # A source may be left out of a round, by measured times; then the other one has proposed what was accepted.
    accepted = merged.stats.num_accepted_draft_tokens
    assert max(first.num_accepted_tokens, second.num_accepted_tokens) <= accepted
    assert first.num_accepted_tokens + second.num_accepted_tokens >= accepted
    assert 0 < first.num_accepted_tokens <= rounds
    assert 0 < first.num_drafts <= rounds
    both = first.num_draft_tokens + second.num_draft_tokens
    assert max(first.num_draft_tokens, second.num_draft_tokens) <= merged.stats.num_draft_tokens <= both


def test_the_one_node_of_the_budget_goes_to_the_source_that_turns_out_right(target: PreTrainedModel) -> None:
    settings = {**GREEDY, "max_new_tokens": 60}
    script = target.generate(**one_prompt(), **settings)
    unlikely = next(token for token in range(3, 64) if token not in script[0].tolist())
    boasting, right = stating([unlikely], [0], [-0.01]), right_for(1, script, siblings=0)
    merged = MergedDrafter(boasting, right, tree_budget=1)
    target.generate(**one_prompt(), **settings, assistant_model=merged)
    assert merged.stats is not None
    accepted = merged.stats.per_step_accepted[0]
    assert accepted[0] == 0
    assert sum(accepted[-10:]) == 10


def test_a_node_that_two_sources_propose_counts_for_both(target: PreTrainedModel) -> None:
    script = target.generate(**one_prompt(), **GREEDY)
    merged = MergedDrafter(right_for(2, script, siblings=0), right_for(2, script, siblings=0), tree_budget=8)
    merged.trace = Trace()
    target.generate(**one_prompt(), **GREEDY | {"max_new_tokens": 4}, assistant_model=merged)  # in one round
    assert [each.sources for each in merged.trace.rounds] == [["", *["stub 1+stub 2"] * 3]]
    assert merged.stats is not None
    counts = [merged.stats.by_source[name] for name in ("stub 1", "stub 2")]
    assert [(each.num_draft_tokens, each.num_accepted_tokens) for each in counts] == [(3, 2)] * 2


def test_sources_are_told_of_their_own_tree_and_path(target: PreTrainedModel) -> None:
    script = target.generate(**one_prompt(), **GREEDY)
    short, long = right_for(1, script), right_for(3, script)
    target.generate(**one_prompt(), **GREEDY, assistant_model=MergedDrafter(short, long, tree_budget=40))
    seen = 0
    for drafter in (short, long):
        outcomes = [outcome for outcome in drafter.outcomes if outcome.tree is not None]
        for outcome in outcomes:
            assert outcome.path is not None
            assert outcome.tree is not None
            own = (outcome.path[0] >= 0).tolist()
            assert own == sorted(own, reverse=True), "behind a token that it has not drafted it has drafted none"
            for token, node in zip(outcome.token_ids[0].tolist(), outcome.path[0].tolist(), strict=True):
                if node >= 0:
                    assert int(outcome.tree.token_ids[0, node]) == token
                    seen += 1
        assert any((outcome.path < 0).any() for outcome in outcomes) == (drafter is short)
    assert seen


def test_a_token_that_repeats_the_root_is_no_node_of_a_tree_without_drafts(target: PreTrainedModel) -> None:
    """The root has no parent, and a token that nobody drafted has no node: the two must not be taken for each other."""
    table = target.get_output_embeddings().weight
    before = table.data.clone()
    table.data[:] = 0.0
    table.data[7] = 1.0  # every token is the same one, or 0
    try:
        script = target.generate(**one_prompt(), **GREEDY)
        nothing = StubDrafter(lambda context: DraftTree.root_only(context.root_ids))
        merged = MergedDrafter(nothing, right_for(3, script), tree_budget=40)
        assert target.generate(**one_prompt(), **GREEDY, assistant_model=merged).tolist() == script.tolist()
    finally:
        table.data.copy_(before)
    outcomes = [outcome for outcome in nothing.outcomes if outcome.tree is not None]
    assert outcomes
    assert all((outcome.path[0, 1:] < 0).all() for outcome in outcomes if outcome.path is not None)


def test_rows_of_a_batch_are_merged_each_by_itself(target: PreTrainedModel) -> None:
    prompts = {"input_ids": torch.tensor([[5, 9, 11, 4], [7, 8, 3, 6]])}
    prompts["attention_mask"] = torch.ones_like(prompts["input_ids"])
    script = target.generate(**prompts, **GREEDY)
    merged = MergedDrafter(right_for(2, script), fixed_tree([60, 61], [0, 1]), tree_budget=30)
    assert target.generate(**prompts, **GREEDY, assistant_model=merged).tolist() == script.tolist()
    assert merged.stats is not None
    assert all(max(row) == 2 for row in merged.stats.per_step_accepted)


def test_a_source_that_is_wrong_gets_fewer_nodes_and_one_that_is_right_more() -> None:
    calibration = ScoreCalibration()
    before = calibration.probability("garbage", 1, 0.9)
    assert before == pytest.approx(0.9)
    for _ in range(60):
        calibration.note("garbage", 1, 0.9, followed=False)
        calibration.note("modest", 1, 0.3, followed=True)
    assert calibration.probability("garbage", 1, 0.9) < 0.02
    assert calibration.probability("garbage", 1, 0.2) < 0.1, "what it says at other confidences is doubted too"
    assert calibration.probability("garbage", 2, 0.9) > 0.5, "of deeper nodes nothing is known yet"
    assert calibration.probability("modest", 1, 0.3) > 0.9
    assert calibration.probability("another", 1, 0.3) == pytest.approx(0.3)


def test_a_source_that_gains_less_than_its_time_rests_and_a_cheap_one_never_does() -> None:
    costly, cheap = SourceGain(), SourceGain()
    asked = {"costly": 0, "cheap": 0}
    for _ in range(1000):
        for name, source, seconds in (("costly", costly, 0.010), ("cheap", cheap, 0.0001)):
            if source.should_draft(0.0):
                asked[name] += 1
                source.add_time(seconds)
                source.note(0.0, 0.0, seconds_per_token=0.015, seconds_per_round=0.030)
    assert asked["cheap"] == 1000
    assert asked["costly"] * 0.010 < 0.02 * 1000 * 0.030, "2% of the time at most"
    for _ in range(10):  # it gains again, where it is asked: after some of them it no longer rests
        while not costly.should_draft(0.0):
            pass
        costly.note(0.0, 2.0, seconds_per_token=0.015, seconds_per_round=0.030)
    assert costly.should_draft(0.0)
    assert costly.should_draft(0.0)


def test_a_source_may_be_worth_it_only_where_the_others_expect_little() -> None:
    source = SourceGain()
    source.add_time(0.010)
    for _ in range(30):
        for expected, gain in ((0.0, 1.5), (5.0, 0.0)):
            if source.should_draft(expected):
                source.note(expected, gain, seconds_per_token=0.015, seconds_per_round=0.030)
    assert source.should_draft(0.0)
    assert not source.should_draft(5.0)


SOURCES: dict[str, Callable[[PreTrainedModel], list[Drafter]]] = {
    "a tree and a look-up": lambda target: [make_ddtree(target), NGramDrafter()],
    "heads, a draft model and a look-up": lambda target: [
        make_medusa(target), make_causal_lm_chain(target), SuffixDrafter()
    ],
}  # fmt: skip


@pytest.mark.parametrize("sources", SOURCES)
@pytest.mark.parametrize("budget", [6, "auto"])
def test_output_is_the_targets_with_every_budget(target: PreTrainedModel, sources: str, budget: Any) -> None:
    merged = MergedDrafter(*SOURCES[sources](target), tree_budget=budget)
    for _ in range(2):  # what was learned in the first call is used in the second
        output = target.generate(**one_prompt(), **GREEDY, assistant_model=merged)
        assert output.tolist() == target.generate(**one_prompt(), **GREEDY).tolist()


def test_traces_and_pictures_name_the_sources(target: PreTrainedModel) -> None:
    script = target.generate(**one_prompt(), **GREEDY)
    merged = MergedDrafter(right_for(2, script), make_ngram(target), tree_budget=20)
    merged.trace = Trace()
    target.generate(**one_prompt(), **GREEDY, assistant_model=merged)
    traced = max(merged.trace.rounds, key=lambda each: len(each.token_ids))
    assert traced.sources is not None
    assert set(traced.sources[1:]) <= {"stub", "ngram", "stub+ngram"}
    assert "stub" in traced.sources
    assert traced.origins is not None
    assert len(set(traced.origins[1:])) == len(set(traced.sources[1:]))
    assert "stub" in tree_svg(traced, str)
    assert "names and colour: the drafters that proposed the node" in tree_legend(traced, str)
    assert "stub" in terminal_tree(traced, str)


def test_load_drafter_merges_a_list(target: PreTrainedModel) -> None:
    merged = load_drafter(["ngram", make_ddtree(target)], target, tree_budget=5)
    assert isinstance(merged, MergedDrafter)
    assert merged.names == ("ngram", "ddtree")
    assert merged.options.tree_budget == 5
    target.generate(**one_prompt(), **GREEDY, assistant_model=merged)
    assert str(merged.stats).startswith("merged: ")
    assert "ngram" in str(merged.stats)


def test_what_cannot_be_merged_is_refused(target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="1 drafters were given; a merged drafter needs two or more"):
        MergedDrafter(NGramDrafter())
    same = NGramDrafter()
    with pytest.raises(ValueError, match="1 drafters were given"):
        MergedDrafter(same, same)
    for make, method in ((make_specbound, "specbound"), (make_specbranch, "specbranch")):
        with pytest.raises(ValueError, match=f"A drafter of method '{method}' cannot be merged"):
            MergedDrafter(make(target), NGramDrafter())
    with pytest.raises(ValueError, match="A drafter of method 'merged' cannot be merged"):
        MergedDrafter(MergedDrafter(NGramDrafter(), SuffixDrafter()), NGramDrafter())
    with pytest.raises(TypeError, match="must be what load_drafter returns"):
        MergedDrafter(NGramDrafter(), target)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="revision='main' was given for 2 drafters"):
        load_drafter(["ngram", "suffix"], revision="main")
    with pytest.raises(ValueError, match="tree_budget=0 must be an integer from 1"):
        MergedDrafter(NGramDrafter(), SuffixDrafter(), tree_budget=0)
