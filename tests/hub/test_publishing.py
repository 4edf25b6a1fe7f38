"""save_pretrained and push_to_hub: the published layout, the records beside the weights, and the card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from transformers import PreTrainedModel

from hf_specdec import load_drafter
from hf_specdec.hub.card import MARKER
from hf_specdec.hub.custom_generate import CODE_FILE
from hf_specdec.methods.dflash.network import DFlashConfig, DFlashDrafter
from hf_specdec.methods.specbranch.network import OWN_DRAFT_MODEL
from tests.hub.loopback_hub import TOKEN, LoopbackHub
from tests.method_table import (
    make_causal_lm,
    make_ddtree,
    make_eagle3,
    make_medusa,
    make_specblock,
    make_specbound,
    make_specbranch,
)
from tests.targets import one_prompt

MEASUREMENTS: dict[str, Any] = {
    "target": "owner/target",
    "command": "python examples/quickstart.py --json measurements.json",
    "hardware": "2 CPU cores",
    "methods": {"ddtree": {"mean_acceptance_length": 3.14, "speedup": 2.25, "identical": True}},
}
TRAINING = {
    "data": "own continuations of 9,000 functions",
    "hardware": "2 CPU cores",
    "time": "2 h",
    "losses": {"ce": 1.5},
}


def change_config(folder: Path, **fields: Any) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return config


# The files.


def test_saved_layout_is_the_published_one(folder: Path, drafter: DFlashDrafter) -> None:
    assert sorted(file.name for file in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"mask_token_id": 1, "target_layer_ids": [0, 2]}
    assert config["block_size"] == 5
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        names = set(tensors.keys())
    layer = ["input_layernorm", "post_attention_layernorm", *(f"mlp.{part}_proj" for part in ("gate", "up", "down"))]
    layer += [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    expected = {f"layers.{index}.{part}.weight" for index in range(2) for part in layer}
    assert names == expected | {"fc.weight", "hidden_norm.weight", "norm.weight"}


PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "num_target_layers": 4,
    "torch_dtype": "bfloat16",
    "is_encoder_decoder": False,
    "temperature": 0.7,
    "some_later_key": None,
    "transformers_version": "4.51.0",
}


@pytest.mark.filterwarnings("ignore:.*later.*=None, which the reader of dflash does not know:UserWarning")
@pytest.mark.parametrize(
    "own",
    [
        {"block_size": 5, "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 2]}, "rope_theta": 5e5},
        {
            "dflash_config": {"mask_token_id": 1, "block_size": 5, "later": None},
            "rope_theta": 5e5,
            "rope_scaling": None,
        },
        {"dflash_config": {"mask_token_id": 1, "block_size": 5, "use_swa": True, "swa_window_size": 64}},
        {
            "dflash_config": {"mask_token_id": 1, "block_size": 5, "causal": False},
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 64,
            "use_sliding_window": False,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
            "final_logit_softcapping": 30.0,
        },
        {"block_size": 5, "dflash_config": {"mask_token_id": 1}, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
    ids=["block_size at the top", "block_size nested", "use_swa", "sliding layers", "older rope scaling"],
)
def test_config_survives_unchanged(own: dict[str, Any], tmp_path: Path) -> None:
    published = PUBLISHED | own
    (tmp_path / "config.json").write_text(json.dumps(published))
    drafter = DFlashDrafter(DFlashConfig.from_pretrained(tmp_path)).to(torch.bfloat16)
    drafter.save_pretrained(tmp_path / "once")
    loaded = load_drafter(tmp_path / "once")
    loaded.save_pretrained(tmp_path / "twice")
    for folder in ("once", "twice"):
        saved = json.loads((tmp_path / folder / "config.json").read_text())
        assert {key: saved.get(key, "absent") for key in published} == published
        assert set(saved) - set(published) <= {"dtype"}  # beside torch_dtype, which older loaders read
    assert loaded.config.rope_parameters == drafter.config.rope_parameters
    assert loaded.num_slots == 5


def test_what_changed_since_is_written(tmp_path: Path) -> None:
    own = {"block_size": 5, "dflash_config": {"mask_token_id": 1}, "rope_theta": 5e5}
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | own))
    drafter = DFlashDrafter(DFlashConfig.from_pretrained(tmp_path))
    drafter.config.target_name_or_path = "owner/target"
    drafter.config.rope_parameters = {"rope_type": "default", "rope_theta": 7e5}
    drafter.to(torch.float16).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["target_name_or_path"] == "owner/target"
    assert saved["torch_dtype"] == saved["dtype"] == "float16"
    assert saved["rope_theta"] == saved["rope_parameters"]["rope_theta"] == 7e5


@pytest.mark.filterwarnings("ignore:.* has some_later_key=None:UserWarning")
def test_block_size_that_is_said_twice_stays_the_same_in_both_places(tmp_path: Path) -> None:
    own = {"block_size": 5, "dflash_config": {"mask_token_id": 1, "block_size": 5}}
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | own))
    drafter = DFlashDrafter(DFlashConfig.from_pretrained(tmp_path))
    drafter.config.block_size = 4
    drafter.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["block_size"] == saved["dflash_config"]["block_size"] == 4
    assert load_drafter(tmp_path / "saved").num_slots == 4


def test_saving_where_it_was_loaded_from_keeps_the_weights(folder: Path, drafter: DFlashDrafter) -> None:
    loaded = load_drafter(folder)
    loaded.save_pretrained(folder)
    for name, tensor in load_drafter(folder).state_dict().items():
        torch.testing.assert_close(tensor, drafter.state_dict()[name], rtol=0, atol=0)


def weights_of(drafter: Any) -> dict[str, torch.Tensor]:
    return dict(getattr(drafter, "model", drafter).state_dict())


@pytest.mark.parametrize("make", [make_ddtree, make_eagle3, make_medusa, make_specblock, make_causal_lm])
def test_what_was_saved_last_is_loaded_whatever_shards_it_is_in(
    make: Any, target: PreTrainedModel, tmp_path: Path
) -> None:
    make(target, seed=0).save_pretrained(tmp_path)
    for seed, size in ((1, "20KB"), (2, "50GB"), (3, "30KB"), (4, "20KB")):
        drafter = make(target, seed=seed)
        drafter.save_pretrained(tmp_path, max_shard_size=size)
        sharded = size != "50GB"
        assert (tmp_path / "model.safetensors").exists() is not sharded
        assert (tmp_path / "model.safetensors.index.json").exists() is sharded
        loaded = weights_of(load_drafter(tmp_path))
        assert all(torch.equal(tensor, loaded[name]) for name, tensor in weights_of(drafter).items())


def test_draft_model_that_was_saved_last_is_loaded_whatever_shards_lay_there(
    target: PreTrainedModel, tmp_path: Path
) -> None:
    shards = tmp_path / OWN_DRAFT_MODEL
    make_causal_lm(target, seed=0).model.save_pretrained(shards, max_shard_size="20KB")
    drafter = make_specbranch(target, seed=1)
    drafter.save_pretrained(tmp_path)
    assert drafter.draft_model is not None
    assert [file.name for file in shards.glob("model*")] == ["model.safetensors"]
    loaded: Any = load_drafter(tmp_path)
    assert all(
        torch.equal(tensor, loaded.draft_model.state_dict()[name])
        for name, tensor in drafter.draft_model.state_dict().items()
    )


def test_a_save_that_fails_leaves_the_earlier_shards_loadable(
    drafter: DFlashDrafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter.save_pretrained(tmp_path, max_shard_size="20KB")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", fail)
    with pytest.raises(OSError, match="no space left"):
        drafter.save_pretrained(tmp_path)
    assert torch.equal(load_drafter(tmp_path).fc.weight, drafter.fc.weight)


def test_saving_to_a_file_raises(drafter: DFlashDrafter, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(NotADirectoryError, match="Cannot save a drafter to '.*taken': it is a file. Give a folder."):
        drafter.save_pretrained(tmp_path / "taken")


# The card and the records.


def test_edited_card_is_kept_and_a_generated_one_is_renewed(folder: Path, drafter: DFlashDrafter) -> None:
    card = folder / "README.md"
    assert MARKER in card.read_text()
    assert "Not measured." in card.read_text()
    drafter.measurements = MEASUREMENTS
    drafter.save_pretrained(folder)
    assert "2.25x" in card.read_text()
    card.write_text(card.read_text().replace(MARKER, "Mine now."))
    drafter.measurements = None
    drafter.save_pretrained(folder)
    assert "Mine now." in card.read_text()
    assert "2.25x" in card.read_text()


def test_records_travel_with_the_weights(folder: Path, tmp_path: Path) -> None:
    (folder / "measurements.json").write_text(json.dumps(MEASUREMENTS))
    (folder / "training.json").write_text(json.dumps(TRAINING))
    load_drafter(folder).save_pretrained(tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / "measurements.json").read_text()) == MEASUREMENTS
    assert json.loads((tmp_path / "copy" / "training.json").read_text()) == TRAINING
    card = (tmp_path / "copy" / "README.md").read_text()
    assert "| greedy | ddtree | 3.14 | 2.25x | yes |" in card
    assert "own continuations of 9,000 functions" in card


def test_records_are_written_beside_saved_weights(folder: Path, tmp_path: Path) -> None:
    drafter = load_drafter(folder)
    drafter.measurements = MEASUREMENTS
    drafter.write_records(folder)
    assert load_drafter(folder).measurements == MEASUREMENTS
    assert "3.14" in (folder / "README.md").read_text()
    with pytest.raises(NotADirectoryError, match="Cannot write records to '.*absent': it is not a folder"):
        drafter.write_records(tmp_path / "absent")


def test_measurements_of_replaced_weights_are_removed(folder: Path, drafter: DFlashDrafter) -> None:
    (folder / "measurements.json").write_text(json.dumps(MEASUREMENTS))
    drafter.save_pretrained(folder)  # the same weights: they hold
    assert "2.25x" in (folder / "README.md").read_text()
    drafter.measurements = None
    drafter.fc.weight.data += 1
    with pytest.warns(
        UserWarning, match="measurements.json was removed: it was measured with the weights that were replaced"
    ):
        drafter.save_pretrained(folder)
    assert not (folder / "measurements.json").exists()
    assert "Not measured." in (folder / "README.md").read_text()


def test_measurements_of_a_replaced_draft_model_are_removed(target: PreTrainedModel, tmp_path: Path) -> None:
    first = make_causal_lm(target)
    first.measurements = MEASUREMENTS
    first.save_pretrained(tmp_path)
    load_drafter(tmp_path).save_pretrained(tmp_path)  # the same weights: they hold
    assert "2.25x" in (tmp_path / "README.md").read_text()
    with pytest.warns(UserWarning, match="measurements.json was removed"):
        make_causal_lm(target, seed=1).save_pretrained(tmp_path)
    assert "2.25x" not in (tmp_path / "README.md").read_text()


def test_training_record_of_replaced_weights_is_removed(
    folder: Path, drafter: DFlashDrafter, target: PreTrainedModel
) -> None:
    (folder / "training.json").write_text(json.dumps(TRAINING | {"license": "lgpl-3.0"}))
    drafter.save_pretrained(folder)  # the same weights: it holds
    assert load_drafter(folder).training_record is not None
    further: Any = load_drafter(folder)
    further.fc.weight.data += 1
    further.save_pretrained(folder)  # trained further: its own
    assert "own continuations of 9,000 functions" in (folder / "README.md").read_text()
    with pytest.warns(UserWarning, match="training.json was removed: it describes the weights that were replaced"):
        make_ddtree(target, seed=5).save_pretrained(folder)
    loaded: Any = load_drafter(folder)
    assert loaded.training_record is None
    assert "lgpl" not in (folder / "README.md").read_text()
    own = make_ddtree(target, seed=6)
    own.training_record = {"data": "mine"}
    own.save_pretrained(folder)
    loaded = load_drafter(folder)
    assert loaded.training_record == {"data": "mine"}


def test_record_that_is_no_json_is_left_aside_with_a_warning(folder: Path) -> None:
    (folder / "training.json").write_text("{'data'")
    with pytest.warns(UserWarning, match="Ignoring .*training.json: invalid JSON"):
        assert load_drafter(folder).training_record is None


# The Hub.


def test_pushed_drafter_loads_and_drafts_the_same(
    hub: LoopbackHub, drafter: DFlashDrafter, target: PreTrainedModel
) -> None:
    drafter.config.target_name_or_path, drafter.config.target_revision = "owner/target", "0123abc"
    drafter.measurements, drafter.training_record = MEASUREMENTS, TRAINING
    commit = drafter.push_to_hub("me/drafter", token=TOKEN, license="apache-2.0", tags=["code"])
    assert commit.oid == hub.repos["me/drafter"].branches["main"]
    files = hub.repos["me/drafter"].files()
    records = {"measurements.json", "training.json"}
    assert set(files) == {"README.md", "config.json", "model.safetensors", CODE_FILE, *records}
    card = ModelCard(files["README.md"].decode())
    assert card.data.base_model == "owner/target"
    assert card.data.license == "apache-2.0"
    assert {"speculative-decoding", "dflash", "code"} <= set(card.data.tags)
    assert "`owner/target` at revision `0123abc`" in card.text
    assert 'load_drafter("me/drafter", target)' in card.text
    assert MEASUREMENTS["command"] in card.text

    loaded = load_drafter("me/drafter", target, tree_budget=drafter.options.tree_budget)
    settings: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    sequences = [target.generate(**one_prompt(), **settings, assistant_model=each) for each in (drafter, loaded)]
    assert sequences[0].tolist() == sequences[1].tolist()
    assert loaded.stats.per_step_accepted == drafter.stats.per_step_accepted


def test_pushing_again_renews_a_generated_card_and_keeps_an_edited_one(
    hub: LoopbackHub, drafter: DFlashDrafter
) -> None:
    drafter.push_to_hub("me/drafter", token=TOKEN)
    drafter.measurements = MEASUREMENTS
    drafter.push_to_hub("me/drafter", token=TOKEN)
    repo = hub.repos["me/drafter"]
    assert b"2.25x" in repo.files()["README.md"]
    repo.commit(repo.files() | {"README.md": b"# Mine"})
    drafter.push_to_hub("me/drafter", token=TOKEN, commit_message="Third")
    assert repo.files()["README.md"] == b"# Mine"


def test_pushing_leaves_no_shards_of_an_earlier_push(hub: LoopbackHub, drafter: DFlashDrafter) -> None:
    drafter.push_to_hub("me/drafter", token=TOKEN, max_shard_size="20KB")
    assert "model.safetensors.index.json" in hub.repos["me/drafter"].files()
    drafter.push_to_hub("me/drafter", token=TOKEN)
    assert set(hub.repos["me/drafter"].files()) == {"README.md", "config.json", "model.safetensors", CODE_FILE}


def test_pushing_leaves_no_records_of_earlier_weights(hub: LoopbackHub, drafter: DFlashDrafter) -> None:
    drafter.measurements, drafter.training_record = MEASUREMENTS, TRAINING
    for _ in range(2):  # what is uploaded again is not deleted
        drafter.push_to_hub("me/drafter", token=TOKEN)
        loaded = load_drafter("me/drafter")
        assert (loaded.measurements, loaded.training_record) == (MEASUREMENTS, TRAINING)
    drafter.measurements = drafter.training_record = None
    drafter.fc.weight.data.zero_()
    drafter.push_to_hub("me/drafter", token=TOKEN)
    loaded = load_drafter("me/drafter")
    assert (loaded.measurements, loaded.training_record) == (None, None)


def test_pushing_leaves_no_files_of_another_family(hub: LoopbackHub, drafter: DFlashDrafter, target: Any) -> None:
    make_specbound(target).push_to_hub("me/drafter", token=TOKEN)
    make_specbranch(target).push_to_hub("me/drafter", token=TOKEN)
    assert not [name for name in hub.repos["me/drafter"].files() if name.startswith("exit-layer-")]
    drafter.push_to_hub("me/drafter", token=TOKEN)
    assert set(hub.repos["me/drafter"].files()) == {"README.md", "config.json", "model.safetensors", CODE_FILE}


def test_pushed_exit_heads_keep_the_options_of_the_moment(hub: LoopbackHub, target: PreTrainedModel) -> None:
    drafter = make_specbound(target)
    drafter.set_options(threshold=0.9, w_max=3)
    drafter.push_to_hub("me/exits", token=TOKEN)
    loaded: Any = load_drafter("me/exits")
    assert (loaded.options.threshold, loaded.options.w_max) == (0.9, 3)
    assert b"threshold 0.9, alpha 0.2, w_max 3" in hub.repos["me/exits"].files()["README.md"]


def test_pushing_to_a_branch_of_a_private_repo(hub: LoopbackHub, drafter: DFlashDrafter) -> None:
    drafter.push_to_hub("drafter", token=TOKEN, private=True, revision="trial")
    repo = hub.repos["me/drafter"]
    assert repo.private
    assert "model.safetensors" in repo.files("trial")
    assert not repo.files("main")
    card = repo.files("trial")["README.md"].decode()
    assert 'load_drafter("me/drafter", target, revision="trial")' in card
    assert "custom_generate=" not in card  # transformers takes that from the main branch alone


def test_tag_names_the_pushed_commit(hub: LoopbackHub, drafter: DFlashDrafter) -> None:
    first = drafter.push_to_hub("me/drafter", token=TOKEN, tag="v1")
    drafter.fc.weight.data.zero_()
    drafter.push_to_hub("me/drafter", token=TOKEN, tag="v2")
    assert hub.repos["me/drafter"].tags["v1"] == first.oid
    assert load_drafter("me/drafter", revision="v1").fc.weight.any()
    assert not load_drafter("me/drafter", revision="v2").fc.weight.any()
    before = hub.repos["me/drafter"].files()
    drafter.fc.weight.data.fill_(1)
    with pytest.raises(OSError, match="'me/drafter' already has the tag 'v1', .*; nothing was uploaded"):
        drafter.push_to_hub("me/drafter", token=TOKEN, tag="v1")
    assert hub.repos["me/drafter"].tags["v1"] == first.oid
    assert hub.repos["me/drafter"].files() == before


def test_interrupted_upload_leaves_the_repo_as_it_was_and_can_be_repeated(
    hub: LoopbackHub, drafter: DFlashDrafter
) -> None:
    drafter.push_to_hub("me/drafter", token=TOKEN)
    before = hub.repos["me/drafter"].files()
    drafter.fc.weight.data.zero_()
    hub.hang_up_at = ["/commit/"]
    with pytest.raises(OSError, match="Cannot publish to 'me/drafter': the Hub cannot be reached"):
        drafter.push_to_hub("me/drafter", token=TOKEN)
    assert hub.repos["me/drafter"].files() == before
    drafter.push_to_hub("me/drafter", token=TOKEN)
    assert not load_drafter("me/drafter").fc.weight.any()


def test_one_tag_for_the_card_is_one_tag(hub: LoopbackHub, drafter: DFlashDrafter) -> None:
    drafter.push_to_hub("me/drafter", token=TOKEN, tags="code")
    tags = ModelCard(hub.repos["me/drafter"].files()["README.md"].decode()).data.tags
    assert tags[-1] == "code"
    assert "c" not in tags
    assert drafter.model_card(tags="code").data.tags == tags


def test_saving_with_push_to_hub_hands_on_the_shard_size(
    hub: LoopbackHub, drafter: DFlashDrafter, target: PreTrainedModel, tmp_path: Path
) -> None:
    drafter.save_pretrained(tmp_path, push_to_hub=True, repo_id="me/drafter", token=TOKEN, max_shard_size="20KB")
    assert "model.safetensors.index.json" in hub.repos["me/drafter"].files()


def test_card_that_is_not_in_utf_8_stays(hub: LoopbackHub, folder: Path, drafter: DFlashDrafter) -> None:
    theirs = f"{MARKER}\nGrüße".encode("latin-1")
    (folder / "README.md").write_bytes(theirs)
    drafter.save_pretrained(folder)
    assert (folder / "README.md").read_bytes() == theirs
    drafter.push_to_hub("me/drafter", token=TOKEN)
    repo = hub.repos["me/drafter"]
    repo.commit(repo.files() | {"README.md": theirs})
    drafter.push_to_hub("me/drafter", token=TOKEN)
    assert repo.files()["README.md"] == theirs


def test_saving_with_push_to_hub(hub: LoopbackHub, drafter: DFlashDrafter, tmp_path: Path) -> None:
    drafter.save_pretrained(tmp_path / "named", push_to_hub=True, token=TOKEN)
    assert "model.safetensors" in hub.repos["me/named"].files()
    assert (tmp_path / "named" / "README.md").exists()


@pytest.mark.parametrize("token", [None, "hf_wrong"])
def test_pushing_without_write_access_raises(hub: LoopbackHub, drafter: DFlashDrafter, token: str | None) -> None:
    message = (
        "Cannot publish to 'me/drafter': the Hub refused with status 401. Log in with `hf auth login` or pass token="
    )
    with pytest.raises(OSError, match=message):
        drafter.push_to_hub("me/drafter", token=token)
    assert not hub.repos


def test_pushing_without_a_stored_token_raises(hub: LoopbackHub, drafter: DFlashDrafter) -> None:
    with pytest.raises(OSError, match="no token is stored. Run `hf auth login`, or pass token="):
        drafter.push_to_hub("me/drafter", token=True)


def test_pushing_offline_raises(drafter: DFlashDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match=r"offline mode is on \(HF_HUB_OFFLINE=1\). Unset it, or use save_pretrained"):
        drafter.push_to_hub("me/drafter", token=TOKEN)


def test_pushing_to_a_hub_that_cannot_be_reached_raises(hub: LoopbackHub, drafter: DFlashDrafter) -> None:
    hub.__exit__()
    with pytest.raises(OSError, match="Cannot publish to 'me/drafter': the Hub cannot be reached"):
        drafter.push_to_hub("me/drafter", token=TOKEN)


def test_measurements_without_a_command_are_not_published(hub: LoopbackHub, drafter: DFlashDrafter) -> None:
    drafter.measurements = {key: value for key, value in MEASUREMENTS.items() if key != "command"}
    with pytest.raises(ValueError, match="measurements.json: 'command' is None, but must be a str"):
        drafter.push_to_hub("me/drafter", token=TOKEN)
    assert not hub.requests


def test_target_that_others_cannot_load_warns(hub: LoopbackHub, drafter: DFlashDrafter, tmp_path: Path) -> None:
    drafter.config.target_name_or_path = str(tmp_path)
    with pytest.warns(UserWarning, match="which others cannot load: set drafter.config.target_name_or_path"):
        drafter.push_to_hub("me/drafter", token=TOKEN)
    assert str(tmp_path) not in hub.repos["me/drafter"].files()["README.md"].decode()


def test_adapters_beside_the_weights_are_pushed_renewed_and_loaded(hub: LoopbackHub, target: PreTrainedModel) -> None:
    make_specbound(target).push_to_hub("me/exits", token=TOKEN)
    drafter = make_specbound(target, exit_layers=[2], d_max=2)
    drafter.push_to_hub("me/exits", token=TOKEN)
    adapters = {file for file in hub.repos["me/exits"].files() if file.startswith("exit-layer-")}
    assert adapters == {"exit-layer-02/adapter_config.json", "exit-layer-02/adapter_model.safetensors"}
    loaded = load_drafter("me/exits", target, token=TOKEN)
    assert torch.equal(loaded.heads["2"].lora_B, drafter.heads["2"].lora_B)
