"""The host's functions that run on rows of tokens, and what stands in for them while a forward runs on a tree.

The host looks these functions up by name, in the module of each family, when it calls them. Each name is bound once,
for good, to a function that asks whether a round is under way in this thread: then ours runs, else the host's own, with
whatever kernel it has found.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from hf_specdec.decoding.layers import places, rules
from hf_specdec.decoding.layers.nodes import nodes_under_way
from hf_specdec.decoding.once import once_per_model

# Of states: called with the nodes of the round and the layer that the forward has come to.
OF_STATES: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": rules.convolution,
    "chunk_kimi_delta_attention": rules.delta_rule,
    "mamba2_chunk_scan": rules.state_space_scan,
    "mamba_selective_scan": rules.selective_scan,
    "torch_chunk_gated_delta_rule": rules.delta_rule,
}
# Of places: called with the nodes of the round and the host's function.
OF_PLACES: dict[str, Callable[..., Any]] = {
    "build_alibi_tensor": places.alibi,
    "build_mpt_alibi_tensor": places.alibi_of_one_row,
}
OF_ONE_ROW = {"build_mpt_alibi_tensor"}  # whose biases have no axis for rows


def install(model: PreTrainedModel) -> None:
    """Binds the names, in the modules that the model's layers come from; those bound already stay as they are."""
    for names in _modules_of(model):
        for name in (OF_STATES | OF_PLACES).keys() & names.keys():
            if not hasattr(names[name], "_hf_specdec_original"):
                names[name] = _dispatched(name, names[name])


@once_per_model
def names_of(model: PreTrainedModel) -> set[str]:
    """The names with a stand-in that the modules of a model's layers have."""
    return {name for names in _modules_of(model) for name in (OF_STATES | OF_PLACES).keys() & names.keys()}


def counts_entries(model: PreTrainedModel) -> bool:
    """Whether modules of a model count entries where others are told positions."""
    return bool(places.counting(model) or names_of(model) & OF_PLACES.keys())


def _modules_of(model: PreTrainedModel) -> list[dict[str, Any]]:
    files = {type(module).__module__ for module in model.modules()}
    return [vars(sys.modules[file]) for file in sorted(files) if file in sys.modules]


def _dispatched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        nodes = nodes_under_way()
        if nodes is None:
            return function(*args, **kwargs)
        if name in OF_PLACES:
            return OF_PLACES[name](nodes, function, *args, **kwargs)
        return OF_STATES[name](nodes, nodes.layer, *args, **kwargs)

    functools.update_wrapper(run, function, assigned=("__name__", "__qualname__", "__doc__", "__module__"), updated=())
    run._hf_specdec_original = function  # type: ignore[attr-defined]
    return run
