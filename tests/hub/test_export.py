"""export_drafter: the config that vLLM reads, field by field from the facts on formats, and the way back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specdec import export_drafter, inspect_drafter, load_drafter
from hf_specdec.methods.causal_lm.network import CausalLMDrafter
from hf_specdec.methods.causal_lm.training import new_draft_model, take_vocabulary
from hf_specdec.methods.lookup import NGramDrafter, SuffixDrafter
from hf_specdec.methods.merged import MergedDrafter
from hf_specdec.methods.specblock import SpecBlockDrafter
from tests.hub.layouts import LAYERS, TREE
from tests.hub.test_formats import run
from tests.method_table import (
    make_causal_lm,
    make_dflash,
    make_dflash2,
    make_dspark,
    make_eagle3,
    make_medusa,
    make_peagle,
    make_specblock,
    make_specbound,
    make_specbranch,
)
from tests.scripted import StubDrafter
from tests.targets import make_target

TARGET = {"target_id": "owner/target", "target_architecture": "LlamaForCausalLM", "num_target_layers": LAYERS}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("llama", "sdpa", torch.float32, num_hidden_layers=LAYERS)


def make_specblock_of_ones_own(target: PreTrainedModel) -> SpecBlockDrafter:
    """Of a class that a user derived."""

    class OnesOwn(SpecBlockDrafter):
        __module__ = "script"

    drafter = make_specblock(target)
    drafter.__class__ = OnesOwn
    return drafter


def exported(drafter: Any, folder: Path, **settings: Any) -> dict[str, Any]:
    export_drafter(drafter, folder, **{**TARGET, **settings}, overwrite=True)
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    return json.loads((folder / "config.json").read_text())


def envelope(kind: str, architecture: str, tokens: int) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": "owner/target", "architectures": ["LlamaForCausalLM"]},
        },
    }


def test_eagle3_config_is_field_by_field_what_vllm_reads(target: PreTrainedModel, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    drafter = make_eagle3(target, target_layer_ids=[1, 3, 4], rope_parameters=rope, max_position_embeddings=256)
    assert exported(drafter.to(torch.bfloat16), tmp_path) == envelope("eagle3", "Eagle3DraftModel", 5) | {
        "draft_vocab_size": 32,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "transformer_layer_config": {
            "model_type": "llama",
            "vocab_size": 64,
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 256,
            "attention_bias": False,
            "rope_theta": 500000.0,
            "rope_parameters": rope,
            "tie_word_embeddings": False,
        },
        "torch_dtype": "bfloat16",
    }
    tensors = load_file(tmp_path / "model.safetensors")
    assert {"fc.weight", "layers.0.hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t"} <= set(tensors)
    assert list(tensors["lm_head.weight"].shape) == [32, 32]
    assert "embed_tokens.weight" not in tensors


def test_dflash_config_is_field_by_field_what_vllm_reads(target: PreTrainedModel, tmp_path: Path) -> None:
    drafter = make_dflash(target, dflash_config={"target_layer_ids": [-1, 5]})
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    assert exported(drafter, tmp_path) == envelope("dflash", "DFlashDraftModel", 4) | {
        "draft_vocab_size": 64,
        "block_size": 5,
        "mask_token_id": 1,
        "aux_hidden_state_layer_ids": [0, 6],
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "transformer_layer_config": {
            "model_type": "qwen3",
            "vocab_size": 64,
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "max_position_embeddings": 512,
            "rope_theta": 10000.0,
            "rope_parameters": rope,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "full_attention"],
            "is_causal": False,
        },
        "torch_dtype": "float32",
    }
    assert set(load_file(tmp_path / "model.safetensors")) == set(drafter.state_dict())


def test_dspark_config_says_what_vllm_reads_at_the_top(target: PreTrainedModel, tmp_path: Path) -> None:
    config = exported(make_dspark(target), tmp_path)
    assert config["speculators_config"] == envelope("dspark", "", 5)["speculators_config"], "the root's slot drafts too"
    heads = {name: config[name] for name in config if name.startswith(("markov", "confidence", "enable", "sample"))}
    assert heads == {
        "sample_from_anchor": True,
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}
DRAFTERS: dict[str, Any] = {
    "eagle3, default layers": (make_eagle3, {"target_layer_ids": None}),
    "eagle3, every flag": (
        make_eagle3,
        {
            "target_layer_ids": [-1, 3],
            "norm_before_residual": True,
            "norm_before_fc": True,
            "norm_output": True,
            "own_embeddings": True,
            "qk_norm": True,
            "draft_vocab_size": None,
        },
    ),
    "eagle3, a norm per tap, biases, two layers": (
        make_eagle3,
        {"fc_norm": True, "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2},
    ),
    "eagle3, four taps, wider than its target": (
        make_eagle3,
        {"target_layer_ids": [0, 1, 3, 5], "hidden_size": 48, "target_hidden_size": 32, "own_embeddings": True},
    ),
    "peagle": (make_peagle, {"target_layer_ids": [1, 3, 4], "own_embeddings": True, "norm_before_fc": True}),
    "dflash": (make_dflash, {}),
    "dflash, own head over a draft vocabulary": (
        make_dflash,
        {"dflash_config": {"own_embeddings": True, "own_head": True, "draft_vocab_size": 32}},
    ),
    "dflash, sliding layers": (make_dflash, SLIDING),
    "dflash, sliding layers, not causal": (make_dflash, SLIDING | {"is_causal": False}),
    "dflash, use_swa": (make_dflash, {"dflash_config": {"use_swa": True, "swa_window_size": 5}}),
    "dflash2": (make_dflash2, {}),
    "dflash2, sliding layers, not causal": (make_dflash2, SLIDING | {"is_causal": False}),
    "dspark": (make_dspark, {}),
    "dspark, fill-in slots, own head over a draft vocabulary, no confidence head": (
        make_dspark,
        {
            "dflash_config": {
                "sample_from_anchor": False,
                "own_head": True,
                "draft_vocab_size": 32,
                "enable_confidence_head": False,
                "confidence_head_with_markov": False,
            }
        },
    ),
}
KINDS = {
    make_peagle: "P-EAGLE (speculators)",
    make_dflash: "DFlash (speculators)",
    make_dflash2: "DFlash 2 (speculators)",
    make_dspark: "DSpark (speculators)",
    make_eagle3: "EAGLE-3 (speculators)",
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_exported_drafter_reads_back_tensor_for_tensor_and_drafts_the_same(
    name: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    make, settings = DRAFTERS[name]
    drafter = make(target, **settings)
    for parameter in drafter.parameters():
        if parameter.dim() == 1:  # norms start as ones, which hides whether they are used
            parameter.data += 0.5 * torch.randn_like(parameter)
    if make is make_eagle3:
        drafter.set_options(**TREE)
    elif make is not make_peagle and drafter.config.maps_vocabulary:
        drafter.d2t.copy_(torch.arange(drafter.config.draft_vocab_size))
    exported(drafter, tmp_path)
    found = inspect_drafter(tmp_path)
    assert not found.problems
    assert found.format == KINDS[make]
    options = asdict(drafter.options)
    loaded = load_drafter(tmp_path, target, **options)
    for key, tensor in drafter.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[key], tensor, rtol=0, atol=0)
    assert loaded.config.target_name_or_path == "owner/target"
    assert run(target, loaded) == run(target, drafter)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("make", [make_dflash, make_dspark])
def test_rows_of_the_targets_head_go_with_a_draft_vocabulary(make: Any, tied: bool, tmp_path: Path) -> None:
    target = make_target("llama", "sdpa", torch.float32, num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    target.save_pretrained(tmp_path / "target", max_shard_size="20KB")
    drafter = make(target, dflash_config={"draft_vocab_size": 24}).to(torch.bfloat16)
    drafter.d2t.copy_(torch.arange(24))
    with pytest.warns(UserWarning, match="names its target by the folder"):
        export_drafter(drafter, tmp_path / "out", target_id=str(tmp_path / "target"))
    head = load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"]
    assert head.dtype == torch.float32, "the target's numbers are not rounded"
    torch.testing.assert_close(head, target.lm_head.weight[torch.arange(24) + drafter.d2t], rtol=0, atol=0)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["draft_vocab_size"] == 24
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"], "of the target's folder"
    loaded = load_drafter(tmp_path / "out", target, dtype=torch.float32, **asdict(drafter.options))
    assert run(target, loaded) == run(target, drafter.to(torch.float32))


def test_head_that_is_not_in_the_targets_files_raises_and_writes_nothing(
    target: PreTrainedModel, tmp_path: Path
) -> None:
    drafter = make_dflash(target, dflash_config={"draft_vocab_size": 24})
    arguments: dict[str, Any] = {**TARGET, "target_id": str(tmp_path / "target")}
    other = make_target("llama", "sdpa", torch.float32, hidden_size=16, num_hidden_layers=1)
    other.save_pretrained(tmp_path / "target")
    with pytest.raises(
        ValueError, match=r"24 of 64 tokens.*lm_head.weight is \[64, 16\].*not \[64, 32\]: it is another"
    ):
        export_drafter(drafter, tmp_path / "out", **arguments)
    save_file({"other": torch.zeros(1)}, tmp_path / "target" / "model.safetensors")
    with pytest.raises(ValueError, match="the 1 tensors of the target do not have one head"):
        export_drafter(drafter, tmp_path / "out", **arguments)
    (tmp_path / "target" / "model.safetensors").unlink()
    with pytest.raises(OSError, match="rows of the head of its target .*, and the target's files cannot be read"):
        export_drafter(drafter, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_draft_model_with_a_draft_vocabulary_gets_all_rows_and_drafts_the_same(
    target: PreTrainedModel, tmp_path: Path
) -> None:
    target.save_pretrained(tmp_path / "target")
    drafter = make_causal_lm(target, method="causal_lm_chain")
    with pytest.raises(ValueError, match="needs no export: vLLM serves a plain language model without an export"):
        export_drafter(drafter, tmp_path / "out", **TARGET)
    model = new_draft_model(target, 1, draft_vocab_size=40)
    with torch.no_grad():
        take_vocabulary(model, target, torch.arange(40) + torch.arange(40) // 2)
    cut = CausalLMDrafter(model.eval(), method="causal_lm_chain")
    for _ in range(2):  # the second time over an earlier export
        export_drafter(cut, tmp_path / "out", target_id=str(tmp_path / "target"))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert whole.get_input_embeddings().num_embeddings == whole.config.vocab_size == 64
    assert run(target, CausalLMDrafter(whole, method="causal_lm_chain")) == run(target, cut)
    other = make_target("llama", "sdpa", torch.float32, vocab_size=32)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="drafts the token 58, but its target '.*other' has 32 tokens: name the"):
        export_drafter(cut, tmp_path / "out", target_id=str(tmp_path / "other"))
    with pytest.raises(OSError, match="needs a row for each of them.*config of its target '/absent', which"):
        export_drafter(cut, tmp_path / "out", target_id="/absent")


MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


def test_mixed_layers_warn(target: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match="has full and sliding draft layers: vLLM needs its V2 .*a wrong mask for full layers"
    ):
        exported(make_dflash(target, **MIXED), tmp_path)


def test_mixed_layers_none_of_which_is_causal_warn_of_the_runner_only(target: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match="has full and sliding draft layers: vLLM needs its V2 model runner for them.$"
    ):
        config = exported(make_dflash(target, **MIXED, is_causal=False), tmp_path)
    assert config["sliding_window_non_causal"]
    assert config["transformer_layer_config"]["is_causal"] is False


@pytest.mark.parametrize(
    ("make", "settings", "arguments", "message"),
    [
        (make_eagle3, {}, {"target_id": None}, "names None as its target, but vllm loads the target by its Hub id, of"),
        (make_eagle3, {}, {"target_id": "./absent"}, "names './absent' as its target.*no folder of that path here"),
        (make_eagle3, {"target_layer_ids": None}, {"num_target_layers": None}, "layers of the target: pass num_target"),
        (make_eagle3, {"target_layer_ids": [7]}, {}, "reads target layers .7. of 8, and engines differ"),
        (make_eagle3, {"norm_before_head": False}, {}, "norm_before_head is false, and in this layout there is always"),
        (make_dflash, {"dflash_config": {"sample_from_anchor": True}}, {}, "vLLM refuses DFlash drafters whose root"),
        (
            make_dflash,
            {"final_logit_softcapping": 30.0},
            {},
            "final_logit_softcapping is set, and this layout has no field",
        ),
        (make_dflash, {"is_causal": True}, {}, r"have the kinds .*\[\(None, True\)\]; in this layout full layers"),
        (
            make_dflash2,
            {"dflash_config": {"output_multiplier": 0.5}},
            {},
            "output_multiplier is 0.5, and this layout",
        ),
        (make_dflash2, {"dflash_config": {"sample_from_anchor": True}}, {}, "vLLM refuses DFlash drafters whose root"),
        (make_peagle, {"fc_norm": True}, {}, "fc_norm is true, and vLLM does not read it for P-EAGLE drafters"),
        (make_eagle3, {"hidden_act": "gelu"}, {}, "hidden_act is 'gelu', and vLLM has these layers with silu only"),
        (make_dflash, {"hidden_act": "gelu"}, {}, "hidden_act is 'gelu', and vLLM has these layers with silu only"),
        (
            make_eagle3,
            {"qk_norm": True, "attention_bias": True},
            {},
            "attention_bias and qk_norm are both set",
        ),
        (make_eagle3, {"qk_norm": True, "mlp_bias": True}, {}, "mlp_bias and qk_norm are both set"),
        (make_dspark, {"dflash_config": {"markov_head_type": "gated"}}, {}, "vLLM has vanilla Markov heads only"),
        (lambda target: MergedDrafter(NGramDrafter(), SuffixDrafter()), {}, {}, "vLLM runs one drafter at a time"),
        (make_medusa, {}, {}, "cannot be exported to vllm: vLLM serves Medusa heads in their published layout"),
        (make_specblock, {}, {}, "only the authors' fork of SGLang supports SpecBlock"),
        (make_causal_lm, {}, {}, "vLLM serves a plain language model without an export"),
        (make_specbound, {}, {}, "SpecBound changes how the target runs"),
        (make_specbranch, {}, {}, "SpecBranch drafts while the target runs"),
        (lambda target: NGramDrafter(), {}, {}, "vLLM has this method itself"),
        (make_specblock_of_ones_own, {}, {}, "only the authors' fork of SGLang supports SpecBlock"),
        (lambda target: StubDrafter(lambda context: None), {}, {}, "vLLM does not support the kind 'StubDrafter'"),
        (make_eagle3, {}, {"num_target_layers": 0}, "num_target_layers=0 must be at least 1"),
        (
            make_dflash,
            {},
            {"target_id": "elsewhere"},
            "its Hub id, of the form 'owner/name', or.*: name it \\(target_id, or --target-id",
        ),
        (make_dflash, {}, {"to": "vlm"}, "Unknown layout 'vlm'. Did you mean 'vllm'"),
    ],
)
def test_what_cannot_be_exported_raises_and_writes_nothing(
    make: Any, settings: Any, arguments: Any, message: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        export_drafter(make(target, **settings), tmp_path / "out", **{**TARGET, **arguments})
    assert not (tmp_path / "out").exists()


def test_target_in_a_folder_is_exported_with_a_note_on_its_path(
    target: PreTrainedModel, tmp_path: Path, chdir: Callable[[Path], None]
) -> None:
    drafter = make_eagle3(target)
    (tmp_path / "models" / "target").mkdir(parents=True)
    chdir(tmp_path)
    # Also where it looks like a Hub id: transformers, too, takes the folder first.
    for given in ("./models/target", "models/target"):
        with pytest.warns(UserWarning, match="names its target by the folder '.*/models/target'.* has to be there"):
            config = exported(drafter, tmp_path / "out", target_id=given)
        verifier = config["speculators_config"]["verifier"]["name_or_path"]
        assert verifier == str((tmp_path / "models" / "target").resolve())
    # Of the machine that serves; nothing is known of it here.
    with pytest.warns(UserWarning, match="names its target by the folder '/there/target'"):
        config = exported(drafter, tmp_path / "out", target_id="/there/target")
    assert config["speculators_config"]["verifier"]["name_or_path"] == "/there/target"
    drafter.config.target_name_or_path = str(tmp_path / "models" / "target")
    with pytest.warns(UserWarning, match="--target-id"):
        exported(drafter, tmp_path / "out", target_id=None)


def test_what_is_no_drafter_raises(target: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="drafter='owner/drafter' is a str; it must be what load_drafter"):
        export_drafter("owner/drafter", tmp_path / "out", **TARGET)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="drafter is a LlamaForCausalLM; it must be what load_drafter"):
        export_drafter(target, tmp_path / "out", **TARGET)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-00001-of-00002.safetensors", "modeling.py"])
def test_folder_with_what_an_engine_would_load_beside_the_export_raises(
    name: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=f"already holds .*{name}.*give another folder"):
        export_drafter(make_dflash(target), tmp_path, **TARGET)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_neither_a_drafter_nor_the_export_of_another_is_overwritten_unasked(
    target: PreTrainedModel, tmp_path: Path
) -> None:
    drafter = make_eagle3(target)
    drafter.save_pretrained(tmp_path / "ours")
    before = (tmp_path / "ours" / "config.json").read_text()
    with pytest.raises(ValueError, match="already holds .*config.json.*give another folder"):
        export_drafter(drafter, tmp_path / "ours", **TARGET)
    assert (tmp_path / "ours" / "config.json").read_text() == before
    out = tmp_path / "out"
    for _ in range(2):
        export_drafter(drafter, out, **TARGET)
    weights = (out / "model.safetensors").read_bytes()
    with torch.no_grad():
        drafter.fc.weight.add_(1)
    with pytest.raises(
        ValueError, match=r"the export of another drafter, or of other weights \(model.safetensors diff"
    ):
        export_drafter(drafter, out, **TARGET)
    assert (out / "model.safetensors").read_bytes() == weights
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]
    export_drafter(drafter, out, **TARGET, overwrite=True)
    assert (out / "model.safetensors").read_bytes() != weights
