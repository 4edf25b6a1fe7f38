"""The drafting process: a script that `process.py` starts. It imports nothing of the program that its parent runs.

Requests come in on the standard input and answers go out on the standard output, both pickled. A request is `LOAD`,
`BEGIN` or a method of `BranchDrafting`, with its arguments; an answer is whether it failed, and what it gave. The
process ends when its input does: its parent has closed it, or has ended.
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
    """Writes draft distributions as arrays: torch's own way takes longer, by a hundredth of a sampled round."""

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
    """What the requests of a process's life are about: one draft model, and the call that is under way."""

    def __init__(self) -> None:
        self.model: Any = None
        self.drafting: Any = None

    def answer(self, request: str, arguments: tuple[Any, ...]) -> Any:
        """What a request gives."""
        if request == LOAD:
            sys.path[:], address = arguments  # before anything of ours is imported
            from hf_specdec.drafters.specbranch.sharing import open_shared

            self.model = open_shared(*address)
            gc.freeze()  # the modules and the model stay; collections need not look at them
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
    """Answers requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes; the parent ends this one
    with (
        contextlib.suppress(BrokenPipeError),  # the parent has ended while it was waiting for an answer
        os.fdopen(os.dup(0), "rb") as requests,
        os.fdopen(os.dup(1), "wb") as answers,
    ):
        os.dup2(2, 1)  # what libraries print must not get among the answers
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
