"""Modules that derive positions from the number of cache entries instead of position_ids: corrections for rounds.

In a tree, siblings are stored between a node and its ancestors, and rows of a batch have different lengths. So the
number of an entry is not its position in the text.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.decoding.once import once_per_model
from hf_specdec.decoding.targets.nodes import NodesOfRound, current_nodes
from hf_specdec.decoding.upstream import PAST_LENGTH, takes_positions


def alibi(
    nodes: NodesOfRound,
    function: Callable[..., Tensor],
    attention_mask: Tensor,
    num_heads: int,
    dtype: torch.dtype,
) -> Tensor:
    """Biases of the keys by their position, [batch * heads, 1, keys]: Bloom, Falcon.

    Args:
        nodes: of the round.
        function: transformers'. It is called for a text without padding, so that slopes and rounding are the same.
        attention_mask: gives the device.
        num_heads: of the target.
        dtype: of the biases.
    """
    positions = nodes.key_positions(attention_mask.device)
    plain = function(positions.new_ones(1, nodes.longest_text), num_heads, dtype=dtype)
    return plain[:, 0, positions].transpose(0, 1).reshape(-1, 1, positions.shape[1])


def alibi_of_one_row(
    nodes: NodesOfRound,
    function: Callable[..., Tensor],
    num_heads: int,
    sequence_length: int,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Biases of the keys by their position, [heads, 1, keys]: MPT, whose biases have no batch dimension."""
    plain = function(num_heads, nodes.longest_text, *args, **kwargs)
    return plain[:, :, nodes.key_positions(plain.device)[0]]


# (nodes of the round, module, its arguments, its output) -> the corrected output
Correction = Callable[[NodesOfRound, Any, Any, Tensor], Tensor]


@once_per_model
def counting(model: PreTrainedModel) -> list[tuple[nn.Module, Correction]]:
    """The modules of a model that count entries, each with a function that corrects its output in a forward hook."""
    found: list[tuple[nn.Module, Correction]] = []
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            counts = PAST_LENGTH in inspect.signature(module.forward).parameters
            if counts and not takes_positions(model):
                found.append((module, _learned))
        elif getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            found.append(
                (module.q_proj, functools.partial(_scaled, float(module.floor_scale), float(module.attn_scale)))
            )
    return found


def _learned(nodes: NodesOfRound, module: Any, args: Any, output: Tensor) -> Tensor:
    """Learned or sinusoidal position embeddings, as in BART, at the nodes' entries."""
    if nodes is not current_nodes():  # another thread's forward
        return output
    rows = nodes.entries(module.weight.device) + getattr(module, "offset", 0)
    return nn.functional.embedding(rows.clamp(max=len(module.weight) - 1), module.weight)


def _scaled(
    floor_scale: float, attn_scale: float, nodes: NodesOfRound, module: nn.Module, args: Any, output: Tensor
) -> Tensor:
    """Queries of Llama 4's layers without rotary embeddings, which the layer then scales by the number of the entry."""
    if nodes is not current_nodes():
        return output
    entries = nodes.entries(output.device)
    first = nodes.prefix.entries + nodes.first
    counted = torch.arange(first, first + entries.shape[1], device=output.device)

    def scale(entry: Tensor) -> Tensor:
        return torch.log1p(torch.floor((entry.float() + 1.0) / floor_scale)) * attn_scale + 1.0

    return output * (scale(entries) / scale(counted)).unsqueeze(-1).to(output.dtype)
