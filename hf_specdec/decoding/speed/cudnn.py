"""No forward of this library reaches cuDNN's attention.

Since torch 2.11, `scaled_dot_product_attention` tries cuDNN first on Hopper and Blackwell. It builds a plan for every
new shape, which takes tens of milliseconds: each round of a call, each step of the writer and most training batches
have a new length. With masks there are also reports of wrong numbers and failed launches (pytorch#196678,
pytorch#193893).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LOCK = threading.Lock()
_users, _before = 0, True  # contexts that are open in this process, and the setting that they found


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """In this context, `scaled_dot_product_attention` on CUDA takes another kernel; also usable as a decorator.

    The setting is torch's, of the whole process. The last of several threads to leave restores it.
    """
    global _users, _before
    with _LOCK:
        if _users == 0:
            _before = torch.backends.cuda.cudnn_sdp_enabled()
            torch.backends.cuda.enable_cudnn_sdp(False)
        _users += 1
    try:
        yield
    finally:
        with _LOCK:
            _users -= 1
            if _users == 0:
                torch.backends.cuda.enable_cudnn_sdp(_before)
