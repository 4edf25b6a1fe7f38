"""The drafting process: starting it, sending requests, keeping it between calls and ending it.

It is a new Python that runs `serve.py`, neither a fork nor a `multiprocessing` child. A process with threads must not
be forked, and `multiprocessing` would run the main program again, which fails in notebooks and in scripts without
`if __name__ == "__main__"`. The draft model's tensors are shared (`sharing.py`).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.decoding.devices import abilities
from hf_specdec.drafters.specbranch import serve
from hf_specdec.drafters.specbranch.branches import DraftingPlan
from hf_specdec.drafters.specbranch.drafting import BranchDrafting
from hf_specdec.drafters.specbranch.sharing import SharedModel
from hf_specdec.drafters.specbranch.worker import Pending, Worker

PIPE_BYTES = 1 << 18  # on Linux; the default of 64 KiB is too small for most drafts of calls that sample
# By the id of the model, so that drafters with the same draft model share one copy.
_SHARED: weakref.WeakValueDictionary[int, SharedModel] = weakref.WeakValueDictionary()
_SHARING = threading.Lock()


class ProcessWorker(Worker):
    """A process with its own interpreter, for draft models on a CPU.

    It starts in the background. `begin` waits until it has imported torch and transformers, which takes seconds.

    Raises:
        CannotShareError: as `SharedModel`.
        OSError: the system could not start a process.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.shared = _shared(model)
        self.owner = os.getpid()
        self.pool: DraftingProcesses | None = None  # the pool that it returns to after the call
        self.answered = True  # whether all requests have been answered
        self.process = subprocess.Popen(
            [sys.executable, serve.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pipesize=PIPE_BYTES,
            pass_fds=self.shared.inherited,
        )
        self.end = weakref.finalize(self, _end, self.process, self.owner)
        self.submit(serve.LOAD, [str(folder) for folder in sys.path], self.shared.address)
        self.loading = True

    def fits(self, model: PreTrainedModel) -> bool:
        """Whether the process is running, belongs to this process, and has this model with its current tensors."""
        return self.owner == os.getpid() and self.process.poll() is None and self.shared.holds(model)

    def begin(self, plan: DraftingPlan, num_threads: int, pool: DraftingProcesses) -> None:
        """Begins a call, after which the process returns to the pool `pool`.

        Raises:
            RuntimeError: the process could not load the draft model.
        """
        try:
            if self.loading:
                self.result()
        except Exception as error:
            raise RuntimeError(
                f"The drafting process could not load the draft model: {error} Its own error, if any, is above, or on "
                "the standard error. Draft in a thread (worker='thread')."
            ) from error
        self.loading = False
        self.call(serve.BEGIN, plan, num_threads)
        self.pool = pool

    def submit(self, method: str, *arguments: Any) -> Pending:
        self.answered = False
        self._guarded(lambda pipe: serve.send((method, arguments), pipe), self.process.stdin)
        return self

    def result(self) -> Any:
        """The result of the last submitted method; raises its exception, with the traceback of the process."""
        failed, answer = self._guarded(pickle.load, self.process.stdout)
        self.answered = True
        if failed:
            error, traceback = answer
            raise error from RemoteError(traceback)
        return answer

    def _guarded(self, talk: Callable[[Any], Any], pipe: Any) -> Any:
        try:
            return talk(pipe)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            raise RuntimeError(
                f"The drafting process ended unexpectedly, with exit code {self.process.poll()}. A negative one is the "
                "number of a signal; -9 often means that the system ran out of memory. Draft in a thread "
                "(worker='thread') or with a smaller draft model."
            ) from error

    def close(self) -> None:
        pool, self.pool = self.pool, None  # no reference cycle: the process must end with the drafter
        if self.answered and pool is not None:
            pool.idle.append(self)
        else:
            self.end()


class DraftingProcesses:
    """The idle processes of one drafter: one, or more after parallel calls."""

    def __init__(self) -> None:
        self.idle: list[ProcessWorker] = []

    def __reduce__(self) -> tuple[type[DraftingProcesses], tuple[()]]:
        return DraftingProcesses, ()  # a copy of the drafter starts its own

    def start(self, model: PreTrainedModel) -> None:
        """Starts a process for the next call, unless one is idle.

        Raises:
            CannotShareError, OSError: as `ProcessWorker`.
        """
        self.idle.append(self._take(model))

    def begin(self, drafting: BranchDrafting, num_threads: int) -> ProcessWorker:
        """A process for one call, which returns to this pool when it is closed.

        Raises:
            CannotShareError, OSError: as `ProcessWorker`.
            RuntimeError: the process could not load the draft model.
        """
        worker = self._take(drafting.drafter.model)
        try:
            worker.begin(drafting.plan, num_threads, self)
        except BaseException:  # including KeyboardInterrupt: loading takes seconds
            worker.end()
            raise
        return worker

    def close(self) -> None:
        """Ends the processes."""
        while self.idle:
            self.idle.pop().end()

    def _take(self, model: PreTrainedModel) -> ProcessWorker:
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while True:
                worker = self.idle.pop()
                if worker.fits(model):
                    return worker
                worker.end()
        return ProcessWorker(model)


class RemoteError(Exception):
    """The traceback of an error in the drafting process, as its cause."""

    def __init__(self, text: str) -> None:
        super().__init__(f'\n"""\n{text}"""')


def process_refusal(device: torch.device) -> str | None:
    """Why a draft model on `device` cannot run in a separate process; None if it can."""
    if not abilities(device).host_memory:
        return f"the draft model is on {device}, which another process cannot use"
    if not sys.executable or getattr(sys, "frozen", False):
        return "this program has no Python interpreter that could be started (sys.executable)"
    return None


def _shared(model: PreTrainedModel) -> SharedModel:
    with _SHARING:
        shared = _SHARED.get(id(model))
        if shared is None or not shared.holds(model):
            shared = _SHARED[id(model)] = SharedModel(model)
        return shared


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the parent, such as a data loader, does not own the process
        return
    process.kill()  # it has no state to be saved
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # a request that was sent only in part
            pipe.close()
