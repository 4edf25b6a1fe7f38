"""Multi-token-prediction layers that were published by themselves; they are read from the target's files only."""

from __future__ import annotations

from hf_specdec.hub.formats.base import Unsupported, architecture

NEEDED = "the target's own layers of which it is a part: load the target with them"
LAYOUTS = (Unsupported("multi-token prediction", NEEDED, architecture("MTP", "MtpModel")),)
