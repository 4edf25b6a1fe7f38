"""The network of EAGLE-3: a decoder layer over pairs of a token's embedding and the state before that token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.modules import apply_head
from hf_specdec.drafting.config import FeatureFields
from hf_specdec.drafting.layers import CachedAttention, DraftLayer
from hf_specdec.drafting.options import TreeOptions
from hf_specdec.drafting.reader import EntryShape
from hf_specdec.drafting.registry import name_of
from hf_specdec.drafting.shapes import check_shapes
from hf_specdec.drafting.vocabulary import MappedVocabulary, draftable_rows, head_of_rows
from hf_specdec.hub.pretrained import PretrainedDrafter
from hf_specdec.methods.eagle3.drafting import Eagle3Generator

# Upper bounds of the drafting options: far above useful values, they only catch typing errors.
MAX_DEPTH = 64
MAX_TOP_K = 128


@strict
class Eagle3Config(FeatureFields):
    """The config of a Llama decoder (usually with one layer) and what EAGLE-3 adds.

    `vocab_size` is the target's. The input of the first layer is the concatenation of embedding and state, so its q, k
    and v projections have twice the input size; further layers are Llama layers.

    Args:
        qk_norm: whether each head's queries and keys are normalised before RoPE.
        norm_before_residual: whether the residual of the first layer is the normalised state.
        norm_before_fc: one norm over the concatenated target states.
        fc_norm: a norm for each target state, before the concatenation.
        norm_output: whether the state passed to the next draft step is taken after the final norm.
        norm_before_head: whether the final norm is applied before the head.
        own_embeddings: whether the checkpoint has token embeddings; if not, the target's are used, unscaled.
    """

    model_type = "hf_specdec_eagle3"

    num_hidden_layers: int = 1
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_head: bool = True
    own_embeddings: bool = False

    def check(self) -> None:
        super().check()
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are both true, but a checkpoint has at most one of them.")


@dataclass(slots=True, kw_only=True)
class Eagle3Options(TreeOptions):
    """Drafting options of an EAGLE-3 drafter; the defaults are the published settings.

    Attributes:
        depth: levels of the tree below the root. EAGLE's own `depth` counts the forwards after the first, one less.
        top_k: number of nodes of a level that are extended, and of continuations of each. 1 drafts a chain.
        tree_budget: see `TreeOptions`. EAGLE's own `total_token` counts the root, one more.
    """

    method = "eagle3"
    depth: int = 8
    top_k: int = 10

    def validate(self, config: Any = None) -> None:
        TreeOptions.validate(self, config)
        self.check_integers(depth=MAX_DEPTH, top_k=MAX_TOP_K)


class Eagle3FirstLayer(nn.Module):
    """EAGLE-3's own layer: attention over [embedding ; state], each with its own norm."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = CachedAttention(config, 2 * config.hidden_size, norms=config.qk_norm)
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


class PairDrafter(PretrainedDrafter):
    """A drafter that `PairReader` can use: its forward runs over pairs of a token and the state before it."""

    @property
    def entry_shape(self) -> EntryShape:
        """Number of layers and heads, and sizes of keys, of values and of an indexer's keys in its cache."""
        config = self.config
        return config.num_hidden_layers, config.num_key_value_heads, config.head_dim, None, None

    def fuse(self, features: Tensor) -> Tensor:
        """The states of the target, from its features [batch, seq, taps * hidden]: these, if there is one tap."""
        return features

    def recurrent(self, outputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden], the state that goes into the next draft step: the output itself."""
        return outputs

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
        cos, sin = self.rotary_emb(states, position_ids)
        return self.run_layers(embeddings, states, (cos.unsqueeze(2), sin.unsqueeze(2)), mask, is_causal, cache)

    @abstractmethod
    def run_layers(self, embeddings: Tensor, states: Tensor, *attention_inputs: Any) -> Tensor:
        """The layers; each gets the inputs of `CachedAttention.forward`, and its number as the last one."""


class Eagle3Network(MappedVocabulary, PairDrafter):
    """EAGLE-3's layers with head and fusion of target states; subclasses define how they draft."""

    config: Eagle3Config
    _no_split_modules: ClassVar = ["Eagle3FirstLayer", "DraftLayer"]

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
        further = [DraftLayer(config) for _ in range(1, config.num_hidden_layers)]
        self.layers = nn.ModuleList([Eagle3FirstLayer(config), *further])
        self.norm = LlamaRMSNorm(hidden, eps=eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        if config.maps_vocabulary:
            # As published: target id = draft id + d2t[draft id].
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.post_init()

    def fuse(self, features: Tensor) -> Tensor:
        """Projects target states [batch, seq, taps * target_hidden] to [batch, seq, hidden]."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(self.config.num_taps, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def run_layers(self, embeddings: Tensor, states: Tensor, *attention_inputs: Any) -> Tensor:
        first, *further = self.layers
        states = first(embeddings, states, *attention_inputs, 0)
        for index, layer in enumerate(further, start=1):
            states = layer(states, *attention_inputs, index)
        return states

    def logits(self, outputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., draft_vocab] float32."""
        return apply_head(self.lm_head, self.norm(outputs) if self.config.norm_before_head else outputs)

    def recurrent(self, outputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden], the input state of the next draft step."""
        return self.norm(outputs) if self.config.norm_output else outputs

    def restrict_vocabulary(self, draft_vocab: Tensor | Sequence[int]) -> None:
        config, own = self.config, self.target_ids
        rows = draftable_rows(own, draft_vocab, config.vocab_size, name_of(self))
        if len(rows) < len(own):
            self.lm_head, config.draft_vocab_size = head_of_rows(self.lm_head, rows), len(rows)
            self.register_buffer("d2t", own[rows] - torch.arange(len(rows), device=self.device))
            self.source_layout = None  # its files have other shapes

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        return self.config.layers_of(model)

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
            may_exceed=True,
            layers=self.feature_layers(model),
            first_layer=-1,
            d2t=self.d2t if config.maps_vocabulary else None,
        )


class Eagle3Drafter(Eagle3Network):
    """An EAGLE-3 checkpoint as a drafter.

    Drafting options: `Eagle3Options`.

    Relation to its siblings: `dflash` and `medusa` predict all depths in one forward, independently of each other;
    EAGLE-3 runs once per level, conditioned on the path's tokens. `peagle` has the same layers, and runs once.
    """

    config_class = Eagle3Config
    options_class = Eagle3Options
    options: Eagle3Options
    card_summary = (
        "An EAGLE-3 drafter: it drafts token by token, from fused hidden states of the target and then from its "
        "own, with its own head. hf_specdec grows the draft tree where its confidence is highest."
    )

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return Eagle3Generator(self, target)
