"""The SpecBound training step: all exit heads at once, on hidden states that the frozen target computed once.

The label of a position is the target's most probable token there ("ce") or its distribution ("kl"), so every position
of any text has a label. Source: SpecBound, Section 3.1 and Appendix C. The target's
states are in `training/features.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.hf_argparser import HfArg

from hf_specdec.decoding.targets.modules import num_tokens
from hf_specdec.methods.specbound.drafting import LayerSlices
from hf_specdec.methods.specbound.network import (
    HEAD_KINDS,
    PAPER_DEPTH_SHARE,
    SpecBoundConfig,
    SpecBoundDrafter,
    sample_of,
)
from hf_specdec.training.losses import LossName, position_losses
from hf_specdec.training.options import Count, TrainOptions
from hf_specdec.training.recipe import Recipe
from hf_specdec.training.source import Rows, RowSource
from hf_specdec.training.step import StepOutput, TrainingStep
from hf_specdec.training.vocabulary import VOCABULARY_HELP, checked_vocabulary_size, choose_vocabulary, copy_head


class SpecBoundStep(TrainingStep):
    """Loss of one batch of rows for a `SpecBoundDrafter`: the mean over heads and positions.

    Args:
        drafter: the drafter to train.
        target: the frozen target it drafts for.
        num_positions: positions per row and step, drawn with replacement; evenly spaced in evaluation.
        loss: "ce" with the target's most probable token, or another one of `position_losses` with its distribution.
            With a draft vocabulary, these compare its tokens only, and "ce" skips positions whose label is outside.

    Raises:
        ValueError: the drafter does not fit the target, or an argument is out of range.
    """

    def __init__(
        self, drafter: SpecBoundDrafter, target: PreTrainedModel, *, num_positions: int = 64, loss: LossName = "ce"
    ) -> None:
        super().__init__(drafter, target, loss)
        if num_positions < 1:
            raise ValueError(f"num_positions={num_positions} must be at least 1.")
        self.layers: list[int] = drafter.config.exit_layers
        # The state after `layer` layers is the output of the 0-based layer `layer - 1`.
        self.reader = self.reader.only([*(layer - 1 for layer in self.layers), None])
        self.slices, self.num_positions = LayerSlices(target), num_positions

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor], *, training: bool) -> StepOutput:
        states = self.reader.of_batch(batch)
        assert states.last_hidden is not None
        features, last_hidden = states.features, states.last_hidden
        first, length = (batch[name].unsqueeze(1) for name in ("first_anchor", "length"))
        # A draft may start from the position before the first written token at the earliest.
        first = (first - 1).clamp(min=0)
        if training:
            # Always drawn on the CPU, so that the positions do not depend on the device.
            where = torch.rand(len(first), self.num_positions).to(first.device)
        else:
            where = (torch.arange(self.num_positions, device=first.device) + 0.5) / self.num_positions
        places = first + (where * (length - first)).long()
        parameter = next(model.parameters())
        with torch.no_grad():
            # Read at each step: --start-from replaces the vocabulary.
            ids = self.drafter.target_ids if self.drafter.config.maps_vocabulary else None
            target_logits, labels = self.reader.draft_labels(_at(last_hidden, places), ids, whole=True)
        within = labels >= 0
        counted = within if self.loss == "ce" else torch.ones_like(within)
        losses, hits = [], []
        for index, layer_states in enumerate(features.chunk(len(self.layers), dim=-1)):
            logits = model(self.layers[index], _at(layer_states, places).to(parameter.dtype), self.slices).float()
            values = position_losses(self.loss, logits, target_logits, labels.clamp(min=0))
            losses.append(values[counted].sum() / counted.sum().clamp(min=1))
            hits.append(logits.argmax(-1) == labels)
        correct = torch.stack(hits, dim=-1)
        return StepOutput(torch.stack(losses).mean(), correct, torch.ones_like(correct))

    def metrics(self, correct: Tensor, labelled: Tensor) -> dict[str, float]:
        """How often each head has the target's most probable token: `accuracy_layer_4`, ..."""
        heads = len(self.layers)
        correct, labelled = correct.reshape(-1, heads) & labelled.reshape(-1, heads), labelled.reshape(-1, heads)
        hits, counts = correct.sum(0).tolist(), labelled.sum(0).tolist()
        return {
            f"accuracy_layer_{layer}": hit / count
            for layer, hit, count in zip(self.layers, hits, counts, strict=True)
            if count
        }


def _at(states: Tensor, places: Tensor) -> Tensor:
    """[batch, seq, hidden] at [batch, positions] -> [batch, positions, hidden]."""
    return states.gather(1, places.unsqueeze(-1).expand(-1, -1, states.shape[-1]))


def default_exit_layers(num_target_layers: int) -> list[int]:
    """Three exits, evenly spaced up to the paper's depth bound.

    Examples:
        >>> default_exit_layers(32)
        [3, 7, 10]
    """
    deepest = PAPER_DEPTH_SHARE * num_target_layers
    layers = {min(max(1, round(deepest * share)), num_target_layers - 1) for share in (1 / 3, 2 / 3, 1)}
    return sorted(layers)


def new_drafter(
    target: PreTrainedModel,
    *,
    exit_layers: Sequence[int] | None = None,
    head: str = "lora",
    lora_rank: int = 64,
    vocabulary: Tensor | None = None,
) -> SpecBoundDrafter:
    """Untrained exit heads for a target. They start with the output of the target's own head.

    Args:
        target: the model that drafts for itself.
        exit_layers: number of layers before each exit; None for three shallow exits.
        head: "lora" or "full"; full ones start as copies of the target's head.
        lora_rank: of "lora".
        vocabulary: [draft_vocab] int64, ascending target ids of the draft vocabulary; None for all.
    """
    config = target.config.get_text_config(decoder=True)
    depth = config.num_hidden_layers
    lm_head = target.get_output_embeddings()
    head_module = next(name for name, module in target.named_modules() if module is lm_head)
    exit_layers = default_exit_layers(depth) if exit_layers is None else list(exit_layers)
    drafter = SpecBoundDrafter(
        SpecBoundConfig(
            num_target_layers=depth,
            hidden_size=config.hidden_size,
            vocab_size=num_tokens(target),
            exit_layers=exit_layers,
            head=head,
            lora_rank=lora_rank,
            draft_vocab_size=None if vocabulary is None else len(vocabulary),
            head_module=head_module,
            target_head_sample=[
                float(f"{value:.4g}") for value in sample_of(lm_head.weight, len(lm_head.weight)).tolist()
            ],
            target_name_or_path=target.name_or_path or None,
        )
    )
    if vocabulary is not None:
        drafter.set_vocabulary(vocabulary)
    if head == "full":
        _copy_heads(drafter, target)
    drafter.check_target(target)
    return drafter


def _copy_heads(drafter: SpecBoundDrafter, target: PreTrainedModel) -> None:
    """Copies the rows of the target's head for the draft vocabulary to the full heads."""
    for exit_head in drafter.heads.values():
        copy_head(exit_head.weight, target, drafter.target_ids)  # type: ignore[arg-type]


@dataclass(kw_only=True)
class SpecBoundTrainOptions(TrainOptions):
    """Options of the training command for SpecBound."""

    exit_layers: list[Count] | None = HfArg(default=None, help="layers before each exit; default: three")
    head: str = HfArg(default="lora", help="of each exit", metadata={"choices": HEAD_KINDS})
    lora_rank: Count = HfArg(default=64, help="of lora heads")
    draft_vocab_size: Count | None = HfArg(default=None, help=VOCABULARY_HELP)
    positions: Count = HfArg(default=64, help="per row and step")
    loss: LossName = HfArg(
        default="ce", help="ce with the target's most probable token; the others with its probabilities"
    )


def _prepare(
    options: SpecBoundTrainOptions, target: PreTrainedModel, source: RowSource
) -> tuple[SpecBoundDrafter, SpecBoundStep]:
    size = checked_vocabulary_size(options.draft_vocab_size, target)
    vocabulary = None if size is None else torch.arange(size)  # replaced by `_read_rows`
    drafter = new_drafter(
        target,
        exit_layers=options.exit_layers,
        head=options.head,
        lora_rank=options.lora_rank,
        vocabulary=vocabulary,
    )
    return drafter, SpecBoundStep(drafter, target, num_positions=options.positions, loss=options.loss)


def _read_rows(options: SpecBoundTrainOptions, drafter: SpecBoundDrafter, target: PreTrainedModel, rows: Rows) -> None:
    if not drafter.config.maps_vocabulary:
        return
    drafter.set_vocabulary(choose_vocabulary(rows, drafter.config.draft_vocab_size, target))
    if options.head == "full":
        _copy_heads(drafter, target)


def _finish(drafter: SpecBoundDrafter, target: PreTrainedModel, held_out: Rows) -> None:
    """Calibrates on held-out prompts."""
    if target.device.type == "cpu":
        target.float()  # the default dtype of decoding on a CPU
    prompts = [list(row["input_ids"][: int(row["first_anchor"])]) for row, _ in zip(held_out, range(24), strict=False)]
    print(drafter.eval().calibrate(prompts, target))


RECIPE = Recipe("specbound", SpecBoundTrainOptions, _prepare, read_rows=_read_rows, finish=_finish)
