"""A short training run of a drafter, and what is drafted afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainingArguments

from hf_specdec.training.trainer import DrafterTrainer
from tests.targets import fresh_target


def learns_what_is_then_drafted(
    folder: Path, make: Callable[[PreTrainedModel], Any], step: Callable[[Any, PreTrainedModel], Any]
) -> float:
    """Trains on four texts of a target; returns the acceptance length of a call that repeats one of them."""
    model = fresh_target(dtype=torch.float32, attention="sdpa")
    ids = torch.randint(3, 64, (4, 6), generator=torch.Generator().manual_seed(1))
    rows = model.generate(ids, max_new_tokens=24, do_sample=False)
    data = [{"input_ids": own, "first_anchor": torch.tensor(6), "length": torch.tensor(30)} for own in rows]
    drafter = make(model)
    settings = TrainingArguments(
        output_dir=str(folder), max_steps=120, per_device_train_batch_size=4, learning_rate=5e-3, use_cpu=True,
        save_strategy="no", report_to="none",
    )  # fmt: skip
    trainer = DrafterTrainer(drafter, step(drafter, model), settings, train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < before["eval_loss"]
    assert after["eval_accepted_length"] > before["eval_accepted_length"] + 1
    drafter.eval().set_options(tree_budget=16)  # in every round, whatever pays
    assisted = model.generate(ids[:1], assistant_model=drafter, max_new_tokens=24, do_sample=False)
    assert torch.equal(assisted, rows[:1])
    return drafter.stats.mean_acceptance_length
