"""load_drafter on local folders: what loads, and what every kind of bad input gets."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from hf_specdec import inspect_drafter, load_drafter
from hf_specdec.drafting.fingerprint import tokenizer_fingerprint
from hf_specdec.drafting.registry import named_alone
from hf_specdec.methods.causal_lm.network import CausalLMDrafter
from hf_specdec.methods.dflash.network import DFlashDrafter, DFlashOptions
from tests.hub.loopback_hub import LoopbackHub
from tests.method_table import METHODS
from tests.targets import fresh_target, make_target, one_prompt, tiny_tokenizer

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path, drafter: DFlashDrafter) -> dict[str, Any]:
    """Saves the drafter again in several files; returns the index."""
    (folder / "model.safetensors").unlink()
    drafter.save_pretrained(folder, max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    return index


# What loads.


def test_loaded_drafter_drafts_the_same(folder: Path, drafter: DFlashDrafter, target: PreTrainedModel) -> None:
    loaded = load_drafter(folder, tree_budget=drafter.options.tree_budget)
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=0, atol=0)
    outputs = [
        target.generate(**one_prompt(), **GREEDY, assistant_model=each, return_dict_in_generate=True)
        for each in (drafter, loaded)
    ]
    assert outputs[0].sequences.tolist() == outputs[1].sequences.tolist()
    assert outputs[0].speculation.per_step_accepted == outputs[1].speculation.per_step_accepted
    assert not loaded.training
    assert loaded.name_or_path == str(folder)


def test_options_are_set_while_it_is_loaded(folder: Path) -> None:
    loaded = load_drafter(str(folder), method="dflash", tree_budget=7, block_size=3)
    assert loaded.options == DFlashOptions(method="dflash", tree_budget=7, block_size=3)
    assert (loaded.method, loaded.num_slots) == ("dflash", 3)


@pytest.mark.parametrize(
    ("method", "suited", "given"),
    [
        ("dflash", {"tree_budget": 7, "block_size": 3}, {"method": "ddtree", "block_size": 4}),
        ("eagle3", {"tree_budget": 7, "depth": 2}, {"depth": 3}),
        ("medusa", {"tree_budget": 7}, {"tree_budget": 8}),
        ("specblock", {"tree_budget": 7, "num_blocks": 3, "branching": [3, 4, 5, 6]}, {"num_blocks": 1}),
        ("specbound", {"w_max": 2, "threshold": 0.25}, {"w_max": 3}),
        ("causal_lm_tree", {"tree_budget": 7, "method": "causal_lm_chain"}, {"depth": 3}),
    ],
)
def test_options_that_suit_a_checkpoint_come_with_it(
    method: str, suited: dict[str, Any], given: dict[str, Any], target: PreTrainedModel, tmp_path: Path
) -> None:
    made: Any = METHODS[method](target)
    made.options = type(made.options).defaults(made.options_config)
    made.save_pretrained(tmp_path)
    assert "drafting_options" not in json.loads((tmp_path / "config.json").read_text())
    change_config(tmp_path, drafting_options=suited)
    loaded: Any = load_drafter(tmp_path, target, **given)
    assert loaded.options == made.options.replace(**suited | given)
    loaded.save_pretrained(tmp_path / "again")
    assert load_drafter(tmp_path / "again", target).options == loaded.options
    loaded.options = made.options
    loaded.save_pretrained(tmp_path / "again")
    assert load_drafter(tmp_path / "again", target).options == made.options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree_buget": 7}, "Did you mean 'tree_budget'"),
        ({"tree_budget": -1}, "tree_budget=-1"),
        (["tree_budget"], "drafting_options"),
    ],
)
def test_options_of_a_checkpoint_that_cannot_be_raise(folder: Path, options: Any, message: str) -> None:
    change_config(folder, drafting_options=options)
    with pytest.raises(ValueError, match=message) as caught:
        load_drafter(folder)
    assert folder.name in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rotary_frequencies_are_right_in_every_dtype(folder: Path, dtype: torch.dtype) -> None:
    loaded = load_drafter(folder, dtype=dtype)
    assert loaded.fc.weight.dtype == dtype
    expected = Qwen3RotaryEmbedding(loaded.config).inv_freq
    for buffer in (loaded.rotary_emb.inv_freq, loaded.rotary_emb.original_inv_freq):
        torch.testing.assert_close(buffer, expected, rtol=0, atol=0)


def test_dtype_is_the_checkpoints_without_a_target_and_the_targets_with_one(
    folder: Path, drafter: DFlashDrafter
) -> None:
    drafter.to(torch.bfloat16).save_pretrained(folder)
    assert load_drafter(folder).dtype == torch.bfloat16
    assert load_drafter(folder, make_target("llama", dtype=torch.float64)).dtype == torch.float64
    assert load_drafter(folder, make_target("llama", dtype=torch.float64), dtype="float16").dtype == torch.float16
    assert load_drafter(folder, device="cpu").device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_drafter_of_another_dtype_than_the_target_still_drafts(folder: Path, dtype: torch.dtype) -> None:
    target = make_target("llama", dtype=dtype)
    loaded = load_drafter(folder, dtype=torch.bfloat16)
    plain = target.generate(**one_prompt(), **GREEDY)
    assisted = target.generate(**one_prompt(), **GREEDY, assistant_model=loaded)
    assert assisted.tolist() == plain.tolist()
    assert loaded.stats.num_draft_tokens > 0
    assert loaded.stats.num_plain_steps == 0


def test_sharded_weights_load(folder: Path, drafter: DFlashDrafter) -> None:
    shard(folder, drafter)
    loaded = load_drafter(folder)
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=0, atol=0)


def test_a_stored_rotary_buffer_is_harmless(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.update({"rotary_emb.inv_freq": torch.full((4,), 9.0)}))
    loaded = load_drafter(folder)
    torch.testing.assert_close(loaded.rotary_emb.inv_freq, Qwen3RotaryEmbedding(loaded.config).inv_freq)


def test_no_code_of_the_checkpoint_runs(folder: Path, tmp_path: Path) -> None:
    (folder / "dflash.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    change_config(
        folder, auto_map={"AutoModel": "dflash.DFlashDraftModel"}, transformers_weights="../elsewhere.safetensors"
    )
    with pytest.warns(UserWarning, match=r"has transformers_weights='../elsewhere.safetensors', by which .*: dropped"):
        load_drafter(folder)
    assert not (tmp_path / "ran").exists()


# Drafter and target that do not fit, refused when they are put together.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"hidden_size": 48},
            r"Drafter '.*saved' reads target hidden states of size 32, but target .* hidden_size 48",
        ),
        ({"vocab_size": 80}, r"trained for a vocabulary of 64, but target .* has 80 embeddings"),
        ({"num_hidden_layers": 6}, r"trained for a target of 4 layers, but target .* has 6"),
    ],
)
def test_drafter_of_another_target_raises(folder: Path, settings: dict[str, Any], message: str) -> None:
    change_config(folder, target_name_or_path="owner/right-target")
    with pytest.raises(ValueError, match=message + r".*use 'owner/right-target' as target"):
        load_drafter(folder, fresh_target("llama", dtype=torch.float32, **settings))


def test_layer_ids_out_of_range_raise(folder: Path, target: PreTrainedModel) -> None:
    change_config(folder, dflash_config={"mask_token_id": 1, "target_layer_ids": [0, 4]}, target_name_or_path="owner/t")
    with pytest.raises(ValueError, match=r"reads target layers \[0, 4\], but \[4\] are not among the layers 0 to 3"):
        load_drafter(folder, target)


def test_mask_token_out_of_range_raises(folder: Path, target: PreTrainedModel) -> None:
    change_config(folder, dflash_config={"mask_token_id": 64, "target_layer_ids": [0, 2]})
    with pytest.raises(ValueError, match=r"mask_token_id 64, but target .* only 64 embeddings"):
        load_drafter(folder, target)


@pytest.fixture
def named_target(tmp_path: Path) -> PreTrainedModel:
    """A target that was loaded from a folder with its tokenizer."""
    make_target("llama", dtype=torch.float32).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    return type(make_target("llama")).from_pretrained(tmp_path / "target")


def test_drafter_of_another_tokenizer_raises(folder: Path, named_target: PreTrainedModel) -> None:
    change_config(folder, target_tokenizer_sha256="0" * 64, target_name_or_path="owner/right-target")
    message = (
        r"Drafter '.*saved' was trained with the tokenizer of 'owner/right-target' \(vocabulary sha256 000000.*\), "
        r"but target '.*target' has another one .* 64 tokens.*Use the target it was trained for"
    )
    with pytest.raises(ValueError, match=message):
        load_drafter(folder, named_target)


def test_drafter_of_the_same_tokenizer_loads(folder: Path, named_target: PreTrainedModel) -> None:
    change_config(folder, target_tokenizer_sha256=tokenizer_fingerprint(tiny_tokenizer()))
    load_drafter(folder, named_target)


def test_without_a_tokenizer_at_hand_nothing_is_compared(folder: Path, named_target: PreTrainedModel) -> None:
    change_config(folder, target_tokenizer_sha256="0" * 64)
    load_drafter(folder, make_target("llama", dtype=torch.float32))
    for file in Path(named_target.name_or_path).glob("tokenizer*"):
        file.unlink()
    load_drafter(folder, named_target)  # AutoTokenizer would make one up


def test_fingerprint_sees_tokens_and_ids() -> None:
    fingerprints = {tokenizer_fingerprint(tiny_tokenizer(size)) for size in (63, 64)}
    assert len(fingerprints) == 2
    assert all(len(each) == 64 for each in fingerprints)


# Options.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree_bugdet": 8}, r"Unknown drafting option 'tree_bugdet'. Did you mean 'tree_budget'\?"),
        ({"method": "ddtre"}, r"Unknown method 'ddtre'. Did you mean 'ddtree'\? Known: 'ddtree', 'dflash'"),
        ({"method": ["ddtree"]}, r"Unknown method \['ddtree'\].*Known: 'ddtree', 'dflash'"),
        ({"tree_budget": 0}, r"tree_budget=0 must be an integer from 1 to \d+"),
        ({"tree_budget": 10**6}, r"tree_budget=1000000 must be an integer from 1 to \d+"),
        ({"block_size": 1}, r"block_size=1 must be an integer from 2 to 5"),
        (
            {"block_size": 6},
            r"block_size=6 must be an integer from 2 to 5, the block this checkpoint was trained with",
        ),
    ],
)
def test_bad_options_raise(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_drafter(folder, **options)


@pytest.mark.parametrize("method", METHODS)
def test_options_that_are_refused_stay_as_they_were(method: str, target: PreTrainedModel) -> None:
    drafter = METHODS[method](target)
    before = asdict(drafter.options)
    for name in [name for name, value in before.items() if type(value) is int]:
        for value in (True, -1):
            with pytest.raises(ValueError, match=f"{name}={value}.* must be"):
                drafter.set_options(**{name: value})
            assert asdict(drafter.options) == before
    with pytest.raises(ValueError, match="compile_mode='fast' must be one of"):
        drafter.set_options(compile_mode="fast")
    assert drafter.options.compile_mode == "none"


def test_arguments_of_the_wrong_kind_raise(folder: Path) -> None:
    with pytest.raises(
        TypeError, match="target='owner/target' is a str; it must be the loaded target model, or left out"
    ):
        load_drafter(folder, "owner/target")
    with pytest.raises(TypeError, match="target=Linear.* is a Linear; it must be the loaded target model, or left out"):
        load_drafter(folder, torch.nn.Linear(2, 2))
    for dtype in ("int8", "nonsense", torch.int64):
        with pytest.raises(ValueError, match=f"dtype={dtype!r} is not a floating-point type"):
            load_drafter(folder, dtype=dtype)
    for dtype in ("float8_e4m3fn", torch.float8_e5m2):
        with pytest.raises(ValueError, match=f"dtype={dtype!r} is not supported: .* 'float64'"):
            load_drafter("./absent", dtype=dtype)
    assert load_drafter(folder, dtype="half").dtype == torch.float16
    with pytest.raises(ValueError, match="revision='main' was given, but '.*saved' is a local folder"):
        load_drafter(folder, revision="main")


@pytest.mark.parametrize("device", ["gpu", "cuda:99", 99, 1.5])
def test_device_that_is_not_here_raises_before_anything_is_read(device: Any) -> None:
    with pytest.raises(ValueError, match=f"device={device!r} is not available.*leave it out"):
        load_drafter("./absent", device=device)


def test_device_map_of_transformers_names_one_device(folder: Path, target: PreTrainedModel) -> None:
    for device_map in ("meta", {"": "meta"}, {"layers": "meta", "fc": torch.device("meta")}):
        assert load_drafter(folder, device_map=device_map).device.type == "meta"
    assert load_drafter(folder, target, device_map="auto").device == target.device
    for device_map in ({}, {"layers": "cpu", "fc": "meta"}):
        with pytest.raises(ValueError, match="device_map=.* does not name one device, and a drafter is not divided"):
            load_drafter("./absent", device_map=device_map)
    with pytest.raises(ValueError, match="device='cpu' and device_map='auto' were both given: leave one of them out"):
        load_drafter("./absent", device="cpu", device_map="auto")
    with pytest.raises(ValueError, match="device='balanced' is not available"):
        load_drafter("./absent", device_map="balanced")


def test_ngram_names_the_drafter_that_needs_no_checkpoint(
    hub: LoopbackHub, folder: Path, chdir: Callable[[Path], None]
) -> None:
    for name in named_alone():
        assert load_drafter(name, same_bits=True).options.same_bits
        with pytest.raises(ValueError, match=f"{name!r} is a drafter without a checkpoint.*load_drafter"):
            inspect_drafter(name)
        with pytest.raises(ValueError, match=f"revision='v1' was given for '{name}', which has no checkpoint"):
            load_drafter(name, revision="v1")
    with pytest.raises(ValueError, match=r"'mtp' is a drafter without a checkpoint.*load_drafter\('mtp', target\)"):
        inspect_drafter("mtp")
    assert not hub.requests
    chdir(folder.parent)
    folder.rename("ngram")
    assert load_drafter("ngram").method == "ddtree"


# Weights that are not there, not whole, or not of this network: an error, never random weights.


def test_missing_weight_raises(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.pop("layers.1.mlp.up_proj.weight"))
    with pytest.raises(
        ValueError,
        match=r"not those of the dflash drafter.*missing: layers.1.mlp.up_proj.weight \[64, 32\]. Nothing",
    ):
        load_drafter(folder)


def test_unexpected_weight_raises(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(64, 32)}))
    with pytest.raises(ValueError, match="unexpected: lm_head.weight"):
        load_drafter(folder)


def test_weight_of_another_shape_raises(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.update({"norm.weight": torch.zeros(16)}))
    message = r"norm.weight is \[16\] in model.safetensors, but config.json makes it \[32\]"
    with pytest.raises(ValueError, match=message):
        load_drafter(folder)


def test_weight_of_another_kind_of_number_raises(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.update({"norm.weight": torch.zeros(32, dtype=torch.int8)}))
    with pytest.raises(ValueError, match=r"of another dtype: norm.weight is I8, not F64 or F32 or F16 or BF16"):
        load_drafter(folder)


@pytest.mark.parametrize("keep", [0, 4, 200, 5000, -1])
def test_truncated_weights_raise(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = (
        rf"model.safetensors of '.*saved' \({file.stat().st_size} bytes\) cannot be read as safetensors: .*truncated"
    )
    with pytest.raises(ValueError, match=message):
        load_drafter(folder)


def test_weights_of_another_kind_raise(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps({"fc.weight": [1.0]}) * 50)
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        load_drafter(folder)


def test_git_lfs_pointer_raises_with_the_command_to_run(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match="it is a git-lfs pointer: run `git lfs pull` in the folder"):
        load_drafter(folder)


class Payload:
    """Pickled, it makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def test_pickled_weights_are_never_opened(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(
        FileNotFoundError,
        match="neither model.safetensors nor .*pytorch_model.bin is a pickle, whose loading can run code",
    ):
        load_drafter(folder)
    assert not (tmp_path / "ran").exists()


def test_missing_shard_raises(folder: Path, drafter: DFlashDrafter) -> None:
    shard(folder, drafter)
    next(folder.glob("model-00002*")).unlink()
    with pytest.raises(FileNotFoundError, match="lacks the shard 'model-00002-of-.*', one of .* that its index lists"):
        load_drafter(folder)


@pytest.mark.parametrize(
    "name", ["../stolen.safetensors", "/etc/stolen.safetensors", "..\\stolen.safetensors", "x.bin", ".."]
)
def test_index_that_leaves_the_folder_raises(folder: Path, drafter: DFlashDrafter, name: str, tmp_path: Path) -> None:
    index = shard(folder, drafter)
    shutil.copy(next(folder.glob("model-00001*")), tmp_path / "stolen.safetensors")
    index["weight_map"]["fc.weight"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names the shard '.*'; shards must be safetensors files in the same folder"):
        load_drafter(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
def test_index_without_a_map_raises(folder: Path, drafter: DFlashDrafter, index: dict[str, Any]) -> None:
    shard(folder, drafter)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="index.json of '.*' has no weight_map"):
        load_drafter(folder)


def test_tensor_in_two_shards_raises(folder: Path, drafter: DFlashDrafter) -> None:
    shard(folder, drafter)
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    with safe_open(first, "pt") as tensors:
        twice = next(iter(tensors.keys()))
    save_file(load_file(second) | {twice: load_file(first)[twice]}, second)
    with pytest.raises(ValueError, match=f"holds {twice} twice, in model-00001-of-.* and model-00002-of-"):
        load_drafter(folder)


def test_from_pretrained_reads_what_load_drafter_reads(folder: Path, drafter: DFlashDrafter, tmp_path: Path) -> None:
    loaded = DFlashDrafter.from_pretrained(folder, tree_budget=3, dtype=torch.float64)
    assert (loaded.options.tree_budget, loaded.dtype, loaded.name_or_path) == (3, torch.float64, str(folder))
    with pytest.raises(ValueError, match="saved' is a DFlashDrafter, not a CausalLMDrafter: use load_drafter, or"):
        CausalLMDrafter.from_pretrained(folder)
    make_target("llama", dtype=torch.float32).save_pretrained(tmp_path / "llama")
    assert isinstance(CausalLMDrafter.from_pretrained(tmp_path / "llama"), CausalLMDrafter)


# Checkpoints of other kinds.


def test_folder_of_an_encoder_raises(tmp_path: Path) -> None:
    shape = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    BertModel(BertConfig(**shape)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"not a drafter .*architectures \['BertModel'\] and model_type 'bert'"):
        load_drafter(tmp_path)


def test_weights_of_a_plain_language_model_under_a_drafters_config_raise(folder: Path, target: PreTrainedModel) -> None:
    save_file({name: tensor.clone() for name, tensor in target.state_dict().items()}, folder / "model.safetensors")
    with pytest.raises(
        ValueError, match="missing: fc.weight .*, hidden_norm.weight.* and .* more; unexpected: lm_head.weight"
    ):
        load_drafter(folder)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"speculators_config": {}, "architectures": ["DFlashDraftModel"]}, "speculators"),
        ({"architectures": ["DFlashLagunaForCausalLM"], "dflash_config": {}}, "Laguna DFlash"),
        ({"architectures": ["Gemma4DSparkModel"]}, "DSpark for Gemma 4"),
        ({"architectures": ["Qwen35DSparkModel"]}, "DSpark for Qwen3.5"),
        ({"architectures": ["DominoDraftModel"], "dflash_config": {}}, "Domino"),
        ({"speculators_model_type": "mtp"}, "speculators mtp"),
        ({"speculators_model_type": "eagle"}, "speculators eagle"),
        ({"architectures": ["K3DSparkModel"]}, "DSpark of another architecture"),
        ({"architectures": ["MTPDraftModel"], "model_type": "qwen3"}, "multi-token prediction"),
        ({"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 5}, r"Medusa \(vLLM\)"),
        ({"architectures": ["Gemma4Eagle3Model"], "draft_vocab_size": 9}, "DeepSpec EAGLE-3 for Gemma 4"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "EAGLE-3 with multi-head latent attention"),
    ],
)
def test_known_foreign_format_raises_with_its_name(tmp_path: Path, config: dict[str, Any], kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = f"holds a drafter in the {kind} format, which load_drafter does not read yet: it needs .*Formats loaded: "
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path)
    assert re.search(message, inspect_drafter(tmp_path).problems[0])


# Configs that make no sense.


def test_folder_without_config_raises(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(
        FileNotFoundError, match="has no config.json, so it is not a drafter.*there: adapter_config.json"
    ):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"), [('{"hidden', "is not valid JSON"), ("[]", "holds a list, but must hold")]
)
def test_config_that_is_no_json_object_raises(folder: Path, text: str, message: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"config.json of '.*saved' {message}"):
        load_drafter(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": "wide"}, "hidden_size is 'wide'; it must be a positive integer"),
        ({"hidden_size": 10**15}, "RuntimeError"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; it must be a positive integer"),
        ({"hidden_act": "nope"}, "KeyError: 'nope'"),
        ({"num_hidden_layers": 3}, "must be equal to the number of `layer_types`"),
        ({"block_size": 1}, r"block_size is 1 in this DFlash config \(top level or dflash_config\); it must be"),
        ({"block_size": None}, "block_size is None"),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, "dflash_config.mask_token_id is None"),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": "02"}},
            "target_layer_ids is '02'; it must be a list",
        ),
        (
            {"dflash_config": {"mask_token_id": 1}, "num_target_layers": None},
            "neither dflash_config.target_layer_ids nor",
        ),
        ({"is_neox_style": False}, "is_neox_style is false"),
    ],
)
def test_config_that_describes_no_drafter_raises(folder: Path, fields: dict[str, Any], message: str) -> None:
    change_config(folder, **fields)
    with pytest.raises(
        ValueError, match=rf"(?s)config.json of '.*saved' does not describe a dflash drafter. .*{message}"
    ):
        load_drafter(folder)


def test_quantised_checkpoint_raises(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match="is quantised .*'fp8'.*, and quantised drafters are not supported"):
        load_drafter(folder)
    change_config(folder, quantization_config=None)
    load_drafter(folder)
