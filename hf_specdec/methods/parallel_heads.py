"""Parallel multi-token-prediction heads: decoder layers side by side on the target's trunk, one per further token.

In the paper a model has n heads on a shared trunk; each is a decoder layer, and all share the final norm and the matrix
to the vocabulary. The first head, the model's last layer, predicts the next token. Here the target is that model with
its first head, and the drafter has the others: head i, from 0, reads the output of the target's second to last layer
and predicts the token i + 2 positions later. So a round runs all heads once and drafts from marginals, as `medusa`
does; unlike Medusa's, these heads attend to the text before, and have a cache.

The published checkpoints of the paper are in a layout of their own, which is not read here; the heads are trained for a
target that exists (`training/parallel_heads.py`), with its trunk frozen.

Source: Gloeckle et al., arXiv 2404.19737, Section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from hf_specdec.decoding.devices import in_inference_mode
from hf_specdec.decoding.exchange import DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.modules import apply_head
from hf_specdec.drafting.config import TargetFields
from hf_specdec.drafting.drafter import BlockMarginals
from hf_specdec.drafting.layers import DraftLayer
from hf_specdec.drafting.registry import MARGINAL_METHODS, Serving, register
from hf_specdec.drafting.shapes import check_shapes
from hf_specdec.methods.eagle3 import PairDrafter, PairReader
from hf_specdec.methods.peagle import PEagleOptions

__all__ = ["ParallelHeadsConfig", "ParallelHeadsDrafter", "ParallelHeadsOptions"]

MAX_HEADS = 64


@strict
class ParallelHeadsConfig(TargetFields, LlamaConfig):
    """The config of a Llama decoder, of which every head is one layer.

    Args:
        num_parallel_heads: heads, one for each of the tokens after the next.
        trunk_layer: 0-based target layer whose output the heads read; None for the second to last.
        qk_norm: whether each attention head's queries and keys are normalised before RoPE.
    """

    model_type = "hf_specdec_parallel_heads"
    own_embeddings = False  # what the cache of pairs asks for; the heads read no tokens

    num_parallel_heads: int = 3
    trunk_layer: int | None = None
    qk_norm: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.num_hidden_layers = self.num_parallel_heads  # each is a layer
        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Raises ValueError, naming the field, if no heads can be built from this config."""
        if type(self.num_parallel_heads) is not int or not 1 <= self.num_parallel_heads <= MAX_HEADS:
            raise ValueError(
                f"num_parallel_heads is {self.num_parallel_heads!r}; it must be an integer from 1 to {MAX_HEADS}."
            )


@dataclass(slots=True, kw_only=True)
class ParallelHeadsOptions(PEagleOptions):
    """Drafting options of parallel heads.

    Attributes:
        method: see `PEagleOptions`.
        tree_budget: see there.
    """


class ParallelHeadsDrafter(PairDrafter):
    """Heads on the target's trunk as a drafter.

    Drafting options: `ParallelHeadsOptions`.
    """

    config_class = ParallelHeadsConfig
    config: ParallelHeadsConfig
    options_class = ParallelHeadsOptions
    options: ParallelHeadsOptions
    _no_split_modules: ClassVar = ["DraftLayer"]
    card_summary = (
        "Parallel multi-token-prediction heads: decoder layers on the target's trunk, each for one of the next "
        "tokens. hf_specdec drafts with them the tree of the likeliest combinations."
    )

    def __init__(self, config: ParallelHeadsConfig) -> None:
        config.check()
        super().__init__(config)
        self.heads = nn.ModuleList([DraftLayer(config) for _ in range(config.num_parallel_heads)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.post_init()

    def run_layers(self, embeddings: Tensor | None, states: Tensor, *attention_inputs: Any) -> Tensor:
        """All heads over the trunk's states: [batch, seq, heads * hidden], after the final norm. Reads no tokens."""
        outputs = [head(states, *attention_inputs, index) for index, head in enumerate(self.heads)]
        return torch.cat([self.norm(output) for output in outputs], dim=-1)

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        layer = self.config.trunk_layer
        return (model.config.get_text_config(decoder=True).num_hidden_layers - 2 if layer is None else layer,)

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return MARGINAL_METHODS[self.method](ParallelHeadsMarginals(self, target), self.options)

    def check_target(self, model: PreTrainedModel) -> None:
        check_shapes(
            self,
            model,
            hidden_size=self.config.hidden_size,
            vocab_size=self.config.vocab_size,
            layers=self.feature_layers(model),
        )

    def card_facts(self) -> dict[str, str]:
        config = self.config
        return {
            "Method": f"{self.loaded_options().method}, on parallel heads",
            "Heads": f"{config.num_parallel_heads}, each a decoder layer of hidden size {config.hidden_size}",
        }


class ParallelHeadsMarginals(PairReader, BlockMarginals):
    """Per-position logits of all heads, from the trunk's state at the last token before the root."""

    def __init__(self, drafter: ParallelHeadsDrafter, target: TargetModel) -> None:
        super().__init__(drafter, target, depth=1, room=0)
        self.lm_head = target.model.get_output_embeddings()

    def embed(self, token_ids: Tensor) -> None:  # type: ignore[override]
        """Nothing: the heads read no tokens."""

    @in_inference_mode
    def marginals(self, context: DraftContext) -> Tensor:
        outputs = self.read_pairs(context.root_ids)[:, 0]
        states = outputs.unflatten(-1, (self.drafter.config.num_parallel_heads, -1))
        return apply_head(self.lm_head, states)


register(
    "parallel_heads",
    ParallelHeadsDrafter,
    serving=Serving(not_exported="vLLM has no class for parallel heads beside a target"),
)
