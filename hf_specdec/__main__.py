"""`python -m hf_specdec` is `hf-specdec`."""

import sys

from hf_specdec.cli import main

if __name__ == "__main__":
    sys.exit(main())
