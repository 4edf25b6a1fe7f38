"""LayerSlices: a target's decoder run a few layers at a time, with the modules, masks and cache of a complete forward.

`LAYOUTS` describes for each family what its decoder computes around its layers: embeddings, rotary positions, logits.
`pending.check_slices` compares every model with its own complete forward before it is used. `pending.py` decides which
layers run when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_specdec.decoding.logits_process import SoftCapLogitsProcessor
from hf_specdec.decoding.taps import decoder_of


@dataclass(frozen=True)
class Layout:
    """What the decoder of a family computes around its layers.

    Attributes:
        norm: name of its final norm.
        rotary: whether `rotary_emb` gives cos and sin once for all layers, once per layer type, or does not exist.
        cache_argument: a layer's argument for the cache.
        embed: (decoder, embeddings of the tokens, position ids) -> input of the first layer.
        logits: (model, output of its head) -> its logits.
    """

    norm: str = "norm"
    rotary: Literal["shared", "per_type", "none"] = "shared"
    cache_argument: str = "past_key_values"
    embed: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    logits: Callable[[Any, Tensor], Tensor] | None = None


def _softcapped(model: Any, logits: Tensor) -> Tensor:
    cap = model.config.get_text_config(decoder=True).final_logit_softcapping
    return SoftCapLogitsProcessor(cap)(None, logits)


def _add_opt_positions(decoder: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    if decoder.project_in is not None:
        tokens = decoder.project_in(tokens)
    embedded: Tensor = tokens + decoder.embed_positions(None, position_ids=positions)
    return embedded


# By `model_type` of the text config. tests/drafters/specbound/test_slices.py compares every entry with the complete
# model.
LAYOUTS: dict[str, Layout] = {
    **{
        name: Layout()
        for name in (
            "gpt_oss", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3",
            "starcoder2",
        )
    },
    "cohere2": Layout(logits=lambda model, logits: logits * model.logit_scale),
    "gemma2": Layout(logits=_softcapped),
    "gemma3_text": Layout(rotary="per_type", logits=_softcapped),
    "gpt2": Layout(
        norm="ln_f", rotary="none", embed=lambda decoder, tokens, positions: tokens + decoder.wpe(positions)
    ),
    "gpt_neox": Layout(norm="final_layer_norm", cache_argument="layer_past"),
    "granite": Layout(
        embed=lambda decoder, tokens, positions: tokens * decoder.embedding_multiplier,
        logits=lambda model, logits: logits / model.config.logits_scaling,
    ),
    "opt": Layout(norm="final_layer_norm", rotary="none", embed=_add_opt_positions),
}  # fmt: skip


class LayerSlices:
    """The parts of a target's forward.

    Args:
        model: the target.

    Raises:
        ValueError: it is not known whether slices of its family are exact; names the family and how to add it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config(decoder=True)
        layout = LAYOUTS.get(config.model_type)
        if layout is None:
            raise ValueError(
                f"Target {type(model).__name__} is of the decoder family {config.model_type!r}, whose layers are not "
                f"known to be exact when run in slices; known families: {', '.join(sorted(LAYOUTS))}. To add it, "
                "describe what its decoder computes around its layers in an entry in LAYOUTS "
                "(hf_specdec/drafters/specbound/slices.py) and a row in FAMILIES (tests/targets.py); or use a method "
                "that runs complete forwards."
            )
        self.model, self.layout = model, layout
        self.decoder, self.layers = decoder_of(model)
        self.types: Sequence[str] | None = getattr(config, "layer_types", None)
        self.embed_tokens: nn.Module = model.get_input_embeddings()
        self.norm: nn.Module = getattr(self.decoder, layout.norm)
        self.lm_head: Any = model.get_output_embeddings()
        self.num_layers = len(self.layers)

    def embed(self, token_ids: Tensor, position_ids: Tensor) -> Tensor:
        """[batch, nodes] int64 tokens and positions -> [batch, nodes, hidden], the input of the first layer."""
        tokens = self.embed_tokens(token_ids)
        return tokens if self.layout.embed is None else self.layout.embed(self.decoder, tokens, position_ids)

    def rotary(self, like: Tensor, position_ids: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Rotary cos and sin [batch, nodes, head_dim] per layer type, or under the key "all"; empty without rotary."""
        if self.layout.rotary == "none":
            return {}
        rotary_emb: Any = self.decoder.rotary_emb
        if self.layout.rotary == "shared":
            return {"all": rotary_emb(like, position_ids)}
        assert self.types is not None
        return {kind: rotary_emb(like, position_ids, kind) for kind in dict.fromkeys(self.types)}

    def run(
        self,
        hidden: Tensor,
        first: int,
        last: int,
        *,
        position_ids: Tensor,
        rotary: dict[str, tuple[Tensor, Tensor]],
        masks: dict[str, Tensor] | None,
        cache: Cache,
    ) -> Tensor:
        """Layers `first` to `last` - 1; the cache receives the same entries as in a complete forward.

        Args:
            hidden: [batch, nodes, hidden], the input of layer `first`.
            first: number of layers already passed.
            last: number of layers passed afterwards.
            position_ids: [batch, nodes] int64.
            rotary: from `rotary`, for these nodes.
            masks: additive [batch, 1, nodes, entries] by layer type or under the key "all"; None for no mask.
            cache: for the nodes' keys and values.
        """
        by_type: dict[str, dict[str, Any]] = {}
        for index in range(first, last):
            kind = self.types[index] if self.types is not None else "all"
            arguments = by_type.get(kind)
            if arguments is None:
                arguments = by_type[kind] = {
                    "attention_mask": None if masks is None else masks["all"] if "all" in masks else masks[kind],
                    "position_ids": position_ids,
                    self.layout.cache_argument: cache,
                }
                if rotary:
                    arguments["position_embeddings"] = rotary["all"] if "all" in rotary else rotary[kind]
            hidden = self.layers[index](hidden, **arguments)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[batch, nodes, hidden], the last layer's output -> [batch, nodes, vocab], the target's logits."""
        return self.shape_logits(self.lm_head(self.norm(hidden)))

    def shape_logits(self, logits: Tensor) -> Tensor:
        """Applies the family's scales and soft caps to the output of its head."""
        return logits if self.layout.logits is None else self.layout.logits(self.model, logits)
