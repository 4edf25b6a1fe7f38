"""DSpark (arXiv 2607.05147): a DFlash block whose slots are conditioned on the token drafted before them."""

from hf_specdec.drafters.dspark.configuration import DSparkConfig, DSparkOptions
from hf_specdec.drafters.dspark.modeling import DSparkDrafter
from hf_specdec.drafters.registry import register_family

__all__ = ["DSparkConfig", "DSparkDrafter", "DSparkOptions"]

register_family("dspark", drafter=DSparkDrafter)
