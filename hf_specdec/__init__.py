"""hf_specdec: lossless speculative decoding with draft trees, plugged into `model.generate(assistant_model=...)`.

Public names are imported on first use, so that `hf-specdec --help` does not wait for torch. Importing any drafter lets
`generate` accept it, see `integration.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_specdec.version import __version__ as __version__

if TYPE_CHECKING:
    from hf_specdec.decoding.generator import DraftContext, TreeCandidateGenerator
    from hf_specdec.decoding.target import TargetModel
    from hf_specdec.decoding.tree import DraftTree
    from hf_specdec.drafters.base import Drafter
    from hf_specdec.drafters.merged import MergedDrafter
    from hf_specdec.drafters.options import DrafterOptions
    from hf_specdec.hub.export import export_drafter
    from hf_specdec.hub.inspection import inspect_drafter
    from hf_specdec.hub.loading import load_drafter
    from hf_specdec.integration import disable, enable
    from hf_specdec.verification import verify_lossless

__all__ = [
    "DraftContext",
    "DraftTree",
    "Drafter",
    "DrafterOptions",
    "MergedDrafter",
    "TargetModel",
    "TreeCandidateGenerator",
    "disable",
    "enable",
    "export_drafter",
    "inspect_drafter",
    "load_drafter",
    "verify_lossless",
]

# The module of each public name; type checkers read the imports above.
_HOMES = {
    "DraftContext": "decoding.generator",
    "DraftTree": "decoding.tree",
    "Drafter": "drafters.base",
    "DrafterOptions": "drafters.options",
    "MergedDrafter": "drafters.merged",
    "TargetModel": "decoding.target",
    "TreeCandidateGenerator": "decoding.generator",
    "disable": "integration",
    "enable": "integration",
    "export_drafter": "hub.export",
    "inspect_drafter": "hub.inspection",
    "load_drafter": "hub.loading",
    "verify_lossless": "verification",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = found
        return found
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:  # a submodule, such as `hf_specdec.drafters`
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
