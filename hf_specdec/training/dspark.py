"""The DSpark training step: DFlash's, with each slot corrected by the row's previous token, and a confidence head.

The Markov head reads the row's tokens in training and drafted tokens when it drafts. The confidence head learns the
probability that a sampled draft is accepted, 1 - TV between the target's probs and the drafter's; with loss "ce", which
does not compute the target's probs, whether the most probable draft is right. It passes no gradient to other layers.
Source: DSpark, arXiv 2607.05147; shared facts on formats of 2026, section 2.4. The drafter is in
`hf_specdec/methods/dspark.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PreTrainedModel
from transformers.hf_argparser import HfArg

from hf_specdec.methods.dflash import DFlashDrafter
from hf_specdec.methods.dspark import MARKOV_HEADS, DSparkDrafter
from hf_specdec.training.dflash import DFlashOptions, DFlashStep, prepare, read_rows
from hf_specdec.training.dflash import new_drafter as new_dflash
from hf_specdec.training.options import Count
from hf_specdec.training.recipe import Recipe, register_recipe
from hf_specdec.training.source import Source


class DSparkStep(DFlashStep):
    """Loss of one batch of rows for a `DSparkDrafter`; arguments as for `DFlashStep`."""

    drafter: DSparkDrafter

    def head_input(self, hidden: Tensor, previous_ids: Tensor) -> Tensor:
        """[batch, anchors, depth, hidden + 2 rank]: the slots' states, the input of W2, and the previous tokens."""
        states, head = super().head_input(hidden, previous_ids), self.drafter.markov_head
        if head is None:
            return states
        embedded = head.embed(previous_ids)
        if self.config.first_slot:  # the recurrent head starts at the anchor's own slot
            whole = torch.cat([embedded[:, :, :1], embedded], dim=2)
            codes = head.of_blocks(hidden, whole)[:, :, 1:]
        else:
            codes = head.of_blocks(states, embedded)
        return torch.cat([states, codes, embedded], dim=-1)

    def _parts(self, head_input: Tensor) -> tuple[Tensor, ...]:
        rank = self.drafter.config.markov_rank
        return head_input.split([head_input.shape[-1] - 2 * rank, rank, rank], dim=-1)

    def draft_head(self, head_input: Tensor) -> Tensor:
        states, codes, _ = self._parts(head_input)
        logits = super().draft_head(states)
        head = self.drafter.markov_head
        return logits if head is None else logits + head.markov_w2(codes).float()

    @property
    def wants_agreement(self) -> bool:
        return self.drafter.confidence_head is not None

    def further_losses(self, head_input: Tensor, agreement: Tensor) -> Tensor:
        states, _, embedded = self._parts(head_input.detach())
        confidence = self.drafter.confidence(states, embedded)
        assert confidence is not None, "agreement is computed only with a confidence head"
        return binary_cross_entropy_with_logits(confidence.float(), agreement.clamp(0, 1), reduction="none")


def new_drafter(
    target: PreTrainedModel,
    *,
    block_size: int = 7,
    markov_rank: int = 64,
    markov_head_type: str = "vanilla",
    **options: Any,
) -> DSparkDrafter:
    """A DSpark drafter for a target, with random weights, next-token slots and a confidence head.

    Args:
        target: the model to draft for.
        block_size: slots of a block, including the root's; all of them draft.
        markov_rank: width of the Markov head.
        markov_head_type: "vanilla", "gated" or "rnn".
        options: as for DFlash's; `mask_token_id` is required.
    """
    return new_dflash(
        target,
        drafter_class=DSparkDrafter,
        block_size=block_size,
        markov_rank=markov_rank,
        markov_head_type=markov_head_type,
        sample_from_anchor=True,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        **options,
    )


@dataclass(kw_only=True)
class DSparkOptions(DFlashOptions):
    """Options of the training command for DSpark."""

    block_size: Count = HfArg(default=7, help="slots of a block, including the root's; all of them draft")
    markov_rank: Count = HfArg(default=64, help="width of the Markov head")
    markov_head_type: str = HfArg(default="vanilla", help="of the Markov head", metadata={"choices": MARKOV_HEADS})


def _prepare(options: DSparkOptions, target: PreTrainedModel, source: Source) -> tuple[DFlashDrafter, DFlashStep]:
    return prepare(
        options,
        target,
        source,
        new=new_drafter,
        step=DSparkStep,
        markov_rank=options.markov_rank,
        markov_head_type=options.markov_head_type,
    )


register_recipe(
    Recipe(
        "dspark",
        DSparkOptions,
        _prepare,
        read_rows=read_rows,
        eval_batch_size=32,
        further=lambda drafter, target: DSparkStep(drafter, target, loss="kl"),
    )
)
