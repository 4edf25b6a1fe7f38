"""The DSpark step: training sees what drafting sees, and both heads learn."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_specdec.methods.dflash.training import block_hidden, choose_anchors
from hf_specdec.methods.dspark import DSparkStep
from hf_specdec.methods.dspark import new_dspark_drafter as new_drafter
from tests.method_table import make_dspark
from tests.methods.dflash.test_dflash_training import batch_of, random_ids
from tests.methods.dspark.test_dspark import path_logprob
from tests.targets import fresh_target, one_prompt

HEADS = ("vanilla", "gated", "rnn")


@pytest.mark.parametrize("anchored", [True, False])
@pytest.mark.parametrize("kind", HEADS)
def test_the_loss_is_that_of_each_slot_behind_the_rows_own_tokens(kind: str, anchored: bool) -> None:
    target = fresh_target()
    drafter = make_dspark(target, dflash_config={"markov_head_type": kind, "sample_from_anchor": anchored}).double()
    confidence = drafter.confidence_head
    assert confidence is not None
    with torch.no_grad():  # one half everywhere, whatever was right
        confidence.proj.weight.zero_()
        confidence.proj.bias.zero_()
    step = DSparkStep(drafter, target, num_anchors=3, gamma=None)
    batch = batch_of(random_ids(1, 14))
    output = step(drafter, batch, training=False)
    anchors, _ = choose_anchors(batch["first_anchor"], batch["length"], 3, random=False)
    ids, values, hits = batch["input_ids"], [], []
    with torch.no_grad():
        features = step.reader.read(ids).features
        for anchor in anchors[0].tolist():
            hidden = block_hidden(drafter, drafter.config, step.embed_tokens, ids, features, torch.tensor([[anchor]]))
            slots = hidden if anchored else hidden[:, 1:]
            logits = drafter.draft_logits(slots, target.lm_head)
            logits[..., drafter.config.mask_token_id] = -1e4
            there = drafter.slots(hidden, logits, ids[:, anchor])
            state = there.state
            for depth in range(min(there.depth, 13 - anchor)):
                tokens = tuple(ids[0, anchor + 1 : anchor + 2 + depth].tolist())
                root = int(ids[0, anchor])
                whole = path_logprob(drafter, hidden[0], logits[0], root, tokens)
                before = path_logprob(drafter, hidden[0], logits[0], root, tokens[:-1])
                values.append(before - whole)
                law, state = there.step(depth, ids[:, anchor + depth : anchor + depth + 1], state)
                hits.append(int(law.argmax()) == tokens[-1])
    expected = torch.tensor(values) + math.log(2)
    torch.testing.assert_close(output.loss.double(), expected.double().mean(), rtol=1e-4, atol=1e-4)
    assert output.correct[output.labelled].tolist() == hits


@pytest.mark.parametrize("loss", ["ce", "kl"])
@pytest.mark.parametrize("kind", HEADS)
def test_every_weight_learns_and_the_confidence_head_moves_no_other(kind: str, loss: str) -> None:
    target = fresh_target()
    drafter = new_drafter(target, mask_token_id=1, block_size=4, markov_rank=5, markov_head_type=kind).double()
    step, batch = DSparkStep(drafter, target, loss=loss), batch_of(random_ids(2, 14))

    def gradients() -> dict[str, Tensor]:
        torch.manual_seed(0)
        drafter.zero_grad()
        step(drafter, batch, training=True).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}

    before = gradients()
    # The second layer of a recurrent head's gates moves nothing in its first slot, but in later ones.
    assert all(gradient.abs().sum() > 0 for gradient in before.values())
    assert drafter.confidence_head is not None
    with torch.no_grad():
        drafter.confidence_head.proj.bias.add_(3.0)
    for name, gradient in gradients().items():
        if not name.startswith("confidence_head."):
            torch.testing.assert_close(gradient, before[name])


def test_what_is_trained_drafts() -> None:
    target = fresh_target()
    drafter = new_drafter(target, mask_token_id=1, block_size=4, markov_rank=5).double()
    target.generate(**one_prompt(), assistant_model=drafter, max_new_tokens=4, do_sample=False)
    assert drafter.stats is not None
    assert drafter.stats.num_draft_tokens > 0
