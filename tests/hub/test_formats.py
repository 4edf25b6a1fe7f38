"""Published layouts of others: folders built from the facts on formats alone load, draft the same and stay lossless.

Every case of `layouts.py` starts from a random drafter of ours, is written as the layout has it and loaded, and all
trees of a run are compared. What reading a convention the other way would cost is in `test_traps.py`.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specdec import inspect_drafter, load_drafter
from hf_specdec.hub.pretrained import PretrainedDrafter
from hf_specdec.hub.recognition import recognise
from tests.hub.layouts import (
    CASES,
    DEFAULT_TAPS,
    LAYERS,
    Fields,
    Tensors,
    as_medusa,
    as_safeailab,
    as_specblock,
    as_specforge,
    as_speculators_dflash,
    as_speculators_eagle3,
    as_zlab,
    build,
    save,
)
from tests.method_table import make_dflash, make_eagle3, make_medusa, make_specblock
from tests.targets import make_target, one_prompt

# Rows that name the last layer of the target; tests/drafting/test_pairing.py is about the warning.
pytestmark = pytest.mark.filterwarnings("ignore:Drafter .* reads layers:UserWarning")


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    # Drawn wide, so that neighbouring layers say different things.
    return make_target("llama", "sdpa", torch.float32, num_hidden_layers=LAYERS, initializer_range=0.5)


def run(target: PreTrainedModel, drafter: PretrainedDrafter) -> tuple[list[list[int]], list[Any]]:
    """The output of a short run, and every tree of it."""
    trees: list[Any] = []
    make = drafter.candidate_generator

    def listening(model: Any) -> Any:
        generator = make(model)
        draft = generator.draft

        def keeping(context: Any) -> Any:
            tree = draft(context)
            trees.append([part.tolist() for part in (tree.token_ids, tree.parents, tree.valid)])
            return tree

        generator.draft = keeping
        return generator

    drafter.candidate_generator = listening  # type: ignore[method-assign]
    output = target.generate(**one_prompt(), max_new_tokens=6, do_sample=False, assistant_model=drafter)
    del drafter.candidate_generator
    return output.tolist(), trees


@pytest.mark.combinations(60)
@pytest.mark.parametrize("name", CASES)
def test_folder_in_a_published_layout_drafts_what_it_was_written_from(
    name: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    case = CASES[name]
    target = case.target(target)
    drafter = build(case, target)
    config, tensors = case.save(drafter, tmp_path)
    assert recognise(config, "it", tensors.keys).name == case.format

    loaded = load_drafter(tmp_path, target, **asdict(drafter.options))
    output, trees = run(target, loaded)
    alone = target.generate(**one_prompt(), max_new_tokens=6, do_sample=False)
    assert output == alone.tolist()
    assert trees == run(target, drafter)[1]
    assert any(len(tree[0][0]) > 1 for tree in trees)


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_foreign_drafter_is_saved_in_our_layout_and_loads_again(
    name: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    case = CASES[name]
    target = case.target(target)
    drafter = build(case, target)
    case.save(drafter, tmp_path)
    options = asdict(drafter.options)
    loaded = type(drafter).from_pretrained(tmp_path, target, **options)
    loaded.save_pretrained(tmp_path / "ours")
    again = load_drafter(tmp_path / "ours", target, **options)
    for key, tensor in loaded.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], tensor, rtol=0, atol=0)
    assert run(target, again) == run(target, drafter)


def save_eagle3(target: PreTrainedModel, folder: Path, **fields: Any) -> tuple[Fields, Tensors]:
    config, tensors = as_safeailab(make_eagle3(target, **DEFAULT_TAPS), **fields)
    save(folder, config, tensors)
    return config, tensors


class Payload:
    """Pickled, it makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize(("kind", "file"), [("eagle3", "pytorch_model.bin"), ("medusa", "medusa_lm_head.pt")])
@pytest.mark.parametrize("writer", ["pickle", "torch"])
def test_pickle_with_a_payload_is_refused_and_not_run(
    kind: str, file: str, writer: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    config = as_safeailab(make_eagle3(target, **DEFAULT_TAPS))[0] if kind == "eagle3" else {"medusa_num_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    content = {"fc.weight": Payload(tmp_path / "ran")}
    if writer == "pickle":
        (tmp_path / file).write_bytes(pickle.dumps(content))
    else:
        torch.save(content, tmp_path / file)
    with pytest.raises(ValueError, match=rf"{file} of .* cannot be read as plain tensors: .*Nothing in it was run"):
        load_drafter(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_pickle_that_holds_no_tensors_is_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    save_eagle3(target, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": 1}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin of .* must hold tensors by name, but holds something else"):
        load_drafter(tmp_path)


def test_pickled_view_of_absurd_shape_is_refused_without_a_copy(target: PreTrainedModel, tmp_path: Path) -> None:
    save_eagle3(target, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": torch.zeros(1).expand(2**20, 2**30)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"fc.weight is \[1048576, 1073741824\] in pytorch_model.bin, but config.json makes"
    ):
        load_drafter(tmp_path)


@pytest.mark.parametrize("fields", [{"num_hidden_layers": 10**9}, {"hidden_size": 10**15}])
@pytest.mark.parametrize("write", [as_safeailab, as_speculators_eagle3])
def test_config_of_absurd_size_raises(
    write: Callable[..., Any], fields: Fields, target: PreTrainedModel, tmp_path: Path
) -> None:
    config, tensors = write(make_eagle3(target, **DEFAULT_TAPS))
    if write is as_safeailab:
        config |= fields | {"architectures": ["LlamaForCausalLMEagle3"]}
    else:
        config["transformer_layer_config"] |= fields
    save(tmp_path, config, tensors)
    with pytest.raises(ValueError, match=r"config.json of .* (has num_hidden_layers|does not describe)|another shape"):
        load_drafter(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/model.safetensors", "x.bin"])
def test_index_that_leaves_the_folder_raises(name: str, target: PreTrainedModel, tmp_path: Path) -> None:
    _, tensors = save_eagle3(target, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
    with pytest.raises(ValueError, match="names the shard '.*'; shards must be safetensors files in the same folder"):
        load_drafter(tmp_path)


def test_vocabulary_map_of_absolute_ids_is_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    config, tensors = save_eagle3(target, tmp_path)
    tensors["d2t"] = tensors["d2t"] + torch.arange(tensors["d2t"].numel())
    save(tmp_path, config, tensors)
    with pytest.raises(
        ValueError, match="d2t and t2d of .* do not name the same target ids: d2t holds target ids instead of"
    ):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (100, "gives target ids from 0 to 105, but the target has ids 0 to 63"),
        (-6, "gives target ids from -1 to 62, but the target has ids 0 to 63"),
        (-1, "gives target id 4 to 2 draft ids, but each draft id must have its own target id"),
    ],
)
def test_vocabulary_map_to_no_target_ids_is_refused(
    offset: int, message: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    config, tensors = save_eagle3(target, tmp_path)
    del tensors["t2d"]
    tensors["d2t"][5] = offset
    save(tmp_path, config, tensors)
    with pytest.raises(ValueError, match=f"d2t of drafter .* {message}"):
        load_drafter(tmp_path)


def test_lost_vocabulary_map_warns(target: PreTrainedModel, tmp_path: Path) -> None:
    config, tensors = save_eagle3(target, tmp_path)
    tensors["d2t"].zero_()
    tensors["t2d"].fill_(True)
    save(tmp_path, config, tensors)
    with pytest.warns(
        UserWarning, match="d2t of .* is all zeros, so its 32 draft ids are read as the target's first ids"
    ):
        load_drafter(tmp_path)


def test_missing_vocabulary_map_raises(target: PreTrainedModel, tmp_path: Path) -> None:
    config, tensors = save_eagle3(target, tmp_path)
    del tensors["d2t"]
    save(tmp_path, config, tensors)
    with pytest.raises(
        ValueError, match=r"not those of the EAGLE-3 \(SafeAILab\) drafter .*missing: d2t \[32\]. Nothing was loaded"
    ):
        load_drafter(tmp_path)


def test_identity_map_of_a_full_vocabulary_is_left_out(target: PreTrainedModel, tmp_path: Path) -> None:
    config, tensors = as_specforge(make_eagle3(target, **DEFAULT_TAPS, draft_vocab_size=None))
    vocab = config["vocab_size"]
    tensors |= {"d2t": torch.zeros(vocab, dtype=torch.int64), "t2d": torch.ones(vocab, dtype=torch.bool)}
    save(tmp_path, config, tensors)
    assert not load_drafter(tmp_path, target).config.maps_vocabulary


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"transformer_layer_config": None},
            "transformer_layer_config is None; it must be the config of the draft layers",
        ),
        ({"transformer_layer_config": {"model_type": "bert"}}, "model_type of the draft layers is 'bert'; known are"),
        (
            {"eagle_aux_hidden_state_layer_ids": "2"},
            "eagle_aux_hidden_state_layer_ids is '2'; it must be a list of layer",
        ),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm are both true"),
        ({"draft_vocab_size": 99}, "draft_vocab_size is 99; it must be an integer from 1 to vocab_size 64"),
    ],
)
def test_speculators_config_that_makes_no_sense_raises(
    change: Fields, message: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    config, tensors = as_speculators_eagle3(make_eagle3(target, **DEFAULT_TAPS))
    save(tmp_path, config | change, tensors)
    with pytest.raises(
        ValueError, match=rf"config.json of .* does not describe a EAGLE-3 \(speculators\) drafter. {message}"
    ):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("make", "write", "change", "message"),
    [
        (make_dflash, as_zlab, {"mask_token_id": 2}, "mask_token_id is 2 at the top level and 1 in dflash_config"),
        (
            make_dflash,
            as_zlab,
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 2], "block_size": 4}},
            "block_size is 5 at the top level and 4 in dflash_config",
        ),
        (
            make_dflash,
            as_speculators_dflash,
            {"sliding_window_non_causal": True},
            "sliding_window_non_causal is true, and transformer_layer_config.is_causal too",
        ),
        (make_specblock, as_specblock, {"block_size": 9}, "block_size is 9 and diffspec_draft_token_num 3"),
    ],
)
def test_field_with_two_values_raises_and_said_twice_is_fine(
    make: Any, write: Any, change: Fields, message: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    drafter = make(target)
    speculators = {"aux_hidden_state_layer_ids": [1, 3], "layer": {"is_causal": True}}
    config, tensors = write(drafter, **(speculators if write is as_speculators_dflash else {}))
    config |= {"block_size": drafter.config.block_size}
    save(tmp_path, config, tensors)
    load_drafter(tmp_path, target)
    save(tmp_path, config | change, tensors)
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path)
    assert message in inspect_drafter(tmp_path).problems[0]


def test_window_of_no_size_raises(target: PreTrainedModel, tmp_path: Path) -> None:
    save(tmp_path, *as_zlab(make_dflash(target), block_size=5, dflash_config={"use_swa": True}))
    with pytest.raises(ValueError, match="use_swa is set, but neither swa_window_size nor sliding_window gives"):
        load_drafter(tmp_path)


def test_speculators_dflash_without_layer_ids_raises(target: PreTrainedModel, tmp_path: Path) -> None:
    save(tmp_path, *as_speculators_dflash(make_dflash(target)))
    with pytest.raises(ValueError, match="aux_hidden_state_layer_ids is missing"):
        load_drafter(tmp_path)


def test_drafter_of_another_target_raises_and_names_the_right_one(target: PreTrainedModel, tmp_path: Path) -> None:
    save(tmp_path, *as_speculators_eagle3(make_eagle3(target, **DEFAULT_TAPS)))
    narrow = make_target("llama", "sdpa", torch.float32, num_hidden_layers=LAYERS, hidden_size=48)
    with pytest.raises(
        ValueError, match="hidden states of size 32, but target .* hidden_size 48.*use 'owner/right-target'"
    ):
        load_drafter(tmp_path, narrow)


# Medusa heads.


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "model.safetensors"])
def test_medusa_heads_are_counted_by_their_tensors(
    prefix: str, file: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    drafter = make_medusa(target, medusa_num_heads=5, medusa_num_layers=2)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "owner/base"}
    save(tmp_path, config, as_medusa(drafter, prefix), file)
    loaded = load_drafter(tmp_path, target, tree_budget=9)
    assert len(loaded.heads) == 5
    assert loaded.config.target_name_or_path == "owner/base"
    output, trees = run(target, loaded)
    assert output == target.generate(**one_prompt(), max_new_tokens=6, do_sample=False).tolist()
    assert trees == run(target, drafter)[1]


def test_medusa_heads_without_matrices_use_the_targets(target: PreTrainedModel, tmp_path: Path) -> None:
    drafter = make_medusa(target, own_head=False)
    save(tmp_path, {"medusa_num_heads": 3}, as_medusa(drafter), "medusa_lm_head.pt")
    assert run(target, load_drafter(tmp_path, target, tree_budget=9)) == run(target, drafter)


def test_heads_in_the_files_of_their_own_target_load_beside_it(target: PreTrainedModel, tmp_path: Path) -> None:
    """Medusa-2: transformers loads the model, and leaves the heads out; they are a drafter for it."""
    heads = make_medusa(target)
    config = json.loads(target.config.to_json_string()) | {
        "architectures": ["LlamaForCausalLM"], "medusa_num_heads": 2, "base_model_name_or_path": "owner/base",
    }  # fmt: skip
    save(tmp_path, config, {**target.state_dict(), **as_medusa(heads, "medusa_head.")})
    own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=target.dtype).eval()
    with pytest.warns(
        UserWarning, match=r"Medusa-2\).*fit only that model, so load the target from the same checkpoint"
    ):
        loaded = load_drafter(tmp_path, own, tree_budget=9)
    assert loaded.config.target_name_or_path is None
    assert len(loaded.heads) == 3
    assert run(own, loaded) == run(target, heads)


def test_medusa_heads_with_a_gap_raise(target: PreTrainedModel, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in as_medusa(make_medusa(target)).items() if not name.startswith("1.")}
    save(tmp_path, {"medusa_num_heads": 3}, tensors, "medusa_lm_head.pt")
    with pytest.raises(ValueError, match=r"The stored heads have the numbers \[0, 2\], with gaps"):
        load_drafter(tmp_path)
