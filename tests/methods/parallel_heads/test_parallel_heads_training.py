"""Parallel heads: each reads the trunk and predicts its own token; training by hand, and a short run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_specdec.methods.parallel_heads import ParallelHeadsStep, new_drafter
from tests.methods.medusa.test_medusa_training import row
from tests.targets import make_target
from tests.training.short_run import learns_what_is_then_drafted
from tests.training.test_losses import plain
from tests.watched import Watched


@pytest.mark.parametrize("loss", ["ce", "lk"])
def test_head_k_learns_the_token_k_after_the_root_from_the_trunk(loss: Any) -> None:
    target = make_target("llama", "sdpa", torch.float32)
    torch.manual_seed(1)
    drafter = new_drafter(target, num_heads=2)
    for parameter in drafter.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    batch = row(first_anchor=5, length=12)
    output = ParallelHeadsStep(drafter, target, loss=loss)(drafter, batch, training=True)
    ids = batch["input_ids"]
    trunk = target.model(ids, output_hidden_states=True).hidden_states[-2]
    laws, expected = target(ids).logits[0], 0.0
    for head in range(2):
        values = []
        for root in range(5, 12):
            if root + 1 + head < 12:
                # The text up to the root alone: a head is causal.
                alone = drafter(None, trunk[:, :root], torch.arange(root)[None], is_causal=True)[0, -1]
                logits = target.lm_head(alone.view(2, -1)[head])
                label = ids[0, root + 1 + head]
                values.append(plain(loss, logits, laws[root + head], label).item())
                assert bool(output.correct[0, root - 1, head]) == bool(logits.argmax() == label)
        expected += sum(values) / len(values)
    assert output.loss.item() == pytest.approx(expected, rel=1e-4)


def test_a_new_head_is_the_targets_last_layer() -> None:
    target = make_target("llama", "sdpa", torch.float32)
    ids = row(1)["input_ids"]
    trunk = target.model(ids, output_hidden_states=True).hidden_states[-2]
    outputs = new_drafter(target, num_heads=2)(None, trunk, torch.arange(ids.shape[1])[None], is_causal=True)
    for head in outputs.unflatten(-1, (2, -1)).unbind(2):
        torch.testing.assert_close(target.lm_head(head), target(ids).logits, rtol=1e-4, atol=1e-4)


def test_drafts_in_batches_are_those_of_whole_texts() -> None:
    target = make_target("llama", "sdpa", torch.float64)
    torch.manual_seed(1)
    drafter = new_drafter(target, num_heads=3).double()
    for parameter in drafter.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    drafter.set_options(method="dflash", tree_budget=8)
    prompts = {"input_ids": torch.tensor([[0, 0, 5, 4, 9], [3, 7, 5, 2, 8]])}
    prompts["attention_mask"] = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    watched = Watched(drafter)
    target.generate(**prompts, max_new_tokens=10, do_sample=False, assistant_model=watched)
    for each in watched.rounds:
        for index in range(2):
            text = torch.tensor(each.text(index)[2 if index == 0 else 0 : -1])
            trunk = target.model(text[None], output_hidden_states=True).hidden_states[-2]
            outputs = drafter(None, trunk, torch.arange(len(text))[None], is_causal=True)[0, -1]
            expected = target.lm_head(outputs.view(3, -1)).argmax(-1)
            assert each.tree.token_ids[index, 1:].tolist() == expected.tolist()


@pytest.mark.slow
def test_a_short_run_learns_what_is_then_drafted(tmp_path: Path) -> None:
    assert learns_what_is_then_drafted(tmp_path, lambda target: new_drafter(target, num_heads=3), ParallelHeadsStep) > 2
