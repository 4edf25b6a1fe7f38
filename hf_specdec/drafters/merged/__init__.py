"""MergedDrafter: several drafters, one tree with one budget."""

from hf_specdec.drafters.merged.drafter import MergedDrafter, MergedOptions
from hf_specdec.drafters.registry import Serving, register

__all__ = ["MergedDrafter", "MergedOptions"]

register(
    "merged",
    MergedDrafter,
    origin="drafters",
    serving=Serving(
        not_exported="vLLM runs one drafter at a time; export the merged drafters that it supports one by one"
    ),
)
