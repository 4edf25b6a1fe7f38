"""Published layouts of others: folders built from the facts on formats alone load, draft the same and stay lossless.

Every case starts from a random drafter of ours, writes it as the layout has it, loads that folder, and compares all
trees of a run. `misread` names the fields that reading a trap the other way round would give: with them, acceptance by
a target that says what the drafter expects must collapse, so that no test passes by accident.
"""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from hf_specdec import load_drafter
from hf_specdec.drafters.dflash import DFlashDrafter
from hf_specdec.drafters.eagle3 import Eagle3Drafter
from hf_specdec.drafters.medusa import MedusaDrafter
from hf_specdec.drafters.pretrained import PretrainedDrafter
from hf_specdec.drafters.specblock import SpecBlockDrafter
from hf_specdec.hub.recognition import recognise
from tests.methods import make_dflash, make_eagle3, make_medusa, make_specblock
from tests.targets import make_target, one_prompt

Fields = dict[str, Any]
Tensors = dict[str, Tensor]
TREE = {"depth": 3, "top_k": 3, "tree_budget": 10}
LAYERS = 8


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    # Drawn wide, so that neighbouring layers say different things.
    return make_target("llama", "sdpa", torch.float32, num_hidden_layers=LAYERS, initializer_range=0.5)


def run(target: PreTrainedModel, drafter: PretrainedDrafter) -> tuple[list[list[int]], list[Any]]:
    """The output of a short run, and every tree of it."""
    trees: list[Any] = []
    make = drafter.candidate_generator

    def listening(model: Any) -> Any:
        generator = make(model)
        draft = generator.draft

        def keeping(context: Any) -> Any:
            tree = draft(context)
            trees.append([part.tolist() for part in (tree.token_ids, tree.parents, tree.valid)])
            return tree

        generator.draft = keeping
        return generator

    drafter.candidate_generator = listening  # type: ignore[method-assign]
    output = target.generate(**one_prompt(), max_new_tokens=6, do_sample=False, assistant_model=drafter)
    del drafter.candidate_generator
    return output.tolist(), trees


class Says(LogitsProcessor):
    """Makes the target say what `follow` gives for a prefix; its hidden states are the ones of that text."""

    def __init__(self, follow: Callable[[list[int]], int]) -> None:
        self.follow = follow

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        said = torch.full_like(scores, -torch.inf)
        for row, prefix in enumerate(input_ids.tolist()):
            said[row, self.follow(prefix)] = 0.0
        return said


def scripted(target: PreTrainedModel, drafter: PretrainedDrafter) -> list[int]:
    """A text in which `drafter` is right as often as it can be."""
    tree: Any = None
    length = 0
    make = drafter.candidate_generator

    def listening(model: Any) -> Any:
        generator = make(model)
        draft = generator.draft

        def keeping(context: Any) -> Any:
            nonlocal tree, length
            tree, length = draft(context), context.lengths[0]
            return tree

        generator.draft = keeping
        return generator

    def follow(prefix: list[int]) -> int:
        """The drafter's first child of the node that the prefix has come to; elsewhere some token."""
        node, children = 0, {}
        if tree is not None:
            for child in reversed(range(1, tree.num_nodes)):
                if tree.valid[0, child]:
                    children[int(tree.parents[0, child]), int(tree.token_ids[0, child])] = child
        for token in prefix[length:] if tree is not None else []:
            node = children.get((node, token), -1)
        below = {parent: token for (parent, token), _ in sorted(children.items(), key=lambda item: -item[1])}
        return below.get(node, 3 + sum(prefix) % 61)

    drafter.candidate_generator = listening  # type: ignore[method-assign]
    text = target.generate(
        **one_prompt(length=40),
        max_new_tokens=40,
        do_sample=False,
        assistant_model=drafter,
        logits_processor=[Says(follow)],
    )
    del drafter.candidate_generator
    return text[0].tolist()


def accepted(target: PreTrainedModel, drafter: PretrainedDrafter, text: list[int]) -> float:
    """Mean accepted drafts where the target says `text`."""
    says = Says(lambda prefix: text[len(prefix)])
    output = target.generate(
        **one_prompt(length=40), max_new_tokens=24, do_sample=False, assistant_model=drafter, logits_processor=[says]
    )
    assert output[0].tolist() == text[: output.shape[1]]
    return drafter.stats.mean_acceptance_length - 1


def save(folder: Path, config: Fields, tensors: Tensors, file: str = "model.safetensors") -> None:
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)


def misread(drafter: Any, change: Fields | Callable[[Any], None]) -> Any:
    """The same weights, with fields of the config, or whatever `change` changes, read the other way."""
    other = copy.deepcopy(drafter)
    if callable(change):
        change(other)
        return other
    for name, value in change.items():
        setattr(other.config, name, value)
    changed = type(other)(other.config).eval()
    changed.load_state_dict(other.state_dict(), strict=False)
    changed.set_options(**{name: getattr(drafter, name) for name in drafter.option_names})
    return changed


def shape_of(config: Any, *extra: str) -> Fields:
    """What every layout says of its decoder, under the same names."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "rms_norm_eps", "hidden_act", "max_position_embeddings",
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
    config["dflash_config"] |= fields.pop("dflash_config", {})
    return config | fields, dict(drafter.state_dict())


def as_specblock(drafter: SpecBlockDrafter, **fields: Any) -> tuple[Fields, Tensors]:
    config = shape_of(drafter.config) | {
        "architectures": ["LlamaForCausalLMSpecBlockShift"],
        "model_type": "llama",
        "diffspec_draft_token_num": drafter.config.block_size,
        "rank_classes": drafter.config.rank_classes,
        "draft_vocab_size": drafter.config.draft_vocab_size,
    }
    return config | fields, dict(drafter.state_dict())


def absolute_ids(drafter: Any) -> None:
    drafter.d2t -= torch.arange(drafter.d2t.numel())


def other_slots(drafter: DFlashDrafter) -> None:
    drafter.config.dflash_config["sample_from_anchor"] = not drafter.config.sample_from_anchor


def other_taps(shift: int) -> Callable[[DFlashDrafter], None]:
    def change(drafter: DFlashDrafter) -> None:
        ids = drafter.config.target_layer_ids
        drafter.config.dflash_config["target_layer_ids"] = [layer + shift for layer in ids]

    return change


@dataclass
class Case:
    """A drafter of ours (`ours`: fields that make it), how it is written, and the traps in reading it.

    `slight` ones move random weights too little for acceptance to fall far, and are seen in the trees.
    """

    format: str
    make: Callable[..., Any]
    write: Callable[..., tuple[Fields, Tensors]]
    ours: Fields = field(default_factory=dict)
    written: Fields = field(default_factory=dict)
    misread: list[Fields | Callable[[Any], None]] = field(default_factory=list)
    slight: list[Fields | Callable[[Any], None]] = field(default_factory=list)
    file: str = "model.safetensors"


def rope(theta: float) -> Fields:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


SAFE = {"format": "EAGLE-3 (SafeAILab)", "make": make_eagle3, "write": as_safeailab}
FORGE = {"format": "EAGLE-3 (SpecForge)", "make": make_eagle3, "write": as_specforge}
SPEC = {"format": "EAGLE-3 (speculators)", "make": make_eagle3, "write": as_speculators_eagle3}
DEEP = {"format": "EAGLE-3 (DeepSpec)", "make": make_eagle3, "write": as_deepspec_eagle3}
SPEC_DFLASH = {"format": "DFlash (speculators)", "make": make_dflash, "write": as_speculators_dflash}
ZLAB = {"format": "dflash", "make": make_dflash, "write": as_zlab}
BLOCKS = {"format": "specblock", "make": make_specblock, "write": as_specblock}
DEEP_DFLASH = {"format": "DFlash (DeepSpec)", "make": make_dflash, "write": as_deepspec_dflash}
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
        misread=[other_slots, other_taps(-1), rope(1e4)],
    ),
    "z-lab, a list of layers, block size nested": Case(
        **ZLAB,
        ours={"dflash_config": {"target_layer_ids": [2, 3, 6]}},
        written={"dflash_config": {"target_layer_ids": [2, 3, 6], "block_size": 5}},
        misread=[other_taps(-1), other_taps(1)],
    ),
    "z-lab, sliding layers are causal": Case(
        **ZLAB,
        ours=SLIDING | {"dflash_config": {"target_layer_ids": [1, 5]}},
        written=SLIDING | {"block_size": 5},
        misread=[{"is_causal": False}, {"sliding_window": 64}],
    ),
    "z-lab, sliding layers said not to be causal": Case(
        **ZLAB,
        ours=SLIDING | {"is_causal": False, "dflash_config": {"target_layer_ids": [1, 5]}},
        written=SLIDING | {"block_size": 5, "dflash_config": {"causal": False}},
        misread=[{"is_causal": True}],
    ),
    "z-lab, full layers said to be causal": Case(
        **ZLAB,
        ours={"is_causal": True, "dflash_config": {"target_layer_ids": [1, 5]}},
        written={"block_size": 5, "is_causal": True},
        misread=[{"is_causal": None}],
    ),
    "z-lab, use_swa": Case(
        **ZLAB,
        ours=SLIDING | {"is_causal": False, "dflash_config": {"target_layer_ids": [1, 5]}},
        written={"block_size": 5, "dflash_config": {"use_swa": True, "swa_window_size": 4}},
        misread=[{"is_causal": True}, {"sliding_window": 64}],
    ),
    # A2: a fixed rule, in hidden-state indices. A4: offsets.
    "specblock, default taps, offsets": Case(
        **BLOCKS, ours=DEFAULT_TAPS, misread=[{"target_layer_ids": [2, 4, 5]}, absolute_ids, rope(1e6)]
    ),
    # A2: a fixed rule, in hidden-state indices. A4: offsets. A6: no rotary base means 10000.
    "safeailab, default taps, offsets, no rotary base": Case(
        **SAFE,
        ours=DEFAULT_TAPS,
        written={"tie_word_embeddings": True},  # of no meaning here
        misread=[{"target_layer_ids": [2, 4, 5]}, absolute_ids, rope(1e6)],
    ),
    "safeailab, rotary base at the top, in a pickle": Case(
        **SAFE,
        ours=DEFAULT_TAPS | rope(300.0),
        written={"rope_theta": 300.0},
        misread=[rope(1e4)],
        file="pytorch_model.bin",
    ),
    "safeailab, rotary base as parameters": Case(
        **SAFE, ours=DEFAULT_TAPS | rope(300.0), written={"rope_theta": None} | rope(300.0), misread=[rope(1e4)]
    ),
    "safeailab, full vocabulary, known by its tensors": Case(
        **SAFE, ours=DEFAULT_TAPS | {"draft_vocab_size": None}, written={"draft_vocab_size": None}
    ),
    "safeailab, own embeddings": Case(
        **SAFE, ours=DEFAULT_TAPS | {"own_embeddings": True}, misread=[{"own_embeddings": False}]
    ),
    # A2: layer ids are outputs of layers. A6: norm_output is the norm before the head, on by default.
    "specforge, layer ids": Case(
        **FORGE,
        ours={"target_layer_ids": [2, 5, 6]},
        written={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5, 6]}},
        misread=[{"target_layer_ids": [1, 4, 5]}, {"norm_before_head": False}, {"norm_output": True}],
    ),
    "specforge, default taps, no norm before the head": Case(
        **FORGE,
        ours=DEFAULT_TAPS | {"norm_before_head": False},
        written={"norm_output": False},
        misread=[{"norm_before_head": True}],
    ),
    "specforge, a norm per tap": Case(
        **FORGE, ours=DEFAULT_TAPS | {"fc_norm": True}, written={"fc_norm": True}, misread=[{"fc_norm": False}]
    ),
    "nvidia, a norm before fc": Case(
        **SAFE,
        ours={"target_layer_ids": [0, 5, 6], "norm_before_fc": True},
        written={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 5, 6], "norm_before_fc": True}},
        misread=[{"norm_before_fc": False}],
    ),
    # A2: layer ids are indices of hidden states. A6: a missing norm_before_residual is false, norm_output is recurrent.
    "speculators, hidden-state ids, missing flags": Case(
        **SPEC,
        ours={"target_layer_ids": [1, 2, 6]},
        written={"eagle_aux_hidden_state_layer_ids": [2, 3, 7]},
        misread=[{"target_layer_ids": [2, 3, 7]}, {"norm_before_residual": True}, absolute_ids],
    ),
    "speculators, hidden state 0 is the embedding": Case(
        **SPEC,
        ours={"target_layer_ids": [-1, 3]},
        written={"eagle_aux_hidden_state_layer_ids": [0, 4]},
        misread=[{"target_layer_ids": [0, 4]}],
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
        slight=[{"norm_before_residual": False}],
        misread=[
            {"norm_output": False},
            {"norm_output": False, "norm_before_head": True},
            {"target_layer_ids": [2, 4, 5]},
        ],
    ),
    "speculators, a norm per tap, q_norm under llama": Case(
        **SPEC,
        ours=DEFAULT_TAPS | {"fc_norm": True, "qk_norm": True},
        written={"fc_norm": True},
        misread=[{"qk_norm": False}],
    ),
    "speculators, head_dim at the default of qwen3": Case(
        **SPEC,
        ours=DEFAULT_TAPS | {"head_dim": 128, "qk_norm": True} | rope(300.0),
        written={"layer": {"model_type": "qwen3", "rope_theta": 300.0}},
        misread=[rope(1e4)],
    ),
    "speculators, two layers": Case(**SPEC, ours=DEFAULT_TAPS | {"num_hidden_layers": 2}),
    "deepspec eagle3, five taps": Case(
        **DEEP,
        ours={
            "target_layer_ids": [-1, 1, 3, 5, 6],
            "draft_vocab_size": None,
            "qk_norm": True,
            "own_embeddings": True,
        },
        written={"target_layer_ids": [-1, 1, 3, 5, 6]},
        misread=[{"target_layer_ids": [0, 2, 4, 6, 7]}],
    ),
    # A3: the root's slot is unused. A2: hidden-state ids.
    "speculators dflash, converted": Case(
        **SPEC_DFLASH,
        ours={"dflash_config": {"target_layer_ids": [1, 5]}},
        written={"aux_hidden_state_layer_ids": [2, 6]},
        misread=[other_slots, other_taps(1)],
    ),
    "speculators dflash, own head over a draft vocabulary": Case(
        **SPEC_DFLASH,
        ours={"dflash_config": {"target_layer_ids": [1, 5], "draft_vocab_size": 32, **OWN}},
        written={"aux_hidden_state_layer_ids": [2, 6], "sample_from_anchor": False},
        misread=[other_slots, absolute_ids],
    ),
    "speculators dflash, the root's slot predicts": Case(
        **SPEC_DFLASH,
        ours={"dflash_config": {"target_layer_ids": [1, 5], "sample_from_anchor": True, **OWN}},
        written={"aux_hidden_state_layer_ids": [2, 6], "sample_from_anchor": True},
        misread=[other_slots],
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
        misread=[{"is_causal": False}, {"sliding_window": 64}],
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
        misread=[{"is_causal": None}],
    ),
    "deepspec dflash, the root's slot predicts and nothing says so": Case(
        **DEEP_DFLASH,
        ours={"dflash_config": {"target_layer_ids": [-1, 5], "sample_from_anchor": True, **OWN}},
        written={"target_layer_ids": [-1, 5]},
        misread=[other_slots, other_taps(1)],
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


@pytest.mark.parametrize("name", CASES)
def test_folder_in_a_published_layout_drafts_what_it_was_written_from(
    name: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    case = CASES[name]
    drafter = build(case, target)
    config, tensors = case.write(drafter, **copy.deepcopy(case.written))
    save(tmp_path, config, tensors, case.file)
    assert recognise(config, "it", tensors.keys).name == case.format

    loaded = load_drafter(tmp_path, target, **{option: getattr(drafter, option) for option in drafter.option_names})
    output, trees = run(target, loaded)
    alone = target.generate(**one_prompt(), max_new_tokens=6, do_sample=False)
    assert output == alone.tolist()
    assert trees == run(target, drafter)[1]
    assert any(len(tree[0][0]) > 1 for tree in trees)

    # A target that says what the drafter expects: read the other way round, its drafts fall towards chance, which is
    # what a drafter of other weights gets.
    text = scripted(target, drafter)
    right = accepted(target, drafter, text)
    assert accepted(target, loaded, text) == right
    unrelated = case.make(target, **copy.deepcopy(case.ours), seed=7)
    unrelated.set_options(**{option: getattr(drafter, option) for option in drafter.option_names})
    assert accepted(target, unrelated, text) < right / 6
    for change in case.slight:
        assert run(target, misread(drafter, change))[1] != trees, f"reading it as {change} goes unnoticed"
    for change in case.misread:
        wrong = accepted(target, misread(drafter, change), text)
        assert wrong < right / 2, f"read as {change}, {wrong:.2f} drafts are accepted, of {right:.2f}"


@pytest.mark.parametrize(
    "name", ["speculators, default taps, every flag", "deepspec dflash, the root's slot predicts and nothing says so"]
)
def test_a_loaded_foreign_drafter_is_saved_in_our_layout_and_loads_again(
    name: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    case = CASES[name]
    drafter = build(case, target)
    save(tmp_path, *case.write(drafter, **copy.deepcopy(case.written)))
    options = {option: getattr(drafter, option) for option in drafter.option_names}
    loaded = load_drafter(tmp_path, target, **options)
    loaded.save_pretrained(tmp_path / "ours")
    again = load_drafter(tmp_path / "ours", target, **options)
    for key, tensor in loaded.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], tensor, rtol=0, atol=0)
    assert run(target, again) == run(target, drafter)


def save_eagle3(target: PreTrainedModel, folder: Path, **fields: Any) -> tuple[Fields, Tensors]:
    config, tensors = as_safeailab(make_eagle3(target, **DEFAULT_TAPS), **fields)
    save(folder, config, tensors)
    return config, tensors


class Payload:
    """Pickled, it makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize(("kind", "file"), [("eagle3", "pytorch_model.bin"), ("medusa", "medusa_lm_head.pt")])
@pytest.mark.parametrize("writer", ["pickle", "torch"])
def test_pickle_with_a_payload_is_refused_and_not_run(
    kind: str, file: str, writer: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    config = as_safeailab(make_eagle3(target, **DEFAULT_TAPS))[0] if kind == "eagle3" else {"medusa_num_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    content = {"fc.weight": Payload(tmp_path / "ran")}
    if writer == "pickle":
        (tmp_path / file).write_bytes(pickle.dumps(content))
    else:
        torch.save(content, tmp_path / file)
    with pytest.raises(ValueError, match=rf"{file} of .* cannot be read as plain tensors: .*Nothing in it was run"):
        load_drafter(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_pickle_that_holds_no_tensors_is_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    save_eagle3(target, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": 1}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin of .* must hold tensors by name, but holds something else"):
        load_drafter(tmp_path)


def test_pickled_view_of_absurd_shape_is_refused_without_a_copy(target: PreTrainedModel, tmp_path: Path) -> None:
    save_eagle3(target, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": torch.zeros(1).expand(2**20, 2**30)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"fc.weight is \[1048576, 1073741824\] in pytorch_model.bin, but config.json makes"
    ):
        load_drafter(tmp_path)


@pytest.mark.parametrize("fields", [{"num_hidden_layers": 10**9}, {"hidden_size": 10**15}])
@pytest.mark.parametrize("write", [as_safeailab, as_speculators_eagle3])
def test_config_of_absurd_size_raises(
    write: Callable[..., Any], fields: Fields, target: PreTrainedModel, tmp_path: Path
) -> None:
    config, tensors = write(make_eagle3(target, **DEFAULT_TAPS))
    if write is as_safeailab:
        config |= fields | {"architectures": ["LlamaForCausalLMEagle3"]}
    else:
        config["transformer_layer_config"] |= fields
    save(tmp_path, config, tensors)
    with pytest.raises(ValueError, match=r"config.json of .* (has num_hidden_layers|does not describe)|another shape"):
        load_drafter(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/model.safetensors", "x.bin"])
def test_index_that_leaves_the_folder_raises(name: str, target: PreTrainedModel, tmp_path: Path) -> None:
    _, tensors = save_eagle3(target, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
    with pytest.raises(ValueError, match="names the shard '.*'; shards must be safetensors files in the same folder"):
        load_drafter(tmp_path)


def test_vocabulary_map_of_absolute_ids_is_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    config, tensors = save_eagle3(target, tmp_path)
    tensors["d2t"] = tensors["d2t"] + torch.arange(tensors["d2t"].numel())
    save(tmp_path, config, tensors)
    with pytest.raises(
        ValueError, match="d2t and t2d of .* do not name the same target ids: d2t holds target ids, where"
    ):
        load_drafter(tmp_path)


def test_vocabulary_map_out_of_range_is_refused_before_the_first_token(target: PreTrainedModel, tmp_path: Path) -> None:
    config, tensors = save_eagle3(target, tmp_path)
    del tensors["t2d"]
    tensors["d2t"][5] = 100
    save(tmp_path, config, tensors)
    drafter = load_drafter(tmp_path, target)
    with pytest.raises(
        ValueError, match="d2t of drafter .* leads to target ids from 0 to 105, but the target has ids 0 to 63"
    ):
        target.generate(**one_prompt(), assistant_model=drafter, max_new_tokens=3)


def test_lost_vocabulary_map_warns(target: PreTrainedModel, tmp_path: Path) -> None:
    config, tensors = save_eagle3(target, tmp_path)
    tensors["d2t"].zero_()
    tensors["t2d"].fill_(True)
    save(tmp_path, config, tensors)
    with pytest.warns(
        UserWarning, match="d2t of .* is all zeros, so its 32 draft ids are read as the target's first ids"
    ):
        load_drafter(tmp_path)


def test_missing_vocabulary_map_raises(target: PreTrainedModel, tmp_path: Path) -> None:
    config, tensors = save_eagle3(target, tmp_path)
    del tensors["d2t"]
    save(tmp_path, config, tensors)
    with pytest.raises(
        ValueError, match=r"not those of the EAGLE-3 \(SafeAILab\) drafter .*missing: d2t. Nothing was loaded"
    ):
        load_drafter(tmp_path)


def test_identity_map_of_a_full_vocabulary_is_left_out(target: PreTrainedModel, tmp_path: Path) -> None:
    config, tensors = as_specforge(make_eagle3(target, **DEFAULT_TAPS, draft_vocab_size=None))
    vocab = config["vocab_size"]
    tensors |= {"d2t": torch.zeros(vocab, dtype=torch.int64), "t2d": torch.ones(vocab, dtype=torch.bool)}
    save(tmp_path, config, tensors)
    assert not load_drafter(tmp_path, target).config.maps_vocabulary


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"transformer_layer_config": None},
            "transformer_layer_config is None; it must be the config of the draft layers",
        ),
        ({"transformer_layer_config": {"model_type": "bert"}}, "model_type of the draft layers is 'bert'; known are"),
        (
            {"eagle_aux_hidden_state_layer_ids": "2"},
            "eagle_aux_hidden_state_layer_ids is '2'; it must be a list of layer",
        ),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm are both true"),
        ({"draft_vocab_size": 99}, "draft_vocab_size is 99; it must be an integer from 1 to vocab_size 64"),
    ],
)
def test_speculators_config_that_makes_no_sense_raises(
    change: Fields, message: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    config, tensors = as_speculators_eagle3(make_eagle3(target, **DEFAULT_TAPS))
    save(tmp_path, config | change, tensors)
    with pytest.raises(
        ValueError, match=rf"config.json of .* does not describe a EAGLE-3 \(speculators\) drafter. {message}"
    ):
        load_drafter(tmp_path)


def test_speculators_dflash_without_layer_ids_raises(target: PreTrainedModel, tmp_path: Path) -> None:
    save(tmp_path, *as_speculators_dflash(make_dflash(target)))
    with pytest.raises(ValueError, match="aux_hidden_state_layer_ids is missing"):
        load_drafter(tmp_path)


def test_drafter_of_another_target_raises_and_names_the_right_one(target: PreTrainedModel, tmp_path: Path) -> None:
    save(tmp_path, *as_speculators_eagle3(make_eagle3(target, **DEFAULT_TAPS)))
    narrow = make_target("llama", "sdpa", torch.float32, num_hidden_layers=LAYERS, hidden_size=48)
    with pytest.raises(
        ValueError, match="hidden states of size 32, but target .* hidden_size 48.*use 'owner/right-target'"
    ):
        load_drafter(tmp_path, narrow)


# Medusa heads.


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


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "model.safetensors"])
def test_medusa_heads_are_counted_by_their_tensors(
    prefix: str, file: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    drafter = make_medusa(target, medusa_num_heads=5, medusa_num_layers=2)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "owner/base"}
    save(tmp_path, config, as_medusa(drafter, prefix), file)
    loaded = load_drafter(tmp_path, target, tree_budget=9)
    assert len(loaded.heads) == 5
    assert loaded.config.target_name_or_path == "owner/base"
    output, trees = run(target, loaded)
    assert output == target.generate(**one_prompt(), max_new_tokens=6, do_sample=False).tolist()
    assert trees == run(target, drafter)[1]


def test_medusa_heads_without_matrices_use_the_targets(target: PreTrainedModel, tmp_path: Path) -> None:
    drafter = make_medusa(target, own_head=False)
    save(tmp_path, {"medusa_num_heads": 3}, as_medusa(drafter), "medusa_lm_head.pt")
    assert run(target, load_drafter(tmp_path, target, tree_budget=9)) == run(target, drafter)


def test_language_model_with_medusa_heads_raises(target: PreTrainedModel, tmp_path: Path) -> None:
    tensors = as_medusa(make_medusa(target), "medusa_head.") | {"model.norm.weight": torch.ones(32)}
    save(tmp_path, {"medusa_num_heads": 3, "model_type": "llama"}, tensors)
    with pytest.raises(ValueError, match=r"a whole language model beside its Medusa heads \(Medusa-2\)"):
        load_drafter(tmp_path)


def test_medusa_heads_with_a_gap_raise(target: PreTrainedModel, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in as_medusa(make_medusa(target)).items() if not name.startswith("1.")}
    save(tmp_path, {"medusa_num_heads": 3}, tensors, "medusa_lm_head.pt")
    with pytest.raises(ValueError, match=r"The stored heads are numbered \[0, 2\], with gaps"):
        load_drafter(tmp_path)
