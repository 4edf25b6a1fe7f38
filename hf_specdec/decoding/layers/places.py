"""Modules that count the entries of the cache where others are told positions: what they are told in a round.

Among the nodes of a tree siblings lie between a node and its past, and rows of a batch have lengths of their own, so an
entry's number is not its place in the text.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.decoding.host import takes_positions
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


# From the nodes of a round, a module, what it was given and what it gives, to what it should give.
Tell = Callable[[NodesOfRound, Any, Any, Tensor], Tensor]


@once_per_model
def counting(model: PreTrainedModel) -> list[tuple[nn.Module, Tell]]:
    """The modules of a model that count entries, each with what tells it where nodes stand, a forward hook."""
    found: list[tuple[nn.Module, Tell]] = []
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            counts = "past_key_values_length" in inspect.signature(module.forward).parameters
            if counts and not takes_positions(model):
                found.append((module, _learned))
        elif getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            found.append(
                (module.q_proj, functools.partial(_scaled, float(module.floor_scale), float(module.attn_scale)))
            )
    return found


def _learned(nodes: NodesOfRound, module: Any, args: Any, output: Tensor) -> Tensor:
    """Learned or sinusoidal positions of BART and its like: the rows of the nodes' entries."""
    if nodes is not nodes_under_way():  # another thread's forward
        return output
    rows = nodes.entries(module.weight.device) + getattr(module, "offset", 0)
    return nn.functional.embedding(rows.clamp(max=len(module.weight) - 1), module.weight)


def _scaled(
    floor_scale: float, attn_scale: float, nodes: NodesOfRound, module: nn.Module, args: Any, output: Tensor
) -> Tensor:
    """Queries of Llama 4's layers without rotary positions, which the layer will scale by the number of their entry."""
    if nodes is not nodes_under_way():
        return output
    entries = nodes.entries(output.device)
    first = nodes.prefix.entries + nodes.first
    counted = torch.arange(first, first + entries.shape[1], device=output.device)

    def scale(entry: Tensor) -> Tensor:
        return torch.log1p(torch.floor((entry.float() + 1.0) / floor_scale)) * attn_scale + 1.0

    return output * (scale(entries) / scale(counted)).unsqueeze(-1).to(output.dtype)
