"""Makes a new SpecBlock drafter and its step from options and training rows: draft vocabulary, shapes, warm start.

Source: SpecBlock, Section 4.1 and Appendix A.1; the vocabulary is chosen as in FR-Spec. The step is in `step.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.hf_argparser import HfArg

from hf_specdec.decoding.taps import decoder_layers
from hf_specdec.drafters.config import default_target_layer_ids
from hf_specdec.drafters.specblock.modeling import SpecBlockConfig, SpecBlockDrafter
from hf_specdec.training.options import Count, ShareBelow1
from hf_specdec.training.recipe import Recipe, ShapeOptions, decoder_shape, register_recipe
from hf_specdec.training.rows import Rows
from hf_specdec.training.source import Source
from hf_specdec.training.specblock.losses import RankLoss, SlotWeights
from hf_specdec.training.specblock.step import SpecBlockStep
from hf_specdec.training.vocabulary import (
    DRAFT_VOCAB_SIZE,
    VOCABULARY_HELP,
    checked_vocabulary_size,
    choose_vocabulary,
    copy_final_norm,
    head_weights,
)


def new_drafter(
    target: PreTrainedModel,
    vocabulary: Tensor,
    *,
    num_layers: int = 2,
    block_size: int = 4,
    target_layer_ids: Sequence[int] | None = None,
    intermediate_size: int | None = None,
    prefix_broadcast: bool = True,
    layer_wise_shift: bool = True,
    warm_start: bool = False,
) -> SpecBlockDrafter:
    """A SpecBlock drafter for a target, with random weights; its layers have the target's shape.

    Args:
        target: the model to draft for.
        vocabulary: [draft_vocab] int64, ascending target ids of the draft vocabulary; see `frequent_tokens`.
        num_layers: L.
        block_size: K.
        target_layer_ids: target layers to read; None for the published three.
        intermediate_size: of the MLPs; None for the target's.
        prefix_broadcast: see `SpecBlockConfig`; False is an ablation of Table 2.
        layer_wise_shift: see `SpecBlockConfig`; False is an ablation of Table 2.
        warm_start: start with the target's final norm, the rows of its head for the draft vocabulary, and projections
            that average their inputs: the taps; condition, token and query; for the shift a slot's own state. The
            paper trains everything from scratch (A.1), which takes longer.
    """
    if target_layer_ids is None:
        target_layer_ids = default_target_layer_ids(target.config.get_text_config(decoder=True).num_hidden_layers)
    shape = decoder_shape(target, intermediate_size)
    head_dim = shape.pop("head_dim")
    modules = dict(decoder_layers(target)[0].named_modules())
    query_norm = modules.get("self_attn.q_norm")
    draft_config = SpecBlockConfig(
        diffspec_draft_token_num=block_size,
        draft_vocab_size=len(vocabulary),
        target_layer_ids=list(target_layer_ids),
        num_hidden_layers=num_layers,
        draft_head_dim=head_dim,
        # Norms per head, as in Qwen3; other families have none, or one over all heads.
        qk_norm=query_norm is not None and list(query_norm.weight.shape) == [head_dim],
        prefix_broadcast=prefix_broadcast,
        layer_wise_shift=layer_wise_shift,
        **shape,
    )
    drafter = SpecBlockDrafter(draft_config)
    drafter.set_vocabulary(vocabulary)
    drafter.check_target(target)
    if warm_start:
        _average_inputs(drafter)
        _copy_head(drafter, target)
        copy_final_norm(drafter.norm.weight, target)
    return drafter


@torch.no_grad()
def _copy_head(drafter: SpecBlockDrafter, target: PreTrainedModel) -> None:
    """Copies the rows of the target's head for the draft vocabulary."""
    drafter.lm_head.weight.copy_(head_weights(target, drafter.target_ids(torch.arange(len(drafter.d2t)))))


@torch.no_grad()
def _average_inputs(drafter: SpecBlockDrafter) -> None:
    """Adds the mean of its inputs to the random weights of each projection."""
    entry = drafter.input_layer
    for projection in (entry.condition_proj, entry.fuse):
        width = projection.out_features
        parts = projection.in_features // width
        if projection.in_features == parts * width:  # taps may have another width than the drafter
            projection.weight.add_(torch.eye(width).repeat(1, parts) / parts)
    for shift in drafter.shift_proj:
        assert isinstance(shift, nn.Linear)
        width = drafter.config.hidden_size
        shift.weight[:, :width].add_(torch.eye(width))


@dataclass(kw_only=True)
class SpecBlockOptions(ShapeOptions):
    """Options of the training command for SpecBlock."""

    layers: Count = HfArg(default=2, help="decoder layers of the drafter")
    block_size: Count = HfArg(default=4, help="tokens that a block drafts")
    draft_vocab_size: Count | None = HfArg(default=None, help=f"{VOCABULARY_HELP}, but at most {DRAFT_VOCAB_SIZE}")
    prefix_broadcast: bool = HfArg(default=True, help="without it an ablation of Table 2 of the paper")
    layer_wise_shift: bool = HfArg(default=True, help="without it an ablation of Table 2 of the paper")
    warm_start: bool = HfArg(default=False, help="start with the target's head")
    window: Count | None = HfArg(
        default=None, help="positions of a row to train on, drawn anew each step; default: all"
    )
    blocks: Count = HfArg(default=2, help="chained blocks per start")
    valid_prefix: bool = HfArg(default=True, help="the mask of Eq. 5; without it an ablation of Table 2")
    slot_weights: SlotWeights = HfArg(default="alike", help="by_count: small batches")
    rank_start: ShareBelow1 = HfArg(default=0.1, help="share of the steps before the rank loss is added")
    rank_start_step: Count | None = HfArg(default=None, help="number of steps, instead of --rank-start")
    rank_loss: RankLoss = HfArg(default="paper", help="of the paper, or of the published code")
    rank_budget: Count | None = HfArg(default=None, help="most examples of a rank class per slot and batch")


def _prepare(
    options: SpecBlockOptions, target: PreTrainedModel, source: Source
) -> tuple[SpecBlockDrafter, SpecBlockStep]:
    size = checked_vocabulary_size(options.draft_vocab_size, target, DRAFT_VOCAB_SIZE)
    drafter = new_drafter(
        target,
        torch.arange(size or target.get_input_embeddings().num_embeddings),  # replaced by `_read_rows`
        num_layers=options.layers,
        block_size=options.block_size,
        target_layer_ids=options.taps,
        intermediate_size=options.intermediate_size,
        prefix_broadcast=options.prefix_broadcast,
        layer_wise_shift=options.layer_wise_shift,
        warm_start=options.warm_start,
    )
    step = SpecBlockStep(
        drafter,
        target,
        num_blocks=options.blocks,
        rank_start=options.rank_start,
        rank_start_step=options.rank_start_step,
        valid_prefix=options.valid_prefix,
        loss=options.loss,
        slot_weights=options.slot_weights,
        rank_loss=options.rank_loss,
        rank_budget=options.rank_budget,
        window=options.window,
    )
    return drafter, step


def _read_rows(options: SpecBlockOptions, drafter: SpecBlockDrafter, target: PreTrainedModel, rows: Rows) -> None:
    """Sets the vocabulary to the most frequent tokens of the rows."""
    drafter.set_vocabulary(choose_vocabulary(rows, len(drafter.d2t), target))
    if options.warm_start:
        _copy_head(drafter, target)


def _adapting(drafter: SpecBlockDrafter, target: PreTrainedModel) -> SpecBlockStep:
    """Only the blocks that are drafted are trained.

    Most of an update's few positions are in the best bucket: without equal weights the rank head would learn to predict
    only that one, and the tree would lose branches.
    """
    return SpecBlockStep(
        drafter,
        target,
        num_blocks=min(2, drafter.options.num_blocks),
        rank_start=0,
        slot_weights="by_count",
        rank_budget=1,
        sparse=True,
    )


register_recipe(
    Recipe("specblock", SpecBlockOptions, _prepare, read_rows=_read_rows, adapting=_adapting, further=_adapting)
)
