"""Hosts that differ from those that were tested: an error or plain decoding, never other text, never silence."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.specifiers import SpecifierSet
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer
from transformers.generation import utils as generation

from hf_specdec.decoding import upstream
from hf_specdec.decoding.upstream import CACHE, TESTED
from tests.chains import assisted_loop
from tests.scripted import right_for
from tests.targets import fresh_target, one_prompt, ragged_prompts

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
ROOT = Path(__file__).parents[2]


def assert_decoded_plainly(target: Any, inputs: dict[str, Tensor], reason: str, **settings: Any) -> None:
    alone = target.generate(**inputs, **GREEDY)
    drafter = right_for(3, alone, siblings=0)
    with pytest.warns(UserWarning, match=rf"{reason}.*the target decodes it plainly"):
        assisted = target.generate(**inputs, **GREEDY, **settings, assistant_model=drafter)
    assert assisted.tolist() == alone.tolist()
    assert drafter.stats.num_spec_steps == 0


def padded_prompt() -> dict[str, Tensor]:
    prompts = ragged_prompts()
    row = int(prompts["attention_mask"].sum(1).argmin())
    return {name: value[row : row + 1] for name, value in prompts.items()}


def test_a_cache_that_is_cropped_by_one_entry_too_few_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    crop = DynamicLayer.crop
    monkeypatch.setattr(DynamicLayer, "crop", lambda self, tokens: crop(self, min(tokens + 1, 0)))
    with assisted_loop():
        assert_decoded_plainly(fresh_target("llama", "sdpa"), one_prompt(), "in a trial, several tokens")


def test_an_assisted_loop_that_drops_the_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_mask(model_kwargs: dict[str, Any], *args: Any) -> dict[str, Any]:
        return {name: value for name, value in model_kwargs.items() if name != "attention_mask"}

    monkeypatch.setattr(generation, "_prepare_attention_mask", without_mask)
    assert not padded_prompt()["attention_mask"].all()
    with assisted_loop():
        assert_decoded_plainly(fresh_target("llama", "sdpa"), padded_prompt(), "in a trial, several tokens")


class OwnCache(LlamaForCausalLM):
    """Writes into a cache of the caller, whatever it is given, and gets a tensor that nobody knows in every step."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, cache: Any = None,
        past_key_values: Any = None, shift: Any = 0, **kwargs: Any,
    ) -> Any:  # fmt: skip
        kwargs |= {CACHE: self.__dict__["own"], "position_ids": position_ids + shift}
        return super().forward(input_ids, attention_mask=attention_mask, **kwargs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return super().prepare_inputs_for_generation(*args, **kwargs) | {"shift": torch.tensor([[5]])}


def test_plain_decoding_does_not_begin_on_a_cache_that_a_refused_draft_has_filled() -> None:
    # As a host does that has another name for the cache.
    target, cache = fresh_target("llama", "sdpa"), DynamicCache()
    target.__class__, target.__dict__["own"] = OwnCache, cache
    drafter = right_for(3, torch.zeros(1, 99, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"gets \['shift'\].*held \{.*: 0\} tokens before the refusal and"):
        target.generate(**one_prompt(), **GREEDY, **{CACHE: cache}, assistant_model=drafter)


class NodesMove(LlamaForCausalLM):
    """Shifts the positions of several tokens after cached ones."""

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE)
        if cache is not None and cache.get_seq_length() and position_ids is not None and position_ids.shape[-1] > 1:
            position_ids = 3 * position_ids
        return super().forward(*args, position_ids=position_ids, **kwargs)


@pytest.mark.parametrize("prompts", [one_prompt, ragged_prompts, padded_prompt])
def test_a_newer_host_is_compared_with_plain_decoding_and_refused_where_it_differs(
    prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "TESTED", ("5.15", "5.16"))
    target = fresh_target("llama", "sdpa")
    target.__class__ = NodesMove
    assert_decoded_plainly(target, prompts(), "is newer than .*greedy tokens of this call were")


@pytest.mark.parametrize("chains", [False, True])
def test_a_newer_host_that_is_alike_is_reported_once(chains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "TESTED", ("5.15", "5.16"))
    target = fresh_target("llama", "sdpa")
    alone = target.generate(**one_prompt(), **GREEDY)
    said = []
    for _ in range(2):
        drafter = right_for(3, alone, siblings=0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if chains:
                with assisted_loop():
                    assisted = target.generate(**one_prompt(), **GREEDY, assistant_model=drafter)
            else:
                assisted = target.generate(**one_prompt(), **GREEDY, assistant_model=drafter)
        assert assisted.tolist() == alone.tolist()
        assert drafter.stats.num_accepted_draft_tokens > 0
        said.append([str(each.message) for each in caught if "equal those of plain decoding" in str(each.message)])
    assert [len(each) for each in said] == [1, 0]


def test_project_documents_and_environments_name_the_tested_versions() -> None:
    oldest, newest = TESTED
    major, minor = newest.split(".")
    above = f"{major}.{int(minor) + 1}"
    project = (ROOT / "pyproject.toml").read_text()
    assert f'"transformers>={oldest},<{above}"' in project
    bounds = SpecifierSet(f">={oldest},<{above}")
    assert transformers.__version__ in bounds
    newest_constraint = re.findall(
        r"^transformers==(\S+) ; python_version >=", (ROOT / "constraints.txt").read_text(), re.M
    )
    assert [version.rpartition(".")[0] for version in newest_constraint] == [newest]
    assert f"transformers=={oldest}." in (ROOT / "Makefile").read_text()
    for page in ("README.md", "docs/guarantees.md"):
        assert f"transformers {oldest} to {newest}" in (ROOT / page).read_text()
