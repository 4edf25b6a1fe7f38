"""Ways to bend the output of a pair: each must be caught by `verify_lossless` on every processor and in every dtype."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.decoding import loop
from hf_specdec.decoding.accept import Acceptor, Verdict
from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.exchange import DraftContext
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.drafter import Drafter
from tests.method_table import make_causal_lm, make_causal_lm_chain
from tests.scripted import StubDrafter, fixed_tree


class Relaxed(Acceptor):
    """Likes what was drafted: a drafted token counts for more than the target says."""

    def __call__(self, tree: DraftTree, logits: Tensor, *others: Any) -> Verdict:
        bent = logits.clone()
        for node in range(1, tree.num_nodes):
            rows = torch.arange(len(bent))
            bent[rows, tree.parents[:, node], tree.token_ids[:, node]] += 1.0
        return super().__call__(tree, bent, *others)


class Warmer(Acceptor):
    """Chooses by another law: that of twice the temperature."""

    def __call__(self, tree: DraftTree, logits: Tensor, *others: Any) -> Verdict:
        return super().__call__(tree, logits / 2, *others)


SOUND = fixed_tree([3, 4, 5, 6, 7, 8], [0, 0, 0, 1, 2, 3])


def seeing_siblings(context: DraftContext) -> DraftTree:
    tree = SOUND.draft(context)
    return replace(tree, ancestor_mask=torch.ones_like(tree.ancestor_mask).tril())


def one_place_late(context: DraftContext) -> DraftTree:
    tree = SOUND.draft(context)
    return replace(tree, depths=tree.depths + (tree.depths > 0).to(tree.depths.dtype))


def drafting_likeliest(target: PreTrainedModel) -> Drafter:
    """Drafts the likeliest tokens and says that it has drawn them."""
    honest = make_causal_lm_chain(target, seed=1)
    make = honest.candidate_generator

    def lying(model: TargetModel) -> Any:
        generator: Any = make(model)
        draft = generator.draft

        def likeliest(context: DraftContext) -> DraftTree:
            tree = draft(context)
            if tree.draft_probs is None:
                return tree
            token_ids = torch.cat([tree.token_ids[:, :1], tree.draft_probs.argmax(-1)], dim=1)
            return replace(tree, token_ids=token_ids)

        generator.draft = likeliest
        return generator

    honest.candidate_generator = lying  # type: ignore[assignment, method-assign]
    return honest


def drafting_best_last(target: PreTrainedModel) -> StubDrafter:
    """What the target likes best, the best of it last: often accepted, and seldom the first node."""

    def draft(context: DraftContext) -> DraftTree:
        logits = target(context.sequences[:, : context.lengths[0]], use_cache=False).logits[:, -1]
        token_ids = torch.cat([context.root_ids[:, None], logits.topk(8).indices.flip(-1)], dim=1)
        return DraftTree.from_parents(token_ids, torch.tensor([[-1] + 8 * [0]]), max_depth=1)

    return StubDrafter(draft)


def commit_first(cache: TreeCache, path: Tensor, counts: Counts) -> None:
    """Keeps the entries of the first nodes in place of those of the accepted path."""
    cache.commit_first(counts)


def rule(wrong: type) -> Callable[[], AbstractContextManager[object]]:
    return lambda: patch.object(loop, "Acceptor", wrong)


# name: (makes a drafter for a target, what is wrong meanwhile, which of the report's verdicts must say so)
FAULTS: dict[str, tuple[Callable[[PreTrainedModel], Drafter], Callable[[], AbstractContextManager[object]], str]] = {
    "relaxed rule on fixed drafts": (make_causal_lm, rule(Relaxed), "sampled"),
    "relaxed rule on drawn drafts": (make_causal_lm_chain, rule(Relaxed), "sampled"),
    "warmer rule on fixed drafts": (make_causal_lm, rule(Warmer), "sampled"),
    "warmer rule on drawn drafts": (make_causal_lm_chain, rule(Warmer), "sampled"),
    "drafts not drawn from their law": (drafting_likeliest, nullcontext, "sampled"),
    "nodes see their siblings": (lambda target: StubDrafter(seeing_siblings), nullcontext, "verified"),
    "nodes are one place late": (lambda target: StubDrafter(one_place_late), nullcontext, "verified"),
    "the cache keeps other nodes": (
        drafting_best_last,
        lambda: patch.object(TreeCache, "commit", commit_first),
        "verified",
    ),
}
