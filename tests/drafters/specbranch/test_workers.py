"""Drafting beside the target: no races, errors that surface, nothing left behind.

Starting a drafting process takes seconds, so most tests share the drafter that has one.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_specdec.drafters.specbranch import SpecBranchDrafter
from hf_specdec.drafters.specbranch.process import DraftingProcesses, ProcessWorker
from tests.drafters.specbranch.switches import add_switches
from tests.methods import make_causal_lm, make_specbranch
from tests.targets import PROMPTS, fresh_target, make_target

WORKERS = ["thread", "process"]
SAMPLED: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.9, "top_k": 0}
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def with_switches(worker: str, **options: Any) -> SpecBranchDrafter:
    """A drafter whose draft model waits up to two milliseconds before a forward, and can be broken."""
    drafter = make_specbranch(make_target("llama", "sdpa"), noise=0.02, worker=worker, **options)
    add_switches(drafter.draft_model, delay_s=0.002)
    return drafter


@pytest.fixture(scope="module")
def drafters() -> Iterator[dict[str, SpecBranchDrafter]]:
    made = {worker: with_switches(worker, candidates="drawn") for worker in WORKERS}
    yield made
    pid = process_of(made["process"])
    made.clear()
    gc.collect()
    assert pid is None or not runs(pid)


def process_of(drafter: SpecBranchDrafter) -> int | None:
    """The process id of a drafter's process that waits for the next call."""
    waiting = [worker.process.pid for worker in drafter._processes.idle]
    assert len(waiting) < 2
    return waiting[0] if waiting else None


def runs(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def threads_left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "hf_specdec" in thread.name]


@pytest.mark.parametrize("worker", WORKERS)
def test_results_do_not_depend_on_who_is_faster(
    worker: str, drafters: dict[str, SpecBranchDrafter], pytestconfig: pytest.Config
) -> None:
    target, drafter = fresh_target("llama", "sdpa"), drafters[worker]
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


def test_thread_process_and_seed_say_the_same(drafters: dict[str, SpecBranchDrafter]) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    outputs = []
    for worker in WORKERS:
        torch.manual_seed(3)
        outputs.append(target.generate(**prompts, **SAMPLED, assistant_model=drafters[worker]).tolist())
    assert outputs[0] == outputs[1]


def test_the_process_drafts_by_the_options_and_weights_of_each_call(drafters: dict[str, SpecBranchDrafter]) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = drafters["process"]
    alone = target.generate(**prompts, **GREEDY).tolist()
    assert drafter.draft_model is not None
    embeddings = drafter.draft_model.get_input_embeddings().weight.data
    kept, seen = embeddings.clone(), []
    for k_max, sign in ((3, 1), (1, 1), (3, -1), (3, 1)):
        drafter.set_options(k_max=k_max)
        embeddings.copy_(sign * kept)
        assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone
        assert drafter.stats is not None
        seen.append((process_of(drafter), drafter.stats.num_path_kept))
    assert seen[0] == seen[3]
    assert seen[2][1] < seen[0][1], "the process did not see that the weights had changed"
    assert len({pid for pid, _ in seen}) == 1
    assert process_of(copy.deepcopy(drafter)) is None


@pytest.mark.parametrize("forward", [0, 1, 4])  # the prefill, the first chain, beside the target
@pytest.mark.parametrize("worker", WORKERS)
def test_an_error_of_the_worker_surfaces_and_the_next_call_works(
    worker: str, forward: int, drafters: dict[str, SpecBranchDrafter]
) -> None:
    target, prompts, drafter = make_target("llama", "sdpa"), PROMPTS["batch of one"](), drafters[worker]
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


@pytest.mark.parametrize("worker", WORKERS)
def test_an_interrupt_ends_promptly_and_leaves_nothing(worker: str, drafters: dict[str, SpecBranchDrafter]) -> None:
    target, prompts = fresh_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = drafters[worker]
    target.generate(**prompts, **GREEDY, assistant_model=drafter)
    pid, forwards = process_of(drafter), iter(range(10**6))

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
    assert pid is None or not runs(pid)


def test_an_interrupted_thread_stops_at_its_next_forward() -> None:
    target, prompts = fresh_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = with_switches("thread", max_depth=256, speed_ratio=200.0, lengths="fixed")
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
    drafter: SpecBranchDrafter = make_specbranch(target, noise=0.01, worker="thread", lengths="confidence")
    settings = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": [7, 11], "pad_token_id": 0}
    alone = target.generate(**prompts, **settings)
    assert target.generate(**prompts, **settings, assistant_model=drafter).tolist() == alone.tolist()


# The life of processes, without waiting until they are ready.


def draft_model() -> PreTrainedModel:
    return make_causal_lm(make_target("llama", "sdpa")).model


def test_a_waiting_process_ends_with_its_drafter_and_with_another_draft_model() -> None:
    target = make_target("llama", "sdpa")
    drafter, model = make_specbranch(target), draft_model()
    drafter.attach(model)
    drafter._processes.start(model)
    first = process_of(drafter)
    assert first is not None
    assert runs(first)
    other = draft_model()
    drafter.attach(other)
    assert not runs(first)
    drafter._processes.start(other)
    second = process_of(drafter)
    assert second is not None
    assert runs(second)
    del drafter
    gc.collect()
    assert not runs(second)


def test_a_process_is_kept_while_it_has_the_draft_model_as_it_is() -> None:
    processes, model = DraftingProcesses(), draft_model()
    seen: list[int] = []

    def start() -> ProcessWorker:
        processes.start(model)
        (worker,) = processes.idle
        seen.append(worker.process.pid)
        return worker

    start()
    model.load_state_dict(model.state_dict())
    assert start().shared.holds(model)
    assert len(set(seen)) == 1
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    last = start()
    assert len(set(seen)) == 2
    last.process.kill()
    last.process.wait()
    start()
    assert len(set(seen)) == 3
    others = DraftingProcesses()
    others.start(model)  # a second drafter with the same draft model
    assert others.idle[0].shared is processes.idle[0].shared
    processes.close()
    others.close()
    assert not any(map(runs, seen))


def test_a_call_that_ends_before_the_process_has_answered_ends_the_process() -> None:
    worker = ProcessWorker(draft_model())
    assert runs(worker.process.pid)
    worker.close()
    assert not runs(worker.process.pid)


def test_a_process_that_was_killed_is_told_of() -> None:
    processes, model = DraftingProcesses(), draft_model()
    processes.start(model)
    (worker,) = processes.idle
    worker.process.kill()
    with pytest.raises(RuntimeError, match=r"drafting process ended unexpectedly, with exit code -9.*worker='thread'"):
        worker.call("draft")
    processes.close()


def test_a_draft_model_that_cannot_be_shared_drafts_in_a_thread_and_says_so() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = make_specbranch(target, worker="auto")
    drafter.draft_model.extra = lambda: None  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match=r"cannot be pickled: .*lambda.* runs in a thread"):
        assisted = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert assisted.tolist() == target.generate(**prompts, **GREEDY).tolist()
    drafter.set_options(worker="process")
    with pytest.raises(ValueError, match=r"worker='process' cannot be used: .*lambda.*Use worker='thread'"):
        target.generate(**prompts, **GREEDY, assistant_model=drafter)


PROGRAM = """
import torch
from tests.methods import make_specbranch
from tests.targets import PROMPTS, make_target

print("the program runs")  # at its top level: it has no `if __name__ == "__main__"`
target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
drafter = make_specbranch(target, worker="process")
settings = {"max_new_tokens": 8, "do_sample": False}
same = target.generate(**prompts, **settings).equal(target.generate(**prompts, **settings, assistant_model=drafter))
print("the same:", same, len(drafter._processes.idle))
"""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", ["standard input", "-c", "file"])
def test_a_program_without_a_main_guard_drafts_in_a_process(way: str, tmp_path: Any) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    arguments = {"standard input": ["-"], "-c": ["-c", PROGRAM], "file": [str(tmp_path / "program.py")]}[way]
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    done = subprocess.run(
        [sys.executable, *arguments],
        input=PROGRAM,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
        timeout=240,
    )
    assert done.stdout.split("\n") == ["the program runs", "the same: True 1", ""], done.stderr
    assert "Error" not in done.stderr
