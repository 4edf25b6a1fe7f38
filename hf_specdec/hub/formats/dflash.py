"""What the DFlash layouts have in common: which tensors there are, and what may be said in several places.

In layouts other than z-lab's, embeddings, head and vocabulary map may be the drafter's own. Source: shared facts on
formats, sections 1.4, 3.4 and 5.2. The layouts are in `zlab.py`, `muse.py`, `speculators.py` and `deepspec.py`.
"""

from __future__ import annotations

import re
from typing import Any

from hf_specdec.hub.formats.base import (
    Config,
    Headers,
    Reading,
    Shapes,
    attention_shapes,
    draft_vocabulary,
    layer_list,
    mlp_shapes,
    with_defaults,
)

_LEFT_OUT = re.compile(r"rotary_emb\.inv_freq$|^verifier_lm_head\.weight$|^verifier_norm\.weight$|^t2d$")


def dflash_reading(fields: Config, block: Config, stored: Headers | None) -> Reading:
    """Completes the fields of a `DFlashConfig` by what the tensors tell, and names the tensors.

    Args:
        fields: the layer shape, and what else is at the top of a `DFlashConfig`; `draft_vocab_size` is the head's.
        block: what is in its `dflash_config`.
        stored: headers of the weights, or None before they are there.
    """
    fields = dict(fields)
    draft_vocab_size = fields.pop("draft_vocab_size")
    fields.pop("mlp_bias", None)
    block = dict(block)
    names = {name: name for name in stored or () if not _LEFT_OUT.search(name)}
    if stored is not None:
        block["own_embeddings"] = "embed_tokens.weight" in stored
        block["own_head"] = "lm_head.weight" in stored
    smaller = draft_vocab_size != fields["vocab_size"]
    if smaller and (stored is None or block.get("own_head") or "d2t" in stored):  # of its head, or of the target's
        block["draft_vocab_size"] = draft_vocab_size
    else:
        names.pop("d2t", None)  # the constructor's default: an identity map
    return Reading(fields | {"dflash_config": block}, names)


def once(fields: Config, nested: Config, key: str) -> Any:
    """The value of a key that may be at the top or in `dflash_config`.

    Raises:
        ValueError: it is in both, with two values.
    """
    top, inner = fields.get(key), nested.get(key)
    if top is not None and inner is not None and top != inner:
        raise ValueError(
            f"{key} is {top!r} at the top and {inner!r} in dflash_config; remove the one that the drafter was not "
            "trained with."
        )
    return inner if top is None else top


def check_causality(said: Config) -> None:
    """Raises ValueError if the keys that say whether slots see no later slots of their block contradict each other."""
    said = {key: value for key, value in said.items() if value is not None}
    if len(set(map(bool, said.values()))) > 1:
        values = ", ".join(f"{key} {value!r}" for key, value in said.items())
        raise ValueError(f"{values}: they contradict each other. Remove those that the drafter was not trained with.")


def dflash_shapes(fields: Config) -> Shapes:
    """The tensors of a `DFlashDrafter` whose config has these fields.

    Raises:
        ValueError: a field is missing that says how the drafter reads or fills its block.
    """
    _check(fields)
    shape = with_defaults(fields, "qwen3")
    block = fields.get("dflash_config") or {}
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    vocab: int = shape["vocab_size"]
    draft_vocab = draft_vocabulary(block, vocab)
    taps = len(block.get("target_layer_ids") or range(layers))
    found: Shapes = {"fc.weight": (hidden, taps * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for layer in (f"layers.{index}" for index in range(layers)):
        found |= {f"{layer}.{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
        biased = bool(shape["attention_bias"])
        found |= attention_shapes(f"{layer}.self_attn", shape, hidden, biased=biased, normed=True)
        found |= mlp_shapes(f"{layer}.mlp", shape)
    if block.get("own_embeddings"):
        found["embed_tokens.weight"] = (vocab, hidden)
    if block.get("own_head"):
        found["lm_head.weight"] = (draft_vocab, hidden)
    if draft_vocab != vocab:
        found["d2t"] = (draft_vocab,)
    return found


def _check(fields: Config) -> None:
    """What `DFlashConfig.check` looks at, for those who inspect a checkpoint and have no transformers."""
    block = fields.get("dflash_config") or {}
    block_size = block.get("block_size", fields.get("block_size"))
    if type(block_size) is not int or block_size < 2:
        raise ValueError(
            f"block_size is {block_size!r} in this DFlash config (top level or dflash_config); it must be an integer "
            "of at least 2: the root's slot and one to fill."
        )
    if type(block.get("mask_token_id")) is not int:
        raise ValueError(f"dflash_config.mask_token_id is {block.get('mask_token_id')!r}; it must be an integer.")
    for key in ("is_neox_style", "rope_is_neox_style"):
        if fields.get(key) is False:
            raise ValueError(f"{key} is false in this DFlash config: interleaved rotary positions are unsupported.")
    if block.get("attention_sink_bias"):
        raise ValueError("dflash_config.attention_sink_bias is set: attention sinks in a drafter are unsupported.")
    if block.get("use_swa") and block.get("swa_window_size", fields.get("sliding_window")) is None:
        raise ValueError(
            "dflash_config.use_swa is set, but neither swa_window_size nor sliding_window says how far the draft "
            "layers look back: add the one that the drafter was trained with."
        )
    layer_list(block, "target_layer_ids")
    if not block.get("target_layer_ids") and fields.get("num_target_layers") is None:
        raise ValueError(
            "It has neither dflash_config.target_layer_ids nor num_target_layers, so the target layers it reads are "
            "unknown; add one of them to its config.json."
        )
