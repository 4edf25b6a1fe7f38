"""A Gemma 4 assistant in one `generate` call: a draft tree that grows level by level, from the target's own cache.

A node is a token and the state it was drafted behind. Nodes of one depth are one forward, all from the same position;
they attend to the target's committed entries alone, so that no node enters a cache. The tree is chosen as EAGLE's are
(`eagle3/candidates.py`). Source: shared facts on formats of 2026, section 6.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_specdec.decoding.devices import in_inference_mode
from hf_specdec.decoding.generator import Committed, DraftContext, TreeCandidateGenerator
from hf_specdec.decoding.logits_process import TargetVocabularyLogitsProcessor
from hf_specdec.decoding.target import CommittedEntries, TargetModel
from hf_specdec.decoding.trace import NodeNotes
from hf_specdec.decoding.tree import DraftTree, from_host, pick
from hf_specdec.drafters.gemma4_assistant.configuration import SLIDING
from hf_specdec.drafters.gemma4_assistant.modeling import Gemma4AssistantDrafter, storing_layers
from hf_specdec.drafters.growth import best_tree, grow_levels, path_notes


class Gemma4AssistantGenerator(TreeCandidateGenerator):
    """Draft trees of a Gemma 4 assistant.

    Args:
        drafter: with its options.
        target: of the call.
    """

    drops_rows = True
    reads_cache = True

    def __init__(self, drafter: Gemma4AssistantDrafter, target: TargetModel) -> None:
        options = drafter.options
        self.drafter, self.target = drafter, target
        self.depth, self.top_k, self.tree_budget = options.depth, options.top_k, options.node_limit
        self.embeddings = target.model.get_input_embeddings()
        self.layers = storing_layers(target.model)
        self.vocabulary: TargetVocabularyLogitsProcessor
        self.states: Tensor  # [batch, target_hidden], of each row's last committed token
        self.path_logprobs: Tensor | None = None  # [batch, nodes], of the latest tree

    def observe(self, committed: Committed) -> None:
        features, valid = committed.features, committed.valid
        assert features is not None, "the target is tapped"
        if committed.tree is None:
            self.vocabulary = TargetVocabularyLogitsProcessor(committed.target_logits.shape[-1])
        if valid is None:
            self.states = features[:, -1]
            return
        valid = valid.to(features.device)
        last = (valid * torch.arange(valid.shape[1], device=valid.device)).amax(1, keepdim=True)
        states = pick(features, last).squeeze(1)
        # A row that waited has no new token; it drafts from where it was.
        self.states = states if committed.tree is None else states.where(valid.any(1, keepdim=True), self.states)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.states = self.states[from_host(rows, self.states.device)]

    @in_inference_mode
    def draft(self, context: DraftContext) -> DraftTree:
        drafter, device, home = self.drafter, self.drafter.device, context.root_ids.device
        width = min(self.top_k, drafter.config.num_scored)
        rotary = drafter.rotary(context.root_positions.to(device) - 1)
        entries = {kind: self._entries(kind) for kind in set(drafter.config.layer_types)}
        rows = torch.arange(len(context.root_ids), device=device).unsqueeze(1)
        states = self.states.to(device=device, dtype=drafter.dtype).unsqueeze(1)
        outputs = drafter(self._embed(context.root_ids.unsqueeze(1), home), states, rotary, entries)

        def extend(level: int, token_ids: Tensor, above: Tensor) -> Tensor:
            nonlocal outputs
            outputs = drafter(self._embed(token_ids, home), drafter.recurrent(outputs)[rows, above], rotary, entries)
            return self._logits(outputs)

        levels = grow_levels(self._logits(outputs).squeeze(1), extend, self.depth, width, lambda ids: ids)
        context.lap("draft")
        tree = best_tree(context.root_ids.to(device), *levels, depth=self.depth, budget=self.tree_budget)
        self.path_logprobs = tree.path_logprobs
        context.lap("tree")
        return tree

    def describe(self, tree: DraftTree) -> NodeNotes | None:
        assert self.path_logprobs is not None, "called after a draft"
        return path_notes(tree, self.path_logprobs, tree.depths)  # a forward per level

    def _entries(self, kind: str) -> CommittedEntries:
        """What the drafter's layers of this type attend to."""
        window = self.drafter.config.sliding_window if kind == SLIDING else None
        entries = self.target.committed_entries(self.layers[kind], window)
        device, dtype = self.drafter.device, self.drafter.dtype
        return replace(
            entries,
            keys=entries.keys.to(device=device, dtype=dtype),
            values=entries.values.to(device=device, dtype=dtype),
            mask=entries.mask.to(device),
        )

    def _embed(self, token_ids: Tensor, home: torch.device) -> Tensor:
        """[batch, nodes] -> [batch, nodes, target_hidden], scaled as the target scales it; `home` is its device."""
        return self.embeddings(token_ids.to(home)).to(device=self.drafter.device, dtype=self.drafter.dtype)

    def _logits(self, outputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab] float32, without tokens that the target does not have."""
        return self.vocabulary(None, self.drafter.logits(outputs))
