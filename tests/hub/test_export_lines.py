"""The facts on formats about serving with vLLM, section 10, line by line: what each says holds for every export.

Whole configs, and what is refused, are in `test_export.py`. Where vLLM's code says more than the section, the row names
the file.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.methods.dflash2 import DFlash2Drafter
from hf_specdec.methods.dspark import DSparkDrafter
from hf_specdec.methods.eagle3.network import Eagle3Drafter
from hf_specdec.methods.peagle import PEagleDrafter
from tests.hub.layouts import LAYERS
from tests.hub.test_export import DRAFTERS, MIXED, exported
from tests.method_table import make_dflash
from tests.targets import make_target


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("llama", "sdpa", torch.float32, num_hidden_layers=LAYERS)


@dataclass
class Export:
    """A drafter, and the folder that was written for it."""

    drafter: Any
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    files: set[str]

    @property
    def layer(self) -> dict[str, Any]:
        return self.config["transformer_layer_config"]

    @property
    def taps(self) -> list[int]:
        """The 0-based target layers that the drafter reads."""
        return self.drafter.config.target_layer_ids or [1, LAYERS // 2 - 1, LAYERS - 4]

    @property
    def method(self) -> str:
        if isinstance(self.drafter, Eagle3Drafter):
            return "eagle3"
        if isinstance(self.drafter, PEagleDrafter):
            return "peagle"
        if isinstance(self.drafter, DFlash2Drafter):
            return "dflash2"
        return "dspark" if isinstance(self.drafter, DSparkDrafter) else "dflash"

    @property
    def known_tensors(self) -> str:
        """A pattern for the names that vLLM's draft classes have room for."""
        biased = {"q_proj|k_proj|v_proj|o_proj": "attention_bias", "gate_proj|up_proj|down_proj": "mlp_bias"}
        biases = "|".join(names for names, flag in biased.items() if self.layer.get(flag)) or "none"
        own = r"input_norm|fc_norm\.\d" if self.method in ("eagle3", "peagle") else "hidden_norm"
        heads = r"markov_head\.markov_w[12]\.weight|confidence_head\.proj\.(weight|bias)"
        in_layers = r"((self_attn|mlp)\.\w+_proj|self_attn\.[qk]_norm|\w+layernorm|hidden_norm)"
        conv = r"layers\.\d\.(attention|mlp)_conv\.(base_kernel|kernel_projection\.weight)"
        selector = r"candidate_selector\.((predecessor|successor)_codebook|hidden_projection\.weight)"
        others = {"dspark": heads, "peagle": "mask_hidden", "dflash2": f"{conv}|{selector}"}.get(self.method, "none")
        weights = rf"(embed_tokens|lm_head|fc|norm|{own}|layers\.\d\.{in_layers})\.weight"
        return rf"{others}|d2t|({weights})|layers\..*({biases})\.bias"

    @property
    def pruned(self) -> bool:
        return self.drafter.config.maps_vocabulary

    def shape(self, name: str) -> list[int]:
        return list(self.tensors[name].shape)


@pytest.fixture(scope="module")
def exports(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Export]:
    """All of DRAFTERS in bfloat16, and one with layers of both types."""
    found = {}
    for name, (make, settings) in (DRAFTERS | {"dflash, mixed layers": (make_dflash, MIXED)}).items():
        drafter, folder = make(target, **settings).to(torch.bfloat16), tmp_path_factory.mktemp("export")
        if not isinstance(drafter, Eagle3Drafter) and drafter.config.maps_vocabulary:
            drafter.d2t.copy_(torch.arange(drafter.config.draft_vocab_size))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The drafter has full and sliding draft layers")
            config = exported(drafter, folder)
        tensors = load_file(folder / "model.safetensors")
        found[name] = Export(drafter, config, tensors, {file.name for file in folder.iterdir()})
    return found


def names_of(fields: Any, prefix: str = "") -> set[str]:
    """All keys of nested dictionaries, as paths."""
    if not isinstance(fields, dict):
        return set()
    return {prefix + key for key in fields}.union(
        *(names_of(value, f"{prefix}{key}.") for key, value in fields.items())
    )


# The keys of the smallest configs; those of the target and of the proposal have rows of their own.
ENVELOPE_KEYS = [
    "architectures", "speculators_model_type", "draft_vocab_size", "torch_dtype", "speculators_config.algorithm",
    "speculators_config.default_proposal_method", "speculators_config.proposal_methods",
    "speculators_config.verifier.name_or_path", "speculators_config.verifier.architectures",
]  # fmt: skip
LAYER_KEYS = [
    "model_type", "vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "rope_theta",
]  # fmt: skip
EAGLE3_FLAGS = ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]
EAGLE3_KEYS = [*EAGLE3_FLAGS, "eagle_aux_hidden_state_layer_ids", "transformer_layer_config.tie_word_embeddings"]
DFLASH_KEYS = [
    "block_size", "mask_token_id", "aux_hidden_state_layer_ids", "sample_from_anchor", "sliding_window_non_causal",
    "transformer_layer_config.attention_bias", "transformer_layer_config.layer_types",
]  # fmt: skip
LAYER_TENSORS = [
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
]  # fmt: skip


def holds(export: Export, *names: str) -> bool:
    return all(f"{name}.weight" in export.tensors for name in names)


def names_of_layer(export: Export) -> list[str]:
    return [f"layers.{index}.{name}" for index in range(export.layer["num_hidden_layers"]) for name in LAYER_TENSORS]


def offsets_are_sound(export: Export) -> bool:
    """Whether arange + d2t is an ascending list of the target's ids."""
    d2t = export.tensors["d2t"]
    ids = torch.arange(export.config["draft_vocab_size"]) + d2t
    return (
        d2t.dtype == torch.int64
        and bool((ids.diff() > 0).all())
        and ids[0] >= 0
        and ids[-1] < export.layer["vocab_size"]
    )


# Lines that only tell what the engine does, or what a user of it may pass, have nothing to tick.
LINES: dict[str, Callable[[Export], bool]] = {
    "10.1 (1) speculators_config says that the repo is a drafter": lambda x: isinstance(
        x.config["speculators_config"], dict
    ),
    "10.1 (2) speculative_tokens of the first method": lambda x: (
        x.config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] > 0
    ),
    "10.1 (2) transformer_layer_config is a dict": lambda x: isinstance(x.config["transformer_layer_config"], dict),
    "10.1 (3) model and tokenizer are the target's Hub id": lambda x: (
        x.config["speculators_config"]["verifier"]["name_or_path"] == "owner/target"
    ),
    "10.1 (3) the method is speculators_model_type": lambda x: (
        x.config["speculators_model_type"] == x.config["speculators_config"]["algorithm"] == x.method
    ),
    "10.1 (3) only the first proposal method is used": lambda x: (
        [method["proposal_type"] for method in x.config["speculators_config"]["proposal_methods"]]
        == [x.config["speculators_config"]["default_proposal_method"]]
    ),
    "10.1 (5) no model_type at the top": lambda x: "model_type" not in x.config,
    "10.2 every field of the smallest config that both have": lambda x: (
        set(ENVELOPE_KEYS) <= names_of(x.config) and set(LAYER_KEYS) <= set(x.layer)
    ),
    "10.2 vocab_size is the target's": lambda x: x.layer["vocab_size"] == x.drafter.config.vocab_size == 64,
    "10.3 rope_theta and rope_parameters side by side": lambda x: (
        x.layer["rope_parameters"] == x.drafter.config.rope_parameters
        and x.layer["rope_theta"] == x.layer["rope_parameters"]["rope_theta"]
    ),
    "10.4 a Hub id, no path": lambda x: not Path(x.config["speculators_config"]["verifier"]["name_or_path"]).exists(),
    "10.4 no stray pickles": lambda x: x.files == {"config.json", "model.safetensors"},
    "10.4 no auto_map": lambda x: "auto_map" not in names_of(x.config),
    "10.2 torch_dtype is what is stored": lambda x: (
        x.config["torch_dtype"] == "bfloat16"
        and {tensor.dtype for name, tensor in x.tensors.items() if name != "d2t"} == {torch.bfloat16}
    ),
    "A4 d2t where Vd < V, and only there: int64 offsets that lead to the target's ids": lambda x: (
        offsets_are_sound(x) if x.pruned else "d2t" not in x.tensors
    ),
    "10.2 and 10.3 nothing but the tensors that these name, t2d left out": lambda x: all(
        re.fullmatch(x.known_tensors, name) for name in x.tensors
    ),
}
EAGLE3_LINES: dict[str, Callable[[Export], bool]] = {
    "10.2 every field of the smallest config": lambda x: set(EAGLE3_KEYS) <= names_of(x.config),
    "10.2 architectures": lambda x: x.config["architectures"] == ["Eagle3DraftModel"],
    "10.2 flags are said, since a missing one is guessed": lambda x: (
        [x.config[flag] for flag in EAGLE3_FLAGS] == [getattr(x.drafter.config, flag) for flag in EAGLE3_FLAGS]
    ),
    "10.2 and A2: layer ids are said, and are indices of hidden states": lambda x: (
        x.config["eagle_aux_hidden_state_layer_ids"] == [layer + 1 for layer in x.taps]
    ),
    "10.2 model_type llama, or qwen3 with q_norm and k_norm": lambda x: (
        x.layer["model_type"]
        == ("qwen3" if holds(x, "layers.0.self_attn.q_norm", "layers.0.self_attn.k_norm") else "llama")
    ),
    "10.2 target_hidden_size only when different": lambda x: (
        x.config.get("target_hidden_size") == (32 if x.layer["hidden_size"] != 32 else None)
    ),
    "10.2 tensors of 3.2": lambda x: holds(x, "fc", "norm", "lm_head", "layers.0.hidden_norm", *names_of_layer(x)),
    "3.2 q, k and v of the first layer read embedding and state": lambda x: all(
        x.shape(f"layers.0.self_attn.{name}_proj.weight")[1] == 2 * x.layer["hidden_size"] for name in "qkv"
    ),
    "3.2 fc joins the taps": lambda x: (
        x.shape("fc.weight") == [x.layer["hidden_size"], len(x.config["eagle_aux_hidden_state_layer_ids"]) * 32]
    ),
    "10.2 lm_head [draft_vocab_size, H]": lambda x: (
        x.shape("lm_head.weight") == [x.config["draft_vocab_size"], x.layer["hidden_size"]]
    ),
    "10.2 input_norm when flagged": lambda x: holds(x, "input_norm") == x.config["norm_before_fc"],
    "10.2 fc_norm, one per tap, when flagged": lambda x: (
        sum(name.startswith("fc_norm.") for name in x.tensors) == x.config["fc_norm"] * len(x.taps)
    ),
    "10.2 embed_tokens [V, H], only where they are its own": lambda x: (
        x.shape("embed_tokens.weight") == [64, x.layer["hidden_size"]]
        if x.drafter.config.own_embeddings
        else "embed_tokens.weight" not in x.tensors
    ),
    # Of vLLM's draft classes the Llama one counts taps by this field of the draft config alone, and takes 3 without it
    # (vllm-project/vllm, llama_eagle3.py); the nested config becomes the draft config as it is.
    "vLLM's Llama class: how many taps, where they are not three": lambda x: (
        x.layer.get("num_aux_hidden_states", 3) == len(x.taps)
    ),
}
DFLASH_LINES: dict[str, Callable[[Export], bool]] = {
    "10.3 every field of the smallest config": lambda x: set(DFLASH_KEYS) <= names_of(x.config),
    "10.3 architectures": lambda x: x.config["architectures"] == [x.drafter.config.architecture],
    "10.3 layers are qwen3's": lambda x: x.layer["model_type"] == "qwen3",
    "10.3 aux_hidden_state_layer_ids are z-lab's ids + 1": lambda x: (
        x.config["aux_hidden_state_layer_ids"] == [layer + 1 for layer in x.taps]
    ),
    "10.3 mask_token_id": lambda x: x.config["mask_token_id"] == x.drafter.config.mask_token_id,
    "10.3 speculative_tokens = block_size - 1": lambda x: (
        x.config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == x.config["block_size"] - 1 == 4
    ),
    "10.3 sample_from_anchor is said, and false": lambda x: x.config["sample_from_anchor"] is False,
    "10.3 tensors of 1.4": lambda x: holds(
        x, "fc", "hidden_norm", "norm", "layers.1.self_attn.q_norm", "layers.1.self_attn.k_norm", *names_of_layer(x)
    ),
    "10.3 embed_tokens and lm_head only where they are its own; else the whole vocabulary": lambda x: (
        (holds(x, "embed_tokens"), holds(x, "lm_head")) == (x.drafter.config.own_embeddings, x.drafter.config.own_head)
        and (x.drafter.config.own_head or x.config["draft_vocab_size"] == x.layer["vocab_size"])
    ),
    "10.3 a pruned vocabulary comes with lm_head [Vd, H] and d2t": lambda x: (
        not x.pruned
        or [x.shape("lm_head.weight"), x.shape("d2t")]
        == [[x.config["draft_vocab_size"], 32], [x.config["draft_vocab_size"]]]
    ),
    "10.3 a type for each layer, and the window of sliding ones": lambda x: (
        len(x.layer["layer_types"]) == x.layer["num_hidden_layers"]
        and ("sliding_window" in x.layer) == ("sliding_attention" in x.layer["layer_types"])
    ),
    "1.6 windows": lambda x: (
        [x.layer["sliding_window"] if kind == "sliding_attention" else None for kind in x.layer["layer_types"]]
        == [x.drafter.config.window(layer) for layer in range(2)]
    ),
    "3.4 sliding_window_non_causal is about sliding layers": lambda x: (
        [kind == "sliding_attention" and not x.config["sliding_window_non_causal"] for kind in x.layer["layer_types"]]
        == [x.drafter.config.block_is_causal(layer) for layer in range(2)]
    ),
}


ROWS = {
    (kind, line): check
    for kind, lines in {"": LINES, "eagle3": EAGLE3_LINES, "dflash": DFLASH_LINES}.items()
    for line, check in lines.items()
}


@pytest.mark.parametrize(("kind", "line"), ROWS)
def test_line_of_the_section_on_vllm_holds_for_every_export(kind: str, line: str, exports: dict[str, Export]) -> None:
    concerned = {name: export for name, export in exports.items() if name.startswith(kind)}
    assert len(concerned) >= 4
    assert [name for name, export in concerned.items() if not ROWS[kind, line](export)] == []


def causal_in_vllm(export: Export) -> list[bool]:
    """Which layers of an exported DFlash drafter vLLM masks causally inside the block.

    From #47745 on its reader makes of `sliding_window_non_causal` one setting for all layers, full ones included;
    from 0.28 on (#52816) the draft model looks at `is_causal` of the nested config first.
    """
    everywhere = export.layer.get("is_causal", not export.config["sliding_window_non_causal"])
    return [everywhere] * export.layer["num_hidden_layers"]


def test_vllm_masks_exported_dflash_layers_as_they_were_trained_unless_they_are_mixed(
    exports: dict[str, Export],
) -> None:
    for name, export in exports.items():
        if name.startswith("dflash"):
            right = [export.drafter.config.block_is_causal(layer) for layer in range(2)]
            assert (causal_in_vllm(export) == right) is (name != "dflash, mixed layers"), name
