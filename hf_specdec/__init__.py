"""hf_specdec: lossless speculative decoding with draft trees, plugged into `model.generate(assistant_model=...)`.

Public names are imported on first use, so that `hf-specdec --help` does not wait for torch. Importing any drafter lets
`generate` accept it, see `integration.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_specdec.version import __version__ as __version__

if TYPE_CHECKING:
    from hf_specdec.decoding.exchange import Committed as Committed
    from hf_specdec.decoding.exchange import DraftContext as DraftContext
    from hf_specdec.decoding.generator import TreeCandidateGenerator as TreeCandidateGenerator
    from hf_specdec.decoding.stats import SpeculationStats as SpeculationStats
    from hf_specdec.decoding.target import TargetModel as TargetModel
    from hf_specdec.decoding.trace import Trace as Trace
    from hf_specdec.decoding.tree import DraftTree as DraftTree
    from hf_specdec.drafting.drafter import Drafter as Drafter
    from hf_specdec.drafting.options import DrafterOptions as DrafterOptions
    from hf_specdec.drafting.registry import Serving as Serving
    from hf_specdec.drafting.registry import register as register
    from hf_specdec.hub.export import export_drafter as export_drafter
    from hf_specdec.hub.inspection import inspect_drafter as inspect_drafter
    from hf_specdec.hub.loading import load_drafter as load_drafter
    from hf_specdec.integration import attach as attach
    from hf_specdec.integration import detach as detach
    from hf_specdec.integration import disable as disable
    from hf_specdec.integration import enable as enable
    from hf_specdec.many_prompts import generate_many as generate_many
    from hf_specdec.methods.merged import MergedDrafter as MergedDrafter
    from hf_specdec.verification import verify_lossless as verify_lossless

# The module of each public name; type checkers read the imports above.
_HOMES = {
    "Committed": "decoding.exchange",
    "DraftContext": "decoding.exchange",
    "DraftTree": "decoding.tree",
    "Drafter": "drafting.drafter",
    "DrafterOptions": "drafting.options",
    "MergedDrafter": "methods.merged",
    "Serving": "drafting.registry",
    "SpeculationStats": "decoding.stats",
    "TargetModel": "decoding.target",
    "Trace": "decoding.trace",
    "TreeCandidateGenerator": "decoding.generator",
    "attach": "integration",
    "detach": "integration",
    "disable": "integration",
    "enable": "integration",
    "export_drafter": "hub.export",
    "generate_many": "many_prompts",
    "inspect_drafter": "hub.inspection",
    "load_drafter": "hub.loading",
    "register": "drafting.registry",
    "verify_lossless": "verification",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        if _HOMES[name].startswith("drafting."):  # a drafter of the caller: `generate` accepts it from now on
            importlib.import_module(f"{__name__}.methods")
        found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = found
        return found
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:  # a submodule, such as `hf_specdec.methods`
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
