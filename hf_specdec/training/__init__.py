"""Training drafters: rows of text, the frozen target's states, losses, and a Trainer with one step per method.

Nothing here is imported by `import hf_specdec`. Rows of text and the training of H-RAD need the extra
`hf_specdec[train]`; what `hf_specdec/adaptation/` uses does not.
"""

from hf_specdec.training.causal_lm import DistillationStep
from hf_specdec.training.dflash import DFlashStep
from hf_specdec.training.dspark import DSparkStep
from hf_specdec.training.eagle3 import Eagle3Step
from hf_specdec.training.medusa import MedusaStep
from hf_specdec.training.parallel_heads import ParallelHeadsStep
from hf_specdec.training.specblock import SpecBlockStep
from hf_specdec.training.specbound import SpecBoundStep
from hf_specdec.training.trainer import DrafterTrainer

__all__ = [
    "DFlashStep",
    "DSparkStep",
    "DistillationStep",
    "DrafterTrainer",
    "Eagle3Step",
    "MedusaStep",
    "ParallelHeadsStep",
    "SpecBlockStep",
    "SpecBoundStep",
]
