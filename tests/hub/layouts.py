"""Published layouts, built from the facts on formats alone: folders that tests write, and the drafters they hold.

Every case starts from a random drafter of ours and says how the layout has it. What reading a convention the other way
would cost is in `test_traps.py`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.methods.dflash.network import DFlashDrafter
from hf_specdec.methods.dflash2 import DFlash2Drafter
from hf_specdec.methods.dspark import DSparkDrafter
from hf_specdec.methods.eagle import EagleDrafter
from hf_specdec.methods.eagle3.network import Eagle3Drafter
from hf_specdec.methods.gemma4_assistant import Gemma4AssistantDrafter
from hf_specdec.methods.medusa import MedusaDrafter
from hf_specdec.methods.specblock import SpecBlockDrafter
from tests.method_table import (
    make_dflash,
    make_dflash2,
    make_dspark,
    make_eagle,
    make_eagle3,
    make_gemma4_assistant,
    make_peagle,
    make_specblock,
)
from tests.targets import make_target

Fields = dict[str, Any]
Tensors = dict[str, Tensor]
TREE = {"depth": 3, "top_k": 3, "tree_budget": 10}
LAYERS = 8


def save(folder: Path, config: Fields, tensors: Tensors, file: str = "model.safetensors") -> None:
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)


def shape_of(config: Any, *extra: str) -> Fields:
    """What every layout says of its decoder, under the same names."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "rms_norm_eps", "hidden_act", "max_position_embeddings", "attention_bias",
    )  # fmt: skip
    return {name: getattr(config, name) for name in (*names, *extra)}


def target_to_draft(drafter: Any) -> Tensor:
    known = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
    known[torch.arange(drafter.d2t.numel()) + drafter.d2t] = True
    return known


def as_safeailab(drafter: Eagle3Drafter, **fields: Any) -> tuple[Fields, Tensors]:
    config = shape_of(drafter.config) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "draft_vocab_size": drafter.config.draft_vocab_size,
        "torch_dtype": "float32",
        "bias": False,
    }
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in drafter.state_dict().items()}
    if drafter.config.maps_vocabulary:
        tensors["t2d"] = target_to_draft(drafter)
    return {name: value for name, value in (config | fields).items() if value is not None}, tensors


def as_safeailab_eagle(drafter: EagleDrafter, **fields: Any) -> tuple[Fields, Tensors]:
    """EAGLE-1 and 2: fields of biases and norms are those of the target, whatever the tensors are."""
    config = shape_of(drafter.config) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "bias": drafter.config.bias,
        "attention_bias": False,
    }
    tensors = dict(drafter.state_dict()) | {"layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    return {name: value for name, value in (config | fields).items() if value is not None}, tensors


def as_specforge(drafter: Eagle3Drafter, **fields: Any) -> tuple[Fields, Tensors]:
    return as_safeailab(drafter, **{"architectures": ["LlamaForCausalLMEagle3"]} | fields)


def envelope(kind: str, layer: Fields) -> Fields:
    return {
        "architectures": ["DFlashDraftModel" if kind == "dflash" else "Eagle3DraftModel"],
        "auto_map": {"": "whatever.py"},
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": "owner/right-target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
    }


def as_speculators_eagle3(drafter: Eagle3Drafter, layer: Fields | None = None, **fields: Any) -> tuple[Fields, Tensors]:
    nested = shape_of(drafter.config) | {"model_type": "llama"} | (layer or {})
    config = envelope("eagle3", nested) | {"draft_vocab_size": drafter.config.draft_vocab_size} | fields
    return config, dict(drafter.state_dict()) | {
        "t2d": target_to_draft(drafter),
        "verifier_norm.weight": torch.ones(drafter.config.hidden_size),
    }


def as_speculators_peagle(drafter: Any, **fields: Any) -> tuple[Fields, Tensors]:
    config, tensors = as_speculators_eagle3(drafter, mask_token_id=drafter.config.mask_token_id)
    config |= envelope("peagle", config["transformer_layer_config"]) | {"architectures": ["PEagleSpeculator"]}
    return config | fields, tensors


def as_specforge_peagle(drafter: Any, **fields: Any) -> tuple[Fields, Tensors]:
    return as_specforge(drafter, **{"architectures": ["PEagleDraftModel"]} | fields)


def as_deepspec_eagle3(drafter: Eagle3Drafter, **fields: Any) -> tuple[Fields, Tensors]:
    config = shape_of(drafter.config, "head_dim") | {
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "ttt_length": 7,
    }
    return config | fields, dict(drafter.state_dict())


def as_speculators_dflash(drafter: DFlashDrafter, **fields: Any) -> tuple[Fields, Tensors]:
    nested = shape_of(drafter.config, "head_dim") | {"model_type": "qwen3"} | fields.pop("layer", {})
    config = envelope("dflash", nested) | {
        "draft_vocab_size": drafter.config.draft_vocab_size,
        "block_size": drafter.config.block_size,
        "mask_token_id": drafter.config.mask_token_id,
    }
    return config | fields, dict(drafter.state_dict())


def as_speculators_dflash2(drafter: DFlash2Drafter, **fields: Any) -> tuple[Fields, Tensors]:
    added = {key: getattr(drafter.config, key) for key in ("conv_kernel_size", "conv_group_size", "selector_rank")}
    config, tensors = as_speculators_dflash(drafter, **added | fields)
    config["speculators_model_type"] = config["speculators_config"]["algorithm"] = "dflash2"
    return config | {"architectures": ["DFlash2DraftModel"]}, tensors


def as_zlab_dflash2(drafter: DFlash2Drafter, **fields: Any) -> tuple[Fields, Tensors]:
    block = dict(drafter.config.dflash_config) | fields.pop("dflash_config")
    config, tensors = as_zlab(drafter, dflash_config=block)
    rank = config["dflash_config"].pop("selector_rank")  # at the top
    return config | {"architectures": ["DFlash2DraftModel"], "selector_rank": rank} | fields, tensors


def as_deepspec_dflash(drafter: DFlashDrafter, **fields: Any) -> tuple[Fields, Tensors]:
    config = shape_of(drafter.config, "head_dim") | {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "block_size": drafter.config.block_size,
        "mask_token_id": drafter.config.mask_token_id,
        "num_target_layers": LAYERS,
        "num_anchors": 512,
        "markov_rank": 0,
        "enable_confidence_head": False,
    }
    return config | fields, dict(drafter.state_dict())


def dspark_heads(drafter: DSparkDrafter) -> Fields:
    names = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    return {name: getattr(drafter.config, name) for name in names}


def as_speculators_dspark(drafter: DSparkDrafter, **fields: Any) -> tuple[Fields, Tensors]:
    config, tensors = as_speculators_dflash(drafter, **fields)
    config["speculators_model_type"] = config["speculators_config"]["algorithm"] = "dspark"
    return config | {"architectures": ["DSparkDraftModel"]} | dspark_heads(drafter) | fields, tensors


def as_deepspec_dspark(drafter: DSparkDrafter, **fields: Any) -> tuple[Fields, Tensors]:
    config, tensors = as_deepspec_dflash(drafter)
    return config | dspark_heads(drafter) | fields, tensors


def as_specforge_dspark(drafter: DSparkDrafter, **fields: Any) -> tuple[Fields, Tensors]:
    heads = dspark_heads(drafter) | {"projector_type": "dspark", "attention_mode": "gqa"}
    config, tensors = as_zlab(drafter, dflash_config=heads | fields.pop("dflash_config", {}))
    prefixed = ("markov_head.", "confidence_head.")
    return config | {"architectures": ["DSparkDraftModel"]} | fields, {
        f"logit_head.{name}" if name.startswith(prefixed) else name: tensor for name, tensor in tensors.items()
    }


def as_angelspec_dspark(drafter: DSparkDrafter, **fields: Any) -> tuple[Fields, Tensors]:
    config = as_deepspec_dspark(drafter)[0] | {
        "architectures": ["DSparkDraftModel"],
        "model_type": "dspark",
        "num_target_layers": len(drafter.config.target_layer_ids),
        "target_num_hidden_layers": LAYERS,
        "fusion_type": "concat_fc",
    }
    theirs = {"fc.": "context_proj.", "hidden_norm.": "context_norm.", "norm.": "final_norm."}
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        for ours, other in theirs.items():
            if name.startswith(ours):
                name = other + name.removeprefix(ours)
                break
        tensors[f"draft_model.{name}"] = tensor
    return config | fields, tensors


def as_zlab(drafter: DFlashDrafter, **fields: Any) -> tuple[Fields, Tensors]:
    config = shape_of(drafter.config, "head_dim") | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "num_target_layers": LAYERS,
        "tie_word_embeddings": True,
        "rope_theta": drafter.config.rope_parameters["rope_theta"],
        "dflash_config": {"mask_token_id": drafter.config.mask_token_id},
    }
    if (block := fields.pop("dflash_config", {})) is None:
        del config["dflash_config"]
    else:
        config["dflash_config"] |= block
    config = {name: value for name, value in (config | fields).items() if value is not None}
    return config, dict(drafter.state_dict())


def as_gemma4_assistant(drafter: Gemma4AssistantDrafter, **fields: Any) -> tuple[Fields, Tensors]:
    config, text = drafter.config, fields.pop("text_config", {})
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps",
        "num_key_value_heads", "head_dim", "attention_bias", "layer_types", "sliding_window", "rope_parameters",
    )  # fmt: skip
    full = [layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"]
    written = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": config.backbone_hidden_size,
        "text_config": {name: getattr(config, name) for name in names}
        | {
            "model_type": "gemma4_text",
            "hidden_activation": config.hidden_act,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": config.num_hidden_layers,
            "per_layer_config": {str(layer): {"head_dim": config.global_head_dim} for layer in full},
        }
        | text,
    }
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        if name == "lm_head.weight":
            name = "model.embed_tokens.weight" if fields.get("tie_word_embeddings", True) else name
        elif name.startswith(("layers.", "norm.")):
            name = f"model.{name}"
        tensors[name.replace("clusters.", "masked_embedding.")] = tensor
    if "lm_head.weight" in tensors:  # of no use
        tensors["model.embed_tokens.weight"] = torch.zeros_like(tensors["lm_head.weight"])
    config = {name: value for name, value in (written | fields).items() if value is not None}
    return config | {
        "text_config": {name: part for name, part in config["text_config"].items() if part is not None}
    }, tensors


def as_specblock(drafter: SpecBlockDrafter, **fields: Any) -> tuple[Fields, Tensors]:
    config = shape_of(drafter.config) | {
        "architectures": ["LlamaForCausalLMSpecBlockShift"],
        "model_type": "llama",
        "diffspec_draft_token_num": drafter.config.block_size,
        "rank_classes": drafter.config.rank_classes,
        "draft_vocab_size": drafter.config.draft_vocab_size,
    }
    return config | fields, dict(drafter.state_dict())


def as_medusa(drafter: MedusaDrafter, prefix: str = "") -> Tensors:
    layers = drafter.config.medusa_num_layers
    tensors = {}
    for head, module in enumerate(drafter.heads):
        for layer, block in enumerate(module.blocks):
            tensors[f"{prefix}{head}.{layer}.linear.weight"] = block.linear.weight.data
            tensors[f"{prefix}{head}.{layer}.linear.bias"] = block.linear.bias.data
        if drafter.config.own_head:
            tensors[f"{prefix}{head}.{layers}.weight"] = module.lm_head.weight.data
    return tensors


@dataclass
class Case:
    """A drafter of ours (`ours`: fields that make it), and how a layout has it.

    `family` is that of a target which such a drafter needs, None for any of the right shape.
    `in_own_file` gives tensors that lie in files of their own, by file, and may change those in the main one.
    """

    format: str
    make: Callable[..., Any]
    write: Callable[..., tuple[Fields, Tensors]]
    ours: Fields = field(default_factory=dict)
    written: Fields = field(default_factory=dict)
    file: str = "model.safetensors"
    in_own_file: Callable[[Tensors], dict[str, Tensors]] = lambda tensors: {}
    family: str | None = None

    def target(self, target: PreTrainedModel) -> PreTrainedModel:
        """A target that it fits: `target`, or one of the family that it needs."""
        if self.family is None:
            return target
        return make_target(self.family, "sdpa", torch.float32, initializer_range=0.5)

    def save(self, drafter: Any, folder: Path) -> tuple[Fields, Tensors]:
        """Writes `drafter`, which is made of `ours`; returns config and tensors."""
        config, tensors = self.write(drafter, **copy.deepcopy(self.written))
        for name, content in self.in_own_file(tensors).items():
            torch.save(content, folder / name)
        save(folder, config, tensors, self.file)
        return config, tensors


def map_in_own_file(tensors: Tensors) -> dict[str, Tensors]:
    """Moves the vocabulary map to the file that SpecBlock's authors write; the weights keep another one."""
    maps = {name: tensors[name].clone() for name in ("d2t", "t2d")}
    tensors["d2t"] = torch.zeros_like(maps["d2t"])
    tensors["t2d"] = torch.arange(maps["t2d"].numel()) < maps["d2t"].numel()
    return {"vocab_mapping.pt": maps}


def rope(theta: float) -> Fields:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


SAFE = {"format": "EAGLE-3 (SafeAILab)", "make": make_eagle3, "write": as_safeailab}
SAFE_EAGLE = {"format": "EAGLE-1 and EAGLE-2", "make": make_eagle, "write": as_safeailab_eagle}
FORGE = {"format": "EAGLE-3 (SpecForge)", "make": make_eagle3, "write": as_specforge}
SPEC = {"format": "EAGLE-3 (speculators)", "make": make_eagle3, "write": as_speculators_eagle3}
SPEC_PEAGLE = {"format": "P-EAGLE (speculators)", "make": make_peagle, "write": as_speculators_peagle}
FORGE_PEAGLE = {"format": "P-EAGLE (SpecForge)", "make": make_peagle, "write": as_specforge_peagle}
DEEP = {"format": "EAGLE-3 (DeepSpec)", "make": make_eagle3, "write": as_deepspec_eagle3}
SPEC_DFLASH = {"format": "DFlash (speculators)", "make": make_dflash, "write": as_speculators_dflash}
ZLAB = {"format": "dflash", "make": make_dflash, "write": as_zlab}
SPEC_DFLASH2 = {"format": "DFlash 2 (speculators)", "make": make_dflash2, "write": as_speculators_dflash2}
ZLAB2 = {"format": "DFlash 2", "make": make_dflash2, "write": as_zlab_dflash2}
BLOCKS = {"format": "specblock", "make": make_specblock, "write": as_specblock}
DEEP_DFLASH = {"format": "DFlash (DeepSpec)", "make": make_dflash, "write": as_deepspec_dflash}
SPEC_DSPARK = {"format": "DSpark (speculators)", "make": make_dspark, "write": as_speculators_dspark}
DEEP_DSPARK = {"format": "DSpark", "make": make_dspark, "write": as_deepspec_dspark}
FORGE_DSPARK = {"format": "DSpark", "make": make_dspark, "write": as_specforge_dspark}
ANGEL_DSPARK = {"format": "DSpark", "make": make_dspark, "write": as_angelspec_dspark}
GEMMA4 = {
    "format": "Gemma 4 assistant (transformers)",
    "make": make_gemma4_assistant,
    "write": as_gemma4_assistant,
    "family": "gemma4",
}
OWN = {"own_embeddings": True, "own_head": True}

# Of 8 layers, hs[2], hs[4] and hs[5] are what layers 1, 3 and 4 give.
DEFAULT_TAPS = {"target_layer_ids": [1, 3, 4]}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}
CASES = {
    # A2: outputs of layers, by a formula where no list is given. A3: the root's slot is unused. A6: block size and
    # rotary base at the top or nested, causality in three spellings, sliding layers causal where nothing is said.
    "z-lab, layers by formula, block size at the top": Case(
        **ZLAB,
        ours={"dflash_config": {"target_layer_ids": [1, 5]}} | rope(300.0),
        written={"block_size": 5},
    ),
    "z-lab, a list of layers, block size nested": Case(
        **ZLAB,
        ours={"dflash_config": {"target_layer_ids": [2, 3, 6]}},
        written={"dflash_config": {"target_layer_ids": [2, 3, 6], "block_size": 5}},
    ),
    "z-lab, the target's last layer among others": Case(
        **ZLAB,
        ours={"dflash_config": {"target_layer_ids": [2, LAYERS - 1]}},
        written={"dflash_config": {"target_layer_ids": [2, LAYERS - 1], "block_size": 5}},
    ),
    "z-lab, no rotary base, no block size but nested": Case(
        **ZLAB,
        ours={"dflash_config": {"target_layer_ids": [1, 5]}},
        written={"rope_theta": None, "dflash_config": {"block_size": 5}},
    ),
    "z-lab, rotary base as parameters": Case(
        **ZLAB,
        ours={"dflash_config": {"target_layer_ids": [1, 5]}} | rope(300.0),
        written={"block_size": 5, "rope_theta": None} | rope(300.0),
    ),
    "z-lab, sliding layers are causal": Case(
        **ZLAB,
        ours=SLIDING | {"dflash_config": {"target_layer_ids": [1, 5]}},
        written=SLIDING | {"block_size": 5},
    ),
    "z-lab, sliding layers said not to be causal": Case(
        **ZLAB,
        ours=SLIDING | {"is_causal": False, "dflash_config": {"target_layer_ids": [1, 5]}},
        written=SLIDING | {"block_size": 5, "dflash_config": {"causal": False}},
    ),
    "z-lab, full layers said to be causal": Case(
        **ZLAB,
        ours={"is_causal": True, "dflash_config": {"target_layer_ids": [1, 5]}},
        written={"block_size": 5, "is_causal": True},
    ),
    "JetSpec, full layers said to be causal": Case(
        **ZLAB,
        ours={"is_causal": True, "dflash_config": {"target_layer_ids": [1, 5]}},
        written={"block_size": 5, "dflash_config": {"causal_head": True}},
    ),
    "z-lab, use_swa": Case(
        **ZLAB,
        ours=SLIDING | {"is_causal": False, "dflash_config": {"target_layer_ids": [1, 5]}},
        written={"block_size": 5, "dflash_config": {"use_swa": True, "swa_window_size": 4}},
    ),
    "z-lab, use_swa, the window at the top": Case(
        **ZLAB,
        ours=SLIDING | {"is_causal": False, "dflash_config": {"target_layer_ids": [1, 5]}},
        written={
            "block_size": 5,
            "dflash_config": {"use_swa": True},
            "sliding_window": 4,
            "use_sliding_window": True,
            "max_window_layers": 0,
        },
    ),
    "z-lab, layers and mask token at the top": Case(
        **ZLAB,
        ours={"dflash_config": {"target_layer_ids": [2, 3, 6]}},
        written={"block_size": 5, "target_layer_ids": [2, 3, 6], "mask_token_id": 1, "dflash_config": None},
    ),
    "z-lab, no list of layers, said twice": Case(
        **ZLAB,
        ours={"dflash_config": {"target_layer_ids": [1, 5]}},
        written={"block_size": 5, "mask_token_id": 1, "dflash_config": {"target_layer_ids": None}},
    ),
    # A2: a fixed rule, in hidden-state indices. A4: offsets; a map in a file of its own wins. A6: no base means 10000.
    "specblock, default taps, offsets": Case(**BLOCKS, ours=DEFAULT_TAPS),
    "specblock, a rotary base": Case(**BLOCKS, ours=DEFAULT_TAPS | rope(300.0), written={"rope_theta": 300.0}),
    "specblock, a vocabulary map in a file of its own, which wins": Case(
        **BLOCKS, ours=DEFAULT_TAPS, in_own_file=map_in_own_file
    ),
    # A2: a fixed rule, in hidden-state indices. A4: offsets. A6: no rotary base means 10000.
    "safeailab, default taps, offsets, no rotary base": Case(
        **SAFE,
        ours=DEFAULT_TAPS,
        written={"tie_word_embeddings": True},  # of no meaning here
    ),
    "safeailab, rotary base at the top, in a pickle": Case(
        **SAFE,
        ours=DEFAULT_TAPS | rope(300.0),
        written={"rope_theta": 300.0},
        file="pytorch_model.bin",
    ),
    "safeailab, rotary base as parameters": Case(
        **SAFE, ours=DEFAULT_TAPS | rope(300.0), written={"rope_theta": None} | rope(300.0)
    ),
    "safeailab, full vocabulary, known by its tensors": Case(
        **SAFE, ours=DEFAULT_TAPS | {"draft_vocab_size": None}, written={"draft_vocab_size": None}
    ),
    "eagle, a bias of fc, in a pickle": Case(**SAFE_EAGLE, file="pytorch_model.bin"),
    "eagle, no bias, a rotary base": Case(
        **SAFE_EAGLE, ours={"bias": False} | rope(500.0), written={"rope_theta": 500.0}
    ),
    "eagle, biases of queries, keys and values, as in Qwen2": Case(
        **SAFE_EAGLE, ours={"attention_bias": True, "output_bias": False}
    ),
    "eagle, a norm before the attention, embeddings, no field of the bias": Case(
        **SAFE_EAGLE, ours={"norm_before_attention": True, "own_embeddings": True}, written={"bias": None}
    ),
    "safeailab, own embeddings": Case(**SAFE, ours=DEFAULT_TAPS | {"own_embeddings": True}),
    # A2: layer ids are outputs of layers. A6: norm_output is the norm before the head, on by default.
    "specforge, embeddings beside a full head, said to be tied": Case(
        **FORGE,
        ours=DEFAULT_TAPS | {"own_embeddings": True, "draft_vocab_size": None},
        written={"tie_word_embeddings": True},
    ),
    "specforge, layer ids": Case(
        **FORGE,
        ours={"target_layer_ids": [2, 5, 6]},
        written={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5, 6]}},
    ),
    "specforge, default taps, no norm before the head": Case(
        **FORGE,
        ours=DEFAULT_TAPS | {"norm_before_head": False},
        written={"norm_output": False},
    ),
    "specforge, a norm per tap": Case(**FORGE, ours=DEFAULT_TAPS | {"fc_norm": True}, written={"fc_norm": True}),
    "nvidia, a norm before fc": Case(
        **SAFE,
        ours={"target_layer_ids": [0, 5, 6], "norm_before_fc": True},
        written={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 5, 6], "norm_before_fc": True}},
    ),
    # A2: layer ids are indices of hidden states. A6: a missing norm_before_residual is false, norm_output is recurrent.
    "speculators, hidden-state ids, missing flags": Case(
        **SPEC,
        ours={"target_layer_ids": [1, 2, 6]},
        written={"eagle_aux_hidden_state_layer_ids": [2, 3, 7]},
    ),
    "speculators, hidden state 0 is the embedding": Case(
        **SPEC,
        ours={"target_layer_ids": [-1, 3]},
        written={"eagle_aux_hidden_state_layer_ids": [0, 4]},
    ),
    "speculators, default taps, every flag": Case(
        **SPEC,
        ours=DEFAULT_TAPS
        | {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True, "own_embeddings": True},
        written={
            "norm_before_residual": True,
            "norm_before_fc": True,
            "norm_output": True,
            "eagle_aux_hidden_state_layer_ids": None,
        },
    ),
    "speculators, a norm per tap, q_norm under llama": Case(
        **SPEC,
        ours=DEFAULT_TAPS | {"fc_norm": True, "qk_norm": True},
        written={"fc_norm": True},
    ),
    "speculators, head_dim at the default of qwen3": Case(
        **SPEC,
        ours=DEFAULT_TAPS | {"head_dim": 128, "qk_norm": True} | rope(300.0),
        written={"layer": {"model_type": "qwen3", "rope_theta": 300.0}},
    ),
    "speculators, rotary base as parameters of the nested config": Case(
        **SPEC, ours=DEFAULT_TAPS | rope(300.0), written={"layer": rope(300.0)}
    ),
    "speculators, no rotary base": Case(**SPEC, ours=DEFAULT_TAPS),
    "speculators, two layers": Case(**SPEC, ours=DEFAULT_TAPS | {"num_hidden_layers": 2}),
    "speculators peagle": Case(
        **SPEC_PEAGLE,
        ours={"target_layer_ids": [1, 3, 4], "own_embeddings": True, "norm_before_fc": True},
        written={"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "norm_before_fc": True, "embed_requires_grad": True},
    ),
    "specforge peagle, four layers, the mask token nested": Case(
        **FORGE_PEAGLE,
        ours=DEFAULT_TAPS | {"own_embeddings": True, "num_hidden_layers": 4, "num_draft_tokens": 8},
        written={"num_hidden_layers": 4, "dflash_config": {"mask_token_id": 5}},
    ),
    "deepspec eagle3, five taps": Case(
        **DEEP,
        ours={
            "target_layer_ids": [-1, 1, 3, 5, 6],
            "draft_vocab_size": None,
            "qk_norm": True,
            "own_embeddings": True,
        },
        written={"target_layer_ids": [-1, 1, 3, 5, 6]},
    ),
    # A3: the root's slot is unused. A2: hidden-state ids.
    "speculators dflash, converted": Case(
        **SPEC_DFLASH,
        ours={"dflash_config": {"target_layer_ids": [1, 5]}},
        written={"aux_hidden_state_layer_ids": [2, 6]},
    ),
    "speculators dflash, own head over a draft vocabulary": Case(
        **SPEC_DFLASH,
        ours={"dflash_config": {"target_layer_ids": [1, 5], "draft_vocab_size": 32, **OWN}},
        written={"aux_hidden_state_layer_ids": [2, 6], "sample_from_anchor": False},
    ),
    "speculators dflash, the root's slot predicts": Case(
        **SPEC_DFLASH,
        ours={"dflash_config": {"target_layer_ids": [1, 5], "sample_from_anchor": True, **OWN}},
        written={"aux_hidden_state_layer_ids": [2, 6], "sample_from_anchor": True},
    ),
    "speculators dflash, sliding layers causal": Case(
        **SPEC_DFLASH,
        ours={
            "dflash_config": {"target_layer_ids": [1, 5]},
            "layer_types": ["sliding_attention"] * 2,
            "sliding_window": 4,
        },
        written={
            "aux_hidden_state_layer_ids": [2, 6],
            "layer": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "use_sliding_window": True},
        },
    ),
    "speculators dflash, sliding layers not causal": Case(
        **SPEC_DFLASH,
        ours={
            "dflash_config": {"target_layer_ids": [1, 5]},
            "layer_types": ["sliding_attention"] * 2,
            "sliding_window": 4,
            "is_causal": False,
        },
        written={
            "aux_hidden_state_layer_ids": [2, 6],
            "sliding_window_non_causal": True,
            "layer": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "use_sliding_window": True},
        },
    ),
    "speculators dflash, layers said to be causal": Case(
        **SPEC_DFLASH,
        ours={"dflash_config": {"target_layer_ids": [1, 5]}, "is_causal": True},
        written={"aux_hidden_state_layer_ids": [2, 6], "layer": {"is_causal": True}},
    ),
    "deepspec dflash, the root's slot predicts and nothing says so": Case(
        **DEEP_DFLASH,
        ours={"dflash_config": {"target_layer_ids": [-1, 5], "sample_from_anchor": True, **OWN}},
        written={"target_layer_ids": [-1, 5]},
    ),
    # Formats of 2026, 1.1 and 1.6: keys in either place; 16 candidates and no causal sliding layers unless said.
    "dflash2, factors and a cap, in dflash_config and at the top": Case(
        **ZLAB2,
        ours={
            "dflash_config": {"target_layer_ids": [1, 5], "output_multiplier": 0.5, "input_embedding_scale": 2.0},
            "final_logit_softcapping": 5.0,
        },
        written={"dflash_config": {"target_layer_ids": [1, 5], "final_logit_softcapping": 5.0}, "block_size": 5},
    ),
    "speculators dflash2, sliding layers that are not causal, 16 candidates": Case(
        **SPEC_DFLASH2,
        ours=SLIDING | {"dflash_config": {"target_layer_ids": [1, 5], "selector_top_k": 16}, "is_causal": False},
        written={
            "aux_hidden_state_layer_ids": [2, 6],
            "layer": SLIDING | {"use_sliding_window": True},
        },
    ),
    # Formats of 2026, 2.2 to 2.6: keys at the top or nested, heads told by their tensors, next-token slots where
    # nothing is said but in AngelSpec's, whose names are others.
    "speculators dspark, a gate over a draft vocabulary": Case(
        **SPEC_DSPARK,
        ours={
            "dflash_config": {"target_layer_ids": [1, 5], "draft_vocab_size": 32, "markov_head_type": "gated", **OWN}
        },
        written={"aux_hidden_state_layer_ids": [2, 6]},
    ),
    "speculators dspark, fill-in slots, recurrent": Case(
        **SPEC_DSPARK,
        ours={
            "dflash_config": {"target_layer_ids": [1, 5], "sample_from_anchor": False, "markov_head_type": "rnn"},
        },
        written={"aux_hidden_state_layer_ids": [2, 6], "sample_from_anchor": False},
    ),
    "deepspec dspark, embeddings and head of its own, the target's rotary share": Case(
        **DEEP_DSPARK,
        ours={"dflash_config": {"target_layer_ids": [-1, 5], **OWN}} | rope(300.0),
        written={
            "target_layer_ids": [-1, 5],
            "partial_rotary_factor": 0.25,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.25},
        },
    ),
    "specforge dspark, nested, a confidence head that reads states alone": Case(
        **FORGE_DSPARK,
        ours={"dflash_config": {"target_layer_ids": [1, 5], "confidence_head_with_markov": False}},
        written={"dflash_config": {"target_layer_ids": [1, 5], "block_size": 5, "confidence_head_with_markov": True}},
    ),
    "specforge dspark, a draft vocabulary of the target's head": Case(
        **FORGE_DSPARK,
        ours={"dflash_config": {"target_layer_ids": [1, 5], "draft_vocab_size": 32}},
        written={"dflash_config": {"target_layer_ids": [1, 5], "draft_vocab_size": 32}, "block_size": 5},
    ),
    "specforge dspark, no confidence head": Case(
        **FORGE_DSPARK,
        ours={
            "dflash_config": {
                "target_layer_ids": [1, 5],
                "enable_confidence_head": False,
                "confidence_head_with_markov": False,
            }
        },
        written={"dflash_config": {"target_layer_ids": [1, 5]}, "block_size": 5},
    ),
    "angelspec dspark": Case(
        **ANGEL_DSPARK,
        ours={"dflash_config": {"target_layer_ids": [1, 5], "sample_from_anchor": False}},
        written={"target_layer_ids": [1, 5]},
    ),
    # Formats of 2026, 6.2: the head is the embedding where the two are tied; full layers are told apart in three ways.
    "gemma4 assistant, a tied head": Case(
        **GEMMA4,
        ours={"final_logit_softcapping": 3.0},
        written={
            "text_config": {"final_logit_softcapping": 3.0},
        },
    ),
    "gemma4 assistant, clusters, a head beside the embedding, older names": Case(
        **GEMMA4,
        ours={"num_centroids": 16, "centroid_intermediate_top_k": 5},
        written={
            "use_ordered_embeddings": True,
            "num_centroids": 16,
            "centroid_intermediate_top_k": 5,
            "tie_word_embeddings": False,
            "text_config": {
                "per_layer_config": None,
                "global_head_dim": 8,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 2,
                "num_kv_shared_layers": 0,
            },
        },
    ),
    "gemma4 unified assistant, rotary defaults": Case(
        **GEMMA4,
        written={
            "architectures": ["Gemma4UnifiedAssistantForCausalLM"],
            "model_type": "gemma4_unified_assistant",
            "text_config": {"model_type": "gemma4_unified_text", "rope_parameters": None},
        },
    ),
}


def build(case: Case, target: PreTrainedModel) -> Any:
    drafter = case.make(target, **copy.deepcopy(case.ours))
    for parameter in drafter.parameters():
        if parameter.dim() == 1:  # norms start as ones, which hides whether they are used
            parameter.data += 0.5 * torch.randn_like(parameter)
    for name, parameter in drafter.named_parameters():
        # Random attention looks everywhere alike; sharpened, it matters where a token stands.
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            parameter.data *= 2
        elif name.endswith(("v_proj.weight", "o_proj.weight")):
            parameter.data *= 4
    if isinstance(drafter, Eagle3Drafter):
        drafter.set_options(**TREE)
    elif isinstance(drafter, DFlashDrafter) and drafter.config.maps_vocabulary:
        drafter.d2t.copy_(torch.arange(drafter.config.draft_vocab_size))
    return drafter
