"""The SpecBlock training step: blocks from every position at once, chained with random cuts.

Position i of a row is a start with the target's feature after token i as condition and token i + 1 as input; slot k
drafts token i + 2 + k. All starts of a row run in one forward, and each later block continues the previous block at a
random cut. A slot counts only if all slots before it are right, as in drafting. Arguments select the variants of the
published code.
Source: SpecBlock, Sections 3.3 and 4.1 and Appendix A; the vocabulary is chosen as in FR-Spec. The
target's side is in `training/features.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.hf_argparser import HfArg

from hf_specdec.decoding.targets.modules import num_tokens
from hf_specdec.decoding.targets.taps import decoder_layers
from hf_specdec.drafting.config import eagle3_layer_ids
from hf_specdec.methods.specblock.network import BlockOutput, SpecBlockConfig, SpecBlockDrafter
from hf_specdec.methods.specblock.quality import RANK_BOUNDS, rank_classes
from hf_specdec.training.features import TargetStates
from hf_specdec.training.losses import LossName, position_losses
from hf_specdec.training.options import Count, ShareBelow1
from hf_specdec.training.passes import block_masks, growing_cache
from hf_specdec.training.recipe import Recipe, ShapeOptions, decoder_shape
from hf_specdec.training.source import Rows, RowSource
from hf_specdec.training.step import AdaptiveStep, StepOutput
from hf_specdec.training.vocabulary import (
    DRAFT_VOCAB_SIZE,
    VOCABULARY_HELP,
    checked_vocabulary_size,
    choose_vocabulary,
    copy_final_norm,
    copy_head,
)

RankLoss = Literal["paper", "published"]
SlotWeights = Literal["alike", "by_count"]


def smoothed_classes(num_classes: int) -> Tensor:
    """Row t: the soft label of bucket t. It decays with distance, faster towards better buckets (published code).

    Examples:
        >>> smoothed_classes(2)
        tensor([[0.8000, 0.2000],
                [0.1000, 0.9000]])
    """
    classes = torch.arange(num_classes)
    ahead = (classes - classes.unsqueeze(1)).float()
    weights = (1 + torch.where(ahead >= 0, ahead, -2 * ahead)) ** -2
    return weights / weights.sum(1, keepdim=True)


@dataclass(frozen=True)
class BlockLosses:
    """Losses of one block of slots over all starts.

    Attributes:
        draft: [slots] float32, Eq. 6 of each slot, without the target's entropy.
        rank: scalar float32.
        correct: [batch, positions, slots] bool, whether a slot's most probable token is the target's most probable one
            in the draft vocabulary; False beyond the end.
        valid: [batch, positions, slots + 1] bool, Eq. 5: valid[..., k] is whether all slots before k predict the text.
        rank_classes: [batch, positions, slots] int64, true buckets; -1 for slots outside the rank loss.
    """

    draft: Tensor
    rank: Tensor
    correct: Tensor
    valid: Tensor
    rank_classes: Tensor


def block_losses(
    logits: Tensor,
    rank_logits: Tensor,
    target_logits: Tensor,
    position_mask: Tensor,
    start_mask: Tensor,
    *,
    offset: int = 0,
    text_ids: Tensor | None = None,
    refused: Tensor | None = None,
    loss: LossName = "kl",
    valid_prefix: bool = True,
    slot_weights: SlotWeights = "alike",
    rank_loss: RankLoss = "paper",
    rank_budget: int | None = None,
) -> BlockLosses:
    """Draft and rank loss of one block (Section 3.3).

    Args:
        logits: [starts, slots, draft_vocab] float32, of the True positions of `start_mask`, in order.
        rank_logits: [starts, slots, classes] float32.
        target_logits: [batch, rows, draft_vocab] float32, the target's over the draft vocabulary. Slot k of position i
            belongs to row i + offset + k; rows beyond the end may be missing.
        position_mask: [batch, rows] bool, rows that are trained: text whose best token is in the draft vocabulary.
        start_mask: [batch, positions] bool, positions that count as starts.
        offset: tokens that earlier blocks of the chain have drafted.
        text_ids: [batch, rows] int64, the row's own tokens as draft ids, -1 outside the draft vocabulary: a prefix is
            valid if it predicts them, because `target_logits` are conditioned on them. Rows written at a temperature,
            and text by others, differ from the target's most probable tokens. None for those, as published.
        refused: [batch, rows, most] int64, drafts refused at these rows as draft ids, -1 for none; see `refusal_loss`.
        loss: of the draft, see `position_losses`. "kl" has the gradient of Eq. 6, the cross entropy with the target's
            probabilities.
        valid_prefix: apply the mask of Eq. 5; False: every slot counts (Table 2).
        slot_weights: "alike" sums the means of the slots, Eq. 6. "by_count" divides the sums of all slots by the
            number of positions of the first: in a small batch a late slot has few valid positions, and their mean is
            noise with the same weight as the first slot's.
        rank_loss: "paper" is cross-entropy on the positions of the draft loss. "published" has smoothed labels and
            the weight 1 + distance, plus the distance again if the true bucket is worse than the predicted one; its
            mask ends a path where the rank head is wrong.
        rank_budget: a bucket of a slot counts as at most this many examples; None for no limit.
    """
    labels = smoothed_classes(rank_logits.shape[-1]).to(logits.device)
    if rank_loss == "paper":
        labels = torch.eye(len(labels), device=logits.device)
    row, position = start_mask.nonzero(as_tuple=True)
    length, best_ids = target_logits.shape[1], target_logits.argmax(-1)
    path = rank_path = position_mask[row, position]
    valid, draft, correct, classes = [path], [], [], []
    rank_sum, rank_count = logits.new_zeros(()), logits.new_zeros(())
    # unbind and not an index per slot: the gradient of each index would be a zero tensor as large as all logits.
    for slot, (slot_logits, slot_rank_logits) in enumerate(zip(logits.unbind(1), rank_logits.unbind(1), strict=True)):
        ahead = position + offset + slot
        at, inside = (row, ahead.clamp(max=length - 1)), ahead < length
        counted = position_mask[at] & inside
        values = position_losses(loss, slot_logits, target_logits[at], refused=None if refused is None else refused[at])
        mask = counted & path
        if slot == 0 or slot_weights == "alike":
            normaliser = mask.sum().clamp(min=1)
        draft.append((values * mask).sum() / normaliser)
        token_ids, chosen = best_ids[at], slot_logits.argmax(-1)
        right = chosen == token_ids
        correct.append(right & inside)

        truth = rank_classes(slot_logits.detach(), token_ids)
        mask = counted & (path if rank_loss == "paper" else rank_path)
        rank_entropy = -(labels[truth] * slot_rank_logits.log_softmax(-1)).sum(-1)
        weight = mask.float()
        if rank_budget is not None:
            seen = torch.stack([(mask & (truth == kind)).sum() for kind in range(len(labels))])
            weight = weight * (rank_budget / seen.clamp(min=1)).clamp(max=1)[truth]
        if rank_loss == "published":
            distance = truth - slot_rank_logits.argmax(-1)
            rank_entropy = rank_entropy * (1 + distance.abs() + distance.clamp(min=0))
        rank_sum = rank_sum + (rank_entropy * weight).sum()
        rank_count = rank_count + weight.sum()
        classes.append(truth.where(mask, -1))

        if valid_prefix:
            follows = right if text_ids is None else chosen == text_ids[at]
            path = path & follows & inside
            rank_path = rank_path & (slot_rank_logits.argmax(-1) == truth)
        valid.append(path)

    def spread(found: list[Tensor], empty: Any) -> Tensor:
        whole = torch.full((*start_mask.shape, len(found)), empty, dtype=found[0].dtype, device=logits.device)
        whole[start_mask] = torch.stack(found, -1)
        return whole

    return BlockLosses(
        torch.stack(draft),
        rank_sum / rank_count.clamp(min=1e-6),
        spread(correct, False),
        spread(valid, False),
        spread(classes, -1),
    )


class SpecBlockStep(AdaptiveStep):
    """Loss of one batch of rows for a `SpecBlockDrafter`: Eq. 7, summed over chained blocks.

    Args:
        drafter: the drafter to train.
        target: the frozen target it drafts for.
        num_blocks: chained blocks, including the first.
        rank_start: share of the run's steps before the rank loss is added. The paper has 2,000 steps of 20 epochs.
        rank_start_step: number of steps before it, instead of `rank_start`; None for that share.
        valid_prefix: the mask of Eq. 5; False is an ablation of Table 2.
        slot_weights: see `block_losses`.
        loss: of the draft, see `block_losses`.
        rank_loss: see `block_losses`.
        rank_budget: see `block_losses`.
        window: length of the part of a row to train on, drawn for every batch; None for the whole row. With K entries
            per position, attention is the most expensive part of long rows.

    Raises:
        ValueError: the drafter does not fit the target, or an argument is out of range.

    Attributes:
        cross_position: whether slots of a later block also see that block's slots at earlier positions, as in the
            published training code. Drafting never sees them.
    """

    drafter: SpecBlockDrafter
    heads = ("lm_head.", "rank_head.")
    cross_position = False

    def __init__(
        self,
        drafter: SpecBlockDrafter,
        target: PreTrainedModel,
        *,
        num_blocks: int = 2,
        rank_start: float = 0.1,
        rank_start_step: int | None = None,
        valid_prefix: bool = True,
        slot_weights: SlotWeights = "alike",
        loss: LossName = "kl",
        rank_loss: RankLoss = "paper",
        rank_budget: int | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__(drafter, target, loss, last_hidden=True)
        for name, value, least in (
            ("num_blocks", num_blocks, 1),
            ("rank_budget", rank_budget, 1),
            ("window", window, drafter.config.block_size + 2),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}.")
        if not 0 <= rank_start < 1:
            raise ValueError(f"rank_start={rank_start} must be a share of the steps, at least 0 and less than 1.")
        for name, choice, known in (("rank_loss", rank_loss, RankLoss), ("slot_weights", slot_weights, SlotWeights)):
            if choice not in get_args(known):
                raise ValueError(f"{name}={choice!r} is not known; choose one of {list(get_args(known))}.")
        if drafter.config.rank_classes != len(RANK_BOUNDS) + 1:
            raise ValueError(
                f"The drafter's rank head has {drafter.config.rank_classes} classes, but the labels have "
                f"{len(RANK_BOUNDS) + 1}: ranks up to {', '.join(map(str, RANK_BOUNDS))} and above. Train a drafter "
                f"with rank_classes={len(RANK_BOUNDS) + 1}."
            )
        self.embed_tokens = target.get_input_embeddings()
        self.num_blocks, self.rank_start, self.rank_start_step = num_blocks, rank_start, rank_start_step
        self.window = window
        self.options: dict[str, Any] = {
            "valid_prefix": valid_prefix, "slot_weights": slot_weights, "loss": loss, "rank_loss": rank_loss,
            "rank_budget": rank_budget,
        }  # fmt: skip

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor], *, training: bool) -> StepOutput:
        states = self.reader.of_batch(batch)
        if self.window is not None and self.window < batch["input_ids"].shape[1]:
            batch, states = self._windowed(batch, states, training)
        assert states.last_hidden is not None
        input_ids = batch["input_ids"]
        best_ids, target_logits = self.target_labels(states.last_hidden)
        length = input_ids.shape[1]
        # A start is a token that drafting may start from; a token must follow it.
        starts = torch.arange(1, length + 1, device=input_ids.device)
        start_mask = (starts >= batch["first_anchor"].unsqueeze(1)) & (starts + 1 < batch["length"].unsqueeze(1))
        draftable = self.drafter.t2d.to(best_ids.device)[best_ids]
        logits: list[Tensor] | None = [] if self.keep_logits else None
        position_mask = start_mask & draftable
        # Row i is for the token after the start of position i.
        text_ids = nn.functional.pad(self.draft_ids(input_ids[:, 2:]), (0, 2), value=-1)
        losses = self.chain(
            model, states.features, input_ids, target_logits, start_mask, position_mask, training,
            text_ids=text_ids, refused=self._refused(batch), all_logits=logits,
        )  # fmt: skip

        first = int(self.rank_start * self.num_steps) if self.rank_start_step is None else self.rank_start_step
        rank_weight = 1.0 if not training or self.num_updates >= first else 0.0
        loss = torch.stack([part.draft.sum() + rank_weight * part.rank for part in losses]).sum()
        # Without training all cuts are at the ends of blocks, and the slots of all blocks are one chain; random cuts
        # make them overlap.
        measured = losses[:1] if training else losses
        correct = torch.cat([part.correct for part in measured], -1)
        within = torch.arange(correct.shape[-1], device=input_ids.device)
        rows = torch.arange(length, device=input_ids.device).unsqueeze(-1) + within
        inside = (rows < length).expand(correct.shape)
        rows = rows.clamp(max=length - 1)
        labelled = start_mask.unsqueeze(-1) & start_mask[:, rows] & inside
        # A token outside the draft vocabulary counts as a miss.
        return StepOutput(loss, correct & draftable[:, rows], labelled, None if logits is None else torch.cat(logits))

    def head_logits(self, model: nn.Module, states: Tensor) -> Tensor:
        logits: Tensor = model.heads(states)[0]  # type: ignore[operator]
        return logits

    def head_loss(self, model: nn.Module, states: Tensor, labels: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits, rank_logits = model.heads(states)  # type: ignore[operator]
        best_ids, target_logits = labels
        # Each position is a row with one start and one slot.
        alone = torch.ones_like(best_ids, dtype=torch.bool).unsqueeze(1)
        losses = block_losses(
            logits.unsqueeze(1), rank_logits.unsqueeze(1), target_logits.unsqueeze(1),
            (self.draft_ids(best_ids) >= 0).unsqueeze(1), alone, **self.options,
        )  # fmt: skip
        return losses.draft.sum() + losses.rank, logits

    def draft_ids(self, token_ids: Tensor) -> Tensor:
        t2d = self.drafter.t2d.to(token_ids.device)
        return (t2d.cumsum(0) - 1)[token_ids].where(t2d[token_ids], -1)

    def _windowed(
        self, batch: Mapping[str, Tensor], states: TargetStates, training: bool
    ) -> tuple[dict[str, Tensor], TargetStates]:
        """The same part of all rows: random in training, else from the first position that a row drafts."""
        assert self.window is not None
        assert states.last_hidden is not None
        earliest = max(0, int(batch["first_anchor"].min()) - 1)
        latest = max(earliest, int(batch["length"].max()) - self.window)
        start = earliest
        if training:
            start = int(torch.randint(earliest, latest + 1, (1,), generator=self.generator))
        part = slice(start, start + self.window)
        columns = {name: batch[name][:, part] for name in ("input_ids", "refused") if name in batch}
        columns |= {
            "first_anchor": batch["first_anchor"] - start,
            "length": (batch["length"] - start).clamp(max=self.window),
        }
        return columns, TargetStates(states.features[:, part], states.last_hidden[:, part])

    def _refused(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        """The refused drafts of a recorded batch as `block_losses` expects them: row i is for token i + 2."""
        if "refused" not in batch:
            return None
        refused = batch["refused"][:, 2:]
        return nn.functional.pad(self.draft_ids(refused.clamp(min=0)).where(refused >= 0, -1), (0, 0, 0, 2), value=-1)

    @torch.no_grad()
    def target_labels(self, last_hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The target's most probable token and its logits over the draft vocabulary, for the token after each start.

        Row i belongs to the token after token i + 1, which is the start of position i.

        Returns:
            best_ids [batch, positions] int64 over the whole vocabulary, logits [batch, positions, draft_vocab] float32.
        """
        return self.head_labels(torch.cat([last_hidden[:, 1:], last_hidden[:, -1:]], 1))

    @torch.no_grad()
    def head_labels(self, target_hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.reader.labels(target_hidden, self.drafter.target_ids)

    def chain(
        self,
        model: nn.Module,
        features: Tensor,
        input_ids: Tensor,
        target_logits: Tensor,
        start_mask: Tensor,
        position_mask: Tensor,
        training: bool,
        cuts: Sequence[int] | None = None,
        text_ids: Tensor | None = None,
        refused: Tensor | None = None,
        all_logits: list[Tensor] | None = None,
    ) -> list[BlockLosses]:
        """Runs all blocks and returns the losses of each.

        Args:
            model: the drafter, or its wrapper in a distributed run.
            features: [batch, positions, taps * hidden].
            input_ids: [batch, positions] int64, the row's tokens; the last one is repeated beyond the end.
            target_logits: [batch, positions, draft_vocab] float32, see `target_labels`.
            start_mask: [batch, positions] bool.
            position_mask: [batch, positions] bool.
            training: draw the cuts; otherwise every block continues at the end of the previous one.
            cuts: slots kept of every block except the last; None to draw them from 1 to K.
            text_ids: see `block_losses`.
            refused: see `block_losses`.
            all_logits: a list to which the logits [positions, draft_vocab] of all slots of `start_mask` are appended.
        """
        config = self.drafter.config
        batch, positions, _ = features.shape
        slots, device = config.block_size, input_ids.device
        if cuts is None:
            # Always drawn on the CPU, so that the cuts do not depend on the device.
            cuts = [slots] * (self.num_blocks - 1)
            if training:
                cuts = torch.randint(1, slots + 1, (len(cuts),), generator=self.generator).tolist()
        masks = block_masks(positions, slots, cuts, cross_position=self.cross_position, device=device)
        stored = growing_cache(config.num_hidden_layers)
        places = torch.arange(1, positions + 1, device=device)
        conditions, offset = features.to(next(model.parameters()).dtype), 0
        losses = []
        for block, mask in enumerate(masks):
            following = (places + offset).clamp(max=input_ids.shape[1] - 1)
            with torch.no_grad():
                embeddings = self.embed_tokens(input_ids[:, following]).to(conditions.dtype)
            at = places + offset if block and config.block_positions == "path" else places
            output: BlockOutput = model(
                conditions, embeddings, at.expand(batch, -1), from_target=block == 0, mask=mask, cache=stored,
                read=start_mask,
            )  # fmt: skip
            if all_logits is not None:
                all_logits.append(output.logits.flatten(0, 1))
            losses.append(
                block_losses(
                    output.logits, output.rank_logits, target_logits, position_mask, start_mask, offset=offset,
                    text_ids=text_ids, refused=refused, **self.options,
                )
            )  # fmt: skip
            if block < len(cuts):
                conditions = self.drafter.condition_of(output.hidden[:, :, cuts[block] - 1])
                offset += cuts[block]
        return losses


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
        target_layer_ids = eagle3_layer_ids(target.config.get_text_config(decoder=True).num_hidden_layers)
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


def _copy_head(drafter: SpecBlockDrafter, target: PreTrainedModel) -> None:
    """Copies the rows of the target's head for the draft vocabulary."""
    copy_head(drafter.lm_head.weight, target, drafter.target_ids)


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
class SpecBlockTrainOptions(ShapeOptions):
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
    options: SpecBlockTrainOptions, target: PreTrainedModel, source: RowSource
) -> tuple[SpecBlockDrafter, SpecBlockStep]:
    size = checked_vocabulary_size(options.draft_vocab_size, target, DRAFT_VOCAB_SIZE)
    drafter = new_drafter(
        target,
        torch.arange(size or num_tokens(target)),  # replaced by `_read_rows`
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


def _read_rows(options: SpecBlockTrainOptions, drafter: SpecBlockDrafter, target: PreTrainedModel, rows: Rows) -> None:
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
    )


RECIPE = Recipe(
    "specblock", SpecBlockTrainOptions, _prepare, read_rows=_read_rows, adapting=_adapting, further=_adapting
)
