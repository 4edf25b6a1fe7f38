"""MergedDrafter: several drafters, one tree with one budget."""

from hf_specdec.drafters.merged.drafter import MergedDrafter, MergedOptions

__all__ = ["MergedDrafter", "MergedOptions"]
