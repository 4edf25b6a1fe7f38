"""DFlash: a block-diffusion drafter that fills a whole block of masked slots in one forward, on the target's features.

Each layer's queries come from the block only. Its keys and values come from the target's features of committed tokens
(fused once, cached across rounds) and from the block. Embedding and head are the target's.

The published z-lab layout of a checkpoint is read and written unchanged: the file has `model_type: "qwen3"` and
DFlash's own fields under `dflash_config`; older files have a top-level `block_size`.

Source: z-lab/dflash; shared facts on formats, sections 1 and 1.5.
"""

from __future__ import annotations

from hf_specdec.drafting.registry import register, register_marginal_method
from hf_specdec.methods.dflash.drafting import DFlashChain
from hf_specdec.methods.dflash.layouts import BLOCK_SERVING, DEEPSPEC_DFLASH, LAGUNA, MUSE, SPECULATORS_DFLASH, ZLAB
from hf_specdec.methods.dflash.network import DFlashDrafter
from hf_specdec.methods.dflash.training import DFlashStep, DFlashTrainOptions, prepare, read_rows
from hf_specdec.training.recipe import Recipe, register_recipe

register(
    "dflash",
    DFlashDrafter,
    layouts=(ZLAB, DEEPSPEC_DFLASH, MUSE, SPECULATORS_DFLASH),
    not_read=(LAGUNA,),
    serving=BLOCK_SERVING,
)


register_marginal_method("dflash", lambda source, options: DFlashChain(source))


register_recipe(
    Recipe(
        "dflash",
        DFlashTrainOptions,
        prepare,
        read_rows=read_rows,
        eval_batch_size=32,
        further=lambda drafter, target: DFlashStep(drafter, target, loss="kl"),
    )
)
