"""Chooses a call's worker (process, thread or serial), and starts the process."""

from __future__ import annotations

import warnings
from typing import Literal

from transformers import PreTrainedModel

from hf_specdec.decoding.devices import abilities
from hf_specdec.drafters.specbranch.drafting import BranchDrafting
from hf_specdec.drafters.specbranch.process import DraftingProcesses, process_refusal
from hf_specdec.drafters.specbranch.sharing import CannotShareError
from hf_specdec.drafters.specbranch.worker import SerialWorker, ThreadWorker, Worker

ChosenKind = Literal["process", "thread", "none"]
WorkerKind = Literal["auto", "process", "thread"]


def choose_worker(
    kind: WorkerKind | Literal["none"], model: PreTrainedModel, processes: DraftingProcesses
) -> ChosenKind:
    """Resolves `"auto"`, and starts the call's process, so that it loads while the target runs the prompt.

    Raises:
        ValueError: `kind` is `"process"`, and the draft model cannot be shared.
        OSError: `kind` is `"process"`, and the system could not start one.
    """
    if kind == "auto" and process_refusal(model.device) is None:
        try:
            processes.start(model)
            return "process"
        except (CannotShareError, OSError) as error:
            warnings.warn(
                f"Drafting cannot run in a separate process: {error}. The draft model runs in a thread, which is "
                "slower for small models. Pass worker='thread' to avoid this warning.",
                stacklevel=2,
            )
    elif kind == "process":
        try:
            processes.start(model)
            return "process"
        except CannotShareError as error:
            raise ValueError(f"worker='process' cannot be used: {error}. Use worker='thread', or 'auto'.") from error
    processes.close()  # from calls with other options
    if kind == "auto":
        can = abilities(model.device)
        # Without streams, two threads would share one queue of the device.
        return "thread" if can.host_memory or can.works_ahead else "none"
    return kind


def make_worker(kind: ChosenKind, drafting: BranchDrafting, num_threads: int, processes: DraftingProcesses) -> Worker:
    """Makes the worker; `kind` is the result of `choose_worker`."""
    if kind == "process":
        return processes.begin(drafting, num_threads)
    return SerialWorker(drafting) if kind == "none" else ThreadWorker(drafting, num_threads)
