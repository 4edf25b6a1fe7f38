"""EAGLE-3 in one `generate` call: its cache of committed pairs, and the draft tree that grows level by level.

Each level extends the `top_k` likeliest nodes of the level above by their `top_k` likeliest tokens; the likeliest
`tree_budget` of all nodes so seen are the tree. Likelihood is the drafter's, along the whole path. Source: EAGLE-2,
arXiv 2406.16858, Sections 4.1 and 4.2 (expansion and reranking), unchanged in EAGLE-3, arXiv 2503.01840.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.devices import in_inference_mode
from hf_specdec.decoding.generator import Committed, DraftContext, TreeCandidateGenerator
from hf_specdec.decoding.graphs import nodes_bucket, prefix_bucket, static_calls
from hf_specdec.decoding.logits_process import TargetVocabularyLogitsProcessor
from hf_specdec.decoding.masks import additive
from hf_specdec.decoding.static_verify import capacity_for
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.trace import NodeNotes
from hf_specdec.decoding.tree import DraftTree, from_host
from hf_specdec.drafters.base import captured_tree, path_notes
from hf_specdec.drafters.vocabulary import known_ids


class Eagle3Generator(TreeCandidateGenerator):
    """Draft trees of an EAGLE-3 drafter.

    A committed token and the target's features before it make a pair. The pairs of a round enter the cache in one
    forward, once the token after the last of them, the next root, is known; nodes are written behind them, level by
    level, and forgotten when the tree is made.
    """

    drops_rows = True

    def __init__(self, drafter: Any, target: TargetModel) -> None:  # an Eagle3Drafter, or what drafts as one
        self.drafter = drafter
        options = drafter.options
        self.depth, self.top_k, self.tree_budget = options.depth, options.top_k, options.node_limit
        self.own_embeddings = drafter.config.own_embeddings
        self.embeddings: nn.Module = (
            drafter.embed_tokens if self.own_embeddings else target.model.get_input_embeddings()
        )
        self.vocab_size: int  # columns of the target's logits
        self.cache: TreeCache | None = None
        self.pending: Committed | None = None
        self.path_logprobs: Any  # [batch, nodes], of the latest tree
        self.calls = static_calls(self, drafter, (self.embeddings,), drafter.options.compile_mode)
        self.drafts_early = self.calls is not None
        self.width = nodes_bucket(self.depth + 1)  # of what a round commits at most
        self.target = target  # its cache tells how long rows may grow
        # [batch, hidden], the drafter's output at each row's last pair.
        self.last_outputs: Tensor | None = None

    def observe(self, committed: Committed) -> None:
        self.pending = committed if self.pending is None else self.pending.followed_by(committed)
        self.vocab_size = committed.target_logits.shape[-1]

    def keep_rows(self, rows: Sequence[int]) -> None:
        if self.cache is not None:
            self.cache.keep_rows(rows)
        self.pending = None if self.pending is None else self.pending.of_rows(rows)
        if self.last_outputs is not None:
            self.last_outputs = self.last_outputs[from_host(rows, self.last_outputs.device)]

    def close(self) -> None:
        if self.calls is not None:
            self.calls.workspace.release()

    @in_inference_mode
    def draft(self, context: DraftContext) -> DraftTree:
        outputs = self._take_in(context.root_ids)
        tree = self._grow(outputs, context)
        assert self.cache is not None
        self.cache.rollback()
        context.lap("tree")
        return tree

    def _embed(self, token_ids: Tensor) -> Tensor:
        """[batch, seq] -> [batch, seq, hidden] of the drafter's dtype, on its device."""
        table: Any = self.embeddings
        if self.own_embeddings:  # a target may have tokens that this table lacks
            token_ids = known_ids(token_ids, table.num_embeddings)
        # Embedding classes of their own scale what they look up; drafters are trained on the table itself.
        embedded = table(token_ids) if type(table) is nn.Embedding else nn.functional.embedding(token_ids, table.weight)
        return embedded.to(device=self.drafter.device, dtype=self.drafter.dtype)

    def _take_in(self, root_ids: Tensor) -> Tensor:
        """Enters the pairs committed since the last round; returns each row's output at its last pair."""
        drafter, pending = self.drafter, self.pending
        assert pending is not None, "draft() before the prefill was observed"
        assert pending.features is not None
        device, dtype = drafter.device, drafter.dtype
        batch, new = pending.token_ids.shape
        levels = (self.depth - 1) * self.top_k
        if self.cache is None:
            capacity = new + levels + 256
            if self.calls is not None:  # buffers of the size of the target's serve the whole call
                capacity = max(self.target.cache.capacity, capacity_for(capacity))
            layers, heads, key_dim, value_dim = drafter.entry_shape
            self.cache = TreeCache.empty(
                layers, batch, heads, key_dim, value_dim=value_dim, dtype=dtype, device=device, capacity=capacity,
                workspace=None if self.calls is None else self.calls.workspace,
            )  # fmt: skip
        if self.calls is not None and pending.tree is not None and new <= self.width:
            return self._take_in_captured(root_ids, pending)
        self.cache.reserve(new + levels)

        last = root_ids.new_full((batch, 1), new - 1)
        if pending.valid is not None:
            last = (pending.valid * torch.arange(new, device=root_ids.device)).amax(1, keepdim=True)
        # The token after each committed one; after the last of a row comes the root.
        next_ids = pending.token_ids.roll(-1, dims=1).scatter(1, last, root_ids.unsqueeze(1))
        mask, is_causal = self._pair_mask(pending, new)
        outputs = drafter(
            self._embed(next_ids),
            drafter.fuse(pending.features.to(device=device, dtype=dtype)),
            pending.position_ids.to(device),
            mask=mask,
            is_causal=is_causal,
            cache=self.cache,
        )
        outputs = outputs.gather(1, last.to(device).unsqueeze(-1).expand(-1, -1, outputs.shape[-1])).squeeze(1)
        if self.last_outputs is not None and 0 in pending.num_committed:
            # A row that waited has no new pair; it drafts from where it was.
            moved = pending.counts.to(device).tensor > 0
            outputs = outputs.where(moved.unsqueeze(1), self.last_outputs)
        if pending.tree is None and pending.valid is not None:
            # A left-padded prompt has its padding in front: keep the other pairs, in order.
            padding = (~pending.valid).to(device=device, dtype=torch.int8)
            self.cache.commit(padding.argsort(dim=1, stable=True), pending.counts.to(device))
        else:
            self.cache.commit_first(pending.counts.to(device))
        self.pending, self.last_outputs = None, outputs
        return outputs

    def _take_in_captured(self, root_ids: Tensor, pending: Committed) -> Tensor:
        """The same for the pairs of a round, in one launch."""
        assert self.cache is not None
        assert self.calls is not None
        assert self.last_outputs is not None
        assert pending.features is not None
        counts = pending.counts.to(self.drafter.device)
        at = prefix_bucket(self.cache.longest)
        self.cache.place_nodes(at)
        self.cache.reserve(self.width + (self.depth - 1) * self.top_k)
        (outputs,) = self.calls(
            ("pairs", at, self.cache.addresses),
            functools.partial(_pairs, at),
            root_ids,
            self.cache.lengths,
            counts.tensor,
            self.last_outputs,
            padded=(pending.token_ids, pending.position_ids, pending.features),
            width=self.width,
        )
        self.cache.commit_first(counts)
        self.pending, self.last_outputs = None, outputs
        return outputs

    def _pair_mask(self, pending: Committed, new: int) -> tuple[Tensor | None, bool]:
        """Additive [batch, 1, new, cached + new] or None, and whether attention is plainly causal."""
        cache = self.cache
        assert cache is not None
        if pending.valid is None and cache.longest == 0:
            return None, True
        causal = torch.ones(new, new, dtype=torch.bool, device=self.drafter.device).tril()
        block = causal.expand(cache.batch, new, new)
        if pending.valid is not None:
            block = block & pending.valid.to(self.drafter.device).unsqueeze(1)
        return self._additive(block, cache.longest, cache.lengths), False

    def _additive(self, block: Tensor, at: int, lengths: Tensor) -> Tensor:
        """What `block` [batch, queries, entries of this round] and each row's own past make visible, as a mask.

        The past is the first of `at` entries, as many as `lengths` [batch] says.
        """
        entries = torch.arange(at, device=block.device)
        past = (entries < lengths.unsqueeze(1)).unsqueeze(1).expand(-1, block.shape[1], -1)
        return additive(torch.cat([past, block], dim=-1), self.drafter.dtype)

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
            cache.reserve((self.depth - 1) * self.top_k)
            key = ("levels", self.depth, self.top_k, self.vocab_size, at, cache.addresses)
            levels = self.calls(key, functools.partial(_levels, at), *values)
        context.lap("draft")
        build = functools.partial(_best_tree, depth=self.depth, budget=self.tree_budget)
        if self.calls is None:
            tree = build(root_ids, *levels)
        else:
            tree = captured_tree(self.calls, self.tree_budget, self.depth, build, root_ids, *levels)
        self.path_logprobs = tree.path_logprobs
        return tree

    def levels(self, at: int, outputs: Tensor, root_positions: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        """All candidates, level after level: scores, token ids, parents (see `_best_tree`), and which rows are finite.

        Args:
            at: where the nodes' entries begin in the cache; those of the pairs lie before.
            outputs: [batch, hidden], the drafter's at the roots.
            root_positions: [batch] int64.
            lengths: [batch] int64, pairs of each row.
        """
        drafter, cache = self.drafter, self.cache
        assert cache is not None
        device, batch = outputs.device, outputs.shape[0]
        width = min(self.top_k, drafter.config.draft_vocab_size)
        positions = root_positions.unsqueeze(1)
        rows = torch.arange(batch, device=device).unsqueeze(1)
        itself = torch.eye(width, dtype=torch.bool, device=device).expand(batch, width, width)

        # Candidates of all levels so far, level after level, parents by their place among them, -1 for the root.
        logprobs, draft_ids = self._logits(outputs).log_softmax(-1).topk(width)
        finite = logprobs.isfinite().all(-1)
        token_ids = drafter.to_target_ids(draft_ids)
        all_scores, all_ids, all_parents = [logprobs], [token_ids], [torch.full_like(token_ids, -1)]
        # The nodes that the next level extends.
        scores, ids = logprobs, token_ids
        places = torch.arange(width, device=device).expand(batch, width)
        states = drafter.recurrent(outputs).unsqueeze(1).expand(-1, width, -1)
        block = itself
        start = width
        for level in range(1, self.depth):
            with cache.behind((level - 1) * width):
                outputs = drafter(
                    self._embed(ids),
                    states,
                    (positions + level - 1).expand(-1, width),
                    mask=self._additive(block, at, lengths),
                    cache=cache,
                )
            logprobs, draft_ids = self._logits(outputs).log_softmax(-1).topk(width)
            finite &= logprobs.isfinite().all(-1).all(-1)
            candidates = (scores.unsqueeze(-1) + logprobs).flatten(1)
            token_ids = drafter.to_target_ids(draft_ids).flatten(1)
            all_scores.append(candidates)
            all_ids.append(token_ids)
            all_parents.append(places.repeat_interleave(width, dim=1))

            scores, chosen = candidates.topk(width)
            above = chosen // width
            ids, places = token_ids.gather(1, chosen), start + chosen
            states = drafter.recurrent(outputs)[rows, above]
            block = torch.cat([block[rows, above], itself], dim=-1)
            start += width * width
        return torch.cat(all_scores, 1), torch.cat(all_ids, 1), torch.cat(all_parents, 1), finite

    def _logits(self, outputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., draft_vocab] float32, without tokens that the target does not have."""
        logits = self.drafter.logits(outputs)
        if self.drafter.config.maps_vocabulary:  # to the target's tokens alone, `check_target` has looked
            return logits
        return TargetVocabularyLogitsProcessor(self.vocab_size)(None, logits)

    def describe(self, tree: DraftTree) -> NodeNotes:
        return path_notes(tree, self.path_logprobs, tree.depths)  # a forward per level


def _levels(at: int, generator: Eagle3Generator, *values: Tensor) -> tuple[Tensor, ...]:
    return generator.levels(at, *values)


def _pairs(
    at: int,
    generator: Eagle3Generator,
    root_ids: Tensor,
    lengths: Tensor,
    counts: Tensor,
    last_outputs: Tensor,
    token_ids: Tensor,
    position_ids: Tensor,
    features: Tensor,
) -> tuple[Tensor]:
    """`Eagle3Generator._take_in` after the prompt, in fixed shapes, for `decoding/graphs.py` to capture.

    Args:
        at: where the new pairs' entries begin in the cache; those of earlier pairs lie before.
        generator: of the call.
        root_ids: [batch] int64.
        lengths: [batch] int64, earlier pairs of each row.
        counts: [batch] int64, new pairs of each row, the first of `width`.
        last_outputs: [batch, hidden], for rows without new pairs.
        token_ids: [batch, width] int64, committed tokens.
        position_ids: [batch, width] int64, theirs.
        features: [batch, width, taps * hidden], theirs.
    """
    drafter, width = generator.drafter, token_ids.shape[1]
    last = (counts - 1).clamp(min=0).unsqueeze(1)
    next_ids = token_ids.roll(-1, dims=1).scatter(1, last, root_ids.unsqueeze(1))
    places = torch.arange(width, device=token_ids.device)
    block = (places.unsqueeze(1) >= places) & (places < counts[:, None, None])
    outputs = drafter(
        generator._embed(next_ids),
        drafter.fuse(features.to(drafter.dtype)),
        position_ids,
        mask=generator._additive(block, at, lengths),
        cache=generator.cache,
    )
    outputs = outputs.gather(1, last.unsqueeze(-1).expand(-1, -1, outputs.shape[-1])).squeeze(1)
    return (outputs.where(counts.unsqueeze(1) > 0, last_outputs),)


def _best_tree(
    root_ids: Tensor, scores: Tensor, token_ids: Tensor, parents: Tensor, finite: Tensor, *, depth: int, budget: int
) -> DraftTree:
    """The tree of the likeliest candidates.

    Args:
        root_ids: [batch] int64.
        scores: [batch, candidates] float32, log-probability of the path to each; none exceeds its parent's.
        token_ids: [batch, candidates] int64.
        parents: [batch, candidates] int64, place of each candidate's parent, which comes first; -1 for the root.
        finite: [batch] bool, False for rows without usable scores.
        depth: of the deepest candidate.
        budget: most candidates to keep.
    """
    batch, candidates = scores.shape
    kept = min(budget, candidates)
    # Among equal scores the first wins: no candidate is kept without its parent.
    best = scores.argsort(dim=1, descending=True, stable=True)[:, :kept]
    nodes = torch.arange(1, kept + 1, device=scores.device).expand(batch, kept)
    node_of = torch.zeros(batch, candidates, dtype=torch.int64, device=scores.device).scatter_(1, best, nodes)
    above = parents.gather(1, best)
    node_parents = node_of.gather(1, above.clamp(min=0)).where(above >= 0, 0)
    valid = finite.unsqueeze(1).expand(-1, kept + 1).clone()
    valid[:, 0] = True
    return DraftTree.from_parents(
        torch.cat([root_ids.unsqueeze(1), token_ids.gather(1, best)], dim=1),
        nn.functional.pad(node_parents, (1, 0), value=-1),
        max_depth=depth,
        valid=valid,
        finite=finite,
        path_logprobs=nn.functional.pad(scores.gather(1, best), (1, 0)),
    )
