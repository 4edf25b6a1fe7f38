"""Where the draft model runs: in turn with the target, in a thread beside it, or in a process beside it.

All three run the same `BranchDrafting` and give the same drafts; they differ in what they cost. A thread shares the
interpreter with the target: on a GPU, where the host only hands out work, and for large models on a CPU that is enough.
A small target's forward on a CPU is mostly Python, and two threads then take turns at the interpreter: on the bundled
pair a verification that takes 7 ms alone took 18 ms beside a drafting thread, so nothing was gained. A process has an
interpreter of its own. It is forked, so that it shares the weights' memory with its parent. Forking it and taking it
down took 50 ms, a tenth of a short call, so it waits for the drafter's next call and ends with the drafter, with an
error, or when the draft model is no longer what it was.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Literal, Protocol

import torch
from transformers import PreTrainedModel

from hf_specdec.decoding.devices import abilities
from hf_specdec.drafters.specbranch.drafting import BranchDrafting

WorkerKind = Literal["auto", "process", "thread", "none"]
BEGIN = "begin a call"


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


class ProcessWorker(Worker):
    """A forked process with its own interpreter, for draft models on a CPU."""

    def __init__(self, model: PreTrainedModel, num_threads: int) -> None:
        self.stamp = _stamp(model, num_threads)
        self.idle: IdleProcess | None = None
        self.whole = True  # whether all that was asked has been answered, and without an error
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(model, theirs, self.connection, num_threads), name="hf_specdec-drafting", daemon=True
        )
        with warnings.catch_warnings():
            # Python 3.12 and newer warn that a lock of another thread may be held in the child. The child runs the
            # draft model and writes to a pipe; it starts no pool of the parent's (`_serve`), like PyTorch's loaders.
            warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
            self.process.start()
        theirs.close()
        self.end = weakref.finalize(self, _end, self.process, self.connection, os.getpid())

    def submit(self, method: str, *arguments: Any) -> Pending:
        self.whole = False
        self._guarded(lambda: self.connection.send_bytes(pickle.dumps((method, arguments))))
        return self

    def result(self) -> Any:
        """What the last submitted method returned; raises what it raised, with the traceback it had there."""
        failed, answer = pickle.loads(self._guarded(self.connection.recv_bytes))
        if failed:
            error, there = answer
            raise error from RemoteError(there)
        self.whole = True
        return answer

    def _guarded(self, talk: Callable[[], Any]) -> Any:
        try:
            return talk()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self.process.join(5)
            raise RuntimeError(
                f"The drafting process ended by itself, with exit code {self.process.exitcode}. A negative one is the "
                "signal that ended it; -9 is often the system that ran out of memory. Draft in a thread "
                "(worker='thread') or with a smaller draft model."
            ) from error

    def close(self) -> None:
        idle, self.idle = self.idle, None  # no cycle: the process ends as soon as the drafter does
        if self.whole and idle is not None:
            idle.worker = self
        else:
            self.end()


class IdleProcess:
    """Keeps the drafting process of one drafter from call to call."""

    def __init__(self) -> None:
        self.worker: ProcessWorker | None = None

    def __reduce__(self) -> tuple[type[IdleProcess], tuple[()]]:
        return IdleProcess, ()  # a copy of the drafter forks its own

    def begin(self, drafting: BranchDrafting, num_threads: int) -> ProcessWorker:
        """A process for one call, which comes back here when it is closed."""
        model = drafting.drafter.model
        worker, self.worker = self.worker, None  # a second call at the same time gets its own
        if worker is None or worker.stamp != _stamp(model, num_threads) or not worker.process.is_alive():
            if worker is not None:
                worker.end()
            worker = ProcessWorker(model, num_threads)
        worker.idle = self
        worker.call(BEGIN, drafting.plan)
        return worker


class RemoteError(Exception):
    """The traceback of an error in the drafting process, as its cause."""

    def __init__(self, text: str) -> None:
        super().__init__(f'\n"""\n{text}"""')


def make_worker(kind: WorkerKind, drafting: BranchDrafting, num_threads: int, idle: IdleProcess) -> Worker:
    """Where to draft; `kind` as `SpecBranchDrafter.worker`."""
    device = drafting.drafter.model.device
    if kind == "auto":
        # Without streams two threads would share one queue of a device.
        beside = abilities(device).host_memory or abilities(device).works_ahead
        kind = "process" if process_refusal(device) is None else "thread" if beside else "none"
    if kind == "none":
        return InTurn(drafting)
    return idle.begin(drafting, num_threads) if kind == "process" else ThreadWorker(drafting, num_threads)


def process_refusal(device: torch.device) -> str | None:
    """Why a draft model on `device` cannot run in a process of its own here; None where it can."""
    if not abilities(device).host_memory:
        return f"the draft model is on {device}, which a forked process cannot use"
    if "fork" not in multiprocessing.get_all_start_methods() or sys.platform == "darwin":
        return f"{sys.platform} cannot fork a process that has loaded PyTorch"
    if multiprocessing.current_process().daemon:
        return "this is a daemonic process, which may have no children"
    return None


def _use_threads(num_threads: int) -> None:
    torch.set_num_threads(num_threads)  # of the calling thread


def _stamp(model: PreTrainedModel, num_threads: int) -> tuple[Any, ...]:
    """What a forked process must have been forked with; the weights it sees are those of that time."""
    tensors = [*model.parameters(), *model.buffers()]
    versions = [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]
    return id(model), num_threads, os.getpid(), versions


def _end(process: Any, connection: Connection, parent: int) -> None:
    if os.getpid() != parent:  # a copy of the parent, say a data loader, which this process does not belong to
        return
    connection.close()
    process.kill()  # it holds nothing that would have to be put away
    process.join()
    process.close()


def _serve(model: PreTrainedModel, connection: Connection, parents: Connection, num_threads: int) -> None:
    """The life of the drafting process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the parent ends this process
    parents.close()  # else the end of the parent would not be the end of the pipe

    def answer_requests() -> None:
        _use_threads(num_threads)
        drafting: BranchDrafting | None = None
        while True:
            try:
                method, arguments = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                return  # the parent has gone
            try:
                if method == BEGIN:
                    drafting = BranchDrafting(model, *arguments)
                    answer: tuple[bool, Any] = (False, None)
                else:
                    answer = (False, getattr(drafting, method)(*arguments))
            except Exception as error:
                answer = (True, (_picklable(error), traceback.format_exc()))
            try:
                connection.send_bytes(pickle.dumps(answer))
            except OSError:
                return

    # In a thread of its own: the forked one may own a pool of OpenMP threads, which did not come along.
    thread = threading.Thread(target=answer_requests, name="drafting")
    thread.start()
    thread.join()
    os._exit(0)  # nothing of the parent's is to be put away a second time


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
