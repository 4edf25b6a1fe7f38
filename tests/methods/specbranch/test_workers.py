"""Drafting beside the target: no races, errors that surface, nothing left behind."""

from __future__ import annotations

import random
import signal
import threading
import time
import traceback
from typing import Any

import pytest
import torch

from hf_specdec.methods.specbranch import SpecBranchDrafter
from tests.method_table import make_specbranch
from tests.methods.specbranch.switches import add_switches
from tests.targets import PROMPTS, fresh_target, make_target

SAMPLED: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.9, "top_k": 0}
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def with_switches(**options: Any) -> SpecBranchDrafter:
    """A drafter whose draft model waits up to two milliseconds before a forward, and can be broken."""
    drafter = make_specbranch(make_target("llama", "sdpa"), noise=0.02, **options)
    add_switches(drafter.draft_model, delay_s=0.002)
    return drafter


@pytest.fixture(scope="module")
def drafter() -> SpecBranchDrafter:
    return with_switches(candidates="drawn")


def threads_left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "hf_specdec" in thread.name]


@pytest.mark.slow
def test_results_do_not_depend_on_who_is_faster(drafter: SpecBranchDrafter, pytestconfig: pytest.Config) -> None:
    target = fresh_target("llama", "sdpa")
    source = random.Random(0)
    target.register_forward_pre_hook(lambda *_: time.sleep(source.random() * 0.002))
    seen = set()
    for _ in range(200 if pytestconfig.getoption("exhaustive") else 30):
        torch.manual_seed(5)
        output = target.generate(
            **PROMPTS["batch of one"](), **SAMPLED | {"max_new_tokens": 6}, assistant_model=drafter
        )
        assert drafter.stats is not None
        seen.add((tuple(output[0].tolist()), tuple(drafter.stats.per_step_accepted[0]), drafter.stats.num_path_drafts))
    assert len(seen) == 1
    assert not threads_left()


@pytest.mark.parametrize("forward", [0, 1, 4])  # the prefill, the first chain, beside the target
def test_an_error_of_the_worker_surfaces_and_the_next_call_works(forward: int, drafter: SpecBranchDrafter) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    switches: Any = drafter.draft_model
    threads = torch.get_num_threads()
    switches.fails_at.copy_(switches.forwards + forward)
    with pytest.raises(ArithmeticError, match="the draft model stumbled") as caught:
        target.generate(**prompts, **GREEDY, assistant_model=drafter)
    told = "".join(traceback.format_exception(caught.type, caught.value, caught.tb))
    assert "broken_on_purpose" in told, "the traceback does not lead to the error"
    assert not threads_left()
    assert torch.get_num_threads() == threads
    assisted = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert assisted.tolist() == target.generate(**prompts, **GREEDY).tolist()


def test_an_interrupt_ends_promptly_and_leaves_nothing(drafter: SpecBranchDrafter) -> None:
    target, prompts = fresh_target("llama", "sdpa"), PROMPTS["batch of one"]()
    forwards = iter(range(10**6))

    def interrupt(*_: Any) -> None:
        if next(forwards) == 3:
            signal.raise_signal(signal.SIGINT)  # as Ctrl-C does, while the draft model is at work

    target.register_forward_pre_hook(interrupt)
    # A shell that starts the tests in the background has them ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            target.generate(**prompts, **GREEDY, assistant_model=drafter)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not threads_left()


def test_an_interrupted_thread_stops_at_its_next_forward() -> None:
    target, prompts = fresh_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = with_switches(depth=256, speed_ratio=200.0, lengths="fixed")
    switches: Any = drafter.draft_model
    switches.config.max_position_embeddings = 2048
    seen: list[int] = []

    def interrupt(*_: Any) -> None:
        if drafter.stats is not None and int(switches.forwards) > 1:  # after its prefill
            seen.append(int(switches.forwards))
            raise KeyboardInterrupt

    target.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert int(switches.forwards) - seen[0] <= 2
    assert not threads_left()


def test_rows_that_diverge_share_one_worker() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    drafter: SpecBranchDrafter = make_specbranch(target, noise=0.01, lengths="confidence")
    settings = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": [7, 11], "pad_token_id": 0}
    alone = target.generate(**prompts, **settings)
    assert target.generate(**prompts, **settings, assistant_model=drafter).tolist() == alone.tolist()
