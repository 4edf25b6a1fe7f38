"""inspect_drafter: what it prints is what load_drafter finds, from config and headers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, PreTrainedModel

from hf_specdec import inspect_drafter, load_drafter
from hf_specdec.drafting.registry import FAMILIES
from hf_specdec.hub.formats.base import _DEFAULTS, as_it_is, with_defaults
from hf_specdec.hub.pretrained import PretrainedDrafter
from hf_specdec.hub.recognition import recognise
from tests.hub.layouts import CASES, LAYERS, as_medusa, build, save
from tests.hub.loopback_hub import TOKEN, LoopbackHub
from tests.method_table import METHODS, make_medusa
from tests.targets import make_target


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("llama", "sdpa", torch.float32, num_hidden_layers=LAYERS)


@pytest.mark.filterwarnings("ignore:Drafter .* reads layers:UserWarning")  # the row that names the last layer
@pytest.mark.parametrize("name", CASES)
def test_report_on_a_published_layout_is_what_is_loaded(name: str, target: PreTrainedModel, tmp_path: Path) -> None:
    case = CASES[name]
    target = case.target(target)
    case.save(build(case, target), tmp_path)
    found = inspect_drafter(tmp_path)
    loaded = load_drafter(tmp_path, target)
    assert found.problems == []
    assert found.format == case.format
    assert isinstance(loaded, FAMILIES[str(found.family)].drafter)
    assert found.target == loaded.config.target_name_or_path
    assert found.facts["hidden_size"] == loaded.config.hidden_size
    assert found.files == [case.file]


@pytest.mark.parametrize("method", METHODS)
def test_report_on_what_this_library_saves_is_what_is_loaded(
    method: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    drafter: Any = METHODS[method](target)
    if not hasattr(drafter, "save_pretrained"):
        pytest.skip(f"{method} has nothing to save")
    drafter.save_pretrained(tmp_path)
    found = inspect_drafter(tmp_path)
    assert found.problems == []
    assert type(load_drafter(tmp_path)) is type(drafter) is FAMILIES[str(found.family)].drafter
    if isinstance(drafter, PretrainedDrafter):
        assert {name: list(shape) for name, shape in found.tensors.items()} == {
            name: list(tensor.shape) for name, tensor in (drafter.main_tensors() or drafter.state_dict()).items()
        }


def test_vocabulary_map_in_a_file_of_its_own_is_not_missing(target: PreTrainedModel, tmp_path: Path) -> None:
    METHODS["specblock"](target).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    maps = {name: weights.pop(name) for name in ("d2t", "t2d")}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert inspect_drafter(tmp_path).problems == ["missing: d2t [48]", "missing: t2d [64]"]
    torch.save(maps, tmp_path / "vocab_mapping.pt")
    assert inspect_drafter(tmp_path).problems == []
    assert load_drafter(tmp_path).d2t.tolist() == maps["d2t"].tolist()


def test_medusa_heads_in_a_pickle_are_counted_without_reading_them(target: PreTrainedModel, tmp_path: Path) -> None:
    save(tmp_path, {"medusa_num_heads": 2}, as_medusa(make_medusa(target, medusa_num_heads=5)), "medusa_lm_head.pt")
    found = inspect_drafter(tmp_path)
    assert (found.format, found.family, found.problems) == ("Medusa", "medusa", [])
    assert found.facts["medusa_num_heads"] == 5
    assert found.dtypes == {"F32": 15}


@pytest.mark.parametrize(
    ("lost", "config", "problem"),
    [
        ("model.norm.weight", {}, "missing: model.norm.weight [32]"),
        ("", {"num_attention_heads": 3}, "The hidden size (32) is not a multiple of the number of attention heads (3)"),
        ("", {"intermediate_size": 50}, "of another shape: model.layers.0.mlp.gate_proj.weight is [48, 32]"),
        ("", {"model_type": "unheard"}, "has no language model of architectures ['LlamaForCausalLM'] and model_type"),
    ],
)
def test_language_model_that_cannot_be_loaded_has_a_problem(
    lost: str, config: dict[str, Any], problem: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    target.save_pretrained(tmp_path)
    assert inspect_drafter(tmp_path).problems == []
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(lost, None)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(json.loads((tmp_path / "config.json").read_text()) | config))
    assert problem in inspect_drafter(tmp_path).problems[0]
    with pytest.raises(ValueError, match=r"hidden size|The weights of|no language model"):
        load_drafter(tmp_path)


def test_problems_are_told(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["norm.weight"]
    tensors |= {"fc.weight": tensors["fc.weight"][:, :3].contiguous(), "other": torch.zeros(2, dtype=torch.int8)}
    save_file(tensors, folder / "model.safetensors")
    found = inspect_drafter(folder)
    assert found.problems == [
        "missing: norm.weight [32]",
        "unexpected: other [2]",
        "of another shape: fc.weight is [32, 3] in model.safetensors, but config.json makes it [32, 64]",
        "of another dtype: other is I8, not F64 or F32 or F16 or BF16",
    ]
    assert "problems:\n  - missing: norm.weight [32]" in str(found)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_size": "wide"}, "hidden_size is 'wide'; it must be a positive integer"),
        ({"num_hidden_layers": 10**9}, "has num_hidden_layers=1000000000, and the maximum is 256"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantised"),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, "mask_token_id is None"),
        ({"block_size": None}, "block_size is None"),
        ({"dflash_config": {"mask_token_id": 1}, "num_target_layers": None}, "neither"),
        ({"block_size": 0}, "block_size is 0"),
        ({"dflash_config": {"mask_token_id": 1, "use_swa": True}}, "neither swa_window_size nor sliding_window"),
        ({"is_neox_style": False}, "is_neox_style is false"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style is false"),
        ({"dflash_config": {"mask_token_id": 1, "attention_sink_bias": True}}, "attention_sink_bias is set"),
        ({"draft_vocab_size": 65, "own_head": True}, "draft_vocab_size is 65"),
        *(
            ({key: 5}, f"has {key}=5; it must be a")
            for key in ("architectures", "dflash_config", "speculators_config", "eagle_config", "rope_scaling")
        ),
        ({"architectures": [5]}, "has architectures=[5]; it must be a list of names"),
        ({"layer_types": 5}, "has layer_types=5; it must be a list of names"),
        ({"model_type": []}, "has model_type=[]; it must be a name"),
        ({"transformer_layer_config": {"model_type": []}}, "has model_type=[]; it must be a name"),
    ],
)
def test_configs_that_make_no_sense_are_told(folder: Path, change: dict[str, Any], problem: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    found = inspect_drafter(folder)
    assert len(found.problems) == 1
    assert problem in found.problems[0]
    with pytest.raises(ValueError, match="saved' (has|is|does not describe)"):
        load_drafter(folder)


def test_null_where_target_layers_are_named_is_no_problem(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = None
    (folder / "config.json").write_text(json.dumps(config))
    assert inspect_drafter(folder).problems == []
    assert load_drafter(folder).config.target_layer_ids == [1, 5]


def test_vocabulary_map_of_another_type_is_told(target: PreTrainedModel, tmp_path: Path) -> None:
    METHODS["eagle3"](target).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"d2t": weights["d2t"].int()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert inspect_drafter(tmp_path).problems == ["of another dtype: d2t is I32, not I64"]
    with pytest.raises(ValueError, match="of another dtype: d2t is I32, not I64"):
        load_drafter(tmp_path)


def test_learned_mask_vector_is_refused_unopened(folder: Path) -> None:
    (folder / "mask_embedding.pt").write_bytes(b"?")
    message = "has a file mask_embedding.pt: a learned vector instead of the mask token's embedding"
    assert message in inspect_drafter(folder).problems[0]
    with pytest.raises(ValueError, match=message):
        load_drafter(folder)


def test_folder_that_is_not_there_raises() -> None:
    with pytest.raises(FileNotFoundError, match="no folder './absent'"):
        inspect_drafter("./absent")


def test_weights_on_the_hub_are_not_downloaded(hub: LoopbackHub, folder: Path) -> None:
    hub.add("owner/drafter", folder)
    found = inspect_drafter("owner/drafter")
    assert (found.format, found.problems) == ("dflash", [])
    assert found.tensors["fc.weight"] == (32, 64)
    assert not any("model.safetensors" in file.name for file in (folder.parent / "cache").rglob("*"))


def test_draft_model_that_no_repo_can_hold_is_told(hub: LoopbackHub, target: PreTrainedModel, tmp_path: Path) -> None:
    pair = METHODS["specbranch"](target, h_rad=False)
    pair.push_to_hub("me/pair", token=TOKEN)
    assert inspect_drafter("me/pair").problems == []
    assert load_drafter("me/pair", target).draft_model is not None
    pair.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for place in ("../draft-lm", str(tmp_path / "draft_model")):
        (tmp_path / "config.json").write_text(json.dumps(config | {"draft_model": place}))
        hub.add("me/other", tmp_path)
        [problem] = inspect_drafter("me/other").problems
        assert f"the draft model {place!r}, relative to the checkpoint, does not exist" in problem


@pytest.mark.parametrize("model_type", _DEFAULTS)
def test_absent_fields_mean_what_the_config_classes_of_the_host_mean(model_type: str) -> None:
    defaults = CONFIG_MAPPING[model_type]()
    assert with_defaults({}, model_type).items() <= vars(defaults).items()


def test_own_layouts_are_known_by_their_prefix() -> None:
    found = recognise({"model_type": "hf_specdec_eagle3"}, "it")
    assert (found.family, found.read) == ("eagle3", as_it_is)


@pytest.mark.parametrize(
    ("family", "change", "problem"),
    [
        (
            "llama",
            {"vocab_size": 65},
            "model.embed_tokens.weight, the embedding, is [64, 32], but config.json makes it",
        ),
        ("llama", {"num_hidden_layers": 5}, "the weights have layers 0 to 3, but config.json has 5 layers"),
        ("gpt-neox", {"hidden_size": 48}, "gpt_neox.embed_in.weight, the embedding, is [64, 32], but"),
        ("gpt2", {"n_layer": 3}, "the weights have layers 0 to 3, but config.json has 3 layers"),
    ],
)
def test_plain_language_model_of_another_config_is_told(
    family: str, change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    make_target(family, dtype=torch.float32).save_pretrained(tmp_path)
    assert inspect_drafter(tmp_path).problems == []
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    assert any(problem in found for found in inspect_drafter(tmp_path).problems)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"lora_rank": 4}, "exit-layer-01/adapter_model.safetensors holds {"),
        ({"exit_layers": [1, 2, 3, 4, 5, 6, 8], "num_target_layers": 9}, "exit-layer-08/adapter_model.safetensors is"),
        ({"draft_vocab_size": 9}, "d2t is [64] in model.safetensors, but config.json makes it [9]"),
        ({"exit_layers": None}, "exit_layers is None; it must be a list of at least one layer"),
    ],
)
def test_exit_heads_of_another_config_are_told(
    change: dict[str, Any], problem: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    METHODS["specbound"](target).save_pretrained(tmp_path)
    assert inspect_drafter(tmp_path).problems == []
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    assert problem in inspect_drafter(tmp_path).problems[0]
