"""A trial of a target, once per model: compares a small draft tree with decoding token by token.

How a family counts positions, stores states and masks attention is derived from its modules, not from its name. For
targets with more than standard attention, a trial checks the result before the first token.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.decoding import host
from hf_specdec.decoding.layers import standins
from hf_specdec.decoding.layers.entries import EntriesLayer
from hf_specdec.decoding.layers.kinds import KINDS
from hf_specdec.decoding.layers.stepped import STEPPED
from hf_specdec.decoding.modules import home_of
from hf_specdec.decoding.once import once_per_model
from hf_specdec.decoding.support import TreesRefusedError, bound_rows, keeps_states
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree

PROMPT = 5  # tokens
PARENTS = (-1, 0, 0, 1, 1, 2, 4)
# The largest difference of logits that rounding can explain, as a share of the largest logit. States are always
# computed in float32. In low precision single nodes may differ by more if rounding changes which experts run.
EXACT_SHARE, LOW_SHARE = 1e-3, 0.25


def check_trees(model: PreTrainedModel) -> None:
    """Raises TreesRefusedError if the logits of a tree's nodes differ from those of plain decoding."""
    trouble = _trees_trouble(model)
    if trouble is not None:
        raise TreesRefusedError(trouble)


def _needs_trial(model: PreTrainedModel) -> bool:
    kinds = {KINDS[type(layer)] for layer in host.cache_layers(model)}
    return bool(kinds - {EntriesLayer}) or standins.counts_entries(model)


@once_per_model
def _trees_trouble(model: PreTrainedModel) -> str | None:
    """Why trees do not work; None if they do, possibly with layers that step from node to node."""
    trouble = _tree_trouble(model) if _needs_trial(model) else None
    if trouble is None or not keeps_states(model):
        return trouble
    STEPPED.add(model)
    if _tree_trouble(model) is None:
        return None
    STEPPED.discard(model)
    return trouble


def _tree_trouble(model: PreTrainedModel) -> str | None:
    name = type(model).__name__
    try:
        found, stepped = _tree(model), _steps(model, PARENTS)
    except _WRONG as error:
        return f"In a trial, the layers of target {name} could not be run on a draft tree: {error}"
    apart = _apart(model, found, stepped)
    if apart is None:
        return None
    return (
        f"In a trial, a draft tree got logits from target {name} that differ by {apart:.3g} from those of plain "
        f"decoding (up to {stepped.abs().max():.3g}), so one of its layers ({', '.join(_layer_classes(model))}) is "
        "not supported"
    )


@once_per_model
def chains_trouble(model: PreTrainedModel) -> str | None:
    """Why the host's own loop cannot verify chains on a target, determined by running one; None if it can."""
    chain = tuple(range(-1, len(PARENTS) - 1))
    try:
        prompt, drafts = _tokens(model)
        cache = {host.cache_name(model): host.new_cache(model)}
        with torch.no_grad():
            model(input_ids=prompt, use_cache=True, **cache)
            found = model(input_ids=drafts.expand(len(prompt), -1), use_cache=True, **cache).logits[0]
        apart = _apart(model, found, _steps(model, chain))
    except _WRONG as error:
        return f"in a trial, several tokens in one forward after cached ones failed: {error}"
    if apart is None:
        return None
    return f"in a trial, several tokens in one forward after cached ones got logits that differ by {apart:.3g}"


_WRONG = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def _apart(model: PreTrainedModel, found: Tensor, stepped: Tensor) -> float | None:
    """The largest difference of logits [nodes, vocab]; None if rounding explains it."""
    apart, exact = (found - stepped).abs().amax(-1), model.dtype in (torch.float32, torch.float64)
    wrong = ~(apart <= (EXACT_SHARE if exact else LOW_SHARE) * stepped.abs().max())
    return float(apart.max()) if (bool(wrong.any()) if exact else 2 * int(wrong.sum()) > len(wrong)) else None


def _layer_classes(model: PreTrainedModel) -> list[str]:
    """Classes of the modules with a layer of the cache, which have the attribute `layer_idx`."""
    return sorted({type(module).__name__ for module in model.modules() if hasattr(module, "layer_idx")})


def _tokens(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """A prompt [rows, PROMPT] and drafts [nodes]."""
    embeddings = model.get_input_embeddings()
    ids = 3 + torch.arange(PROMPT + len(PARENTS), device=home_of(embeddings))
    ids = ids % embeddings.num_embeddings
    return ids[:PROMPT].expand(bound_rows(model) or 1, -1), ids[PROMPT:]


@torch.no_grad()
def _tree(model: PreTrainedModel) -> Tensor:
    """Logits [nodes, vocab] of the nodes of a tree."""
    target, (prompt, drafts) = TargetModel(model), _tokens(model)
    tree = DraftTree.from_lists([drafts.tolist()] * len(prompt), [list(PARENTS)] * len(prompt), device=drafts.device)
    length = PROMPT + len(PARENTS)
    with target.tapping():
        target.prefill_alone(prompt, max_length=length)
        target.begin_rounds(length)
        return target.verify(tree, target.root_positions()).logits[0]


@torch.no_grad()
def _steps(model: PreTrainedModel, parents: Sequence[int]) -> Tensor:
    """The logits of the same nodes, one token at a time, each from a copy of its parent's cache."""
    name, (prompt, drafts) = host.cache_name(model), _tokens(model)
    caches, depths, logits = {-1: host.new_cache(model)}, {-1: -1}, []
    model(input_ids=prompt, use_cache=True, **{name: caches[-1]})
    for node, parent in enumerate(parents):
        caches[node], depths[node] = copy.deepcopy(caches[parent]), depths[parent] + 1
        token = drafts[node].expand(len(prompt), 1)
        given: dict[str, Any] = {name: caches[node]}
        if host.takes_positions(model):
            given["position_ids"] = torch.full_like(token, PROMPT + depths[node])
        logits.append(model(input_ids=token, use_cache=True, **given).logits[0, -1])
    return torch.stack(logits).float()
