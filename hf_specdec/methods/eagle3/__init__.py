"""EAGLE-3: an autoregressive drafter on fused target features; its tree grows where its confidence is highest.

One decoder layer runs over the concatenation of a token's embedding and the state before that token. For committed
tokens the state is the target's (several of its layers, concatenated and fused); for drafted ones it is the drafter's
own output. A pair is a committed token and the target's features before it. The pairs of a round are appended to the
cache in one forward, after the token that follows the last of them, the next root, is known.

Each level of the tree extends the `top_k` likeliest nodes of the previous one by their `top_k` likeliest tokens. The
likeliest `tree_budget` of all these nodes form the tree. The probability is the drafter's, along the whole path.

The published layouts differ in names, in the meaning of their layer ids and in defaults. `layouts.py` translates them
to the fields of `Eagle3Config` and sets every field whose default differs between projects. Saved checkpoints have this
config, with their own `model_type`.

In training the drafter reads its own outputs, as it will when it drafts. In the first pass over a row the states are
the target's. In each further pass the token is the next one of the row and the state is the drafter's output of the
previous pass, so that pass j learns what is drafted at depth j. A later pass sees what drafting sees: the pairs of the
first pass up to its own position, and its own chain after that. The labels are the target's probs over the draft
vocabulary; the loss "kl" has the gradient of the paper's cross entropy with them. Source: Section 3.2 (training-time
test); for the weights of the passes SafeAILab/EAGLE.

Source: EAGLE-3, arXiv 2503.01840; SafeAILab/EAGLE; EAGLE-2, arXiv 2406.16858, Sections 4.1 and 4.2 (expansion and
reranking), unchanged in EAGLE-3.
"""

from __future__ import annotations

from hf_specdec.drafting.registry import Serving, register
from hf_specdec.methods.eagle3.layouts import (
    DEEPSPEC_EAGLE3,
    DEEPSPEC_GEMMA_4,
    LATENT_ATTENTION,
    SAFEAILAB,
    SPECFORGE,
    SPECULATORS_EAGLE3,
)
from hf_specdec.methods.eagle3.network import Eagle3Drafter
from hf_specdec.methods.eagle3.training import Eagle3Step, Eagle3TrainOptions, _prepare, _read_rows
from hf_specdec.training.recipe import Recipe, register_recipe

register(
    "eagle3",
    Eagle3Drafter,
    layouts=(SAFEAILAB, SPECFORGE, DEEPSPEC_EAGLE3, SPECULATORS_EAGLE3),
    not_read=(DEEPSPEC_GEMMA_4, LATENT_ATTENTION),
    serving=Serving("eagle3"),
)


register_recipe(
    Recipe(
        "eagle3",
        Eagle3TrainOptions,
        _prepare,
        read_rows=_read_rows,
        # As many passes as tokens of a drafted path.
        further=lambda drafter, target: Eagle3Step(drafter, target, passes=drafter.options.depth),
    )
)
