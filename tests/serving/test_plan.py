"""plan_serving: for each kind of drafter what vLLM is told, or why it cannot run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specdec import load_drafter
from hf_specdec.drafting.registry import WEIGHTLESS, register
from hf_specdec.methods.causal_lm.network import CausalLMDrafter
from hf_specdec.methods.causal_lm.training import new_draft_model
from hf_specdec.methods.lookup import NGramDrafter
from hf_specdec.serving import plan_serving
from tests.hub.layouts import LAYERS, as_gemma4_assistant, save
from tests.method_table import (
    make_causal_lm,
    make_dflash,
    make_dspark,
    make_eagle3,
    make_gemma4_assistant,
    make_medusa,
    make_peagle,
    make_specblock,
    make_specbound,
    make_specbranch,
)
from tests.methods.mtp import test_mtp
from tests.targets import make_target


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("llama", "sdpa", torch.float32, num_hidden_layers=LAYERS)


@pytest.fixture
def folder(target: PreTrainedModel, tmp_path: Path) -> Path:
    target.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


TAPS = {"target_layer_ids": [1, 3, 4]}


@pytest.mark.parametrize(
    ("make", "settings", "method", "tokens", "further"),
    [
        (make_eagle3, TAPS, "eagle3", 5, {}),
        (make_peagle, TAPS, "eagle3", 4, {"parallel_drafting": True}),
        (make_dflash, {}, "dflash", 4, {}),
        (make_dspark, {}, "dspark", 5, {}),
    ],
)
def test_drafter_that_vllm_has_a_class_for_is_exported(
    make: Any, settings: Any, method: str, tokens: int, further: Any, target: PreTrainedModel, folder: Path
) -> None:
    drafter = make(target, **settings)
    drafter.save_pretrained(folder.parent / "drafter")
    out = folder.parent / "out"
    plan = plan_serving(str(folder), str(folder.parent / "drafter"), export_folder=out)
    assert plan.target == str(folder)
    assert plan.architectures == ["LlamaForCausalLM"]
    assert plan.speculative == {"model": str(out), "method": method, "num_speculative_tokens": tokens, **further}
    assert plan.options == ["--dtype", "auto", "--speculative-config", json.dumps(plan.speculative)]
    assert any("no trees" in note for note in plan.notes)
    loaded: Any = load_drafter(out)
    torch.testing.assert_close(loaded.state_dict(), drafter.state_dict(), rtol=0, atol=0)
    # What is in vLLM's layout already is served from where it is.
    again = plan_serving(str(folder), str(out), export_folder=folder.parent / "unused")
    assert again.speculative == plan.speculative
    assert not (folder.parent / "unused").exists()


@pytest.mark.parametrize(
    ("measured", "tokens"), [({"ddtree": 3.0, "dflash": 2.0}, 3), ({"dflash": 1.2}, 1), ({"dflash": 9.0}, 4)]
)
def test_what_was_measured_says_how_many_tokens_are_drafted(
    measured: dict[str, float], tokens: int, target: PreTrainedModel, folder: Path
) -> None:
    make_dflash(target).save_pretrained(folder.parent / "drafter")
    methods = {name: {"mean_acceptance_length": length} for name, length in measured.items()}
    (folder.parent / "drafter" / "measurements.json").write_text(json.dumps({"methods": methods}))
    arguments: dict[str, Any] = {
        "target": str(folder),
        "drafter": str(folder.parent / "drafter"),
        "export_folder": folder / "out",
    }
    plan = plan_serving(**arguments)
    assert plan.speculative["num_speculative_tokens"] == tokens
    assert any(f"measured with {min(measured.values())} tokens per round" in note for note in plan.notes)
    assert plan_serving(**arguments, num_speculative_tokens=2).speculative["num_speculative_tokens"] == 2


def test_draft_model_is_served_as_it_is_unless_it_was_cut(target: PreTrainedModel, folder: Path) -> None:
    place, out = folder.parent / "draft", folder.parent / "out"
    make_causal_lm(target).save_pretrained(place)
    plan = plan_serving(str(folder), str(place), export_folder=out)
    assert plan.speculative == {"model": str(place), "method": "draft_model", "num_speculative_tokens": 5}
    CausalLMDrafter(new_draft_model(target, 1, draft_vocab_size=40)).save_pretrained(folder.parent / "cut")
    plan = plan_serving(str(folder), str(folder.parent / "cut"), export_folder=out, dtype="float32")
    assert plan.speculative["model"] == str(out)
    assert plan.dtype == "float32"
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size == target.config.vocab_size


def test_of_specbranch_the_draft_model_is_served(target: PreTrainedModel, folder: Path) -> None:
    drafter = make_specbranch(target)
    drafter.save_pretrained(folder.parent / "branches")
    plan = plan_serving(str(folder), str(folder.parent / "branches"))
    assert plan.speculative["method"] == "draft_model"
    AutoModelForCausalLM.from_pretrained(plan.speculative["model"])
    assert any("as SpecBranch does: it runs its draft model alone" in note for note in plan.notes)


def test_medusa_heads_are_served_as_they_are(target: PreTrainedModel, folder: Path) -> None:
    make_medusa(target).save_pretrained(folder.parent / "heads")
    plan = plan_serving(str(folder), str(folder.parent / "heads"))
    assert plan.speculative["method"] == "medusa"


def test_gemma4_assistants_are_served_as_published(tmp_path: Path) -> None:
    gemma = make_target("gemma4", "sdpa", torch.float32)
    gemma.save_pretrained(tmp_path / "target")
    drafter = make_gemma4_assistant(gemma)
    (tmp_path / "published").mkdir()
    save(tmp_path / "published", *as_gemma4_assistant(drafter))
    plan = plan_serving(str(tmp_path / "target"), str(tmp_path / "published"))
    assert plan.speculative["method"] == "mtp"
    assert plan.speculative["model"] == str(tmp_path / "published")
    drafter.save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="vLLM serves Gemma 4 assistants in their published layout"):
        plan_serving(str(tmp_path / "target"), str(tmp_path / "ours"), export_folder=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("make", "why"),
    [(make_specblock, "authors' fork of SGLang"), (make_specbound, "SpecBound changes how the target runs")],
)
def test_drafter_that_vllm_cannot_run_raises_with_what_it_can(
    make: Any, why: str, target: PreTrainedModel, folder: Path
) -> None:
    make(target).save_pretrained(folder.parent / "drafter")
    with pytest.raises(ValueError, match=f"vLLM cannot run .*{why}.* `hf-specdec serve {folder} ngram`"):
        plan_serving(str(folder), str(folder.parent / "drafter"), export_folder=folder / "out")
    assert not (folder / "out").exists()


def test_look_ups_are_the_engines_own(folder: Path) -> None:
    assert plan_serving(str(folder), "ngram", num_speculative_tokens=7).speculative == {
        "method": "ngram",
        "num_speculative_tokens": 7,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 1,
    }
    plan = plan_serving(str(folder), "suffix")
    assert plan.speculative["method"] == "suffix"
    assert "arctic-inference" in plan.notes[0]


def test_mtp_is_told_to_vllm_where_the_target_has_such_a_layer(folder: Path) -> None:
    test_mtp.make_target("glm4_moe", folder.parent / "glm")
    plan = plan_serving(str(folder.parent / "glm"), "mtp")
    assert plan.speculative == {"method": "mtp", "num_speculative_tokens": 1}
    with pytest.raises(ValueError, match="target .* has no mtp layer .* such as ngram"):
        plan_serving(str(folder), "mtp")


def test_names_that_are_swapped_or_nowhere_raise(target: PreTrainedModel, folder: Path) -> None:
    make_dflash(target).save_pretrained(folder.parent / "drafter")
    with pytest.raises(ValueError, match="Are the two swapped"):
        plan_serving(str(folder.parent / "drafter"), str(folder))
    with pytest.raises(FileNotFoundError, match="There is no folder './absent'"):
        plan_serving(str(folder), "./absent")


def test_named_drafter_that_vllm_does_not_have_is_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    class Told(NGramDrafter):
        """A look-up of one's own."""

    register("told", Told, origin="name")
    target.save_pretrained(tmp_path)
    try:
        with pytest.raises(ValueError, match=r"vLLM cannot run 'told': vLLM has no such method\. .* ngram`"):
            plan_serving(str(tmp_path), "told")
    finally:
        del WEIGHTLESS["told"]
