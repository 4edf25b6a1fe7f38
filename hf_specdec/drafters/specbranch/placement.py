"""Which worker a call gets: the process, the thread or none, and when the process is started."""

from __future__ import annotations

import warnings
from typing import Literal

from transformers import PreTrainedModel

from hf_specdec.decoding.devices import abilities
from hf_specdec.drafters.specbranch.drafting import BranchDrafting
from hf_specdec.drafters.specbranch.process import DraftingProcesses, process_refusal
from hf_specdec.drafters.specbranch.sharing import CannotShareError
from hf_specdec.drafters.specbranch.worker import InTurn, ThreadWorker, Worker

PlacedKind = Literal["process", "thread", "none"]
WorkerKind = Literal["auto", "process", "thread"]
WORKER_KINDS = ("auto", "process", "thread")


def place(kind: WorkerKind | Literal["none"], model: PreTrainedModel, processes: DraftingProcesses) -> PlacedKind:
    """Chooses for `"auto"`, and starts the process of a call so that it loads while the target reads the prompt.

    Raises:
        ValueError: `kind` is `"process"`, and the draft model cannot be shared.
        OSError: `kind` is `"process"`, and the system did not start one.
    """
    if kind == "auto" and process_refusal(model.device) is None:
        try:
            processes.start(model)
            return "process"
        except (CannotShareError, OSError) as error:
            warnings.warn(
                f"No process of its own for drafting: {error}. The draft model runs in a thread, which is slower where "
                "it is small. Pass worker='thread', and there is no warning.",
                stacklevel=2,
            )
    elif kind == "process":
        try:
            processes.start(model)
            return "process"
        except CannotShareError as error:
            raise ValueError(f"worker='process' cannot be used: {error}. Use worker='thread', or 'auto'.") from error
    processes.close()  # of calls with other options
    if kind == "auto":
        can = abilities(model.device)
        # Without streams two threads would share one queue of a device.
        return "thread" if can.host_memory or can.works_ahead else "none"
    return kind


def make_worker(kind: PlacedKind, drafting: BranchDrafting, num_threads: int, processes: DraftingProcesses) -> Worker:
    """Where to draft; `kind` is what `place` gave."""
    if kind == "process":
        return processes.begin(drafting, num_threads)
    return InTurn(drafting) if kind == "none" else ThreadWorker(drafting, num_threads)
