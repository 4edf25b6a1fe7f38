"""The losses of one SpecBlock block: draft and rank loss with the valid-prefix mask.

Source: SpecBlock, Section 3.3; arguments select the variants of the published code. `step.py` chains blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hf_specdec.drafters.specblock.quality import rank_classes
from hf_specdec.training.losses import LossName, position_losses

RankLoss = Literal["paper", "published"]
SlotWeights = Literal["alike", "by_count"]


def smoothed_classes(num_classes: int) -> Tensor:
    """Row t: the soft label of bucket t. It decays with distance, faster towards better buckets (published code).

    Example:
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
    length: int | None = None,
) -> BlockLosses:
    """Draft and rank loss of one block (Section 3.3).

    Args:
        logits: [batch, positions, slots, draft_vocab] float32.
        rank_logits: [batch, positions, slots, classes] float32.
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
        length: of the text that starts with these `positions` positions; None for `positions`.
    """
    _, positions, slots, _ = logits.shape
    missing = positions + offset + slots - target_logits.shape[1]
    if missing > 0:
        target_logits = torch.nn.functional.pad(target_logits, (0, 0, 0, missing))
        position_mask = torch.nn.functional.pad(position_mask, (0, missing))
        if text_ids is not None:
            text_ids = torch.nn.functional.pad(text_ids, (0, missing), value=-1)
        if refused is not None:
            refused = torch.nn.functional.pad(refused, (0, 0, 0, missing), value=-1)
    labels = smoothed_classes(rank_logits.shape[-1]).to(logits.device)
    if rank_loss == "paper":
        labels = torch.eye(len(labels), device=logits.device)
    best_ids = target_logits.argmax(-1)
    path = start_mask & position_mask[:, :positions]
    rank_path = path
    valid, draft, correct, classes = [path], [], [], []
    rank_sum, rank_count = logits.new_zeros(()), logits.new_zeros(())
    # unbind and not an index per slot: the gradient of each index would be a zero tensor as large as all logits.
    for slot, (slot_logits, slot_rank_logits) in enumerate(zip(logits.unbind(2), rank_logits.unbind(2), strict=True)):
        rows = slice(offset + slot, offset + slot + positions)
        # The last positions have no tokens for later slots.
        inside = torch.arange(positions, device=logits.device) < (length or positions) - slot
        counted = position_mask[:, rows] & inside
        values = position_losses(
            loss, slot_logits, target_logits[:, rows], refused=None if refused is None else refused[:, rows]
        )
        mask = counted & path
        if slot == 0 or slot_weights == "alike":
            normaliser = mask.sum().clamp(min=1)
        draft.append((values * mask).sum() / normaliser)
        token_ids = best_ids[:, rows]
        right = slot_logits.argmax(-1) == token_ids
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
            follows = right if text_ids is None else slot_logits.argmax(-1) == text_ids[:, rows]
            path = path & (follows | ~inside)
            rank_path = rank_path & ((slot_rank_logits.argmax(-1) == truth) | ~inside)
        valid.append(path)
    return BlockLosses(
        torch.stack(draft),
        rank_sum / rank_count.clamp(min=1e-6),
        torch.stack(correct, -1),
        torch.stack(valid, -1),
        torch.stack(classes, -1),
    )
