"""DDTree (arXiv 2604.12989): best-first draft trees from the marginals of one block drafter forward."""

from hf_specdec.drafters.ddtree.candidates import DDTreeGenerator, heap_tree, level_tree
from hf_specdec.drafters.registry import register_marginal_method

__all__ = ["DDTreeGenerator", "heap_tree", "level_tree"]

register_marginal_method("ddtree", lambda source, options: DDTreeGenerator(source, options.node_limit))
