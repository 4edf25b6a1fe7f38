"""Layers with states but without a rule in `rules.py`: they run level by level, from the state of each node's parent.

Each level calls the layer's own decoding step with one token per row, so the result is exact for any layer. A round
calls the layer once per level of the tree, and keeps the states after all nodes.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer

from hf_specdec.decoding.once import once_per_model, undisturbed
from hf_specdec.decoding.targets.modules import home_of, num_tokens
from hf_specdec.decoding.targets.nodes import NodesOfRound, current_nodes, on_token_rows
from hf_specdec.decoding.targets.recurrent import RecurrentLayer, copy_flags
from hf_specdec.decoding.upstream import cache_name


@once_per_model
def state_modules(model: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """The modules that read and write the states of cache layers, with the index of the layer.

    Found in a forward: the modules that run when the cache is updated, without those inside another such module.
    """
    cache = DynamicCache(config=model.config)
    running: list[nn.Module] = []
    found: list[tuple[nn.Module, int]] = []
    handles: list[RemovableHandle] = []

    thread = threading.get_ident()  # others may run the same model

    def begins(module: nn.Module, args: Any) -> None:
        if threading.get_ident() == thread:
            running.append(module)

    def ends(module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == thread:
            running.pop()

    for module in model.modules():
        handles += [module.register_forward_pre_hook(begins), module.register_forward_hook(ends, always_call=True)]
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionLayer):
            for name in ("update_conv_state", "update_recurrent_state"):
                update = getattr(layer, name)

                def recorded(*args: Any, _update: Any = update, _index: int = index, **kwargs: Any) -> Any:
                    found.append((running[-1], _index))
                    return _update(*args, **kwargs)

                setattr(layer, name, recorded)
    ids = 3 + torch.arange(5, device=home_of(model.get_input_embeddings())).unsqueeze(0)
    try:
        with torch.no_grad(), on_token_rows(), undisturbed(model):
            model(input_ids=ids % num_tokens(model), use_cache=True, **{cache_name(model): cache})
    finally:
        for handle in handles:
            handle.remove()
    inside = {id(part) for module, _ in found for part in module.modules() if part is not module}
    return list(dict.fromkeys(each for each in found if id(each[0]) not in inside))


@contextmanager
def stepping(model: PreTrainedModel) -> Iterator[None]:
    """In this context, the modules with states run level by level in rounds.

    Several threads may use it at the same time with one model; the last one to leave restores the original forwards.
    """
    with _IN_USE_LOCK:
        users, before = _IN_USE.get(model, (0, []))
        if not users:
            before = [(module.__dict__, module.__dict__.get("forward")) for module, _ in state_modules(model)]
            for module, index in state_modules(model):
                module.__dict__["forward"] = _stepped(module.forward, index)
        _IN_USE[model] = users + 1, before
    try:
        yield
    finally:
        with _IN_USE_LOCK:
            users, before = _IN_USE.pop(model)
            if users > 1:
                _IN_USE[model] = users - 1, before
            else:
                for attributes, forward in before:
                    del attributes["forward"]
                    attributes.update({} if forward is None else {"forward": forward})


# By model: the number of users of `stepping`; and of each module its attributes and the original forward among them.
_IN_USE: weakref.WeakKeyDictionary[PreTrainedModel, tuple[int, list[tuple[dict[str, Any], Any]]]] = (
    weakref.WeakKeyDictionary()
)
_IN_USE_LOCK = threading.Lock()
# Models whose layers with states run level by level, because the rules failed in a trial (`trial.py`).
STEPPED: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


def _stepped(forward: Callable[..., Any], index: int) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        nodes = current_nodes()
        caches = [each for each in (*args, *kwargs.values()) if isinstance(each, Cache)]
        if nodes is None or not caches or not isinstance(caches[0].layers[index], RecurrentLayer):
            return forward(*args, **kwargs)
        return _levels(forward, caches[0], index, nodes, args, kwargs)

    return run


def _levels(
    forward: Callable[..., Any], cache: Cache, index: int, nodes: NodesOfRound, args: Any, kwargs: dict[str, Any]
) -> Any:
    layer: Any = cache.layers[index]
    bases = [kind[number] for kind, number in layer.states()]
    device, first = bases[0].device, nodes.first
    parents, depths = nodes.parents(device), nodes.ancestors(device).sum(-1) - 1
    batch, count = parents.shape
    after = [base.new_empty(batch, count, *base.shape[1:]) for base in bases]
    for states, earlier in zip(after, layer.tape.after, strict=False):
        states[:, :first] = earlier[:, :first]
    is_new = torch.arange(count, device=device) >= first
    outputs: Any = None
    for depth in sorted(set(depths[:, first:].flatten().tolist())):
        row, node = ((depths == depth) & is_new).nonzero(as_tuple=True)
        above = parents[row, node]
        level_cache = copy.copy(cache)
        level_cache.layers = list(cache.layers)
        level_cache.layers[index] = step = LinearAttentionLayer(layer.number_of_states)
        copy_flags(layer, step)
        for (kind, number), base, states in zip(layer.states(), bases, after, strict=True):
            from_parent = states[row, above.clamp(min=0)]
            start = base[row].where((above < 0).view(-1, *[1] * (base.dim() - 1)), from_parent)
            (step.conv_states if kind is layer.conv_states else step.recurrent_states)[number] = start

        def of_level(value: Any, row: Tensor = row, node: Tensor = node, level_cache: Cache = level_cache) -> Any:
            if value is cache:
                return level_cache
            if isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (batch, count - first):
                return value[row, node - first].unsqueeze(1)
            if isinstance(value, (tuple, list)):
                return type(value)(map(of_level, value))
            return {name: of_level(each) for name, each in value.items()} if isinstance(value, dict) else value

        with on_token_rows():
            level_outputs = forward(*map(of_level, args), **{name: of_level(value) for name, value in kwargs.items()})
        outputs = _put(outputs, level_outputs, (batch, count - first), row, node - first)
        for (kind, number), states in zip(layer.states(), after, strict=True):
            states[row, node] = (step.conv_states if kind is layer.conv_states else step.recurrent_states)[number]
    layer.tape.after = after
    return outputs


def _put(outputs: Any, of_level: Any, shape: tuple[int, int], row: Tensor, node: Tensor) -> Any:
    """Writes the outputs of a level, [nodes of the level, 1, ...], into `outputs` [batch, new, ...]."""
    if isinstance(of_level, Tensor):
        outputs = of_level.new_zeros(*shape, *of_level.shape[2:]) if outputs is None else outputs
        outputs[row, node] = of_level[:, 0]
        return outputs
    if isinstance(of_level, (tuple, list)):
        before = [None] * len(of_level) if outputs is None else outputs
        return tuple(_put(old, new, shape, row, node) for old, new in zip(before, of_level, strict=True))
    return of_level
