"""EAGLE-3: an autoregressive drafter on fused target features; its tree grows where its confidence is highest.

One decoder layer runs over the concatenation of a token's embedding and the state before that token. For committed
tokens the state is the target's (several of its layers, concatenated and fused); for drafted ones it is the drafter's
own output. A pair is a committed token and the target's features before it. The pairs of a round are appended to the
cache in one forward, after the token that follows the last of them, the next root, is known.

Each level of the tree extends the `top_k` likeliest nodes of the previous one by their `top_k` likeliest tokens. The
likeliest `tree_budget` of all these nodes form the tree. The probability is the drafter's, along the whole path.

The published layouts differ in names, in the meaning of their layer ids and in defaults. `hub/formats/` translates them
to the fields of `Eagle3Config` and sets every field whose default differs between projects. Saved checkpoints have this
config, with their own `model_type`.

Source: EAGLE-3, arXiv 2503.01840; SafeAILab/EAGLE; EAGLE-2, arXiv 2406.16858, Sections 4.1 and 4.2 (expansion and
reranking), unchanged in EAGLE-3.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    rotate_half,
)

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.devices import in_inference_mode
from hf_specdec.decoding.exchange import NodeNotes
from hf_specdec.decoding.generator import Committed, DraftContext, TreeCandidateGenerator
from hf_specdec.decoding.graphs import CompileMode, nodes_bucket, prefix_bucket, static_calls
from hf_specdec.decoding.logits_process import TargetVocabularyLogitsProcessor
from hf_specdec.decoding.masks import additive
from hf_specdec.decoding.modules import apply_head, check_table, table_rows
from hf_specdec.decoding.static_verify import capacity_for
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree, from_host
from hf_specdec.drafters.attention import HeadProjections
from hf_specdec.drafters.config import TargetFields
from hf_specdec.drafters.growth import best_tree, captured_tree, grow_levels, path_notes
from hf_specdec.drafters.options import TreeOptions
from hf_specdec.drafters.pretrained import PretrainedDrafter
from hf_specdec.drafters.registry import Serving, name_of, register
from hf_specdec.drafters.shapes import check_shapes
from hf_specdec.drafters.vocabulary import check_draft_to_target, draftable_rows, head_of_rows, known_ids, set_map
from hf_specdec.hub.formats.deepspec import DEEPSPEC_EAGLE3
from hf_specdec.hub.formats.safeailab import SAFEAILAB
from hf_specdec.hub.formats.specforge import SPECFORGE
from hf_specdec.hub.formats.speculators import SPECULATORS

__all__ = ["Eagle3Config", "Eagle3Drafter", "Eagle3Generator", "Eagle3Options"]

ARCHITECTURE = "Eagle3Drafter"
# Upper bounds of the drafting options: far above useful values, they only catch typing errors.
MAX_DEPTH = 64
MAX_TOP_K = 128


def default_target_layer_ids(num_target_layers: int) -> list[int]:
    """Target layers that EAGLE-3 reads if a checkpoint lists none: one near the start, the middle, one near the end.

    As indices of `output_hidden_states` they are 2, n // 2 and n - 3; the output of layer i has index i + 1.

    Example:
        >>> default_target_layer_ids(32)
        [1, 15, 28]
    """
    return [1, num_target_layers // 2 - 1, num_target_layers - 4]


class Eagle3Config(TargetFields, LlamaConfig):
    """The config of a Llama decoder (usually with one layer) and what EAGLE-3 adds.

    `vocab_size` is the target's. The input of the first layer is the concatenation of embedding and state, so its q, k
    and v projections have twice the input size; further layers are Llama layers.

    Args:
        draft_vocab_size: rows of the drafter's head; None for the complete vocabulary.
        target_layer_ids: 0-based target layers whose outputs are concatenated in this order; -1 is the input of the
            first layer. None for `default_target_layer_ids` of the target.
        target_hidden_size: the target's hidden size; None for `hidden_size`.
        qk_norm: whether each head's queries and keys are normalised before RoPE.
        norm_before_residual: whether the residual of the first layer is the normalised state.
        norm_before_fc: one norm over the concatenated target states.
        fc_norm: a norm for each target state, before the concatenation.
        norm_output: whether the state passed to the next draft step is taken after the final norm.
        norm_before_head: whether the final norm is applied before the head.
        own_embeddings: whether the checkpoint has token embeddings; if not, the target's are used, unscaled.
    """

    model_type = "hf_specdec_eagle3"

    def __init__(
        self,
        draft_vocab_size: int | None = None,
        target_layer_ids: list[int] | None = None,
        target_hidden_size: int | None = None,
        qk_norm: bool = False,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        norm_before_head: bool = True,
        own_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{"num_hidden_layers": 1} | kwargs)
        self.draft_vocab_size = self.vocab_size if draft_vocab_size is None else draft_vocab_size
        self.target_layer_ids = target_layer_ids
        self.target_hidden_size = self.hidden_size if target_hidden_size is None else target_hidden_size
        self.qk_norm = qk_norm
        self.norm_before_residual = norm_before_residual
        self.norm_before_fc = norm_before_fc
        self.fc_norm = fc_norm
        self.norm_output = norm_output
        self.norm_before_head = norm_before_head
        self.own_embeddings = own_embeddings
        self.architectures = [ARCHITECTURE]

    def check(self) -> None:
        """Raises ValueError, naming the field, if no drafter can be built from this config."""
        if not isinstance(self.draft_vocab_size, int) or not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size!r}; it must be an integer from 1 to vocab_size "
                f"{self.vocab_size}, the target's vocabulary."
            )
        layers = self.target_layer_ids
        if layers is not None and (
            not isinstance(layers, list) or not layers or not all(isinstance(layer, int) for layer in layers)
        ):
            raise ValueError(f"target_layer_ids is {layers!r}; it must be a list of 0-based layer numbers, or absent.")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are both true, but a checkpoint has at most one of them.")

    @property
    def num_taps(self) -> int:
        """Number of target states that are concatenated."""
        return 3 if self.target_layer_ids is None else len(self.target_layer_ids)

    @property
    def maps_vocabulary(self) -> bool:
        """Whether draft ids differ from target ids."""
        return self.draft_vocab_size != self.vocab_size


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
    tree_budget: int | Literal["auto"] = 59

    def validate(self, config: Any = None) -> None:
        TreeOptions.validate(self, config)
        self.check_integers(depth=MAX_DEPTH, top_k=MAX_TOP_K)


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

    def restrict_vocabulary(self, draft_vocab: Tensor | Sequence[int]) -> None:
        config, own = self.config, self.to_target_ids(torch.arange(self.config.draft_vocab_size, device=self.device))
        rows = draftable_rows(own, draft_vocab, config.vocab_size, name_of(self))
        if len(rows) < len(own):
            self.lm_head, config.draft_vocab_size = head_of_rows(self.lm_head, rows), len(rows)
            self.register_buffer("d2t", own[rows] - torch.arange(len(rows), device=self.device))
            self.source_layout = None  # its files have other shapes

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
        return Eagle3Generator(self, target)

    def card_summary(self) -> str:
        return (
            "An EAGLE-3 drafter: it drafts token by token, from fused hidden states of the target and then from its "
            "own, with its own head. hf_specdec grows the draft tree where its confidence is highest."
        )


class PairCache:
    """The committed pairs of each row.

    Args:
        drafter: an `Eagle3Drafter`, or one with its interface.
        target: of the call.
        depth: most tokens of a drafted path.
        room: cache entries that drafting needs after the pairs.
        compile_mode: see `DrafterOptions`.
    """

    def __init__(self, drafter: Any, target: TargetModel, *, depth: int, room: int, compile_mode: CompileMode) -> None:
        self.drafter, self.room = drafter, room
        self.own_embeddings = drafter.config.own_embeddings
        self.embeddings: nn.Module = (
            drafter.embed_tokens if self.own_embeddings else target.model.get_input_embeddings()
        )
        check_table(self.embeddings)
        self.vocab_size: int  # columns of the target's logits
        self.cache: TreeCache | None = None
        self.pending: Committed | None = None
        self.calls = static_calls(self, drafter, (self.embeddings,), compile_mode)
        self.width = nodes_bucket(depth + 1)  # most tokens that a round commits
        self.target = target  # the capacity of its cache limits the length of rows
        # [batch, hidden], the drafter's output at each row's last pair.
        self.last_outputs: Tensor | None = None

    def observe(self, committed: Committed) -> None:
        self.pending = committed if self.pending is None else self.pending.followed_by(committed)
        self.vocab_size = committed.target_logits.shape[-1]

    def keep_rows(self, rows: Sequence[int]) -> None:
        if self.cache is not None:
            self.cache.keep_rows(rows)
        self.pending = None if self.pending is None else self.pending.of_rows(rows)
        if self.last_outputs is not None:
            self.last_outputs = self.last_outputs[from_host(rows, self.last_outputs.device)]

    def close(self) -> None:
        if self.calls is not None:
            self.calls.workspace.release()

    def embed(self, token_ids: Tensor) -> Tensor:
        """[batch, seq] -> [batch, seq, hidden] of the drafter's dtype, on its device."""
        table: Any = self.embeddings
        if self.own_embeddings:  # the target may have tokens that this table lacks
            token_ids = known_ids(token_ids, table.num_embeddings)
        # Subclasses of nn.Embedding may scale their outputs; drafters are trained on the unscaled table.
        return table_rows(table, token_ids).to(device=self.drafter.device, dtype=self.drafter.dtype)

    def append_pairs(self, root_ids: Tensor) -> Tensor:
        """Appends the pairs committed since the last round; returns each row's output at its last pair.

        Args:
            root_ids: [batch] int64.

        Returns:
            [batch, hidden].
        """
        drafter, pending = self.drafter, self.pending
        assert pending is not None, "draft() before the prefill was observed"
        assert pending.features is not None
        device, dtype = drafter.device, drafter.dtype
        batch, new = pending.token_ids.shape
        if self.cache is None:
            capacity = new + self.room + 256
            if self.calls is not None:  # buffers with the target's capacity suffice for the whole call
                capacity = max(self.target.cache.capacity, capacity_for(capacity))
            layers, heads, key_dim, value_dim, index_dim = drafter.entry_shape
            self.cache = TreeCache.empty(
                layers, batch, heads, key_dim, value_dim=value_dim, index_dim=index_dim, dtype=dtype, device=device,
                capacity=capacity, workspace=None if self.calls is None else self.calls.workspace,
            )  # fmt: skip
        if self.calls is not None and pending.tree is not None and new <= self.width:
            return self._append_captured(root_ids, pending)
        self.cache.reserve(new + self.room)

        last = root_ids.new_full((batch, 1), new - 1)
        if pending.valid is not None:
            last = (pending.valid * torch.arange(new, device=root_ids.device)).amax(1, keepdim=True)
        # The token after each committed one; after the last of a row this is the root.
        next_ids = pending.token_ids.roll(-1, dims=1).scatter(1, last, root_ids.unsqueeze(1))
        mask, is_causal = self._pair_mask(pending, new)
        outputs = drafter(
            self.embed(next_ids),
            drafter.fuse(pending.features.to(device=device, dtype=dtype)),
            pending.position_ids.to(device),
            mask=mask,
            is_causal=is_causal,
            cache=self.cache,
        )
        outputs = outputs.gather(1, last.to(device).unsqueeze(-1).expand(-1, -1, outputs.shape[-1])).squeeze(1)
        if self.last_outputs is not None and 0 in pending.num_committed:
            # A finished row has no new pair: its output stays.
            moved = pending.counts.to(device).tensor > 0
            outputs = outputs.where(moved.unsqueeze(1), self.last_outputs)
        if pending.tree is None and pending.valid is not None:
            # Left padding comes first: commit the other pairs, in order.
            padding = (~pending.valid).to(device=device, dtype=torch.int8)
            self.cache.commit(padding.argsort(dim=1, stable=True), pending.counts.to(device))
        else:
            self.cache.commit_first(pending.counts.to(device))
        self.pending, self.last_outputs = None, outputs
        return outputs

    def _append_captured(self, root_ids: Tensor, pending: Committed) -> Tensor:
        """`append_pairs` for the pairs of a round, in one captured launch."""
        assert self.cache is not None
        assert self.calls is not None
        assert self.last_outputs is not None
        assert pending.features is not None
        counts = pending.counts.to(self.drafter.device)
        at = prefix_bucket(self.cache.longest)
        self.cache.place_nodes(at)
        self.cache.reserve(self.width + self.room)
        (outputs,) = self.calls(
            ("pairs", at, self.cache.addresses),
            functools.partial(_pairs, at),
            root_ids,
            self.cache.lengths,
            counts.tensor,
            self.last_outputs,
            padded=(pending.token_ids, pending.position_ids, pending.features),
            width=self.width,
        )
        self.cache.commit_first(counts)
        self.pending, self.last_outputs = None, outputs
        return outputs

    def _pair_mask(self, pending: Committed, new: int) -> tuple[Tensor | None, bool]:
        """Additive [batch, 1, new, cached + new] or None, and whether the attention is causal without a mask."""
        cache = self.cache
        assert cache is not None
        if pending.valid is None and cache.longest == 0:
            return None, True
        causal = torch.ones(new, new, dtype=torch.bool, device=self.drafter.device).tril()
        block = causal.expand(cache.batch, new, new)
        if pending.valid is not None:
            block = block & pending.valid.to(self.drafter.device).unsqueeze(1)
        return self.additive(block, cache.longest, cache.lengths), False

    def additive(self, block: Tensor, at: int, lengths: Tensor) -> Tensor:
        """An additive mask: each row's earlier entries, and those of this round as `block` says.

        Args:
            block: [batch, queries, entries of this round] bool.
            at: earlier entries in the cache.
            lengths: [batch] int64, how many of them are visible in each row.
        """
        entries = torch.arange(at, device=block.device)
        past = (entries < lengths.unsqueeze(1)).unsqueeze(1).expand(-1, block.shape[1], -1)
        return additive(torch.cat([past, block], dim=-1), self.drafter.dtype)


def _pairs(
    at: int,
    pairs: PairCache,
    root_ids: Tensor,
    lengths: Tensor,
    counts: Tensor,
    last_outputs: Tensor,
    token_ids: Tensor,
    position_ids: Tensor,
    features: Tensor,
) -> tuple[Tensor]:
    """`PairCache.append_pairs` after the prompt, in fixed shapes, for `decoding/graphs.py` to capture.

    Args:
        at: where the new pairs' entries begin in the cache, after those of earlier pairs.
        pairs: of the call.
        root_ids: [batch] int64.
        lengths: [batch] int64, earlier pairs of each row.
        counts: [batch] int64, new pairs of each row, the first of `width`.
        last_outputs: [batch, hidden], for rows without new pairs.
        token_ids: [batch, width] int64, committed tokens.
        position_ids: [batch, width] int64, of the committed tokens.
        features: [batch, width, taps * hidden], of the committed tokens.
    """
    drafter, width = pairs.drafter, token_ids.shape[1]
    last = (counts - 1).clamp(min=0).unsqueeze(1)
    next_ids = token_ids.roll(-1, dims=1).scatter(1, last, root_ids.unsqueeze(1))
    indices = torch.arange(width, device=token_ids.device)
    block = (indices.unsqueeze(1) >= indices) & (indices < counts[:, None, None])
    outputs = drafter(
        pairs.embed(next_ids),
        drafter.fuse(features.to(drafter.dtype)),
        position_ids,
        mask=pairs.additive(block, at, lengths),
        cache=pairs.cache,
    )
    outputs = outputs.gather(1, last.unsqueeze(-1).expand(-1, -1, outputs.shape[-1])).squeeze(1)
    return (outputs.where(counts.unsqueeze(1) > 0, last_outputs),)


class Eagle3Generator(PairCache, TreeCandidateGenerator):
    """Draft trees of an EAGLE-3 drafter: its nodes follow the pairs in the cache, and are dropped after the draft."""

    drops_rows = True

    def __init__(self, drafter: Any, target: TargetModel) -> None:  # an Eagle3Drafter, or one with its interface
        options = drafter.options
        self.depth, self.top_k, self.tree_budget = options.depth, options.top_k, options.node_limit
        room = (self.depth - 1) * self.top_k
        super().__init__(drafter, target, depth=self.depth, room=room, compile_mode=options.compile_mode)
        self.drafts_early = self.calls is not None
        self.path_logprobs: Any  # [batch, nodes], of the latest tree

    @in_inference_mode
    def draft(self, context: DraftContext) -> DraftTree:
        outputs = self.append_pairs(context.root_ids)
        tree = self._grow(outputs, context)
        assert self.cache is not None
        self.cache.rollback()
        context.lap("tree")
        return tree

    def _grow(self, outputs: Tensor, context: DraftContext) -> DraftTree:
        """The tree below each row's root; `outputs` [batch, hidden] are the drafter's at the roots."""
        cache, device = self.cache, self.drafter.device
        assert cache is not None
        root_ids = context.root_ids.to(device)
        values = (outputs, context.root_positions.to(device), cache.lengths)
        if self.calls is None:
            levels = self.levels(cache.longest, *values)
        else:
            at = prefix_bucket(cache.longest)
            cache.place_nodes(at)
            cache.reserve(self.room)
            key = ("levels", self.depth, self.top_k, self.vocab_size, at, cache.addresses)
            levels = self.calls(key, functools.partial(_levels, at), *values)
        context.lap("draft")
        build = functools.partial(best_tree, depth=self.depth, budget=self.tree_budget)
        if self.calls is None:
            tree = build(root_ids, *levels)
        else:
            tree = captured_tree(self.calls, self.tree_budget, self.depth, build, root_ids, *levels)
        self.path_logprobs = tree.path_logprobs
        return tree

    def levels(self, at: int, outputs: Tensor, root_positions: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        """All candidates, level after level: scores, token ids, parents (see `best_tree`), and which rows are finite.

        Args:
            at: where the nodes' entries begin in the cache, after those of the pairs.
            outputs: [batch, hidden], the drafter's at the roots.
            root_positions: [batch] int64.
            lengths: [batch] int64, pairs of each row.
        """
        drafter, cache = self.drafter, self.cache
        assert cache is not None
        batch = outputs.shape[0]
        width = min(self.top_k, drafter.config.draft_vocab_size)
        positions = root_positions.unsqueeze(1)
        rows = torch.arange(batch, device=outputs.device).unsqueeze(1)
        itself = torch.eye(width, dtype=torch.bool, device=outputs.device).expand(batch, width, width)
        # Of the level above: the drafter's outputs, and the nodes of this round that each node sees.
        last, block = outputs.unsqueeze(1), itself.new_empty(batch, 1, 0)

        def extend(level: int, token_ids: Tensor, above: Tensor) -> Tensor:
            nonlocal last, block
            block = torch.cat([block[rows, above], itself], dim=-1)
            with cache.writing_after((level - 1) * width):
                last = drafter(
                    self.embed(token_ids),
                    drafter.recurrent(last)[rows, above],
                    (positions + level - 1).expand(-1, width),
                    mask=self.additive(block, at, lengths),
                    cache=cache,
                )
            return self._logits(last)

        return grow_levels(self._logits(outputs), extend, self.depth, width, drafter.to_target_ids)

    def _logits(self, outputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., draft_vocab] float32; tokens that the target lacks get -inf."""
        logits = self.drafter.logits(outputs)
        if self.drafter.config.maps_vocabulary:  # `check_target` has checked that the map has only the target's tokens
            return logits
        return TargetVocabularyLogitsProcessor(self.vocab_size)(None, logits)

    def describe(self, tree: DraftTree) -> NodeNotes:
        return path_notes(tree, self.path_logprobs, tree.depths)  # one forward per level


def _levels(at: int, generator: Eagle3Generator, *values: Tensor) -> tuple[Tensor, ...]:
    return generator.levels(at, *values)


register(
    "eagle3",
    Eagle3Drafter,
    layouts=(SAFEAILAB, SPECFORGE, DEEPSPEC_EAGLE3, SPECULATORS["eagle3"]),
    serving=Serving("eagle3"),
)
