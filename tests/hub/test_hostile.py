"""Checkpoints made to harm: a clear error from load_drafter and inspect_drafter, nothing run, nothing left behind."""

from __future__ import annotations

import json
import pickle
import random
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPTJConfig, GPTJForCausalLM, PreTrainedModel

from hf_specdec import inspect_drafter, load_drafter
from hf_specdec.methods.dflash.network import DFlashDrafter
from tests.hub.loopback_hub import LoopbackHub
from tests.method_table import make_dflash, make_eagle3, make_medusa, make_specblock, make_specbound, make_specbranch

GIGABYTE = 2**30


class Payload:
    """Pickled, it makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path, folder: Path) -> Iterator[None]:
    """The folder stays as the test left it, nothing ran, and no memory for what a header claims was taken."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert not (tmp_path / "ran").exists()
    names = {file.name for file in folder.iterdir()}
    assert not names & {"__pycache__", "model.safetensors.tmp"}
    kilobytes = 1024
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GIGABYTE / kilobytes


def refused(folder: Path, message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        load_drafter(folder)
    problems = inspect_drafter(folder).problems
    assert problems, "inspect found nothing wrong"


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


@pytest.fixture
def draft_model(target: PreTrainedModel, tmp_path: Path) -> Path:
    """A saved plain language model."""
    target.save_pretrained(tmp_path / "draft-lm")
    return tmp_path / "draft-lm"


@pytest.fixture
def pair(target: PreTrainedModel, tmp_path: Path) -> Path:
    """A saved drafter with its draft model in a folder of its own."""
    make_specbranch(target).save_pretrained(tmp_path / "pair")
    return tmp_path / "pair"


def write_header(file: Path, header: bytes, claimed: int | None = None, data: bytes = b"") -> None:
    file.write_bytes(struct.pack("<Q", len(header) if claimed is None else claimed) + header + data)


def tensor(shape: list[int], size: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}


@pytest.mark.parametrize("claimed", [10 * GIGABYTE, 2**63, 2**64 - 1, 0])
def test_header_that_claims_gigabytes_is_refused(folder: Path, claimed: int) -> None:
    write_header(folder / "model.safetensors", b'{"fc.weight":{}}', claimed)
    refused(folder, "model.safetensors of '.*saved' .* cannot be read as safetensors")


def test_sparse_file_with_a_header_of_gigabytes_is_refused(folder: Path) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 10 * GIGABYTE))
        file.truncate(11 * GIGABYTE)  # holes: takes no room on the disk
    refused(folder, "cannot be read as safetensors")


@pytest.mark.parametrize(
    "described",
    [
        tensor([2**40, 2**40], 4),
        tensor([2**62], 4),
        tensor([-1, 4], 4),
        tensor([1], 2**50),
        tensor([1], -4),
        {"dtype": "F32", "shape": [1]},
        {"dtype": "OBJECT", "shape": [1], "data_offsets": [0, 4]},
        [],
    ],
    ids=[
        "shape",
        "one axis",
        "negative axis",
        "beyond the file",
        "negative size",
        "no offsets",
        "no such type",
        "list",
    ],
)
def test_tensors_of_absurd_shape_are_refused(folder: Path, described: Any) -> None:
    write_header(folder / "model.safetensors", json.dumps({"fc.weight": described}).encode(), data=b"\0" * 4)
    refused(folder, "cannot be read as safetensors")


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 10**9},
        {"hidden_size": 2**62},
        {"hidden_size": -32},
        {"vocab_size": 0},
        {"num_attention_heads": 0},
        {"intermediate_size": True},
        {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0] * 10**6}},
    ],
    ids=["layers", "width", "negative width", "no vocabulary", "no heads", "no number", "taps"],
)
def test_configs_of_absurd_size_are_refused(folder: Path, fields: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    refused(folder, "config.json|another shape")


@pytest.mark.parametrize("kind", ["draft_model", "pair"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"vocab_size": 4_000_000},
            r"a model of 256,0\d\d,\d\d\d parameters, but its weight files hold 35,104.*4000000",
        ),
        ({"vocab_size": 2**40}, "a model of 70,368,.* parameters, but its weight files hold 35,104"),
        ({"vocab_size": 2**62}, "does not describe a causal_lm drafter. RuntimeError: Storage size"),
        ({"num_hidden_layers": 100}, "the weights have layers 0 to 3, but config.json has 100 layers"),
        ({"num_hidden_layers": 1000}, "num_hidden_layers=1000, and the maximum is 256"),
        ({"num_labels": 10**9}, "num_labels=1000000000, and the maximum is 1048576"),
        ({"pad_token_id": 10**9}, "does not describe a causal_lm drafter. AssertionError: Padding_idx"),
    ],
    ids=["vocabulary", "endless vocabulary", "overflow", "layers", "endless layers", "labels", "padding"],
)
def test_language_model_larger_than_its_files_is_refused_before_memory_is_taken(
    kind: str, fields: dict[str, Any], message: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(kind)
    change_config(folder if kind == "draft_model" else folder / "draft_model", **fields)
    with pytest.raises(ValueError, match=message):
        load_drafter(folder)
    assert kind == "pair" or inspect_drafter(folder).problems


def test_a_pairs_draft_model_that_is_none_is_told_without_the_kinds_of_drafters(pair: Path) -> None:
    change_config(pair / "draft_model", architectures=["SomethingElse"])
    message = r"draft_model' is not a language model of transformers, .* architectures \['SomethingElse'\] and"
    with pytest.raises(ValueError, match=message) as caught:
        load_drafter(pair)
    assert "Formats loaded" not in str(caught.value)


def test_table_that_no_file_holds_is_bounded(tmp_path: Path) -> None:
    config = GPTJConfig(vocab_size=64, n_positions=64, n_embd=32, n_layer=1, n_head=4, rotary_dim=8)
    GPTJForCausalLM(config).save_pretrained(tmp_path / "draft-lm")
    assert load_drafter(tmp_path / "draft-lm")
    change_config(tmp_path / "draft-lm", n_positions=2**40)
    with pytest.raises(ValueError, match=r"whose buffers need [\d,]+ bytes; the maximum is 1,073,741,824"):
        load_drafter(tmp_path / "draft-lm")


@pytest.mark.parametrize("kind", ["draft_model", "pair"])
def test_adapter_beside_a_language_model_is_refused(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    place = folder if kind == "draft_model" else folder / "draft_model"
    (place / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/elsewhere", "peft_type": "LORA"}')
    with pytest.raises(ValueError, match="has a file adapter_config.json: a PEFT adapter, which is not loaded"):
        load_drafter(folder)


@pytest.mark.parametrize("name", ["measurements.json", "training.json"])
def test_record_of_endless_depth_is_left_aside(folder: Path, name: str) -> None:
    (folder / name).write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.warns(UserWarning, match=f"Ignoring .*{name}: invalid JSON"):
        load_drafter(folder)


def test_generation_settings_of_endless_depth_are_refused(draft_model: Path) -> None:
    (draft_model / "generation_config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(ValueError, match="cannot be loaded as a causal_lm drafter.* RecursionError"):
        load_drafter(draft_model)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rms_norm_eps": {"__float__": "NaN"}}, "config.json of .* is not valid JSON .NaN is not a number"),
        ({"rms_norm_eps": {"__float__": "much"}}, "config.json of .* is not valid JSON .could not convert string"),
        ({"rms_norm_eps": float("nan")}, "config.json of .* is not valid JSON .NaN is not a number"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06; it must be a finite number of at least 0"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6'; it must be a finite number of at least 0"),
        ({"rope_theta": 0}, "rope_theta=0; it must be a finite number above 0"),
        ({"rope_theta": 10**400}, r"rope_theta=10+\.\.\. \(401 characters\); it must be a finite number above 0"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta=inf; it must be a finite number above 0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor=0; it must be a finite number above 0"),
        ({"target_name_or_path": [["owner/name"]]}, r"target_name_or_path=\[\['owner/name'\]\]; it must be a name"),
    ],
    ids=[
        "NaN as transformers writes it",
        "no number",
        "NaN",
        "negative",
        "text",
        "no base",
        "endless base",
        "infinite base",
        "no factor",
        "list",
    ],
)
def test_fields_that_mean_nothing_are_refused(folder: Path, fields: dict[str, Any], message: str) -> None:
    change_config(folder, **fields)
    refused(folder, message)


@pytest.mark.parametrize("kind", ["folder", "draft_model", "pair"])
def test_weights_that_are_nan_are_refused(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    file = (folder / "draft_model" if kind == "pair" else folder) / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    tensors[name][3, 5] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"{name} of .* contains NaN, so no tokens can be drafted"):
        load_drafter(folder)


def test_exit_layers_without_end_are_refused_in_few_words(target: PreTrainedModel, tmp_path: Path) -> None:
    heads = tmp_path / "heads"
    make_specbound(target).save_pretrained(heads)
    change_config(heads, exit_layers=list(range(1, 100_001)), num_target_layers=100_002)
    message = "exit_layers=.1, 2, .* characters.*, and the maximum is 256"
    refused(heads, message)
    assert len(str(inspect_drafter(heads))) < 1000


@pytest.mark.parametrize(
    "fields",
    [{"r": [None]}, {"r": 0}, {"lora_alpha": "1"}, {"lora_alpha": float("nan")}, {"use_rslora": True, "r": -3}],
    ids=str,
)
def test_adapter_of_numbers_that_are_none_is_refused(
    target: PreTrainedModel, tmp_path: Path, fields: dict[str, Any]
) -> None:
    heads = tmp_path / "heads"
    make_specbound(target).save_pretrained(heads)
    file = heads / "exit-layer-01" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(ValueError, match="exit-layer-01 of '.*heads' cannot be read as a PEFT LoRA adapter"):
        load_drafter(heads)


def test_vocabulary_map_of_exit_heads_that_leads_nowhere_is_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    heads = tmp_path / "heads"
    make_specbound(target).save_pretrained(heads)
    d2t = load_file(heads / "model.safetensors")["d2t"]
    save_file({"d2t": d2t - 3}, heads / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="d2t of drafter '.*heads' gives target ids from -3 to 60"):
        load_drafter(heads)


def test_config_of_endless_depth_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    refused(folder, "config.json of '.*saved' is not valid JSON")


def test_config_of_great_depth_is_refused(folder: Path) -> None:
    config = (folder / "config.json").read_text().rstrip().removesuffix("}")
    (folder / "config.json").write_text(config + ', "a": ' + '{"a":' * 100 + "1" + "}" * 101)
    refused(folder, "config.json of '.*saved' nests objects and lists deeper than the 64 levels that are read")


def test_config_of_gigabytes_is_refused_unread(folder: Path) -> None:
    with (folder / "config.json").open("wb") as file:
        file.truncate(10 * GIGABYTE)
    refused(folder, "config.json of '.*saved' has 10737418240 bytes, more than the 67108864 that are read")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_link_out_of_the_folder_is_not_followed(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes((folder / name).read_bytes())
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "secret")
    message = f"{name} of '.*saved' is a link to '.*secret', outside the folder, and such files are not opened"
    with pytest.raises(ValueError, match=message):
        load_drafter(folder)


def test_shard_that_is_a_link_out_of_the_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(tmp_path / "secret")
    (folder / "weights.safetensors").symlink_to(tmp_path / "secret")
    index = {"weight_map": {"fc.weight": "weights.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "weights.safetensors of '.*saved' is a link to '.*secret', outside the folder")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", ""])
def test_exit_heads_behind_a_link_out_of_the_folder_are_not_read(
    target: PreTrainedModel, tmp_path: Path, name: str
) -> None:
    heads = tmp_path / "heads"
    make_specbound(target).save_pretrained(heads)
    place = heads / "exit-layer-02" / name
    place.rename(tmp_path / "secret")
    place.symlink_to(tmp_path / "secret")
    refused(heads, f"exit-layer-02/{name or '.*'} of '.*heads' is a link to '.*secret.*, outside the folder")


def test_draft_model_behind_a_link_out_of_the_folder_is_not_read(pair: Path, tmp_path: Path) -> None:
    (pair / "draft_model").rename(tmp_path / "secret")
    (pair / "draft_model").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="draft_model/.* of '.*pair' is a link to '.*secret/.*', outside the folder"):
        load_drafter(pair)


@pytest.mark.parametrize(
    "place", ["../../..", "./../draft-lm", "/etc", "~/models", "../draft-lm/../draft-lm", "draft-lm"]
)
def test_checkpoint_from_the_hub_names_no_folder_of_this_machine(
    hub: LoopbackHub, pair: Path, draft_model: Path, chdir: Callable[[Path], None], place: str
) -> None:
    change_config(pair, draft_model=place)
    hub.add("owner/pair", pair)
    chdir(draft_model.parent)  # where a folder is named like a Hub id
    with pytest.raises(ValueError, match="'owner/pair' is from the Hub and has draft_model .*Nothing was loaded"):
        load_drafter("owner/pair")


def test_links_of_the_hub_cache_are_followed(
    hub: LoopbackHub, target: PreTrainedModel, pair: Path, tmp_path: Path
) -> None:
    make_specbound(target).save_pretrained(tmp_path / "heads")
    for name in ("pair", "heads"):
        hub.add(f"owner/{name}", tmp_path / name)
        load_drafter(f"owner/{name}")
        [snapshot] = (tmp_path / "cache").glob(f"models--owner--{name}/snapshots/*")
        load_drafter(snapshot)
        assert not inspect_drafter(snapshot).problems


def test_link_inside_the_folder_is_followed(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights-of-today")
    (folder / "model.safetensors").symlink_to("weights-of-today")
    assert load_drafter(folder).fc.weight.any()


def test_config_cannot_send_the_loader_elsewhere(folder: Path, tmp_path: Path, drafter: DFlashDrafter) -> None:
    (tmp_path / "stolen.safetensors").write_bytes(b"?")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "../stolen.safetensors"}))
    with pytest.warns(UserWarning, match="has transformers_weights="):
        assert torch.equal(load_drafter(folder).fc.weight, drafter.fc.weight)
    (folder / "config.json").write_text(json.dumps(config | {"weights_file": "../stolen.safetensors"}))
    refused(folder, "has weights_file='../stolen.safetensors': the reader of dflash does not know")


def carries_code(folder: Path, tmp_path: Path) -> None:
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\nclass DFlashDraftModel: pass\n"
    for name in ("dflash.py", "modeling_drafter.py", "custom_generate/generate.py", "__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoModel": "dflash.DFlashDraftModel", "AutoModelForCausalLM": "modeling_drafter.DFlashDraftModel"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": auto_map}))


def test_code_of_a_repo_is_not_run(
    folder: Path, tmp_path: Path, target: PreTrainedModel, chdir: Callable[[Path], None]
) -> None:
    carries_code(folder, tmp_path)
    load_drafter(folder, target)
    assert not inspect_drafter(folder).problems
    target.save_pretrained(tmp_path / "model")
    carries_code(tmp_path / "model", tmp_path)
    chdir(tmp_path / "model")
    load_drafter(tmp_path / "model", target)


PICKLES: dict[str, tuple[Callable[..., Any], str]] = {
    "SpecBlock": (make_specblock, "vocab_mapping.pt"),
    "Medusa": (make_medusa, "medusa_lm_head.pt"),
}


@pytest.mark.parametrize("kind", PICKLES)
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_pickle_with_a_payload_is_not_run(kind: str, protocol: int, target: PreTrainedModel, tmp_path: Path) -> None:
    make, file = PICKLES[kind]
    folder = tmp_path / "hostile"
    if kind == "Medusa":
        folder.mkdir()
        (folder / "config.json").write_text('{"medusa_num_heads": 3}')
    else:
        make(target).save_pretrained(folder)
    (folder / file).write_bytes(pickle.dumps({"t2d": Payload(tmp_path / "ran")}, protocol=protocol))
    with pytest.raises(ValueError, match=rf"{file}.* cannot be read|{file}"):
        load_drafter(folder)
    inspect_drafter(folder)


def test_medusa_heads_without_end_are_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    heads = tmp_path / "heads"
    make_medusa(target).save_pretrained(heads)
    change_config(heads, medusa_num_heads=250, medusa_num_layers=250)
    refused(heads, "medusa_num_heads is 250 and medusa_num_layers 250: together more than 256 layers")


def test_heads_of_absurd_numbers_are_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    folder = tmp_path / "heads"
    folder.mkdir()
    (folder / "config.json").write_text('{"medusa_num_heads": 3}')
    name = "0.999999999999.linear.weight"
    write_header(folder / "model.safetensors", json.dumps({name: tensor([1, 1], 4)}).encode(), data=b"\0" * 4)
    refused(folder, "with gaps: the file is incomplete")


FORMATS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "dflash": make_dflash,
    "eagle3": make_eagle3,
    "medusa": make_medusa,
    "specblock": make_specblock,
    "specbound": make_specbound,
    "specbranch": make_specbranch,
    "language model": lambda target: target,
}
ODD = (None, "", "../..", -1, 0, 2**40, 10**400, 0.5, float("inf"), [], [0] * 3000, {}, {"a": None}, [[["x"]]])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FORMATS)
def test_damage_of_any_kind_is_an_error_of_the_documented_kinds(
    kind: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    """20 files of each format with a field of another kind or a cut, drawn from a fixed seed."""
    FORMATS[kind](target).save_pretrained(tmp_path / "whole")
    draw = random.Random(kind)
    for trial in range(20):
        folder = shutil.copytree(tmp_path / "whole", tmp_path / str(trial))
        file = draw.choice(sorted(folder.rglob("*.json")) if trial % 4 else sorted(folder.rglob("*.*")))
        if trial % 4:
            fields = json.loads(file.read_text())
            change = {draw.choice(sorted(fields)): draw.choice(ODD)}
            file.write_text(json.dumps(fields | change))
        else:
            change = {"cut": draw.randrange(file.stat().st_size)}
            file.write_bytes(file.read_bytes()[: change["cut"]])
        for look in (load_drafter, inspect_drafter):
            try:
                str(look(folder))
            except (ValueError, OSError):
                pass
            except Exception as error:
                raise AssertionError(f"{file.relative_to(folder)} of {kind} with {change}: {error!r}") from error
