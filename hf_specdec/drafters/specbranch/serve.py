"""The drafting process: a script that `process.py` starts. It does not import the parent's main program.

Pickled requests arrive on the standard input, and pickled answers are written to the standard output. A request is
`LOAD`, `BEGIN` or a method of `BranchDrafting`, with its arguments; an answer is whether it failed, and the result or
error. The process ends at the end of its input, which the parent closes, at the latest when it ends itself.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import sys
import traceback
from typing import Any

LOAD = "load the model"
BEGIN = "begin a call"


class Pickler(pickle.Pickler):
    """Pickles draft distributions as numpy arrays: torch's pickling takes longer, by 1% of a round that samples."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor or value.dtype != torch.float32 or not value.is_cpu:
            return NotImplemented
        return torch.from_numpy, (value.numpy(),)


def send(value: Any, pipe: Any) -> None:
    """Writes a request or an answer."""
    Pickler(pipe, pickle.HIGHEST_PROTOCOL).dump(value)
    pipe.flush()


class Server:
    """The state of the process: the draft model, and the drafting of the current call."""

    def __init__(self) -> None:
        self.model: Any = None
        self.drafting: Any = None

    def answer(self, request: str, arguments: tuple[Any, ...]) -> Any:
        """Runs a request and returns its result."""
        if request == LOAD:
            sys.path[:], address = arguments  # before the first import of hf_specdec
            from hf_specdec.drafters.specbranch.sharing import open_shared

            self.model = open_shared(*address)
            gc.freeze()  # excludes modules and model from later collections
            return None
        if request == BEGIN:
            import torch

            from hf_specdec.drafters.specbranch.drafting import BranchDrafting

            plan, num_threads = arguments
            torch.set_num_threads(num_threads)
            self.drafting = BranchDrafting(self.model, plan)
            return None
        return getattr(self.drafting, request)(*arguments)


def main() -> None:
    """Answers requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to both processes; the parent ends this one
    with (
        contextlib.suppress(BrokenPipeError),  # the parent has ended while it waited for an answer
        os.fdopen(os.dup(0), "rb") as requests,
        os.fdopen(os.dup(1), "wb") as answers,
    ):
        os.dup2(2, 1)  # output of libraries goes to the standard error, not between the answers
        server = Server()
        while True:
            try:
                request = pickle.load(requests)
            except EOFError:
                return
            try:
                answer = False, server.answer(*request)
            except Exception as error:
                answer = True, (_picklable(error), traceback.format_exc())
            send(answer, answers)


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


if __name__ == "__main__":
    main()
