"""Multi-token-prediction layers that were published by themselves; they are read from the target's files only."""

from __future__ import annotations

from hf_specdec.hub.formats.base import Unsupported, architecture
from hf_specdec.hub.formats.speculators import is_kind

NEEDED = "the target's own layers of which it is a part: load the target with them"
NOT_READ = (
    Unsupported("speculators mtp", NEEDED, is_kind("mtp"), rank=0),
    Unsupported("multi-token prediction", NEEDED, architecture("MTP", "MtpModel")),
)
