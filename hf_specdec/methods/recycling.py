"""Token recycling: drafts from the candidates that the target itself gave after each token, the last time it saw it.

A table has the `top_k` likeliest next tokens of every token of the vocabulary. Every verified node updates the row of
its token with the target's logits there, accepted or not: what a round refuses is not lost. The tree has the same
shape in every round; its tokens are looked up level by level. The table stays for later calls. No weights.

Departures: tokens of the prompt, of which only the last one has logits here, get the token that follows them as their
first candidate; and the shape of the tree comes from assumed accuracies, as nothing is calibrated.

Source: Token Recycling, arXiv 2408.08696, Section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.decoding.chains import best_path
from hf_specdec.decoding.exchange import Committed, DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.drafting.growth import StaticTree
from hf_specdec.drafting.options import TreeOptions
from hf_specdec.drafting.registry import Serving, register

__all__ = ["TokenRecyclingDrafter", "TokenRecyclingOptions"]

MAX_TOP_K = 64
MAX_DEPTH = 32
FIRST, FALL = 0.55, 0.35  # assumed: candidate r of a node is right with probability FIRST * FALL^r


@dataclass(slots=True, kw_only=True)
class TokenRecyclingOptions(TreeOptions):
    """Drafting options of token recycling; the defaults are the paper's.

    Attributes:
        top_k: candidates that are kept of each token. Changing it clears the table.
        depth: levels of the tree.
        tree_budget: see `TreeOptions`.
    """

    method = "token-recycling"
    top_k: int = 8
    depth: int = 6

    def validate(self, config: Any = None) -> None:
        TreeOptions.validate(self, config)
        self.check_integers(top_k=MAX_TOP_K, depth=MAX_DEPTH)


class TokenRecyclingDrafter(Drafter):
    """Drafts a tree from the target's own candidates of earlier rounds and calls.

    It gains wherever text repeats pairs of tokens, from the first hundred tokens on; a table for a vocabulary of
    128,000 tokens takes 8 MB.

    Args:
        drafting_options: of `TokenRecyclingOptions`.

    Attributes:
        table: [vocab, top_k] int64, likeliest first, -1 for unknown; None before the first call.

    Examples:
        >>> TokenRecyclingDrafter(tree_budget=16).options.top_k
        8
    """

    options_class = TokenRecyclingOptions
    options: TokenRecyclingOptions

    def __init__(self, **drafting_options: Any) -> None:
        self.options = TokenRecyclingOptions()
        self.set_options(**drafting_options)
        self.table: Tensor | None = None

    def check_target(self, model: PreTrainedModel) -> None:
        """Any target fits. A table of another vocabulary size is cleared when a call begins."""

    def forget(self) -> None:
        self.table = None

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return TokenRecyclingGenerator(self)

    def table_for(self, vocab: int, device: torch.device) -> Tensor:
        """The table for logits of this size, on their device."""
        shape = (vocab, min(self.options.top_k, vocab))
        if self.table is None or self.table.shape != shape:
            self.table = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.table = self.table.to(device)
        return self.table


class TokenRecyclingGenerator(TreeCandidateGenerator):
    """The tree of a call, filled in each round from the drafter's table."""

    def __init__(self, drafter: TokenRecyclingDrafter) -> None:
        self.drafter = drafter
        self.table: Tensor
        self.shape: StaticTree
        self.levels: list[tuple[Tensor, Tensor, Tensor]]  # of each level its nodes, their parents and ranks

    def begin(self, device: torch.device) -> None:
        """Makes what is the same in all rounds, on the table's device."""
        options = self.drafter.options
        rates = [[FIRST * FALL**rank for rank in range(options.top_k)]] * options.depth
        self.shape = StaticTree(rates, options.node_limit, device)
        ranks = self.shape.ranks.clamp(max=self.table.shape[1] - 1)
        self.levels = []
        for level in range(self.shape.depth):
            drafted = (self.shape.levels == level).nonzero().squeeze(1)
            self.levels.append((1 + drafted, self.shape.parents[1 + drafted], ranks[drafted]))

    def observe(self, committed: Committed) -> None:
        logits = committed.target_logits
        self.table = self.drafter.table_for(logits.shape[-1], logits.device)
        if committed.tree is None:
            self.begin(logits.device)
            if committed.token_ids.shape[1] > 1:
                self._learn_prompt(committed)
            last = committed.token_ids[:, -1:]  # prompts are padded on the left
            self._learn(last, torch.ones_like(last, dtype=torch.bool), logits[:, -1:])
            return
        tree = committed.tree
        if logits.shape[1] < tree.num_nodes:  # transformers' loop verified the likeliest path only
            nodes = best_path(tree)[: logits.shape[1]]
            self._learn(tree.token_ids[:, nodes], tree.valid[:, nodes], logits[:, : len(nodes)])
        else:
            self._learn(tree.token_ids, tree.valid, logits)

    def _learn(self, token_ids: Tensor, valid: Tensor, logits: Tensor) -> None:
        """Writes the likeliest tokens of each node to the row of the node's token; the last one of a token counts."""
        candidates = logits.topk(self.table.shape[1], dim=-1).indices.flatten(0, 1)
        usable = (valid & logits[..., 0].isfinite()).flatten()
        self._write(token_ids.flatten(), usable, candidates)

    def _learn_prompt(self, committed: Committed) -> None:
        before, after = committed.token_ids[:, :-1], committed.token_ids[:, 1:]
        unknown = self.table[before.clamp(max=len(self.table) - 1), 0] < 0
        if committed.valid is not None:
            unknown &= committed.valid[:, :-1]
        candidates = self.table.new_full((before.numel(), self.table.shape[1]), -1)
        candidates[:, 0] = after.flatten()
        self._write(before.flatten(), unknown.flatten(), candidates)

    def _write(self, token_ids: Tensor, usable: Tensor, candidates: Tensor) -> None:
        """Of several rows for one token, which a device would write in any order, the last is written."""
        order = torch.arange(len(token_ids), device=token_ids.device)
        usable = usable & (token_ids < len(self.table))
        token_ids = token_ids.clamp(max=len(self.table) - 1)
        latest = token_ids.new_full((len(self.table),), -1)
        latest.scatter_reduce_(0, token_ids, order.where(usable, -1), "amax")
        self.table = candidates[latest.clamp(min=0)].where((latest >= 0).unsqueeze(1), self.table)
        self.drafter.table = self.table

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Rows have no state of their own."""

    def join(self, others: Sequence[Any], places: Sequence[int]) -> None:
        """Rows have no state of their own."""

    def draft(self, context: DraftContext) -> DraftTree:
        table, root_ids = self.table, context.root_ids.to(self.table.device)
        token_ids = root_ids.new_full((len(root_ids), len(self.shape.parents)), -1)
        token_ids[:, 0] = root_ids
        for nodes, parents, ranks in self.levels:
            above = token_ids[:, parents]
            found = table[above.clamp(0, len(table) - 1), ranks]
            token_ids[:, nodes] = found.where((above >= 0) & (above < len(table)), -1)
        known = token_ids >= 0
        return self.shape.filled(token_ids.where(known, root_ids.unsqueeze(1)), valid=known)


register(
    "token-recycling",
    TokenRecyclingDrafter,
    origin="name",
    serving=Serving(not_exported="vLLM has no token recycling"),
)
