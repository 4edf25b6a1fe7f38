"""SpecBlock as its authors publish it; `SpecBlockDrafter` has the same fields and names, and is saved in this layout.

The vocabulary map is in `vocab_mapping.pt` or in the weights. Source: shared facts on formats, section 7;
shiweijiezero/SpecBlock.
"""

from __future__ import annotations

import re

from hf_specdec.hub.formats.base import ROTARY, Config, Format, Headers, Reading, architecture
from hf_specdec.hub.formats.keys import OURS, decoder

# A frozen copy of the target's embedding, which the authors' checkpoints do not have, but some others do.
_LEFT_OUT = re.compile(rf"{ROTARY}|^input_layer\.embed_tokens\.")


def read(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of a SpecBlock drafter.

    Raises:
        ValueError: `block_size`, the key of other layouts, differs from `diffspec_draft_token_num`.
    """
    fields = dict(fields)
    tokens = fields.get("diffspec_draft_token_num", 7)
    if (block_size := fields.pop("block_size", tokens)) != tokens:
        raise ValueError(
            f"block_size is {block_size!r} and diffspec_draft_token_num {tokens!r} (7 if it is missing); both are "
            "the number of tokens of a block: correct one of them, or remove block_size."
        )
    return Reading(fields, {name: name for name in stored or () if not _LEFT_OUT.search(name)})


SPECBLOCK = Format(
    "specblock",
    "specblock",
    read,
    decoder(
        "block_positions", "block_size", "diffspec_draft_token_num", "draft_condition", "draft_condition_norm",
        "draft_head_dim", "draft_vocab_size", "layer_wise_shift", "prefix_broadcast", "qk_norm", "rank_classes",
        "rank_features_top", "rank_state", "target_hidden_size", "target_layer_ids", *OURS,
    ),
    beside={"vocab_mapping.pt": ("d2t", "t2d")},
    # The `model_type` is that of a language model.
    recognises=lambda config: "diffspec_draft_token_num" in config or architecture("SpecBlock")(config),
    rank=20,
)  # fmt: skip
