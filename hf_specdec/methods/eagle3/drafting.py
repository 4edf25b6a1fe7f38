"""How EAGLE-3 drafts: it reads the committed pairs of a round, then grows the tree level by level."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdec.decoding.devices import in_inference_mode
from hf_specdec.decoding.exchange import Committed, DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.masks import additive
from hf_specdec.decoding.targets.modules import check_table, table_rows
from hf_specdec.decoding.tree import DraftTree, from_host
from hf_specdec.drafting.draft_logits import TargetVocabularyLogitsProcessor
from hf_specdec.drafting.growth import best_tree, captured_tree, grow_levels
from hf_specdec.drafting.reader import CommittedReader, NewTokens, behind_committed
from hf_specdec.drafting.vocabulary import known_ids


class PairReader(CommittedReader):
    """Reads the committed pairs of each row.

    Args:
        drafter: an `Eagle3Drafter`, or one with its interface.
        target: of the call.
        depth: most tokens of a drafted path.
        room: cache entries that drafting needs after the pairs.
    """

    vocab_size: int  # columns of the target's logits

    def __init__(self, drafter: Any, target: TargetModel, *, depth: int, room: int) -> None:
        self.own_embeddings = drafter.config.own_embeddings
        self.embeddings: nn.Module = (
            drafter.embed_tokens if self.own_embeddings else target.model.get_input_embeddings()
        )
        check_table(self.embeddings)
        super().__init__(
            drafter, target, drafter.entry_shape, borrowed=(self.embeddings,), most=depth + 1, room=room,
            compile_mode=drafter.options.compile_mode,
        )  # fmt: skip

    def observe(self, committed: Committed) -> None:
        super().observe(committed)
        self.vocab_size = committed.target_logits.shape[-1]

    def embed(self, token_ids: Tensor) -> Tensor:
        """[batch, seq] -> [batch, seq, hidden] of the drafter's dtype, on its device."""
        table: Any = self.embeddings
        if self.own_embeddings:  # the target may have tokens that this table lacks
            token_ids = known_ids(token_ids, table.num_embeddings)
        # Subclasses of nn.Embedding may scale their outputs; drafters are trained on the unscaled table.
        return table_rows(table, token_ids).to(device=self.device, dtype=self.dtype)

    def read_pairs(self, root_ids: Tensor) -> Tensor:
        """Reads the pairs committed since the last round; [batch, 1, hidden], each row's output at its last pair."""
        self.last = self.read(_pairs, root_ids.to(self.device), *self.last)
        return self.last[0]


def _pairs(reader: PairReader, new: NewTokens, root_ids: Tensor, before: Tensor | None = None) -> tuple[Tensor]:
    """The drafter's output at each row's last pair, [batch, 1, hidden]; `before` in rows without new pairs."""
    drafter, seen = reader.drafter, new.causal_mask()
    outputs = drafter(
        reader.embed(new.following(root_ids)),
        drafter.fuse(new.features),
        new.position_ids,
        mask=None if seen is None else additive(seen, reader.dtype),
        is_causal=seen is None,
        cache=reader.cache,
    )
    return (new.at_last(outputs, before),)


class Eagle3Generator(PairReader, TreeCandidateGenerator):
    """Draft trees of an EAGLE-3 drafter: its nodes follow the pairs in the cache, and are dropped after the draft."""

    def __init__(self, drafter: Any, target: TargetModel) -> None:  # an Eagle3Drafter, or one with its interface
        options = drafter.options
        self.depth, self.top_k, self.tree_budget = options.depth, options.top_k, options.node_limit
        super().__init__(drafter, target, depth=self.depth, room=(self.depth - 1) * self.top_k)

    @in_inference_mode
    def draft(self, context: DraftContext) -> DraftTree:
        return self._grow(context, self.read_pairs(context.root_ids))

    def _grow(self, context: DraftContext, outputs: Tensor) -> DraftTree:
        """The tree behind the roots, from the drafter's outputs [batch, 1, hidden] at them."""
        root_ids, positions = context.root_ids.to(self.device), context.root_positions.to(self.device)
        key = self.depth, self.top_k, self.vocab_size
        levels = self.run(_levels, outputs, positions, self.cache.lengths, key=key)
        context.lap("draft")
        build = functools.partial(best_tree, depth=self.depth, budget=self.tree_budget)
        tree = captured_tree(self.calls, self.tree_budget, self.depth, build, root_ids, *levels)
        context.lap("tree")
        return tree

    @property
    def rewinds(self) -> bool:
        """Whether `draft_text` can draft ahead: not in captured rounds, whose nodes have fixed places."""
        return self.calls is None

    @torch.no_grad()
    def draft_text(self, context: DraftContext, certain: Sequence[int]) -> DraftTree:
        """The tree for a text of which only the first tokens are committed, `certain` of each row; it is not kept.

        The target's states at the further tokens do not exist yet: the drafter reads its own outputs in their place, as
        below the root of a tree. So the tree is not that of drafting afterwards.
        """
        texts, device = context.texts, self.device
        ahead = [length - known for length, known in zip(context.lengths, certain, strict=True)]
        if self.pending is not None:
            self.read_pairs(from_host([text[known - 1] for text, known in zip(texts, certain, strict=True)], device))
        cache, (last,) = self.cache, self.last
        committed, steps = cache.row_lengths, max(ahead)
        cache.reserve(steps + self.room)
        positions = context.root_positions.to(device) - from_host(ahead, device)
        for step in range(steps):
            tokens = [text[min(known + step, len(text) - 1)] for text, known in zip(texts, certain, strict=True)]
            own = torch.ones(len(ahead), 1, 1, dtype=torch.bool, device=device)
            outputs = self.drafter(
                self.embed(from_host(tokens, device).unsqueeze(1)),
                self.drafter.recurrent(last),
                (positions + step).unsqueeze(1),
                mask=additive(behind_committed(own, cache.longest, cache.lengths), self.dtype),
                cache=cache,
            )
            more = Counts.of([int(step < count) for count in ahead], device)
            cache.commit_first(more)
            last = outputs.where((more.tensor > 0)[:, None, None], last)
        tree = self._grow(context, last)
        cache.rollback(committed)
        return tree

    def logits(self, outputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., draft_vocab] float32; tokens that the target lacks get -inf."""
        logits = self.drafter.logits(outputs)
        if self.drafter.config.maps_vocabulary:  # `check_target` has checked that the map has only the target's tokens
            return logits
        return TargetVocabularyLogitsProcessor(self.vocab_size)(None, logits)


def _levels(
    at: int, generator: Eagle3Generator, outputs: Tensor, root_positions: Tensor, lengths: Tensor
) -> tuple[Tensor, ...]:
    """All candidates, level after level: scores, token ids, parents (see `best_tree`), and which rows are finite.

    Args:
        at: where the nodes' entries begin in the cache, after those of the pairs.
        generator: of the call.
        outputs: [batch, 1, hidden], the drafter's at the roots.
        root_positions: [batch] int64.
        lengths: [batch] int64, pairs of each row.
    """
    drafter, cache = generator.drafter, generator.cache
    batch, device = len(outputs), outputs.device
    width = min(generator.top_k, drafter.config.draft_vocab_size)
    positions = root_positions.unsqueeze(1)
    rows = torch.arange(batch, device=device).unsqueeze(1)
    itself = torch.eye(width, dtype=torch.bool, device=device).expand(batch, width, width)
    # Of the level above: the drafter's outputs, and the nodes of this round that each node sees.
    last, block = outputs, itself.new_empty(batch, 1, 0)

    def extend(level: int, token_ids: Tensor, above: Tensor) -> Tensor:
        nonlocal last, block
        block = torch.cat([block[rows, above], itself], dim=-1)
        with cache.writing_after((level - 1) * width):
            last = drafter(
                generator.embed(token_ids),
                drafter.recurrent(last)[rows, above],
                (positions + level - 1).expand(-1, width),
                mask=additive(behind_committed(block, at, lengths), generator.dtype),
                cache=cache,
            )
        return generator.logits(last)

    return grow_levels(generator.logits(outputs).squeeze(1), extend, generator.depth, width, drafter.to_target_ids)
