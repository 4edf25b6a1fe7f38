"""Drafting options: how they are set, validated together, saved and put back."""

from __future__ import annotations

import copy
import inspect
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from hf_specdec import load_drafter
from hf_specdec.methods.causal_lm.network import CausalLMDrafter
from hf_specdec.methods.dflash.network import DFlashOptions
from hf_specdec.methods.lookup import NGramDrafter, NGramOptions
from tests.method_table import METHODS, make_causal_lm, make_ddtree, make_dflash, make_specbound, make_specbranch
from tests.targets import make_target


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("llama", "sdpa")


@pytest.mark.parametrize("method", METHODS)
def test_misspelt_names_are_refused_however_they_are_set(method: str, target: PreTrainedModel) -> None:
    drafter: Any = METHODS[method](target)
    before = asdict(drafter.options)
    for name in before:
        with pytest.raises(ValueError, match=f"Unknown drafting option '{name}_'. Did you mean '{name}'"):
            drafter.set_options(**{f"{name}_": before[name]})
        with pytest.raises(AttributeError, match=f"'{type(drafter.options).__name__}' object has no .*'{name}_'"):
            setattr(drafter.options, f"{name}_", before[name])
    assert asdict(drafter.options) == before


@pytest.mark.parametrize("method", METHODS)
def test_every_method_pauses_by_default_while_drafting_does_not_pay(method: str, target: PreTrainedModel) -> None:
    drafter: Any = METHODS[method](target)
    assert type(drafter.options).defaults(getattr(drafter, "config", None)).pauses


@pytest.mark.parametrize("method", METHODS)
def test_an_option_cannot_be_set_as_an_attribute_of_the_drafter(method: str, target: PreTrainedModel) -> None:
    drafter: Any = METHODS[method](target)
    for name in asdict(drafter.options):
        with pytest.raises(
            AttributeError,
            match=rf"{type(drafter).__name__}\.{name} is no attribute but a drafting option: set "
            rf"drafter\.options\.{name} = 3, or call drafter\.set_options\({name}=3\)\.",
        ):
            setattr(drafter, name, 3)
    with pytest.raises(AttributeError, match="method"):
        drafter.method = "another"
    drafter.remark = "something else"  # whatever is no option is the user's business
    assert drafter.remark == "something else"


@pytest.mark.parametrize("method", METHODS)
def test_the_method_in_use_is_one_of_those_on_offer(method: str, target: PreTrainedModel) -> None:
    drafter: Any = METHODS[method](target)
    offered = (*drafter.methods, "static_tree")  # of Medusa heads, to be asked for by name
    assert drafter.method in offered
    has_choice = "method" in asdict(drafter.options)
    assert has_choice == (len(drafter.methods) > 1)
    if has_choice:
        drafter.options.method = drafter.methods[-1]
        assert drafter.method == drafter.methods[-1]


@pytest.mark.parametrize("method", METHODS)
def test_options_that_are_saved_are_those_that_differ(method: str, target: PreTrainedModel) -> None:
    drafter: Any = METHODS[method](target)
    kind, config = type(drafter.options), getattr(drafter, "options_config", None)
    saved = json.loads(json.dumps(drafter.options.to_dict(config)))
    default = asdict(kind.defaults(config))
    own = asdict(drafter.options)
    of_the_machine = {"compile_mode", "speed_ratio", "worker_threads"}
    assert saved == {name: own[name] for name in own if own[name] != default[name] and name not in of_the_machine}
    again = asdict(kind.from_dict(saved, config))
    assert {name: again[name] for name in own if name not in of_the_machine} == {
        name: own[name] for name in own if name not in of_the_machine
    }
    assert kind.defaults(config).to_dict(config) == {}


@pytest.mark.parametrize("method", METHODS)
def test_a_value_of_the_wrong_kind_is_refused_by_name(method: str, target: PreTrainedModel) -> None:
    drafter: Any = METHODS[method](target)
    for name in asdict(drafter.options):
        for value in ("x", {}, [[]], ["x"], [1.5], -1, float("nan"), object()):
            with pytest.raises(ValueError, match=rf"(?s)\b{name}\b|exit layers"):
                drafter.set_options(**{name: value})


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (make_ddtree, {"tree_budget": 7, "block_size": 99}, "block_size=99 must be an integer from 2 to 5"),
        (NGramDrafter, {"tree_budget": 7, "shortest_suffix": 5}, "shortest_suffix=5 is larger than longest_suffix=4"),
        (make_specbound, {"w_max": 2, "d_max": 2, "use_exit_layers": [3]}, "No exit is left: d_max=2"),
        (make_specbranch, {"k_max": 2, "lengths": "fixed", "selection": "a_priori"}, "but lengths='fixed'"),
        (make_causal_lm, {"top_k": 2, "sample_drafts": 1}, "sample_drafts=1 must be True or False"),
        (make_dflash, {"tree_budget": 7, "compile_mode": "max"}, "compile_mode='max' must be one of"),
    ],
)
def test_options_are_validated_together_and_all_or_none_is_set(
    make: Any, changes: dict[str, Any], message: str, target: PreTrainedModel
) -> None:
    drafter = make() if make is NGramDrafter else make(target)
    options, before = drafter.options, asdict(drafter.options)
    with pytest.raises(ValueError, match=message):
        drafter.set_options(**changes)
    assert drafter.options is options
    assert asdict(options) == before


def test_options_that_fit_only_together_can_be_set_together() -> None:
    drafter = NGramDrafter(longest_suffix=3, shortest_suffix=2)
    drafter.set_options(longest_suffix=6, shortest_suffix=5)
    assert drafter.options == NGramOptions(longest_suffix=6, shortest_suffix=5)


def test_options_of_another_kind_are_refused(target: PreTrainedModel) -> None:
    drafter: Any = make_ddtree(target)
    for given in ({"tree_budget": 3}, NGramOptions()):
        with pytest.raises(TypeError, match=f"is a {type(given).__name__}; it must be DFlashOptions"):
            drafter.options = given
    assert drafter.options.tree_budget == 9


def test_earlier_options_can_be_put_back(target: PreTrainedModel) -> None:
    drafter = make_ddtree(target)
    before = drafter.options
    drafter.set_options(tree_budget=3, block_size=2)
    assert (before.tree_budget, before.block_size) == (9, None)
    drafter.options = before
    assert (drafter.options.node_limit, drafter.num_slots) == (9, 5)


def test_a_copied_drafter_has_options_of_its_own(target: PreTrainedModel) -> None:
    drafter = make_ddtree(target)
    other = copy.deepcopy(drafter)
    other.options.tree_budget = 3
    assert drafter.options.tree_budget == 9


def test_options_of_the_machine_are_not_saved_with_the_weights(target: PreTrainedModel, tmp_path: Path) -> None:
    drafter = make_dflash(target, tree_budget=7)
    drafter.options.compile_mode = "reduce-overhead"
    drafter.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["drafting_options"] == {
        "tree_budget": 7,
        "method": "dflash",
    }
    assert load_drafter(tmp_path).options == DFlashOptions(tree_budget=7, method="dflash")


def test_options_of_a_draft_model_are_saved_in_its_config(target: PreTrainedModel, tmp_path: Path) -> None:
    drafter: Any = make_causal_lm(target)
    drafter.set_options(method="causal_lm_chain", depth=2)
    drafter.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path)
    assert isinstance(loaded, CausalLMDrafter)
    assert loaded.options == drafter.options


def test_options_that_could_not_be_loaded_are_not_saved(target: PreTrainedModel, tmp_path: Path) -> None:
    for drafter in (make_dflash(target), make_causal_lm(target)):
        drafter.options.tree_budget = 0
        with pytest.raises(ValueError, match="tree_budget=0 must be an integer from 1 to 1024, or 'auto'"):
            drafter.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("method", METHODS)
def test_every_option_is_documented(method: str, target: PreTrainedModel) -> None:
    kind = type(METHODS[method](target).options)
    text = "\n".join(inspect.cleandoc(str(each.__doc__)) for each in kind.mro())
    assert [field.name for field in fields(kind) if f"\n    {field.name}: " not in text] == []
