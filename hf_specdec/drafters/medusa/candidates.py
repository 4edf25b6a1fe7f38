"""Medusa in one `generate` call: stores each row's last target state and runs the heads on it once per round.

The tree is built by a marginal method (`ddtree`: the likeliest paths of this round), or is the paper's static tree with
the same shape in every round. Source: Medusa, arXiv 2401.10774, Sections 2.1.2 (tree attention) and 2.3.3 (optimised
tree construction).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_specdec.decoding.devices import in_inference_mode
from hf_specdec.decoding.generator import Committed, DraftContext
from hf_specdec.decoding.graphs import static_calls
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree, from_host
from hf_specdec.drafters.base import BlockMarginals, MarginalsGenerator
from hf_specdec.drafters.medusa.modeling import MedusaDrafter


class MedusaMarginals(BlockMarginals):
    """Per-position logits of all heads, from the target's state at the last token before the root."""

    def __init__(self, drafter: MedusaDrafter, target: TargetModel) -> None:
        self.drafter = drafter
        self.lm_head = target.model.get_output_embeddings()
        self.last_states: Tensor | None = None  # [batch, hidden]
        self.calls = static_calls(self, drafter, (self.lm_head,), drafter.options.compile_mode)
        self.drafts_early = self.calls is not None

    def observe(self, committed: Committed) -> None:
        features = committed.features
        assert features is not None, "feature_layers() has requested the target's last state"
        batch, new, _ = features.shape
        last = torch.full((batch,), new - 1, device=features.device)
        if committed.valid is not None:
            last = (committed.valid.to(features.device) * torch.arange(new, device=features.device)).amax(1)
        states = features[torch.arange(batch, device=features.device), last]
        known = committed.counts.known
        may_lack = known is None or 0 in known
        if may_lack and self.last_states is not None:  # a finished row has no new state: the old one stays
            states = states.where(committed.counts.to(features.device).tensor.unsqueeze(1) > 0, self.last_states)
        self.last_states = states

    def keep_rows(self, rows: Sequence[int]) -> None:
        if self.last_states is not None:
            self.last_states = self.last_states[from_host(rows, self.last_states.device)]

    @in_inference_mode
    def marginals(self, context: DraftContext) -> Tensor:
        assert self.last_states is not None, "draft() before the prefill was observed"
        states = self.last_states.to(device=self.drafter.device, dtype=self.drafter.dtype)
        if self.calls is None:
            return self.drafter(states, self.lm_head)
        return self.calls("heads", _guesses, states)[0]


def _guesses(source: MedusaMarginals, states: Tensor) -> tuple[Tensor]:
    return (source.drafter(states, source.lm_head),)


class StaticTreeGenerator(MarginalsGenerator):
    """Fills a tree of fixed shape with the heads' predictions: node (i1, ..., ik) gets prediction number ik of head k.

    Args:
        source: computes the predictions of each round.
        paths: ranks from the root to each node, a parent before its children, as from `static_tree`.
        accuracies: [heads][ranks] from which the paths were chosen.
    """

    def __init__(
        self, source: MedusaMarginals, paths: Sequence[tuple[int, ...]], accuracies: Sequence[Sequence[float]]
    ) -> None:
        super().__init__(source)
        chances = [math.prod(accuracies[head][rank] for head, rank in enumerate(path)) for path in paths]
        device = source.drafter.device
        self.path_logprobs = torch.tensor([1.0, *chances], device=device).log()
        nodes = {path: node for node, path in enumerate([(), *paths])}
        self.parents = torch.tensor([-1, *(nodes[path[:-1]] for path in paths)], device=device)
        self.levels = torch.tensor([len(path) - 1 for path in paths], device=device)
        self.ranks = torch.tensor([path[-1] for path in paths], device=device)
        self.num_ranks = max(path[-1] for path in paths) + 1
        self.depth = max(map(len, paths))

    def tree(self, context: DraftContext, logits: Tensor) -> DraftTree:
        batch = len(logits)
        best, token_ids = logits.topk(self.num_ranks, dim=-1)
        finite = best[..., 0].isfinite().all(-1)
        drafted = token_ids[:, self.levels, self.ranks]
        return DraftTree.from_parents(
            torch.cat([context.root_ids.to(logits.device).unsqueeze(1), drafted], dim=1),
            self.parents.expand(batch, -1),
            self.depth,
            finite=finite,
            path_logprobs=self.path_logprobs.expand(batch, -1),
        )
