"""examples/custom_drafter.py: a whole method in one file, of which no other file knows."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from hf_specdec import MergedDrafter, export_drafter, inspect_drafter, load_drafter, register, verify_lossless
from hf_specdec.drafting import registry
from hf_specdec.drafting.shapes import check_shapes
from hf_specdec.training.losses import LOSS_NAMES, position_losses
from hf_specdec.training.recipe import RECIPES
from tests.decoding.test_assisted_loop import gpt_neo
from tests.targets import PROMPTS, make_target

EXAMPLE = Path(__file__).parents[1] / "examples" / "custom_drafter.py"
GREEDY = {"max_new_tokens": 16, "do_sample": False}


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, Any]]:
    """The names of the example, registered during these tests only."""
    names = runpy.run_path(str(EXAMPLE))
    yield names
    del registry._BY_CLASS[registry.FAMILIES.pop("bigram").drafter], RECIPES["bigram"]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("llama", "sdpa")


def prepared(target: PreTrainedModel, loss: str) -> Any:
    return RECIPES["bigram"].prepare(SimpleNamespace(loss=loss), target, None)  # type: ignore[arg-type]


def written(target: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A batch of one row, of which all but the first token are learned."""
    text = target.generate(**PROMPTS["batch of one"](), max_new_tokens=40, do_sample=False)
    return {"input_ids": text, "first_anchor": torch.tensor([1]), "length": torch.tensor([text.shape[1]])}


@pytest.mark.usefixtures("example")
def test_it_learns_the_loss_that_is_asked_for(target: PreTrainedModel) -> None:
    batch, labels, losses = written(target), {}, {}
    logits = target(batch["input_ids"]).logits[0, :-1]
    for loss in LOSS_NAMES:
        torch.manual_seed(0)
        drafter, step = prepared(target, loss)
        losses[loss] = step(drafter, batch, training=True).loss.item()
        labels[loss] = position_losses(loss, drafter(batch["input_ids"])[0, :-1], logits, batch["input_ids"][0, 1:])  # type: ignore[arg-type]
    assert losses == pytest.approx({loss: values.mean().item() for loss, values in labels.items()}, rel=1e-4)
    assert len(set(losses.values())) == len(LOSS_NAMES)


@pytest.fixture
def trained(example: dict[str, Any], target: PreTrainedModel) -> Any:
    """Trained on what the target writes, so that some of its drafts are right."""
    torch.manual_seed(0)
    drafter, step = prepared(target, "kl")
    batch = written(target)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=0.1)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        losses.append(step(drafter, batch, training=True).loss)
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    return drafter


@pytest.mark.filterwarnings("ignore:Target GPTNeoForCausalLM")  # it says that chains are drafted
def test_it_drafts_in_both_loops(trained: Any, target: PreTrainedModel) -> None:
    for model, prompts in (
        (target, "batch of one"),
        (target, "ragged batch of three"),
        (gpt_neo(), "batch of one"),
    ):
        inputs = PROMPTS[prompts]()
        drafted = model.generate(**inputs, **GREEDY, assistant_model=trained)
        assert drafted.tolist() == model.generate(**inputs, **GREEDY).tolist()
        assert trained.stats.num_draft_tokens > 0
        if (model, prompts) == (target, "batch of one"):
            assert trained.stats.num_accepted_draft_tokens > 0
    assert verify_lossless(target, trained, max_new_tokens=8, verbose=False).lossless


def test_it_is_saved_loaded_and_inspected(trained: Any, target: PreTrainedModel, tmp_path: Path) -> None:
    trained.set_options(length=3)
    trained.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path, target)
    assert type(loaded) is type(trained)
    assert loaded.options.length == 3
    found = inspect_drafter(tmp_path)
    assert (found.family, found.problems) == ("bigram", [])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"ranks": 2}))
    with pytest.raises(ValueError, match="ranks=2 .did you mean rank"):
        load_drafter(tmp_path)


def test_its_published_layout_is_read_and_written_again(trained: Any, target: PreTrainedModel, tmp_path: Path) -> None:
    published, again = tmp_path / "published", tmp_path / "again"
    published.mkdir()
    (published / "config.json").write_text(json.dumps({"tokens": trained.config.vocab_size, "bigram_rank": 32}))
    names = {"inner.weight": "table.in", "outer.weight": "table.out", "outer.bias": "table.bias"}
    tensors = {names[name]: tensor.contiguous() for name, tensor in trained.state_dict().items()}
    save_file(tensors, published / "model.safetensors")
    loaded = load_drafter(published, target, dtype=torch.float32)
    torch.testing.assert_close(loaded.state_dict(), trained.state_dict(), rtol=0, atol=0)  # type: ignore[attr-defined]
    export_drafter(loaded, again, to="source")
    torch.testing.assert_close(load_file(again / "model.safetensors"), tensors, rtol=0, atol=0)
    assert (again / "config.json").read_bytes() == (published / "config.json").read_bytes()


def test_an_export_for_the_engine_is_refused_with_its_reason(trained: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be exported to vllm: vLLM has no class for bigram tables"):
        export_drafter(trained, tmp_path)
    assert not any(tmp_path.iterdir())


def test_it_merges_with_another_drafter(trained: Any, target: PreTrainedModel) -> None:
    merged = MergedDrafter(trained, load_drafter("ngram"))
    assert merged.names == ("bigram", "ngram")
    inputs = PROMPTS["ragged batch of three"]()
    drafted = target.generate(**inputs, **GREEDY, assistant_model=merged)
    assert drafted.tolist() == target.generate(**inputs, **GREEDY).tolist()
    assert merged.stats.num_draft_tokens > 0


def test_a_notebook_may_run_it_again(example: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'bigram' is registered already"):
        register("bigram", MergedDrafter)
    again = runpy.run_path(str(EXAMPLE))
    assert registry.FAMILIES["bigram"].drafter is again["BigramDrafter"] is not example["BigramDrafter"]
    assert RECIPES["bigram"].prepare is again["prepare"]


def test_the_card_says_which_module_registers_the_method(example: dict[str, Any], target: PreTrainedModel) -> None:
    card = example["make"](target).model_card("owner/table").content
    assert f"\nimport {example['BigramDrafter'].__module__}  # registers the method" in card
    assert "by name alone" not in card


def test_a_table_that_is_larger_than_the_targets_is_refused_unless_its_drafts_are_masked(
    example: dict[str, Any], target: PreTrainedModel
) -> None:
    rows = target.get_input_embeddings().num_embeddings
    drafter = example["BigramDrafter"](example["BigramConfig"](vocab_size=rows + 1))
    drafter.check_target(target)
    with pytest.raises(ValueError, match=f"has a vocabulary of {rows + 1}, but target .* has {rows} embeddings: it"):
        check_shapes(drafter, target, vocab_size=rows + 1)


@pytest.mark.slow
def test_an_outside_method_takes_the_shared_tests() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--method", str(EXAMPLE)]
    tests = ["tests/drafting", "tests/decoding/test_finished_rows.py", "tests/hub/test_saving.py"]
    run = subprocess.run(
        [*command, "-k", EXAMPLE.stem, *tests], cwd=EXAMPLE.parents[1], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", run.stdout)[0]) > 10
