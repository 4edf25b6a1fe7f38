"""The code that a pushed drafter carries: transformers' own `custom_generate` finds it and drafts with the drafter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers.dynamic_module_utils
import transformers.utils.hub
from huggingface_hub import snapshot_download
from transformers import PreTrainedModel

from hf_specdec.methods.dflash.network import DFlashDrafter
from tests.hub.loopback_hub import TOKEN, LoopbackHub
from tests.targets import one_prompt

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(autouse=True)
def own_module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Code from repos is copied here, and forgotten afterwards."""
    modules = tmp_path / "modules"
    for module in (transformers.dynamic_module_utils, transformers.utils.hub):
        monkeypatch.setattr(module, "HF_MODULES_CACHE", str(modules), raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


@pytest.fixture
def pushed(hub: LoopbackHub, drafter: DFlashDrafter) -> str:
    drafter.push_to_hub("me/drafter", token=TOKEN)
    return "me/drafter"


def test_generate_by_the_repos_name_drafts_with_its_drafter(pushed: str, target: PreTrainedModel) -> None:
    plain = target.generate(**one_prompt(), **GREEDY)
    for options in ({}, {"tree_budget": 3}):  # the second call finds drafter and code at hand
        output = target.generate(
            **one_prompt(),
            **GREEDY,
            custom_generate=pushed,
            trust_remote_code=True,
            drafting_options=options,
            return_dict_in_generate=True,
        )
        assert output.sequences.tolist() == plain.tolist()
        assert output.speculation.method == "ddtree"
        rounds = len(output.speculation.per_step_accepted[0])
        assert output.speculation.num_draft_tokens > rounds
    assert output.speculation.num_draft_tokens <= 3 * rounds


def test_options_are_those_of_one_call(pushed: str, target: PreTrainedModel) -> None:
    def draft_tokens(**options: Any) -> int:
        output = target.generate(
            **one_prompt(),
            **GREEDY,
            custom_generate=pushed,
            trust_remote_code=True,
            drafting_options=options,
            return_dict_in_generate=True,
        )
        return output.speculation.num_draft_tokens

    alone = draft_tokens()
    assert draft_tokens(tree_budget=3) < alone
    for wrong in ({"tree_budget": -1}, {"tree_bugdet": 3}):
        with pytest.raises(ValueError, match="tree_budget"):
            draft_tokens(**wrong)
    assert draft_tokens() == alone


def test_generate_with_a_folder_of_the_repo(pushed: str, target: PreTrainedModel, tmp_path: Path) -> None:
    folder = snapshot_download(pushed, local_dir=tmp_path / "copy")
    plain = target.generate(**one_prompt(), **GREEDY)
    for drafter in ({}, {"drafter": folder}):
        output = target.generate(
            **one_prompt(),
            **GREEDY,
            custom_generate=folder,
            trust_remote_code=True,
            return_dict_in_generate=True,
            **drafter,
        )
        assert output.sequences.tolist() == plain.tolist()
        assert output.speculation.num_draft_tokens > 0


def test_nothing_runs_without_trust(pushed: str, target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="contains custom generation code|trust_remote_code"):
        target.generate(**one_prompt(), **GREEDY, custom_generate=pushed, trust_remote_code=False)


def test_second_assistant_is_refused(pushed: str, target: PreTrainedModel, drafter: DFlashDrafter) -> None:
    with pytest.raises(ValueError, match="loads its own drafter; leave assistant_model out"):
        target.generate(
            **one_prompt(), **GREEDY, custom_generate=pushed, trust_remote_code=True, assistant_model=drafter
        )
