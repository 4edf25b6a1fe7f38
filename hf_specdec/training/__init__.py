"""Training drafters: rows of text, the frozen target's states, losses, and a Trainer.

The step, options and recipe of a method are with the method in `hf_specdec/methods/`. Rows of text and the training of
H-RAD need the extra `hf_specdec[train]`; what methods and `hf_specdec/adaptation/` use does not.
"""

import hf_specdec.methods  # noqa: F401  (registers the recipes)
