"""EAGLE as SafeAILab publishes it. EAGLE-3: a Llama config with `draft_vocab_size`, tensors `midlayer.*`.

EAGLE-1 and EAGLE-2 have one layout: the config of the target with one layer, and tensors `fc.*` and `layers.0.*`
without a head and a final norm.

The config of EAGLE-3 has no target layers: the default three are read. Checkpoints have a head and usually no
embeddings. The default rotary base is 10000. Source: shared facts on formats, section 4; SafeAILab/EAGLE.
"""

from __future__ import annotations

from hf_specdec.hub.formats.base import Config, Format, Headers, Reading, check_vocabulary_maps, decoder_shape
from hf_specdec.hub.formats.keys import decoder
from hf_specdec.hub.formats.specforge import EAGLE_CONFIG, read

SAFEAILAB = Format(
    "EAGLE-3 (SafeAILab)",
    "eagle3",
    read,  # the keys of SpecForge that are not among these have the values that are always so here
    decoder("draft_vocab_size", "target_hidden_size", **EAGLE_CONFIG),
    other_weights=("pytorch_model.bin",),
    check=check_vocabulary_maps,
    recognises=lambda config: "draft_vocab_size" in config and config.get("num_hidden_layers") == 1,
    recognises_names=lambda names: any(name.startswith("midlayer.") for name in names),
    rank=90,
)


def read_eagle(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of an EAGLE-1 or EAGLE-2 drafter.

    The tensors decide about biases and norms: configs are copies of the target's, and have wrong or no fields for them.
    """
    names = {name: name for name in stored or () if not name.endswith("rotary_emb.inv_freq")}
    present = names if stored is not None else {"embed_tokens.weight"}  # a larger drafter, for the checks of size
    first = "layers.0."
    ours = decoder_shape(fields, "llama") | {
        "bias": "fc.bias" in present if stored is not None else fields.get("bias", True) is not False,
        "attention_bias": f"{first}self_attn.q_proj.bias" in present,
        "output_bias": f"{first}self_attn.o_proj.bias" in present,
        "mlp_bias": f"{first}mlp.up_proj.bias" in present,
        "norm_before_attention": f"{first}input_layernorm.weight" in present,
        "own_embeddings": "embed_tokens.weight" in present,
    }
    return Reading(ours, names)


SAFEAILAB_EAGLE = Format(
    "EAGLE-1 and EAGLE-2",
    "eagle",
    read_eagle,
    decoder("bias", idle=("qkv_bias",)),
    other_weights=("pytorch_model.bin",),
    recognises_names=lambda names: (
        {"fc.weight", "layers.0.mlp.up_proj.weight"} <= set(names)
        and not {"lm_head.weight", "norm.weight"} & set(names)
    ),
    rank=91,
)
