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

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.drafters.dspark import DSparkConfig, DSparkDrafter
from hf_specdec.drafters.dspark.configuration import MARKOV_HEADS
from hf_specdec.training.dflash import (
    RECORDED,
    DFlashStep,
    add_arguments,
    find_mask_token,
    new_fields,
    read_rows,
)
from hf_specdec.training.option_types import positive_int
from hf_specdec.training.recipe import Recipe, register_recipe
from hf_specdec.training.vocabulary import checked_vocabulary_size


class DSparkStep(DFlashStep):
    """Loss of one batch of rows for a `DSparkDrafter`; arguments as for `DFlashStep`."""

    drafter: DSparkDrafter

    def reading(self, hidden: Tensor, before: Tensor) -> Tensor:
        """[batch, anchors, depth, hidden + 2 rank]: the slots' states, what W2 reads, and the tokens before them."""
        states, head = super().reading(hidden, before), self.drafter.markov_head
        if head is None:
            return states
        embedded = head.embed(before)
        if self.first_slot:  # the recurrent head passes the anchor's slot first, with the anchor as the token before
            whole = torch.cat([embedded[:, :, :1], embedded], dim=2)
            codes = head.of_blocks(hidden, whole)[:, :, 1:]
        else:
            codes = head.of_blocks(states, embedded)
        return torch.cat([states, codes, embedded], dim=-1)

    def _parts(self, reading: Tensor) -> tuple[Tensor, ...]:
        rank = self.config.dflash_config.get("markov_rank", 0)
        return reading.split([reading.shape[-1] - 2 * rank, rank, rank], dim=-1)

    def draft_head(self, reading: Tensor) -> Tensor:
        states, codes, _ = self._parts(reading)
        logits = super().draft_head(states)
        head = self.drafter.markov_head
        return logits if head is None else logits + head.markov_w2(codes).float()

    def further_losses(self, reading: Tensor, agreement: Tensor) -> Tensor:
        states, _, embedded = self._parts(reading.detach())
        confidence = self.drafter.confidence(states, embedded)
        if confidence is None:
            return super().further_losses(reading, agreement)
        return binary_cross_entropy_with_logits(confidence.float(), agreement.clamp(0, 1), reduction="none")


def new_drafter(
    target: PreTrainedModel,
    *,
    mask_token_id: int,
    num_layers: int = 2,
    block_size: int = 7,
    target_layer_ids: Sequence[int] | None = None,
    intermediate_size: int | None = None,
    draft_vocab_size: int | None = None,
    markov_rank: int = 64,
    markov_head_type: str = "vanilla",
) -> DSparkDrafter:
    """A DSpark drafter with random weights that fits a target, with next-token slots and a confidence head.

    Args:
        target: the model to draft for.
        mask_token_id: an id of the target's embedding that text does not use.
        num_layers: draft layers.
        block_size: slots of a block, root included; all of them draft.
        target_layer_ids: target layers to read; by default as many as `num_layers`, but at least 4, evenly spaced.
        intermediate_size: of the MLPs; by default the target's.
        draft_vocab_size: tokens that it can say, of the target's head those rows: the first ones, until
            `set_vocabulary` names others; by default all.
        markov_rank: width of the Markov head.
        markov_head_type: "vanilla", "gated" or "rnn".
    """
    block = {
        "mask_token_id": mask_token_id,
        "block_size": block_size,
        "draft_vocab_size": draft_vocab_size,
        "sample_from_anchor": True,
        "markov_rank": markov_rank,
        "markov_head_type": markov_head_type,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    drafter = DSparkDrafter(DSparkConfig(**new_fields(target, num_layers, target_layer_ids, intermediate_size, block)))
    drafter.check_target(target)
    return drafter


def _add_arguments(group: argparse._ArgumentGroup) -> None:
    add_arguments(group)
    group.set_defaults(block_size=7)
    group.add_argument("--markov-rank", type=positive_int, default=64, help="width of the head that corrects slots")
    group.add_argument("--markov-head-type", choices=MARKOV_HEADS, default="vanilla")


def _prepare(
    arguments: argparse.Namespace,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Sequence[int]],
) -> tuple[DSparkDrafter, DSparkStep]:
    find_mask_token(arguments, target, tokenizer, documents)
    drafter = new_drafter(
        target,
        mask_token_id=arguments.mask_token_id,
        num_layers=arguments.layers,
        block_size=arguments.block_size,
        target_layer_ids=arguments.taps,
        intermediate_size=arguments.intermediate_size,
        draft_vocab_size=checked_vocabulary_size(arguments.draft_vocab_size, target),
        markov_rank=arguments.markov_rank,
        markov_head_type=arguments.markov_head_type,
    )
    return drafter, DSparkStep(
        drafter, target, num_anchors=arguments.anchors, loss=arguments.loss, gamma=arguments.gamma or None
    )


register_recipe(
    Recipe(
        "dspark",
        _add_arguments,
        _prepare,
        read_rows=read_rows,
        recorded=(*RECORDED, "markov_rank", "markov_head_type"),
        eval_batch_size=32,
    )
)
