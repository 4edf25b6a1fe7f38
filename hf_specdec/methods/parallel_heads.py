"""Parallel multi-token-prediction heads: decoder layers side by side on the target's trunk, one per further token.

In the paper a model has n heads on a shared trunk; each is a decoder layer, and all share the final norm and the matrix
to the vocabulary. The first head, the model's last layer, predicts the next token. Here the target is that model with
its first head, and the drafter has the others: head i, from 0, reads the output of the target's second to last layer
and predicts the token i + 2 positions later. So a round runs all heads once and drafts from marginals, as `medusa`
does; unlike Medusa's, these heads attend to the text before, and have a cache.

The training step sums the loss over the heads; by default it is the cross entropy with the tokens that the target
wrote. A head begins as a copy of the target's last layer, which is the paper's head for the next token, where the two
have the same tensors. The paper trains the trunk with the heads; here it stays the target's.

Meta's published checkpoints are target and drafter in one folder, with `params.json`, one `consolidated*.pth` and the
names of Llama's original code: `load_with_heads` reads them. The layers of the trunk and the head for the next token
are `layers.0`, `layers.1`, ...; the heads for later tokens are `extra_heads.0`, `extra_heads.1`, ..., each a layer like
these on the output of the trunk. All heads share the final norm and the output matrix. Llama's original code rotates
pairs of neighbouring dimensions; here, as in transformers, each dimension of the first half with one of the second
half, so the rows of the matrices of queries and keys are in another order.

Source: Gloeckle et al., arXiv 2404.19737, Section 2; the model card of facebook/multi-token-prediction.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.hf_argparser import HfArg
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from hf_specdec.decoding.devices import in_inference_mode
from hf_specdec.decoding.exchange import DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.modules import apply_head
from hf_specdec.decoding.targets.taps import decoder_layers
from hf_specdec.drafting.config import TargetFields
from hf_specdec.drafting.drafter import BlockMarginals
from hf_specdec.drafting.layers import DraftLayer
from hf_specdec.drafting.registry import MARGINAL_METHODS, Serving, register
from hf_specdec.drafting.shapes import check_shapes
from hf_specdec.hub.tensors import load_tensors
from hf_specdec.methods.eagle3.drafting import PairReader
from hf_specdec.methods.eagle3.network import PairDrafter
from hf_specdec.methods.medusa import HeadsStep
from hf_specdec.methods.peagle import PEagleOptions
from hf_specdec.training.losses import LossName
from hf_specdec.training.options import Count
from hf_specdec.training.recipe import Recipe, ShapeOptions, decoder_shape, register_recipe
from hf_specdec.training.source import RowSource
from hf_specdec.training.vocabulary import copy_final_norm

__all__ = [
    "ParallelHeadsConfig", "ParallelHeadsDrafter", "ParallelHeadsOptions", "ParallelHeadsStep", "load_with_heads",
    "new_drafter",
]  # fmt: skip

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
            may_exceed=True,
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


class ParallelHeadsStep(HeadsStep):
    """Loss of one batch of rows for a `ParallelHeadsDrafter`."""

    def __init__(self, drafter: ParallelHeadsDrafter, target: PreTrainedModel, *, loss: LossName = "ce") -> None:
        super().__init__(drafter, target, drafter.config.num_parallel_heads, loss=loss)

    def logits(self, model: nn.Module, states: Tensor, used: Tensor) -> Iterable[Tensor]:
        positions = torch.arange(states.shape[1], device=states.device).expand(len(states), -1)
        outputs = model(None, states, positions, is_causal=True).unflatten(-1, (self.heads, -1))
        return (self.reader.head(hidden) for hidden in outputs[used].unbind(1))


@torch.no_grad()
def new_drafter(
    target: PreTrainedModel, *, num_heads: int = 3, trunk_layer: int | None = None, intermediate_size: int | None = None
) -> ParallelHeadsDrafter:
    """Heads for a target, which begin as copies of its last layer where that has the same tensors.

    Args:
        target: the model to draft for.
        num_heads: of the drafter.
        trunk_layer: target layer to read; None for the second to last.
        intermediate_size: of the MLPs; None for the target's.
    """
    last = list(decoder_layers(target))[-1].state_dict()
    drafter = ParallelHeadsDrafter(
        ParallelHeadsConfig(
            num_parallel_heads=num_heads,
            trunk_layer=trunk_layer,
            qk_norm="self_attn.q_norm.weight" in last,
            attention_bias="self_attn.q_proj.bias" in last,
            **decoder_shape(target, intermediate_size),
        )
    )
    copy_final_norm(drafter.norm.weight, target)
    for head in drafter.heads:
        own = head.state_dict()
        if all(name in last and last[name].shape == tensor.shape for name, tensor in own.items()):
            head.load_state_dict({name: last[name] for name in own})
    return drafter


@dataclass(kw_only=True)
class ParallelHeadsTrainOptions(ShapeOptions):
    """Options of the training command for parallel heads; of `taps` the first one is read."""

    heads: Count = HfArg(default=3, help="heads, one for each of the tokens after the next")
    loss: LossName = HfArg(default="ce", help="ce with the tokens of the rows; the others with the target's probs")


def _prepare(
    options: ParallelHeadsTrainOptions, target: PreTrainedModel, source: RowSource
) -> tuple[ParallelHeadsDrafter, ParallelHeadsStep]:
    if options.taps is not None and len(options.taps) != 1:
        raise ValueError(f"argument --taps: {options.taps} must be one layer, which all heads read")
    drafter = new_drafter(
        target,
        num_heads=options.heads,
        trunk_layer=None if options.taps is None else options.taps[0],
        intermediate_size=options.intermediate_size,
    )
    return drafter, ParallelHeadsStep(drafter, target, loss=options.loss)


_LAYER = {
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_AROUND = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_NAME = re.compile(r"(?P<kind>layers|extra_heads)\.(?P<index>\d+)\.(?P<part>.+)\.weight")


def load_with_heads(
    folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, ParallelHeadsDrafter]:
    """Loads a checkpoint of Meta's with parallel heads; both parts can be saved with `save_pretrained`.

    Args:
        folder: with `params.json` and one `consolidated*.pth`. Its `tokenizer.model` is Llama 2's.
        dtype: of both; None for the checkpoint's.

    Returns:
        the target, which is the trunk with the head for the next token, and the drafter, its further heads.

    Raises:
        OSError: a file is missing.
        ValueError: the checkpoint has no further heads, or other tensors than these.
    """
    folder = Path(folder)
    params = json.loads((folder / "params.json").read_text(encoding="utf-8"))
    files = sorted(folder.glob("consolidated*.pth"))
    if len(files) != 1:
        raise FileNotFoundError(
            f"{str(folder)!r} has {len(files)} files consolidated*.pth; it must have one, as Meta's models with "
            "parallel heads do."
        )
    stored = load_tensors(files[0], str(folder))
    stored.pop("rope.freqs", None)
    heads = int(params["n_heads"])
    shared, counts = _renamed(stored, heads, int(params.get("n_kv_heads") or heads), str(folder))
    if not counts["extra_heads"]:
        raise ValueError(
            f"{str(folder)!r} has no tensors extra_heads.*: it is a model without parallel heads, such as those with "
            "n_future_tokens 1. Draft for it with another method."
        )
    embeddings, gate = stored["tok_embeddings.weight"], stored["layers.0.feed_forward.w1.weight"]
    dtype = dtype or embeddings.dtype
    config: dict[str, Any] = {
        "vocab_size": embeddings.shape[0], "hidden_size": embeddings.shape[1], "intermediate_size": gate.shape[0],
        "num_attention_heads": heads, "num_key_value_heads": int(params.get("n_kv_heads") or heads),
        "rms_norm_eps": float(params.get("norm_eps", 1e-5)), "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(params.get("rope_theta") or 10000.0)},
    }  # fmt: skip
    target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=counts["layers"], **config)).to(dtype).eval()
    drafter = ParallelHeadsDrafter(ParallelHeadsConfig(num_parallel_heads=counts["extra_heads"], **config))
    own = {name: tensor for name, tensor in shared.items() if name.startswith("heads.")}
    target.load_state_dict({name: tensor for name, tensor in shared.items() if name not in own})
    drafter.load_state_dict(own | {"norm.weight": shared["model.norm.weight"]})
    return target, drafter.to(dtype).eval()


def _renamed(stored: Mapping[str, Tensor], heads: int, kv_heads: int, name: str) -> tuple[dict[str, Tensor], Any]:
    """All tensors by our names, and how many layers and further heads there are."""
    found: dict[str, Tensor] = {}
    counts = {"layers": 0, "extra_heads": 0}
    for key, tensor in stored.items():
        around, layer = _AROUND.get(key.removesuffix(".weight")), _NAME.fullmatch(key)
        if around is not None:
            found[f"{around}.weight"] = tensor
        elif layer is not None and layer["part"] in _LAYER:
            counts[layer["kind"]] = max(counts[layer["kind"]], int(layer["index"]) + 1)
            if layer["part"] in ("attention.wq", "attention.wk"):
                tensor = _halves(tensor, heads if layer["part"].endswith("q") else kv_heads)
            prefix = "model.layers" if layer["kind"] == "layers" else "heads"
            found[f"{prefix}.{layer['index']}.{_LAYER[layer['part']]}.weight"] = tensor
        else:
            raise ValueError(
                f"{name!r} has a tensor {key!r} {list(tensor.shape)}, which Meta's models with parallel heads do not "
                "have: nothing was loaded."
            )
    return found, counts


def _halves(weight: Tensor, heads: int) -> Tensor:
    """[heads * head_dim, hidden], rows of each head in pairs -> first those of even, then those of odd numbers."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


register(
    "parallel_heads",
    ParallelHeadsDrafter,
    serving=Serving(not_exported="vLLM has no class for parallel heads beside a target"),
)
register_recipe(Recipe("parallel_heads", ParallelHeadsTrainOptions, _prepare))
