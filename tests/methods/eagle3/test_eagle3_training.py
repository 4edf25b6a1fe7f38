"""The EAGLE-3 training step: what each pass learns is what is drafted at its depth, and it learns it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainingArguments

from hf_specdec.methods.eagle3.network import Eagle3Drafter
from hf_specdec.methods.eagle3.training import Eagle3Step, new_drafter
from hf_specdec.training.trainer import DrafterTrainer
from tests.targets import VOCAB, fresh_target
from tests.training.test_losses import plain

PASSES = 4


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return fresh_target(dtype=torch.float64, attention="sdpa")


@pytest.fixture
def drafter(target: PreTrainedModel) -> Eagle3Drafter:
    torch.manual_seed(0)
    drafter = new_drafter(target, draft_vocab_size=40, target_layer_ids=[0, 2])
    drafter.set_vocabulary(torch.arange(0, 60, 3).repeat_interleave(2) + torch.tensor([0, 1] * 20))
    return drafter.double()


def row(first_anchor: int, length: int = 14) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (1, 14), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "first_anchor": torch.tensor([first_anchor]), "length": torch.tensor([length])}


@torch.no_grad()
def drafted(drafter: Eagle3Drafter, target: PreTrainedModel, step: Eagle3Step, ids: Tensor, root: int) -> list[Tensor]:
    """Logits at each depth behind the root at this place, with the row's own tokens drafted, from whole forwards."""
    embed = target.get_input_embeddings()
    states = drafter.fuse(step.reader.read(ids).features[:, :root])
    tokens, logits = ids[:, 1 : root + 1], []
    for depth in range(PASSES):
        places = torch.arange(tokens.shape[1])[None]
        output = drafter(embed(tokens), states, places, is_causal=True)[:, -1:]
        logits.append(drafter.logits(output)[0, 0])
        states = torch.cat([states, drafter.recurrent(output)], 1)
        tokens = torch.cat([tokens, ids[:, root + depth + 1 : root + depth + 2]], 1)
    return logits


@pytest.mark.parametrize(("root", "loss"), [(3, "kl"), (6, "kl"), (3, "tv"), (3, "lk"), (3, "ce")])
def test_each_pass_learns_what_is_drafted_at_its_depth(
    target: PreTrainedModel, drafter: Eagle3Drafter, root: int, loss: Any
) -> None:
    """A row whose written part has room for one start of full depth; loss and hits by hand."""
    step = Eagle3Step(drafter, target, passes=PASSES, decay=0.5, loss=loss)
    batch = row(first_anchor=root, length=root + PASSES + 1)
    output = step(drafter, batch, training=False)
    laws = target(batch["input_ids"]).logits[0].double()
    ids = drafter.to_target_ids(torch.arange(40))
    # Place t of a pass is the start at position t + 1.
    of_start = {depth: [] for depth in range(PASSES)}
    for start in range(root, root + PASSES):
        for depth, logits in enumerate(drafted(drafter, target, step, batch["input_ids"], start)):
            after = start + depth  # the place whose law is learned
            if after + 1 >= root + PASSES + 1:
                continue
            law = laws[after][ids]
            of_start[depth].append(plain(loss, logits, law, law.argmax()).item())
            hit = bool(ids[logits.argmax()] == laws[after].argmax())
            assert bool(output.correct[0, start - 1, depth]) == hit
            assert bool(output.labelled[0, start - 1, depth])
    assert int(output.labelled.sum()) == sum(map(len, of_start.values())) == PASSES * (PASSES + 1) // 2
    expected = sum(0.5**depth * sum(values) / len(values) for depth, values in of_start.items())
    assert output.loss.item() == pytest.approx(expected, rel=1e-5)


def test_prompts_and_padding_teach_nothing(target: PreTrainedModel, drafter: Eagle3Drafter) -> None:
    step = Eagle3Step(drafter, target, passes=2)
    batch = row(first_anchor=5, length=9)
    loss = step(drafter, batch, training=True).loss
    batch["input_ids"] = batch["input_ids"].clone()
    batch["input_ids"][0, 9:] = 1
    assert step(drafter, batch, training=True).loss.item() == pytest.approx(loss.item(), rel=1e-9)
    nothing = step(drafter, row(first_anchor=13), training=True)
    nothing.loss.backward()
    assert nothing.loss.item() == 0


def test_a_short_run_learns_what_is_then_drafted(target: PreTrainedModel, tmp_path: Path) -> None:
    model = fresh_target(dtype=torch.float32, attention="sdpa")
    ids = torch.randint(3, VOCAB, (4, 6), generator=torch.Generator().manual_seed(1))
    rows = model.generate(ids, max_new_tokens=24, do_sample=False)
    data = [{"input_ids": own, "first_anchor": torch.tensor(6), "length": torch.tensor(30)} for own in rows]
    torch.manual_seed(0)
    drafter = new_drafter(model)
    step = Eagle3Step(drafter, model, passes=3)
    settings = TrainingArguments(
        output_dir=str(tmp_path), max_steps=80, per_device_train_batch_size=4, learning_rate=5e-3, use_cpu=True,
        save_strategy="no", report_to="none",
    )  # fmt: skip
    trainer = DrafterTrainer(drafter, step, settings, train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < before["eval_loss"]
    assert after["eval_accepted_length"] > before["eval_accepted_length"] + 1
    drafter.set_options(depth=3, top_k=1, tree_budget=3)
    settings = {"max_new_tokens": 24, "do_sample": False}
    assert torch.equal(model.generate(ids[:1], assistant_model=drafter.eval(), **settings), rows[:1])
    assert drafter.stats.mean_acceptance_length > 2


def test_drafters_that_cannot_be_trained_are_refused(target: PreTrainedModel) -> None:
    drafter = new_drafter(target)
    with pytest.raises(ValueError, match="passes=0 must be at least 1"):
        Eagle3Step(drafter, target, passes=0)
    with pytest.raises(ValueError, match=r"decay=1\.5 must be above 0 and at most 1"):
        Eagle3Step(drafter, target, decay=1.5)
    drafter.config.own_embeddings = True
    with pytest.raises(ValueError, match="has token embeddings of its own, and this step does not train them"):
        Eagle3Step(drafter, target)
