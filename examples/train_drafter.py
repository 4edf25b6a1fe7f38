"""Train a drafter for a target and save it in the layout in which such drafters are published.

    python examples/train_drafter.py --target examples/tiny-code/target --output build/dflash
    python examples/train_drafter.py --method specblock --target examples/tiny-code/target --output build/specblock
    python examples/train_drafter.py --method specblock --help

The defaults are for the bundled target on two CPU cores; its text is rebuilt by `train_tiny_code.py`. For any other
target give --text; without it the text is Python functions. With --text this is the same as `hf-specdec train`: see
`hf_specdec/training/command.py`.
"""

import sys

from train_tiny_code import build_corpus

from hf_specdec.training.command import main
from hf_specdec.training.text import Corpus

if __name__ == "__main__":
    corpus = Corpus("the training functions of train_tiny_code.py", lambda: build_corpus()[:2])
    main(sys.argv[1:], program="python examples/train_drafter.py", corpus=corpus)
