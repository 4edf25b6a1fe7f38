"""Drafting beside the target: no races, errors that surface, nothing left behind."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_specdec.decoding.target import TargetModel
from hf_specdec.drafters.specbranch import SpecBranchDrafter
from hf_specdec.drafters.specbranch.drafting import BranchDrafting
from hf_specdec.drafters.specbranch.worker import process_refusal
from tests.methods import make_specbranch
from tests.targets import PROMPTS, make_target

CAN_FORK = process_refusal(torch.device("cpu")) is None
WORKERS = ["thread", pytest.param("process", marks=pytest.mark.skipif(not CAN_FORK, reason="needs fork"))]
SAMPLED: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.9, "top_k": 0}
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def left_behind() -> list[str]:
    """Our threads and processes that are still there; a process may wait for the next call as long as its drafter."""
    gc.collect()
    threads = [thread.name for thread in threading.enumerate() if "hf_specdec" in thread.name]
    return threads + [process.name for process in multiprocessing.active_children()]


def delayed(function: Callable[..., Any], most_s: float, source: random.Random) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        time.sleep(source.random() * most_s)
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("worker", WORKERS)
def test_results_do_not_depend_on_who_is_faster(
    worker: str, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    target = make_target("llama", "sdpa", num_hidden_layers=1)
    sampled = SAMPLED | {"max_new_tokens": 6}
    prompts = PROMPTS["batch of one"]()
    drafter = make_specbranch(target, noise=0.02, worker=worker, candidates="drawn")
    source = random.Random(0)
    monkeypatch.setattr(TargetModel, "verify", delayed(TargetModel.verify, 0.001, source))  # either side's forwards
    monkeypatch.setattr(BranchDrafting, "draft_ahead", delayed(BranchDrafting.draft_ahead, 0.002, source))
    seen = set()
    for _ in range(200 if pytestconfig.getoption("exhaustive") else 40):
        torch.manual_seed(5)
        output = target.generate(**prompts, **sampled, assistant_model=drafter)
        assert drafter.stats is not None
        seen.add((tuple(output[0].tolist()), tuple(drafter.stats.per_step_accepted[0]), drafter.stats.num_path_drafts))
    assert len(seen) == 1
    del drafter
    assert not left_behind()


@pytest.mark.skipif(not CAN_FORK, reason="needs fork")
def test_thread_process_and_seed_say_the_same() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    outputs = []
    for worker in ("thread", "process"):
        torch.manual_seed(3)
        drafter = make_specbranch(target, noise=0.02, worker=worker)
        outputs.append(target.generate(**prompts, **SAMPLED, assistant_model=drafter).tolist())
    assert outputs[0] == outputs[1]


@pytest.mark.each_value
@pytest.mark.parametrize("method", ["start", "draft", "draft_ahead"])
@pytest.mark.parametrize("worker", WORKERS)
def test_an_error_of_the_worker_surfaces_and_the_next_call_works(
    worker: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = make_specbranch(target, worker=worker)
    threads = torch.get_num_threads()

    def broken_on_purpose(self: BranchDrafting, *args: Any) -> Any:
        raise ArithmeticError("the draft model stumbled")

    with monkeypatch.context() as patch:
        patch.setattr(BranchDrafting, method, broken_on_purpose)
        with pytest.raises(ArithmeticError, match="the draft model stumbled") as caught:
            target.generate(**prompts, **GREEDY, assistant_model=drafter)
    told = "".join(traceback.format_exception(caught.type, caught.value, caught.tb))
    assert "broken_on_purpose" in told, "the traceback does not lead to the error"
    assert not left_behind()
    assert torch.get_num_threads() == threads
    assisted = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert assisted.tolist() == target.generate(**prompts, **GREEDY).tolist()
    del drafter, caught  # the error's traceback holds the drafter too
    assert not left_behind()


def forked(drafter: SpecBranchDrafter) -> int | None:
    """The process id of a drafter's process that waits for the next call."""
    worker = drafter._idle_process.worker
    return None if worker is None else worker.process.pid


@pytest.mark.skipif(not CAN_FORK, reason="needs fork")
def test_the_process_waits_for_the_next_call_and_ends_with_its_drafter() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = make_specbranch(target, worker="process")
    first = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    waiting = forked(drafter)
    assert waiting is not None
    # Another choice rule and another plan, in the same process.
    sampled = []
    for _ in range(2):
        torch.manual_seed(3)
        sampled.append(target.generate(**prompts, **SAMPLED, assistant_model=drafter).tolist())
    assert sampled[0] == sampled[1]
    drafter.set_options(k_max=1)
    assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == first.tolist()
    assert forked(drafter) == waiting
    copied = copy.deepcopy(drafter)
    assert forked(copied) is None
    assert left_behind() == ["hf_specdec-drafting"]
    del drafter, copied
    assert not left_behind()


@pytest.mark.skipif(not CAN_FORK, reason="needs fork")
@pytest.mark.parametrize("change", ["weights", "threads", "killed"])
def test_a_process_that_would_draft_with_something_else_is_replaced(change: str) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = make_specbranch(target, worker="process", noise=0.0)
    target.generate(**prompts, **GREEDY, assistant_model=drafter)
    before, kept = forked(drafter), drafter.stats.num_path_kept  # type: ignore[union-attr]
    assert before is not None
    if change == "weights":
        assert drafter.draft_model is not None
        with torch.no_grad():
            drafter.draft_model.get_input_embeddings().weight.neg_()
    elif change == "threads":
        drafter.set_options(worker_threads=2)
    else:
        os.kill(before, signal.SIGKILL)
        drafter._idle_process.worker.process.join()  # type: ignore[union-attr]
    target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert forked(drafter) not in (None, before)
    assert (drafter.stats.num_path_kept < kept) == (change == "weights")  # type: ignore[union-attr]
    assert left_behind() == ["hf_specdec-drafting"]


@pytest.mark.skipif(not CAN_FORK, reason="needs fork")
def test_a_worker_that_was_killed_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = make_specbranch(target, worker="process")
    monkeypatch.setattr(BranchDrafting, "draft_ahead", lambda self, *args: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError, match=r"drafting process ended by itself, with exit code -9"):
        target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert not left_behind()


@pytest.mark.parametrize("worker", WORKERS)
def test_an_interrupt_ends_promptly_and_leaves_nothing(worker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = make_specbranch(target, worker=worker)
    verify, rounds = TargetModel.verify, iter(range(10**6))

    def interrupted(self: TargetModel, *args: Any, **kwargs: Any) -> Any:
        if self.model is target and next(rounds) == 3:
            signal.raise_signal(signal.SIGINT)  # as Ctrl-C does, while the draft model is at work
        return verify(self, *args, **kwargs)

    monkeypatch.setattr(TargetModel, "verify", interrupted)
    # A shell that starts the tests in the background has them ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            target.generate(**prompts, **GREEDY, assistant_model=drafter)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not left_behind()


def test_an_interrupted_thread_stops_at_its_next_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = make_specbranch(target, worker="thread", max_depth=256, speed_ratio=200.0, lengths="fixed")
    drafter.draft_model.config.max_position_embeddings = 2048  # type: ignore[union-attr]
    forwards: list[bool] = []
    run = BranchDrafting._run

    def slow(self: BranchDrafting, *args: Any) -> None:
        forwards.append(self.stopped)
        time.sleep(0.005)
        run(self, *args)

    def failing(self: TargetModel, *args: Any, **kwargs: Any) -> Any:
        if self.model is target:
            raise KeyboardInterrupt
        return verify(self, *args, **kwargs)

    verify = TargetModel.verify
    monkeypatch.setattr(BranchDrafting, "_run", slow)
    monkeypatch.setattr(TargetModel, "verify", failing)
    with pytest.raises(KeyboardInterrupt):
        target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert sum(forwards) <= 1
    assert len(forwards) < 200
    assert not left_behind()


def test_rows_that_diverge_share_one_worker() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    drafter: SpecBranchDrafter = make_specbranch(target, noise=0.01, worker="thread", lengths="confidence")
    settings = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": [7, 11], "pad_token_id": 0}
    alone = target.generate(**prompts, **settings)
    assert target.generate(**prompts, **settings, assistant_model=drafter).tolist() == alone.tolist()
