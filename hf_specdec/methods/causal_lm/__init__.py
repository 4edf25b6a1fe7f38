"""Causal language models as drafters: any model with the target's tokenizer, drafting chains or trees.

The draft model is run as targets are (`DraftModel` is a `TargetModel`): one forward per level verifies the unfinished
draft (captured, if the target's are), and its cache holds the earlier levels. A round first runs the root; if the last
accepted token was a leaf of the tree, which the draft model has not run yet, it runs that token too.
`hub/loading.py` finds the files and checks that they are complete.

Source: chains: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318. Trees: the shape of EAGLE-2, arXiv
2406.16858, Section 4 (`growth.py`), with a complete language model as drafter. Stopping by entropy: AdaEDL, arXiv
2410.18351.
"""

from __future__ import annotations

from hf_specdec.drafting.draft_model import with_whole_vocabulary
from hf_specdec.drafting.registry import Serving, register
from hf_specdec.methods.causal_lm.layouts import LANGUAGE_MODEL
from hf_specdec.methods.causal_lm.network import CausalLMDrafter, load
from hf_specdec.methods.causal_lm.training import DraftModelOptions, _finish, _prepare, _read_rows
from hf_specdec.training.recipe import Recipe, register_recipe

register(
    "causal_lm",
    CausalLMDrafter,
    load=load,
    layouts=(LANGUAGE_MODEL,),
    serving=Serving(
        "draft_model",
        "vLLM serves a plain language model without an export (method draft_model in --speculative-config)",
        needs_export=lambda drafter, config: drafter.target_ids is not None,
        whole_model=lambda drafter, vocab_size: with_whole_vocabulary(drafter.model, vocab_size),
    ),
)


register_recipe(
    Recipe("causal_lm", DraftModelOptions, _prepare, read_rows=_read_rows, finish=_finish, as_drafter=CausalLMDrafter)
)
