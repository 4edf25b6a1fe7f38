"""Losses of draft positions, and their computation from draft hidden states in chunks.

The four losses are functions of logits with one value per position; `position_losses` is the one of a name, and every
step uses it. `draft_losses` applies a head and one of them without holding the logits of all positions: memory has a
fixed bound for any number of positions and any vocabulary. The step of a method decides which positions count, and for
which token.
Sources: the survey among our papers (003), section "LK Losses - Train for Acceptance and Not KL", for `tv` and `lk`;
Samarin et al., arXiv 2602.23881, for the schedule of `lk`; DFlash, arXiv 2602.06036, Eq. 4, for the position weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LossName = Literal["ce", "kl", "tv", "lk"]
LOSS_NAMES: tuple[str, ...] = get_args(LossName)
SOFT_LOSSES: tuple[str, ...] = ("kl", "tv", "lk")  # they need the target's logits
LK_ETA = 3.0
MAX_CHUNK_ELEMENTS = 1 << 24  # logits in memory at a time, 64 MB in float32


def position_weights(block_size: int, gamma: float | None) -> Tensor:
    """Weight of each drafted position of a block: exp(-(k - 1) / gamma) for k = 1 .. block_size - 1.

    A wrong early token makes the rest of the block worthless, so early positions count more. DFlash
    (arXiv 2602.06036), Eq. 4; its authors use gamma 7, 5, 4 for blocks of 16, 10, 8.

    Args:
        block_size: slots of a block, including the root's.
        gamma: decay length in positions; None for equal weights.

    Returns:
        [block_size - 1] float32, 1 at the first.

    Raises:
        ValueError: gamma is not positive.

    Examples:
        >>> position_weights(4, 1.0)
        tensor([1.0000, 0.3679, 0.1353])
    """
    if gamma is None:
        return torch.ones(block_size - 1)
    if not gamma > 0:
        raise ValueError(f"gamma={gamma!r} must be positive, or None for equal weights.")
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32) / gamma)


def ce_loss(draft_logits: Tensor, token_ids: Tensor) -> Tensor:
    """Cross-entropy with the target's token: [..., vocab], [...] int64 -> [...], nats."""
    return -draft_logits.float().log_softmax(-1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def kl_loss(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL(target || draft) at temperature 1: twice [..., vocab] -> [...], nats."""
    draft_logprobs = draft_logits.float().log_softmax(-1)
    target_logprobs = target_logits.float().log_softmax(-1)
    return (target_logprobs.exp() * (target_logprobs - draft_logprobs)).sum(-1)


def tv_loss(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Total variation distance: twice [..., vocab] -> [...], from 0 to 1.

    It is 1 - alpha, where alpha = sum over tokens of min(target_probs, draft_probs) is the probability that
    speculative sampling accepts a token drawn from the drafter.
    """
    difference = target_logits.float().softmax(-1) - draft_logits.float().softmax(-1)
    return 0.5 * difference.abs().sum(-1)


def lk_loss(draft_logits: Tensor, target_logits: Tensor, eta: float = LK_ETA) -> Tensor:
    """The acceptance-aware hybrid: lambda * KL + (1 - lambda) * TV with lambda = exp(-eta * alpha).

    At low acceptance it is mostly KL, whose gradient is useful everywhere; at high acceptance mostly TV, the objective
    itself. The schedule and the default eta, their best one, are from Samarin et al. (arXiv 2602.23881); alpha is per
    position and has no gradient.
    """
    tv = tv_loss(draft_logits, target_logits)
    share = torch.exp(-eta * (1 - tv.detach()))
    return share * kl_loss(draft_logits, target_logits) + (1 - share) * tv


def refusal_loss(draft_logits: Tensor, target_logits: Tensor | None, refused: Tensor) -> Tensor:
    """Refused drafts as negatives: the sum over them of -(1 - p(x)) log(1 - q(x)).

    p is the target's probability and q the drafter's: a token that the target would have chosen as often as not is
    hardly a mistake, though it was refused once. That refused drafts are negatives is Aurora's (arXiv 2602.06932); this
    form of the loss is ours.

    Args:
        draft_logits: [..., vocab].
        target_logits: [..., vocab]; None for p = 0.
        refused: [..., most] int64 tokens, -1 for none.

    Returns:
        [...] float32.

    Examples:
        >>> logits = torch.tensor([[0.0, 0.0]])  # q = 1/2
        >>> refusal_loss(logits, None, torch.tensor([[1, -1]]))
        tensor([0.6931])
    """
    chosen = refused.clamp(min=0)
    logprobs = draft_logits.float().log_softmax(-1).gather(-1, chosen)
    values = -torch.log1p(-logprobs.exp().clamp(max=1 - 1e-6))
    if target_logits is not None:
        values = values * (1 - target_logits.float().softmax(-1).gather(-1, chosen))
    return values.where(refused >= 0, 0.0).sum(-1)


def position_losses(
    loss: LossName,
    draft_logits: Tensor,
    target_logits: Tensor | None = None,
    token_ids: Tensor | None = None,
    *,
    refused: Tensor | None = None,
) -> Tensor:
    """The loss of this name at every position.

    Args:
        loss: one of "ce", "kl", "tv", "lk".
        draft_logits: [..., vocab].
        target_logits: [..., vocab]; for "kl", "tv" and "lk".
        token_ids: [...] int64, the labels of "ce"; None for the target's most probable tokens.
        refused: [..., most] int64, drafts that were refused at these positions, -1 for none; see `refusal_loss`, which
            is added.

    Returns:
        [...] float32.
    """
    if loss == "ce":
        if token_ids is None:
            assert target_logits is not None
            token_ids = target_logits.argmax(-1)
        values = ce_loss(draft_logits, token_ids)
    else:
        assert target_logits is not None
        values = {"kl": kl_loss, "tv": tv_loss, "lk": lk_loss}[loss](draft_logits, target_logits)
    return values if refused is None else values + refusal_loss(draft_logits, target_logits, refused)


def check_loss(loss: str) -> None:
    """Raises ValueError if there is no loss of this name."""
    if loss not in LOSS_NAMES:
        raise ValueError(f"loss={loss!r} is not known; choose one of {list(LOSS_NAMES)}.")


def draft_losses(
    loss: LossName,
    draft_hidden: Tensor,
    draft_head: Callable[[Tensor], Tensor],
    token_ids: Tensor,
    *,
    target_hidden: Tensor | None = None,
    target_head: Callable[[Tensor], Tensor] | None = None,
    refused: Tensor | None = None,
    agreement: bool = False,
    max_chunk_elements: int = MAX_CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss, greedy hit and agreement of every position.

    At most `max_chunk_elements` logits of a model are in memory. With several chunks, the backward pass computes the
    logits of each chunk again.

    Args:
        loss: one of "ce", "kl", "tv", "lk".
        draft_hidden: [positions, hidden], input of the head.
        draft_head: [chunk, hidden] -> [chunk, vocab] logits; its parameters may require gradients.
        token_ids: [positions] int64, the token of each position: the label of "ce", and of the greedy hit.
        target_hidden: [positions, hidden], the target's head input at the same positions; for "kl", "tv" and "lk".
        target_head: [chunk, hidden] -> [chunk, vocab], the target's logits.
        refused: [positions, most] int64, see `position_losses`.
        agreement: whether to compute the probability that a sampled draft is accepted.
        max_chunk_elements: bound on chunk * vocab; a chunk has at least one position.

    Returns:
        Per position the loss, [positions] float32 with gradient; whether the drafter's most probable token is the
        token, [positions] bool; and with `agreement` the probability that a sampled draft is accepted, [positions]
        float32: 1 - TV, or with "ce" the hit.

    Raises:
        ValueError: the loss is unknown, or `target_hidden` or `target_head` is missing.
    """
    check_loss(loss)
    if loss in SOFT_LOSSES and (target_hidden is None or target_head is None):
        raise ValueError(
            f"loss={loss!r} compares distributions, so it needs target_hidden and target_head. "
            'With tokens only, use loss="ce".'
        )

    def of_chunk(hidden: Tensor, chunk: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        logits = draft_head(hidden)
        hits = logits.detach().argmax(-1) == token_ids[chunk]
        target_logits, agreed = None, hits.float() if agreement else None
        if loss != "ce":
            assert target_hidden is not None
            assert target_head is not None
            with torch.no_grad():
                target_logits = target_head(target_hidden[chunk])
                agreed = 1 - tv_loss(logits, target_logits).float() if agreement else None
        negatives = None if refused is None else refused[chunk]
        values = position_losses(loss, logits, target_logits, token_ids[chunk], refused=negatives)
        return values.float(), hits, agreed

    positions = draft_hidden.shape[0]
    with torch.no_grad():  # one position, to learn the vocabulary size from the head
        vocab = draft_head(draft_hidden[:1]).shape[-1] if positions else 1
    length = max(1, max_chunk_elements // vocab)
    if positions <= length:
        return of_chunk(draft_hidden, slice(0, positions))
    chunks = [slice(start, start + length) for start in range(0, positions, length)]
    parts = [checkpoint(of_chunk, draft_hidden[chunk], chunk, use_reentrant=False) for chunk in chunks]
    losses, hits, agreements = zip(*parts, strict=True)
    return torch.cat(losses), torch.cat(hits), torch.cat(agreements) if agreement else None
