"""The SpecBound step: labels are the target's own, all heads learn at once, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

pytest.importorskip("datasets", reason="training needs the extra hf_specdec[train]")

from hf_specdec import load_drafter
from hf_specdec.methods.specbound.drafting import LayerSlices
from hf_specdec.methods.specbound.training import SpecBoundStep, default_exit_layers, new_drafter
from hf_specdec.training.features import cache_states
from hf_specdec.training.trainer import DrafterTrainer
from tests.targets import fresh_target, one_prompt
from tests.watched import Watched


def rows_of(count: int = 6, length: int = 12) -> list[dict[str, Any]]:
    ids = torch.randint(3, 64, (count, length), generator=torch.Generator().manual_seed(0))
    return [
        {"input_ids": row.tolist(), "first_anchor": 3, "length": length - index % 2} for index, row in enumerate(ids)
    ]


def batch_of(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("loss", ["ce", "kl", "lk"])
@pytest.mark.parametrize("settings", [{}, {"head": "full"}, {"vocabulary": torch.arange(0, 64, 2)}])
def test_a_few_steps_bring_all_heads_nearer_to_the_target(loss: Any, settings: dict[str, Any]) -> None:
    target = fresh_target("gemma2", "eager", torch.float32)  # its logits are soft-capped
    drafter = new_drafter(target, exit_layers=[1, 3], lora_rank=8, **settings)
    step = SpecBoundStep(drafter, target, num_positions=32, loss=loss)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=0.02)
    torch.manual_seed(0)
    values = []
    for _ in range(12):
        output = step(drafter, batch_of(rows_of()), training=True)
        assert output.correct.shape == output.labelled.shape == (6, 32, 2)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(output.loss.item())
    assert values[-1] < 0.7 * values[0]
    assert not any(parameter.grad is not None for parameter in target.parameters())
    found = step.metrics(output.correct, output.labelled)
    assert list(found) == ["accuracy_layer_1", "accuracy_layer_3"]
    assert max(found.values()) > 0.25


def test_the_kangaroo_recipe_exits_at_one_layer_and_stops_where_it_is_unsure() -> None:
    """docs/training.md: one shallow exit, and a draft that ends at the first token below the threshold."""
    target = fresh_target(dtype=torch.float32, attention="sdpa")
    prompts = torch.randint(3, 64, (6, 6), generator=torch.Generator().manual_seed(1))
    ids = target.generate(prompts, max_new_tokens=24, do_sample=False)
    batch = {"input_ids": ids, "first_anchor": torch.full((6,), 6), "length": torch.full((6,), 30)}
    torch.manual_seed(0)
    drafter = new_drafter(target, exit_layers=[2], head="full")
    step = SpecBoundStep(drafter, target, num_positions=32)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=0.02)
    for _ in range(20):
        step(drafter, batch, training=True).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    drafter.eval().set_options(d_max=2, alpha=0.0, threshold=0.6, w_max=5, learn_refusals=False, pauses=False)
    watched = Watched(drafter)
    assert torch.equal(
        target.generate(prompts[:1], max_new_tokens=24, do_sample=False, assistant_model=watched), ids[:1]
    )
    assert watched.stats.mean_acceptance_length > 1.5
    slices, lengths = LayerSlices(target), set()
    for each in watched.rounds[:-1]:
        drafted = each.tree.token_ids[0, 1:][each.tree.valid[0, 1:]].tolist()
        text = torch.tensor([each.text(0) + drafted])
        with torch.no_grad():
            states = target.model(text, output_hidden_states=True).hidden_states[2]
            best = drafter(2, states, slices).softmax(-1)[0, len(each.text(0)) - 1 :].max(-1)
        assert best.indices[: len(drafted)].tolist() == drafted
        assert (best.values[: len(drafted)] >= 0.6).all()
        assert len(drafted) == 4 or best.values[len(drafted)] < 0.6
        lengths.add(len(drafted))
    assert len(lengths) > 1


def test_labels_follow_the_vocabulary_that_the_drafter_has_now() -> None:
    target = fresh_target(dtype=torch.float32)
    old, new = (
        new_drafter(target, exit_layers=[1], vocabulary=ids) for ids in (torch.arange(32), torch.arange(32, 64))
    )
    step = SpecBoundStep(old, target, num_positions=32)
    old.load_state_dict(new.state_dict())  # as --start-from does
    found, expected = (
        each(old, batch_of(rows_of()), training=False).loss
        for each in (step, SpecBoundStep(new, target, num_positions=32))
    )
    torch.testing.assert_close(found, expected)


def test_an_untrained_lora_head_says_what_the_targets_head_says() -> None:
    target = fresh_target("granite", "sdpa", torch.float32)  # its logits are scaled
    drafter = new_drafter(target, exit_layers=[1, 3])
    states = target(**one_prompt(), output_hidden_states=True).hidden_states
    step_slices = SpecBoundStep(drafter, target).slices
    torch.testing.assert_close(drafter(3, states[3], step_slices), step_slices.logits(states[3]))


@pytest.mark.slow
def test_trained_through_the_trainer_saved_loaded_and_resumed(tmp_path: Path) -> None:
    target = fresh_target("llama", "sdpa", torch.float32)
    drafter = new_drafter(target, exit_layers=[1, 2], lora_rank=2)
    step = SpecBoundStep(drafter, target, num_positions=4)
    rows = cache_states(step.reader, rows_of(), tmp_path, dtype=torch.float32)

    def trainer(steps: int) -> DrafterTrainer:
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "run"), max_steps=steps, save_steps=2, per_device_train_batch_size=2,
            report_to="none", use_cpu=True, disable_tqdm=True, learning_rate=0.01,
        )  # fmt: skip
        return DrafterTrainer(drafter, step, arguments, train_dataset=rows, eval_dataset=rows)

    trainer(2).train()
    trained = drafter.heads["2"].lora_B.detach().clone()
    assert trained.any()
    # A trainer's checkpoint keeps all weights in one place, for resuming; it loads like any other.
    assert not list((tmp_path / "run" / "checkpoint-2").glob("exit-layer-*"))
    assert torch.equal(load_drafter(tmp_path / "run" / "checkpoint-2").heads["2"].lora_B, trained)
    drafter.heads["2"].lora_B.data.zero_()
    resumed = trainer(3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert (drafter.heads["2"].lora_B - trained).abs().max() < 0.05
    assert set(resumed.evaluate()) >= {"eval_accuracy_layer_1", "eval_accuracy_layer_2"}
    drafter.save_pretrained(tmp_path / "saved")
    loaded = load_drafter(tmp_path / "saved", target)
    assert torch.equal(loaded.heads["1"].lora_B, drafter.heads["1"].lora_B)


def test_default_exit_layers_are_shallow_ascending_and_within_any_depth() -> None:
    for depth in range(2, 100):
        layers = default_exit_layers(depth)
        assert layers == sorted(set(layers))
        assert layers[0] >= 1
        assert layers[-1] < depth


def test_losses_and_counts_that_make_no_sense_are_refused() -> None:
    target = fresh_target("llama", "sdpa", torch.float32)
    drafter = new_drafter(target, exit_layers=[1])
    with pytest.raises(ValueError, match=r"loss='l1' is not known; choose one of \['ce', 'kl', 'tv', 'lk'\]"):
        SpecBoundStep(drafter, target, loss="l1")
    with pytest.raises(ValueError, match="num_positions=0 must be at least 1"):
        SpecBoundStep(drafter, target, num_positions=0)
