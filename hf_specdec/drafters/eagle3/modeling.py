"""Eagle3Drafter: one decoder layer over the concatenation of a token's embedding and the state before that token.

For committed tokens the state is the target's (several of its layers, concatenated and fused); for drafted ones it is
the drafter's own output. Source: EAGLE-3, arXiv 2503.01840; SafeAILab/EAGLE. The draft tree and the state of a
`generate` call are in `candidates.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    rotate_half,
)

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.modules import apply_head
from hf_specdec.decoding.target import TargetModel
from hf_specdec.drafters.attention import HeadProjections
from hf_specdec.drafters.eagle3.configuration import Eagle3Config, Eagle3Options, default_target_layer_ids
from hf_specdec.drafters.pretrained import PretrainedDrafter
from hf_specdec.drafters.registry import name_of
from hf_specdec.drafters.shapes import check_shapes
from hf_specdec.drafters.vocabulary import check_draft_to_target, set_map


class Eagle3Attention(HeadProjections):
    """Causal attention with inputs of size `in_size` and outputs of size `hidden_size`."""

    def __init__(self, config: Eagle3Config, in_size: int) -> None:
        super().__init__(config, in_size, norms=config.qk_norm)

    def forward(
        self,
        inputs: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        is_causal: bool,
        cache: TreeCache | None,
        layer: int,
    ) -> Tensor:
        """[batch, seq, in_size] -> [batch, seq, hidden]; see `Eagle3Drafter.forward`."""
        batch, seq, _ = inputs.shape
        queries = self.q_norm(self.q_proj(inputs).view(batch, seq, -1, self.head_dim)).transpose(1, 2)
        keys = self.k_norm(self.k_proj(inputs).view(batch, seq, -1, self.head_dim)).transpose(1, 2)
        values = self.v_proj(inputs).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        cos, sin = (part.unsqueeze(1) for part in rotary)
        queries = queries * cos + rotate_half(queries) * sin
        keys = keys * cos + rotate_half(keys) * sin
        if cache is not None:
            keys, values = cache.layers[layer].update(keys, values)
        attended = nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=is_causal, enable_gqa=self.groups > 1
        )
        return self.o_proj(attended.transpose(1, 2).reshape(batch, seq, -1))


class Eagle3FirstLayer(nn.Module):
    """EAGLE-3's own layer: attention over [embedding ; state], each with its own norm."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = Eagle3Attention(config, 2 * config.hidden_size)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, embeddings: Tensor, states: Tensor, *attention_inputs: Any) -> Tensor:
        """Two [batch, seq, hidden] -> [batch, seq, hidden]."""
        normed = self.hidden_norm(states)
        residual = normed if self.norm_before_residual else states
        inputs = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        states = residual + self.self_attn(inputs, *attention_inputs)
        return states + self.mlp(self.post_attention_layernorm(states))


class Eagle3Layer(nn.Module):
    """A Llama layer, for drafters with more than one layer."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.self_attn = Eagle3Attention(config, config.hidden_size)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, states: Tensor, *attention_inputs: Any) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        states = states + self.self_attn(self.input_layernorm(states), *attention_inputs)
        return states + self.mlp(self.post_attention_layernorm(states))


class Eagle3Network(PretrainedDrafter):
    """EAGLE-3's layers with head and fusion of target states; subclasses define how they draft."""

    config: Eagle3Config
    d2t: Tensor
    base_model_prefix = ""
    _no_split_modules: ClassVar = ["Eagle3FirstLayer", "Eagle3Layer"]
    _keys_to_ignore_on_load_unexpected: ClassVar = [r"rotary_emb\.inv_freq$"]

    def __init__(self, config: Eagle3Config) -> None:
        config.check()
        super().__init__(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        joined = config.num_taps * config.target_hidden_size
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(joined, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                [LlamaRMSNorm(config.target_hidden_size, eps=eps) for _ in range(config.num_taps)]
            )
        self.fc = nn.Linear(joined, hidden, bias=False)
        further = [Eagle3Layer(config) for _ in range(1, config.num_hidden_layers)]
        self.layers = nn.ModuleList([Eagle3FirstLayer(config), *further])
        self.norm = LlamaRMSNorm(hidden, eps=eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        if config.maps_vocabulary:
            # As published: target id = draft id + d2t[draft id].
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.post_init()

    @property
    def entry_shape(self) -> tuple[int, int, int, int, None]:
        """Number of layers and heads, and sizes of keys, of values and of an indexer's keys in its cache."""
        config = self.config
        return config.num_hidden_layers, config.num_key_value_heads, config.head_dim, config.head_dim, None

    def fuse(self, features: Tensor) -> Tensor:
        """Projects target states [batch, seq, taps * target_hidden] to [batch, seq, hidden]."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(self.config.num_taps, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def forward(
        self,
        embeddings: Tensor,
        states: Tensor,
        position_ids: Tensor,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        cache: TreeCache | None = None,
    ) -> Tensor:
        """One forward over pairs of a token and the state before it.

        Args:
            embeddings: [batch, seq, hidden], of the tokens.
            states: [batch, seq, hidden], of the position before each token: `fuse` of the target's features, or
                `recurrent` of an earlier output.
            position_ids: [batch, seq] int64, of the states.
            mask: [batch, 1, seq, cached + seq], additive or bool, or None.
            is_causal: causal attention without a mask; only for an empty cache or none.
            cache: holds keys and values of earlier pairs; those of these pairs are appended.

        Returns:
            [batch, seq, hidden], before the final norm; their `logits` are for the token after each pair's token.
        """
        rotary = self.rotary_emb(embeddings, position_ids)
        first, *further = self.layers
        states = first(embeddings, states, rotary, mask, is_causal, cache, 0)
        for index, layer in enumerate(further, start=1):
            states = layer(states, rotary, mask, is_causal, cache, index)
        return states

    def logits(self, outputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., draft_vocab] float32."""
        return apply_head(self.lm_head, self.norm(outputs) if self.config.norm_before_head else outputs)

    def recurrent(self, outputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden], the input state of the next draft step."""
        return self.norm(outputs) if self.config.norm_output else outputs

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Sets the draft vocabulary to these ids of the target, see `vocabulary.set_map`."""
        set_map(self.d2t, target_ids, self.config.vocab_size, name_of(self))

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Converts ids of the draft vocabulary to the target's ids."""
        return draft_ids + self.d2t[draft_ids] if self.config.maps_vocabulary else draft_ids

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        layers = self.config.target_layer_ids
        if layers is None:
            layers = default_target_layer_ids(model.config.get_text_config(decoder=True).num_hidden_layers)
        return tuple(layers)

    def card_facts(self) -> dict[str, str]:
        config = self.config
        layers = (
            "EAGLE-3's default" if config.target_layer_ids is None else ", ".join(map(str, config.target_layer_ids))
        )
        return {
            "Method": self.method,
            "Layers": f"{config.num_hidden_layers}, hidden size {config.hidden_size}",
            "Target layers read": layers,
            "Vocabulary": f"{config.vocab_size}, of which {config.draft_vocab_size} can be drafted",
        }

    def check_target(self, model: PreTrainedModel) -> None:
        config = self.config
        check_shapes(
            self,
            model,
            hidden_size=config.target_hidden_size,
            embedding_size=None if config.own_embeddings else config.hidden_size,
            vocab_size=config.vocab_size,
            layers=self.feature_layers(model),
            first_layer=-1,
        )
        if config.maps_vocabulary:
            shared = min(config.vocab_size, model.get_input_embeddings().num_embeddings)
            check_draft_to_target(self.d2t, shared, name_of(self))


class Eagle3Drafter(Eagle3Network):
    """An EAGLE-3 checkpoint as a drafter.

    Drafting options: `Eagle3Options`.

    Relation to its siblings: `dflash` and `medusa` predict all depths in one forward, independently of each other;
    EAGLE-3 runs once per level, conditioned on the path's tokens. `peagle` has the same layers, and runs once.
    """

    config_class = Eagle3Config
    options_class = Eagle3Options
    options: Eagle3Options

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        from hf_specdec.drafters.eagle3.candidates import Eagle3Generator

        return Eagle3Generator(self, target)

    def card_summary(self) -> str:
        return (
            "An EAGLE-3 drafter: it drafts token by token, from fused hidden states of the target and then from its "
            "own, with its own head. hf_specdec grows the draft tree where its confidence is highest."
        )
