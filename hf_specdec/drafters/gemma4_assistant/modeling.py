"""Gemma4AssistantDrafter: layers of Gemma 4 that have queries only, and read the target's keys and values.

With N tokens in the target's cache, x_N the root and f_0 the target's state at position N - 1, behind its final norm:

    z = pre [E(x); f_0],   y = norm(layers(z)),   logits of the next token = head(y),   f_1 = post y

and so on with each drafted token and the state f_j behind which it was drafted. E is the target's embedding as the
target scales it. Every layer attends, from position N - 1 and without a scale, to entries 0..N-1 of the target's last
layer of the same type that stores keys and values itself; nothing is cached. transformers drafts from position N and
sees entries of rejected drafts too; the positions here are vLLM's.
Source: shared facts on formats of 2026, section 6.2; transformers, gemma4_assistant; vLLM, gemma4_mtp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, rotate_half

from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.modules import apply_head
from hf_specdec.decoding.support import TreesRefusedError, check_supported
from hf_specdec.decoding.target import CommittedEntries, TargetModel
from hf_specdec.drafters.gemma4_assistant.configuration import (
    FULL,
    SLIDING,
    Gemma4AssistantConfig,
    Gemma4AssistantOptions,
)
from hf_specdec.drafters.pretrained import PretrainedDrafter
from hf_specdec.drafters.shapes import check_shapes, way_out

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

    Example:
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
        kv_heads, self.head_dim = config.kv_shape(layer_type)
        heads, bias = config.num_attention_heads, config.attention_bias
        self.grouped = heads > kv_heads
        self.q_proj = nn.Linear(config.hidden_size, heads * self.head_dim, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=bias)

    def forward(self, hidden: Tensor, rotary: Rotary, entries: CommittedEntries) -> Tensor:
        """[batch, nodes, hidden] -> [batch, nodes, hidden]; nodes do not see each other."""
        batch, nodes, _ = hidden.shape
        queries = self.q_norm(self.q_proj(hidden).view(batch, nodes, -1, self.head_dim)).transpose(1, 2)
        cos, sin = rotary
        queries = queries * cos + rotate_half(queries) * sin
        attended = nn.functional.scaled_dot_product_attention(
            queries,
            entries.keys,
            entries.values,
            attn_mask=entries.mask[:, None, None].expand(-1, -1, nodes, -1),
            scale=1.0,
            enable_gqa=self.grouped,
        )
        return self.o_proj(attended.transpose(1, 2).reshape(batch, nodes, -1))


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
    base_model_prefix = ""
    _no_split_modules: ClassVar = ["QueryLayer"]

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
        if self.clusters is None:
            return self._capped(apply_head(self.lm_head, outputs))
        scored = self.clusters(outputs)
        logits = (self.lm_head.weight[scored] @ outputs.unsqueeze(-1)).squeeze(-1).float()
        everything = logits.new_full((*outputs.shape[:-1], self.config.vocab_size), -torch.inf)
        return everything.scatter_(-1, scored, self._capped(logits))

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

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
        check_shapes(self, model, hidden_size=hidden, embedding_size=hidden, vocab_size=config.vocab_size)
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
        from hf_specdec.drafters.gemma4_assistant.candidates import Gemma4AssistantGenerator

        return Gemma4AssistantGenerator(self, target)

    def card_facts(self) -> dict[str, str]:
        config = self.config
        scored = "" if config.num_centroids is None else f", of which {config.num_scored} are scored"
        return {
            "Method": self.method,
            "Layers": f"{config.num_hidden_layers}, hidden size {config.hidden_size}",
            "Vocabulary": f"{config.vocab_size}{scored}",
        }

    def card_summary(self) -> str:
        return (
            "A Gemma 4 assistant: a few layers that attend to the target's own keys and values and draft token by "
            "token. hf_specdec grows a draft tree with it, wherever it is most confident."
        )
