from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_specdec.benchmark import calls, variants
from hf_specdec.drafting.registry import named_alone
from tests.method_table import make_dflash, make_medusa
from tests.targets import fresh_target, make_target, one_prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like the folder of the bundled model: a target, two drafters, and something that is none."""
    folder = tmp_path_factory.mktemp("bundled")
    target = make_target()
    target.save_pretrained(folder / "target")
    make_dflash(target, method="ddtree", tree_budget=7).save_pretrained(folder / "a-drafter")
    make_medusa(target).save_pretrained(folder / "b-heads")
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text('{"architectures": ["Something"]}')
    (folder / "notes").mkdir()
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> PreTrainedModel:
    return type(make_target()).from_pretrained(folder / "target")


def test_every_checkpoint_in_a_folder_gives_a_row_per_method_without_being_listed(
    folder: Path, target: PreTrainedModel
) -> None:
    found, passed_over = variants.discover(folder, target)
    named = [variant.name for variant in variants.distinct(found)]
    assert sorted(named) == sorted(
        ["dflash (a-drafter)", "ddtree (a-drafter)", "dflash (b-heads)", "ddtree (b-heads)", *named_alone()]
    )
    assert list(passed_over) == ["broken"]
    assert "broken" in passed_over["broken"], "the reason names the folder"


def test_ways_of_one_drafter_share_it_and_set_their_own_options(folder: Path, target: PreTrainedModel) -> None:
    loaded = variants.load(f"{folder / 'a-drafter'}:tree_budget=5", target)
    assert {variant.settings["method"] for variant in loaded} == {"dflash", "ddtree"}
    assert {variant.settings["tree_budget"] for variant in loaded} == {5}
    assert len({id(variant.drafter) for variant in loaded}) == 1
    assert sum(variant.leads for variant in loaded) == 1
    (chosen,) = variants.load(f"{folder / 'a-drafter'}:method=dflash", target)
    assert chosen.settings["method"] == "dflash"
    assert chosen.leads


def test_a_sweep_varies_the_budget_of_leading_methods_only(folder: Path, target: PreTrainedModel) -> None:
    own = variants.distinct([*variants.load(str(folder / "a-drafter"), target), *variants.load("ngram", target)])
    swept = variants.sweep([*variants.baselines(make_target()), *own], [2, 4])
    assert [(variant.name, variant.swept_from, variant.settings["tree_budget"]) for variant in swept] == [
        ("ddtree @ 2", "ddtree", 2),
        ("ddtree @ 4", "ddtree", 4),
        ("ngram @ 2", "ngram", 2),
        ("ngram @ 4", "ngram", 4),
    ]


def test_the_same_way_twice_raises_and_another_setting_is_another_row(target: PreTrainedModel) -> None:
    two = [*variants.load("ngram", target), *variants.load("ngram:tree_budget=3", target)]
    assert [variant.name for variant in variants.distinct(two)] == ["ngram", "ngram tree_budget=3"]
    with pytest.raises(ValueError, match="'ngram.*' is given twice"):
        variants.distinct([*two, *variants.load("ngram", target)])


def test_options_are_python_values_and_unknown_ones_raise(target: PreTrainedModel) -> None:
    assert variants.parse("me/x:branching=[2, 4, 6],device=cuda:1,rate=0.5") == (
        "me/x",
        {"branching": [2, 4, 6], "device": "cuda:1", "rate": 0.5},
    )
    with pytest.raises(ValueError, match="options must follow the colon"):
        variants.parse("me/x:31")
    with pytest.raises(ValueError, match="Unknown drafting option 'tree_budgt'. Did you mean 'tree_budget'"):
        variants.load("ngram:tree_budgt=3", target)


@pytest.mark.parametrize("faster", [torch.bfloat16, torch.float32])
def test_a_target_stays_in_its_number_type_unless_float32_is_faster(
    faster: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = fresh_target(dtype=torch.bfloat16)
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    buffers = {name: buffer.clone() for name, buffer in target.named_buffers()}

    def timed(model: Any, *arguments: Any) -> Any:
        return None, 1.0 if model.dtype == faster else 2.0, None

    monkeypatch.setattr(calls, "generate", timed)
    said = calls.keep_faster_number_type(target, one_prompt())
    assert target.dtype == faster
    assert said.startswith(f"number type: {str(faster).removeprefix('torch.')}, ")
    assert all(torch.equal(weight.to(torch.bfloat16), before[name]) for name, weight in target.state_dict().items())
    assert buffers, "rotary frequencies, in float32"
    for name, buffer in target.named_buffers():
        assert buffer.dtype == buffers[name].dtype
        assert torch.equal(buffer, buffers[name])
