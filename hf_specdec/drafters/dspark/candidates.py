"""DSpark in one `generate` call: one forward of the block, then its slots in order, as a tree or as one chain.

Other drafters whose slots are conditioned on the previous token use it too (`ConditionalDrafter`).

A slot's distribution given the previous token needs no further forward: W2 z is added to its logits. So a tree is grown
level by level, with each node's children from its own distribution, and the likeliest `tree_budget` paths are selected.
DDTree builds the same tree from marginals, which are not conditioned on the previous token. The confidence head
estimates how much of a chain will be accepted (`tree_budget="auto"`); trees are ranked by the distributions alone.
Source: shared facts on formats of 2026, section 2.4; DDTree, arXiv 2604.12989, for the tree.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_specdec.decoding.devices import in_inference_mode
from hf_specdec.decoding.generator import Committed, DraftContext, TreeCandidateGenerator
from hf_specdec.decoding.logits_process import TargetVocabularyLogitsProcessor
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.trace import NodeNotes
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.dflash.candidates import DFlashMarginals
from hf_specdec.drafters.dspark.modeling import ConditionalDrafter
from hf_specdec.drafters.growth import Slots, conditional_tree, path_notes


class DSparkGenerator(TreeCandidateGenerator):
    """One `generate` call of a `ConditionalDrafter`; subclasses build a tree from the slots.

    Args:
        drafter: with its options.
        target: of the call.
    """

    drops_rows = True

    def __init__(self, drafter: ConditionalDrafter, target: TargetModel) -> None:
        self.drafter = drafter
        self.blocks = DFlashMarginals(drafter, target)
        self.target_ids = drafter.target_ids
        self.columns = 0  # of the target's logits
        self.path_logprobs: Tensor | None = None  # [batch, nodes] of the latest tree

    @abstractmethod
    def tree(self, context: DraftContext, slots: Slots) -> DraftTree:
        """The tree of a round."""

    @in_inference_mode
    def draft(self, context: DraftContext) -> DraftTree:
        states = self.blocks.run_block(context, None)
        logits = self.drafter.draft_logits(states[:, self.drafter.config.first_slot :], self.blocks.lm_head)
        logits[..., self.never] = -torch.inf
        slots = self.drafter.slots(states, logits, context.root_ids.to(states.device))
        context.lap("draft")
        tree = self.tree(context, slots)
        self.path_logprobs = tree.path_logprobs
        context.lap("tree")
        return tree

    def observe(self, committed: Committed) -> None:
        if committed.tree is None:
            self.columns = committed.target_logits.shape[-1]
            # Draft ids that must not be drafted: the mask token, and tokens beyond the target's logits.
            ids = self.target_ids
            self.never = ((ids == self.drafter.config.mask_token_id) | (ids >= self.columns)).nonzero().squeeze(1)
        self.blocks.observe(committed)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.blocks.keep_rows(rows)

    def close(self) -> None:
        self.blocks.close()

    def describe(self, tree: DraftTree) -> NodeNotes | None:
        if self.path_logprobs is None:
            return None
        return path_notes(tree, self.path_logprobs, tree.depths.clamp(max=1))  # one forward for all depths


class TreeGenerator(DSparkGenerator):
    """The likeliest `tree_budget` paths, with each token's probability conditioned on the path before it."""

    def __init__(self, drafter: ConditionalDrafter, target: TargetModel, tree_budget: int) -> None:
        super().__init__(drafter, target)
        self.tree_budget = tree_budget

    def tree(self, context: DraftContext, slots: Slots) -> DraftTree:
        budget = self.tree_budget if context.node_limit is None else min(self.tree_budget, context.node_limit)
        return conditional_tree(context.root_ids, slots, self.target_ids, budget)


class ChainGenerator(DSparkGenerator):
    """One path: each slot's likeliest token, or in calls that sample a sampled one with its distribution."""

    def tree(self, context: DraftContext, slots: Slots) -> DraftTree:
        device = slots.logits.device
        to_target = TargetVocabularyLogitsProcessor(self.drafter.config.vocab_size or self.columns, self.target_ids)
        to_columns = TargetVocabularyLogitsProcessor(self.columns)
        finite = slots.logits.amax(-1).isfinite().all(1)
        token_ids, state = context.root_ids.to(device).unsqueeze(1), slots.state
        draft_probs, paths = [], [torch.zeros(token_ids.shape, device=device)]
        for slot in range(slots.depth):
            before = token_ids[:, -1]
            logits, state = slots.step(slot, before.unsqueeze(1), state)
            logits = to_columns(None, to_target(None, logits.squeeze(1)))
            # Rows with non-finite logits get no draft, but take part in the shared call of multinomial.
            logits = logits.masked_fill(~finite.unsqueeze(1), 0.0)
            if context.choice.do_sample:
                draft_probs.append(context.choice.warpers(token_ids[:, -1:], logits).softmax(-1))
                chosen = torch.multinomial(draft_probs[-1], num_samples=1)
            else:
                chosen = logits.argmax(-1, keepdim=True)
                survival = slots.confidence(slot, before)
                if survival is None:
                    survival = logits.log_softmax(-1).gather(1, chosen).squeeze(1)
                paths.append(paths[-1] + survival.unsqueeze(1))
            token_ids = torch.cat([token_ids, chosen], dim=1)
        device = context.root_ids.device
        chain = DraftTree.chain(
            token_ids.to(device),
            finite=finite.to(device),
            draft_probs=torch.stack(draft_probs, dim=1).to(device) if draft_probs else None,
        )
        return chain if draft_probs else replace(chain, path_logprobs=torch.cat(paths, 1).to(device))
