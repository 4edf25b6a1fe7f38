"""`examples/train_draft_lm.py`: which rows a draft model learns from, and what is kept of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hf_specdec.training.data import write_continuations
from tests.targets import fresh_target

pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "train_draft_lm.py"
    spec = importlib.util.spec_from_file_location("train_draft_lm", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_draft_lm"] = module
    spec.loader.exec_module(module)
    return module


def test_held_out_rows_are_not_learned_from_and_each_target_teaches_its_own_tokens(
    example: ModuleType, tmp_path: Path
) -> None:
    target, other = fresh_target(dtype=torch.float32), fresh_target(dtype=torch.float32, seed=9)
    documents = torch.randint(3, 60, (6, 12), generator=torch.Generator().manual_seed(0)).tolist()
    settings = {"prompt_lengths": (4, 6), "new_tokens": 6, "batch_size": 4}
    own = write_continuations(target, documents[:3], tmp_path, num_rows=8, **settings)
    write_continuations(target, documents[3:], tmp_path, num_rows=4, held_out=True, **settings)
    rows = example.taught_rows(target, tmp_path, 4, bf16=True)
    assert rows.token_ids.clamp(min=0).tolist() == [row[: rows.token_ids.shape[1]] for row in own["input_ids"]]
    for model in (other, target):
        taught = example.taught_rows(model, tmp_path, 4, bf16=True)
        expected = model(taught.token_ids.clamp(min=0)).logits.topk(4).indices
        agreement = (taught.likeliest[..., 0] == expected[..., 0]).float().mean()
        assert agreement > 0.7, "all but where rounding to bfloat16 decides"
    assert not list(tmp_path.rglob("*.tmp"))


def test_more_layers_than_the_target_has_are_refused(example: ModuleType) -> None:
    with pytest.raises(ValueError, match="--layers 5 are to be taken from target .* a LlamaForCausalLM with 4"):
        example.from_layers(fresh_target(), 5)
