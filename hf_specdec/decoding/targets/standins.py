"""Functions of transformers that run on rows of tokens, and our replacements for forwards that run on a tree.

transformers looks these functions up by name, in the Python module of each family, when it calls them. `install` binds
each name once and permanently to a function that checks whether this thread's forward runs on a tree: then our function
runs, otherwise transformers' own, with the kernel that transformers has chosen.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from hf_specdec.decoding.once import once_per_model
from hf_specdec.decoding.targets import places, rules
from hf_specdec.decoding.targets.nodes import current_nodes

# Functions that update states; ours are called with the nodes of the round and the current cache layer.
OF_STATES: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": rules.convolution,
    "chunk_kimi_delta_attention": rules.delta_rule,
    "mamba2_chunk_scan": rules.state_space_scan,
    "mamba_selective_scan": rules.selective_scan,
    "torch_chunk_gated_delta_rule": rules.delta_rule,
}
# Functions of positions; ours are called with the nodes of the round and transformers' function.
OF_POSITIONS: dict[str, Callable[..., Any]] = {
    "build_alibi_tensor": places.alibi,
    "build_mpt_alibi_tensor": places.alibi_of_one_row,
}
OF_ONE_ROW = {"build_mpt_alibi_tensor"}  # whose biases have no batch dimension


def install(model: PreTrainedModel) -> None:
    """Binds the names in the Python modules that define the model's layers; names already bound are skipped."""
    for names in _modules_of(model):
        for name in (OF_STATES | OF_POSITIONS).keys() & names.keys():
            if not hasattr(names[name], "_hf_specdec_original"):
                names[name] = _dispatched(name, names[name])


@once_per_model
def names_of(model: PreTrainedModel) -> set[str]:
    """The names with a replacement that occur in the Python modules of a model's layers."""
    return {name for names in _modules_of(model) for name in (OF_STATES | OF_POSITIONS).keys() & names.keys()}


def counts_entries(model: PreTrainedModel) -> bool:
    """Whether modules of a model derive positions from the number of cache entries."""
    return bool(places.counting(model) or names_of(model) & OF_POSITIONS.keys())


def _modules_of(model: PreTrainedModel) -> list[dict[str, Any]]:
    files = {type(module).__module__ for module in model.modules()}
    return [vars(sys.modules[file]) for file in sorted(files) if file in sys.modules]


def _dispatched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        nodes = current_nodes()
        if nodes is None:
            return function(*args, **kwargs)
        if name in OF_POSITIONS:
            return OF_POSITIONS[name](nodes, function, *args, **kwargs)
        return OF_STATES[name](nodes, nodes.layer, *args, **kwargs)

    functools.update_wrapper(run, function, assigned=("__name__", "__qualname__", "__doc__", "__module__"), updated=())
    run._hf_specdec_original = function  # type: ignore[attr-defined]
    return run
