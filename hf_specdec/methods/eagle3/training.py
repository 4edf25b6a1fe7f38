"""The training of EAGLE-3: further passes over a row read the drafter's own outputs, as drafting does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.hf_argparser import HfArg

from hf_specdec.drafting.config import eagle3_layer_ids
from hf_specdec.methods.eagle3.network import Eagle3Config, Eagle3Drafter
from hf_specdec.training.losses import LossName, position_losses
from hf_specdec.training.options import Count, Positive
from hf_specdec.training.passes import block_masks, growing_cache
from hf_specdec.training.recipe import ShapeOptions, decoder_shape
from hf_specdec.training.source import Rows, RowSource
from hf_specdec.training.step import StepOutput, TrainingStep
from hf_specdec.training.vocabulary import (
    DRAFT_VOCAB_SIZE,
    VOCABULARY_HELP,
    checked_vocabulary_size,
    choose_vocabulary,
    copy_final_norm,
    copy_head,
    draft_ids,
)


class Eagle3Step(TrainingStep):
    """Loss of one batch of rows for an `Eagle3Drafter`: summed over the passes.

    Args:
        drafter: the drafter to train.
        target: the frozen target it drafts for.
        passes: depths to train.
        decay: weight of each pass relative to the previous one; 0.8 in the published code.
        loss: see `position_losses`.

    Raises:
        ValueError: the drafter does not fit the target, or an argument is out of range.
    """

    def __init__(
        self,
        drafter: Eagle3Drafter,
        target: PreTrainedModel,
        *,
        passes: int = 7,
        decay: float = 0.8,
        loss: LossName = "kl",
    ) -> None:
        super().__init__(drafter, target, loss, last_hidden=True)
        if drafter.config.own_embeddings:
            raise ValueError(
                f"Drafter {drafter.name_or_path or type(drafter).__name__!r} has token embeddings of its own, and this "
                "step does not train them. Train a new drafter, see hf_specdec.methods.eagle3.training.new_drafter."
            )
        if passes < 1:
            raise ValueError(f"passes={passes} must be at least 1.")
        if not 0 < decay <= 1:
            raise ValueError(f"decay={decay!r} must be above 0 and at most 1.")
        self.passes, self.decay = passes, decay
        self.table = target.get_input_embeddings().weight  # unscaled, also for targets that scale it

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor], *, training: bool) -> StepOutput:
        states = self.reader.of_batch(batch)
        assert states.last_hidden is not None
        drafter, input_ids = self.drafter, batch["input_ids"]
        dtype, (_, width) = next(model.parameters()).dtype, input_ids.shape
        # Read at each step: the training rows, or --start-from, replace the vocabulary after construction.
        ids = drafter.to_target_ids(torch.arange(drafter.config.draft_vocab_size, device=drafter.device))
        with torch.no_grad():
            target_ids = ids if drafter.config.maps_vocabulary else None
            target_logits, labels = self.reader.draft_labels(states.last_hidden, target_ids, whole=not training)
        # The token after each position; drafting starts there if the target wrote it and another token follows.
        starts = torch.arange(1, width + 1, device=input_ids.device)
        counted = starts >= batch["first_anchor"].unsqueeze(1)
        positions = torch.arange(width, device=input_ids.device)
        stored = growing_cache(drafter.config.num_hidden_layers)
        masks = block_masks(width, 1, [1] * (self.passes - 1), device=input_ids.device)
        refused = None if "refused" not in batch else draft_ids(batch["refused"], ids)
        recurrent, losses, correct, labelled = drafter.fuse(states.features.to(dtype)), [], [], []
        for depth, mask in enumerate(masks):
            following = (starts + depth).clamp(max=width - 1)
            outputs = model(
                nn.functional.embedding(input_ids[:, following], self.table).to(dtype),
                recurrent,
                (positions + depth).expand(len(input_ids), -1),
                mask=mask,
                is_causal=mask is None,
                cache=stored,
            )
            recurrent = drafter.recurrent(outputs)
            seen = counted & (starts + depth + 1 < batch["length"].unsqueeze(1))
            rows, places = seen.nonzero(as_tuple=True)
            at = rows, following[places]  # of the token that this pass has read: the labels are of the one after it
            logits = drafter.logits(outputs[seen])
            negatives = None if refused is None else refused[:, (starts + depth + 1).clamp(max=width - 1)][seen]
            values = position_losses(self.loss, logits, target_logits[at], refused=negatives)
            losses.append(self.decay**depth * values.sum() / seen.sum().clamp(min=1))
            correct.append(torch.zeros_like(seen).masked_scatter_(seen, logits.detach().argmax(-1) == labels[at]))
            labelled.append(seen)
        return StepOutput(torch.stack(losses).sum(), torch.stack(correct, -1), torch.stack(labelled, -1))


def new_drafter(
    target: PreTrainedModel,
    *,
    draft_vocab_size: int | None = None,
    target_layer_ids: Sequence[int] | None = None,
    intermediate_size: int | None = None,
) -> Eagle3Drafter:
    """A one-layer EAGLE-3 drafter for a target, with random weights; norm and head start as the target's.

    Args:
        target: the model to draft for.
        draft_vocab_size: tokens of the draft vocabulary: the first ones, until `set_vocabulary`; None for all.
        target_layer_ids: target layers to read; None for EAGLE's three.
        intermediate_size: of the MLP; None for the target's.
    """
    if target_layer_ids is None:
        target_layer_ids = eagle3_layer_ids(target.config.get_text_config(decoder=True).num_hidden_layers)
    drafter = Eagle3Drafter(
        Eagle3Config(
            draft_vocab_size=draft_vocab_size,
            target_layer_ids=list(target_layer_ids),
            num_hidden_layers=1,
            **decoder_shape(target, intermediate_size),
        )
    )
    drafter.check_target(target)
    _copy_head(drafter, target)
    return drafter


def _copy_head(drafter: Eagle3Drafter, target: PreTrainedModel) -> None:
    """Copies the target's final norm and the rows of its head for the draft vocabulary."""
    copy_head(drafter.lm_head.weight, target, drafter.to_target_ids(torch.arange(drafter.config.draft_vocab_size)))
    copy_final_norm(drafter.norm.weight, target)


@dataclass(kw_only=True)
class Eagle3TrainOptions(ShapeOptions):
    """Options of the training command for EAGLE-3."""

    draft_vocab_size: Count | None = HfArg(default=None, help=f"{VOCABULARY_HELP}, but at most {DRAFT_VOCAB_SIZE}")
    passes: Count = HfArg(default=7, help="depths to train")
    decay: Positive = HfArg(default=0.8, help="weight of each pass relative to the previous one")


def _prepare(
    options: Eagle3TrainOptions, target: PreTrainedModel, source: RowSource
) -> tuple[Eagle3Drafter, Eagle3Step]:
    drafter = new_drafter(
        target,
        draft_vocab_size=checked_vocabulary_size(options.draft_vocab_size, target, DRAFT_VOCAB_SIZE),
        target_layer_ids=options.taps,
        intermediate_size=options.intermediate_size,
    )
    return drafter, Eagle3Step(drafter, target, passes=options.passes, decay=options.decay, loss=options.loss)


def _read_rows(options: Eagle3TrainOptions, drafter: Eagle3Drafter, target: PreTrainedModel, rows: Rows) -> None:
    if drafter.config.maps_vocabulary:
        drafter.set_vocabulary(choose_vocabulary(rows, drafter.config.draft_vocab_size, target))
        _copy_head(drafter, target)
