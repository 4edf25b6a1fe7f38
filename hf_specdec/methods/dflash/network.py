"""The network of DFlash: layers whose queries come from the block, and keys from the target's features too."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.attention import attend
from hf_specdec.decoding.targets.modules import apply_head, home_of, num_tokens
from hf_specdec.drafting.config import TargetFields
from hf_specdec.drafting.draft_logits import (
    NeverProposedLogitsProcessor,
    SoftCapLogitsProcessor,
    TargetVocabularyLogitsProcessor,
)
from hf_specdec.drafting.layers import HeadProjections
from hf_specdec.drafting.options import TreeOptions
from hf_specdec.drafting.registry import MARGINAL_METHODS, name_of
from hf_specdec.drafting.shapes import check_shapes, way_out
from hf_specdec.drafting.vocabulary import CachedRows, MappedVocabulary, draftable_rows, head_of_rows, known_ids
from hf_specdec.hub.pretrained import PretrainedDrafter
from hf_specdec.methods.dflash.drafting import DFlashMarginals


def dflash_layer_ids(num_taps: int, num_target_layers: int) -> list[int]:
    """Evenly spaced target layers, for checkpoints that list none.

    Examples:
        >>> dflash_layer_ids(5, 36)
        [1, 9, 17, 25, 33]
    """
    if num_taps == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + index * span / (num_taps - 1)) for index in range(num_taps)]


def block_field(name: str, default: Any = None) -> Any:
    """A property that reads a field of `dflash_config`."""
    return property(lambda config: config.dflash_config.get(name, default))


@strict
class DFlashConfig(TargetFields, Qwen3Config):
    """The config of a Qwen3 decoder and what DFlash adds.

    Args:
        vocab_size: rows of the target's embedding; None if the checkpoint does not state it, and then not compared.
        dflash_config: `mask_token_id` (id in the target's vocabulary, the input of slots to be filled),
            `target_layer_ids` (0-based target layers whose outputs are concatenated in this order; -1 is the input of
            the first) and, in newer checkpoints, `block_size`; also `causal`, JetSpec's `causal_head`, `use_swa`,
            `swa_window_size`. Fields for drafters of other layouts: `sample_from_anchor`, `own_embeddings`, `own_head`,
            and `draft_vocab_size`, the number of tokens that can be drafted if not all: rows of the drafter's own head,
            or selected rows of the target's.
        block_size: slots of a block, root included, if not in `dflash_config`.
        num_target_layers: of the target, needed only without `target_layer_ids`.
        is_causal: whether attention inside a block is causal in every layer; None for the rule of `block_is_causal`.
        final_logit_softcapping: tanh cap on the logits of the target's head.
    """

    architecture: ClassVar[str | None] = "DFlashDraftModel"

    vocab_size: Any = 151936
    sliding_window: int | None = None
    dflash_config: Any = None
    block_size: Any = None
    num_target_layers: Any = None
    is_causal: bool | None = None
    final_logit_softcapping: float | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._as_published: dict[str, Any] | None = None  # the content of the file that was loaded
        window, layer_types = self.sliding_window, self.layer_types
        self.dflash_config = dict(self.dflash_config or {})
        super().__post_init__(**kwargs)
        if self.use_swa and layer_types is None:
            # Every layer has the window and none is causal. With use_sliding_window Qwen3's rule would change that.
            self.layer_types: Any = ["full_attention"] * self.num_hidden_layers
        if "sliding_attention" in self.layer_types or self.use_swa:
            # Qwen3Config drops the window unless use_sliding_window is set; published drafters set only one of the two.
            self.sliding_window = window
        self.block_size = self.dflash_config.get("block_size", self.block_size)

    def check(self) -> None:
        """Raises ValueError, naming the field and its section, if the drafter cannot be built from this config."""
        if not isinstance(self.block_size, int) or self.block_size < 2:
            raise ValueError(
                f"block_size is {self.block_size!r} in this DFlash config (top level or dflash_config); it must be an "
                "integer of at least 2: the root's slot and one to fill."
            )
        if not isinstance(self.mask_token_id, int):
            raise ValueError(
                f"dflash_config.mask_token_id is {self.mask_token_id!r}; it must be the id that is the input of the "
                "slots to be filled."
            )
        layers = self.dflash_config.get("target_layer_ids") or []
        if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
            raise ValueError(f"dflash_config.target_layer_ids is {layers!r}; it must be a list of 0-based layers.")
        if not layers and self.num_target_layers is None:
            raise ValueError(
                "This DFlash config has neither dflash_config.target_layer_ids nor num_target_layers, so the target "
                "layers it reads are unknown; add one of them to its config.json."
            )
        for key in ("is_neox_style", "rope_is_neox_style"):
            if getattr(self, key, True) is False:  # keys of some published files that are not in Qwen3Config
                raise ValueError(f"{key} is false in this DFlash config: interleaved rotary positions are unsupported.")
        if self.vocab_size is None:
            if self.own_embeddings or self.own_head or self.draft_vocab_size is not None:
                raise ValueError(
                    "This DFlash config has no vocab_size, which the drafter's own embeddings and head need: add "
                    "the target's to its config.json."
                )
        elif not 1 <= (self.draft_vocab_size or 0) <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size} and vocab_size {self.vocab_size} in this DFlash config; "
                "a draft vocabulary must be a part of the target's."
            )
        if self.use_swa and self.window(0) is None:
            raise ValueError(
                "dflash_config.use_swa is set, but neither swa_window_size nor sliding_window gives the window of the "
                "draft layers: add the one that the drafter was trained with."
            )
        if self.dflash_config.get("attention_sink_bias"):
            raise ValueError("dflash_config.attention_sink_bias is set: attention sinks in a drafter are unsupported.")

    mask_token_id = block_field("mask_token_id")  # the input of the slots to be filled
    use_swa = block_field("use_swa", False)  # whether every layer has a window, independent of `layer_types`
    # Whether slot k, from 0, predicts the token k + 1 positions after the root; else slot k, from 1, the k-th.
    sample_from_anchor = block_field("sample_from_anchor", False)
    # Whether the checkpoint has token embeddings and a head; if not, the target's are used.
    own_embeddings, own_head = block_field("own_embeddings", False), block_field("own_head", False)

    @property
    def target_layer_ids(self) -> list[int]:
        """0-based target layers, whose outputs are concatenated in this order."""
        explicit = self.dflash_config.get("target_layer_ids")
        if explicit:
            return explicit
        return dflash_layer_ids(self.num_hidden_layers, self.num_target_layers)

    @property
    def first_slot(self) -> int:
        """The first slot that drafts: the root's own, 0, with `sample_from_anchor`, else 1."""
        return 0 if self.sample_from_anchor else 1

    @property
    def draft_vocab_size(self) -> Any:
        """Number of tokens that can be drafted; None for the target's if the config has no `vocab_size`."""
        return self.dflash_config.get("draft_vocab_size", self.vocab_size)

    def window(self, layer: int) -> int | None:
        """Window of a draft layer in positions, its own included; None for no limit."""
        if self.use_swa:
            return self.dflash_config.get("swa_window_size", self.sliding_window)
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def block_is_causal(self, layer: int) -> bool:
        """Whether a slot attends only to itself and earlier slots of its block.

        An explicit setting takes precedence. Otherwise sliding layers are causal inside the block and full layers are
        not, as the drafters were trained; `use_swa` without `layer_types` means sliding and not causal.
        """
        for explicit in (self.is_causal, self.dflash_config.get("causal"), self.dflash_config.get("causal_head")):
            if explicit is not None:
                return bool(explicit)
        return self.layer_types[layer] == "sliding_attention"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Reads a `config.json` and stores the original, to write it back unchanged."""
        as_published = {key: copy.deepcopy(value) for key, value in config_dict.items() if not key.startswith("_")}
        # transformers completes nested fields in place.
        read = super().from_dict(copy.deepcopy(config_dict), **kwargs)
        config = read[0] if isinstance(read, tuple) else read
        config._as_published = as_published
        return read

    def to_dict(self) -> dict[str, Any]:
        """All fields, in the published layout, for all DFlash loaders."""
        every = super().to_dict() | {"model_type": "qwen3", "architectures": [self.architecture]}
        del every["_as_published"]
        if "block_size" in every["dflash_config"]:
            every["dflash_config"]["block_size"] = every.pop("block_size")
        return every

    def to_diff_dict(self) -> dict[str, Any]:
        """What `save_pretrained` writes: the loaded file, unknown keys included, with all changed fields.

        For other loaders the presence of a key has a meaning (`use_swa` without `layer_types`, a top-level
        `rope_theta`), so no keys are added to a loaded file.
        """
        if self._as_published is None:
            decoders = {field.name for field in fields(Qwen3Config)}
            unset = {field.name for field in fields(self) if getattr(self, field.name) is None} - decoders
            written = {key: value for key, value in super().to_diff_dict().items() if key not in unset}
            # Loaders older than rope_parameters read the base at the top level, with 10000 as default.
            return written | _legacy_rope(written["rope_parameters"])
        before = type(self)(**copy.deepcopy(self._as_published)).to_dict()
        now = self.to_dict()
        changed = {key: value for key, value in now.items() if key not in before or before[key] != value}
        changed.pop("_name_or_path", None)
        written = copy.deepcopy(self._as_published)
        if written.get("block_size") is not None:  # dflash_config may have another one, and both are read
            written["block_size"] = self.block_size
        if "dtype" in changed and "torch_dtype" in written:
            written["torch_dtype"] = changed["dtype"]
        if "rope_parameters" in changed:
            written.pop("rope_scaling", None)
            changed |= _legacy_rope(changed["rope_parameters"])
        return {"model_type": "qwen3", "architectures": [self.architecture]} | written | changed


def _legacy_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"rope_theta": parameters["rope_theta"]} if "rope_theta" in parameters else {}


@dataclass(slots=True, kw_only=True)
class DFlashOptions(TreeOptions):
    """Drafting options of a DFlash drafter.

    Attributes:
        method: `"ddtree"` for the best-first tree, `"dflash"` for the greedy chain, or any other method that drafts
            from per-position marginals.
        tree_budget: see `TreeOptions`; DDTree's B. An integer does not affect `"dflash"`: its chain always has
            block_size - 1 tokens, one more with `sample_from_anchor`. `"auto"` shortens chains too.
        block_size: slots of a block, root included; at most the trained number, which None selects. Shorter blocks
            draft fewer tokens per forward.
    """

    METHODS: ClassVar[Collection[str]] = MARGINAL_METHODS

    method: str = "ddtree"
    block_size: int | None = None

    def validate(self, config: Any = None) -> None:
        """As for every drafter; `config` is a `DFlashConfig`."""
        TreeOptions.validate(self, config)
        size, trained = self.block_size, config.block_size
        if size is not None and (type(size) is not int or not 2 <= size <= trained):
            raise ValueError(
                f"block_size={size!r} must be an integer from 2 to {trained}, the block this checkpoint was trained "
                "with (root included), or None for that size."
            )


class DFlashAttention(HeadProjections):
    """Attention of block slots over [cached context ; new context ; block]."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config, config.hidden_size, norms=True)

    def forward(
        self,
        block: Tensor,
        context: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: TreeCache | None,
        layer: int,
    ) -> Tensor:
        """[batch, block, hidden] x [batch, new, hidden] -> [batch, block, hidden]; see `DFlashDrafter.forward`."""
        batch, slots, _ = block.shape
        both = torch.cat([context, block], dim=1)
        queries = self.q_norm(self.q_proj(block).view(batch, slots, -1, self.head_dim)).transpose(1, 2)
        keys = self.k_norm(self.k_proj(both).view(batch, both.shape[1], -1, self.head_dim)).transpose(1, 2)
        values = self.v_proj(both).view(batch, both.shape[1], -1, self.head_dim).transpose(1, 2)
        cos, sin = (part.unsqueeze(1) for part in rotary)
        queries = queries * cos[:, :, -slots:] + rotate_half(queries) * sin[:, :, -slots:]
        keys = keys * cos + rotate_half(keys) * sin
        if cache is not None:
            keys, values = cache.layers[layer].update(keys, values)
        return self.o_proj(attend(queries, keys, values, mask).flatten(2))


class DFlashLayer(nn.Module):
    """A Qwen3 decoder layer on the block. The context enters the attention directly, without this layer's norm."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, block: Tensor, context: Tensor, *attention_inputs: Any) -> Tensor:
        """[batch, block, hidden] -> [batch, block, hidden]."""
        block = block + self.self_attn(self.input_layernorm(block), context, *attention_inputs)
        return block + self.mlp(self.post_attention_layernorm(block))


class DFlashDrafter(MappedVocabulary, PretrainedDrafter):
    """A DFlash checkpoint as a drafter: `method="dflash"` drafts its greedy chain, `"ddtree"` the best-first tree.

    Drafting options: `DFlashOptions`.
    """

    config_class: type[DFlashConfig] = DFlashConfig
    config: DFlashConfig
    options_class: ClassVar[type[DFlashOptions]] = DFlashOptions
    options: DFlashOptions
    _no_split_modules: ClassVar = ["DFlashLayer"]
    layer_class: ClassVar[type[DFlashLayer]] = DFlashLayer
    # Some savers write this buffer, which is computed from the config.
    card_summary = (
        "A DFlash drafter: it fills a block of masked slots in one forward, from the hidden states of the target, "
        "and shares the target's embeddings and head. hf_specdec drafts with it either the likeliest tree "
        '(`method="ddtree"`, the default) or one chain (`method="dflash"`).'
    )

    def __init__(self, config: DFlashConfig) -> None:
        config.check()
        super().__init__(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([self.layer_class(config) for _ in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.own_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.maps_vocabulary:
            # As published: target id = draft id + d2t[draft id].
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self._head_rows = CachedRows()
        self.post_init()

    def forward(
        self,
        block_ids: Tensor,
        features: Tensor,
        position_ids: Tensor,
        *,
        embed_tokens: nn.Module,
        masks: Sequence[Tensor | None] | None = None,
        cache: TreeCache | None = None,
        lm_head: nn.Module | None = None,
    ) -> Tensor:
        """Predicts the tokens at a block's positions.

        Args:
            block_ids: [batch, block] int64, root, mask, mask, ..., on the device of `embed_tokens`.
            features: [batch, new, taps * hidden], target features of the tokens committed since the last forward.
            position_ids: [batch, new + block] int64, of the new features and then of the block's slots.
            embed_tokens: the embedding of the block's tokens, usually the target's.
            masks: per layer None or additive [batch, 1, block, cached + new + block]; None for no masks.
            cache: holds earlier features' keys and values; those of the new features and of the block are appended.
            lm_head: the head to apply, from `head()`.

        Returns:
            [batch, block, hidden] after the final norm, or with `lm_head` [batch, block - 1, vocab] float32 logits of
            slots 1, 2, ...: slot k predicts the token k positions after the root. With `sample_from_anchor` [batch,
            block, vocab] logits of all slots: slot k predicts the token k + 1 positions after the root. The mask token
            gets -inf: a target may be able to emit it, but the drafter was never trained to predict it.
        """
        context = self.hidden_norm(self.fc(features))
        if self.config.own_embeddings:  # the target may have tokens that this table lacks
            block_ids = known_ids(block_ids, self.embed_tokens.num_embeddings)
        hidden = self.embed(block_ids, embed_tokens).to(self.norm.weight)
        rotary = self.rotary_emb(hidden, position_ids)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, context, rotary, masks[index] if masks else None, cache, index)
        hidden = self.norm(hidden)
        if lm_head is None:
            return hidden
        logits = self.draft_logits(hidden[:, self.config.first_slot :], lm_head)
        if self.config.maps_vocabulary:
            logits = TargetVocabularyLogitsProcessor(self.config.vocab_size, self.target_ids.to(logits.device))(
                None, logits
            )
        return NeverProposedLogitsProcessor(self.config.mask_token_id)(None, logits)

    def embed(self, block_ids: Tensor, embed_tokens: nn.Module) -> Tensor:
        """[batch, block] int64 -> [batch, block, hidden], the input of the first draft layer."""
        embedded: Tensor = embed_tokens(block_ids.to(home_of(embed_tokens)))
        return embedded

    def draft_logits(self, hidden: Tensor, lm_head: nn.Module) -> Tensor:
        """[..., hidden] after the final norm -> [..., draft_vocab] float32, in draft ids."""
        logits = apply_head(lm_head, hidden)
        return SoftCapLogitsProcessor(self.config.final_logit_softcapping)(None, logits)

    def head(self, target_head: nn.Module) -> nn.Module:
        """The head for its slots: its own, the target's, or the rows of the target's in the draft vocabulary."""
        if self.config.own_head:
            return self.lm_head
        if not self.config.maps_vocabulary:
            return target_head
        return self._head_rows.of(target_head, self.target_ids, self.d2t._version)

    def restrict_vocabulary(self, draft_vocab: Tensor | Sequence[int]) -> None:
        config, name = self.config, name_of(self)
        if config.vocab_size is None:
            raise ValueError(
                f"draft_vocab was given for drafter {name!r}, whose config.json has no vocab_size: add the target's."
            )
        own = self.target_ids
        rows = draftable_rows(own, draft_vocab, config.vocab_size, name)
        if len(rows) == len(own):
            return
        config.dflash_config = {**config.dflash_config, "draft_vocab_size": len(rows)}
        config.check()
        self.register_buffer("d2t", own[rows] - torch.arange(len(rows), device=self.device))
        if config.own_head:
            self.lm_head = head_of_rows(self.lm_head, rows)
        self._head_rows, self.source_layout = CachedRows(), None  # files in the source layout have other shapes
        self.keep_draft_rows(rows)

    def keep_draft_rows(self, rows: Tensor) -> None:
        """Cuts further heads over the draft vocabulary to these rows, [kept] int64; there are none by default."""

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        return tuple(self.config.target_layer_ids)

    @property
    def num_slots(self) -> int:
        """Slots of a block, root included: `options.block_size`, or the trained number."""
        slots: int = self.options.block_size or self.config.block_size
        return slots

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return MARGINAL_METHODS[self.method](DFlashMarginals(self, target), self.options)

    def card_facts(self) -> dict[str, str]:
        config = self.config
        return {
            "Method": f"{self.loaded_options().method}, on a DFlash drafter",
            "Layers": f"{config.num_hidden_layers}, hidden size {config.hidden_size}",
            "Block size": f"{config.block_size}, the root's slot included",
            "Target layers read": ", ".join(map(str, config.target_layer_ids)),
            "Vocabulary": f"{config.draft_vocab_size or 'of the target'}, mask token id {config.mask_token_id}",
        }

    def check_target(self, model: PreTrainedModel) -> None:
        config = self.config
        check_shapes(
            self,
            model,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            may_exceed=True,
            num_layers=config.num_target_layers,
            layers=config.target_layer_ids,
            first_layer=-1,
            d2t=self.d2t if config.maps_vocabulary else None,
        )
        rows = num_tokens(model)
        if not 0 <= config.mask_token_id < (shared := min(config.vocab_size or rows, rows)):
            raise ValueError(
                f"Drafter {name_of(self)!r} uses mask_token_id {config.mask_token_id}, but target {name_of(model)!r} "
                f"has only {shared} embeddings. {way_out(self)}"
            )
