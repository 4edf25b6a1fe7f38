"""SpecBranch: a draft model drafts the next branches while the target verifies. Source: the SpecBranch paper."""

from hf_specdec.drafting.registry import Serving, register
from hf_specdec.methods.specbranch.network import (
    HRAD,
    SpecBranchConfig,
    SpecBranchDrafter,
    SpecBranchOptions,
    missing_draft_model,
)

__all__ = ["HRAD", "SpecBranchConfig", "SpecBranchDrafter", "SpecBranchOptions"]


def _draft_model(drafter: SpecBranchDrafter) -> tuple[str, str]:
    assert drafter.draft_model is not None
    return (
        drafter.draft_model.name_or_path,
        "vLLM cannot draft during verification as SpecBranch does: it runs its draft model alone.",
    )


register(
    "specbranch",
    SpecBranchDrafter,
    missing=missing_draft_model,
    serving=Serving(
        not_exported="SpecBranch drafts while the target runs, and vLLM has no class for it; vLLM serves its draft "
        "model without an export (method draft_model)",
        instead=_draft_model,
    ),
)
