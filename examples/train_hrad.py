"""Train H-RAD, which predicts for SpecBranch how far to draft, for a target and a draft model.

    python examples/train_hrad.py --target examples/tiny-code/target --draft-model examples/tiny-code/draft-lm

(and `--refer-to ../draft-lm --output examples/tiny-code/specbranch` for the bundled checkpoint).

It saves a SpecBranch checkpoint. Without --text the text is that of the bundled target, Python functions, rebuilt by
`train_tiny_code.py`; for any other pair give --text. See `hf_specdec/training/hrad.py`.
"""

import sys

from train_tiny_code import build_corpus

from hf_specdec.training.hrad import main
from hf_specdec.training.text import Corpus

if __name__ == "__main__":
    corpus = Corpus("the training functions of train_tiny_code.py", lambda: build_corpus()[:2])
    main(sys.argv[1:], program="python examples/train_hrad.py", corpus=corpus)
