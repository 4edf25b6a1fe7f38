"""load_drafter on Hub ids, with the real client against a Hub on loopback: what is fetched, and what failures say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specdec import inspect_drafter, load_drafter
from hf_specdec.methods.dflash.network import DFlashDrafter
from hf_specdec.methods.specbranch import SpecBranchDrafter
from tests.hub.layouts import as_medusa, save
from tests.hub.loopback_hub import TOKEN, LoopbackHub
from tests.method_table import make_medusa, make_specbranch
from tests.targets import fresh_target, one_prompt, tiny_tokenizer


def same_weights(first: Any, second: Any) -> bool:
    return all(bool((tensor == second.state_dict()[name]).all()) for name, tensor in first.state_dict().items())


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Switches the client offline, as HF_HUB_OFFLINE=1 does at start."""
    return lambda: monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_only_config_weights_and_records_are_fetched(hub: LoopbackHub, folder: Path, drafter: DFlashDrafter) -> None:
    for name in ("pytorch_model.bin", "training_state.pt", "dflash.py", "vocab.txt", "optimizer.safetensors"):
        (folder / name).write_bytes(b"?" * 100)
    (folder / "training.json").write_text('{"data": "own continuations"}')
    hub.add("owner/drafter", folder)
    loaded = load_drafter("owner/drafter")
    assert same_weights(loaded, drafter)
    assert loaded.name_or_path == "owner/drafter"
    assert loaded.training_record == {"data": "own continuations"}
    assert hub.downloaded() == {"config.json", "model.safetensors", "training.json"}


def test_drafter_in_a_subfolder_is_fetched(
    hub: LoopbackHub, folder: Path, drafter: DFlashDrafter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = tmp_path / "bundle"
    fresh_target("llama").save_pretrained(bundle)
    folder.rename(bundle / "dflash")
    hub.add("owner/bundle", bundle)
    for place in ("owner/bundle", str(bundle)):
        assert same_weights(load_drafter(place, subfolder="dflash"), drafter)
        assert inspect_drafter(place, subfolder="dflash").family == "dflash"
        assert "No files matched" not in caplog.text
        with pytest.raises(FileNotFoundError, match="no config.json in its subfolder 'other': .* Found here: dflash"):
            load_drafter(place, subfolder="other")
        caplog.clear()
    with pytest.raises(ValueError, match="subfolder='x' was given for 'ngram', which has no checkpoint"):
        load_drafter("ngram", subfolder="x")


def test_sharded_weights_are_fetched(hub: LoopbackHub, folder: Path, drafter: DFlashDrafter) -> None:
    (folder / "model.safetensors").unlink()
    drafter.save_pretrained(folder, max_shard_size="20KB")
    hub.add("owner/drafter", folder)
    assert same_weights(load_drafter("owner/drafter"), drafter)


def test_medusa_heads_load_from_safetensors_of_their_own_name(
    hub: LoopbackHub, target: PreTrainedModel, tmp_path: Path
) -> None:
    heads = make_medusa(target)
    for file in ("medusa_lm_head.pt", "medusa_lm_head.safetensors"):
        save(tmp_path, {"medusa_num_heads": 3}, as_medusa(heads), file)
    hub.add("owner/heads", tmp_path)
    found = inspect_drafter("owner/heads")
    assert (found.problems, found.files) == ([], ["medusa_lm_head.safetensors"])
    assert same_weights(load_drafter("owner/heads", target), heads)
    assert hub.downloaded() == {"config.json", "medusa_lm_head.safetensors"}


def test_what_does_not_fit_is_refused_before_weights_are_fetched(hub: LoopbackHub, folder: Path) -> None:
    hub.add("owner/drafter", folder)
    with pytest.raises(ValueError, match="Did you mean 'tree_budget'"):
        load_drafter("owner/drafter", tree_bugdet=4)
    with pytest.raises(ValueError, match="Drafter 'owner/drafter' reads target hidden states of size 32"):
        load_drafter("owner/drafter", fresh_target("llama", hidden_size=48))
    assert hub.downloaded() == {"config.json"}


@pytest.fixture
def named_target(target: PreTrainedModel, tmp_path: Path) -> PreTrainedModel:
    """A target that was loaded from a folder with its tokenizer."""
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "target")


@pytest.fixture
def draft_model(target: PreTrainedModel, tmp_path: Path) -> Path:
    """A plain language model with a tokenizer in which ids 30 and 40 have changed places."""
    target.save_pretrained(tmp_path / "draft")
    tiny_tokenizer().save_pretrained(tmp_path / "draft")
    file = tmp_path / "draft" / "tokenizer.json"
    content = json.loads(file.read_text())
    names = {token_id: token for token, token_id in content["model"]["vocab"].items()}
    content["model"]["vocab"] |= {names[30]: 40, names[40]: 30}
    file.write_text(json.dumps(content))
    return tmp_path / "draft"


def test_draft_model_of_another_tokenizer_is_refused_before_its_weights_are_fetched(
    hub: LoopbackHub, draft_model: Path, named_target: PreTrainedModel, tmp_path: Path
) -> None:
    wrong = hub.add("owner/draft", draft_model)
    tiny_tokenizer().save_pretrained(draft_model)
    hub.add("owner/draft", draft_model)
    with pytest.raises(ValueError, match="'owner/draft' and target .* have different tokenizers: id 30 is"):
        load_drafter("owner/draft", named_target, revision=wrong, cache_dir=tmp_path / "elsewhere")
    assert not {name for name in hub.downloaded() if name.endswith(".safetensors")}
    load_drafter("owner/draft", named_target)
    late = load_drafter("owner/draft", revision=wrong)
    with pytest.raises(ValueError, match="have different tokenizers: id 30 is"):
        named_target.generate(**one_prompt(), max_new_tokens=2, assistant_model=late)


def test_draft_model_beside_a_drafter_is_compared_by_tokenizer(
    hub: LoopbackHub, draft_model: Path, named_target: PreTrainedModel, tmp_path: Path
) -> None:
    hub.add("owner/draft", draft_model)
    pair = make_specbranch(named_target)
    pair.config.draft_model = "owner/draft"
    pair.save_pretrained(tmp_path / "pair")
    with pytest.raises(ValueError, match="'owner/draft' and target .* have different tokenizers: id 30 is"):
        load_drafter(tmp_path / "pair", named_target).check_target(named_target)


def test_draft_model_beside_a_drafter_is_refused_without_all_its_weights(
    hub: LoopbackHub, draft_model: Path, target: PreTrainedModel, tmp_path: Path
) -> None:
    tensors = load_file(draft_model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, draft_model / "model.safetensors", {"format": "pt"})
    hub.add("owner/partial", draft_model)
    pair = make_specbranch(target)
    pair.config.draft_model = "owner/partial"
    pair.save_pretrained(tmp_path / "pair")
    with pytest.raises(ValueError, match="weights of 'owner/partial' are not those .*missing: model.norm.weight"):
        load_drafter(tmp_path / "pair")


def pair_of_a_published_draft_model(
    hub: LoopbackHub, target: PreTrainedModel, folder: Path, *, private: bool = False
) -> SpecBranchDrafter:
    """A pair whose draft model is owner/draft on the Hub, saved to `folder`/pair."""
    pair = make_specbranch(target)
    assert pair.draft_model is not None
    pair.draft_model.save_pretrained(folder / "draft")
    hub.add("owner/draft", folder / "draft", private=private)
    pair.config.draft_model = "owner/draft"
    pair.save_pretrained(folder / "pair")
    return pair


def test_draft_model_beside_a_drafter_is_fetched_as_the_drafter_is(
    hub: LoopbackHub, target: PreTrainedModel, tmp_path: Path
) -> None:
    pair = pair_of_a_published_draft_model(hub, target, tmp_path, private=True)
    with pytest.raises(
        OSError, match="draft model of .*pair' cannot be loaded. .*'owner/draft'.*local_files_only=True"
    ):
        load_drafter(tmp_path / "pair", local_files_only=True, cache_dir=tmp_path / "mine")
    assert not hub.requests
    with pytest.raises(OSError, match="no repo of that id on the Hub that you may read"):
        load_drafter(tmp_path / "pair", cache_dir=tmp_path / "mine")
    first = load_drafter(tmp_path / "pair", token=TOKEN, cache_dir=tmp_path / "mine")
    asked = len(hub.requests)
    second = load_drafter(tmp_path / "pair", local_files_only=True, cache_dir=tmp_path / "mine")
    assert len(hub.requests) == asked
    assert first.draft_model.name_or_path == second.draft_model.name_or_path == "owner/draft"
    assert same_weights(first.draft_model, pair.draft_model)
    assert not Path(huggingface_hub.constants.HF_HUB_CACHE).exists()


def test_draft_model_beside_a_drafter_that_was_changed_on_the_way_is_refused(
    hub: LoopbackHub, target: PreTrainedModel, tmp_path: Path
) -> None:
    pair_of_a_published_draft_model(hub, target, tmp_path)
    hub.altered = {"model.safetensors"}
    with pytest.raises(OSError, match="was downloaded with the hash"):
        load_drafter(tmp_path / "pair")


def test_pushed_pair_takes_its_draft_model_along(hub: LoopbackHub, target: PreTrainedModel, tmp_path: Path) -> None:
    pair = make_specbranch(target)
    assert pair.draft_model is not None
    pair.draft_model.save_pretrained(tmp_path / "draft")
    for place in ("../draft", str(tmp_path / "draft")):
        pair.config.draft_model = place
        pair.push_to_hub("me/pair", token=TOKEN)
        files = hub.repos["me/pair"].files()
        assert json.loads(files["config.json"])["draft_model"] == "draft_model"
        assert str(tmp_path) not in files["README.md"].decode()
        assert same_weights(load_drafter("me/pair", target).draft_model, pair.draft_model)
        assert pair.config.draft_model == place
    pair.config.draft_model = "owner/draft"
    pair.push_to_hub("me/pair", token=TOKEN)
    assert not [name for name in hub.repos["me/pair"].files() if name.startswith("draft_model/")]


def test_revision_names_a_branch_or_a_commit(hub: LoopbackHub, folder: Path, drafter: DFlashDrafter) -> None:
    first = hub.add("owner/drafter", folder)
    drafter.fc.weight.data.zero_()
    drafter.save_pretrained(folder)
    hub.add("owner/drafter", folder, branch="zeroed")
    assert load_drafter("owner/drafter").fc.weight.any()
    assert not load_drafter("owner/drafter", revision="zeroed").fc.weight.any()
    assert load_drafter("owner/drafter", revision=first).fc.weight.any()


def test_private_repo_loads_with_its_token(hub: LoopbackHub, folder: Path) -> None:
    hub.add("owner/drafter", folder, private=True)
    load_drafter("owner/drafter", token=TOKEN)


def test_unknown_repo_raises(hub: LoopbackHub) -> None:
    message = "no folder 'owner/absent' here and no repo of that id .*`hf auth login` or pass token=, or give the path"
    with pytest.raises(OSError, match=message) as raised:
        load_drafter("owner/absent")
    assert isinstance(raised.value.__cause__, RepositoryNotFoundError)


def test_private_repo_without_token_raises(hub: LoopbackHub, folder: Path) -> None:
    hub.add("owner/drafter", folder, private=True)
    with pytest.raises(OSError, match="for a private repo log in with `hf auth login` or pass token="):
        load_drafter("owner/drafter")


def test_gated_repo_raises(hub: LoopbackHub, folder: Path) -> None:
    hub.add("owner/drafter", folder, gated=True)
    with pytest.raises(OSError, match="Access to 'owner/drafter' is restricted.*Accept its conditions") as raised:
        load_drafter("owner/drafter")
    assert isinstance(raised.value.__cause__, GatedRepoError)


def test_unknown_revision_raises(hub: LoopbackHub, folder: Path) -> None:
    hub.add("owner/drafter", folder)
    message = "'owner/drafter' is on the Hub but has no revision 'v9'. Leave revision out"
    with pytest.raises(OSError, match=message) as raised:
        load_drafter("owner/drafter", revision="v9")
    assert isinstance(raised.value.__cause__, RevisionNotFoundError)


def test_repo_without_config_or_weights_raises(hub: LoopbackHub, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    hub.add("owner/no-weights", folder)
    with pytest.raises(FileNotFoundError, match="'owner/no-weights' has neither model.safetensors nor"):
        load_drafter("owner/no-weights")
    (folder / "config.json").unlink()
    (folder / "params.json").write_text("{}")
    hub.add("owner/no-config", folder)
    with pytest.raises(OSError, match="'owner/no-config' has no config.json, so it is not a drafter"):
        load_drafter("owner/no-config")


def test_file_that_arrives_incomplete_raises(hub: LoopbackHub, folder: Path) -> None:
    hub.add("owner/drafter", folder)
    hub.cut_short.add("model.safetensors")
    message = r"(?s)'owner/drafter' could not be downloaded \(OSError: Consistency check failed.*Try again, or give"
    with pytest.raises(OSError, match=message) as raised:
        load_drafter("owner/drafter")
    assert isinstance(raised.value.__cause__, OSError)
    hub.cut_short.clear()
    load_drafter("owner/drafter")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_file_whose_hash_does_not_match_raises_and_is_not_kept(
    hub: LoopbackHub, folder: Path, name: str, drafter: DFlashDrafter
) -> None:
    hub.add("owner/drafter", folder)
    hub.altered.add(name)
    message = (
        rf"{name} was downloaded with the hash \w+..., but has the hash \w+... on the Hub: it was damaged or changed"
    )
    with pytest.raises(OSError, match=message):
        load_drafter("owner/drafter")
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
    assert not [file for file in cache.rglob("*") if file.name == name]
    hub.altered.clear()
    assert same_weights(load_drafter("owner/drafter"), drafter)


def test_cached_repo_loads_offline(hub: LoopbackHub, folder: Path, offline: Any) -> None:
    hub.add("owner/drafter", folder)
    online = load_drafter("owner/drafter")
    asked = len(hub.requests)
    assert same_weights(load_drafter("owner/drafter", local_files_only=True), online)
    offline()
    assert same_weights(load_drafter("owner/drafter"), online)
    assert len(hub.requests) == asked


def test_repo_that_is_not_cached_raises_offline(no_token: None, offline: Any) -> None:
    offline()
    message = (
        r"no folder 'owner/drafter' here, the files of 'owner/drafter' at revision 'v1' are not all in the Hub cache, "
        r"and offline mode is on \(HF_HUB_OFFLINE=1\). To download them unset HF_HUB_OFFLINE, or give the path"
    )
    with pytest.raises(OSError, match=message) as raised:
        load_drafter("owner/drafter", revision="v1")
    assert isinstance(raised.value.__cause__, LocalEntryNotFoundError)


def test_repo_that_is_not_cached_raises_with_local_files_only(hub: LoopbackHub, folder: Path) -> None:
    hub.add("owner/drafter", folder)
    with pytest.raises(OSError, match="local_files_only=True was given. To download them leave local_files_only out"):
        load_drafter("owner/drafter", local_files_only=True)
    assert not hub.requests


def test_repo_cached_without_its_weights_raises_offline(hub: LoopbackHub, folder: Path, offline: Any) -> None:
    hub.add("owner/drafter", folder)
    with pytest.raises(ValueError, match="tree_budget=0"):
        load_drafter("owner/drafter", tree_budget=0)  # leaves the config in the cache and nothing else
    offline()
    with pytest.raises(OSError, match="'owner/drafter'.*(not all in the Hub cache|neither model.safetensors nor)"):
        load_drafter("owner/drafter")


def test_hub_that_cannot_be_reached_raises(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.__exit__()
    message = r"the Hub cannot be reached \(ConnectError: .*\). To download them check the connection"
    with pytest.raises(OSError, match=message):
        load_drafter("owner/drafter")


@pytest.mark.parametrize("name", ["./absent", "/no/such/folder", "~/absent-drafter", "owner/drafter/b16"])
def test_path_that_is_not_there_raises(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"no folder '{name}', and it cannot be a Hub id, .*'owner/name'"):
        load_drafter(name)


def test_name_that_is_neither_path_nor_id_raises() -> None:
    with pytest.raises(ValueError, match="'my drafter' is neither a folder here nor a Hub id") as raised:
        load_drafter("my drafter")
    assert isinstance(raised.value.__cause__, HFValidationError)


def test_file_in_place_of_a_folder_raises(folder: Path) -> None:
    with pytest.raises(NotADirectoryError, match="is a file; give the folder of config.json"):
        load_drafter(folder / "model.safetensors")


def test_local_folder_wins_over_an_id_of_the_same_name(
    hub: LoopbackHub, folder: Path, target: PreTrainedModel, chdir: Callable[[Path], None]
) -> None:
    shutil.copytree(folder, folder.parent / "owner" / "drafter")
    chdir(folder.parent)
    load_drafter("owner/drafter", target)
    assert not hub.requests
