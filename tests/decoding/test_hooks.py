"""Functions that users put into the forwards of a target: whatever they do, the output is that of plain decoding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from hf_specdec import attach
from hf_specdec.decoding.targets.hooks import foreign_functions, names_of
from tests.chains import assisted_loop
from tests.method_table import METHODS
from tests.targets import fresh_target

PROMPT = {"input_ids": torch.tensor([[5, 9, 23, 7], [0, 12, 4, 31]]), "max_new_tokens": 24, "do_sample": False}
PROMPT["attention_mask"] = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
VECTOR = 0.5 * torch.randn(32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def states_of(output: Any) -> Tensor:
    states: Tensor = output if isinstance(output, Tensor) else output[0]
    return states


def at_the_last(module: nn.Module, args: Any, output: Any) -> None:
    states_of(output)[:, -1] += VECTOR


def at_the_first(module: nn.Module, args: Any, output: Any) -> None:
    states_of(output)[:, 0] += VECTOR


def in_steps_of_one(module: nn.Module, args: Any, output: Any) -> None:
    if states_of(output).shape[1] == 1:
        states_of(output).add_(VECTOR)


def in_the_prompt(module: nn.Module, args: Any, output: Any) -> None:
    if states_of(output).shape[1] > 1:
        states_of(output).add_(VECTOR)


def in_the_last_row(module: nn.Module, args: Any, output: Any) -> None:
    states_of(output)[-1, -1] += VECTOR


def at_all(module: nn.Module, args: Any, output: Any) -> None:
    states_of(output).add_(VECTOR)


def by_row(module: nn.Module, args: Any, output: Any) -> Any:
    """A vector per row, so that a smaller batch is an error."""
    states = states_of(output)
    more = torch.stack([VECTOR, -VECTOR]).unsqueeze(1).expand(-1, states.shape[1], -1)
    return (torch.stack([*states]) + more) if isinstance(output, Tensor) else (states + more, *output[1:])


def before(module: nn.Module, args: Any, kwargs: Any) -> None:
    (args[0] if args else kwargs["hidden_states"])[:, -1] += VECTOR


def wrap(layer: Any) -> None:
    forward = layer.forward

    def steered(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        at_the_last(layer, args, output)
        return output

    layer.forward = steered


# What a user does to a layer, and whether drafts can be verified with it.
WAYS: dict[str, tuple[Any, bool]] = {
    "at_the_last": (lambda layer: layer.register_forward_hook(at_the_last), False),
    "at_the_first": (lambda layer: layer.register_forward_hook(at_the_first), False),
    "in_steps_of_one": (lambda layer: layer.register_forward_hook(in_steps_of_one), False),
    "in_the_prompt": (lambda layer: layer.register_forward_hook(in_the_prompt), False),
    "in_the_last_row": (lambda layer: layer.register_forward_hook(in_the_last_row), False),
    "before": (lambda layer: layer.register_forward_pre_hook(before, with_kwargs=True), False),
    "steered": (wrap, False),
    "at_all": (lambda layer: layer.register_forward_hook(at_all), True),
}


def target_of(family: str) -> Any:
    target = fresh_target(family, "sdpa")
    target.generation_config.eos_token_id = None
    return target


def check(target: Any, drafter: Any, way: str, verified: bool, arguments: dict[str, Any]) -> None:
    alone = target.generate(**arguments)
    if verified:
        assisted = target.generate(**arguments, assistant_model=drafter)
        assert drafter.stats.num_draft_tokens
    else:
        with pytest.warns(UserWarning, match=rf"'\S*{way}' of model.layers.2.*Nothing is drafted in this call"):
            assisted = target.generate(**arguments, assistant_model=drafter)
    assert assisted.tolist() == alone.tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3-next"])
@pytest.mark.parametrize("way", WAYS)
def test_functions_at_some_positions_only_are_found_and_named(way: str, family: str) -> None:
    target = target_of(family)
    drafter = METHODS["causal_lm_tree"](target)
    plain = target.generate(**PROMPT)
    assert target.generate(**PROMPT, assistant_model=drafter).tolist() == plain.tolist()  # it was tried without
    add, verified = WAYS[way]
    handle = add(target.model.layers[2])
    check(target, drafter, way, verified, PROMPT)
    if handle is not None:
        handle.remove()
        assert target.generate(**PROMPT, assistant_model=drafter).tolist() == plain.tolist()
        assert drafter.stats is not None
        assert drafter.stats.num_draft_tokens


@pytest.mark.parametrize("method", METHODS)
def test_no_method_drafts_past_a_steered_position(method: str) -> None:
    target = target_of("llama")
    drafter = METHODS[method](target)
    if isinstance(drafter, nn.Module):
        drafter.to(torch.float64)
    with target.model.layers[2].register_forward_hook(at_the_last):
        check(target, drafter, "at_the_last", False, PROMPT)


@pytest.mark.parametrize("method", METHODS)
def test_all_methods_draft_with_functions_that_treat_positions_alike(method: str) -> None:
    target = target_of("llama")
    drafter = METHODS[method](target)
    if isinstance(drafter, nn.Module):
        drafter.to(torch.float64)
    with target.model.layers[2].register_forward_hook(at_all):
        check(target, drafter, "at_all", True, PROMPT)


def test_rows_stay_in_the_batch_of_a_function_that_has_values_for_each() -> None:
    target = target_of("llama")
    drafter = METHODS["ngram"](target)
    with target.model.layers[2].register_forward_hook(by_row):
        end = int(target.generate(**PROMPT)[0, 6])
        check(target, drafter, "by_row", True, {**PROMPT, "eos_token_id": end, "pad_token_id": 0})


def test_a_switch_that_is_set_between_two_calls_is_seen() -> None:
    target, strength = target_of("llama"), torch.zeros((), dtype=torch.float64)

    def switched(module: nn.Module, args: Any, output: Any) -> None:
        states_of(output)[:, -1] += strength * VECTOR

    drafter = METHODS["causal_lm_tree"](target)
    with target.model.layers[2].register_forward_hook(switched):
        check(target, drafter, "switched", True, PROMPT)
        strength.fill_(1.0)
        check(target, drafter, "switched", False, PROMPT)


def test_in_low_precision_steering_is_more_than_rounding() -> None:
    target = target_of("llama").to(torch.bfloat16)
    drafter = METHODS["causal_lm_tree"](target)

    def steered(module: nn.Module, args: Any, output: Any) -> None:
        states_of(output)[:, -1] += VECTOR.to(torch.bfloat16)

    with target.model.layers[2].register_forward_hook(steered):
        check(target, drafter, "steered", False, PROMPT)


def test_chains_and_attached_drafters_are_no_exception() -> None:
    target = target_of("llama")
    drafter = METHODS["ngram"](target)
    one = {name: value[:1] if isinstance(value, Tensor) else value for name, value in PROMPT.items()}
    with target.model.layers[2].register_forward_hook(at_the_last):
        alone = target.generate(**one)
        with assisted_loop(), pytest.warns(UserWarning, match="Chains cannot be verified either"):
            assert target.generate(**one, assistant_model=drafter).tolist() == alone.tolist()
        with attach(target, drafter), pytest.warns(UserWarning, match="at_the_last"):
            assert target.generate(**one).tolist() == alone.tolist()


def test_hooks_of_all_modules_are_seen_too() -> None:
    target = target_of("llama")
    drafter = METHODS["ngram"](target)

    def everywhere(module: nn.Module, args: Any, output: Any) -> None:
        if module is target.model.layers[2]:
            at_the_last(module, args, output)

    with register_module_forward_hook(everywhere):
        alone = target.generate(**PROMPT)
        with pytest.warns(UserWarning, match=r"everywhere' of all modules"):
            assisted = target.generate(**PROMPT, assistant_model=drafter)
    assert assisted.tolist() == alone.tolist()


def test_what_this_library_puts_there_is_not_foreign() -> None:
    target = target_of("qwen3-next")
    drafter = METHODS["eagle3"](target).to(torch.float64)
    target.generate(**PROMPT, assistant_model=drafter)
    assert foreign_functions(target) == []
    handle = target.lm_head.register_forward_hook(at_all)
    assert names_of(target, foreign_functions(target)) == ["hook 'at_all' of lm_head"]
    handle.remove()
    assert foreign_functions(copy.deepcopy(target)) == []


@pytest.mark.parametrize("method", ["specbound", "ngram", "dflash"])
def test_functions_around_the_layers_count_for_methods_that_run_layers_alone(method: str) -> None:
    target = target_of("llama")
    drafter = METHODS[method](target)
    if isinstance(drafter, nn.Module):
        drafter.to(torch.float64)

    def tilted(module: nn.Module, args: Any, output: Any) -> Any:
        output.logits = output.logits + 3 * torch.randn(64, generator=torch.Generator().manual_seed(1)).double()
        return output

    with target.register_forward_hook(tilted):
        alone = target.generate(**PROMPT)
        if method == "specbound":
            with pytest.raises(ValueError, match=r"run in slices .*tilted"):
                target.generate(**PROMPT, assistant_model=drafter)
        else:
            assert target.generate(**PROMPT, assistant_model=drafter).tolist() == alone.tolist()
