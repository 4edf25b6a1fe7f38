"""Train H-RAD, which tells SpecBranch how far to draft, for a target and a draft model; save a SpecBranch checkpoint.

    python examples/train_hrad.py --target examples/tiny-code/target --draft-model examples/tiny-code/draft-lm

(and `--refer-to ../draft-lm --output examples/tiny-code/specbranch` for the bundled checkpoint).

For the bundled target its text is rebuilt by `train_tiny_code.py`; any other pair needs --text. See
`hf_specdec/training/hrad.py`.
"""

import sys

from train_tiny_code import build_corpus

from hf_specdec.training.command import Corpus
from hf_specdec.training.hrad import main

if __name__ == "__main__":
    corpus = Corpus("the training functions of train_tiny_code.py", lambda: build_corpus()[:2])
    main(sys.argv[1:], program="python examples/train_hrad.py", corpus=corpus)
