"""Gemma4AssistantDrafter: layers of Gemma 4 that have queries only, and read the target's keys and values.

With N tokens in the target's cache, x_N the root and f_0 the target's state at position N - 1, behind its final norm:

    z = pre [E(x); f_0],   y = norm(layers(z)),   logits of the next token = head(y),   f_1 = post y

and so on with each drafted token and the state f_j behind which it was drafted. E is the target's embedding as the
target scales it. Every layer attends, from position N - 1 and without a scale, to entries 0..N-1 of the target's last
layer of the same type that stores keys and values itself; nothing is cached. transformers drafts from position N and
sees entries of rejected drafts too; the positions here are vLLM's.

A draft tree grows level by level. A node is a token and the state it was drafted behind. Nodes of one depth are one
forward, all from the same position; they attend to the target's committed entries alone, so that no node enters a
cache. The tree is chosen as EAGLE's are (`growth.py`).

The published layout is transformers': a nested `gemma4_text` config whose layers all share keys and values. Head
dimensions and heads of full layers are in `per_layer_config`, or in older files under names of their own. The
embedding of the small stack is its head where the two are tied, and of no use elsewhere. Keys left out are at the
defaults of the config classes. What this library writes are the
fields of `Gemma4AssistantConfig`, under a `model_type` of its own.

Source: shared facts on formats of 2026, section 6.2; transformers, gemma4_assistant and gemma4; vLLM, gemma4_mtp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Gemma4TextConfig, Gemma4UnifiedTextConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, rotate_half

from hf_specdec.decoding.devices import in_inference_mode
from hf_specdec.decoding.exchange import Committed, DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import CommittedEntries, TargetModel
from hf_specdec.decoding.targets.attention import attend
from hf_specdec.decoding.targets.modules import apply_head
from hf_specdec.decoding.targets.support import TreesRefusedError, check_supported
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.config import TargetFields
from hf_specdec.drafting.draft_logits import SoftCapLogitsProcessor, TargetVocabularyLogitsProcessor
from hf_specdec.drafting.growth import best_tree, grow_levels
from hf_specdec.drafting.reader import LastStates
from hf_specdec.drafting.registry import Serving, register
from hf_specdec.drafting.shapes import check_shapes, way_out
from hf_specdec.hub.formats.base import ROTARY, Config, Format, Headers, Reading, check_sizes
from hf_specdec.hub.formats.keys import OURS, TRANSFORMERS, Section
from hf_specdec.hub.pretrained import PretrainedDrafter
from hf_specdec.methods.eagle3.network import Eagle3Options

SLIDING, FULL = "sliding_attention", "full_attention"
ROPE_TYPES = ("default", "proportional")


class Gemma4AssistantConfig(TargetFields):
    """Layers of Gemma 4 without keys and values of their own.

    Args:
        vocab_size: the target's; rows of the head.
        hidden_size: of the small stack.
        intermediate_size: of its MLPs.
        num_hidden_layers: of the small stack.
        num_attention_heads: of queries.
        num_key_value_heads: of the target's keys, in sliding layers, and in full ones unless the next says otherwise.
        num_global_key_value_heads: of the target's keys in full layers; None for `num_key_value_heads`.
        head_dim: in sliding layers.
        global_head_dim: in full layers; None for `head_dim`.
        layer_types: "sliding_attention" or "full_attention" for each layer; None for full ones.
        sliding_window: entries that sliding layers attend to.
        rope_parameters: by layer type `rope_type` ("default" or "proportional"), `rope_theta`, and of the latter
            `partial_rotary_factor` and `factor`.
        hidden_act: of the MLPs.
        rms_norm_eps: of all norms.
        attention_bias: whether projections of queries and outputs have biases.
        final_logit_softcapping: tanh cap on the head's logits; None for none. vLLM applies it, transformers does not.
        backbone_hidden_size: the target's hidden size.
        num_centroids: clusters of the head's rows, of which a few are scored; None for a head whose rows all are.
        centroid_intermediate_top_k: clusters that are scored.
        target_model_type: what the `model_type` of its targets begins with; None where it is not compared.
    """

    model_type = "hf_specdec_gemma4_assistant"
    mlp_bias = False  # which the MLP's class asks for

    vocab_size: int = 262144
    hidden_size: int = 256
    intermediate_size: int = 2048
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 1
    num_global_key_value_heads: int | None = None
    head_dim: int = 256
    global_head_dim: int | None = None
    layer_types: Any = None
    sliding_window: int = 512
    rope_parameters: Any = None
    hidden_act: str = "gelu_pytorch_tanh"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    final_logit_softcapping: float | None = None
    initializer_range: float = 0.02
    backbone_hidden_size: int = 1536
    num_centroids: int | None = None
    centroid_intermediate_top_k: int = 32
    target_model_type: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        rope, self.rope_parameters = self.rope_parameters, None  # transformers would complete it
        super().__post_init__(**kwargs)
        self.layer_types = self.layer_types or [FULL] * self.num_hidden_layers
        self.rope_parameters = rope or {
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
        }

    def check(self) -> None:
        """Raises ValueError, naming the field, if no drafter can be built from this config."""
        optional = ("global_head_dim", "num_global_key_value_heads", "num_centroids")
        given = [name for name in optional if getattr(self, name) is not None]
        self.check_sizes("backbone_hidden_size", "sliding_window", "centroid_intermediate_top_k", *given)
        if len(self.layer_types) != self.num_hidden_layers or not {*self.layer_types} <= {SLIDING, FULL}:
            raise ValueError(
                f"layer_types is {self.layer_types!r} and num_hidden_layers {self.num_hidden_layers}; each layer must "
                f"be {SLIDING!r} or {FULL!r}."
            )
        for kind in sorted(set(self.layer_types)):
            rope: Any = self.rope_parameters.get(kind)
            known = isinstance(rope, dict) and rope.get("rope_type") in ROPE_TYPES and "rope_theta" in rope
            if not known or rope.get("partial_rotary_factor", 1.0) > 1:
                raise ValueError(
                    f"rope_parameters of {kind} are {rope!r}; they must have a rope_theta, a rope_type of "
                    f"{list(ROPE_TYPES)}, and no partial_rotary_factor beyond 1."
                )
            kv_heads, head_dim = self.kv_shape(kind)
            if self.num_attention_heads % kv_heads or head_dim % 2:
                raise ValueError(
                    f"In {kind} layers, num_attention_heads {self.num_attention_heads} must be a multiple of the "
                    f"{kv_heads} heads of keys, and the head dimension {head_dim} even."
                )
        if self.num_centroids is not None and (
            self.vocab_size % self.num_centroids or self.centroid_intermediate_top_k > self.num_centroids
        ):
            raise ValueError(
                f"num_centroids is {self.num_centroids}, centroid_intermediate_top_k "
                f"{self.centroid_intermediate_top_k} and vocab_size {self.vocab_size}: clusters have one size, so that "
                "num_centroids must divide vocab_size, and no more of them can be scored than there are."
            )

    def kv_shape(self, layer_type: str) -> tuple[int, int]:
        """Heads and head dimension of the target's keys that layers of this type attend to."""
        if layer_type == SLIDING:
            return self.num_key_value_heads, self.head_dim
        return self.num_global_key_value_heads or self.num_key_value_heads, self.global_head_dim or self.head_dim

    @property
    def num_scored(self) -> int:
        """Tokens that the head scores, of all."""
        if self.num_centroids is None:
            return self.vocab_size
        return self.centroid_intermediate_top_k * (self.vocab_size // self.num_centroids)


@dataclass(slots=True, kw_only=True)
class Gemma4AssistantOptions(Eagle3Options):
    """How a Gemma 4 assistant drafts; its forwards are small and of one level each.

    Attributes:
        depth: see `Eagle3Options`, as the others.
        top_k: see there.
        tree_budget: see there.
    """

    method = "gemma4_assistant"
    depth: int = 4
    top_k: int = 4


Rotary = tuple[Tensor, Tensor]


def storing_layers(model: PreTrainedModel) -> dict[str, int]:
    """By layer type, the target's last layer that stores keys and values itself.

    Layers of a config without types are full ones.
    """
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
    stored = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    return {kind: layer for layer, kind in enumerate(types[:stored])}


def inverse_frequencies(head_dim: int, parameters: Mapping[str, Any], device: torch.device | None = None) -> Tensor:
    """[head_dim / 2] float32: the rotary frequencies of a layer type.

    Where they are proportional, they are spaced over the whole head, and those beyond a part of it are 0.

    Examples:
        >>> rope = {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
        >>> inverse_frequencies(8, rope)
        tensor([1.0000, 0.3162, 0.0000, 0.0000])
    """
    steps = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequencies = 1.0 / parameters["rope_theta"] ** steps
    if parameters["rope_type"] == "default":
        return frequencies
    turned = int(parameters.get("partial_rotary_factor", 1.0) * head_dim // 2)
    return (frequencies / parameters.get("factor", 1.0)).where(torch.arange(len(steps), device=device) < turned, 0.0)


class QueryAttention(nn.Module):
    """Attention whose keys and values are the target's."""

    def __init__(self, config: Gemma4AssistantConfig, layer_type: str) -> None:
        super().__init__()
        _, self.head_dim = config.kv_shape(layer_type)
        heads, bias = config.num_attention_heads, config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, heads * self.head_dim, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=bias)

    def forward(self, hidden: Tensor, rotary: Rotary, entries: CommittedEntries) -> Tensor:
        """[batch, nodes, hidden] -> [batch, nodes, hidden]; nodes do not see each other."""
        batch, nodes, _ = hidden.shape
        queries = self.q_norm(self.q_proj(hidden).view(batch, nodes, -1, self.head_dim)).transpose(1, 2)
        cos, sin = rotary
        queries = queries * cos + rotate_half(queries) * sin
        mask = entries.mask[:, None, None].expand(-1, -1, nodes, -1)
        return self.o_proj(attend(queries, entries.keys, entries.values, mask, scaling=1.0).flatten(2))


class QueryLayer(nn.Module):
    """A decoder layer of Gemma 4: norms before and behind attention and MLP, and a factor at the end."""

    layer_scalar: Tensor

    def __init__(self, config: Gemma4AssistantConfig, layer_type: str) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = QueryAttention(config, layer_type)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_feedforward_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, hidden: Tensor, rotary: Rotary, entries: CommittedEntries) -> Tensor:
        """[batch, nodes, hidden] -> [batch, nodes, hidden]."""
        hidden = hidden + self.post_attention_layernorm(self.self_attn(self.input_layernorm(hidden), rotary, entries))
        hidden = hidden + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))
        return hidden * self.layer_scalar


class Clusters(nn.Module):
    """Which rows of the head are scored: those of the clusters whose centroids are nearest."""

    token_ordering: Tensor

    def __init__(self, config: Gemma4AssistantConfig) -> None:
        super().__init__()
        assert config.num_centroids is not None
        self.top_k = config.centroid_intermediate_top_k
        self.centroids = nn.Linear(config.hidden_size, config.num_centroids, bias=False)
        # Cluster after cluster, the tokens that are in it.
        self.register_buffer("token_ordering", torch.arange(config.vocab_size))

    def forward(self, outputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., scored] int64 token ids."""
        members = self.token_ordering.view(self.centroids.out_features, -1)
        return members[self.centroids(outputs).topk(self.top_k, dim=-1).indices].flatten(-2)


class Gemma4AssistantDrafter(PretrainedDrafter):
    """A Gemma 4 assistant as a drafter.

    Drafting options: `Gemma4AssistantOptions`.

    Relation to its siblings: `eagle3` and `mtp` keep keys and values of their own for all of the text; this one keeps
    none and attends to the target's, so that a level of nodes is one forward and nothing is rolled back.
    """

    config_class = Gemma4AssistantConfig
    config: Gemma4AssistantConfig
    options_class = Gemma4AssistantOptions
    options: Gemma4AssistantOptions
    _no_split_modules: ClassVar = ["QueryLayer"]
    card_summary = (
        "A Gemma 4 assistant: a few layers that attend to the target's own keys and values and draft token by "
        "token. hf_specdec grows a draft tree with it, wherever it is most confident."
    )

    def __init__(self, config: Gemma4AssistantConfig) -> None:
        config.check()
        super().__init__(config)
        hidden, target_hidden = config.hidden_size, config.backbone_hidden_size
        self.pre_projection = nn.Linear(2 * target_hidden, hidden, bias=False)
        self.layers = nn.ModuleList([QueryLayer(config, kind) for kind in config.layer_types])
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.post_projection = nn.Linear(hidden, target_hidden, bias=False)
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)
        self.clusters = None if config.num_centroids is None else Clusters(config)
        self.post_init()

    def rotary(self, position_ids: Tensor) -> dict[str, Rotary]:
        """By layer type cos and sin [batch, 1, 1, head_dim] for queries at these positions, [batch] int64."""
        found = {}
        for kind in dict.fromkeys(self.config.layer_types):
            head_dim = self.config.kv_shape(kind)[1]
            frequencies = inverse_frequencies(head_dim, self.config.rope_parameters[kind], position_ids.device)
            angles = (position_ids[:, None].float() * frequencies).repeat(1, 2)[:, None, None]
            found[kind] = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        return found

    def forward(
        self,
        embeddings: Tensor,
        states: Tensor,
        rotary: Mapping[str, Rotary],
        entries: Mapping[str, CommittedEntries],
    ) -> Tensor:
        """One forward over nodes of one depth.

        Args:
            embeddings: [batch, nodes, target_hidden], of the nodes' tokens, as the target scales them.
            states: [batch, nodes, target_hidden], those before them: the target's behind its final norm for a root,
                else `recurrent` of the output at the parent.
            rotary: see `rotary`.
            entries: of the target, by layer type, in the drafter's dtype and on its device.

        Returns:
            [batch, nodes, hidden], behind the final norm.
        """
        hidden = self.pre_projection(torch.cat([embeddings, states], dim=-1))
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            hidden = layer(hidden, rotary[kind], entries[kind])
        return self.norm(hidden)

    def recurrent(self, outputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., target_hidden], the state that goes into the next draft step."""
        return self.post_projection(outputs)

    def logits(self, outputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab] float32; -inf for tokens that are not scored."""
        cap = SoftCapLogitsProcessor(self.config.final_logit_softcapping)
        if self.clusters is None:
            return cap(None, apply_head(self.lm_head, outputs))
        scored = self.clusters(outputs)
        logits = (self.lm_head.weight[scored] @ outputs.unsqueeze(-1)).squeeze(-1).float()
        everything = logits.new_full((*outputs.shape[:-1], self.config.vocab_size), -torch.inf)
        return everything.scatter_(-1, scored, cap(None, logits))

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        return (model.config.get_text_config(decoder=True).num_hidden_layers,)  # behind the final norm

    def check_target(self, model: PreTrainedModel) -> None:
        config, name = self.config, self.name_or_path or type(self).__name__
        target, target_name = model.config.get_text_config(decoder=True), model.name_or_path or type(model).__name__
        family = config.target_model_type
        if family is not None and not str(target.model_type).startswith(family):
            raise ValueError(
                f"Drafter {name!r} reads keys and values of {family} targets, but target {target_name!r} has "
                f"model_type {target.model_type!r}. {way_out(self)}"
            )
        hidden = config.backbone_hidden_size
        check_shapes(
            self, model, hidden_size=hidden, embedding_size=hidden, vocab_size=config.vocab_size, may_exceed=True
        )
        storing = storing_layers(model)
        for kind in sorted(set(config.layer_types)):
            if kind not in storing:
                raise ValueError(
                    f"Drafter {name!r} has layers of type {kind!r}, which read those of the target, but target "
                    f"{target_name!r} stores keys and values in layers of types {sorted(storing)} only. {way_out(self)}"
                )
            layer = target.per_layer_config[storing[kind]]
            found = tuple(getattr(layer, field, None) for field in ("num_key_value_heads", "head_dim"))
            if None not in found and found != config.kv_shape(kind):
                raise ValueError(
                    f"Drafter {name!r} reads {config.kv_shape(kind)} heads and dimensions of keys in layers of type "
                    f"{kind!r}, but layer {storing[kind]} of target {target_name!r} stores {found}. {way_out(self)}"
                )
        window = getattr(target, "sliding_window", None)
        if SLIDING in config.layer_types and window != config.sliding_window:
            raise ValueError(
                f"Drafter {name!r} reads a sliding_window of {config.sliding_window} entries, but that of target "
                f"{target_name!r} is {window}. {way_out(self)}"
            )
        try:
            check_supported(model)
        except TreesRefusedError as error:
            raise ValueError(
                f"{error}. Drafter {name!r} reads the keys and values that the target keeps where trees are verified, "
                "so transformers' loop cannot stand in for ours; use another drafter there."
            ) from error

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return Gemma4AssistantGenerator(self, target)

    def card_facts(self) -> dict[str, str]:
        config = self.config
        scored = "" if config.num_centroids is None else f", of which {config.num_scored} are scored"
        return {
            "Method": self.method,
            "Layers": f"{config.num_hidden_layers}, hidden size {config.hidden_size}",
            "Vocabulary": f"{config.vocab_size}{scored}",
        }


class Gemma4AssistantGenerator(LastStates, TreeCandidateGenerator):
    """Draft trees of a Gemma 4 assistant.

    Args:
        drafter: with its options.
        target: of the call.
    """

    reads_cache = True

    def __init__(self, drafter: Gemma4AssistantDrafter, target: TargetModel) -> None:
        options = drafter.options
        self.drafter, self.target = drafter, target
        self.depth, self.top_k, self.tree_budget = options.depth, options.top_k, options.node_limit
        self.embeddings = target.model.get_input_embeddings()
        self.layers = storing_layers(target.model)
        self.vocabulary: TargetVocabularyLogitsProcessor

    def observe(self, committed: Committed) -> None:
        if committed.tree is None:
            self.vocabulary = TargetVocabularyLogitsProcessor(committed.target_logits.shape[-1])
        super().observe(committed)

    @in_inference_mode
    def draft(self, context: DraftContext) -> DraftTree:
        drafter, device, home = self.drafter, self.drafter.device, context.root_ids.device
        width = min(self.top_k, drafter.config.num_scored)
        rotary = drafter.rotary(context.root_positions.to(device) - 1)
        entries = {kind: self._entries(kind) for kind in set(drafter.config.layer_types)}
        rows = torch.arange(len(context.root_ids), device=device).unsqueeze(1)
        states = self.last_states.to(device=device, dtype=drafter.dtype).unsqueeze(1)
        outputs = drafter(self._embed(context.root_ids.unsqueeze(1), home), states, rotary, entries)

        def extend(level: int, token_ids: Tensor, above: Tensor) -> Tensor:
            nonlocal outputs
            outputs = drafter(self._embed(token_ids, home), drafter.recurrent(outputs)[rows, above], rotary, entries)
            return self._logits(outputs)

        levels = grow_levels(self._logits(outputs).squeeze(1), extend, self.depth, width, lambda ids: ids)
        context.lap("draft")
        tree = best_tree(context.root_ids.to(device), *levels, depth=self.depth, budget=self.tree_budget)
        context.lap("tree")
        return tree

    def _entries(self, kind: str) -> CommittedEntries:
        """What the drafter's layers of this type attend to."""
        window = self.drafter.config.sliding_window if kind == SLIDING else None
        entries = self.target.committed_entries(self.layers[kind], window)
        device, dtype = self.drafter.device, self.drafter.dtype
        return replace(
            entries,
            keys=entries.keys.to(device=device, dtype=dtype),
            values=entries.values.to(device=device, dtype=dtype),
            mask=entries.mask.to(device),
        )

    def _embed(self, token_ids: Tensor, home: torch.device) -> Tensor:
        """[batch, nodes] -> [batch, nodes, target_hidden], scaled as the target scales it; `home` is its device."""
        return self.embeddings(token_ids.to(home)).to(device=self.drafter.device, dtype=self.drafter.dtype)

    def _logits(self, outputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab] float32, without tokens that the target does not have."""
        return self.vocabulary(None, self.drafter.logits(outputs))


# By `model_type`, the target's hidden size where none is named.
BACKBONES = {"gemma4_assistant": 1536, "gemma4_unified_assistant": 3840}
TEXT_DEFAULTS: Config = {
    key: getattr(Gemma4TextConfig, key)
    for key in (
        "attention_bias", "final_logit_softcapping", "head_dim", "hidden_activation", "hidden_size",
        "initializer_range", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
        "rms_norm_eps", "sliding_window", "vocab_size",
    )
}  # fmt: skip
# Of the text config of the other kind, where it differs.
UNIFIED_DEFAULTS: Config = {"sliding_window": Gemma4UnifiedTextConfig.sliding_window}
GLOBAL_HEAD_DIM = 512
DEFAULT_ROPES: Config = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
_CLUSTERS = {"num_centroids": 2048, "centroid_intermediate_top_k": 32}
# Savers may write projections for layers that share keys and values; readers ignore them.
_NOT_READ = re.compile(rf"\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.|{ROTARY}")
_ROPE = ("factor", "partial_rotary_factor", "rope_theta", "rope_type")
_TOKENS = (
    "audio_token_id", "boa_token_id", "boi_token_id", "eoa_token_id", "eoa_token_index", "eoi_token_id",
    "image_token_id", "video_token_id",
)  # fmt: skip
_ORDERING = "masked_embedding.token_ordering"


def read_assistant(fields: Config, stored: Headers | None) -> Reading:
    """Our fields and tensor names for a Gemma 4 assistant.

    Raises:
        ValueError: there is no text config, or something in it is not what layers without keys of their own can have.
    """
    kind, text = fields["model_type"], fields.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"text_config is {text!r}; it must hold the config of the assistant's layers.")
    defaults = TEXT_DEFAULTS | (UNIFIED_DEFAULTS if "unified" in kind else {})
    ours = defaults | {key: text[key] for key in defaults if text.get(key) is not None}
    ours["hidden_act"] = ours.pop("hidden_activation")
    check_sizes(ours)
    layers = ours["num_hidden_layers"]
    if text.get("num_kv_shared_layers") not in (None, 0, layers):
        raise ValueError(
            f"num_kv_shared_layers is {text['num_kv_shared_layers']!r} and num_hidden_layers {layers}: all layers of "
            "an assistant read the target's keys and values."
        )
    pattern = ["sliding_attention" if layer % 6 < 5 else "full_attention" for layer in range(layers)]
    types = text.get("layer_types") or pattern
    types = [*types[:-1], "full_attention"]  # the config class sets the last one so
    ours |= _of_full_layers(text, types) | {
        "layer_types": types,
        "rope_parameters": text.get("rope_parameters") or DEFAULT_ROPES,
        "backbone_hidden_size": fields.get("backbone_hidden_size", BACKBONES[kind]),
        "target_model_type": "gemma4",
        "tie_word_embeddings": False,
        **{key: fields[key] for key in OURS if fields.get(key) is not None},
    }
    if fields.get("use_ordered_embeddings"):
        ours |= {key: fields.get(key, default) for key, default in _CLUSTERS.items()}
    return Reading(ours, _tensor_names(stored or {}, tied=fields.get("tie_word_embeddings", True)))


def _of_full_layers(text: Config, types: list[Any]) -> Config:
    """Head dimension and heads of keys in full layers.

    Raises:
        ValueError: full layers differ, or others have overrides too.
    """
    by_layer = text.get("per_layer_config")
    if by_layer is None:
        head_dim, heads = text.get("global_head_dim"), text.get("num_global_key_value_heads")
        found: Any = {"head_dim": GLOBAL_HEAD_DIM if head_dim is None else head_dim}
        if heads is not None and text.get("attention_k_eq_v"):
            found["num_key_value_heads"] = heads
    else:
        full = [str(layer) for layer, kind in enumerate(types) if kind == "full_attention"]
        given = list(by_layer.values()) if isinstance(by_layer, dict) else [None]
        found = given[0] if given else {}
        known = {"head_dim", "num_key_value_heads"}
        same = isinstance(found, dict) and found.keys() <= known and all(each == found for each in given)
        if not same or (given and sorted(by_layer) != sorted(full)):
            raise ValueError(
                f"per_layer_config is {by_layer!r}; it must say {' and '.join(sorted(known))} of the full layers, "
                f"{full}, the same of each, and nothing else."
            )
    check_sizes(found)
    return {
        "global_head_dim": found.get("head_dim"),
        "num_global_key_value_heads": found.get("num_key_value_heads"),
    }


def _tensor_names(stored: Headers, *, tied: bool) -> dict[str, str]:
    names = {}
    own_head = "lm_head.weight" in stored or not tied
    for name in stored:
        if _NOT_READ.search(name) or (own_head and name == "model.embed_tokens.weight"):
            continue
        ours = "lm_head.weight" if name == "model.embed_tokens.weight" else name.removeprefix("model.")
        names[name] = ours.replace("masked_embedding.", "clusters.")
    return names


def check_ordering(tensors: Mapping[str, Tensor], name: str) -> None:
    """Raises ValueError if the order of tokens by cluster leaves some out, or has some twice."""
    ordering = tensors.get(_ORDERING)
    if ordering is not None and ordering.sort().values.tolist() != list(range(len(ordering))):
        raise ValueError(
            f"{_ORDERING} of {name!r} must hold each of the {len(ordering)} token ids once, cluster after cluster, and "
            "does not: the checkpoint is damaged. Copy or download it again."
        )


GEMMA4_ROPES = Section(nested=dict.fromkeys(DEFAULT_ROPES, Section(frozenset(_ROPE))))
_TEXT = Section(
    read=frozenset((
        *TEXT_DEFAULTS, "attention_k_eq_v", "global_head_dim", "layer_types", "num_global_key_value_heads",
        "num_kv_shared_layers", "per_layer_config",
    )),
    # Those of experts and of per-layer inputs matter where these are switched on.
    idle=TRANSFORMERS | {
        "max_position_embeddings", "moe_intermediate_size", "num_experts", "top_k_experts",
        "vocab_size_per_layer_input",
    },
    only={
        "enable_moe_block": (False,),
        "hidden_size_per_layer_input": (0,),
        "use_bidirectional_attention": ("vision",),  # of images in the target's own layers
        "use_double_wide_mlp": (False,),
    },
    nested={"rope_parameters": GEMMA4_ROPES},
)  # fmt: skip
GEMMA4_ASSISTANT = Format(
    "Gemma 4 assistant (transformers)",
    "gemma4_assistant",
    read_assistant,
    Section(
        OURS.union(("backbone_hidden_size", "tie_word_embeddings", "use_ordered_embeddings", *_CLUSTERS)),
        # Tokens of the target's, and a number of drafts of other readers.
        TRANSFORMERS | {*_TOKENS, "block_size"},
        nested={"text_config": _TEXT},
    ),
    check=check_ordering,
    recognises=lambda config: config.get("model_type") in BACKBONES,
    rank=20,
)
OWN_KEYS = Section(
    OURS.union((
        "attention_bias", "backbone_hidden_size", "centroid_intermediate_top_k", "final_logit_softcapping",
        "global_head_dim", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
        "num_attention_heads", "num_centroids", "num_global_key_value_heads", "num_hidden_layers",
        "num_key_value_heads", "rms_norm_eps", "sliding_window", "target_model_type", "vocab_size",
    )),
    TRANSFORMERS,
    nested={"rope_parameters": GEMMA4_ROPES},
)  # fmt: skip


register(
    "gemma4_assistant",
    Gemma4AssistantDrafter,
    layouts=(GEMMA4_ASSISTANT,),
    own_keys=OWN_KEYS,
    serving=Serving(
        "mtp",
        "vLLM serves Gemma 4 assistants in their published layout (method mtp in --speculative-config)",
        # What this library saves is not served, and not exported either.
        needs_export=lambda drafter, config: config["model_type"] == drafter.config.model_type,
    ),
)
