"""Medusa-1 training: what each head learns, by hand, and a short run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_specdec.methods.medusa import MedusaStep, new_drafter
from tests.targets import make_target
from tests.training.short_run import learns_what_is_then_drafted
from tests.training.test_losses import plain

WIDTH = 14


def row(first_anchor: int, length: int = WIDTH) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 64, (1, WIDTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "first_anchor": torch.tensor([first_anchor]), "length": torch.tensor([length])}


@pytest.mark.parametrize(("own_head", "loss"), [(True, "ce"), (False, "ce"), (True, "tv"), (True, "lk")])
def test_head_k_learns_the_token_k_after_the_root_with_weight_decay_to_the_k(own_head: bool, loss: Any) -> None:
    target = make_target("llama", "sdpa", torch.float32)
    torch.manual_seed(1)
    drafter = new_drafter(target, num_heads=3, own_head=own_head)
    for parameter in drafter.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    batch = row(first_anchor=5, length=12)
    output = MedusaStep(drafter, target, decay=0.5, loss=loss)(drafter, batch, training=True)
    states = target.model(batch["input_ids"]).last_hidden_state[0]
    ids, laws = batch["input_ids"][0], target(batch["input_ids"]).logits[0]
    expected = 0.0
    for head in range(3):
        values = []
        for root in range(5, 12):
            if root + 1 + head < 12:
                logits = drafter(states[root - 1][None], target.lm_head)[0, head]
                label = ids[root + 1 + head]
                values.append(plain(loss, logits, laws[root + head], label).item())
                assert bool(output.correct[0, root - 1, head]) == bool(logits.argmax() == label)
                assert bool(output.labelled[0, root - 1, head])
        assert int(output.labelled[..., head].sum()) == len(values)
        expected += 0.5 ** (head + 1) * sum(values) / len(values)
    assert output.loss.item() == pytest.approx(expected, rel=1e-5)


def test_a_new_drafter_predicts_the_next_token_as_the_target_does() -> None:
    target = make_target("llama", "sdpa", torch.float32)
    ids = row(1)["input_ids"]
    states, logits = target.model(ids).last_hidden_state[0], target(ids).logits[0]
    drafted = new_drafter(target, num_heads=2)(states, None)
    for head in range(2):
        torch.testing.assert_close(drafted[:, head], logits)


def test_a_short_run_learns_what_is_then_drafted(tmp_path: Path) -> None:
    assert learns_what_is_then_drafted(tmp_path, lambda target: new_drafter(target, num_heads=3), MedusaStep) > 2


def test_what_cannot_be_trained_raises() -> None:
    target = make_target("llama", "sdpa", torch.float32)
    with pytest.raises(ValueError, match=r"decay=1\.5 must be above 0 and at most 1"):
        MedusaStep(new_drafter(target), target, decay=1.5)
