"""Layouts of this library alone, for kinds of drafters whose published layouts leave too much unsaid to be written.

Such a config has `model_type` "hf_specdec_" and the family's name, so that nothing else can be meant.
"""

from __future__ import annotations

from hf_specdec.hub.formats.base import Config, Format, as_it_is
from hf_specdec.hub.formats.eagle3 import eagle3_shapes
from hf_specdec.hub.formats.medusa import medusa_shapes

PREFIX = "hf_specdec_"
_SHAPES = {"eagle3": eagle3_shapes, "medusa": medusa_shapes}


def own_format(config: Config) -> Format | None:
    """The layout that a `config.json` is of; None where it is none of ours."""
    model_type = str(config.get("model_type"))
    if not model_type.startswith(PREFIX):
        return None
    family = model_type.removeprefix(PREFIX)
    return Format(family, family, as_it_is, shapes=_SHAPES.get(family))
