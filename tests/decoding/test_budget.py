from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_specdec.decoding import policies
from hf_specdec.decoding.devices import Abilities
from hf_specdec.decoding.exchange import Committed, DraftContext
from hf_specdec.decoding.policies import FIRST_SIZES, AcceptanceCalibration, AutoBudget, BudgetKnowledge, RoundTimes
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.trace import Trace
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.drafter import Drafter
from tests.method_table import METHODS
from tests.targets import PROMPTS, make_target

TREE_METHODS = ["ddtree", "causal_lm_tree", "eagle3", "medusa", "ngram", "specblock"]
FEATURE_METHODS = ["dspark", "dflash2", "eagle", "gemma4_assistant", "mtp", "parallel_heads", "peagle"]
GREEDY = {"max_new_tokens": 24, "do_sample": False}


def auto(method: str, target: PreTrainedModel) -> Drafter:
    drafter = METHODS[method](target)
    if isinstance(drafter, torch.nn.Module):
        drafter.to(torch.float64)
    drafter.set_options(tree_budget="auto")
    return drafter


class Every(AutoBudget):
    """Drafts in every third round, whatever it costs, and keeps five nodes."""

    def __init__(self, knowledge: BudgetKnowledge, stats: SpeculationStats) -> None:
        super().__init__(knowledge, stats)
        knowledge.sizes_to_try, knowledge.pauses.drafting = [], False
        self.rounds = 0

    def cut(self, tree: DraftTree, active: list[bool]) -> DraftTree:
        return tree.first_nodes(5)

    def note(self, *arguments: Any) -> None:
        self.rounds += 1
        self.knowledge.pauses.drafting = self.rounds % 3 == 0


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("method", TREE_METHODS)
def test_auto_budget_changes_no_token(method: str, batch: str) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS[batch]()
    alone = target.generate(**prompts, **GREEDY)
    drafter = auto(method, target)
    num_drafted = 0
    for _ in range(2):  # the second call begins with what the first has learned
        assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
        num_drafted += drafter.stats.num_draft_tokens
    assert num_drafted > 0


@pytest.mark.usefixtures("whole_batch")
@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("method", [*TREE_METHODS, *FEATURE_METHODS])
def test_drafts_after_skipped_rounds_equal_those_of_a_call_that_always_drafts(
    method: str, batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS[batch]()
    alone = target.generate(**prompts, **GREEDY)

    def drafts(drafter: Drafter) -> dict[tuple[int, int], list[int]]:
        seen: dict[tuple[int, int], list[int]] = {}
        make = drafter.candidate_generator

        def watched(of: Any) -> Any:
            generator = make(of)
            draft = generator.draft

            def noting(context: DraftContext) -> DraftTree:
                tree = draft(context)
                for row, length in enumerate(context.lengths):
                    if context.active[row]:
                        seen[row, length] = tree.token_ids[row, tree.valid[row]].tolist()[:6]
                return tree

            generator.draft = noting
            return generator

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(drafter), "candidate_generator", lambda self, of: watched(of))
            assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
        return seen

    drafter = METHODS[method](target)
    if isinstance(drafter, torch.nn.Module):
        drafter.to(torch.float64)
    always = drafts(drafter)
    monkeypatch.setattr(
        type(drafter), "drafting_policy", lambda self, model, batch, stats: Every(BudgetKnowledge(), stats)
    )
    now_and_then = drafts(drafter)
    both = always.keys() & now_and_then.keys()
    assert len(both) >= 3
    assert {where: always[where] for where in both} == {where: now_and_then[where] for where in both}
    assert drafter.stats.num_undrafted_steps > 0


@pytest.mark.parametrize("method", METHODS)
def test_rounds_without_a_draft_change_no_token(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    alone = target.generate(**prompts, **GREEDY)
    drafter = METHODS[method](target)
    monkeypatch.setattr(
        type(drafter), "drafting_policy", lambda self, model, batch, stats: Every(BudgetKnowledge(), stats)
    )
    drafter.trace = Trace()
    assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
    assert drafter.stats.num_undrafted_steps > 0


def test_nodes_come_likeliest_first_and_below_their_parents() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    for method in TREE_METHODS:
        drafter = auto(method, target)
        trees: list[DraftTree] = []

        def keep(self: AutoBudget, tree: DraftTree, active: list[bool], trees: list[DraftTree] = trees) -> DraftTree:
            trees.append(tree)
            return tree

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AutoBudget, "cut", keep)
            target.generate(**prompts, **GREEDY, assistant_model=drafter)
        for tree in trees:
            assert tree.path_logprobs is not None, method
            for row, parents in zip(tree.path_logprobs, tree.parents.tolist(), strict=True):
                scores = [float(score) for score in row]
                assert scores[0] == 0.0, method
                assert all(later <= former for former, later in itertools.pairwise(scores)), method
                assert all(scores[node] <= scores[parents[node]] for node in range(1, len(scores))), method


def test_first_nodes_are_the_tree_that_a_smaller_budget_gives() -> None:
    from hf_specdec.methods.ddtree import level_tree

    logits = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(0))
    roots = torch.tensor([3, 4])
    cut, small = level_tree(roots, logits, 12).first_nodes(5), level_tree(roots, logits, 5)
    for name in ("token_ids", "parents", "depths", "ancestor_mask", "valid", "path_logprobs"):
        assert torch.equal(getattr(cut, name), getattr(small, name)), name


def outcome(counts: list[int], start: int, num_accepted: list[int] | None = None) -> Committed:
    """Tokens of row r are 100 r + 10 times the round's start + place."""
    steps = max(counts)
    place = torch.arange(steps).expand(len(counts), -1)
    token_ids = place + 10 * start + 100 * torch.arange(len(counts)).unsqueeze(1)
    valid = place < torch.tensor(counts).unsqueeze(1)
    return Committed(
        token_ids=token_ids,
        features=token_ids.unsqueeze(-1).double(),
        position_ids=token_ids + 1,
        valid=None if bool(valid.all()) else valid,
        counts=Counts.of(counts),
        target_logits=torch.empty(0),
        tree=DraftTree.root_only(torch.zeros(len(counts), dtype=torch.int64)),
        path=place,
    )


@pytest.mark.parametrize(
    "rounds", [[[3], [1], [1]], [[3, 1, 2], [1, 1, 1], [1, 1, 1]], [[2, 2], [1, 0], [1, 0]], [[1, 3], [0, 1]]]
)
def test_rounds_without_a_draft_join_the_round_before_them(rounds: list[list[int]]) -> None:
    parts = [outcome(counts, start) for start, counts in enumerate(rounds)]
    joined = functools.reduce(Committed.followed_by, parts)
    assert joined.num_committed == [sum(counts) for counts in zip(*rounds, strict=True)]
    for row in range(len(rounds[0])):
        expected = [
            100 * row + 10 * start + place for start, counts in enumerate(rounds) for place in range(counts[row])
        ]
        count = joined.num_committed[row]
        assert joined.token_ids[row, :count].tolist() == expected
        assert joined.position_ids[row, :count].tolist() == [token + 1 for token in expected]
        assert joined.features is not None
        assert joined.features[row, :count, 0].tolist() == expected
        if joined.valid is not None:
            assert joined.valid[row].tolist() == [place < count for place in range(joined.token_ids.shape[1])]


def test_times_are_fitted_by_a_line_through_medians() -> None:
    times = RoundTimes()
    for nodes in (4, 16, 64):
        for noise in (0.0, 0.1, 5.0):  # a disturbance is outvoted
            times.note(nodes, 2.0 + 0.1 * nodes + noise)
    times.note(0, 1.5)
    assert times.skipped == 1.5
    assert times.of(30) == pytest.approx(2.1 + 3.0, abs=0.01)


def test_estimated_time_never_decreases_with_more_nodes() -> None:
    times = RoundTimes()
    for nodes, seconds in ((4, 3.0), (64, 1.0)):
        times.note(nodes, seconds)
    assert times.of(64) >= times.of(4) > 0


def test_probabilities_are_corrected_by_what_was_accepted() -> None:
    calibration = AcceptanceCalibration()
    assert calibration.probabilities([math.log(0.5), -math.inf, math.nan]) == pytest.approx([0.5, 0.0, 0.0])
    for _ in range(200):
        calibration.note([math.log(0.5)], set())
    half, other = calibration.probabilities([math.log(0.5), math.log(0.001)])
    assert half < 0.1
    assert other == pytest.approx(0.001)  # another probability is another matter


def knowing(plain: float, start: float, slope: float) -> BudgetKnowledge:
    knowledge = BudgetKnowledge()
    for _ in range(5):
        knowledge.times.note(0, plain)
        for nodes in (4, 16, 64):
            knowledge.times.note(nodes, start + slope * nodes)
    knowledge.sizes_to_try = []
    return knowledge


def chooser_of(knowledge: BudgetKnowledge) -> AutoBudget:
    return AutoBudget(knowledge, SpeculationStats())


def tree_of(probabilities: list[float], rows: int = 1) -> DraftTree:
    """Alternatives below the root, one per probability."""
    nodes = 1 + len(probabilities)
    logprobs = [0.0, *map(math.log, probabilities)]
    return DraftTree.from_lists(
        [list(range(nodes))] * rows, [[-1] + [0] * (nodes - 1)] * rows, path_logprobs=[logprobs] * rows
    )


@pytest.mark.parametrize(
    ("slope", "expected"), [(0.0, 4), (0.05, 3), (0.5, 1)], ids=["free nodes", "costly nodes", "very costly nodes"]
)
def test_nodes_are_kept_while_they_gain_more_than_they_cost(slope: float, expected: int) -> None:
    budget = chooser_of(knowing(plain=1.0, start=1.0, slope=slope))
    tree = tree_of([0.5, 0.3, 0.1, 0.01])
    assert budget.cut(tree, [True]).num_nodes - 1 == expected


def test_inactive_rows_do_not_change_the_budget() -> None:
    budget = chooser_of(knowing(plain=1.0, start=1.0, slope=0.05))
    tree = DraftTree.from_lists(
        [[0, 1, 2], [0, 1, 2]], [[-1, 0, 0]] * 2, path_logprobs=[[0.0, -0.1, -9.0], [0.0, -0.7, -0.7]]
    )
    assert budget.cut(tree, [True, False]).num_nodes == 2
    assert budget.cut(tree, [False, True]).num_nodes == 3


def test_trees_without_probabilities_are_verified_whole() -> None:
    budget = chooser_of(knowing(plain=1.0, start=1.0, slope=9.0))
    tree = DraftTree.chain(torch.tensor([[1, 2, 3]]))
    assert budget.cut(tree, [True]) is tree


def play(budget: AutoBudget, accepted: int, plain_s: float, drafted_s: float, rounds: int) -> list[bool]:
    """Rounds that each accept this many nodes; returns which of them drafted."""
    drafted = []
    tree = tree_of([0.5, 0.3, 0.1])
    path = torch.arange(4).unsqueeze(0)
    for _ in range(rounds):
        drafted.append(budget.drafting)
        if budget.drafting:
            budget.note(tree, path, [accepted], True, drafted_s)
        else:
            budget.note(DraftTree.root_only(torch.tensor([0])), path[:, :1], [0], False, plain_s)
    return drafted


def test_skipped_rounds_double_while_drafting_does_not_pay() -> None:
    budget = chooser_of(knowing(plain=1.0, start=1.5, slope=0.0))
    drafted = play(budget, accepted=0, plain_s=1.0, drafted_s=1.5, rounds=300)
    lost = 0.5 * sum(drafted) / 300
    assert lost < 0.03
    assert any(drafted[-200:])  # it looks again, however long it takes
    assert sum(drafted[:8]) < 8


def test_trace_of_a_round_without_notes_has_no_notes() -> None:
    # A look-up without a match costs no more than a plain round: no reason to rest, and nothing is measured by it.
    budget = chooser_of(BudgetKnowledge())
    for _ in range(100):
        assert budget.drafting
        nothing = budget.cut(DraftTree.root_only(torch.tensor([0])), [True])
        budget.note(nothing, torch.tensor([[0]]), [0], True, 1.0)
    assert budget.knowledge.first_size == FIRST_SIZES[0]
    assert budget.cut(tree_of([0.5, 0.3, 0.1]), [True]).num_nodes == 4


@pytest.mark.parametrize(("drafted_s", "most"), [(5.0, 0.12), (2.0, 0.08), (1.2, 0.06)])
def test_drafting_that_never_pays_costs_little_of_a_call_and_less_of_later_ones(drafted_s: float, most: float) -> None:
    """Calls of 64 tokens; a drafted round takes this many plain ones, and nothing is ever accepted."""
    knowledge, lost = BudgetKnowledge(), []
    tree, path = tree_of([0.5, 0.3, 0.1]), torch.arange(4).unsqueeze(0)
    for _ in range(20):
        budget, seconds = chooser_of(knowledge), 0.0
        for _ in range(64):
            if budget.drafting:
                cut = budget.cut(tree, [True])
                budget.note(cut, path, [0], True, drafted_s)
                seconds += drafted_s
            else:
                budget.note(DraftTree.root_only(torch.tensor([0])), path[:, :1], [0], False, 1.0)
                seconds += 1.0
        lost.append(1 - 64 / seconds)
    assert max(lost) < most
    assert sorted(lost)[len(lost) // 2] < 0.03


def test_drafting_continues_while_it_pays() -> None:
    budget = chooser_of(knowing(plain=1.0, start=1.5, slope=0.0))
    assert all(play(budget, accepted=2, plain_s=1.0, drafted_s=1.5, rounds=100))


def test_one_rejection_after_skipped_rounds_does_not_stop_drafting() -> None:
    budget = chooser_of(knowing(plain=1.0, start=1.5, slope=0.0))
    play(budget, accepted=0, plain_s=1.0, drafted_s=1.5, rounds=30)
    while not budget.drafting:
        play(budget, accepted=0, plain_s=1.0, drafted_s=1.5, rounds=1)
    assert play(budget, accepted=0, plain_s=1.0, drafted_s=1.5, rounds=3) == [True, True, False]
    while not budget.drafting:
        play(budget, accepted=0, plain_s=1.0, drafted_s=1.5, rounds=1)
    play(budget, accepted=0, plain_s=1.0, drafted_s=1.5, rounds=1)
    assert all(play(budget, accepted=2, plain_s=1.0, drafted_s=1.5, rounds=50))


def test_first_rounds_do_not_count_against_the_drafter() -> None:
    budget = chooser_of(BudgetKnowledge())
    tree = tree_of([0.5 ** (1 + node) for node in range(64)])
    rested = []
    for round_ in range(60):
        drafting = budget.drafting
        cut = budget.cut(tree, [True]) if drafting else DraftTree.root_only(torch.tensor([0]))
        nodes = cut.num_nodes - 1
        # The first rounds of all are costly.
        seconds = 1.0 + 0.05 * nodes + (5.0 if round_ < 2 else 0.0)
        budget.note(cut, torch.tensor([[0, 1]]), [1 if drafting else 0], drafting, seconds)
        rested += [] if drafting else [round_]
    assert len(rested) <= 4, f"rests in rounds {rested}: two of the first show what a plain round takes"


def test_later_calls_request_trees_of_the_size_that_earlier_ones_used() -> None:
    knowledge = knowing(plain=1.0, start=1.0, slope=0.05)
    budget = chooser_of(knowledge)
    for _ in range(20):
        budget.cut(tree_of([0.5, 0.3, 0.1, *[0.001] * 20]), [True])
    assert chooser_of(knowledge).node_limit < 16


def test_larger_trees_are_requested_if_all_nodes_pay() -> None:
    budget = chooser_of(knowing(plain=1.0, start=1.0, slope=0.0))
    for _ in range(10):
        budget.cut(tree_of([0.5, 0.3, 0.1, *[0.001] * 20]), [True])
    limits = []
    for _ in range(6):
        limits.append(budget.node_limit)
        budget.cut(tree_of([0.9] * limits[-1]), [True])
    assert limits[-1] == 64


def test_drafting_resumes_when_it_pays_again() -> None:
    budget = chooser_of(knowing(plain=1.0, start=1.5, slope=0.0))
    play(budget, accepted=0, plain_s=1.0, drafted_s=1.5, rounds=60)
    drafted = play(budget, accepted=3, plain_s=1.0, drafted_s=1.5, rounds=200)
    assert sum(drafted) > 100


def test_reading_the_text_of_a_pause_is_not_the_time_of_a_draft() -> None:
    budget = chooser_of(knowing(plain=1.0, start=1.3, slope=0.0))
    drafted = play(budget, accepted=0, plain_s=1.0, drafted_s=1.3, rounds=60)
    for _ in range(300):  # each draft pays from now on, but the first one after a pause reads the text of the pause
        drafted += play(budget, accepted=1, plain_s=1.0, drafted_s=1.3 if drafted[-1] else 6.0, rounds=1)
    assert sum(drafted) > 150


def test_trees_in_device_memory_are_cut_by_the_mean_of_earlier_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "abilities", lambda device: Abilities())
    chooser = chooser_of(knowing(plain=1.0, start=1.0, slope=0.05))
    probabilities = [0.5, 0.3, 0.1, *[0.01] * 29]
    tree = tree_of(probabilities)
    tree = DraftTree.from_parents(
        tree.token_ids, tree.parents, 1, path_logprobs=torch.tensor([[0.0, *map(math.log, probabilities)]])
    )
    for _ in range(60):
        chooser.note(tree, torch.tensor([[0, 1]]), [1], True, 1.0)
    assert len(chooser.knowledge.curve) == 32
    assert chooser.cut(tree, [True]).num_nodes - 1 < 8


@pytest.mark.parametrize("method", TREE_METHODS)
def test_other_strings_than_auto_are_refused(method: str) -> None:
    drafter = METHODS[method](make_target("llama", "sdpa"))
    with pytest.raises(ValueError, match=r"tree_budget='many' must be an integer from 1 to \d+, or 'auto'"):
        drafter.set_options(tree_budget="many")
