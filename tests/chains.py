"""Calls in which trees are refused, so that chains are verified in transformers' own loop: for comparisons."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest.mock import patch

from hf_specdec import integration
from hf_specdec.decoding.targets.support import TreesRefusedError


def assisted_loop() -> AbstractContextManager[object]:
    """In this context, no target's trees can be verified."""
    return patch.object(
        integration, "check_supported", side_effect=TreesRefusedError("assisted_loop() asks for chains")
    )
