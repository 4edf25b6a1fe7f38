"""MergedDrafter: several drafters, one tree under one budget."""

from hf_specdec.drafters.merged.drafter import MergedDrafter, MergedOptions

__all__ = ["MergedDrafter", "MergedOptions"]
