"""Losses of draft positions against their plain formulas, values and gradients, whole and in chunks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from hf_specdec.methods.specblock.training import block_losses
from hf_specdec.training.losses import (
    LOSS_NAMES,
    SOFT_LOSSES,
    ce_loss,
    draft_losses,
    kl_loss,
    lk_loss,
    position_losses,
    position_weights,
    refusal_loss,
    tv_loss,
)

POSITIONS, HIDDEN, VOCAB = 7, 6, 11


def plain(loss: str, draft_logits: Tensor, target_logits: Tensor, token_ids: Tensor, eta: float = 3.0) -> Tensor:
    """The losses written out token by token, from probabilities."""
    draft, target = draft_logits.softmax(-1), target_logits.softmax(-1)
    kl = (target * (target.log() - draft.log())).sum(-1)
    tv = 1 - torch.minimum(draft, target).sum(-1)
    if loss == "ce":
        return -draft.log().gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    share = torch.exp(-eta * torch.minimum(draft, target).sum(-1)).detach()
    return {"kl": kl, "tv": tv, "lk": share * kl + (1 - share) * tv}[loss]


@pytest.fixture
def case() -> dict[str, Tensor | nn.Linear]:
    head, target_head = (nn.Linear(HIDDEN, VOCAB, bias=False) for _ in range(2))
    return {
        "head": head,
        "target_head": target_head,
        "hidden": 3 * torch.randn(POSITIONS, HIDDEN),
        "target_hidden": 3 * torch.randn(POSITIONS, HIDDEN),
        "token_ids": torch.randint(VOCAB, (POSITIONS,)),
    }


@pytest.mark.parametrize("loss", LOSS_NAMES)
@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_chunked_losses_and_gradients_equal_the_plain_formula(loss, rows_at_once, case):
    weights = torch.rand(POSITIONS)
    chunked, whole = (case["hidden"].clone().requires_grad_() for _ in range(2))
    losses, hits, agreement = draft_losses(
        loss, chunked, case["head"], case["token_ids"],
        target_hidden=case["target_hidden"], target_head=case["target_head"], agreement=True,
        max_chunk_elements=rows_at_once * VOCAB,
    )  # fmt: skip
    (losses * weights).sum().backward()
    logits = case["head"](whole)
    expected = plain(loss, logits, case["target_head"](case["target_hidden"]), case["token_ids"])
    (expected * weights).sum().backward()
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(chunked.grad, whole.grad)
    assert torch.equal(hits, logits.argmax(-1) == case["token_ids"])
    overlap = torch.minimum(logits.softmax(-1), case["target_head"](case["target_hidden"]).softmax(-1)).sum(-1)
    torch.testing.assert_close(agreement, hits.float() if loss == "ce" else overlap)


def test_refused_drafts_cost_their_probability_where_the_target_would_not_have_chosen_them(case):
    draft, target = case["head"](case["hidden"]), case["target_head"](case["target_hidden"])
    refused = torch.full((POSITIONS, 2), -1)
    refused[1, 0], refused[3] = 4, torch.tensor([0, 7])
    added = position_losses("kl", draft, target, refused=refused) - position_losses("kl", draft, target)
    q, p = draft.softmax(-1), target.softmax(-1)
    expected = torch.zeros(POSITIONS)
    for position, token in ((1, 4), (3, 0), (3, 7)):
        expected[position] -= (1 - p[position, token]) * (1 - q[position, token]).log()
    torch.testing.assert_close(added, expected, rtol=1e-4, atol=1e-5)
    # A step against the gradient drafts them less.
    logits = torch.zeros(1, VOCAB, requires_grad=True)
    position_losses("ce", logits, token_ids=torch.tensor([2]), refused=torch.tensor([[5, -1]])).sum().backward()
    assert logits.grad[0, 5] > logits.grad[0, 6] > 0 > logits.grad[0, 2]


def test_a_row_of_the_block_losses_is_the_plain_formula():
    draft, target = torch.randn(1, 1, VOCAB), torch.randn(1, 1, VOCAB)
    everywhere = torch.ones(1, 1, dtype=torch.bool)
    refused = torch.tensor([[[3, -1]]])
    for loss in LOSS_NAMES:
        found = block_losses(draft, torch.zeros(1, 1, 4), target, everywhere, everywhere, loss=loss).draft
        torch.testing.assert_close(found, plain(loss, draft[0], target[0], target[0].argmax(-1)))
        more = block_losses(
            draft, torch.zeros(1, 1, 4), target, everywhere, everywhere, loss=loss, refused=refused
        ).draft
        torch.testing.assert_close(more - found, refusal_loss(draft[0], target[0], refused[0]))


def test_draft_losses_hold_no_more_logits_than_allowed_and_train_a_head_that_is_to_learn(case):
    seen = []

    def spying_head(hidden: Tensor) -> Tensor:
        logits = case["head"](hidden)
        seen.append(logits.numel())
        return logits

    hidden = case["hidden"].clone().requires_grad_()
    losses, _, _ = draft_losses("ce", hidden, spying_head, case["token_ids"], max_chunk_elements=2 * VOCAB)
    losses.sum().backward()
    assert max(seen) == 2 * VOCAB
    learned = case["head"].weight.grad.clone()
    case["head"].weight.grad = None
    ce_loss(case["head"](hidden), case["token_ids"]).sum().backward()
    torch.testing.assert_close(learned, case["head"].weight.grad)


def test_draft_losses_work_without_gradients_and_without_positions(case):
    with torch.no_grad():
        losses, _, _ = draft_losses("ce", case["hidden"], case["head"], case["token_ids"])
    torch.testing.assert_close(losses, ce_loss(case["head"](case["hidden"]), case["token_ids"]))
    none = torch.empty(0, HIDDEN, requires_grad=True)
    losses, hits, _ = draft_losses("ce", none, case["head"], torch.empty(0, dtype=torch.long))
    assert losses.shape == hits.shape == (0,)
    losses.sum().backward()


def test_equal_distributions_cost_nothing_and_disjoint_ones_cost_one_tv():
    logits = torch.randn(4, VOCAB)
    for loss in (kl_loss, tv_loss, lk_loss):
        torch.testing.assert_close(loss(logits, logits), torch.zeros(4), atol=1e-6, rtol=0)
    apart = torch.full((2, VOCAB), -50.0)
    apart[0, 0] = apart[1, 1] = 50.0
    torch.testing.assert_close(tv_loss(apart[:1], apart[1:]), torch.ones(1))


def test_kl_is_that_of_the_formula():
    draft, target = torch.randn(2, 4, VOCAB)
    probs, others = target.softmax(-1), draft.softmax(-1)
    torch.testing.assert_close(kl_loss(draft, target), (probs * (probs / others).log()).sum(-1))


def test_lk_is_kl_where_nothing_overlaps_and_nears_tv_where_eta_is_large():
    draft, target = torch.randn(5, VOCAB), torch.randn(5, VOCAB)
    torch.testing.assert_close(lk_loss(draft, target, eta=0.0), kl_loss(draft, target))
    torch.testing.assert_close(lk_loss(draft, target, eta=1e4), tv_loss(draft, target))


def test_position_weights_decay_by_e_every_gamma_positions():
    weights = position_weights(9, gamma=4.0)
    assert len(weights) == 8
    assert weights[0] == 1
    assert weights[4].item() == pytest.approx(1 / math.e)
    assert position_weights(5, None).tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match=r"gamma=-1 must be positive"):
        position_weights(5, -1)


def test_unknown_loss_raises(case):
    with pytest.raises(ValueError, match=r"loss='mse' is not known; choose one of \['ce', 'kl', 'tv', 'lk'\]"):
        draft_losses("mse", case["hidden"], case["head"], case["token_ids"])


@pytest.mark.parametrize("loss", SOFT_LOSSES)
def test_soft_loss_without_the_target_raises(loss, case):
    with pytest.raises(ValueError, match=r"needs target_hidden and target_head"):
        draft_losses(loss, case["hidden"], case["head"], case["token_ids"])
