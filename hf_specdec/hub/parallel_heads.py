"""Meta's published checkpoints with parallel heads: target and drafter from one folder.

The folder has `params.json` and one `consolidated*.pth`, with the names of Llama's original code. The layers of the
trunk and the head for the next token are `layers.0`, `layers.1`, ...; the heads for later tokens are `extra_heads.0`,
`extra_heads.1`, ..., each a layer like these on the output of the trunk. All heads share the final norm and the output
matrix.
Llama's original code rotates pairs of neighbouring dimensions; here, as in transformers, each dimension of the first
half with one of the second half, so the rows of the matrices of queries and keys are in another order.
Source: the model card of facebook/multi-token-prediction; Gloeckle et al., arXiv 2404.19737, Section 2.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_specdec.hub.tensors import load_tensors
from hf_specdec.methods.parallel_heads import ParallelHeadsConfig, ParallelHeadsDrafter

__all__ = ["load_with_heads"]

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
