"""Training a draft model: a few of the target's own layers, distilled on what the target writes.

It starts as evenly spaced layers of the target with the target's embedding, norm and head, and learns the target's
distribution of the next token in what the target wrote. With a draft vocabulary, embedding and head have only the rows
of those tokens; any other token is read as the last row. SpecBranch uses the same model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.hf_argparser import HfArg

from hf_specdec.decoding.targets.modules import num_tokens
from hf_specdec.decoding.targets.support import check_supported
from hf_specdec.decoding.targets.taps import decoder_layers
from hf_specdec.decoding.targets.trial import check_trees
from hf_specdec.drafting.draft_model import DraftVocabulary, target_ids_of
from hf_specdec.methods.causal_lm.network import CausalLMDrafter
from hf_specdec.training.features import TargetReader
from hf_specdec.training.losses import LossName, check_loss, position_losses
from hf_specdec.training.options import Count, TrainOptions
from hf_specdec.training.source import Rows, RowSource
from hf_specdec.training.step import StepOutput, TrainingStep
from hf_specdec.training.vocabulary import VOCABULARY_HELP, checked_vocabulary_size, choose_vocabulary

_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


class DistillationStep(TrainingStep):
    """Loss of one batch of rows for a draft model: the mean over the written tokens.

    Args:
        draft_model: the language model to train, see `new_draft_model`.
        target: the frozen target it drafts for.
        loss: see `position_losses`.
    """

    def __init__(self, draft_model: PreTrainedModel, target: PreTrainedModel, *, loss: LossName = "kl") -> None:
        check_loss(loss)
        self.reader = TargetReader(target, [], last_hidden=True)
        self.draft_model, self.loss = draft_model, loss

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor], *, training: bool) -> StepOutput:
        last_hidden = self.reader.of_batch(batch).last_hidden
        assert last_hidden is not None
        input_ids = batch["input_ids"]
        following = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)  # position of the next token
        learned = (following >= batch["first_anchor"].unsqueeze(1)) & (following < batch["length"].unsqueeze(1))
        # Read at each step: the training rows, or --start-from, replace the vocabulary after construction.
        target_ids = target_ids_of(self.draft_model)
        vocabulary = DraftVocabulary(target_ids, num_tokens(self.draft_model))
        with torch.no_grad():
            target_logits, best_ids = self.reader.draft_labels(last_hidden[learned], target_ids, whole=not training)
        output = model(input_ids=vocabulary.rows(input_ids), use_cache=False)
        logits = output.logits[learned].float()
        loss = position_losses(self.loss, logits, target_logits).sum() / learned.sum().clamp(min=1)
        correct = torch.zeros_like(learned).masked_scatter_(learned, logits.detach().argmax(-1) == best_ids)
        return StepOutput(loss, correct.unsqueeze(-1), learned.unsqueeze(-1))

    def metrics(self, correct: Tensor, labelled: Tensor) -> dict[str, float]:
        """`accuracy`: the share of positions at which both models have the same most probable token."""
        return {"accuracy": float(correct[labelled].float().mean())} if labelled.any() else {}


def new_draft_model(
    target: PreTrainedModel, num_layers: int, *, draft_vocab_size: int | None = None
) -> PreTrainedModel:
    """A language model of some of the target's layers, including the first and the last, in float32.

    Args:
        target: the model to draft for.
        num_layers: decoder layers.
        draft_vocab_size: tokens of the draft vocabulary: the first ones, until `take_vocabulary`; None for all.

    Raises:
        ValueError: the target has fewer layers, or a smaller model cannot be built from its layers.
    """
    name, layers = target.name_or_path or type(target).__name__, decoder_layers(target)
    if num_layers > len(layers):
        raise ValueError(f"--layers {num_layers} is more than the {len(layers)} layers of target {name!r}: give less.")
    taken = [round(index * (len(layers) - 1) / max(1, num_layers - 1)) for index in range(num_layers)]
    config = copy.deepcopy(target.config)
    text = config.get_text_config(decoder=True)
    for key, value in text.to_dict().items():  # one entry per layer, such as layer_types
        if isinstance(value, list) and len(value) == len(layers):
            setattr(text, key, [value[index] for index in taken])
    text.num_hidden_layers = num_layers
    if draft_vocab_size is not None:
        text.vocab_size = draft_vocab_size
        config.draft_token_ids = list(range(draft_vocab_size))
    for special in _SPECIAL:  # the config refuses ids beyond the last row
        setattr(text, special, None)
    try:
        model: PreTrainedModel = type(target)(config).float()
        for layer, index in zip(decoder_layers(model), taken, strict=True):
            layer.load_state_dict(layers[index].state_dict())
        inner = {id(parameter) for layer in decoder_layers(model) for parameter in layer.parameters()}
        of_target = dict(target.named_parameters())
        with torch.no_grad():
            for each, parameter in model.named_parameters():
                if id(parameter) not in inner:
                    parameter.copy_(of_target[each][: len(parameter)])
        check_supported(model)
        check_trees(model)
    except (KeyError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{num_layers} layers of target {name!r} ({type(target).__name__}) do not make a model that drafts: "
            f"{error}. Give another number of --layers, or draft with an existing language model of the same tokenizer."
        ) from error
    return model


@torch.no_grad()
def take_vocabulary(draft_model: PreTrainedModel, target: PreTrainedModel, target_ids: Tensor) -> None:
    """Copies the target's embedding and head rows of `target_ids`, [rows] int64, ascending, to the draft model."""
    for own, theirs in (
        (draft_model.get_input_embeddings(), target.get_input_embeddings()),
        (draft_model.get_output_embeddings(), target.get_output_embeddings()),
    ):
        own.weight.copy_(theirs.weight[target_ids.to(theirs.weight.device)])
    CausalLMDrafter(draft_model).set_vocabulary(target_ids)


@dataclass(kw_only=True)
class DraftModelOptions(TrainOptions):
    """Options of the training command for draft models."""

    layers: Count = HfArg(default=2, help="of the target, evenly spaced")
    draft_vocab_size: Count | None = HfArg(default=None, help=VOCABULARY_HELP)


def _prepare(
    options: DraftModelOptions, target: PreTrainedModel, source: RowSource
) -> tuple[PreTrainedModel, DistillationStep]:
    size = checked_vocabulary_size(options.draft_vocab_size, target)
    model = new_draft_model(target, options.layers, draft_vocab_size=size)
    return model, DistillationStep(model, target, loss=options.loss)


def _read_rows(options: DraftModelOptions, model: PreTrainedModel, target: PreTrainedModel, rows: Rows) -> None:
    target_ids = target_ids_of(model)
    if target_ids is not None:
        take_vocabulary(model, target, choose_vocabulary(rows, len(target_ids), target))


def _finish(model: PreTrainedModel, target: PreTrainedModel, held_out: Rows) -> None:
    model.config.use_cache = True  # transformers.Trainer disables it
    if model.generation_config is not None:
        model.generation_config.use_cache = True
