"""DSpark (arXiv 2607.05147): a DFlash block whose slots are conditioned on the token drafted before them."""

from dataclasses import replace

from hf_specdec.drafters.dflash import BLOCK_SERVING
from hf_specdec.drafters.dspark.configuration import DSparkConfig, DSparkOptions
from hf_specdec.drafters.dspark.modeling import DSparkDrafter
from hf_specdec.drafters.registry import register
from hf_specdec.hub.formats.dspark import DSPARK
from hf_specdec.hub.formats.speculators import SPECULATORS

__all__ = ["DSparkConfig", "DSparkDrafter", "DSparkOptions"]

register(
    "dspark",
    DSparkDrafter,
    layouts=(DSPARK, SPECULATORS["dspark"]),
    serving=replace(BLOCK_SERVING, method="dspark"),
)
