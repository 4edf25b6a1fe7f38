"""EAGLE-3 in one `generate` call: the draft tree, grown level by level after the pairs of `pairs.py`.

Each level extends the `top_k` likeliest nodes of the previous one by their `top_k` likeliest tokens. The likeliest
`tree_budget` of all these nodes form the tree. The probability is the drafter's, along the whole path. Source: EAGLE-2,
arXiv 2406.16858, Sections 4.1 and 4.2 (expansion and reranking), unchanged in EAGLE-3, arXiv 2503.01840.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from hf_specdec.decoding.devices import in_inference_mode
from hf_specdec.decoding.generator import DraftContext, TreeCandidateGenerator
from hf_specdec.decoding.graphs import prefix_bucket
from hf_specdec.decoding.logits_process import TargetVocabularyLogitsProcessor
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.trace import NodeNotes
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.eagle3.pairs import PairCache
from hf_specdec.drafters.growth import best_tree, captured_tree, grow_levels, path_notes


class Eagle3Generator(PairCache, TreeCandidateGenerator):
    """Draft trees of an EAGLE-3 drafter: its nodes follow the pairs in the cache, and are dropped after the draft."""

    drops_rows = True

    def __init__(self, drafter: Any, target: TargetModel) -> None:  # an Eagle3Drafter, or one with its interface
        options = drafter.options
        self.depth, self.top_k, self.tree_budget = options.depth, options.top_k, options.node_limit
        room = (self.depth - 1) * self.top_k
        super().__init__(drafter, target, depth=self.depth, room=room, compile_mode=options.compile_mode)
        self.drafts_early = self.calls is not None
        self.path_logprobs: Any  # [batch, nodes], of the latest tree

    @in_inference_mode
    def draft(self, context: DraftContext) -> DraftTree:
        outputs = self.append_pairs(context.root_ids)
        tree = self._grow(outputs, context)
        assert self.cache is not None
        self.cache.rollback()
        context.lap("tree")
        return tree

    def _grow(self, outputs: Tensor, context: DraftContext) -> DraftTree:
        """The tree below each row's root; `outputs` [batch, hidden] are the drafter's at the roots."""
        cache, device = self.cache, self.drafter.device
        assert cache is not None
        root_ids = context.root_ids.to(device)
        values = (outputs, context.root_positions.to(device), cache.lengths)
        if self.calls is None:
            levels = self.levels(cache.longest, *values)
        else:
            at = prefix_bucket(cache.longest)
            cache.place_nodes(at)
            cache.reserve(self.room)
            key = ("levels", self.depth, self.top_k, self.vocab_size, at, cache.addresses)
            levels = self.calls(key, functools.partial(_levels, at), *values)
        context.lap("draft")
        build = functools.partial(best_tree, depth=self.depth, budget=self.tree_budget)
        if self.calls is None:
            tree = build(root_ids, *levels)
        else:
            tree = captured_tree(self.calls, self.tree_budget, self.depth, build, root_ids, *levels)
        self.path_logprobs = tree.path_logprobs
        return tree

    def levels(self, at: int, outputs: Tensor, root_positions: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        """All candidates, level after level: scores, token ids, parents (see `best_tree`), and which rows are finite.

        Args:
            at: where the nodes' entries begin in the cache, after those of the pairs.
            outputs: [batch, hidden], the drafter's at the roots.
            root_positions: [batch] int64.
            lengths: [batch] int64, pairs of each row.
        """
        drafter, cache = self.drafter, self.cache
        assert cache is not None
        batch = outputs.shape[0]
        width = min(self.top_k, drafter.config.draft_vocab_size)
        positions = root_positions.unsqueeze(1)
        rows = torch.arange(batch, device=outputs.device).unsqueeze(1)
        itself = torch.eye(width, dtype=torch.bool, device=outputs.device).expand(batch, width, width)
        # Of the level above: the drafter's outputs, and the nodes of this round that each node sees.
        last, block = outputs.unsqueeze(1), itself.new_empty(batch, 1, 0)

        def extend(level: int, token_ids: Tensor, above: Tensor) -> Tensor:
            nonlocal last, block
            block = torch.cat([block[rows, above], itself], dim=-1)
            with cache.writing_after((level - 1) * width):
                last = drafter(
                    self.embed(token_ids),
                    drafter.recurrent(last)[rows, above],
                    (positions + level - 1).expand(-1, width),
                    mask=self.additive(block, at, lengths),
                    cache=cache,
                )
            return self._logits(last)

        return grow_levels(self._logits(outputs), extend, self.depth, width, drafter.to_target_ids)

    def _logits(self, outputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., draft_vocab] float32; tokens that the target lacks get -inf."""
        logits = self.drafter.logits(outputs)
        if self.drafter.config.maps_vocabulary:  # `check_target` has checked that the map has only the target's tokens
            return logits
        return TargetVocabularyLogitsProcessor(self.vocab_size)(None, logits)

    def describe(self, tree: DraftTree) -> NodeNotes:
        return path_notes(tree, self.path_logprobs, tree.depths)  # one forward per level


def _levels(at: int, generator: Eagle3Generator, *values: Tensor) -> tuple[Tensor, ...]:
    return generator.levels(at, *values)
