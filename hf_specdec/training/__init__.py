"""Training drafters: rows of text, the frozen target's states, losses, and a Trainer with one step per method.

Nothing here is imported by `import hf_specdec`. Rows of text and the training of H-RAD need the extra
`hf_specdec[train]`; what `hf_specdec/adaptation/` uses does not.
"""

from hf_specdec.training import (  # noqa: F401  (each registers its recipe)
    causal_lm,
    dflash,
    dspark,
    eagle3,
    medusa,
    parallel_heads,
    specblock,
    specbound,
)
from hf_specdec.training.trainer import DrafterTrainer

__all__ = ["DrafterTrainer"]
