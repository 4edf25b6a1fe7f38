"""The losses of one SpecBlock block: draft and rank loss under the valid-prefix mask.

Source: SpecBlock, Section 3.3; where the published code does otherwise, an argument says so. `step.py` chains blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hf_specdec.drafters.specblock.quality import rank_classes

RankLoss = Literal["paper", "published"]
SlotWeights = Literal["alike", "by_count"]


def smoothed_classes(num_classes: int) -> Tensor:
    """Row t: the soft label of bucket t. Mass falls with distance, faster towards better buckets (published code).

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
        draft: [slots] float32, Eq. 6 of each slot.
        rank: scalar float32.
        correct: [batch, positions, slots] bool, whether a slot's likeliest token is the target's likeliest in the
            draft vocabulary; False past the end.
        valid: [batch, positions, slots + 1] bool, Eq. 5: valid[..., k] is whether slots before k were all right.
        rank_classes: [batch, positions, slots] int64, true buckets; -1 where the rank loss does not count them.
    """

    draft: Tensor
    rank: Tensor
    correct: Tensor
    valid: Tensor
    rank_classes: Tensor


def block_losses(
    logits: Tensor,
    rank_logits: Tensor,
    target_probs: Tensor,
    position_mask: Tensor,
    start_mask: Tensor,
    *,
    offset: int = 0,
    valid_prefix: bool = True,
    slot_weights: SlotWeights = "alike",
    top_k: int | None = None,
    rank_loss: RankLoss = "paper",
    rank_budget: int | None = None,
    length: int | None = None,
) -> BlockLosses:
    """Draft and rank loss of one block (Section 3.3).

    Args:
        logits: [batch, positions, slots, draft_vocab] float32.
        rank_logits: [batch, positions, slots, classes] float32.
        target_probs: [batch, rows, draft_vocab] float32, the target's over the draft vocabulary. Slot k of position i
            belongs to row i + offset + k; rows past the end may be missing.
        position_mask: [batch, rows] bool, rows that can be learned: real text, best token in the draft vocabulary.
        start_mask: [batch, positions] bool, positions that count as starts.
        offset: tokens that earlier blocks of the chain have drafted.
        valid_prefix: apply the mask of Eq. 5; without it every slot counts (Table 2).
        slot_weights: "alike" has every slot's mean in the sum, Eq. 6. "by_count" divides the sums of all slots by the
            positions of the first: in a small batch a late slot has a handful of valid positions, or none, and their
            mean is mostly noise, as loud as the first slot's hundreds.
        top_k: the draft loss looks at the target's likeliest tokens only, with their probabilities as they are.
        rank_loss: "paper" is cross-entropy on the positions of the draft loss. "published" has smoothed labels, weighs
            1 + distance and once more the distance to worse buckets than said, and follows a mask of its own, which
            ends a path where the rank head was wrong.
        rank_budget: with it, a bucket of a slot counts as this many examples at most.
        length: of the text whose first `positions` positions these are; no longer than they where None.
    """
    _, positions, slots, _ = logits.shape
    missing = positions + offset + slots - target_probs.shape[1]
    if missing > 0:
        target_probs = torch.nn.functional.pad(target_probs, (0, 0, 0, missing))
        position_mask = torch.nn.functional.pad(position_mask, (0, missing))
    labels = smoothed_classes(rank_logits.shape[-1]).to(logits.device)
    if rank_loss == "paper":
        labels = torch.eye(len(labels), device=logits.device)
    best_ids = target_probs.argmax(-1)
    path = start_mask & position_mask[:, :positions]
    rank_path = path
    valid, draft, correct, classes = [path], [], [], []
    rank_sum, rank_count = logits.new_zeros(()), logits.new_zeros(())
    # Not indexed slot by slot: each index would fill a gradient as large as all logits with zeros.
    for slot, (at_slot, said) in enumerate(zip(logits.unbind(2), rank_logits.unbind(2), strict=True)):
        rows = slice(offset + slot, offset + slot + positions)
        # The last positions have no room for later slots.
        room = torch.arange(positions, device=logits.device) < (length or positions) - slot
        there = position_mask[:, rows] & room
        probs = target_probs[:, rows]
        logprobs = at_slot.log_softmax(-1)
        if top_k is None:
            entropy = -(probs * logprobs).sum(-1)
        else:
            likeliest = probs.topk(top_k, dim=-1)
            entropy = -(likeliest.values * logprobs.gather(-1, likeliest.indices)).sum(-1)
        mask = there & path
        if slot == 0 or slot_weights == "alike":
            normaliser = mask.sum().clamp(min=1)
        draft.append((entropy * mask).sum() / normaliser)
        token_ids = best_ids[:, rows]
        right = at_slot.argmax(-1) == token_ids
        correct.append(right & room)

        truth = rank_classes(at_slot.detach(), token_ids)
        mask = there & (path if rank_loss == "paper" else rank_path)
        rank_entropy = -(labels[truth] * said.log_softmax(-1)).sum(-1)
        weight = mask.float()
        if rank_budget is not None:
            seen = torch.stack([(mask & (truth == kind)).sum() for kind in range(len(labels))])
            weight = weight * (rank_budget / seen.clamp(min=1)).clamp(max=1)[truth]
        if rank_loss == "published":
            distance = truth - said.argmax(-1)
            rank_entropy = rank_entropy * (1 + distance.abs() + distance.clamp(min=0))
        rank_sum = rank_sum + (rank_entropy * weight).sum()
        rank_count = rank_count + weight.sum()
        classes.append(truth.where(mask, -1))

        if valid_prefix:
            path = path & (right | ~room)
            rank_path = rank_path & ((said.argmax(-1) == truth) | ~room)
        valid.append(path)
    return BlockLosses(
        torch.stack(draft),
        rank_sum / rank_count.clamp(min=1e-6),
        torch.stack(correct, -1),
        torch.stack(valid, -1),
        torch.stack(classes, -1),
    )
