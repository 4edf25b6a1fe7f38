"""The drafting thread on the stand-in for GPUs: its stream is in order with that of the calling thread."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_specdec.drafting.thread import DraftingThread
from tests import stand_in


@pytest.mark.parametrize("target_device", ["cuda:0", "cuda:1"])
def test_work_sees_what_was_written_before_it_and_its_result_can_be_used(target_device: str) -> None:
    with stand_in.devices() as host:
        device = torch.device("cuda:0")
        thread = DraftingThread(device, torch.device(target_device), 1)
        before = torch.ones(3, device=device)
        verify: Any = lambda: before * 2  # noqa: E731
        verified, drafted = thread.beside(verify, lambda: before + 1)
        both = drafted + verified
        called = thread.call(lambda: both + 1)
        with thread.here():
            here = called + both
        total = here + before
        assert not host.waits
        assert not host.beside
        assert total.tolist() == [10, 10, 10]
        assert thread.count() == thread.overlap.ahead_wall_s > 0
        assert thread.count() == 0
        thread.executor.shutdown()
