"""Rollouts of GRPO with an attached drafter: the text of plain rollouts, from the weights of that step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, TrainerCallback

from hf_specdec import attach
from hf_specdec.drafting.drafter import Drafter
from tests.method_table import make_ddtree
from tests.targets import fresh_target, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # of the trainer


class Updates(TrainerCallback):
    """Changes the weights by more than a few steps on a tiny model would; rollouts of one text have no gradient."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        torch.manual_seed(state.global_step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))


def rollouts(target: PreTrainedModel, folder: Path, drafter: Drafter | None) -> list[list[int]]:
    """The completions of three steps; one token is left to draw."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    seen: list[list[int]] = []

    def reward(completion_ids: list[list[int]], **others: Any) -> list[float]:
        seen.extend(completion_ids)
        return [float(len(ids)) for ids in completion_ids]

    config = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=14,
        max_steps=3,
        top_k=1,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    tokenizer = tiny_tokenizer().__class__(tokenizer_object=tiny_tokenizer()._tokenizer, eos_token="b", pad_token="a")
    prompts = datasets.Dataset.from_dict({"prompt": ["hello", "cd", "ghij", "kmnopqr"]})
    trainer = trl.GRPOTrainer(
        model=target,
        reward_funcs=reward,
        args=config,
        train_dataset=prompts,
        processing_class=tokenizer,
        callbacks=[Updates()],
    )
    if drafter is not None:
        attach(trainer.model, drafter)
    trainer.train()
    return seen


def test_rollouts_are_those_of_plain_decoding_with_the_weights_of_the_step(tmp_path: Path) -> None:
    plain = rollouts(fresh_target("llama", "sdpa", torch.float32), tmp_path, None)
    target = fresh_target("llama", "sdpa", torch.float32)
    drafter = make_ddtree(target)
    assert rollouts(target, tmp_path, drafter) == plain
    assert len(plain) == 12
    assert plain[:4] != plain[4:8] != plain[8:]
    assert drafter.stats is not None
    assert drafter.stats.num_draft_tokens > 0
