"""SpecBranch: a draft model drafts the next branches while the target verifies. Source: the SpecBranch paper."""

import re
from pathlib import Path
from typing import Any

from hf_specdec.drafters.registry import Serving, register
from hf_specdec.drafters.specbranch.configuration import SpecBranchConfig, SpecBranchOptions
from hf_specdec.drafters.specbranch.latency import parallel_latency, serial_latency
from hf_specdec.drafters.specbranch.modeling import HRAD, SpecBranchDrafter

__all__ = ["HRAD", "SpecBranchConfig", "SpecBranchDrafter", "SpecBranchOptions", "parallel_latency", "serial_latency"]


def _missing_draft_model(fields: dict[str, Any], folder: Path | None) -> list[str]:
    """Problems with the draft model that a config names; a Hub id is not requested."""
    place = fields.get("draft_model")
    if not isinstance(place, str):
        return [f"config.json names no draft model: draft_model is {place!r}"]
    relative, absolute = place.startswith("."), Path(place).is_absolute()
    if folder is None:
        found = not relative and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", place) is not None
    else:
        elsewhere = not relative and not absolute and place != "draft_model"
        found = elsewhere or (folder / place).resolve().is_dir()
    return [] if found else [f"the draft model {place!r}, relative to the checkpoint, does not exist"]


def _draft_model(drafter: SpecBranchDrafter) -> tuple[str, str]:
    assert drafter.draft_model is not None
    return (
        drafter.draft_model.name_or_path,
        "vLLM cannot draft during verification as SpecBranch does: it runs its draft model alone.",
    )


register(
    "specbranch",
    SpecBranchDrafter,
    missing=_missing_draft_model,
    serving=Serving(
        not_exported="SpecBranch drafts while the target runs, and vLLM has no class for it; vLLM serves its draft "
        "model without an export (method draft_model)",
        instead=_draft_model,
    ),
)
