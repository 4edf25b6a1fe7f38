"""Training of a gated LoRA: masks see in training what they see when drafting, and a short run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_specdec.methods.gated_lora import GatedLoraStep, new_drafter
from tests.method_table import make_gated_lora
from tests.methods.gated_lora.test_gated_lora import CASES, masks_behind
from tests.targets import make_target
from tests.training.short_run import learns_what_is_then_drafted
from tests.training.test_losses import plain


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_masks_see_in_training_what_they_see_when_drafting(family: str, attention: str) -> None:
    model = make_target(family, attention, torch.float64)
    drafter = make_gated_lora(model).double()
    step = GatedLoraStep(drafter, model, loss="ce")
    ids = torch.randint(3, 60, (2, 14), generator=torch.Generator().manual_seed(2))
    anchors = torch.tensor([[3, 8, 10], [2, 5, 9]])
    _, hidden = step.run(drafter, ids, anchors, anchors.unsqueeze(-1) + torch.arange(3))
    for row, number in ((0, 0), (0, 2), (1, 1), (1, 2)):
        text = ids[row : row + 1, : anchors[row, number]]
        expected = masks_behind(drafter, model, text)[0].log_softmax(-1)
        logits = step.reader.head(hidden[row, number])
        if family in ("granite", "cohere2"):  # scale the output of their heads
            logits = logits * (1 / 3.0 if family == "granite" else model.config.logit_scale)
        torch.testing.assert_close(logits.log_softmax(-1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_mask_k_learns_the_token_k_after_the_root_and_only_the_drafter_gets_gradients(loss: Any) -> None:
    model = make_target("llama", "sdpa", torch.float32)
    drafter = make_gated_lora(model)
    ids = torch.randint(3, 60, (1, 12), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "first_anchor": torch.tensor([5]), "length": torch.tensor([11])}
    step = GatedLoraStep(drafter, model, num_anchors=8, loss=loss, gamma=None)
    output = step(drafter, batch, training=False)
    output.loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in drafter.parameters())
    laws, values = model(ids).logits[0], []
    for anchor in range(5, 10):
        logits = masks_behind(drafter, model, ids[:, :anchor])[0]
        for mask in range(3):
            at = anchor + mask
            assert bool(output.labelled[0, anchor - 5, mask]) == (at + 1 < 11)
            if at + 1 < 11:
                drafted = drafter.corrected(logits[mask], ids[0, at])
                values.append(plain(loss, drafted, laws[at], ids[0, at + 1]).item())
                assert bool(output.correct[0, anchor - 5, mask]) == bool(drafted.argmax() == ids[0, at + 1])
    assert output.labelled.sum() == len(values)
    assert output.loss.item() == pytest.approx(sum(values) / len(values), rel=1e-4)


def test_anchors_are_spread_over_a_row_and_leave_a_token_to_draft() -> None:
    model = make_target("llama", "sdpa", torch.float32)
    step = GatedLoraStep(make_gated_lora(model), model, num_anchors=4)
    first, length = torch.tensor([[0], [4], [7]]), torch.tensor([[30], [7], [8]])
    for random in (False, True):
        anchors, valid = step.anchors(first, length, random=random)
        assert valid.sum(1).tolist() == [4, 2, 0]
        assert anchors[1, :2].tolist() == [4, 5]
        assert torch.equal(anchors[0].sort().values, anchors[0])
        assert anchors[0].min() >= 1
        assert anchors[0].max() <= 28
    assert step.anchors(first, length, random=False)[0][0].tolist() == [1, 8, 15, 22]


def test_new_updates_change_nothing() -> None:
    model = make_target("llama", "sdpa", torch.float64)
    drafter = new_drafter(model, num_masks=2)
    ids = torch.tensor([[5, 9]])
    drafter.masks.data.copy_(model.get_input_embeddings()(ids))
    found = drafter(model, lambda: model(ids).logits, torch.arange(2)[None])
    torch.testing.assert_close(found, model(ids).logits, rtol=1e-5, atol=1e-5)


def test_experts_and_routers_are_not_updated() -> None:
    names = new_drafter(make_target("qwen3-moe", "sdpa", torch.float32)).config.projections
    assert {name.rpartition(".")[-1] for name in names or {}} == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("markov_rank", [0, 8])
def test_a_short_run_learns_what_is_then_drafted(markov_rank: int, tmp_path: Path) -> None:
    found = learns_what_is_then_drafted(
        tmp_path, lambda target: new_drafter(target, num_masks=3, markov_rank=markov_rank), GatedLoraStep
    )
    assert found > 2


def test_a_target_whose_head_is_scaled_is_trained_with_tokens_only() -> None:
    model = make_target("granite", "sdpa", torch.float32)
    with pytest.raises(ValueError, match='Train with loss="ce"'):
        GatedLoraStep(make_gated_lora(model), model)
    GatedLoraStep(make_gated_lora(model), model, loss="ce")
