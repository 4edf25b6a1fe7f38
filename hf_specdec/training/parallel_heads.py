"""The training step of parallel heads: the frozen target's trunk, and a head for each token after the next.

The loss is summed over the heads; by default it is the cross entropy with the tokens that the target wrote. A head
begins as a copy of the target's last layer, which is the paper's head for the next token, where the two have the same
tensors.
Source: Gloeckle et al., arXiv 2404.19737, Section 2, which trains the trunk with the heads; here it stays the target's.
The drafter is in `hf_specdec/methods/parallel_heads.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.hf_argparser import HfArg

from hf_specdec.decoding.targets.taps import decoder_layers
from hf_specdec.methods.medusa import HeadsStep
from hf_specdec.methods.parallel_heads import ParallelHeadsConfig, ParallelHeadsDrafter
from hf_specdec.training.losses import LossName
from hf_specdec.training.options import Count
from hf_specdec.training.recipe import Recipe, ShapeOptions, decoder_shape, register_recipe
from hf_specdec.training.source import Source
from hf_specdec.training.vocabulary import copy_final_norm


class ParallelHeadsStep(HeadsStep):
    """Loss of one batch of rows for a `ParallelHeadsDrafter`."""

    def __init__(self, drafter: ParallelHeadsDrafter, target: PreTrainedModel, *, loss: LossName = "ce") -> None:
        super().__init__(drafter, target, drafter.config.num_parallel_heads, loss=loss)

    def logits(self, model: nn.Module, states: Tensor, used: Tensor) -> Iterable[Tensor]:
        positions = torch.arange(states.shape[1], device=states.device).expand(len(states), -1)
        outputs = model(None, states, positions, is_causal=True).unflatten(-1, (self.heads, -1))
        return (self.reader.head(hidden) for hidden in outputs[used].unbind(1))


@torch.no_grad()
def new_drafter(
    target: PreTrainedModel, *, num_heads: int = 3, trunk_layer: int | None = None, intermediate_size: int | None = None
) -> ParallelHeadsDrafter:
    """Heads for a target, which begin as copies of its last layer where that has the same tensors.

    Args:
        target: the model to draft for.
        num_heads: of the drafter.
        trunk_layer: target layer to read; None for the second to last.
        intermediate_size: of the MLPs; None for the target's.
    """
    last = list(decoder_layers(target))[-1].state_dict()
    drafter = ParallelHeadsDrafter(
        ParallelHeadsConfig(
            num_parallel_heads=num_heads,
            trunk_layer=trunk_layer,
            qk_norm="self_attn.q_norm.weight" in last,
            attention_bias="self_attn.q_proj.bias" in last,
            **decoder_shape(target, intermediate_size),
        )
    )
    copy_final_norm(drafter.norm.weight, target)
    for head in drafter.heads:
        own = head.state_dict()
        if all(name in last and last[name].shape == tensor.shape for name, tensor in own.items()):
            head.load_state_dict({name: last[name] for name in own})
    return drafter


@dataclass(kw_only=True)
class ParallelHeadsOptions(ShapeOptions):
    """Options of the training command for parallel heads; of `taps` the first one is read."""

    heads: Count = HfArg(default=3, help="heads, one for each of the tokens after the next")
    loss: LossName = HfArg(default="ce", help="ce with the tokens of the rows; the others with the target's probs")


def _prepare(
    options: ParallelHeadsOptions, target: PreTrainedModel, source: Source
) -> tuple[ParallelHeadsDrafter, ParallelHeadsStep]:
    if options.taps is not None and len(options.taps) != 1:
        raise ValueError(f"argument --taps: {options.taps} must be one layer, which all heads read")
    drafter = new_drafter(
        target,
        num_heads=options.heads,
        trunk_layer=None if options.taps is None else options.taps[0],
        intermediate_size=options.intermediate_size,
    )
    return drafter, ParallelHeadsStep(drafter, target, loss=options.loss)


register_recipe(Recipe("parallel_heads", ParallelHeadsOptions, _prepare))
