"""export_drafter(..., to="source"): every published layout is written as it was read, tensor for tensor."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec import export_drafter, inspect_drafter, load_drafter
from hf_specdec.adaptation import AdaptiveDrafter
from hf_specdec.cli import main
from hf_specdec.hub.pretrained import PretrainedDrafter
from hf_specdec.methods.lookup import NGramDrafter
from tests.hub.layouts import CASES, DEFAULT_TAPS, LAYERS, as_medusa, as_safeailab, as_zlab, build, save
from tests.hub.loopback_hub import LoopbackHub
from tests.hub.test_formats import run
from tests.method_table import (
    make_causal_lm,
    make_dflash,
    make_eagle3,
    make_medusa,
    make_specblock,
    make_specbound,
    make_specbranch,
)
from tests.targets import make_target

pytestmark = pytest.mark.filterwarnings("ignore:Drafter .* reads layers:UserWarning")
NARROW, WIDE = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("llama", "sdpa", torch.float32, num_hidden_layers=LAYERS, initializer_range=0.5)


def contents(folder: Path) -> dict[str, dict[str, Tensor]]:
    """The tensors of each weight file of a folder."""
    files = [file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".pt")]
    return {
        file.name: load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
        for file in files
    }


def differences(one: Path, other: Path) -> list[tuple[str, str]]:
    """File and name of each tensor that is not the same in two folders, in name, shape, dtype and bits."""
    left, right = (
        {(file, name): tensor for file, held in contents(folder).items() for name, tensor in held.items()}
        for folder in (one, other)
    )
    assert left.keys() == right.keys()
    return [
        key
        for key, tensor in left.items()
        if (tensor.dtype, tensor.shape) != (right[key].dtype, right[key].shape)
        or not torch.equal(tensor.contiguous().view(torch.uint8), right[key].contiguous().view(torch.uint8))
    ]


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def check_same(source: Path, exported: Path) -> None:
    assert names(source) == names(exported)
    assert (source / "config.json").read_bytes() == (exported / "config.json").read_bytes()
    assert not differences(source, exported)


def add_left_out(file: Path) -> None:
    """Adds a rotary table, which no layout loads, and the copy of the target's embedding that SpecBlock leaves out."""
    tensors = contents(file.parent)[file.name] | {"rotary_emb.inv_freq": torch.rand(4, dtype=torch.float16)}
    if "rank_head.0.weight" in tensors:
        tensors["input_layer.embed_tokens.weight"] = torch.rand(64, 32)
    if file.suffix == ".safetensors":
        save_file(tensors, file)
    else:
        torch.save(tensors, file)


@pytest.mark.parametrize("name", CASES)
def test_every_layout_is_written_as_it_was_read_and_drafts_the_same(
    name: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    case = CASES[name]
    target = case.target(target)
    drafter = build(case, target)
    source, exported, changed = tmp_path / "source", tmp_path / "exported", tmp_path / "changed"
    source.mkdir()
    case.save(drafter, source)
    add_left_out(source / case.file)
    options = asdict(drafter.options)
    loaded = load_drafter(source, target, **options)
    assert export_drafter(loaded, exported, to="source") == exported
    check_same(source, exported)
    assert run(target, load_drafter(exported, target, **options)) == run(target, drafter)

    # A drafter with the target's head may lack a norm before it.
    key = "norm.weight" if "norm.weight" in loaded.state_dict() else "layers.0.post_attention_layernorm.weight"
    assert loaded.source_layout is not None
    (stored,) = [each for each in loaded.source_layout.tensors if each.own_name == key]
    with torch.no_grad():
        loaded.get_parameter(key).add_(0.5)
    export_drafter(loaded, changed, to="source")
    assert differences(source, changed) == [(stored.file, stored.name)]
    torch.testing.assert_close(
        contents(changed)[stored.file][stored.name], loaded.get_parameter(key).data, rtol=0, atol=0
    )


def in_two_dtypes(file: Path) -> None:
    """Stores vectors as float32, and matrices as bfloat16 with one in float32."""
    tensors = contents(file.parent)[file.name]
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor.to(WIDE if tensor.dim() == 1 or name.endswith("fc.weight") else NARROW)
    if file.suffix == ".safetensors":
        save_file(tensors, file)
    else:
        torch.save(tensors, file)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("name", list(CASES)[::6])
def test_tensors_keep_their_bits_in_whatever_dtype_they_are_loaded(
    dtype: torch.dtype | None, name: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    case = CASES[name]
    (tmp_path / "source").mkdir()
    case.save(build(case, target), tmp_path / "source")
    in_two_dtypes(tmp_path / "source" / case.file)
    loaded = load_drafter(tmp_path / "source", dtype=dtype)
    export_drafter(loaded, tmp_path / "exported", to="source")
    check_same(tmp_path / "source", tmp_path / "exported")


def test_a_changed_tensor_is_converted_to_its_stored_dtype(target: PreTrainedModel, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    save(folder, *as_zlab(make_dflash(target), block_size=5))
    in_two_dtypes(folder / "model.safetensors")
    loaded = load_drafter(folder, dtype="bfloat16")
    with torch.no_grad():
        loaded.norm.weight += 0.5
        loaded.fc.weight[0, 0] += 0.5
    export_drafter(loaded, tmp_path / "out", to="source")
    assert {name for _, name in differences(folder, tmp_path / "out")} == {"norm.weight", "fc.weight"}
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["norm.weight"].dtype == torch.float32
    torch.testing.assert_close(written["norm.weight"], loaded.norm.weight.data.float(), rtol=0, atol=0)


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "model.safetensors"])
def test_medusa_heads_keep_file_and_names(prefix: str, file: str, target: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    save(tmp_path / "source", {"medusa_num_heads": 2}, as_medusa(make_medusa(target), prefix), file)
    loaded = load_drafter(tmp_path / "source", target)
    export_drafter(loaded, tmp_path / "out", to="source")
    check_same(tmp_path / "source", tmp_path / "out")


def save_eagle3(target: PreTrainedModel, folder: Path, **fields: Any) -> Path:
    folder.mkdir()
    save(folder, *as_safeailab(make_eagle3(target, **DEFAULT_TAPS), **fields))
    return folder


def shard(folder: Path) -> None:
    """Splits the weights into two shards."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}, indent=1))


def test_shards_and_their_index_are_written_again(target: PreTrainedModel, tmp_path: Path) -> None:
    shard(source := save_eagle3(target, tmp_path / "source"))
    export_drafter(load_drafter(source, target), tmp_path / "out", to="source")
    check_same(source, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors.index.json").read_bytes() == (
        source / "model.safetensors.index.json"
    ).read_bytes()


def test_config_is_written_byte_for_byte_and_keys_that_are_dropped_stay(
    target: PreTrainedModel, tmp_path: Path
) -> None:
    source = save_eagle3(target, tmp_path / "source")
    fields = json.loads((source / "config.json").read_text()) | {"auto_map": {"AutoModel": "x.Y"}, "_comment": "ü"}
    (source / "config.json").write_text(json.dumps(fields, indent=7, ensure_ascii=False), encoding="utf-8")
    export_drafter(load_drafter(source, target), tmp_path / "out", to="source")
    check_same(source, tmp_path / "out")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda drafter: pickle.loads(pickle.dumps(drafter))])
def test_copies_keep_the_source_layout(copied: Callable[[Any], Any], target: PreTrainedModel, tmp_path: Path) -> None:
    source = save_eagle3(target, tmp_path / "source")
    loaded = load_drafter(source, target)
    export_drafter(copied(loaded).to(torch.float64), tmp_path / "out", to="source")
    check_same(source, tmp_path / "out")


def test_drafter_from_the_hub_is_exported_from_its_snapshot(
    hub: LoopbackHub, target: PreTrainedModel, tmp_path: Path
) -> None:
    source = save_eagle3(target, tmp_path / "source")
    commit = hub.add("owner/drafter", source)
    loaded = load_drafter("owner/drafter", target)
    assert loaded.source_layout is not None
    assert loaded.source_layout.folder.name == commit
    export_drafter(loaded, tmp_path / "out", to="source")
    check_same(source, tmp_path / "out")


def test_an_adapted_drafter_is_given_back_in_its_layout(target: PreTrainedModel, tmp_path: Path) -> None:
    case = CASES["specblock, a vocabulary map in a file of its own, which wins"]
    (tmp_path / "source").mkdir()
    case.save(build(case, target), tmp_path / "source")
    loaded = load_drafter(tmp_path / "source", target)
    with AdaptiveDrafter(target, loaded) as adaptive:
        with pytest.raises(ValueError, match=r"has no source layout.*export_drafter\(adaptive.drafter"):
            export_drafter(adaptive, tmp_path / "out", to="source")
        adaptive.learner.learning.norm.weight.data += 0.5
        export_drafter(adaptive.drafter, tmp_path / "out", to="source")
        check_same(tmp_path / "source", tmp_path / "out")
        export_drafter(adaptive.learner.learning, tmp_path / "learning", to="source")
    assert differences(tmp_path / "source", tmp_path / "learning") == [("model.safetensors", "norm.weight")]
    assert not inspect_drafter(tmp_path / "learning").problems


# What is refused, before anything is written.


def check_refused(drafter: Any, folder: Path, error: type[Exception], message: str, **options: Any) -> None:
    before = names(folder) if folder.exists() else None
    with pytest.raises(error, match=message):
        export_drafter(drafter, folder, to="source", **options)
    assert (names(folder) if folder.exists() else None) == before


@pytest.mark.parametrize(
    "make", [make_eagle3, make_medusa, make_dflash, make_specblock, make_causal_lm, lambda target: NGramDrafter()]
)
def test_drafter_that_was_not_loaded_is_refused(make: Any, target: PreTrainedModel, tmp_path: Path) -> None:
    message = r"was not loaded from a published layout, so it has no source layout: save .*save_pretrained\(folder\)"
    check_refused(make(target), tmp_path / "out", ValueError, message)


@pytest.mark.parametrize("make", [make_eagle3, make_medusa, make_specbound, make_specbranch])
def test_drafter_in_our_own_layout_has_no_source_layout(make: Any, target: PreTrainedModel, tmp_path: Path) -> None:
    drafter: PretrainedDrafter = make(target)
    drafter.save_pretrained(tmp_path / "ours")
    loaded = load_drafter(tmp_path / "ours", target)
    check_refused(loaded, tmp_path / "out", ValueError, "was not loaded from a published layout")


def test_source_that_was_removed_is_named_with_the_tensors_that_it_has(target: PreTrainedModel, tmp_path: Path) -> None:
    source = save_eagle3(target, tmp_path / "source")
    loaded = load_drafter(source, target)
    rounded = load_drafter(source, dtype="bfloat16")
    source.rename(tmp_path / "elsewhere")
    message = (
        r"EAGLE-3 \(SafeAILab\): t2d must be copied from its source in '.*source', but model.safetensors no longer"
    )
    check_refused(loaded, tmp_path / "out", FileNotFoundError, f"{message}.*Copy the files back.*save_pretrained")
    check_refused(rounded, tmp_path / "out", FileNotFoundError, "fc.weight.* and [0-9]+ more must be copied")
    (tmp_path / "elsewhere").rename(source)
    export_drafter(loaded, tmp_path / "out", to="source")
    check_same(source, tmp_path / "out")


def test_removed_source_does_not_matter_where_nothing_is_copied_from_it(
    target: PreTrainedModel, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save(source, *as_zlab(make_dflash(target), block_size=5))
    loaded = load_drafter(source, target)
    source.rename(tmp_path / "elsewhere")
    export_drafter(loaded, tmp_path / "out", to="source")
    check_same(tmp_path / "elsewhere", tmp_path / "out")


def without_map(tensors: dict[str, Tensor]) -> None:
    del tensors["t2d"]


def longer_map(tensors: dict[str, Tensor]) -> None:
    tensors["t2d"] = torch.cat([tensors["t2d"], tensors["t2d"]])


def other_map(tensors: dict[str, Tensor]) -> None:
    tensors["t2d"] = tensors["t2d"].roll(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_map, r"model.safetensors has changed .*for t2d, \[64\] torch.bool, it has no such tensor"),
        (longer_map, r"for t2d, \[64\] torch.bool, it holds \[128\] torch.bool"),
        (other_map, "maps d2t and t2d of .* do not name the same target ids"),
    ],
)
def test_source_that_changed_is_refused(
    change: Callable[[dict[str, Tensor]], None], message: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    source = save_eagle3(target, tmp_path / "source")
    loaded = load_drafter(source, target)
    tensors = {name: tensor.clone() for name, tensor in load_file(source / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, source / "model.safetensors")
    check_refused(loaded, tmp_path / "out", ValueError, message)
    (source / "model.safetensors").write_bytes(b"damaged")
    check_refused(loaded, tmp_path / "out", ValueError, "cannot be read as safetensors")
    (source / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (source / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    check_refused(loaded, tmp_path / "out", ValueError, "is a link to .* outside the folder")


def test_network_that_changed_is_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    source = save_eagle3(target, tmp_path / "source")
    loaded = load_drafter(source, target)
    loaded.config.target_name_or_path = "owner/other"
    loaded.set_options(tree_budget=3)
    export_drafter(loaded, tmp_path / "out", to="source")
    check_same(source, tmp_path / "out")
    loaded.config.norm_before_residual = True
    message = "changed since it was loaded: config field norm_before_residual is True and was False.*Undo the changes"
    check_refused(loaded, tmp_path / "again", ValueError, message)
    loaded.config.norm_before_residual = False
    loaded.norm = torch.nn.Identity()
    check_refused(loaded, tmp_path / "again", ValueError, r"weight norm.weight has the shape None and had \(32,\)")


def test_map_that_changed_is_refused_where_its_counterpart_is_copied(target: PreTrainedModel, tmp_path: Path) -> None:
    source = save_eagle3(target, tmp_path / "source")
    loaded = load_drafter(source, target)
    loaded.d2t += 1
    check_refused(loaded, tmp_path / "out", ValueError, "maps d2t and t2d of .* do not name the same target ids")


def test_folder_that_holds_a_checkpoint_is_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    source = save_eagle3(target, tmp_path / "source")
    loaded = load_drafter(source, target)
    check_refused(loaded, source, ValueError, "already holds config.json, model.safetensors.*give another folder")
    target_id = {"target_id": "owner/target", "num_target_layers": LAYERS}
    export_drafter(loaded, tmp_path / "vllm", **target_id)
    check_refused(loaded, tmp_path / "vllm", ValueError, "already holds config.json, model.safetensors.*another folder")
    (tmp_path / "free").mkdir()
    (tmp_path / "free" / "README.md").write_text("A card.")
    export_drafter(loaded, tmp_path / "free", to="source")
    shutil.copy(source / "model.safetensors", tmp_path / "free" / "other.bin")
    check_refused(loaded, tmp_path / "free", ValueError, "already holds config.json, model.safetensors, other.bin")


def test_options_for_vllm_are_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    loaded = load_drafter(save_eagle3(target, tmp_path / "source"), target)
    message = "target_id='owner/target', num_target_layers=8 cannot be combined with to='source'"
    options = {"target_id": "owner/target", "num_target_layers": 8}
    check_refused(loaded, tmp_path / "out", ValueError, message, **options)


def test_two_names_of_one_weight_are_refused_when_loaded(target: PreTrainedModel, tmp_path: Path) -> None:
    case = CASES["angelspec dspark"]
    config, tensors = case.save(build(case, target), tmp_path)
    save(tmp_path, config, tensors | {"fc.weight": tensors["draft_model.context_proj.weight"] + 1})
    message = "hold both .*fc.weight.*two names of the same weight: remove the one"
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path)
    assert "two names of the same weight" in inspect_drafter(tmp_path).problems[0]


def test_the_command_writes_the_source_layout(
    target: PreTrainedModel, tmp_path: Path, chdir: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_eagle3(target, tmp_path / "source")
    chdir(tmp_path)
    assert not main(["export", "source", "--to", "source"])
    assert capsys.readouterr().out == "Wrote source-source.\n"
    check_same(source, tmp_path / "source-source")
    assert main(["export", "source", "out", "--to", "source", "--target-id", "owner/x"])
    assert "cannot be combined with to='source'" in capsys.readouterr().err
