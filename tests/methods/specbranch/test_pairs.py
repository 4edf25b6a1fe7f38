"""Checkpoints of a pair, its H-RAD, and pairs that do not fit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specdec import inspect_drafter, load_drafter
from hf_specdec.methods.specbranch import SpecBranchConfig, SpecBranchDrafter
from hf_specdec.methods.specbranch.network import OWN_DRAFT_MODEL
from tests.method_table import make_causal_lm, make_specbranch
from tests.targets import PROMPTS, fresh_target, make_target, tiny_tokenizer

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from measure_specbranch import parallel_latency, serial_latency

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def saved(folder: Path, place: str) -> tuple[PreTrainedModel, SpecBranchDrafter, Path]:
    """A pair on disk: a target, a drafter in `pair`, and its draft model where `place` says."""
    target = make_target("llama", "sdpa", torch.float32)
    drafter = make_specbranch(target)
    drafter.config.draft_model = place
    assert drafter.draft_model is not None
    if place != OWN_DRAFT_MODEL:
        drafter.draft_model.save_pretrained(folder / "draft")
    drafter.save_pretrained(folder / "pair")
    return target, drafter, folder / "pair"


@pytest.mark.parametrize("place", ["../draft", OWN_DRAFT_MODEL])
def test_a_saved_pair_drafts_the_same(place: str, tmp_path: Path) -> None:
    target, drafter, folder = saved(tmp_path, place)
    prompts = PROMPTS["batch of one"]()
    loaded = load_drafter(folder, target, speed_ratio=4.0, k_max=3, min_confidence=0.05, min_certainty=0.0)
    runs = []
    for each in (drafter, loaded):
        target.generate(**prompts, **GREEDY, assistant_model=each)
        assert each.stats is not None
        runs.append((each.stats.per_step_accepted, each.stats.num_path_drafts))
    assert runs[0] == runs[1]
    assert "Draft model's parameters" in (folder / "README.md").read_text()


def test_a_checkpoint_without_its_draft_model_says_where_it_should_be(tmp_path: Path) -> None:
    target, _, folder = saved(tmp_path, "../draft")
    (tmp_path / "draft").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"should be in the folder '../draft', relative to the checkpoint"):
        load_drafter(folder, target)
    config = json.loads((folder / "config.json").read_text())
    del config["draft_model"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has no draft_model in its config.json"):
        load_drafter(folder, target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_pair_without_h_rad_is_saved_and_loaded(dtype: torch.dtype, tmp_path: Path) -> None:
    target, prompts = make_target("llama", "sdpa", dtype), PROMPTS["batch of one"]()
    drafter = make_specbranch(target, h_rad=False)
    assert (drafter.dtype, drafter.device.type) == (dtype, "cpu")
    drafter.save_pretrained(tmp_path)
    assert inspect_drafter(tmp_path).problems == []
    alone = target.generate(**prompts, **GREEDY)
    for given in (None, target):
        loaded: Any = load_drafter(tmp_path, given, speed_ratio=4.0)
        assert (loaded.dtype, loaded.draft_model.dtype, loaded.options.lengths) == (dtype, dtype, "confidence")
        assert target.generate(**prompts, **GREEDY, assistant_model=loaded).tolist() == alone.tolist()
    assert load_drafter(tmp_path, dtype="bfloat16").draft_model.dtype == torch.bfloat16


def test_without_h_rad_or_draft_model_it_says_what_it_lacks(tmp_path: Path) -> None:
    target = make_target("llama", "sdpa")
    make_specbranch(target, h_rad=False).save_pretrained(tmp_path)
    alone = SpecBranchDrafter(SpecBranchConfig.from_pretrained(tmp_path))
    with pytest.raises(ValueError, match="has no draft model yet"):
        alone.check_target(target)


def test_a_pair_saved_elsewhere_takes_its_draft_model_along(tmp_path: Path) -> None:
    target, _, folder = saved(tmp_path, "../draft")
    loaded: Any = load_drafter(folder)
    loaded.save_pretrained(tmp_path / "beside")  # the same folder is found from there
    assert json.loads((tmp_path / "beside" / "config.json").read_text())["draft_model"] == "../draft"
    away = tmp_path / "far" / "away"
    loaded.save_pretrained(away)
    assert json.loads((away / "config.json").read_text())["draft_model"] == OWN_DRAFT_MODEL
    assert f"| Draft model | `{OWN_DRAFT_MODEL}` |" in (away / "README.md").read_text()
    assert loaded.config.draft_model == "../draft"
    again: Any = load_drafter(away, target)
    for name, tensor in loaded.draft_model.state_dict().items():
        torch.testing.assert_close(again.draft_model.state_dict()[name], tensor, rtol=0, atol=0)


def test_a_draft_model_from_a_folder_travels_with_the_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target("llama", "sdpa", torch.float32)
    monkeypatch.chdir(tmp_path)
    make_causal_lm(target).model.save_pretrained("runs/draft")
    for place in ("./runs/draft", "runs/draft", str(tmp_path / "runs" / "draft")):
        model = AutoModelForCausalLM.from_pretrained(place)
        drafter = SpecBranchDrafter.from_models(model, target, h_rad=True)
        assert drafter.config.draft_model == OWN_DRAFT_MODEL
        drafter.save_pretrained("pair")
        load_drafter("pair", target)
    model.name_or_path = "owner/draft"
    assert SpecBranchDrafter.from_models(model, target).config.draft_model == "owner/draft"


def test_a_pair_that_has_lost_its_draft_model_warns_when_it_is_saved_elsewhere(tmp_path: Path) -> None:
    _, _, folder = saved(tmp_path, "../draft")
    alone = SpecBranchDrafter(SpecBranchConfig.from_pretrained(folder))
    for place in ("../draft", OWN_DRAFT_MODEL):
        alone.config.draft_model = place
        with pytest.warns(UserWarning, match=rf"draft model '{place}' cannot be found from .*attach\(draft_model\)"):
            alone.save_pretrained(tmp_path / "far" / "away")


@pytest.mark.parametrize("place", ["../draft", OWN_DRAFT_MODEL, None])
def test_inspecting_a_pair_reports_a_draft_model_that_is_not_there(place: str | None, tmp_path: Path) -> None:
    _, _, folder = saved(tmp_path, place or "../draft")
    assert inspect_drafter(folder).problems == []
    config = json.loads((folder / "config.json").read_text()) | {"draft_model": place}
    (folder / "config.json").write_text(json.dumps(config))
    for found in (tmp_path / "draft", folder / OWN_DRAFT_MODEL):
        if found.is_dir():
            found.rename(tmp_path / "elsewhere")
    [problem] = inspect_drafter(folder).problems
    assert (
        f"the draft model {place!r}, relative to the checkpoint, does not exist" if place else "names no draft model"
    ) in problem


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"k_max": 0}, "k_max=0 must be an integer from 1 to 64"),
    ({"depth": 0}, "depth=0 must be an integer"),
    ({"worker_threads": True}, "worker_threads=True must be an integer"),
    ({"lengths": "hrad"}, "Unknown lengths 'hrad'. Did you mean 'h_rad'?"),
    ({"selection": "prior"}, "Unknown selection 'prior'"),
    ({"candidates": "topk"}, "Unknown candidates 'topk'. Did you mean 'top_k'?"),
    ({"parallel": 1}, "parallel=1 must be True, False or 'auto'"),
    ({"min_confidence": 1.5}, "min_confidence=1.5 must be from 0 to 1"),
    ({"speed_ratio": 0}, "speed_ratio=0 must be a positive number"),
    ({"selection": "a_priori", "lengths": "confidence"}, "uses H-RAD, but lengths='confidence'"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    drafter = make_specbranch(make_target("llama", "sdpa"))
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        drafter.set_options(**options)


def test_predicting_without_h_rad_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lengths='h_rad' needs an H-RAD, .* has none"):
        make_specbranch(make_target("llama", "sdpa"), h_rad=False, lengths="h_rad")


def test_an_h_rad_of_another_pair_is_refused() -> None:
    target = make_target("llama", "sdpa")
    drafter = make_specbranch(target)
    other = make_target("llama", "sdpa", num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"H-RAD .* trained for a target whose num_target_layers is 4, but .* has 2"):
        other.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=drafter)
    drafter.config.draft_num_layers = 4
    with pytest.raises(ValueError, match=r"trained with a draft model whose num_layers is 4, but .* has 2"):
        drafter.attach(other)


def test_a_draft_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    target = fresh_target("llama", "sdpa")
    drafter = SpecBranchDrafter.from_models(fresh_target("llama", "sdpa", vocab_size=32), target)
    with pytest.raises(ValueError, match=r"has a vocabulary of 32, but target .* has one of 64"):
        target.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=drafter)
    for name in ("one", "other"):
        tokenizer = tiny_tokenizer()
        tokenizer.save_pretrained(tmp_path / name)
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text().replace('"c": 2', '"cc": 2').replace('"c":2', '"cc":2'))
    model = make_causal_lm(target).model
    target.name_or_path, model.name_or_path = str(tmp_path / "one"), str(tmp_path / "other")
    with pytest.raises(ValueError, match=r"different tokenizers: id 2 is 'cc' .* and 'c'"):
        target.generate(
            **PROMPTS["batch of one"](), **GREEDY, assistant_model=SpecBranchDrafter.from_models(model, target)
        )


def test_a_draft_model_larger_than_the_target_warns() -> None:
    target = make_target("llama", "sdpa", num_hidden_layers=1)
    model = make_target("llama", "sdpa")
    drafter = SpecBranchDrafter.from_models(model, target, speed_ratio=2.0)
    with pytest.warns(UserWarning, match="Check that the two are not swapped"):
        target.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=drafter)


def test_a_device_that_does_not_exist_is_refused() -> None:
    drafter = make_specbranch(make_target("llama", "sdpa"))
    with pytest.raises(ValueError, match=r"device='cuda:99' does not exist: this machine has \d+ CUDA devices"):
        drafter.to("cuda:99")


def test_the_speed_ratio_is_measured_once_per_target() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = make_specbranch(target, speed_ratio=None)
    ratios, forwards = [], []
    for _ in range(2):
        target.generate(**prompts, **GREEDY, assistant_model=drafter)
        assert drafter.stats is not None
        ratios.append(drafter.stats.speed_ratio)
        forwards.append(drafter.stats.num_target_forwards)
    assert ratios[0] == ratios[1] > 0
    assert forwards[0] == forwards[1], "forwards that measure are no rounds"


def test_rollbacks_cost_the_parallel_latency_its_gain() -> None:
    # Theorem 1: the gain over drafting in turn falls with the acceptance rate, and no length beyond c is worth while.
    gains = [serial_latency(alpha, 8, 8.0) / parallel_latency(alpha, 8, 8.0) for alpha in (0.5, 0.8, 0.95, 1.0)]
    assert gains == sorted(gains)
    assert parallel_latency(0.8, 16, 8.0) > parallel_latency(0.8, 8, 8.0)
    with pytest.raises(ValueError, match=r"acceptance=0.0"):
        parallel_latency(0.0, 8, 8.0)
