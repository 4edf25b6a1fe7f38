"""A trial of a target: a small draft tree against one token at a time, once per model.

How families count positions, keep states and mask attention is found out from what they look like, not from their
names. For targets with more than plain attention a trial tells whether that was right, before the first token.
"""

from __future__ import annotations

import copy
import weakref

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_specdec.decoding import host
from hf_specdec.decoding.layers.entries import EntriesLayer
from hf_specdec.decoding.layers.kinds import KINDS
from hf_specdec.decoding.support import TreesRefusedError
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree

PROMPT = 5  # tokens
PARENTS = (-1, 0, 0, 1, 1, 2, 4)
# The largest difference of logits that rounding explains, as a share of the largest logit. States are computed in
# float32 in any case. In low precision single nodes may differ by more, where rounding changes which experts run.
EXACT_SHARE, LOW_SHARE = 1e-3, 0.25


def check_trees(model: PreTrainedModel) -> None:
    """Raises TreesRefusedError if the nodes of a tree do not get the logits that plain decoding gives."""
    if model not in _TRIED:
        _TRIED[model] = _trouble(model) if _needs_trial(model) else None
    trouble = _TRIED[model]
    if trouble is not None:
        raise TreesRefusedError(trouble)


_TRIED: weakref.WeakKeyDictionary[PreTrainedModel, str | None] = weakref.WeakKeyDictionary()


def _needs_trial(model: PreTrainedModel) -> bool:
    kinds = {KINDS[type(layer)] for layer in host.cache_layers(model)}
    return bool(kinds - {EntriesLayer}) or TargetModel(model).counts_entries


def _trouble(model: PreTrainedModel) -> str | None:
    """What went wrong in a trial; None if nothing did."""
    name = type(model).__name__
    try:
        apart, largest = _apart(model)
    except (AssertionError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return f"In a trial, the layers of target {name} could not be run on a draft tree: {error}"
    exact = model.dtype in (torch.float32, torch.float64)
    wrong = apart > (EXACT_SHARE if exact else LOW_SHARE) * largest
    if bool(wrong.any()) if exact else 2 * int(wrong.sum()) > len(wrong):
        return (
            f"In a trial, a draft tree got logits from target {name} that differ by {apart.max():.3g} from those of "
            f"plain decoding (up to {largest:.3g}), so layers of it ({', '.join(_layer_classes(model))}) do something "
            "that is not known here"
        )
    return None


def _layer_classes(model: PreTrainedModel) -> list[str]:
    """Classes of the modules inside decoder layers that are given the cache, by their attribute `layer_idx`."""
    return sorted({type(module).__name__ for module in model.modules() if isinstance(_index(module), int)})


def _index(module: object) -> object:
    return getattr(module, "layer_idx", None)


@torch.no_grad()
def _apart(model: PreTrainedModel) -> tuple[Tensor, float]:
    """Largest difference of logits per node [nodes], and the largest logit."""
    target, embeddings = TargetModel(model), model.get_input_embeddings()
    count, nodes = PROMPT + len(PARENTS), len(PARENTS)
    ids = (3 + torch.arange(count, device=embeddings.weight.device)) % embeddings.num_embeddings
    prompt, drafts = ids[:PROMPT].expand(target.bound_rows or 1, -1), ids[PROMPT:]
    with target.tapping():
        target.prefill_alone(prompt, max_length=2 * count)
        target.begin_rounds(2 * count)
        tree = DraftTree.from_lists([drafts.tolist()] * len(prompt), [list(PARENTS)] * len(prompt), device=ids.device)
        found = target.verify(tree, target.root_positions()).logits[0]
    name = host.cache_name(model)
    caches = {-1: DynamicCache(config=model.config)}
    model(input_ids=prompt, use_cache=True, **{name: caches[-1]})
    expected = []
    for node in range(nodes):
        caches[node] = copy.deepcopy(caches[PARENTS[node]])
        positions = {"position_ids": PROMPT + tree.depths[:, node : node + 1]} if target.takes_positions else {}
        token = drafts[node].expand(len(prompt), 1)
        expected.append(model(input_ids=token, use_cache=True, **positions, **{name: caches[node]}).logits[0, -1])
    stepped = torch.stack(expected).float()
    return (found - stepped).abs().amax(-1), float(stepped.abs().max())
