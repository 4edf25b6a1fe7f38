"""A drafter that learns while it serves: the output stays, the weights move when they may, and what fails is told."""

from __future__ import annotations

import itertools
import json
import runpy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.generation import BaseStreamer

from hf_specdec import load_drafter
from hf_specdec.adaptation import AdaptiveDrafter, AlwaysUpdate, CostAwareBandit, FailSafe
from hf_specdec.adaptation.learner import new_optimizer
from hf_specdec.adaptation.recording import Query
from hf_specdec.hub.pretrained import PretrainedDrafter
from hf_specdec.training.features import TargetReader
from tests.method_table import make_dflash, make_specblock
from tests.targets import PROMPTS, fresh_target, one_prompt

GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def target() -> PreTrainedModel:
    return fresh_target("llama", "sdpa", torch.float64)


@pytest.fixture
def drafter(target: PreTrainedModel) -> PretrainedDrafter:
    return make_specblock(target).to(torch.float64)


def prompts(count: int, seed: int = 7) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 60, (1, 6), generator=numbers) for _ in range(count)]


def weights_of(drafter: PretrainedDrafter) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}


def serve(target: PreTrainedModel, adaptive: AdaptiveDrafter, stream: list[Tensor]) -> list[Tensor]:
    """Every query in turn, each after the update before it has finished, so that runs are alike."""
    outputs = []
    for prompt in stream:
        outputs.append(target.generate(prompt, assistant_model=adaptive, **GREEDY))
        finish_update(adaptive)
    return outputs


def finish_update(adaptive: AdaptiveDrafter) -> None:
    if adaptive.learner._running is not None:
        adaptive.learner._running.exception()


class HeadOnly(AlwaysUpdate):
    """Always the heads."""

    def decide(self, query: Any) -> Any:
        return "head"


@pytest.mark.parametrize("policy", [AlwaysUpdate(1), HeadOnly(1), CostAwareBandit(buffer_queries=1, warmup_queries=1)])
def test_output_stays_the_targets_own_while_weights_move(
    target: PreTrainedModel, drafter: PretrainedDrafter, policy: Any
) -> None:
    before, stream = weights_of(drafter), prompts(6)
    alone = [target.generate(prompt, **GREEDY) for prompt in stream]
    with AdaptiveDrafter(target, drafter, policy=policy, learning_rate=0.05) as adaptive:
        served = serve(target, adaptive, stream)
    assert [ids.tolist() for ids in served] == [ids.tolist() for ids in alone]
    assert len(adaptive.adaptation.updates) >= 2
    assert not all(torch.equal(before[name], weights_of(drafter)[name]) for name in before)


def test_a_ragged_batch_is_served_and_learned_from(target: PreTrainedModel, drafter: PretrainedDrafter) -> None:
    batch = PROMPTS["ragged batch of three"]()
    alone = target.generate(**batch, **GREEDY)
    with AdaptiveDrafter(target, drafter, policy=AlwaysUpdate(1)) as adaptive:
        for _ in range(2):
            assert target.generate(**batch, assistant_model=adaptive, **GREEDY).tolist() == alone.tolist()
            finish_update(adaptive)
    assert len(adaptive.adaptation.updates) == 2


@pytest.mark.slow
def test_learning_makes_the_same_stream_accepted_more(target: PreTrainedModel, drafter: PretrainedDrafter) -> None:
    stream = prompts(3) * 14
    settings: dict[str, Any] = {"policy": AlwaysUpdate(3), "fail_safe": FailSafe(window_queries=100)}
    with AdaptiveDrafter(target, drafter, learning_rate=0.01, steps_per_update=3, **settings) as adaptive:
        serve(target, adaptive, stream)
    before, after = (adaptive.adaptation.mean_acceptance_length(*part) for part in ((0, 3), (-3, None)))
    assert after > 1.1 * before


def test_head_updates_move_the_heads_alone(target: PreTrainedModel, drafter: PretrainedDrafter) -> None:
    before = weights_of(drafter)
    with AdaptiveDrafter(target, drafter, policy=HeadOnly(1)) as adaptive:
        serve(target, adaptive, prompts(2))
    moved = {name for name, tensor in weights_of(drafter).items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if name.startswith(("lm_head", "rank_head"))}


def test_weights_change_between_rounds_only(target: PreTrainedModel, drafter: PretrainedDrafter) -> None:
    adaptive = AdaptiveDrafter(target, drafter, policy=AlwaysUpdate(1), learning_rate=0.05)
    seen: list[tuple[bool, float]] = []  # per forward whether it was a round's first, and the weights that it met

    def note(layer: Any, inputs: Any, named: dict[str, bool]) -> None:
        seen.append((named["from_target"], float(drafter.norm.weight.sum() + drafter.lm_head.weight.sum())))

    drafter.input_layer.register_forward_pre_hook(note, with_kwargs=True)
    with adaptive:
        for prompt in prompts(8):
            target.generate(prompt, assistant_model=adaptive, **GREEDY)
    assert len({value for _, value in seen}) > 2
    for (_, before), (from_target, now) in itertools.pairwise(seen):
        assert from_target or now == before  # a later block of a round meets the weights of its first


def test_an_update_does_not_touch_what_serves_until_it_is_brought_over(
    target: PreTrainedModel, drafter: PretrainedDrafter
) -> None:
    before = weights_of(drafter)
    adaptive = AdaptiveDrafter(target, drafter, policy=AlwaysUpdate(1))
    target.generate(prompts(1)[0], assistant_model=adaptive, **GREEDY)
    adaptive.learner._running.result()
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(drafter).items())
    adaptive.close()
    assert not torch.equal(before["lm_head.weight"], drafter.lm_head.weight)
    assert len(adaptive.adaptation.updates) == 1


def test_updates_draw_no_numbers_that_sampling_would_draw(target: PreTrainedModel, drafter: PretrainedDrafter) -> None:
    with AdaptiveDrafter(target, drafter, policy=AlwaysUpdate(1)) as adaptive:
        torch.manual_seed(5)
        state = torch.get_rng_state()
        serve(target, adaptive, prompts(2))
    assert torch.equal(torch.get_rng_state(), state)


def recorded(target: PreTrainedModel, adaptive: AdaptiveDrafter, **inputs: Tensor) -> Query:
    queries: list[Query] = []
    adaptive.finish_query = queries.append  # type: ignore[method-assign]
    target.generate(**inputs, assistant_model=adaptive, **GREEDY)
    return queries[0]


@pytest.mark.parametrize(("drafted", "learned"), [(1, 1), (2, 2), (3, 2)])
def test_updates_learn_the_blocks_that_are_drafted(
    target: PreTrainedModel, drafter: PretrainedDrafter, drafted: int, learned: int
) -> None:
    drafter.set_options(num_blocks=drafted)
    with AdaptiveDrafter(target, drafter) as adaptive:
        assert adaptive.learner.step.num_blocks == learned


@pytest.mark.parametrize("batch", ["batch of one", "ragged batch of three"])
def test_what_a_query_leaves_behind_is_its_text_and_the_targets_states(
    target: PreTrainedModel, drafter: PretrainedDrafter, batch: str
) -> None:
    inputs = PROMPTS[batch]()
    alone = target.generate(**inputs, **GREEDY)
    query = recorded(target, AdaptiveDrafter(target, drafter), **inputs)
    reader = TargetReader(target, drafter.feature_layers(target), last_hidden=True)
    assert len(query.rows) == len(alone)
    for row, ids, mask in zip(query.rows, alone, inputs["attention_mask"], strict=True):
        written = len(row["input_ids"])
        text = torch.cat([ids[: len(mask)][mask.bool()], ids[len(mask) :]])
        assert row["first_anchor"] == int(mask.sum())
        assert row["input_ids"].tolist() == text[:written].tolist()
        assert written >= len(text) - 1
        states = reader.read(row["input_ids"][None])
        torch.testing.assert_close(row["features"], states.features[0])
        torch.testing.assert_close(row["last_hidden"], states.last_hidden[0])


def test_the_signal_is_equation_8(target: PreTrainedModel, drafter: PretrainedDrafter) -> None:
    # One slot and one block: every rejection is the first slot's, whose law a fresh forward over the text gives.
    drafter = make_specblock(target, diffspec_draft_token_num=1, num_blocks=1).to(torch.float64)
    adaptive = AdaptiveDrafter(target, drafter)
    query = recorded(target, adaptive, **PROMPTS["batch of one"]())
    (row,) = query.rows
    ids, first = row["input_ids"], row["first_anchor"]
    with torch.no_grad():
        hidden = drafter.block_hidden(
            row["features"][None, :-1], target.get_input_embeddings()(ids[None, 1:]), torch.arange(1, len(ids))[None],
            from_target=True,
        )  # fmt: skip
        probs = drafter.heads(hidden)[0][0, :, 0].softmax(-1)
    expected, rejected = 0.0, 0
    place = first - 1
    for kept in drafter_rounds(adaptive):
        place += kept  # of the position after whose token the drafter was wrong
        if kept == 0 and place + 2 < len(ids):
            chosen = adaptive.learner.step.draft_ids(ids[place + 2])
            expected += 1 - (float(probs[place, chosen]) if chosen >= 0 else 0.0)
            rejected += 1
        place += 1
    assert rejected == len(query.rejected) >= 3
    assert adaptive._signal(query) == pytest.approx(expected, rel=1e-5)


def test_a_policy_hears_of_every_update_once_and_of_waiting_between_calls_alone(
    target: PreTrainedModel, drafter: PretrainedDrafter
) -> None:
    heard: list[float] = []

    class Listening(AlwaysUpdate):
        def brought(self, waited_s: float) -> None:
            heard.append(waited_s)

    with AdaptiveDrafter(target, drafter, policy=Listening(1)) as adaptive:
        serve(target, adaptive, prompts(1))
        adaptive.wait()
        assert len(heard) == 1
        assert heard[0] > 0
        serve(target, adaptive, prompts(1))
        assert adaptive.learner._running is not None
        adaptive.learner._running.result()
        serve(target, adaptive, prompts(1))  # its time is the call's own
        assert heard[1:] == [0.0]
        assert len(adaptive.adaptation.updates) == 2


def drafter_rounds(adaptive: AdaptiveDrafter) -> list[int]:
    assert adaptive.stats is not None
    return adaptive.stats.per_step_accepted[0]


def climb(adaptive: AdaptiveDrafter) -> None:
    """Learning as from a poisoned stream: what should be likelier becomes less likely."""
    for parameter in adaptive.learner.learning.parameters():
        parameter.register_hook(torch.neg)


def fail_in_updates(adaptive: AdaptiveDrafter, fail: Callable[[], None]) -> RemovableHandle:
    """Calls `fail` in front of every forward of an update, in its thread, until the handle is removed."""
    learning: torch.nn.Module = adaptive.learner.learning
    return learning.register_forward_pre_hook(lambda module, inputs: fail())


@pytest.mark.slow
def test_a_poisoned_stream_is_noticed_and_undone(target: PreTrainedModel, drafter: PretrainedDrafter) -> None:
    stream = prompts(2)
    settings: dict[str, Any] = {
        "fail_safe": FailSafe(window_queries=2, num_sigmas=0),
        "learning_rate": 0.01,
        "kl_weight": 0,
    }
    with AdaptiveDrafter(target, drafter, policy=AlwaysUpdate(2), steps_per_update=3, **settings) as adaptive:
        serve(target, adaptive, stream * 8)
        reverts = adaptive.adaptation.num_reverts
        adaptive.fail_safe = FailSafe(window_queries=2, num_sigmas=0)
        adaptive.learner.learning_rate = 3e-4
        adaptive.learner.optimizer = new_optimizer(adaptive.learner.learning, 3e-4)
        climb(adaptive)
        earlier = []
        for _ in range(40):
            earlier.append(weights_of(drafter))
            serve(target, adaptive, stream)
            if adaptive.adaptation.num_reverts > reverts:
                break
        assert adaptive.adaptation.num_reverts == reverts + 1
        lengths = [adaptive.adaptation.mean_acceptance_length(at, at + 2) for at in range(16, 16 + 2 * len(earlier), 2)]
        assert lengths[-1] < max(lengths)
        restored = weights_of(drafter)
        assert any(all(torch.equal(restored[name], old[name]) for name in old) for old in earlier[:-1])
        for name, tensor in weights_of(adaptive.learner.learning).items():
            torch.testing.assert_close(tensor.double(), weights_of(drafter)[name])


def test_good_weights_are_those_that_served_a_good_window(target: PreTrainedModel, drafter: PretrainedDrafter) -> None:
    learner = AdaptiveDrafter(target, drafter).learner

    def at_the_end_of_a_good_window(value: float) -> None:
        torch.nn.init.constant_(drafter.norm.weight, value)
        learner.mark_good()

    for value in (1.0, 2.0, 3.0):
        at_the_end_of_a_good_window(value)
    torch.nn.init.constant_(drafter.norm.weight, 4.0)
    learner.revert()
    assert drafter.norm.weight.unique().tolist() == [2.0]  # the window that ended with 3.0 began with it
    assert learner.learning.norm.weight.unique().tolist() == [2.0]
    learner.mark_good()
    learner.revert()
    assert drafter.norm.weight.unique().tolist() == [2.0]


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_a_query_leaves_the_states_behind_its_drafts_along_the_accepted_paths(
    target: PreTrainedModel, num_blocks: int
) -> None:
    drafter = make_specblock(target, num_blocks=num_blocks, tree_budget=40).to(torch.float64)
    adaptive = AdaptiveDrafter(target, drafter, policy=AlwaysUpdate(1), learning_rate=0.05)
    with adaptive:  # a drafter that is sometimes right
        serve(target, adaptive, [PROMPTS["batch of one"]()["input_ids"]] * 8)
    adaptive = AdaptiveDrafter(target, drafter)
    query = recorded(target, adaptive, **PROMPTS["batch of one"]())
    rounds = drafter_rounds(adaptive)
    assert sum(rounds) > 0
    assert len(query.states) == len(query.target_hidden) > len(rounds)
    # Behind each place of a path stands the draft of the next one: the token taken was among the likeliest there.
    logits = adaptive.learner.step.head_logits(drafter, query.states)
    (row,) = query.rows
    ids, place, at = row["input_ids"], row["first_anchor"], 0
    chosen_ids = []
    for kept in rounds:
        for step in range(kept + 1):
            found = at < len(query.states) and torch.equal(query.target_hidden[at], row["last_hidden"][place + step])
            assert found or step == kept  # the last one may have had no children
            if found and step < kept:
                taken = adaptive.learner.step.draft_ids(ids[place + step + 1])
                assert int((logits[at] > logits[at, taken]).sum()) < max(drafter.options.branching)
            elif found and place + step + 1 < len(ids):
                chosen_ids.append(int(ids[place + step + 1]))
            at += found
        place += kept + 1
    assert at == len(query.states)
    assert query.chosen_ids.tolist() == chosen_ids
    assert len(query.rejected) == len(chosen_ids)


def test_rows_of_a_batch_leave_behind_what_each_would_alone(
    target: PreTrainedModel, drafter: PretrainedDrafter
) -> None:
    adaptive = AdaptiveDrafter(target, drafter)
    inputs = PROMPTS["ragged batch of three"]()
    together = recorded(target, adaptive, **inputs)
    rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
    alone = [recorded(target, adaptive, input_ids=ids[mask][None]) for ids, mask in rows]
    for name in ("states", "target_hidden", "rejected", "chosen_ids"):
        torch.testing.assert_close(getattr(together, name), torch.cat([getattr(query, name) for query in alone]))
    for name in ("num_rounds", "num_accepted", "num_tokens"):
        assert getattr(together, name) == sum(getattr(query, name) for query in alone)


def test_an_error_in_an_update_surfaces_before_the_next_token(
    target: PreTrainedModel, drafter: PretrainedDrafter
) -> None:
    before, stream = weights_of(drafter), prompts(3)
    adaptive = AdaptiveDrafter(target, drafter, policy=AlwaysUpdate(1))
    main = threading.get_ident()

    def fail() -> None:
        assert threading.get_ident() != main
        raise FloatingPointError("loss is nan")

    failing = fail_in_updates(adaptive, fail)
    serve(target, adaptive, stream[:1])
    with pytest.raises(RuntimeError, match="An update of the drafter failed: FloatingPointError: loss is nan") as error:
        target.generate(stream[1], assistant_model=adaptive, **GREEDY)
    assert isinstance(error.value.__cause__, FloatingPointError)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(drafter).items())
    failing.remove()
    serve(target, adaptive, stream[2:])  # told once; it goes on
    adaptive.close()
    assert len(adaptive.adaptation.updates) == 1


def test_an_error_in_the_last_update_surfaces_on_closing(target: PreTrainedModel, drafter: PretrainedDrafter) -> None:
    adaptive = AdaptiveDrafter(target, drafter, policy=AlwaysUpdate(1))
    fail_in_updates(adaptive, lambda: 1 / 0)
    serve(target, adaptive, prompts(1))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        adaptive.close()
    adaptive.close()


@pytest.mark.parametrize("what", ["loss", "weight"])
def test_an_update_that_is_no_number_is_refused(target: PreTrainedModel, drafter: PretrainedDrafter, what: str) -> None:
    before = weights_of(drafter)
    adaptive = AdaptiveDrafter(target, drafter, policy=AlwaysUpdate(1), steps_per_update=1)
    norm = adaptive.learner.learning.norm
    if what == "loss":
        broken = norm.register_forward_hook(lambda module, inputs, normed: normed * torch.nan)
    else:
        broken = norm.weight.register_hook(lambda gradient: gradient * torch.nan)
    serve(target, adaptive, prompts(1))
    message = {"loss": "at gradient step 1 of 1 the loss is nan", "weight": "weights are not finite after the last"}
    with pytest.raises(RuntimeError, match=f"An update of the drafter failed: FloatingPointError: {message[what]}"):
        adaptive.wait()
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(drafter).items())
    broken.remove()
    serve(target, adaptive, prompts(1))
    adaptive.close()
    assert all(bool(tensor.isfinite().all()) for tensor in weights_of(drafter).values())
    assert len(adaptive.adaptation.updates) == 1


def test_an_update_that_fails_half_way_leaves_nothing_behind(
    target: PreTrainedModel, drafter: PretrainedDrafter
) -> None:
    adaptive = AdaptiveDrafter(target, drafter, policy=AlwaysUpdate(1), learning_rate=0.05)

    def fail(*_: Any) -> None:
        raise FloatingPointError("behind the first step")

    adaptive.learner.optimizer.register_step_post_hook(fail)
    serve(target, adaptive, prompts(1))
    with pytest.raises(RuntimeError, match="behind the first step"):
        adaptive.wait()
    learned = weights_of(adaptive.learner.learning)
    assert all(torch.equal(tensor.float(), learned[name]) for name, tensor in weights_of(drafter).items())
    assert not adaptive.learner.optimizer.state


def test_a_call_in_which_an_update_fails_is_finished_and_the_next_one_tells(
    target: PreTrainedModel, drafter: PretrainedDrafter
) -> None:
    stream = prompts(2)
    alone = target.generate(stream[1], **GREEDY)
    adaptive = AdaptiveDrafter(target, drafter, policy=AlwaysUpdate(1))
    may_fail = threading.Event()

    def fail() -> None:
        may_fail.wait()
        raise FloatingPointError("loss is nan")

    class FailsNow(BaseStreamer):
        """Lets the update fail while a call is under way: behind its prompt comes what it writes."""

        parts = 0

        def put(self, value: Tensor) -> None:
            self.parts += 1
            if self.parts == 2:
                may_fail.set()
                finish_update(adaptive)

        def end(self) -> None:
            assert self.parts > 3

    fail_in_updates(adaptive, fail)
    target.generate(stream[0], assistant_model=adaptive, **GREEDY)
    served = target.generate(stream[1], assistant_model=adaptive, streamer=FailsNow(), **GREEDY)
    assert served.tolist() == alone.tolist()
    assert len(adaptive.adaptation.queries) == 2
    with pytest.raises(RuntimeError, match="An update of the drafter failed: FloatingPointError: loss is nan"):
        target.generate(stream[1], assistant_model=adaptive, **GREEDY)
    adaptive.close()


def test_a_revert_while_an_update_fails_brings_the_good_weights_back(
    target: PreTrainedModel, drafter: PretrainedDrafter
) -> None:
    class SecondIsBad(FailSafe):
        def observe(self, query: Any) -> Any:
            if len(adaptive.adaptation.queries) < 2:
                return None
            may_fail.set()
            return "bad"

    before, stream = weights_of(drafter), prompts(2)
    alone = target.generate(stream[1], **GREEDY)
    adaptive = AdaptiveDrafter(target, drafter, policy=AlwaysUpdate(1), fail_safe=SecondIsBad())
    may_fail = threading.Event()

    def fail() -> None:
        may_fail.wait()
        raise FloatingPointError("loss is nan")

    fail_in_updates(adaptive, fail)
    target.generate(stream[0], assistant_model=adaptive, **GREEDY)
    torch.nn.init.constant_(drafter.norm.weight, 5.0)  # what serves is bad
    assert target.generate(stream[1], assistant_model=adaptive, **GREEDY).tolist() == alone.tolist()
    for copy in (drafter, adaptive.learner.learning):
        assert all(torch.equal(before[name].float(), tensor.float()) for name, tensor in weights_of(copy).items())
    assert adaptive.adaptation.reverts == [2]
    with pytest.raises(RuntimeError, match="An update of the drafter failed: FloatingPointError: loss is nan"):
        adaptive.wait()
    adaptive.close()


@pytest.mark.slow
def test_the_anchor_pulls_towards_the_drafter_of_before(target: PreTrainedModel, drafter: PretrainedDrafter) -> None:
    stream, apart = prompts(2) * 6, []
    for weight in (0.0, 100.0):
        own = make_specblock(target).to(torch.float64)
        settings: dict[str, Any] = {"policy": AlwaysUpdate(2), "fail_safe": FailSafe(window_queries=100)}
        with AdaptiveDrafter(target, own, kl_weight=weight, learning_rate=0.01, **settings) as adaptive:
            serve(target, adaptive, stream)
        assert adaptive.adaptation.updates[0].divergence == pytest.approx(0.0, abs=1e-6)
        apart.append(adaptive.adaptation.updates[-1].divergence)
    assert apart[1] < apart[0] / 2


def test_an_adapted_drafter_saves_loads_and_says_that_it_was_adapted(
    target: PreTrainedModel, drafter: PretrainedDrafter, tmp_path: Path
) -> None:
    drafter.measurements = {"methods": {}, "target": "t"}
    with AdaptiveDrafter(target, drafter, policy=AlwaysUpdate(1)) as adaptive:
        serve(target, adaptive, prompts(2))
    adaptive.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path, target, dtype=torch.float64)
    for name, tensor in weights_of(loaded).items():
        assert torch.equal(tensor, weights_of(drafter)[name])
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["adapted"].startswith("2 queries, 0 head and 2 full updates in ")
    assert not (tmp_path / "measurements.json").exists()


def test_figures_of_the_example_stand_beside_what_an_adapted_drafter_says_of_itself(
    target: PreTrainedModel, drafter: PretrainedDrafter, tmp_path: Path
) -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "adapt_drafter.py"))
    with AdaptiveDrafter(target, drafter, policy=AlwaysUpdate(1)) as adaptive:
        serve(target, adaptive, prompts(1))
    adaptive.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "training.json").read_text())
    record = {"stream": "s", "compared": "c", "versions": "v"}
    first = record | {"policies": {"frozen": {"speed": 1}}, "command": "one"}
    again = record | {"policies": {"always update": {"speed": 2}}, "command": "two"}
    for figures in (first, again):
        example["write_record"](str(tmp_path), example["RECORDS"][False], figures)
    both = record | {"policies": first["policies"] | again["policies"], "command": "one; two"}
    assert json.loads((tmp_path / "training.json").read_text()) == said | {"adaptation": both}


def test_the_example_claims_a_comparison_only_where_a_frozen_pass_was_one_of_several(
    target: PreTrainedModel, drafter: PretrainedDrafter, tmp_path: Path
) -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "adapt_drafter.py"))
    for alone in (["frozen"], ["cost-aware bandit"], ["cost-aware bandit", "always update"]):
        assert example["comparison"](alone) == {}
    assert "served by the frozen and" in example["comparison"](["frozen", "cost-aware bandit"])["compared"]
    with AdaptiveDrafter(target, drafter, policy=AlwaysUpdate(1)) as adaptive:
        adaptive.save_pretrained(tmp_path)
    lone = {"stream": "s", "policies": {"always update": {"speed": 2}}, "command": "two", "versions": "v"}
    for _ in range(2):  # it has to be told from, and joined with, earlier ones without one
        example["write_record"](str(tmp_path), example["RECORDS"][True], lone)
    assert json.loads((tmp_path / "training.json").read_text())["poisoned adaptation"] == lone


def test_options_are_those_of_the_drafter(target: PreTrainedModel, drafter: PretrainedDrafter) -> None:
    adaptive = AdaptiveDrafter(target, drafter)
    adaptive.set_options(tree_budget=5)
    assert drafter.options.tree_budget == 5
    assert adaptive.method == "specblock"
    with pytest.raises(ValueError, match="tree_budget=0 must be an integer"):
        adaptive.set_options(tree_budget=0)
    adaptive.set_options(tree_budget="auto")
    target.generate(**one_prompt(), max_new_tokens=16, do_sample=False, assistant_model=adaptive)
    assert adaptive.stats.num_undrafted_steps == 0, "it learns from the drafts of every round"
    adaptive.options.num_blocks = 1
    assert adaptive.options is drafter.options
    with pytest.raises(AttributeError, match=r"AdaptiveDrafter\.num_blocks is no attribute but a drafting option"):
        adaptive.num_blocks = 3


def test_what_cannot_learn_or_serve_says_so(target: PreTrainedModel, drafter: PretrainedDrafter) -> None:
    with pytest.raises(ValueError, match="A DFlashDrafter does not support adaptation; methods that do: specblock"):
        AdaptiveDrafter(target, make_dflash(target))
    adaptive = AdaptiveDrafter(target, drafter)
    other = fresh_target("llama", "sdpa", torch.float64)
    with pytest.raises(ValueError, match="learns from target .* passed to another one"):
        other.generate(prompts(1)[0], assistant_model=adaptive, **GREEDY)
    adaptive.close()
    with pytest.raises(ValueError, match="is closed: pass its .drafter as assistant_model"):
        target.generate(prompts(1)[0], assistant_model=adaptive, **GREEDY)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate=-1.0 must be at least 0"),
        ({"kl_weight": -0.1}, "kl_weight=-0.1 must be at least 0"),
        ({"steps_per_update": 0}, "steps_per_update=0 must be at least 1"),
        ({"max_positions": 1}, "max_positions=1 must be at least 8"),
    ],
)
def test_a_setting_out_of_range_raises(
    target: PreTrainedModel, drafter: PretrainedDrafter, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptiveDrafter(target, drafter, **settings)


def test_the_drafter_may_also_come_first(target: PreTrainedModel, drafter: PretrainedDrafter) -> None:
    swapped: list[Any] = [drafter, target]
    with AdaptiveDrafter(*swapped, policy=AlwaysUpdate(1)) as adaptive:
        serve(target, adaptive, prompts(1))
    assert adaptive.drafter is drafter
    assert len(adaptive.adaptation.updates) == 1


def test_what_is_no_drafter_raises(target: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match="drafter is a LlamaForCausalLM; .* The target comes first, then the drafter"):
        AdaptiveDrafter(target, target)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="drafter='owner/drafter' is a str; it must be what load_drafter"):
        AdaptiveDrafter(target, "owner/drafter")  # type: ignore[arg-type]
