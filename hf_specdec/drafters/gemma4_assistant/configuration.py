"""Gemma4AssistantConfig: the small stack of a Gemma 4 assistant, and what it reads of its target.

The published layout is nested and leaves sizes to defaults; `hub/formats/gemma4_assistant.py` translates it to the
fields here. What is written to disk is this description, under a `model_type` of its own. Source: shared facts on
formats of 2026, section 6.2; transformers, gemma4_assistant and gemma4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedConfig

from hf_specdec.drafters.eagle3 import Eagle3Options

ARCHITECTURE = "Gemma4AssistantDrafter"
SLIDING, FULL = "sliding_attention", "full_attention"
ROPE_TYPES = ("default", "proportional")


class Gemma4AssistantConfig(PreTrainedConfig):
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
        target_name_or_path: the target it was trained for, if known.
        target_revision: the commit or branch of that target.
        target_tokenizer_sha256: `tokenizer_fingerprint` of the target's tokenizer.
    """

    model_type = "hf_specdec_gemma4_assistant"
    mlp_bias = False  # which the MLP's class asks for

    def __init__(
        self,
        vocab_size: int = 262144,
        hidden_size: int = 256,
        intermediate_size: int = 2048,
        num_hidden_layers: int = 4,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 1,
        num_global_key_value_heads: int | None = None,
        head_dim: int = 256,
        global_head_dim: int | None = None,
        layer_types: list[str] | None = None,
        sliding_window: int = 512,
        rope_parameters: dict[str, Any] | None = None,
        hidden_act: str = "gelu_pytorch_tanh",
        rms_norm_eps: float = 1e-6,
        attention_bias: bool = False,
        final_logit_softcapping: float | None = None,
        initializer_range: float = 0.02,
        backbone_hidden_size: int = 1536,
        num_centroids: int | None = None,
        centroid_intermediate_top_k: int = 32,
        target_model_type: str | None = None,
        target_name_or_path: str | None = None,
        target_revision: str | None = None,
        target_tokenizer_sha256: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.num_global_key_value_heads = num_global_key_value_heads
        self.head_dim = head_dim
        self.global_head_dim = global_head_dim
        self.layer_types = [FULL] * num_hidden_layers if layer_types is None else layer_types
        self.sliding_window = sliding_window
        self.rope_parameters = rope_parameters or {
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
        }
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.attention_bias = attention_bias
        self.final_logit_softcapping = final_logit_softcapping
        self.initializer_range = initializer_range
        self.backbone_hidden_size = backbone_hidden_size
        self.num_centroids = num_centroids
        self.centroid_intermediate_top_k = centroid_intermediate_top_k
        self.target_model_type = target_model_type
        self.target_name_or_path = target_name_or_path
        self.target_revision = target_revision
        self.target_tokenizer_sha256 = target_tokenizer_sha256
        self.architectures = [ARCHITECTURE]

    def check(self) -> None:
        """Raises ValueError, naming the field, if no drafter can be built from this config."""
        sizes = ("backbone_hidden_size", "sliding_window", "centroid_intermediate_top_k")
        optional = ("global_head_dim", "num_global_key_value_heads", "num_centroids")
        for name in (*sizes, *optional):
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and not (name in optional and value is None):
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1.")
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
    tree_budget: int | Literal["auto"] = 16
