"""The DSpark training step: DFlash's, with each slot corrected by the row's token before it, and a confidence head.

The Markov head reads the row's own tokens while it learns, and drafted ones when it drafts. The confidence head learns
how likely a drawn draft is accepted, 1 - TV between the target's law and the drafter's, or whether the likeliest one
was right where the target's laws are not at hand (loss "ce"); what it learns does not reach the layers below it.
Source: DSpark, arXiv 2607.05147; shared facts on formats of 2026, section 2.4. The drafter is in
`hf_specdec/drafters/dspark/`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.drafters.dflash import DFlashDrafter
from hf_specdec.drafters.dspark import DSparkDrafter
from hf_specdec.drafters.dspark.configuration import MARKOV_HEADS
from hf_specdec.training import dflash
from hf_specdec.training.option_types import positive_int
from hf_specdec.training.recipe import Recipe, register_recipe


class DSparkStep(dflash.DFlashStep):
    """Loss of one batch of rows for a `DSparkDrafter`; arguments as for `DFlashStep`."""

    drafter: DSparkDrafter

    def reading(self, hidden: Tensor, before: Tensor) -> Tensor:
        """[batch, anchors, depth, hidden + 2 rank]: the slots' states, what W2 reads, and the tokens before them."""
        states, head = super().reading(hidden, before), self.drafter.markov_head
        if head is None:
            return states
        embedded = head.embed(before)
        if self.config.first_slot:  # the recurrent head passes the anchor's slot first, behind the anchor
            whole = torch.cat([embedded[:, :, :1], embedded], dim=2)
            codes = head.of_blocks(hidden, whole)[:, :, 1:]
        else:
            codes = head.of_blocks(states, embedded)
        return torch.cat([states, codes, embedded], dim=-1)

    def _parts(self, reading: Tensor) -> tuple[Tensor, ...]:
        rank = self.drafter.config.markov_rank
        return reading.split([reading.shape[-1] - 2 * rank, rank, rank], dim=-1)

    def draft_head(self, reading: Tensor) -> Tensor:
        states, codes, _ = self._parts(reading)
        logits = super().draft_head(states)
        head = self.drafter.markov_head
        return logits if head is None else logits + head.markov_w2(codes).float()

    @property
    def wants_agreement(self) -> bool:
        return self.drafter.confidence_head is not None

    def further_losses(self, reading: Tensor, agreement: Tensor) -> Tensor:
        states, _, embedded = self._parts(reading.detach())
        confidence = self.drafter.confidence(states, embedded)
        assert confidence is not None, "agreement is asked for where there is a head"
        return binary_cross_entropy_with_logits(confidence.float(), agreement.clamp(0, 1), reduction="none")


def new_drafter(
    target: PreTrainedModel,
    *,
    block_size: int = 7,
    markov_rank: int = 64,
    markov_head_type: str = "vanilla",
    **options: Any,
) -> DSparkDrafter:
    """A DSpark drafter with random weights that fits a target, with next-token slots and a confidence head.

    Args:
        target: the model to draft for.
        block_size: slots of a block, root included; all of them draft.
        markov_rank: width of the Markov head.
        markov_head_type: "vanilla", "gated" or "rnn".
        options: see `dflash.new_drafter`; `mask_token_id` is needed.
    """
    return dflash.new_drafter(
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


def _add_arguments(group: argparse._ArgumentGroup) -> None:
    dflash.add_arguments(group)
    group.set_defaults(block_size=7)
    group.add_argument("--markov-rank", type=positive_int, default=64, help="width of the head that corrects slots")
    group.add_argument("--markov-head-type", choices=MARKOV_HEADS, default="vanilla")


def _prepare(
    arguments: argparse.Namespace,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Sequence[int]],
) -> tuple[DFlashDrafter, dflash.DFlashStep]:
    return dflash.prepare(
        arguments,
        target,
        tokenizer,
        documents,
        new=new_drafter,
        step=DSparkStep,
        markov_rank=arguments.markov_rank,
        markov_head_type=arguments.markov_head_type,
    )


register_recipe(
    Recipe(
        "dspark",
        _add_arguments,
        _prepare,
        read_rows=dflash.read_rows,
        recorded=(*dflash.RECORDED, "markov_rank", "markov_head_type"),
        eval_batch_size=32,
    )
)
