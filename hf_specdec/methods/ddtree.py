"""DDTree: the likeliest `tree_budget` continuations, from the per-position marginals of one drafter forward.

Source: DDTree, arXiv 2604.12989. The trees are built in `growth.py`: with the paper's Algorithm 1 for tensors in host
memory (`heap_tree`), else level by level (`level_tree`).

Relation to its sibling `dflash`: same forward, but alternatives at every depth instead of one chain.
"""

from __future__ import annotations

import functools

from torch import Tensor

from hf_specdec.decoding.devices import abilities
from hf_specdec.decoding.exchange import DraftContext
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.drafter import BlockMarginals, MarginalsGenerator
from hf_specdec.drafting.growth import captured_tree, heap_tree, level_tree
from hf_specdec.drafting.registry import register_marginal_method

__all__ = ["DDTreeGenerator", "heap_tree", "level_tree"]


class DDTreeGenerator(MarginalsGenerator):
    """Draft trees from marginals.

    Args:
        source: computes the marginals of each round.
        tree_budget: most drafted nodes, root not counted.
    """

    def __init__(self, source: BlockMarginals, tree_budget: int) -> None:
        super().__init__(source)
        self.tree_budget = tree_budget

    def tree(self, context: DraftContext, logits: Tensor) -> DraftTree:
        if self.source.calls is not None:
            build = functools.partial(level_tree, budget=self.tree_budget)
            return captured_tree(self.source.calls, self.tree_budget, logits.shape[1], build, context.root_ids, logits)
        budget = context.at_most(self.tree_budget)
        make = heap_tree if abilities(logits.device).host_memory else level_tree
        return make(context.root_ids, logits, budget)


register_marginal_method("ddtree", lambda source, options: DDTreeGenerator(source, options.node_limit))
