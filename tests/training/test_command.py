"""What the training command does beside its stages: going on from an earlier drafter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hf_specdec.training.command import go_on_from
from hf_specdec.training.specblock import new_drafter
from tests.targets import fresh_target


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return fresh_target(dtype=torch.float32)


def test_training_goes_on_from_the_weights_and_the_vocabulary_of_an_earlier_drafter(
    target: PreTrainedModel, tmp_path: Path
) -> None:
    earlier = new_drafter(target, torch.arange(0, 64, 2))
    whole = {"command": "train --steps 5", "settings": {"steps": 5}, "started_from": {"command": "train --steps 3"}}
    earlier.training_record = whole | {"hardware": "CPU"}
    earlier.config.drafting_options = {"tree_budget": 7}
    earlier.save_pretrained(tmp_path)
    drafter = new_drafter(target, torch.arange(32))
    record = go_on_from(drafter, tmp_path)
    assert drafter.config.drafting_options == {"tree_budget": 7}
    for name, tensor in earlier.state_dict().items():
        assert torch.equal(drafter.state_dict()[name], tensor), name
    assert drafter.target_ids(torch.arange(3)).tolist() == [0, 2, 4]
    assert record == {"drafter": str(tmp_path)} | whole


def test_an_earlier_drafter_of_another_shape_raises(target: PreTrainedModel, tmp_path: Path) -> None:
    new_drafter(target, torch.arange(0, 64, 2), layer_wise_shift=False).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"shift_proj\.0\.weight is missing there .* \(1 tensors differ\)"):
        go_on_from(new_drafter(target, torch.arange(32)), tmp_path)
