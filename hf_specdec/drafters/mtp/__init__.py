"""Multi-token prediction: the drafter that a target's own checkpoint holds, which transformers leaves out."""

from hf_specdec.drafters.mtp.layouts import LOOKED_FOR, Layout, find_layout
from hf_specdec.drafters.mtp.modeling import MTPDrafter, MTPOptions, check_supported
from hf_specdec.drafters.registry import Serving, register

__all__ = ["LOOKED_FOR", "Layout", "MTPDrafter", "MTPOptions", "check_supported", "find_layout"]

register(
    "mtp",
    MTPDrafter,
    origin="target",
    serving=Serving(
        "mtp",
        "vLLM reads the layer in the target's own checkpoint (method mtp in --speculative-config)",
        default_tokens=1,
        note="vLLM reads the multi-token-prediction layer of the targets for which it has a class.",
    ),
)
