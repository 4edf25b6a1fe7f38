"""The DFlash training step: random anchors, masked blocks, all blocks of a row in one drafter forward.

A block is what the drafter sees at inference: the anchor (there the root) in slot 0, the mask token in the others, and
the target's features of the positions before the anchor as context. Slot k drafts the token k positions after the
anchor, or k + 1 if the anchor's own slot drafts.
The blocks of a row share its context and are concatenated; an attention mask separates them.
Source: DFlash, arXiv 2602.06036, Section 4.2; shared facts on formats, sections 1.5 and A3. The losses are in
`hf_specdec/training/losses.py`, the target's side in `features.py` there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg

from hf_specdec.decoding.targets.modules import num_tokens
from hf_specdec.drafting.draft_logits import NeverProposedLogitsProcessor
from hf_specdec.drafting.vocabulary import draft_ids_of
from hf_specdec.methods.dflash.drafting import block_embeddings
from hf_specdec.methods.dflash.network import DFlashConfig, DFlashDrafter, dflash_layer_ids
from hf_specdec.training.losses import LossName, draft_losses, position_weights
from hf_specdec.training.options import Count, NotNegative
from hf_specdec.training.recipe import ShapeOptions, decoder_shape
from hf_specdec.training.source import Rows, RowSource
from hf_specdec.training.step import StepOutput, TrainingStep
from hf_specdec.training.vocabulary import VOCABULARY_HELP, checked_vocabulary_size, choose_vocabulary

# A logit of probability 0. It is finite, so that a token that both distributions exclude adds 0 to KL and not NaN.
NEVER = -1e4
AnyDFlash = TypeVar("AnyDFlash", bound=DFlashDrafter)


class DFlashStep(TrainingStep):
    """Loss of one batch of rows for a `DFlashDrafter`.

    Args:
        drafter: the drafter to train; its block size, mask token and window rules are used.
        target: the frozen target it drafts for.
        num_anchors: blocks per row and step, drawn without replacement; fewer in rows with fewer candidates.
        loss: "ce" with the row's own tokens, or "kl", "tv", "lk" against the target's distributions.
        gamma: decay length of the position weights; None for equal weights.

    Raises:
        ValueError: the drafter does not fit the target or has another layout, or an argument is out of range.
    """

    def __init__(
        self,
        drafter: DFlashDrafter,
        target: PreTrainedModel,
        *,
        num_anchors: int = 16,
        loss: LossName = "ce",
        gamma: float | None = 4.0,
    ) -> None:
        super().__init__(drafter, target, loss, same_size=False)
        other = [name for name in ("own_embeddings", "own_head") if getattr(drafter.config, name)]
        if other:
            raise ValueError(
                f"Drafter {drafter.name_or_path or type(drafter).__name__!r} has {', '.join(other)} in its "
                "dflash_config, but this step trains drafters with the target's embeddings and head, as in z-lab's "
                "layout. Train it with the code that it was made with, or train a new drafter, see "
                "hf_specdec.methods.dflash.training.new_drafter."
            )
        if num_anchors < 1:
            raise ValueError(f"num_anchors={num_anchors} must be at least 1.")
        self.config: DFlashConfig = drafter.config
        self.num_anchors = num_anchors
        self.block_size, _ = _block(drafter.config)
        self.weights = position_weights(1 + self.block_size - drafter.config.first_slot, gamma)
        self.embed_tokens = block_embeddings(target)

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor], *, training: bool) -> StepOutput:
        input_ids = batch["input_ids"]
        device = input_ids.device
        states = self.reader.of_batch(batch)
        anchors, valid = choose_anchors(batch["first_anchor"], batch["length"], self.num_anchors, random=training)

        hidden = block_hidden(model, self.config, self.embed_tokens, input_ids, states.features, anchors)
        hidden = hidden.unflatten(1, (anchors.shape[1], self.block_size))
        positions = anchors.unsqueeze(-1) + torch.arange(1, 1 + len(self.weights), device=device)
        labelled = valid.unsqueeze(-1) & (positions < batch["length"][:, None, None])
        positions = positions.clamp(max=input_ids.shape[1] - 1)
        previous_ids = input_ids.gather(1, (positions - 1).flatten(1)).view_as(positions)
        head_input = self.head_input(hidden, previous_ids)
        rows = torch.arange(input_ids.shape[0], device=device)[:, None, None].expand_as(positions)[labelled]
        positions = positions[labelled]

        # The target's distribution of a token comes from the position before it.
        target_hidden = states.last_hidden[rows, positions - 1] if states.last_hidden is not None else None
        token_ids = input_ids[rows, positions]
        # A target may write the mask token, or a token outside the draft vocabulary. Such a position counts as a miss
        # and has weight 0 in the loss.
        draftable = token_ids != self.config.mask_token_id
        refused = batch["refused"][rows, positions] if "refused" in batch else None
        if self.config.maps_vocabulary:
            assert self.config.vocab_size is not None, "a config with a draft vocabulary has it"
            draft_ids = draft_ids_of(self.drafter.d2t, self.config.vocab_size)
            token_ids = draft_ids[token_ids]
            if refused is not None:
                refused = draft_ids[refused.clamp(min=0)].where(refused >= 0, -1)
            draftable &= token_ids >= 0
            token_ids = token_ids.clamp(min=0)
        losses, hits, agreement = draft_losses(
            self.loss,
            head_input[labelled],
            self._draft_head,
            token_ids,
            target_hidden=target_hidden,
            target_head=self._target_head,
            refused=refused,
            agreement=self.wants_agreement,
        )
        weights = self.weights.to(device).expand(labelled.shape)[labelled] * draftable
        if agreement is not None:
            losses = losses + self.further_losses(head_input[labelled], agreement)
        # A batch whose rows are all too short for a block gives 0; the second term keeps it attached to the graph.
        loss = (losses * weights).sum() / weights.sum().clamp(min=1e-9) + 0.0 * head_input.sum()
        correct = torch.zeros_like(labelled).masked_scatter_(labelled, hits & draftable)
        return StepOutput(loss, correct.detach(), labelled)

    def head_input(self, hidden: Tensor, previous_ids: Tensor) -> Tensor:
        """[batch, anchors, depth, width], input of the draft head and of `further_losses` for the slots that draft.

        Args:
            hidden: [batch, anchors, block, hidden], of all slots.
            previous_ids: [batch, anchors, depth] int64, the row's token before each slot that drafts.
        """
        return hidden[:, :, self.config.first_slot :]

    def draft_head(self, head_input: Tensor) -> Tensor:
        """[positions, width] -> [positions, draft_vocab] float32 logits."""
        return self.drafter.draft_logits(head_input, self.drafter.head(self.reader.lm_head))

    @property
    def wants_agreement(self) -> bool:
        """Whether `further_losses` is used; it needs the probability that a draft is accepted."""
        return False

    def further_losses(self, head_input: Tensor, agreement: Tensor) -> Tensor:
        """[positions] float32, added to the loss of each position; see `draft_losses` for `agreement`."""
        raise NotImplementedError

    def _draft_head(self, head_input: Tensor) -> Tensor:
        return self._without_mask(self.draft_head(head_input))

    def _target_head(self, hidden: Tensor) -> Tensor:
        logits = self.reader.head(hidden)
        if self.config.maps_vocabulary:
            logits = logits[..., self.drafter.target_ids.to(logits.device)]
        return self._without_mask(logits)

    def _without_mask(self, logits: Tensor) -> Tensor:
        """Excludes the mask token: an untrained drafter, whose input is mask tokens, would predict it."""
        if self.config.maps_vocabulary:
            return logits.masked_fill(self.drafter.target_ids.to(logits.device) == self.config.mask_token_id, NEVER)
        return NeverProposedLogitsProcessor(self.config.mask_token_id, NEVER)(None, logits)


def new_drafter(
    target: PreTrainedModel,
    *,
    mask_token_id: int,
    num_layers: int = 2,
    block_size: int = 8,
    target_layer_ids: Sequence[int] | None = None,
    intermediate_size: int | None = None,
    draft_vocab_size: int | None = None,
    drafter_class: type[AnyDFlash] = DFlashDrafter,
    **block: Any,
) -> AnyDFlash:
    """A DFlash drafter for a target, with random weights; attention, rotary and norm settings are the target's.

    Args:
        target: the model to draft for.
        mask_token_id: an id of the target's embedding that text does not use.
        num_layers: draft layers.
        block_size: slots of a block, including the root's.
        target_layer_ids: target layers to read; None for evenly spaced ones, `num_layers` but at least 4.
        intermediate_size: of the MLPs; None for the target's.
        draft_vocab_size: tokens of the draft vocabulary, whose rows of the target's head are used: the first ones,
            until `set_vocabulary`; None for all.
        drafter_class: class of the drafter.
        block: further keys of its `dflash_config`.
    """
    config = target.config.get_text_config(decoder=True)
    if target_layer_ids is None:
        target_layer_ids = dflash_layer_ids(max(4, num_layers), config.num_hidden_layers)
    if draft_vocab_size is not None:
        block["draft_vocab_size"] = draft_vocab_size
    block |= {"target_layer_ids": list(target_layer_ids), "mask_token_id": mask_token_id, "block_size": block_size}
    own = drafter_class.config_class(
        dflash_config=block,
        num_target_layers=config.num_hidden_layers,
        final_logit_softcapping=getattr(config, "final_logit_softcapping", None),
        num_hidden_layers=num_layers,
        **decoder_shape(target, intermediate_size),
    )
    drafter = drafter_class(own)
    drafter.check_target(target)
    return drafter


def choose_anchors(first: Tensor, length: Tensor, num_anchors: int, *, random: bool) -> tuple[Tensor, Tensor]:
    """Anchor positions of each row, ascending.

    Args:
        first: [batch] int64, first position that may be an anchor; at least 1 is used, because a root always has a
            token before it.
        length: [batch] int64, tokens of the row; the last token is no anchor, because no token follows it.
        num_anchors: per row.
        random: draw without replacement from the global generator (its state is part of checkpoints), or space evenly.

    Returns:
        anchors: [batch, num_anchors] int64; 0 if `valid` is False.
        valid: [batch, num_anchors] bool.

    Examples:
        >>> choose_anchors(torch.tensor([4]), torch.tensor([9]), 3, random=False)
        (tensor([[4, 5, 6]]), tensor([[True, True, True]]))
    """
    first = first.clamp(min=1).unsqueeze(1)
    candidates = (length.unsqueeze(1) - 1 - first).clamp(min=0)
    order = torch.arange(num_anchors, device=first.device)
    valid = order < candidates
    if random:
        # Always drawn on the CPU, so that the anchors do not depend on the device.
        widest = max(int(candidates.max()), num_anchors)
        draws = torch.rand(len(first), widest).to(first.device)
        draws = draws.masked_fill(torch.arange(widest, device=first.device) >= candidates, 2.0)
        offsets = draws.argsort(1)[:, :num_anchors].sort(1).values
        # After sorting, the candidates come before the fillers, whose indices are larger.
    else:
        offsets = torch.where(candidates >= num_anchors, order * candidates // num_anchors, order)
    return torch.where(valid, first + offsets, 0), valid


def block_hidden(
    model: nn.Module,
    config: DFlashConfig,
    embed_tokens: nn.Module,
    input_ids: Tensor,
    features: Tensor,
    anchors: Tensor,
) -> Tensor:
    """[batch, anchors * block, hidden] of every slot of every block, from one forward of the drafter.

    Args:
        model: the drafter, or its wrapper in a distributed run.
        config: the drafter's.
        embed_tokens: the target's.
        input_ids: [batch, seq] int64; only the tokens at the anchors are used.
        features: [batch, seq, taps * hidden], the target's; a block sees those before its anchor.
        anchors: [batch, anchors] int64.
    """
    batch, num_anchors = anchors.shape
    block_size, mask_token_id = _block(config)
    parameter = next(model.parameters())
    block_ids = anchors.new_full((batch, num_anchors, block_size), mask_token_id)
    block_ids[:, :, 0] = input_ids.gather(1, anchors)
    context = torch.arange(features.shape[1], device=anchors.device).expand(batch, -1)
    slots = anchors.unsqueeze(-1) + torch.arange(block_size, device=anchors.device)
    return model(
        block_ids.flatten(1),
        features.to(parameter.dtype),
        torch.cat([context, slots.flatten(1)], dim=1),
        embed_tokens=embed_tokens,
        masks=block_masks(config, anchors, features.shape[1], _attention_dtype(parameter)),
    )


def block_masks(config: DFlashConfig, anchors: Tensor, context: int, dtype: torch.dtype) -> list[Tensor]:
    """Per draft layer the additive mask [batch, 1, anchors * block, context + anchors * block].

    A slot sees the context before its own anchor and the slots of its own block, within the layer's window; in a causal
    layer it sees no later slot. These are the rules of inference, for many blocks at once.
    """
    batch, num_anchors = anchors.shape
    (block_size, _), device = _block(config), anchors.device
    within = torch.arange(block_size, device=device)
    block_of = torch.arange(num_anchors, device=device).repeat_interleave(block_size)
    slot = within.repeat(num_anchors)
    anchor = anchors.repeat_interleave(block_size, dim=1).unsqueeze(-1)
    entries = torch.arange(context, device=device)
    built: dict[tuple[int | None, bool], Tensor] = {}
    kinds = [(config.window(layer), config.block_is_causal(layer)) for layer in range(config.num_hidden_layers)]
    for window, causal in dict.fromkeys(kinds):
        past = entries < anchor
        own = block_of.unsqueeze(1) == block_of
        if causal:
            own = own & (slot.unsqueeze(1) >= slot)
        if window is not None:
            past = past & (anchor + slot.unsqueeze(1) - entries < window)
            own = own & ((slot.unsqueeze(1) - slot).abs() < window)
        visible = torch.cat([past, own.expand(batch, -1, -1)], dim=-1)
        lowest = torch.finfo(dtype).min
        built[window, causal] = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(
            ~visible, lowest
        ).unsqueeze(1)  # fmt: skip
    return [built[kind] for kind in kinds]


def _block(config: DFlashConfig) -> tuple[int, int]:
    """Block size and mask token id; every drafter's config has them."""
    assert config.block_size is not None
    assert config.mask_token_id is not None
    return config.block_size, config.mask_token_id


def _attention_dtype(parameter: Tensor) -> torch.dtype:
    kind = parameter.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else parameter.dtype


def default_mask_token(
    tokenizer: PreTrainedTokenizerBase, target: PreTrainedModel, documents: Iterable[Sequence[int]]
) -> tuple[int, str]:
    """The id for the slots to fill, which is then never drafted.

    In this order: the tokenizer's mask token; the first row of the target's embedding that has no token; a special
    token that is not a named one of the tokenizer, not an end of text, and not in the chat template or the documents.
    Of several such tokens, one with "reserved" or "unused" in its name is preferred, then the one with the highest id,
    because tokens with a trained meaning usually have lower ids.

    Args:
        tokenizer: the target's.
        target: the model to draft for.
        documents: token ids of the training text.

    Returns:
        the id and its description.

    Raises:
        ValueError: there is no such id.
    """
    rows = num_tokens(target)
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id, f"{tokenizer.mask_token!r}, the tokenizer's mask token"
    free = 1 + max(tokenizer.get_vocab().values())
    if free < rows:
        return free, "an embedding row of the target that has no token"
    ends = target.generation_config.eos_token_id
    taken = {*tokenizer.all_special_ids, *(ends if isinstance(ends, list) else [ends])}
    taken.update(*documents)
    template = json.dumps(tokenizer.chat_template, ensure_ascii=False)
    special = [(index, str(token)) for index, token in tokenizer.added_tokens_decoder.items() if token.special]
    unused = [(index, text) for index, text in special if index not in taken and text not in template]
    if unused:
        index, text = max(unused, key=lambda each: ("reserved" in each[1] or "unused" in each[1], each[0]))
        return index, f"{text!r}, a special token that is not in the chat template or the text"
    raise ValueError(
        f"DFlash needs a mask token for the slots to fill. The tokenizer of target {target.name_or_path!r} has no mask "
        f"token, its tokens fill all {rows} rows of the target's embedding, and each of its {len(special)} special "
        "tokens is used by the tokenizer, the chat template or the text. Give an id that is rare in text with "
        "--mask-token-id."
    )


@dataclass(kw_only=True)
class DFlashTrainOptions(ShapeOptions):
    """Options of drafters that fill a block."""

    layers: Count = HfArg(default=2, help="decoder layers of the drafter")
    block_size: Count = HfArg(default=8, help="slots of a block, including the root's")
    mask_token_id: int | None = HfArg(default=None, help="default: an id that text does not use; printed")
    draft_vocab_size: Count | None = HfArg(default=None, help=VOCABULARY_HELP)
    anchors: Count = HfArg(default=32, help="blocks per row and step")
    loss: LossName = HfArg(default="ce", help="ce with the tokens of the rows; the others with the target's probs")
    gamma: NotNegative = HfArg(default=4.0, help="position weights exp(-(k-1)/gamma); 0: equal weights")


def prepare(
    options: DFlashTrainOptions,
    target: PreTrainedModel,
    source: RowSource,
    *,
    new: Callable[..., DFlashDrafter] = new_drafter,
    step: type[DFlashStep] = DFlashStep,
    **further: Any,
) -> tuple[DFlashDrafter, DFlashStep]:
    """`Recipe.prepare` of drafters that fill a block.

    Sets and prints `options.mask_token_id` if the option is not given.

    Args:
        options: of the command.
        target: the model to draft for.
        source: of the training rows.
        new: makes the drafter; takes the arguments of `new_drafter`.
        step: class of the training step.
        further: arguments of `new` in addition to the shared options.
    """
    if options.mask_token_id is None:
        options.mask_token_id, name = default_mask_token(source.tokenizer, target, source.documents)
        print(f"mask token: {options.mask_token_id}, {name}; --mask-token-id chooses another")
    drafter = new(
        target,
        mask_token_id=options.mask_token_id,
        num_layers=options.layers,
        block_size=options.block_size,
        target_layer_ids=options.taps,
        intermediate_size=options.intermediate_size,
        draft_vocab_size=checked_vocabulary_size(options.draft_vocab_size, target),
        **further,
    )
    return drafter, step(drafter, target, num_anchors=options.anchors, loss=options.loss, gamma=options.gamma or None)


def read_rows(options: DFlashTrainOptions, drafter: DFlashDrafter, target: PreTrainedModel, rows: Rows) -> None:
    """Sets the drafter's vocabulary from the rows."""
    if drafter.config.maps_vocabulary:
        drafter.set_vocabulary(choose_vocabulary(rows, drafter.config.draft_vocab_size, target))
