"""SpecBlock as its authors publish it, which is also how `SpecBlockDrafter` is saved: fields and names are ours.

The vocabulary map lies in `vocab_mapping.pt` or among the weights. Source: shared facts on formats, section 7;
shiweijiezero/SpecBlock.
"""

from __future__ import annotations

import re

from hf_specdec.hub.formats.base import (
    ROTARY,
    Config,
    Format,
    Headers,
    Reading,
)
from hf_specdec.hub.formats.keys import OURS, decoder

# A frozen copy of the target's embedding: official checkpoints leave it out, some savers do not.
_LEFT_OUT = re.compile(rf"{ROTARY}|^input_layer\.embed_tokens\.")
_RANK_FEATURES, _RANK_HIDDEN = 15, 256  # of the rank head, Appendix B


def is_specblock(config: Config) -> bool:
    """Whether a `config.json` is of the SpecBlock layout; its `model_type` says nothing."""
    named = any("SpecBlock" in name for name in config.get("architectures") or ())
    return named or "diffspec_draft_token_num" in config


def read(fields: Config, stored: Headers | None) -> Reading:
    """Our fields and tensor names for a SpecBlock drafter.

    Raises:
        ValueError: `block_size`, under which others know the tokens of a block, is another number than the layout's.
    """
    fields = dict(fields)
    tokens = fields.get("diffspec_draft_token_num", 7)
    if (block_size := fields.pop("block_size", tokens)) != tokens:
        raise ValueError(
            f"block_size is {block_size!r} and diffspec_draft_token_num {tokens!r} (7 where it is missing); both are "
            "the tokens of a block: correct the one, or remove block_size."
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
)  # fmt: skip
