"""SSD: a foreseen outcome gives the tree that drafting afterwards gives; hits are counted, misses drafted in turn."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_specdec import load_drafter
from hf_specdec.decoding.exchange import Committed, DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.drafting.options import DrafterOptions
from hf_specdec.methods.ssd import RowTree, SSDDrafter
from hf_specdec.training.features import TargetReader
from tests.method_table import make_causal_lm, make_eagle, make_eagle3, make_medusa, make_mtp, make_ngram
from tests.targets import PROMPTS, make_target, one_prompt
from tests.watched import Watched


class Scripted(Drafter):
    """Follows `script` for a number of tokens that depends on the length of the text, then says how the round ends.

    The tree is a chain of tokens of the script, and its last node is wrong; behind the chain's end, and behind each of
    its nodes, comes the token by which the round would end there.
    """

    method = "scripted"

    def __init__(self, script: torch.Tensor) -> None:
        self.options, self.script = DrafterOptions(), script
        self.threads: Counter[str] = Counter()
        self.texts: list[tuple[int, ...]] = []

    def check_target(self, model: PreTrainedModel) -> None:
        """Fits any target."""

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return _ScriptedGenerator(self)


class _ScriptedGenerator(TreeCandidateGenerator):
    rewinds = True
    drops_rows = True

    def __init__(self, drafter: Scripted) -> None:
        self.drafter = drafter

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Rows have no state."""

    def draft(self, context: DraftContext) -> DraftTree:
        raise AssertionError("SSD drafts for texts")

    def draft_text(self, context: DraftContext, certain: Sequence[int]) -> DraftTree:
        rows = []
        for row, length in enumerate(context.lengths):
            text = context.sequences[row, :length].tolist()
            self.drafter.threads[threading.current_thread().name.split("_")[0]] += 1
            self.drafter.texts.append(tuple(text))
            rows.append(tree_after(text, self.drafter.script[row].tolist()))
        return DraftTree.from_lists([tokens for tokens, _ in rows], [parents for _, parents in rows])


def tree_after(text: list[int], script: list[int]) -> tuple[list[int], list[int]]:
    """Two right tokens, a wrong one behind them; then outcomes after two tokens, the wrong one, and one token."""
    right = [script[at] if at < len(script) else 3 for at in range(len(text), len(text) + 4)]
    wrong = (right[2] + 1 + len(text) % 3) % 64
    tokens = [text[-1], right[0], right[1], wrong, right[2], right[3], (right[1] + 1) % 64]
    return tokens, [-1, 0, 1, 2, 2, 3, 1]


def run(target: PreTrainedModel, prompts: dict[str, torch.Tensor], **options: Any) -> tuple[Scripted, Watched]:
    arguments = {**prompts, "max_new_tokens": 20, "do_sample": False}
    alone = target.generate(**arguments)
    scripted = Scripted(alone)
    watched = Watched(SSDDrafter(scripted, **{"tree_budget": 3, "trial": False, **options}))
    assert torch.equal(target.generate(**arguments, assistant_model=watched), alone)
    return scripted, watched


@pytest.mark.parametrize("batch", PROMPTS)
def test_every_foreseen_round_has_the_tree_of_drafting_afterwards(batch: str) -> None:
    target = make_target("llama", "sdpa", torch.float64)
    scripted, watched = run(target, PROMPTS[batch]())
    for each in watched.rounds:
        for row, active in enumerate(each.context.active):
            if active:
                tokens, parents = tree_after(each.text(row), scripted.script[row].tolist())
                assert each.tree.token_ids[row].tolist() == tokens[:4]
                assert each.tree.parents[row].tolist() == parents[:4]
    # Two tokens are accepted in every round, and the third outcome, the right one, is among those prepared.
    stats = watched.stats
    assert stats.num_prepared == sum(sum(each.context.active) for each in watched.rounds[1:])
    assert stats.num_foreseen == stats.num_prepared
    rows = len(PROMPTS[batch]()["input_ids"])
    assert stats.continuous_acceptance_length == (stats.num_accepted_draft_tokens + stats.num_spec_steps) / rows
    assert f"{stats.num_foreseen} of {stats.num_prepared} rounds foreseen" in str(stats)
    own = scripted.threads["MainThread"]
    assert own == rows, "only the first round drafts in turn"


def test_with_too_small_a_fan_out_outcomes_are_missed_and_drafted_in_turn() -> None:
    target, prompt = make_target("llama", "sdpa", torch.float64), one_prompt()
    scripted, watched = run(target, prompt, tree_budget=2, fan_out=1)
    # Of [2, 3, 4, 6] behind the two right tokens, the likeliest is the wrong one.
    assert watched.stats.num_foreseen == 0
    assert watched.stats.num_prepared == len(watched.rounds) - 1
    assert scripted.threads["MainThread"] == len(watched.rounds)
    for each in watched.rounds:
        assert each.tree.token_ids[0].tolist() == tree_after(each.text(0), scripted.script[0].tolist())[0][:3]


def test_outcomes_are_ranked_by_probability_and_by_where_rounds_have_ended() -> None:
    row = RowTree([9, 1, 2, 3, 4], [-1, 0, 0, 1, 2], [0.0, -0.5, -1.0, -1.5, -1.4])
    assert row.outcomes(3, Counter()) == [(2, 4), (1, 3)]
    assert row.outcomes(2, Counter()) == [(2,), (1, 3)]
    assert row.outcomes(2, Counter({1: 50})) == [(1, 3), (2,)]
    assert row.outcomes(5, Counter()) == []


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("make", [make_ngram, make_causal_lm])
def test_drafts_for_texts_that_never_come_change_no_later_draft(make: Any, batch: str) -> None:
    target, prompts = make_target("llama", "sdpa", torch.float64), PROMPTS[batch]()
    trees = []
    for fan_out in (1, 6):
        watched = Watched(SSDDrafter(make(target, tree_budget=12), tree_budget=6, fan_out=fan_out, trial=False))
        target.generate(**prompts, max_new_tokens=20, do_sample=False, assistant_model=watched)
        trees.append([(each.tree.token_ids.tolist(), each.tree.parents.tolist()) for each in watched.rounds])
    assert trees[0] == trees[1]


def test_a_draft_model_foresees_rounds() -> None:
    target, prompt = make_target("llama", "sdpa", torch.float64), one_prompt()
    drafter = load_drafter("ssd", drafter=make_causal_lm(target, noise=0.01, tree_budget=16), trial=False)
    target.generate(**prompt, max_new_tokens=32, do_sample=False, assistant_model=drafter)
    assert 0 < drafter.stats.num_foreseen <= drafter.stats.num_prepared
    assert drafter.stats.ahead_time_s > 0


def test_it_stops_in_a_call_in_which_it_does_not_pay(caplog: pytest.LogCaptureFixture) -> None:
    target, prompt = make_target("llama", "sdpa", torch.float64), one_prompt()
    scripted = Scripted(target.generate(**prompt, max_new_tokens=80, do_sample=False))
    drafter = SSDDrafter(scripted, tree_budget=2, fan_out=1)  # never right, so that it saves nothing
    target.generate(**prompt, max_new_tokens=80, do_sample=False, assistant_model=drafter)
    assert "Drafting while the target verifies does not pay here" in caplog.text
    assert drafter.stats.num_prepared < len(drafter.stats.per_step_accepted[0]) - 8


def test_the_wrapped_drafter_may_be_named() -> None:
    target, prompt = make_target("llama", "sdpa", torch.float64), one_prompt()
    named = load_drafter("ssd", target, drafter="ngram", trial=False)
    assert named.drafter.method == "ngram"
    alone = target.generate(**prompt, max_new_tokens=24, do_sample=False)
    assert torch.equal(target.generate(**prompt, max_new_tokens=24, do_sample=False, assistant_model=named), alone)


@pytest.mark.parametrize("make", [make_eagle3, make_eagle, make_mtp])
def test_drafters_of_eagles_kind_read_their_own_outputs_where_states_do_not_exist_yet(make: Any) -> None:
    """A chain drafted ahead is that of whole forwards over the target's states and then the drafter's own outputs."""
    target = make_target("llama", "sdpa", torch.float64)
    drafter = make(target).double()
    drafter.set_options(depth=3, top_k=1, tree_budget=3)
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(4))
    layers = drafter.feature_layers(target)
    features = TargetReader(target, layers).read(ids).features
    generators = [drafter.candidate_generator(TargetModel(target, layers)) for _ in range(2)]
    for generator in generators:
        prompt = Committed(
            ids[:, :7], features[:, :7], torch.arange(7).expand(2, -1), None, Counts.of([7, 7]), target(ids).logits
        )
        generator.observe(prompt)

    def context(*lengths: int) -> DraftContext:
        roots = torch.tensor([length - 1 for length in lengths])
        return DraftContext(ids[[0, 1], roots], roots, ids, list(lengths), [True, True])

    def expected(row: int, length: int) -> list[int]:
        tokens, states = ids[row : row + 1, 1:length], drafter.fuse(features[row : row + 1, :7])
        for _ in range(length - 8 + 3):
            places = torch.arange(states.shape[1])[None]
            embedded = generators[0].embed(tokens[:, : states.shape[1]])
            output = drafter(embedded, states, places, is_causal=True)[:, -1:]
            states = torch.cat([states, drafter.recurrent(output)], 1)
            if states.shape[1] > tokens.shape[1]:
                chosen = drafter.to_target_ids(generators[0].logits(output)[:, 0].argmax(-1, keepdim=True))
                tokens = torch.cat([tokens, chosen], 1)
        return tokens[0, length - 1 :].tolist()

    with torch.no_grad():
        for lengths in ((10, 9), (9, 8), (11, 11)):
            tree = generators[0].draft_text(context(*lengths), [8, 8])
            for row, length in enumerate(lengths):
                assert tree.token_ids[row, 1:].tolist() == expected(row, length), lengths
        after, alone = (generator.draft_text(context(8, 8), [8, 8]) for generator in generators)
        assert after.token_ids.tolist() == alone.token_ids.tolist()
        assert expected(0, 8) == alone.token_ids[0, 1:].tolist()


@pytest.mark.parametrize("batch", PROMPTS)
def test_eagle3_foresees_rounds(batch: str) -> None:
    target, prompts = make_target("llama", "sdpa", torch.float64), PROMPTS[batch]()
    inner = make_eagle3(target, tree_budget=60, top_k=48, depth=2)
    watched = Watched(SSDDrafter(inner, tree_budget=2, fan_out=60, trial=False))
    arguments = {**prompts, "max_new_tokens": 24, "do_sample": False}
    alone = target.generate(**arguments)
    assert torch.equal(target.generate(**arguments, assistant_model=watched), alone)
    if batch == "batch of one":
        assert 0 < watched.stats.num_foreseen <= watched.stats.num_prepared


def test_what_cannot_be_wrapped_raises() -> None:
    target = make_target("llama", "sdpa", torch.float64)
    with pytest.raises(ValueError, match=r'load_drafter\("ssd"\) needs drafter=\.\.\.'):
        load_drafter("ssd")
    with pytest.raises(TypeError, match="drafter='ngram' is a str"):
        SSDDrafter("ngram")  # type: ignore[arg-type]
    drafter = load_drafter("ssd", drafter=make_medusa(target))
    with pytest.raises(ValueError, match="method 'ddtree' cannot draft while the target verifies"):
        target.generate(**one_prompt(), max_new_tokens=2, assistant_model=drafter)
    with pytest.raises(ValueError, match="fan_out=0 must be an integer from 1 to 64"):
        load_drafter("ssd", drafter=make_ngram(target), fan_out=0)
