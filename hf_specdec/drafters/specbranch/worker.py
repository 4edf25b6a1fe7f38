"""Where the draft model runs: in turn with the target, in a thread beside it, or in a process beside it.

All three run the same `BranchDrafting` and give the same drafts; they differ in what they cost. A thread shares the
interpreter with the target: on a GPU, where the host only hands out work, and for large models on a CPU that is enough.
A small target's forward on a CPU is mostly Python, and two threads then take turns at the interpreter: on the bundled
pair a verification that takes 7 ms alone took 18 ms beside a drafting thread, so nothing was gained. A process
(`process.py`) has an interpreter of its own. `placement.py` chooses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from hf_specdec.decoding.devices import abilities
from hf_specdec.drafters.specbranch.drafting import BranchDrafting


class Pending(Protocol):
    """A result that may not be there yet."""

    def result(self) -> Any:
        """Waits for it; raises what the work raised."""


class Worker(ABC):
    """Runs methods of a `BranchDrafting`, one at a time."""

    @abstractmethod
    def submit(self, method: str, *arguments: Any) -> Pending:
        """Starts a method; the last one submitted must have been waited for."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Runs a method and waits for what it returns."""
        return self.submit(method, *arguments).result()

    def close(self) -> None:
        """Ends the worker, whatever it is doing."""


class InTurn(Worker):
    """No worker at all: a method is run when it is submitted."""

    def __init__(self, drafting: BranchDrafting) -> None:
        self.drafting = drafting

    def submit(self, method: str, *arguments: Any) -> Pending:
        future: Future[Any] = Future()
        future.set_result(getattr(self.drafting, method)(*arguments))
        return future


class ThreadWorker(Worker):
    """A thread with its own number of intra-op threads on a CPU, or its own stream on a GPU."""

    def __init__(self, drafting: BranchDrafting, num_threads: int) -> None:
        self.drafting = drafting
        self.executor = ThreadPoolExecutor(
            1, thread_name_prefix="hf_specdec-drafting", initializer=_use_threads, initargs=(num_threads,)
        )
        device = drafting.drafter.model.device
        self.stream = torch.cuda.Stream(device) if abilities(device).works_ahead else None
        if self.stream is not None:  # the weights may just have been written, by work that is still under way
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def submit(self, method: str, *arguments: Any) -> Pending:
        return self.executor.submit(self._run, method, *arguments)

    def _run(self, method: str, *arguments: Any) -> Any:
        if self.stream is None:
            return getattr(self.drafting, method)(*arguments)
        with torch.cuda.device(self.stream.device), torch.cuda.stream(self.stream):
            result = getattr(self.drafting, method)(*arguments)
            self.stream.synchronize()  # what comes out may be read on any stream
            return result

    def close(self) -> None:
        self.drafting.stopped = True
        self.executor.shutdown(wait=True, cancel_futures=True)


def _use_threads(num_threads: int) -> None:
    torch.set_num_threads(num_threads)  # of the calling thread
