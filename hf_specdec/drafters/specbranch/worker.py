"""The worker that runs the draft model: serially, in a thread, or in a process.

All three run the same `BranchDrafting` and give the same drafts; only the speed differs. A thread shares the
interpreter with the target, which is sufficient on a GPU, where the host only launches kernels, and for large models on
a CPU. A small target's forward on a CPU is mostly Python code, so that two threads compete for the interpreter: on the
bundled pair a verification takes 7 ms alone and took 18 ms with a drafting thread, without any gain. A process
(`process.py`) has its own interpreter. `placement.py` chooses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from hf_specdec.decoding.devices import abilities
from hf_specdec.drafters.specbranch.drafting import BranchDrafting


class Pending(Protocol):
    """A result that may not be available yet."""

    def result(self) -> Any:
        """Waits for the result; raises the exception of the work."""


class Worker(ABC):
    """Runs methods of a `BranchDrafting`, one at a time."""

    @abstractmethod
    def submit(self, method: str, *arguments: Any) -> Pending:
        """Starts a method; the result of the previous one must have been read."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Runs a method and returns its result."""
        return self.submit(method, *arguments).result()

    def close(self) -> None:
        """Ends the worker, even while it runs a method."""


class SerialWorker(Worker):
    """Serial drafting: a method is run when it is submitted."""

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
        if self.stream is not None:  # pending work on the current stream may still be writing the weights
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def submit(self, method: str, *arguments: Any) -> Pending:
        return self.executor.submit(self._run, method, *arguments)

    def _run(self, method: str, *arguments: Any) -> Any:
        if self.stream is None:
            return getattr(self.drafting, method)(*arguments)
        with torch.cuda.device(self.stream.device), torch.cuda.stream(self.stream):
            result = getattr(self.drafting, method)(*arguments)
            self.stream.synchronize()  # the result may be read on any stream
            return result

    def close(self) -> None:
        self.drafting.stopped = True
        self.executor.shutdown(wait=True, cancel_futures=True)


def _use_threads(num_threads: int) -> None:
    torch.set_num_threads(num_threads)  # of the calling thread
