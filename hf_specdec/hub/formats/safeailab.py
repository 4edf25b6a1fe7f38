"""EAGLE-3 as SafeAILab publishes it: a Llama config with `draft_vocab_size`, tensors `midlayer.*`.

The config has no target layers: the default three are read. Checkpoints have a head and usually no embeddings. The
default rotary base is 10000. Source: shared facts on formats, section 4; SafeAILab/EAGLE.
"""

from __future__ import annotations

from hf_specdec.hub.formats.base import Config, Format, Headers, Reading, Unsupported, decoder_shape
from hf_specdec.hub.formats.eagle3 import check_vocabulary_maps, eagle3_reading
from hf_specdec.hub.formats.keys import decoder
from hf_specdec.hub.formats.specforge import EAGLE_CONFIG, eagle_config


def read(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of SafeAILab's EAGLE-3 drafter."""
    ours = decoder_shape(fields, "llama") | {
        "draft_vocab_size": fields.get("draft_vocab_size"),
        "target_hidden_size": fields.get("target_hidden_size"),
    }
    return eagle3_reading(ours | eagle_config(fields), stored)


SAFEAILAB = Format(
    "EAGLE-3 (SafeAILab)",
    "eagle3",
    read,
    decoder("draft_vocab_size", "target_hidden_size", **EAGLE_CONFIG),
    other_weights=("pytorch_model.bin",),
    check=check_vocabulary_maps,
    recognises=lambda config: "draft_vocab_size" in config and config.get("num_hidden_layers") == 1,
    recognises_names=lambda names: any(name.startswith("midlayer.") for name in names),
)
LAYOUTS = (
    SAFEAILAB,
    Unsupported(
        "EAGLE-1 and EAGLE-2",
        "a reader for layers without an input norm that draft on the target's last state and with its head",
        recognises_names=lambda names: (
            {"fc.weight", "layers.0.mlp.up_proj.weight"} <= set(names)
            and not {"lm_head.weight", "norm.weight"} & set(names)
        ),
    ),
)
