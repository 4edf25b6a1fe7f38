"""Rounds whose outcome the host reads when the next round is under way: the same tokens, counts, caches and order.

A CPU does nothing beside the host, so nothing is read late on it; these tests say that it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MaxTimeCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_specdec.decoding import devices, loop
from hf_specdec.decoding.devices import Abilities, ToHost
from hf_specdec.decoding.exchange import DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.speed import cuda_graphs
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.decoding.upstream import CACHE
from tests.decoding.test_cuda_graphs import EARLY, capture_on_cpu, compiling
from tests.decoding.test_finished_rows import prompts as five_prompts
from tests.decoding.test_finished_rows import settings_of
from tests.decoding.test_outputs import assert_same_cache
from tests.method_table import METHODS
from tests.scripted import StubDrafter
from tests.targets import PROMPTS, fresh_target, make_target

NEW = 16
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}


def rule(*, late: bool) -> Callable[[torch.device], Abilities]:
    """Of a CPU that goes on beside the host, or does not."""
    return lambda device: Abilities(groups_heads=True, works_ahead=late)


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_on_cpu(monkeypatch)
    monkeypatch.setattr(cuda_graphs, "FIRST_PREFIX", 16)
    monkeypatch.setitem(devices.RULES, "cpu", rule(late=True))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host does, in order."""
    seen: list[str] = []
    tolist, draft, verify = ToHost.tolist, loop.SpeculativeDecoding.draft, loop.TargetModel.verify
    monkeypatch.setattr(ToHost, "tolist", lambda self: seen.append("read") or tolist(self))
    monkeypatch.setattr(
        loop.SpeculativeDecoding, "draft", lambda self, *arguments: seen.append("draft") or draft(self, *arguments)
    )
    monkeypatch.setattr(
        loop.TargetModel,
        "verify",
        lambda self, *arguments, **options: seen.append("verify") or verify(self, *arguments, **options),
    )
    return seen


class Planted(TreeCandidateGenerator):
    """Right for so many tokens, round by round, as the roots' positions tell: what the host knows lags behind."""

    drops_rows = drafts_early = True

    def __init__(self, script: Tensor, padding: Tensor, per_round: list[int]) -> None:
        self.script = torch.nn.functional.pad(script, (0, 40), value=3)
        self.padding, self.per_round, self.rounds = padding, per_round, 0

    def draft(self, context: DraftContext) -> DraftTree:
        right = self.per_round[self.rounds % len(self.per_round)]
        self.rounds += 1
        columns = (context.root_positions + self.padding).unsqueeze(1) + torch.arange(1, right + 2)
        path = self.script.gather(1, columns)
        path[:, -1] += 1  # wrong
        beside = (path + 7) % 64
        # Root, then a wrong node and one of the path at each depth; both hang from the path.
        token_ids = torch.cat([context.root_ids.unsqueeze(1), torch.stack([beside, path], 2).flatten(1)], 1)
        above = torch.tensor([-1, *(2 * depth for depth in range(right + 1) for _ in range(2))])
        return DraftTree.from_parents(token_ids % 64, above.expand(len(token_ids), -1), right + 1)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.script, self.padding = self.script[list(rows)], self.padding[list(rows)]


def early(prompts: dict[str, Tensor], script: Tensor, num_right: int | list[int] = 2) -> StubDrafter:
    """A drafter of `Planted` trees; `script` [batch, length] is what plain decoding gives, prompts included."""
    drafter = compiling(StubDrafter(DraftTree.root_only))
    per_round = [num_right] if isinstance(num_right, int) else num_right
    padding = (prompts["attention_mask"] == 0).sum(1)
    drafter.candidate_generator = lambda target: Planted(script, padding, per_round)
    return drafter


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("method", EARLY)
@pytest.mark.parametrize("do_sample", [False, True])
def test_late_reads_give_the_tokens_counts_and_cache_of_immediate_reads(
    method: str, batch: str, do_sample: bool
) -> None:
    target, prompts = make_target("qwen3-mixed", "sdpa"), PROMPTS[batch]()
    drafter: Any = compiling(METHODS[method](target)).to(torch.float64)
    settings = GREEDY | {"do_sample": do_sample}
    outputs = []
    for late in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(devices.RULES, "cpu", rule(late=late))
            torch.manual_seed(3)
            output = target.generate(**prompts, **settings, assistant_model=drafter)
        outputs.append((output, drafter.stats))
    (one, late_stats), (other, stats) = outputs
    assert one.sequences.tolist() == other.sequences.tolist()
    assert late_stats.per_step_accepted == stats.per_step_accepted
    assert late_stats.num_draft_tokens == stats.num_draft_tokens
    assert late_stats.num_target_forwards - stats.num_target_forwards in (0, 1)
    assert_same_cache(one[CACHE], other[CACHE])
    if not do_sample:
        alone = target.generate(**prompts, **settings)
        assert one.sequences.tolist() == alone.sequences.tolist()
        assert_same_cache(one[CACHE], alone[CACHE])


def test_the_verdict_of_a_round_is_read_after_the_next_one_is_launched(events: list[str]) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter: Any = compiling(METHODS["ddtree"](target)).to(torch.float64)
    target.generate(**prompts, **GREEDY, assistant_model=drafter)
    rounds = drafter.stats.num_target_forwards
    first, *rest = events
    assert first == "read"  # the prefill's, before all rounds
    assert rest[:5] == ["draft", "verify", "draft", "verify", "read"]
    # The last round is sure to be the last, so that none is verified behind it.
    assert rest == ["draft", "verify", *(["draft", "verify", "read"] * (rounds - 1)), "draft", "read"]


@pytest.mark.parametrize("batch", PROMPTS)
def test_any_number_of_new_tokens_ends_the_text_where_plain_decoding_does(batch: str) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS[batch]()
    script = target.generate(**prompts, **GREEDY).sequences
    for new in range(1, 13):
        settings = GREEDY | {"max_new_tokens": new}
        alone = target.generate(**prompts, **settings)
        for num_right in (0, 2, [3, 0, 5, 1]):
            drafter = early(prompts, script, num_right)
            assisted = target.generate(**prompts, **settings, assistant_model=drafter)
            assert assisted.sequences.tolist() == alone.sequences.tolist()
            assert_same_cache(assisted[CACHE], alone[CACHE])


@pytest.mark.parametrize("at", range(1, 12))
def test_end_of_text_in_a_round_discards_the_next_round(at: int, events: list[str]) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    script = target.generate(**prompts, **GREEDY).sequences
    end = int(script[0, 9 + at])
    settings = GREEDY | {"eos_token_id": end}
    alone = target.generate(**prompts, **settings)
    for num_right in (0, 1, 3):
        drafter = early(prompts, script, num_right)
        events.clear()
        assisted = target.generate(**prompts, **settings, assistant_model=drafter)
        assert assisted.sequences.tolist() == alone.sequences.tolist()
        assert_same_cache(assisted[CACHE], alone[CACHE])
        counted = len(drafter.stats.per_step_accepted[0])
        assert drafter.stats.num_target_forwards == events.count("verify")
        assert drafter.stats.num_target_forwards - counted in (0, 1)


@pytest.mark.parametrize("method", EARLY)
def test_rows_that_end_one_after_the_other_leave_the_batch(method: str) -> None:
    target = make_target("llama", "sdpa")
    settings = settings_of(target)
    alone = target.generate(**five_prompts(), **settings)
    drafter: Any = compiling(METHODS[method](target)).to(torch.float64)
    for _ in range(2):
        assisted = target.generate(**five_prompts(), **settings, assistant_model=drafter)
        assert assisted.sequences.tolist() == alone.sequences.tolist()
        assert_same_cache(assisted[CACHE], alone[CACHE])
    script = target.generate(**five_prompts(), **(settings | {"eos_token_id": None})).sequences
    for num_right in (1, [3, 0, 2]):
        drafter = early(five_prompts(), script, num_right)
        assisted = target.generate(**five_prompts(), **settings, assistant_model=drafter)
        assert assisted.sequences.tolist() == alone.sequences.tolist()
        assert_same_cache(assisted[CACHE], alone[CACHE])


@pytest.mark.filterwarnings("ignore:.* rounds fell back to plain decoding")
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"do_sample": True, "top_k": 1}, {"output_logits": True}],  # the last is read before the next draft
    ids=str,
)
@pytest.mark.parametrize("batch", PROMPTS)
def test_draft_with_nan_logits_costs_one_round_only(
    batch: str, settings: dict[str, Any], attention: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(devices.RULES, "cpu", rule(late=late))
    # transformers' own eager attention makes NaN of left padding in float64.
    target = fresh_target("llama", attention, torch.float32 if attention == "eager" else torch.float64)
    prompts, settings = PROMPTS[batch](), GREEDY | settings
    alone = target.generate(**prompts, **settings)
    script = alone.sequences
    wrong = (script[:, prompts["input_ids"].shape[1] + 3 :] + 7) % 64  # what `Planted` drafts beside
    unseen = sorted(set(wrong.flatten().tolist()) - set(script.flatten().tolist()))
    target.get_input_embeddings().weight.data[unseen[:2]] = torch.nan
    drafter = early(prompts, script, [3, 0, 2])
    for _ in range(2):  # the second call finds the buffers of the first
        assisted = target.generate(**prompts, **settings, assistant_model=drafter)
        assert assisted.sequences.tolist() == script.tolist()
        if attention == "sdpa":
            assert_same_cache(assisted[CACHE], alone[CACHE])
        stats = drafter.stats
        assert stats is not None
        assert stats.num_plain_steps > 0
        assert stats.num_accepted_draft_tokens > 0
        assert stats.num_spec_steps < stats.num_target_forwards * len(script)  # a spoilt round is no step
        assert sum(kept + 1 for kept in stats.per_step_accepted[0]) >= NEW - 1


@pytest.mark.filterwarnings("ignore:.* rounds fell back to plain decoding")
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("method", EARLY)
def test_methods_that_draft_early_draft_with_tokens_with_nan_logits(
    method: str, batch: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(devices.RULES, "cpu", rule(late=late))
    target, prompts = fresh_target("llama", "sdpa"), PROMPTS[batch]()
    drafter: Any = compiling(METHODS[method](target)).to(torch.float64)
    settings = GREEDY | {"max_new_tokens": 40}
    alone = target.generate(**prompts, **settings)
    target.generate(**prompts, **settings, assistant_model=drafter)  # pairs are tried once, on whatever tokens
    unseen = sorted(set(range(64)) - set(alone.sequences.flatten().tolist()))
    target.get_input_embeddings().weight.data[unseen[::4]] = torch.nan
    assisted = target.generate(**prompts, **settings, assistant_model=drafter)
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    assert_same_cache(assisted[CACHE], alone[CACHE])
    # Its caches hold no NaN: only rounds after those that came to nothing are plain. EAGLE-3 and SpecBlock read what
    # they have drafted by the target's embeddings, so that they have no numbers either behind such a token.
    if batch == "batch of one" and method not in ("eagle3", "specblock"):
        assert drafter.stats.num_plain_steps <= drafter.stats.num_target_forwards - drafter.stats.num_spec_steps
    target.get_input_embeddings().weight.data[unseen[::4]] = 0.0
    plain = drafter.stats.num_plain_steps
    target.generate(**prompts, **settings, assistant_model=drafter)
    assert drafter.stats.num_plain_steps < max(1, plain), "NaN stayed in a buffer that calls share"


class Columns(BaseStreamer):
    """Notes what it is given."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def put(self, value: Tensor) -> None:
        self.events.append("put")

    def end(self) -> None:
        self.events.append("end")


def test_observed_tokens_are_read_in_their_own_round(events: list[str]) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter: Any = compiling(METHODS["ddtree"](target)).to(torch.float64)
    deadline = StoppingCriteriaList([MaxTimeCriteria(max_time=1000.0)])
    for extra in ({"streamer": Columns(events)}, {"stopping_criteria": deadline}):
        events.clear()
        target.generate(**prompts, **GREEDY, **extra, assistant_model=drafter)
        rounds = [event for event in events if event in ("verify", "read")]
        assert rounds == ["read"] + ["verify", "read"] * drafter.stats.num_target_forwards


def test_a_round_is_counted_before_its_tokens_are_streamed() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter: Any = compiling(METHODS["ddtree"](target)).to(torch.float64)
    rounds: list[int] = []

    class Counts(BaseStreamer):
        def put(self, value: Tensor) -> None:
            rounds.append(len(drafter.stats.per_step_accepted[0]) if drafter.stats else 0)

        def end(self) -> None:
            pass

    target.generate(**prompts, **GREEDY, streamer=Counts(), assistant_model=drafter)
    accepted = drafter.stats.per_step_accepted[0]
    assert rounds[2:] == [number for number, kept in enumerate(accepted, 1) for _ in range(kept + 1)][: NEW - 1]


def test_verdicts_are_read_at_once_on_a_cpu(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as patch:
        capture_on_cpu(patch)
        assert not devices.abilities(torch.device("cpu")).works_ahead
        target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
        drafter: Any = compiling(METHODS["ddtree"](target)).to(torch.float64)
        target.generate(**prompts, **GREEDY, assistant_model=drafter)
        assert drafter.stats.num_target_forwards == len(drafter.stats.per_step_accepted[0])
