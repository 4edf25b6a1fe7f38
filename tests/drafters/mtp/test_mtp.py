"""Multi-token prediction: tiny targets whose checkpoints hold such a layer, against the equations, token for token."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specdec import load_drafter
from hf_specdec.decoding.taps import decoder_layers
from hf_specdec.drafters.mtp import MTPDrafter, find_layout
from tests.targets import one_prompt, ragged_prompts
from tests.watched import Watched

VOCAB, HIDDEN, LAYERS = 64, 32, 4
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16}
_SHAPE = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_NEXT_N = {
    "embedding_norm": "model.layers.4.enorm", "state_norm": "model.layers.4.hnorm",
    "projection": "model.layers.4.eh_proj", "final_norm": "model.layers.4.shared_head.norm",
    "layer": "model.layers.4.",
}  # fmt: skip
_MTP = {
    "embedding_norm": "mtp.pre_fc_norm_embedding", "state_norm": "mtp.pre_fc_norm_hidden", "projection": "mtp.fc",
    "final_norm": "mtp.norm", "layer": "mtp.layers.0.",
}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
# Config class, further settings, names of the tensors, whether normed states recur, whether the first pair has zeros.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, str], bool, bool]] = {
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
            "num_key_value_heads": 4,
        },
        _NEXT_N,
        True,
        True,
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {**_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8},
        _NEXT_N,
        False,
        True,
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**_EXPERTS, **_DELTA, "num_experts": 4, "shared_expert_intermediate_size": 24},
        _MTP,
        True,
        False,
    ),
    "qwen3_5": ("Qwen3_5TextConfig", _DELTA, _MTP, True, False),
}  # fmt: skip


def make_target(family: str, folder: Path, *, experts_apart: bool = True, counting: bool = False) -> PreTrainedModel:
    """A target saved with a layer of its own kind for the next token, and loaded again, which leaves that out.

    Args:
        family: of `FAMILIES`.
        folder: to save it in.
        experts_apart: whether the checkpoint has a tensor per expert.
        counting: whether layers add next to nothing, so that the next token depends on the last alone, and the layer's
            projection passes on the embedding.
    """
    config_class, settings, names, *_ = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**_SHAPE, **settings})
    config._experts_implementation = "eager"
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    layers: Any = decoder_layers(model)
    if counting:
        for layer in layers:
            for name, parameter in layer.named_parameters():
                if re.search(r"(o_proj|out_proj|down_proj)", name):
                    parameter.data *= 1e-3
    template = copy.deepcopy(layers[-1])
    tensors = {}
    for name, tensor in template.state_dict().items():
        tensor = tensor + 0.1 * torch.randn_like(tensor) if tensor.is_floating_point() and not counting else tensor
        if experts_apart and name.endswith("experts.gate_up_proj"):
            for number, both in enumerate(tensor):
                gate, up = both.chunk(2)
                tensors[name.replace("gate_up_proj", f"{number}.gate_proj.weight")] = gate
                tensors[name.replace("gate_up_proj", f"{number}.up_proj.weight")] = up
        elif experts_apart and name.endswith("experts.down_proj"):
            for number, down in enumerate(tensor):
                tensors[name.replace("down_proj", f"{number}.down_proj.weight")] = down
        else:
            tensors[name] = tensor
    stored = {f"{names['layer']}{name}": tensor for name, tensor in tensors.items()}
    norm = model.get_decoder().norm.weight
    for place in ("embedding_norm", "state_norm", "final_norm"):
        stored[f"{names[place]}.weight"] = norm.data.clone() if counting else torch.randn_like(norm)
    projection = 0.3 * torch.randn(HIDDEN, 2 * HIDDEN)
    if counting:
        projection = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], 1)
    stored[f"{names['projection']}.weight"] = projection
    if "shared_head" in names["final_norm"]:  # copies of the target's tables, which are not read
        stored["model.layers.4.embed_tokens.weight"] = model.get_input_embeddings().weight.data
        stored["model.layers.4.shared_head.head.weight"] = model.get_output_embeddings().weight.data
    model.save_pretrained(folder)
    whole = load_file(folder / "model.safetensors") | stored
    save_file({name: tensor.clone().contiguous() for name, tensor in whole.items()}, folder / "model.safetensors")
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    loaded.config._experts_implementation = "eager"
    loaded.generation_config.update(eos_token_id=None, pad_token_id=0)
    return loaded


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_the_targets_and_drafts_are_made(family: str, tmp_path: Path) -> None:
    target = make_target(family, tmp_path)
    drafter = load_drafter("mtp", target, depth=3, top_k=3, tree_budget=9)
    assert isinstance(drafter, MTPDrafter)
    for prompts in (one_prompt(), ragged_prompts()):
        alone = target.generate(**prompts, **GREEDY)
        assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
        assert drafter.stats is not None
        assert drafter.stats.num_draft_tokens > 0
    again = load_drafter(str(tmp_path), target)
    assert isinstance(again, MTPDrafter), "the target's own name means its own layer"


def expected_chain(drafter: Any, target: PreTrainedModel, text: Tensor, depth: int, family: str) -> list[int]:
    """The greedy draft by the equations, all pairs of the text in one plain forward each time, without a cache."""
    _, _, _, recurs_normed, zero_first = FAMILIES[family]
    base: Any = target.get_decoder()
    table = target.get_input_embeddings().weight
    states = base(text[:, :-1]).last_hidden_state
    tokens, features = text[:, 1:], states
    drafted: list[int] = []
    for _ in range(depth):
        embedded = table[tokens].clone()
        if zero_first:
            embedded[:, 0] = 0
        joined = drafter.projection(torch.cat([drafter.embedding_norm(embedded), drafter.state_norm(features)], -1))
        positions = torch.arange(tokens.shape[1]).unsqueeze(0)
        mask = torch.full((tokens.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        output = drafter.layer(
            joined, attention_mask=mask, position_ids=positions, position_embeddings=base.rotary_emb(joined, positions)
        )
        output = output[0] if isinstance(output, tuple) else output
        normed = drafter.final_norm(output)
        token = int(target.get_output_embeddings()(normed)[0, -1].argmax())
        drafted.append(token)
        tokens = torch.cat([tokens, torch.tensor([[token]])], 1)
        features = torch.cat([features, (normed if recurs_normed else output)[:, -1:]], 1)
    return drafted


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_drafts_are_those_of_the_equations(family: str, tmp_path: Path) -> None:
    target = make_target(family, tmp_path)
    drafter = load_drafter("mtp", target, depth=4, top_k=1, tree_budget=4)
    watched = Watched(drafter)
    output = target.generate(**one_prompt(), **GREEDY, assistant_model=watched)
    assert len(watched.rounds) > 4
    for drafted in watched.rounds:
        text = output[:, : drafted.context.lengths[0]]
        assert drafted.tree.token_ids[0, 1:].tolist() == expected_chain(drafter, target, text, 4, family)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_that_knows_the_target_is_accepted(family: str, tmp_path: Path) -> None:
    target = make_target(family, tmp_path, counting=True)
    drafter = load_drafter("mtp", target, depth=3, top_k=2)
    target.generate(**one_prompt(), **GREEDY, assistant_model=drafter)
    assert drafter.stats is not None
    assert drafter.stats.mean_acceptance_length > 3


@pytest.mark.filterwarnings("ignore")
def test_experts_may_be_stored_joined(tmp_path: Path) -> None:
    targets = [make_target("glm4_moe", tmp_path / str(apart), experts_apart=apart) for apart in (True, False)]
    one, other = (load_drafter("mtp", target) for target in targets)
    assert isinstance(one, nn.Module)
    assert isinstance(other, nn.Module)
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], tensor, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_had_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pass the loaded model, load_drafter\('mtp', target\)"):
        load_drafter("mtp")
    plain = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**_SHAPE))
    with pytest.raises(ValueError, match="The target has no name_or_path"):
        load_drafter("mtp", plain)
    plain.save_pretrained(tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"has no multi-token-prediction layer that is known here: looked for eh_proj"):
        load_drafter("mtp", plain)

    target = make_target("glm4_moe", tmp_path / "glm")
    other = make_target("glm4_moe", tmp_path / "other")
    with pytest.raises(ValueError, match="is the multi-token-prediction layer of target"):
        other.generate(**one_prompt(), **GREEDY, assistant_model=load_drafter("mtp", target))
    file = tmp_path / "glm" / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if "layers.4.self_attn.q_proj" not in name}, file)
    with pytest.raises(ValueError, match=r"are not of this target's kind: self_attn.q_proj.weight missing"):
        load_drafter("mtp", target)
    save_file(tensors | {"model.layers.4.mlp.gate.weight_scale_inv": torch.ones(1)}, file)
    with pytest.raises(ValueError, match="is stored in blocks of 8 bits with scales"):
        load_drafter("mtp", target)


@pytest.mark.filterwarnings("ignore")
def test_sharded_checkpoints_are_read_by_their_index(tmp_path: Path) -> None:
    target = make_target("qwen3_5", tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    drafter: Any = load_drafter("mtp", target)
    (tmp_path / "model.safetensors").unlink()
    shards = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    first, second = shards
    for name, tensor in whole.items():
        shards[second if name.startswith("mtp.") else first][name] = tensor
    for shard, tensors in shards.items():
        save_file(tensors, tmp_path / shard)
    index = {"metadata": {}, "weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    again: Any = load_drafter("mtp", target)
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=0, atol=0)


def test_layouts_are_told_by_names_of_tensors() -> None:
    deep = [
        "model.layers.3.mlp.up_proj.weight",
        "model.layers.4.eh_proj.weight",
        "model.layers.4.final_layernorm.weight",
    ]
    found = find_layout(deep, 4, "hy_v3")
    assert found is not None
    assert (found.final_norm, found.recurs_normed, found.zero_first) == ("model.layers.4.final_layernorm", True, True)
    assert find_layout(deep, 5, "hy_v3") is None
    nested = find_layout(["model.language_model.layers.16.eh_proj.weight"], 16, "glm_ocr")
    assert nested is not None
    assert (nested.layer, nested.recurs_normed, nested.zero_first) == ("model.language_model.layers.16.", False, False)
    ernie = find_layout(["model.mtp_linear_proj.0.weight", "model.mtp_block.0.mlp.up_proj.weight"], 4, "ernie4_5_moe")
    assert ernie is not None
    assert (ernie.embedding_norm, ernie.final_norm, ernie.layer) == (
        "model.mtp_emb_norm.0", None, "model.mtp_block.0."
    )  # fmt: skip
