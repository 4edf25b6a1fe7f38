"""hf_specdec: lossless speculative decoding with draft trees, plugged into `model.generate(assistant_model=...)`."""

from hf_specdec.hub.loading import load_drafter
from hf_specdec.integration import disable, enable

__all__ = ["disable", "enable", "load_drafter"]
__version__ = "0.1.0"

enable()
