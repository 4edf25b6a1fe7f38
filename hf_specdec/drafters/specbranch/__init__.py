"""SpecBranch: a draft model drafts the next branches while the target verifies. Source: the SpecBranch paper."""

from hf_specdec.drafters.registry import register_family
from hf_specdec.drafters.specbranch.configuration import SpecBranchConfig, SpecBranchOptions, is_specbranch
from hf_specdec.drafters.specbranch.latency import parallel_latency, serial_latency
from hf_specdec.drafters.specbranch.modeling import HRAD, SpecBranchDrafter

__all__ = ["HRAD", "SpecBranchConfig", "SpecBranchDrafter", "SpecBranchOptions", "parallel_latency", "serial_latency"]

register_family("specbranch", drafter=SpecBranchDrafter, recognises=is_specbranch)
