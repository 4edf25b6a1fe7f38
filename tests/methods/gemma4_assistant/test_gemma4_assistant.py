"""Gemma 4 assistants: drafts by the equations of the facts on formats (2026, 6.2), and what is refused.

The equations are written out here with loops over heads, on keys and values of a plain forward over the committed text;
so each round is compared with what a drafter would draft that knows nothing of the rounds before it.
"""

from __future__ import annotations

import itertools
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    Gemma4AssistantConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedTextConfig,
    Gemma4VisionConfig,
    PreTrainedModel,
)

from hf_specdec import export_drafter, inspect_drafter, load_drafter
from hf_specdec.decoding.chains import best_path
from hf_specdec.decoding.upstream import CACHE
from hf_specdec.hub.checkpoint import read_config
from hf_specdec.hub.files import Source
from hf_specdec.hub.loading import make_blueprint
from hf_specdec.methods import gemma4_assistant as layout
from hf_specdec.methods.gemma4_assistant import Gemma4AssistantDrafter
from hf_specdec.methods.merged import MergedDrafter
from tests.chains import assisted_loop
from tests.hub.layouts import as_gemma4_assistant, save
from tests.method_table import make_eagle3, make_gemma4_assistant, make_ngram
from tests.targets import PAD, PROMPTS, WINDOW, fresh_target, make_target, one_prompt, ragged_prompts
from tests.watched import Watched, WatchedRound

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
# Whose last layers read others' keys and values; with full layers of another shape, none of which does.
TARGETS: dict[str, dict[str, Any]] = {
    "shares": {},
    "two shapes": {
        "num_kv_shared_layers": 0, "global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    },
}  # fmt: skip
HEADS: dict[str, dict[str, Any]] = {
    "all rows": {"final_logit_softcapping": 4.0},
    "clusters": {"num_centroids": 16, "centroid_intermediate_top_k": 3},
}


def target_of(kind: str) -> PreTrainedModel:
    return make_target("gemma4", "sdpa", torch.float64, **TARGETS[kind])


def drafter_of(target: PreTrainedModel, **settings: Any) -> Gemma4AssistantDrafter:
    """In float64, with norms that are not all ones."""
    drafter = make_gemma4_assistant(target, **settings).double()
    torch.manual_seed(4)
    for parameter in drafter.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.4 * torch.randn_like(parameter)
    for layer in drafter.layers:
        layer.layer_scalar += 0.3 * torch.randn(1)
    return drafter


class Equations:
    """The drafter on one text, written out.

    Args:
        drafter: whose weights are used.
        target: of the text.
        text: token ids without padding, root included.
    """

    def __init__(self, drafter: Gemma4AssistantDrafter, target: PreTrainedModel, text: list[int]) -> None:
        self.config, self.weights = drafter.config, drafter.state_dict()
        self.table = target.get_input_embeddings().weight * target.config.hidden_size**0.5
        committed, self.root = torch.tensor([text[:-1]]), text[-1]
        self.position = len(text) - 2
        cache = DynamicCache()  # without a config it keeps everything
        self.first = target(
            committed, **{CACHE: cache}, use_cache=True, output_hidden_states=True
        ).hidden_states[-1][0, -1]  # fmt: skip
        types = target.config.layer_types[: len(target.config.layer_types) - target.config.num_kv_shared_layers]
        self.kept = {
            kind: cache.layers[max(index for index, each in enumerate(types) if each == kind)] for kind in set(types)
        }

    def norm(self, states: Tensor, name: str) -> Tensor:
        root = (states.pow(2).mean() + self.config.rms_norm_eps).sqrt()
        return states / root * self.weights[f"{name}.weight"]

    def turned(self, query: Tensor, kind: str) -> Tensor:
        rope, half = self.config.rope_parameters[kind], len(query) // 2
        turning = half if rope["rope_type"] == "default" else int(rope["partial_rotary_factor"] * half)
        out = query.clone()
        for pair in range(turning):
            angle = self.position / rope["rope_theta"] ** (2 * pair / len(query))
            one, other = query[pair], query[half + pair]
            out[pair] = one * math.cos(angle) - other * math.sin(angle)
            out[half + pair] = other * math.cos(angle) + one * math.sin(angle)
        return out

    def attention(self, states: Tensor, layer: int) -> Tensor:
        kind, prefix = self.config.layer_types[layer], f"layers.{layer}.self_attn"
        keys, values = self.kept[kind].keys[0], self.kept[kind].values[0]
        if kind == "sliding_attention":
            keys, values = keys[:, -self.config.sliding_window :], values[:, -self.config.sliding_window :]
        queries = (self.weights[f"{prefix}.q_proj.weight"] @ states).view(self.config.num_attention_heads, -1)
        found = []
        for head, query in enumerate(queries):
            query = self.turned(self.norm(query, f"{prefix}.q_norm"), kind)
            group = head * len(keys) // len(queries)
            found.append((keys[group] @ query).softmax(0) @ values[group])
        return self.weights[f"{prefix}.o_proj.weight"] @ torch.cat(found)

    def step(self, token: int, before: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the next token, and the state that it is drafted behind."""
        states = self.weights["pre_projection.weight"] @ torch.cat([self.table[token], before])
        for layer in range(self.config.num_hidden_layers):
            prefix = f"layers.{layer}"
            attended = self.attention(self.norm(states, f"{prefix}.input_layernorm"), layer)
            states = states + self.norm(attended, f"{prefix}.post_attention_layernorm")
            normed = self.norm(states, f"{prefix}.pre_feedforward_layernorm")
            up, gate, down = (self.weights[f"{prefix}.mlp.{name}_proj.weight"] for name in ("up", "gate", "down"))
            wide = nn.functional.gelu(gate @ normed, approximate="tanh") * (up @ normed)
            states = states + self.norm(down @ wide, f"{prefix}.post_feedforward_layernorm")
            states = states * self.weights[f"{prefix}.layer_scalar"]
        output = self.norm(states, "norm")
        logits = self.weights["lm_head.weight"] @ output
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = cap * (logits / cap).tanh()
        if self.config.num_centroids is not None:
            size = self.config.vocab_size // self.config.num_centroids
            near = (self.weights["clusters.centroids.weight"] @ output).topk(self.config.centroid_intermediate_top_k)
            scored = [
                int(self.weights["clusters.token_ordering"][cluster * size + member])
                for cluster in near.indices.tolist()
                for member in range(size)
            ]
            logits = torch.full_like(logits, -torch.inf).index_copy(0, torch.tensor(scored), logits[scored])
        return logits.log_softmax(0), self.weights["post_projection.weight"] @ output

    def chain(self, depth: int) -> tuple[list[int], list[float]]:
        """The likeliest token behind each other, and the log-probability of the path to each."""
        tokens, paths = [self.root], [0.0]
        state = self.first
        for _ in range(depth):
            logprobs, state = self.step(tokens[-1], state)
            paths.append(paths[-1] + float(logprobs.max()))
            tokens.append(int(logprobs.argmax()))
        return tokens, paths

    def paths(self) -> list[tuple[float, tuple[int, ...]]]:
        """All paths of one and two tokens with their log-probabilities, the likeliest first."""
        logprobs, state = self.step(self.root, self.first)
        found = [(float(logprob), (token,)) for token, logprob in enumerate(logprobs)]
        for token in logprobs.topk(20).indices.tolist():
            found += [
                (float(logprobs[token] + further), (token, other))
                for other, further in enumerate(self.step(token, state)[0])
            ]
        return sorted(found, reverse=True)


def text_of(drafted: WatchedRound, row: int) -> list[int]:
    """The text of a row without its padding, which no prompt has a token of."""
    return list(itertools.dropwhile(lambda token: token == PAD, drafted.text(row)))


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", TARGETS)
@torch.no_grad()
def test_likeliest_path_of_every_round_is_that_of_the_equations(kind: str, head: str, batch: str) -> None:
    target, prompts = target_of(kind), PROMPTS[batch]()
    drafter = drafter_of(target, depth=3, top_k=8, tree_budget=136, **HEADS[head])
    watched = Watched(drafter)
    output = target.generate(**prompts, **GREEDY, assistant_model=watched)
    assert output.tolist() == target.generate(**prompts, **GREEDY).tolist()
    compared = 0
    for drafted in watched.rounds:
        logprobs: Any = drafted.tree.path_logprobs
        for row, active in enumerate(drafted.context.active):
            if not active:  # its text is over, and its drafts are ignored
                continue
            text = text_of(drafted, row)
            path = best_path(drafted.tree.of_rows([row]))
            tokens, paths = Equations(drafter, target, text).chain(len(path) - 1)
            assert drafted.tree.token_ids[row, path].tolist() == tokens
            torch.testing.assert_close(logprobs[row, path].tolist(), paths, rtol=0, atol=1e-5)
            assert len(path) >= 3
            compared += len(text) > 2 * WINDOW
    assert compared > 5 * len(output), "windows matter"
    assert watched.stats is not None
    assert {0, 1} <= {count for row in watched.stats.per_step_accepted for count in row}


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_trees_hold_the_likeliest_paths(head: str) -> None:
    target, budget = target_of("shares"), 10
    drafter = drafter_of(target, depth=2, top_k=budget, tree_budget=budget, **HEADS[head])
    watched = Watched(drafter)
    target.generate(**one_prompt(), **GREEDY, assistant_model=watched)
    for watched_round in watched.rounds[:6]:
        tree, expected = watched_round.tree, Equations(drafter, target, watched_round.text(0)).paths()[:budget]
        tokens, parents = tree.token_ids[0].tolist(), tree.parents[0].tolist()
        drafted = [
            (tokens[node],) if parents[node] == 0 else (tokens[parents[node]], tokens[node])
            for node in range(1, tree.num_nodes)
        ]
        assert drafted == [path for _, path in expected]
    assert any(int(tree.depths.max()) == 2 for tree in watched.trees)


def test_one_forward_per_level_and_none_enters_a_cache() -> None:
    target = target_of("shares")
    drafter = drafter_of(target, depth=3, top_k=4)
    shapes: list[tuple[int, ...]] = []
    drafter.pre_projection.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    target.generate(**one_prompt(), max_new_tokens=2, do_sample=False, assistant_model=drafter)
    assert shapes == [(1, 1, 24), (1, 4, 24), (1, 4, 24)]


@torch.no_grad()
def test_tokens_outside_the_nearest_clusters_have_probability_zero() -> None:
    target = target_of("shares")
    drafter = drafter_of(target, **HEADS["clusters"])
    outputs = torch.randn(2, 3, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits = drafter.logits(outputs)
    members = drafter.clusters.token_ordering.view(16, 4)  # type: ignore[union-attr]
    every = drafter.lm_head(outputs).float()
    for place in itertools.product(range(2), range(3)):
        near = drafter.clusters.centroids(outputs[place]).topk(3).indices  # type: ignore[union-attr]
        scored = members[near].flatten()
        torch.testing.assert_close(logits[place][scored], every[place][scored])
        assert logits[place].softmax(-1).count_nonzero() == 12
    # A budget that is larger than what can be drafted.
    drafter = drafter_of(target, num_centroids=32, centroid_intermediate_top_k=1, depth=2, top_k=9, tree_budget=40)
    watched = Watched(drafter)
    output = target.generate(**one_prompt(), **GREEDY, assistant_model=watched)
    assert output.tolist() == target.generate(**one_prompt(), **GREEDY).tolist()
    assert {tree.num_nodes for tree in watched.trees} == {1 + 2 + 4}


@pytest.mark.parametrize("head", HEADS)
def test_saved_in_our_layout_it_drafts_the_same(head: str, tmp_path: Path) -> None:
    target = target_of("two shapes")
    drafter = drafter_of(target, **HEADS[head])
    drafter.save_pretrained(tmp_path)
    assert inspect_drafter(tmp_path).problems == []
    loaded = load_drafter(tmp_path, target, **{name: getattr(drafter.options, name) for name in ("depth", "top_k")})
    watched = [Watched(drafter), Watched(loaded)]
    for each in watched:
        target.generate(**one_prompt(), **GREEDY, assistant_model=each)
    texts = [[tree.token_ids.tolist() for tree in each.trees] for each in watched]
    assert texts[0] == texts[1]


def test_it_is_served_by_vllm_as_published(tmp_path: Path) -> None:
    drafter = drafter_of(target_of("shares"))
    with pytest.raises(ValueError, match="vLLM serves Gemma 4 assistants in their published layout"):
        export_drafter(drafter, tmp_path, target_id="owner/target")


def test_fields_left_out_are_at_the_defaults_of_the_config_classes() -> None:
    kinds: list[tuple[Any, Any]] = [
        (Gemma4AssistantConfig, Gemma4TextConfig),
        (Gemma4UnifiedAssistantConfig, Gemma4UnifiedTextConfig),
    ]
    for assistant_class, text_class in kinds:
        said = {"model_type": assistant_class.model_type, "text_config": {}, "use_ordered_embeddings": True}
        reading, text = layout.read_assistant(said, None).fields, text_class()
        assistant = assistant_class(text_config=text_class(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0))
        for name in ("backbone_hidden_size", "num_centroids", "centroid_intermediate_top_k"):
            assert reading[name] == getattr(assistant, name)
        for name in layout.TEXT_DEFAULTS.keys() - {"hidden_activation", "head_dim", "num_key_value_heads"}:
            assert reading[name] == getattr(text, name)
        assert reading["hidden_act"] == text.hidden_activation
        assert reading["layer_types"] == text.layer_types
        assert reading["rope_parameters"] == text.rope_parameters
        sliding, full = text.per_layer_config[0], text.per_layer_config[5]
        assert (reading["head_dim"], reading["global_head_dim"]) == (sliding.head_dim, full.head_dim)
        heads = reading["num_global_key_value_heads"] or reading["num_key_value_heads"]
        assert (reading["num_key_value_heads"], heads) == (sliding.num_key_value_heads, full.num_key_value_heads)


def written(folder: Path, place: str = "", changes: dict[str, Any] | None = None, **settings: Any) -> Path:
    """An assistant in transformers' layout whose config was changed at a place; `settings` make it."""
    config, tensors = as_gemma4_assistant(make_gemma4_assistant(target_of("shares"), **settings))
    part = config
    for key in place.split(".") if place else ():
        part = part[key]
    part.update(changes or {})
    save(folder, config, tensors)
    return folder


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("llama", {"num_key_value_heads": 2}, "keys and values of gemma4 targets, but target .* model_type 'llama'"),
        ("gemma4", {"hidden_size": 64}, "hidden states of size 32, but target .* has hidden_size 64"),
        ("gemma4", {"vocab_size": 128, "vocab_size_per_layer_input": 128}, "vocabulary of 64, but target .* has 128"),
        ("gemma4", {"num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 4, "num_hidden_layers": 4},
         r"type 'sliding_attention', which .* stores keys and values in layers of types \['full_attention'\] only"),
        ("gemma4", {"head_dim": 16}, r"reads \(2, 8\) heads and dimensions .*layer 0 of target .* stores \(2, 16\)"),
        ("gemma4", {"global_head_dim": 16}, r"'full_attention', but layer 1 of target .* stores \(2, 16\)"),
        ("gemma4", {"sliding_window": 8}, "sliding_window of 6 entries, but that of target .* is 8"),
    ],
)  # fmt: skip
def test_target_that_does_not_fit_is_refused(
    family: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    written(tmp_path)
    (tmp_path / "model.safetensors").unlink()  # which is not asked for
    with pytest.raises(ValueError, match=f"(?s){message}.*A drafter fits only the target it was trained for"):
        load_drafter(tmp_path, fresh_target(family, "sdpa", **settings))


TEXT, ROPE = "text_config", "text_config.rope_parameters.full_attention"


@pytest.mark.parametrize(
    ("place", "changes", "message"),
    [
        ("", {"text_config": None}, "text_config is None; it must hold"),
        ("", {"use_ordered_embeddings": True, "num_centroids": 24}, "num_centroids must divide vocab_size"),
        ("", {"gate_of_next_year": 1}, "has gate_of_next_year=1"),
        ("", {"backbone_hidden_size": "wide"}, "backbone_hidden_size is 'wide'; it must be an integer"),
        (TEXT, {"num_kv_shared_layers": 1}, "num_kv_shared_layers is 1 and num_hidden_layers 3"),
        (TEXT, {"enable_moe_block": True}, "has text_config.enable_moe_block=True"),
        (TEXT, {"hidden_size_per_layer_input": 8}, "has text_config.hidden_size_per_layer_input=8"),
        (TEXT, {"use_bidirectional_attention": "all"}, "has text_config.use_bidirectional_attention='all'"),
        (
            TEXT,
            {"per_layer_config": {"0": {"head_dim": 4}}},
            r"per_layer_config is .* full layers, \['2'\], the same",
        ),
        (
            TEXT,
            {"per_layer_config": {"2": {"num_experts": 4}}},
            "per_layer_config is .*must say head_dim",
        ),
        (TEXT, {"layer_types": ["other"] * 3}, "layer_types is .*'other'"),
        (TEXT, {"layer_types": "other"}, "has layer_types='other'; it must be a list of names"),
        (TEXT, {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters of full_attention are"),
        (TEXT, {"num_attention_heads": 3}, "num_attention_heads 3 must be a multiple of the 2 heads of keys"),
        (ROPE, {"rope_type": "yarn"}, "rope_parameters of full_attention are .*'yarn'"),
        (ROPE, {"partial_rotary_factor": 1.5}, "no partial_rotary_factor beyond 1"),
        (ROPE, {"rope_theta": "wide"}, "rope_theta='wide'; it must be a finite number"),
        (ROPE, {"turn": 2}, "has text_config.rope_parameters.full_attention.turn=2"),
    ],
)
def test_config_that_makes_no_sense_is_refused(
    place: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    written(tmp_path, place, changes)
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path)
    assert inspect_drafter(tmp_path).problems


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    clusters = {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 3}
    written(tmp_path, "", clusters, **HEADS["clusters"])
    assert isinstance(load_drafter(tmp_path), Gemma4AssistantDrafter)
    whole = load_file(tmp_path / "model.safetensors")
    twice = whole["masked_embedding.token_ordering"].clone()
    twice[0] = twice[1]
    for changes, message in [
        ({"masked_embedding.token_ordering": twice}, "must hold each of the 64 token ids once"),
        ({"masked_embedding.token_ordering": twice.int()}, "token_ordering is I32, not I64"),
        ({"model.layers.0.layer_scalar": torch.ones(2)}, r"layer_scalar is \[2\]"),
        ({"model.layers.0.self_attn.k_norm.weight": torch.ones(8)}, None),  # which savers may leave there
        ({"model.layers.9.mlp.up_proj.weight": torch.ones(8)}, "unexpected: layers.9.mlp.up_proj.weight"),
    ]:
        save_file(whole | changes, tmp_path / "model.safetensors")
        if message is None:
            load_drafter(tmp_path)
            continue
        with pytest.raises(ValueError, match=message):
            load_drafter(tmp_path)
    del whole["post_projection.weight"]
    save_file(whole, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="missing: post_projection.weight"):
        load_drafter(tmp_path)
    assert "missing: post_projection.weight" in inspect_drafter(tmp_path).problems[0]


# As google publishes them, by their configs.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, tuple[int, int]]]] = {
    "gemma-4-E2B-it-assistant": (
        {
            "architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant",
            "backbone_hidden_size": 1536, "centroid_intermediate_top_k": 32, "num_centroids": 2048,
            "use_ordered_embeddings": True,
            "text_config": {
                "model_type": "gemma4_text", "attention_k_eq_v": False, "hidden_size": 256, "intermediate_size": 2048,
                "num_attention_heads": 4, "num_key_value_heads": 1, "num_global_key_value_heads": None,
                "sliding_window": 512, "max_position_embeddings": 131072,
            },
        },
        {"layers.0.self_attn.q_proj": (1024, 256), "layers.3.self_attn.q_proj": (2048, 256),
         "pre_projection": (256, 3072), "clusters.centroids": (2048, 256), "lm_head": (262144, 256)},
    ),
    "gemma-4-12B-it-assistant": (
        {
            "architectures": ["Gemma4UnifiedAssistantForCausalLM"], "model_type": "gemma4_unified_assistant",
            "backbone_hidden_size": 3840, "centroid_intermediate_top_k": 32, "num_centroids": 2048,
            "use_ordered_embeddings": False,
            "text_config": {
                "model_type": "gemma4_unified_text", "attention_k_eq_v": True, "hidden_size": 1024,
                "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 8,
                "num_global_key_value_heads": 1, "sliding_window": 1024, "max_position_embeddings": 262144,
                "use_bidirectional_attention": "vision",
            },
        },
        {"layers.0.self_attn.q_proj": (4096, 1024), "layers.3.self_attn.q_proj": (8192, 1024),
         "pre_projection": (1024, 7680), "post_projection": (3840, 1024), "lm_head": (262144, 1024)},
    ),
}  # fmt: skip
PUBLISHED_BY_ALL = {
    "audio_token_id": 258881, "boa_token_id": 256000, "boi_token_id": 255999, "eoa_token_index": 258883,
    "eoi_token_id": 258882, "image_token_id": 258880, "dtype": "bfloat16", "tie_word_embeddings": True,
    "transformers_version": "5.10.0.dev0",
}  # fmt: skip
PUBLISHED_TEXT = {
    "_name_or_path": "", "architectures": None, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2,
    "chunk_size_feed_forward": 0, "dtype": "bfloat16", "enable_moe_block": False, "eos_token_id": 1,
    "final_logit_softcapping": None, "global_head_dim": 512, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "initializer_range": 0.02, "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "moe_intermediate_size": None, "num_experts": None, "num_hidden_layers": 4, "num_kv_shared_layers": 4,
    "output_attentions": False, "output_hidden_states": False, "pad_token_id": 0, "problem_type": None,
    "return_dict": True, "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "tie_word_embeddings": True, "top_k_experts": None, "use_cache": True, "use_double_wide_mlp": False,
    "vocab_size": 262144, "vocab_size_per_layer_input": 0,
}  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str, tmp_path: Path) -> None:
    config, shapes = PUBLISHED[name]
    config = PUBLISHED_BY_ALL | config | {"text_config": PUBLISHED_TEXT | config["text_config"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    format, fields = read_config(tmp_path, Source(str(tmp_path)))
    reading = format.read(fields, None)
    assert reading is not None
    _, blueprint = make_blueprint(format, reading.fields, name)
    tensors = blueprint.state_dict()
    assert {key: tuple(tensors[f"{key}.weight"].shape) for key in shapes} == shapes


def test_target_with_vision_is_read_through_its_language_model() -> None:
    text = target_of("shares").config
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    vision |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Gemma4Config(text_config=text, vision_config=Gemma4VisionConfig(**vision), audio_config=None)
    torch.manual_seed(3)
    target: Any = Gemma4ForConditionalGeneration._from_config(config, dtype=torch.float64).eval()
    target.generation_config.update(pad_token_id=PAD, eos_token_id=None, bos_token_id=None)
    drafter = make_gemma4_assistant(target_of("shares"), target_model_type="gemma4")
    for prompts in (one_prompt(), ragged_prompts()):
        alone = target.generate(**prompts, **GREEDY)
        assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
        assert drafter.stats is not None
        assert drafter.stats.num_draft_tokens > 0


@pytest.mark.filterwarnings("ignore:.*transformers' own loop verifies")
@pytest.mark.parametrize("loop", [nullcontext, assisted_loop])
def test_merged_with_others_it_drafts_in_both_loops(loop: Any) -> None:
    target = target_of("shares")
    drafter = MergedDrafter(drafter_of(target), make_eagle3(target).double(), make_ngram(target), tree_budget=12)
    alone = target.generate(**one_prompt(), **GREEDY)
    with loop():
        assert target.generate(**one_prompt(), **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
    assert drafter.stats is not None
    assert drafter.stats.by_source["gemma4_assistant"].num_drafts > 0


def test_report_names_what_it_is(tmp_path: Path) -> None:
    report = str(inspect_drafter(written(tmp_path)))
    for part in ("Gemma 4 assistant (transformers)", "gemma4_assistant", "head_dim", "no problems found"):
        assert part in report
