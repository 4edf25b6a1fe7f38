"""hf_specdec: lossless speculative decoding with draft trees, plugged into `model.generate(assistant_model=...)`.

Public names are imported on first use, so that `hf-specdec --help` does not wait for torch. Importing any drafter lets
`generate` accept it, see `integration.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_specdec.version import __version__ as __version__

if TYPE_CHECKING:
    from hf_specdec.decoding.exchange import Committed, DraftContext
    from hf_specdec.decoding.generator import TreeCandidateGenerator
    from hf_specdec.decoding.stats import SpeculationStats
    from hf_specdec.decoding.target import TargetModel
    from hf_specdec.decoding.trace import Trace
    from hf_specdec.decoding.tree import DraftTree
    from hf_specdec.drafters.base import Drafter
    from hf_specdec.drafters.merged import MergedDrafter
    from hf_specdec.drafters.options import DrafterOptions
    from hf_specdec.drafters.registry import Serving, register
    from hf_specdec.hub.export import export_drafter
    from hf_specdec.hub.inspection import inspect_drafter
    from hf_specdec.hub.loading import load_drafter
    from hf_specdec.integration import attach, detach, disable, enable
    from hf_specdec.verification import verify_lossless

__all__ = [
    "Committed",
    "DraftContext",
    "DraftTree",
    "Drafter",
    "DrafterOptions",
    "MergedDrafter",
    "Serving",
    "SpeculationStats",
    "TargetModel",
    "Trace",
    "TreeCandidateGenerator",
    "attach",
    "detach",
    "disable",
    "enable",
    "export_drafter",
    "inspect_drafter",
    "load_drafter",
    "register",
    "verify_lossless",
]

# The module of each public name; type checkers read the imports above.
_HOMES = {
    "Committed": "decoding.exchange",
    "DraftContext": "decoding.exchange",
    "DraftTree": "decoding.tree",
    "Drafter": "drafters.base",
    "DrafterOptions": "drafters.options",
    "MergedDrafter": "drafters.merged",
    "Serving": "drafters.registry",
    "SpeculationStats": "decoding.stats",
    "TargetModel": "decoding.target",
    "Trace": "decoding.trace",
    "TreeCandidateGenerator": "decoding.generator",
    "attach": "integration",
    "detach": "integration",
    "disable": "integration",
    "enable": "integration",
    "export_drafter": "hub.export",
    "inspect_drafter": "hub.inspection",
    "load_drafter": "hub.loading",
    "register": "drafters.registry",
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
