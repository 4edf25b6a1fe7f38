"""DrafterTrainer: a short run learns, resumes exactly, saves the drafter alone, and what is saved drafts the same."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import Dataset
from transformers import TrainingArguments
from transformers.trainer_utils import set_seed

from hf_specdec import load_drafter
from hf_specdec.methods.dflash import training as dflash
from hf_specdec.methods.dflash.training import DFlashStep
from hf_specdec.methods.specblock import training as specblock
from hf_specdec.methods.specblock.training import SpecBlockStep
from hf_specdec.methods.specbound import training as specbound
from hf_specdec.methods.specbound.training import SpecBoundStep
from hf_specdec.training.data import collate
from hf_specdec.training.step import acceptance_metrics
from hf_specdec.training.trainer import DrafterTrainer
from tests.targets import VOCAB, fresh_target


class Rows(Dataset):
    """Greedy continuations of the target, without a disk in between."""

    def __init__(self, target, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        # Few different prompts: a tiny drafter can learn their continuations in a few steps.
        starts = torch.randint(3, 9, (count, 1), generator=generator)
        prompts = torch.cat([starts, starts + 1, starts + 2], dim=1)
        self.ids = target.generate(prompts, max_new_tokens=21, do_sample=False)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        return {"input_ids": self.ids[index], "first_anchor": 3, "length": self.ids.shape[1]}


@pytest.fixture(scope="module")
def target():
    model = fresh_target(dtype=torch.float32)
    model.name_or_path = "tiny/target"
    return model


def make_dflash(target):
    drafter = dflash.new_drafter(target, mask_token_id=1, block_size=4)
    return drafter, DFlashStep(drafter, target, num_anchors=6)


def make_specblock(target):
    drafter = specblock.new_drafter(target, torch.arange(0, 64, 2), block_size=3)
    return drafter, SpecBlockStep(drafter, target, rank_start=0.1, window=15)


def make_specbound(target):
    drafter = specbound.new_drafter(target, exit_layers=[1, 2])
    return drafter, SpecBoundStep(drafter, target, num_positions=5)


every_method = pytest.mark.parametrize("make", [make_dflash, make_specblock, make_specbound])


def make_trainer(target, folder, make=make_dflash, *, steps: int = 60, **settings) -> DrafterTrainer:
    set_seed(0)
    drafter, step = make(target)
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=8, report_to="none",
        use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant",
        **{"save_strategy": "no", "logging_steps": 10, "learning_rate": 1e-2, **settings},
    )  # fmt: skip
    rows = {"train_dataset": Rows(target, 64, seed=1), "eval_dataset": Rows(target, 16, seed=2)}
    return DrafterTrainer(drafter, step, arguments, **rows)


def test_short_run_lowers_the_loss_raises_acceptance_and_leaves_the_target_alone(target, tmp_path):
    weights = {name: parameter.clone() for name, parameter in target.named_parameters()}
    trainer = make_trainer(target, tmp_path)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.5 * before["eval_loss"]
    assert before["eval_accepted_length"] < 1.5
    assert after["eval_accepted_length"] > before["eval_accepted_length"] + 1
    assert after["eval_accuracy_1"] > 0.8
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 6
    assert all("accepted_length" in entry for entry in logged)
    for name, parameter in target.named_parameters():
        assert torch.equal(parameter, weights[name]), name


@pytest.mark.slow
@every_method
def test_resumed_run_ends_with_the_same_weights(target, tmp_path, make):
    straight = make_trainer(target, tmp_path / "straight", make, steps=8)
    straight.train()
    make_trainer(target, tmp_path / "parts", make, steps=8, save_strategy="steps", save_steps=5).train()
    resumed = make_trainer(target, tmp_path / "parts", make, steps=8)
    torch.rand(5)  # another state of the generator than at the checkpoint
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-5"))
    for (name, one), other in zip(straight.model.named_parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, msg=name)


@every_method
def test_the_best_checkpoint_comes_back_at_the_end(target, tmp_path, make):
    trainer = make_trainer(
        target, tmp_path, make, steps=4, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2,
        load_best_model_at_end=True, metric_for_best_model="earliness", greater_is_better=True,
    )  # fmt: skip
    trainer.compute_metrics = lambda prediction: {"earliness": -trainer.state.global_step}
    trainer.train()
    best = next(entry for entry in trainer.state.log_history if "eval_loss" in entry)
    assert best["step"] == 2
    assert trainer.evaluate()["eval_loss"] == best["eval_loss"]


def test_what_is_saved_holds_the_drafter_alone_and_drafts_the_same(target, tmp_path):
    trainer = make_trainer(target, tmp_path, steps=20)
    trainer.train()
    trainer.save_model(str(tmp_path / "drafter"))
    with safe_open(tmp_path / "drafter" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == {name for name, _ in trainer.model.named_parameters()}
    loaded = load_drafter(str(tmp_path / "drafter"))
    assert loaded.config.target_name_or_path == "tiny/target"
    prompt = {"input_ids": torch.tensor([[4, 5, 6]]), "max_new_tokens": 16, "do_sample": False}
    accepted = []
    for drafter in (trainer.model.eval(), loaded):
        drafter.set_options(method="dflash")
        output = target.generate(**prompt, assistant_model=drafter)
        assert torch.equal(output, target.generate(**prompt))
        accepted.append(drafter.stats.per_step_accepted)
    assert accepted[0] == accepted[1]
    assert max(accepted[0][0]) > 0


def test_expected_acceptance_of_evaluation_is_what_generate_accepts(target, tmp_path):
    """With one block per position, every round of `generate` is one of the blocks that were evaluated."""
    trainer = make_trainer(target, tmp_path, steps=20)
    trainer.train()
    drafter = trainer.model.eval()
    trainer.step.num_anchors = 32
    ids = target.generate(torch.tensor([[4, 5, 6]]), max_new_tokens=21, do_sample=False)
    batch = {"input_ids": ids, "first_anchor": torch.tensor([3]), "length": torch.tensor([ids.shape[1]])}
    with torch.no_grad():
        output = trainer.step(drafter, batch, training=False)
    leading = output.correct[0].int().cumprod(-1).sum(-1)
    drafter.set_options(method="dflash")
    target.generate(ids[:, :3], assistant_model=drafter, max_new_tokens=21, do_sample=False)
    position, expected = 3, []
    while len(expected) < 4:
        expected.append(int(leading[position - 3]))
        position += expected[-1] + 1
    assert drafter.stats.per_step_accepted[0][:4] == expected


@pytest.mark.parametrize("longest_first", [True, False])
def test_evaluation_does_not_count_what_fills_up_smaller_batches(target, tmp_path, longest_first):
    trainer = make_trainer(target, tmp_path, make_specblock, per_device_eval_batch_size=2)
    ids = torch.randint(3, VOCAB, (4, 30), generator=torch.Generator().manual_seed(0))
    lengths = [30, 30, 18, 18] if longest_first else [18, 18, 30, 30]
    rows = [{"input_ids": ids[row][:length], "first_anchor": 3, "length": length} for row, length in enumerate(lengths)]
    trainer.step.window = None  # all positions
    with torch.no_grad():
        parts = [trainer.step(trainer.model, collate(rows[start : start + 2]), training=False) for start in (0, 2)]
    correct, labelled = (
        torch.cat([getattr(part, name).flatten(0, -2) for part in parts]) for name in ("correct", "labelled")
    )
    found = trainer.evaluate(rows)
    for name, value in trainer.step.metrics(correct, labelled).items():
        assert found[f"eval_{name}"] == pytest.approx(value), name


def test_without_logs_nothing_is_kept_for_them(target, tmp_path):
    trainer = make_trainer(target, tmp_path, steps=6, logging_strategy="no")
    trainer.train()
    assert trainer._pending == []


def test_acceptance_metrics_count_leading_hits_of_whole_blocks():
    correct = torch.tensor([[[1, 1, 0], [0, 1, 1], [1, 1, 1], [1, 0, 0]]]).bool()
    labelled = torch.tensor([[[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 0, 0]]]).bool()
    found = acceptance_metrics(correct, labelled)
    assert found["accepted_length"] == pytest.approx(1 + (2 + 0 + 3) / 3)
    assert found["accuracy_1"] == pytest.approx(3 / 4)
    assert found["accuracy_3"] == pytest.approx(2 / 3)
    assert acceptance_metrics(correct, torch.zeros_like(labelled)) == {}


def test_importing_hf_specdec_imports_no_training():
    code = "import sys, hf_specdec; print([m for m in sys.modules if m in ('datasets', 'hf_specdec.training')])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.slow
def test_a_part_without_a_gradient_in_the_whole_run_is_an_error(target, tmp_path):
    trainer = make_trainer(target, tmp_path, steps=2)
    trainer.model.register_parameter("spare", torch.nn.Parameter(torch.zeros(3)))
    trainer = DrafterTrainer(trainer.model, trainer.step, trainer.args, train_dataset=trainer.train_dataset)
    with pytest.raises(ValueError, match="No step of the 2 of this run gave a gradient to spare: these parts are as"):
        trainer.train()
    trainer.model.spare.requires_grad_(False)  # frozen on purpose
    DrafterTrainer(trainer.model, trainer.step, trainer.args, train_dataset=trainer.train_dataset).train()


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(target, tmp_path):
    trainer = make_trainer(target, tmp_path, steps=4)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer.model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(ValueError, match="gradient of step 1 is not finite"):
        trainer.train()
    assert all(weight.equal(before[name]) for name, weight in trainer.model.state_dict().items())


def test_a_rank_head_that_no_step_trains_is_an_error(target, tmp_path):
    trainer = make_trainer(target, tmp_path, make_specblock, steps=2)
    trainer.step.rank_start = 2.0  # beyond the end of the run
    with pytest.raises(ValueError, match="gave a gradient to rank_head"):
        trainer.train()


@pytest.mark.parametrize("steps", [1, 2, 12])
def test_every_run_trains_the_rank_head(target, tmp_path, steps):
    trainer = make_trainer(target, tmp_path, make_specblock, steps=steps)
    before = trainer.model.rank_head.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    trainer.train()
    assert all(not torch.equal(tensor, before[name]) for name, tensor in trainer.model.rank_head.state_dict().items())
