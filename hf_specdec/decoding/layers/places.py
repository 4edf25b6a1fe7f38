"""Modules that count the entries of the cache where others are told positions: what they are told in a round.

Among the nodes of a tree siblings lie between a node and its past, and rows of a batch have lengths of their own, so an
entry's number is not its place in the text.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_specdec.decoding.layers.nodes import NodesOfRound, nodes_under_way
from hf_specdec.decoding.once import once_per_model


def alibi(
    nodes: NodesOfRound,
    function: Callable[..., Tensor],
    attention_mask: Tensor,
    num_heads: int,
    dtype: torch.dtype,
) -> Tensor:
    """Biases of the keys by their place, [batch * heads, 1, keys]: Bloom, Falcon.

    Args:
        nodes: of the round.
        function: the host's, which is asked about a plain text, so that slopes and rounding are its own.
        attention_mask: on whose device they are wanted.
        num_heads: of the target.
        dtype: of the biases.
    """
    places = nodes.places(attention_mask.device)
    plain = function(places.new_ones(1, nodes.longest_text), num_heads, dtype=dtype)
    return plain[:, 0, places].transpose(0, 1).reshape(-1, 1, places.shape[1])


def alibi_of_one_row(
    nodes: NodesOfRound,
    function: Callable[..., Tensor],
    num_heads: int,
    sequence_length: int,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Biases of the keys by their place, [heads, 1, keys]: MPT, whose biases have no axis for rows."""
    plain = function(num_heads, nodes.longest_text, *args, **kwargs)
    return plain[:, :, nodes.places(plain.device)[0]]


@once_per_model
def hooks(model: PreTrainedModel) -> list[Callable[[], RemovableHandle]]:
    """What registers the hooks that tell modules of a model where nodes stand, in rounds of their own thread."""
    return [functools.partial(module.register_forward_hook, hook) for module, hook in _counting(model)]


@once_per_model
def told_by_hooks(model: PreTrainedModel) -> bool:
    """Whether positions are counted by embeddings that a hook can tell."""
    return any(hook is _learned for _, hook in _counting(model))


def _counting(model: PreTrainedModel) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    told = "position_ids" in inspect.signature(model.forward).parameters
    for module in model.modules():
        counts = isinstance(module, nn.Embedding) and not told
        if counts and "past_key_values_length" in inspect.signature(module.forward).parameters:
            yield module, _learned
        elif (
            getattr(module, "attn_temperature_tuning", False) and hasattr(module, "floor_scale") and not module.use_rope
        ):
            yield module.q_proj, functools.partial(_scaled, float(module.floor_scale), float(module.attn_scale))


def _learned(module: Any, args: Any, output: Tensor) -> Tensor:
    """Learned or sinusoidal positions of BART and its like: the rows of the nodes' entries."""
    nodes = nodes_under_way()
    if nodes is None:
        return output
    rows = nodes.entries(module.weight.device) + getattr(module, "offset", 0)
    return nn.functional.embedding(rows.clamp(max=len(module.weight) - 1), module.weight)


def _scaled(floor_scale: float, attn_scale: float, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Queries of Llama 4's layers without rotary positions, which the layer will scale by the number of their entry."""
    nodes = nodes_under_way()
    if nodes is None:
        return output
    entries = nodes.entries(output.device)
    first = nodes.prefix.entries + nodes.first
    counted = torch.arange(first, first + entries.shape[1], device=output.device)

    def scale(entry: Tensor) -> Tensor:
        return torch.log1p(torch.floor((entry.float() + 1.0) / floor_scale)) * attn_scale + 1.0

    return output * (scale(entries) / scale(counted)).unsqueeze(-1).to(output.dtype)
