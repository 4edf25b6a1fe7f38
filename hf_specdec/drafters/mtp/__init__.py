"""Multi-token prediction: the drafter that a target's own checkpoint holds, which transformers leaves out."""

from hf_specdec.drafters.mtp.layouts import LOOKED_FOR, Layout, find_layout
from hf_specdec.drafters.mtp.modeling import MTPDrafter, MTPOptions, check_supported

__all__ = ["LOOKED_FOR", "Layout", "MTPDrafter", "MTPOptions", "check_supported", "find_layout"]
