"""EAGLE-1 and EAGLE-2: one decoder layer on the target's last state, drafting with the target's own head.

Both have the same weights; EAGLE-2 changed only how the tree grows, and that is how it grows here. A pair is a token
and the state before it, as in `eagle3.py`, which has the cache of pairs and the tree. The differences: the state is the
target's after its final norm, and what the layer gives is taken for the next state as it is; token and state are joined
by `fc` before the layer, which has the width of the target and usually no norm before its attention; there is no final
norm and no head, so the target's head gives the logits.

Source: EAGLE, arXiv 2401.15077, Section 4.1; EAGLE-2, arXiv 2406.16858, Section 4; SafeAILab/EAGLE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.modules import apply_head, num_tokens
from hf_specdec.drafting.config import TargetFields
from hf_specdec.drafting.draft_logits import TargetVocabularyLogitsProcessor
from hf_specdec.drafting.layers import CachedAttention
from hf_specdec.drafting.registry import Serving, name_of, register
from hf_specdec.drafting.shapes import check_shapes
from hf_specdec.drafting.vocabulary import CachedRows, draftable_rows
from hf_specdec.hub.formats.base import Config, Format, Headers, Reading, Unsupported, decoder_shape
from hf_specdec.hub.formats.keys import decoder
from hf_specdec.hub.formats.speculators import is_kind
from hf_specdec.methods.eagle3.drafting import Eagle3Generator
from hf_specdec.methods.eagle3.network import Eagle3Options, PairDrafter


@strict
class EagleConfig(TargetFields, LlamaConfig):
    """The config of a Llama decoder (usually with one layer) and what EAGLE-1 and 2 add.

    Args:
        bias: whether `fc` has a bias.
        output_bias: whether the attention's output projection has one where the others do (`attention_bias`).
        norm_before_attention: whether the first layer has an input norm, as every later one.
        own_embeddings: whether the checkpoint has token embeddings; if not, the target's are used, unscaled.
        draft_token_ids: the target's ids that can be drafted, ascending; None for all.
    """

    model_type = "hf_specdec_eagle"

    num_hidden_layers: int = 1
    bias: bool = True
    output_bias: bool = True
    norm_before_attention: bool = False
    own_embeddings: bool = False
    draft_token_ids: list[int] | None = None

    @property
    def maps_vocabulary(self) -> bool:
        """Whether draft ids differ from target ids."""
        return self.draft_token_ids is not None

    @property
    def draft_vocab_size(self) -> int:
        """Number of tokens that can be drafted."""
        return self.vocab_size if self.draft_token_ids is None else len(self.draft_token_ids)


@dataclass(slots=True, kw_only=True)
class EagleOptions(Eagle3Options):
    """Drafting options of an EAGLE-1 or EAGLE-2 drafter; the defaults are EAGLE-2's.

    Attributes:
        depth: see `Eagle3Options`, as the others.
        top_k: see there.
        tree_budget: see there.
    """

    method = "eagle"
    depth: int = 6


class EagleLayer(nn.Module):
    """A Llama layer, of which the first may lack its input norm."""

    def __init__(self, config: EagleConfig, normed: bool) -> None:
        super().__init__()
        self.self_attn = CachedAttention(config, config.hidden_size, norms=False)
        if config.attention_bias and not config.output_bias:
            output = self.self_attn.o_proj
            self.self_attn.o_proj = nn.Linear(output.in_features, output.out_features, bias=False)
        self.mlp = LlamaMLP(config)
        if normed:
            self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.normed = normed

    def forward(self, states: Tensor, *attention_inputs: Any) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        inputs = self.input_layernorm(states) if self.normed else states
        states = states + self.self_attn(inputs, *attention_inputs)
        return states + self.mlp(self.post_attention_layernorm(states))


class EagleDrafter(PairDrafter):
    """An EAGLE-1 or EAGLE-2 checkpoint as a drafter, with EAGLE-2's tree.

    Drafting options: `EagleOptions`.

    Relation to its siblings: `eagle3` fuses three states of the target and has a head of its own; this one reads the
    last state and needs the target's head, whose rows `restrict_vocabulary` limits.
    """

    config_class = EagleConfig
    config: EagleConfig
    options_class = EagleOptions
    options: EagleOptions
    _no_split_modules: ClassVar = ["EagleLayer"]
    card_summary = (
        "An EAGLE-1 or EAGLE-2 drafter: it drafts token by token from the target's last state and then from its "
        "own, with the target's head. hf_specdec grows the draft tree where its confidence is highest."
    )

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList(
            [EagleLayer(config, index > 0 or config.norm_before_attention) for index in range(config.num_hidden_layers)]
        )
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self._head_rows = CachedRows()
        self._draft_ids: Tensor | None = None  # the config's list as a tensor, once it was needed
        self.post_init()

    def run_layers(self, embeddings: Tensor, states: Tensor, *attention_inputs: Any) -> Tensor:
        """[batch, seq, hidden], the predicted states; the target's head gives logits for the token after each pair."""
        hidden = self.fc(torch.cat([embeddings, states], dim=-1))
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, *attention_inputs, index)
        return hidden

    def head(self, target_head: nn.Module) -> nn.Module:
        """The target's head, or its rows in the draft vocabulary."""
        ids = self.draft_ids(self.device)
        return target_head if ids is None else self._head_rows.of(target_head, ids)

    def draft_ids(self, device: torch.device) -> Tensor | None:
        """[draft_vocab] int64, the target's ids that can be drafted; None for all."""
        ids = self.config.draft_token_ids
        if ids is not None and (self._draft_ids is None or self._draft_ids.device != device):
            self._draft_ids = torch.tensor(ids, device=device)
        return self._draft_ids

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Converts ids of the draft vocabulary to the target's ids."""
        ids = self.draft_ids(draft_ids.device)
        return draft_ids if ids is None else ids[draft_ids]

    def restrict_vocabulary(self, draft_vocab: Tensor | Sequence[int]) -> None:
        own = self.to_target_ids(torch.arange(self.config.draft_vocab_size, device=self.device))
        rows = draftable_rows(own, draft_vocab, self.config.vocab_size, name_of(self))
        self.config.draft_token_ids = own[rows].tolist()
        self._draft_ids, self._head_rows = None, CachedRows()

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        return (model.config.get_text_config(decoder=True).num_hidden_layers,)  # after the final norm

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return EagleGenerator(self, target)

    def check_target(self, model: PreTrainedModel) -> None:
        config = self.config
        check_shapes(self, model, hidden_size=config.hidden_size, vocab_size=config.vocab_size, may_exceed=True)
        rows, ids = num_tokens(model), config.draft_token_ids
        if ids is not None and not 0 <= min(ids) <= max(ids) < rows:
            raise ValueError(
                f"draft_token_ids of drafter {name_of(self)!r} has ids from {min(ids)} to {max(ids)}, but target "
                f"{name_of(model)!r} has {rows} embeddings: choose the vocabulary again, with the target's tokenizer."
            )

    def card_facts(self) -> dict[str, str]:
        config = self.config
        return {
            "Method": self.method,
            "Layers": f"{config.num_hidden_layers}, hidden size {config.hidden_size}",
            "Vocabulary": f"{config.vocab_size}, of which {config.draft_vocab_size} can be drafted",
        }


class EagleGenerator(Eagle3Generator):
    """EAGLE-3's tree, with logits of the target's head."""

    def __init__(self, drafter: EagleDrafter, target: TargetModel) -> None:
        super().__init__(drafter, target)
        self.head = drafter.head(target.model.get_output_embeddings())

    def logits(self, outputs: Tensor) -> Tensor:
        logits = apply_head(self.head, outputs).to(outputs.device)  # the target's head may be elsewhere
        if self.drafter.config.maps_vocabulary:
            return logits
        return TargetVocabularyLogitsProcessor(self.vocab_size)(None, logits)


def read_eagle(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of an EAGLE-1 or EAGLE-2 drafter.

    The tensors decide about biases and norms: configs are copies of the target's, and have wrong or no fields for them.
    """
    names = {name: name for name in stored or () if not name.endswith("rotary_emb.inv_freq")}
    present = names if stored is not None else {"embed_tokens.weight"}  # a larger drafter, for the checks of size
    first = "layers.0."
    ours = decoder_shape(fields, "llama") | {
        "bias": "fc.bias" in present if stored is not None else fields.get("bias", True) is not False,
        "attention_bias": f"{first}self_attn.q_proj.bias" in present,
        "output_bias": f"{first}self_attn.o_proj.bias" in present,
        "mlp_bias": f"{first}mlp.up_proj.bias" in present,
        "norm_before_attention": f"{first}input_layernorm.weight" in present,
        "own_embeddings": "embed_tokens.weight" in present,
    }
    return Reading(ours, names)


SAFEAILAB_EAGLE = Format(
    "EAGLE-1 and EAGLE-2",
    "eagle",
    read_eagle,
    decoder("bias", idle=("qkv_bias",)),
    other_weights=("pytorch_model.bin",),
    recognises_names=lambda names: (
        {"fc.weight", "layers.0.mlp.up_proj.weight"} <= set(names)
        and not {"lm_head.weight", "norm.weight"} & set(names)
    ),
    rank=91,
)
SPECULATORS_EAGLE = Unsupported(
    "speculators eagle", "a reader for EAGLE-1, whose drafters have no head", is_kind("eagle"), rank=0
)


register(
    "eagle",
    EagleDrafter,
    layouts=(SAFEAILAB_EAGLE,),
    not_read=(SPECULATORS_EAGLE,),
    serving=Serving(
        "eagle",
        "vLLM serves these drafters in their published layout (method eagle in --speculative-config)",
        needs_export=lambda drafter, config: False,
    ),
)
