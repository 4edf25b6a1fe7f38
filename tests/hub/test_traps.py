"""Every convention of published layouts that can be read two ways: what reading it the other way costs.

One row of `TRAPS` for each way to misread; its name begins with the table of the facts on formats that warns of it (A2
layer ids, A3 slots, A4 vocabulary maps, A6 keys whose meaning differs). A row takes a layout of `layouts.py`, makes its
random drafter say what the convention decides (`built`), and has a target say, after random prompts, what that drafter
drafts. The folder must then load to a drafter that is right everywhere, and the same weights, misread, must be right no
more often than by chance: than what this drafter drafts after one prompt is right after another one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from hf_specdec import load_drafter
from hf_specdec.hub.pretrained import PretrainedDrafter
from hf_specdec.methods.dflash.network import DFlashDrafter
from hf_specdec.methods.eagle3.network import Eagle3Drafter
from tests.hub.layouts import CASES, LAYERS, TREE, Fields, rope
from tests.targets import VOCAB, fresh_target

# Rows that name the last layer of the target; tests/drafting/test_pairing.py is about the warning.
pytestmark = pytest.mark.filterwarnings("ignore:Drafter .* reads layers:UserWarning")

Change = Fields | Callable[[Any], None]
PROMPTS, LENGTH = 96, 60
MOST_CHANCE = 0.25
BOUND_SIGMA = 4  # of a share over so many prompts; at chance it is exceeded once in thirty thousand times
HIDDEN = 32
FAR = -12  # of what a drafter looks at outside its block


@dataclass(frozen=True)
class Trap:
    """A convention, and how it is misread.

    Attributes:
        case: of `layouts.CASES`.
        misread: fields of our config that the other reading would give, or what changes a drafter to it.
        says: what the drafter's first word is made of, so that the convention decides it: the target's `features` that
            its attention finds, the `tokens` that it has embedded, the `state` that goes through the layer without
            attention, or whatever stands at a certain `place`.
        place: with `"place"`, where the drafter looks, in positions from its own.
        level: of the draft tree at which misreading shows; 2 for what only a drafter's own states go through.
    """

    case: str
    misread: Change
    says: Literal["features", "tokens", "state", "place"] = "features"
    place: int = 0
    level: int = 1


def absolute_ids(drafter: Any) -> None:
    drafter.d2t -= torch.arange(drafter.d2t.numel())


def first_ids(drafter: Any) -> None:
    drafter.d2t.zero_()


def other_slots(drafter: DFlashDrafter) -> None:
    drafter.config.dflash_config["sample_from_anchor"] = not drafter.config.sample_from_anchor


def taps(*layers: int) -> Callable[[DFlashDrafter], None]:
    def change(drafter: DFlashDrafter) -> None:
        drafter.config.dflash_config["target_layer_ids"] = list(layers)

    return change


def after_the_final_norm(drafter: DFlashDrafter) -> None:
    drafter.feature_layers = lambda model: (2, LAYERS)  # type: ignore[method-assign]


def block_of_16(drafter: DFlashDrafter) -> None:
    drafter.config.dflash_config.pop("block_size", None)
    drafter.config.block_size = 16


def tied(drafter: Eagle3Drafter) -> None:
    drafter.lm_head.weight.data.copy_(drafter.embed_tokens.weight)


Z_FORMULA, Z_LIST = "z-lab, layers by formula, block size at the top", "z-lab, a list of layers, block size nested"
SAFE, NVIDIA = "safeailab, default taps, offsets, no rotary base", "nvidia, a norm before fc"
FORGE, FORGE_DEFAULT = "specforge, layer ids", "specforge, default taps, no norm before the head"
SPEC, SPEC_ALL = "speculators, hidden-state ids, missing flags", "speculators, default taps, every flag"
SPEC_BLOCK, SPEC_HEAD = "speculators dflash, converted", "speculators dflash, own head over a draft vocabulary"
DEEP = "deepspec dflash, the root's slot predicts and nothing says so"
BLOCKS = "specblock, default taps, offsets"
AS_INDICES = "read as indices of hidden states"
AS_OUTPUTS = "read as outputs of layers"

TRAPS: dict[str, Trap] = {
    # Layer ids. Of 8 layers, the default of EAGLE-3 and SpecBlock is layers 1, 3 and 4 (hs[2], hs[4] and hs[5]).
    f"A2 z-lab: ids are outputs, {AS_INDICES}": Trap(Z_LIST, taps(1, 2, 5)),
    "A2 z-lab: ids are outputs, read one further on": Trap(Z_LIST, taps(3, 4, 7)),
    f"A2 z-lab: the formula gives outputs, {AS_INDICES}": Trap(Z_FORMULA, taps(0, 4)),
    "A2 z-lab: the last layer's output, read after the final norm": Trap(
        "z-lab, the target's last layer among others", after_the_final_norm
    ),
    f"A2 deepspec dflash: ids are outputs, {AS_INDICES}": Trap(DEEP, taps(-1, 4)),
    "A2 deepspec dflash: -1 is the embedding, read as the first layer": Trap(DEEP, taps(0, 6)),
    "A2 deepspec eagle3: -1 is the embedding, read one further on": Trap(
        "deepspec eagle3, five taps", {"target_layer_ids": [0, 2, 4, 6, 7]}
    ),
    f"A2 specforge: eagle_config ids are outputs, {AS_INDICES}": Trap(FORGE, {"target_layer_ids": [1, 4, 5]}),
    "A2 specforge: the default is outputs, read one further on": Trap(FORGE_DEFAULT, {"target_layer_ids": [2, 4, 5]}),
    f"A2 nvidia: eagle_config ids are outputs, {AS_INDICES}": Trap(NVIDIA, {"target_layer_ids": [-1, 4, 5]}),
    "A2 nvidia: an explicit list, read as the default": Trap(NVIDIA, {"target_layer_ids": [1, 3, 4]}),
    f"A2 speculators eagle3: ids are hidden states, {AS_OUTPUTS}": Trap(SPEC, {"target_layer_ids": [2, 3, 7]}),
    f"A2 speculators eagle3: 0 is the embedding, {AS_OUTPUTS}": Trap(
        "speculators, hidden state 0 is the embedding", {"target_layer_ids": [0, 4]}
    ),
    f"A2 speculators eagle3: the default is hidden states, {AS_OUTPUTS}": Trap(
        SPEC_ALL, {"target_layer_ids": [2, 4, 5]}
    ),
    f"A2 speculators dflash: ids are hidden states, {AS_OUTPUTS}": Trap(SPEC_BLOCK, taps(2, 6)),
    f"A2 safeailab: fixed hidden states, {AS_OUTPUTS}": Trap(SAFE, {"target_layer_ids": [2, 4, 5]}),
    f"A2 specblock: fixed hidden states, {AS_OUTPUTS}": Trap(BLOCKS, {"target_layer_ids": [2, 4, 5]}),
    # Slots.
    "A3 z-lab: the root's slot is unused, read as predicting": Trap(Z_LIST, other_slots),
    "A3 speculators dflash: the key is absent, read as predicting": Trap(SPEC_BLOCK, other_slots),
    "A3 speculators dflash: false, read as predicting": Trap(SPEC_HEAD, other_slots),
    "A3 speculators dflash: true, read as unused": Trap("speculators dflash, the root's slot predicts", other_slots),
    "A3 deepspec dflash: the root's slot predicts, read as unused": Trap(DEEP, other_slots),
    # Vocabulary maps: offsets, read as target ids; a map, read as lost.
    "A4 safeailab: offsets, read as ids": Trap(SAFE, absolute_ids),
    "A4 specforge: offsets, read as ids": Trap(FORGE, absolute_ids),
    "A4 speculators eagle3: offsets, read as ids": Trap(SPEC, absolute_ids),
    "A4 speculators dflash: offsets, read as ids": Trap(SPEC_HEAD, absolute_ids),
    "A4 specblock: offsets, read as ids": Trap(BLOCKS, absolute_ids),
    "A4 specblock: vocab_mapping.pt wins, read from the weights": Trap(
        "specblock, a vocabulary map in a file of its own, which wins", first_ids
    ),
    # Keys that differ.
    "A6 norm_before_residual: missing is false, read as true": Trap(SPEC, {"norm_before_residual": True}, says="state"),
    "A6 norm_before_residual: true, read as false": Trap(SPEC_ALL, {"norm_before_residual": False}, says="state"),
    "A6 norm_output: recurrent in speculators, read as not": Trap(
        SPEC_ALL, {"norm_output": False}, says="state", level=2
    ),
    "A6 norm_output: missing in speculators is false, read as true": Trap(
        SPEC, {"norm_output": True}, says="state", level=2
    ),
    "A6 norm_output: true in speculators, read as in SpecForge": Trap(
        SPEC_ALL, {"norm_output": False, "norm_before_head": True}, says="state", level=2
    ),
    "A6 norm_output: missing in SpecForge is a norm before the head, read as none": Trap(
        FORGE, {"norm_before_head": False}
    ),
    "A6 norm_output: missing in SpecForge is a norm before the head, read as recurrent": Trap(
        FORGE, {"norm_output": True}, says="state", level=2
    ),
    "A6 norm_output: false in SpecForge is no norm before the head, read as one": Trap(
        FORGE_DEFAULT, {"norm_before_head": True}
    ),
    "A6 block_size: at the top, read as 16": Trap(Z_FORMULA, block_of_16, says="place", place=5),
    "A6 block_size: nested, read as 16": Trap(Z_LIST, block_of_16, says="place", place=5),
    "A6 causality: absent for sliding layers, read as not causal": Trap(
        "z-lab, sliding layers are causal", {"is_causal": False}, says="place", place=2
    ),
    "A6 causality: dflash_config.causal false, read as causal": Trap(
        "z-lab, sliding layers said not to be causal", {"is_causal": True}, says="place", place=2
    ),
    "A6 causality: is_causal true for full layers, left aside": Trap(
        "z-lab, full layers said to be causal", {"is_causal": False}, says="place", place=2
    ),
    "A6 causality: causal_head of JetSpec, left aside": Trap(
        "JetSpec, full layers said to be causal", {"is_causal": False}, says="place", place=2
    ),
    "A6 causality: use_swa is not causal, read as causal": Trap(
        "z-lab, use_swa", {"is_causal": True}, says="place", place=2
    ),
    "A6 causality: sliding_window_non_causal absent, read as not causal": Trap(
        "speculators dflash, sliding layers causal", {"is_causal": False}, says="place", place=2
    ),
    "A6 causality: sliding_window_non_causal true, left aside": Trap(
        "speculators dflash, sliding layers not causal", {"is_causal": None}, says="place", place=2
    ),
    "A6 causality: is_causal of speculators' layers, left aside": Trap(
        "speculators dflash, layers said to be causal", {"is_causal": None}, says="place", place=2
    ),
    "A6 sliding_window: left aside": Trap("z-lab, sliding layers are causal", {"sliding_window": 512}),
    "A6 swa_window_size: left aside": Trap(
        "z-lab, use_swa", {"sliding_window": 512, "dflash_config.swa_window_size": 512}
    ),
    "A6 rotary base: z-lab at the top, read as absent": Trap(Z_FORMULA, rope(1e4), says="place", place=FAR),
    "A6 rotary base: z-lab as parameters, read as absent": Trap(
        "z-lab, rotary base as parameters", rope(1e4), says="place", place=FAR
    ),
    "A6 rotary base: z-lab absent, read as vLLM's 1e6": Trap(
        "z-lab, no rotary base, no block size but nested", rope(1e6), says="place", place=FAR
    ),
    "A6 rotary base: safeailab absent, read as 1e6": Trap(SAFE, rope(1e6), says="place", place=FAR),
    "A6 rotary base: safeailab at the top, read as absent": Trap(
        "safeailab, rotary base at the top, in a pickle", rope(1e4), says="place", place=FAR
    ),
    "A6 rotary base: safeailab as parameters, read as absent": Trap(
        "safeailab, rotary base as parameters", rope(1e4), says="place", place=FAR
    ),
    "A6 rotary base: speculators absent, read as 5e5": Trap(
        "speculators, no rotary base", rope(5e5), says="place", place=FAR
    ),
    "A6 rotary base: speculators nested, read as absent": Trap(
        "speculators, head_dim at the default of qwen3", rope(1e4), says="place", place=FAR
    ),
    "A6 rotary base: speculators nested as parameters, read as absent": Trap(
        "speculators, rotary base as parameters of the nested config", rope(1e4), says="place", place=FAR
    ),
    "A6 rotary base: specblock absent, read as 1e6": Trap(BLOCKS, rope(1e6), says="place", place=FAR),
    "A6 rotary base: specblock at the top, read as absent": Trap(
        "specblock, a rotary base", rope(1e4), says="place", place=FAR
    ),
    "A6 tie_word_embeddings: of no meaning, read as a tied head": Trap(
        "specforge, embeddings beside a full head, said to be tied", tied
    ),
    # Not in a table, but told by tensors alone.
    "3.1 own embeddings, left aside": Trap("safeailab, own embeddings", {"own_embeddings": False}, says="tokens"),
    "3.2 norm_before_fc, left aside": Trap(NVIDIA, {"norm_before_fc": False}),
    "3.2 fc_norm, left aside": Trap("specforge, a norm per tap", {"fc_norm": False}),
}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    """Each layer drowns what came before it, so that neighbouring hidden states say different things."""
    model = fresh_target("llama", "sdpa", torch.float32, num_hidden_layers=LAYERS, initializer_range=0.5)
    for index, layer in enumerate(model.get_decoder().layers):
        layer.self_attn.o_proj.weight.data *= 6.0 ** (index + 1)
        layer.mlp.down_proj.weight.data *= 6.0 ** (index + 1)
    signs = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(7))
    model.get_decoder().norm.weight.data.copy_(signs)  # what has passed the final norm is told from what has not
    return model


def prompts() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def built(trap: Trap, target: PreTrainedModel) -> Any:
    """The random drafter of a trap's layout, in which what the convention decides drowns everything else."""
    case = CASES[trap.case]
    fields = copy.deepcopy(case.ours) | ({"attention_bias": True} if trap.says == "place" else {})
    drafter = case.make(target, **fields)
    if isinstance(drafter, Eagle3Drafter):
        drafter.set_options(**TREE)
    if isinstance(drafter, (Eagle3Drafter, DFlashDrafter)) and drafter.config.maps_vocabulary:
        drafter.d2t.copy_(torch.arange(drafter.config.draft_vocab_size))
    torch.manual_seed(100)
    attention, mlp = (0.1, 100.0) if trap.says == "state" else (6.0, 30.0)
    for name, parameter in drafter.named_parameters():
        weights = parameter.data
        if name.endswith("norm.weight"):
            weights.normal_()  # of both signs: nothing looks the same after a norm
            if trap.says == "state":
                weights.sign_()  # and of one size, so that no few dimensions say everything
        elif name.endswith(("v_proj.weight", "o_proj.weight")):
            weights *= attention
        elif name.endswith(("q_proj.weight", "k_proj.weight")):
            weights *= 4  # attention that finds one entry, not the mean of all
        elif name.endswith("down_proj.weight"):
            weights *= mlp
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weights.sign_().mul_(4)
        if name.endswith("layers.0.self_attn.v_proj.weight") and weights.shape[1] == 2 * HIDDEN:  # of EAGLE-3
            weights[:, :HIDDEN] *= 5.0 if trap.says == "tokens" else 0.1
        if name == "input_layer.fuse.weight":  # of SpecBlock: condition, token, slot
            weights[:, :HIDDEN] *= 20
    speak_of_prompts(drafter, target)
    if trap.says == "place":
        for layer in drafter.layers:
            looks(drafter, layer, min(trap.place, FAR))
            layer.self_attn.o_proj.weight.data *= 20  # over the state that a slot begins with
        if (
            trap.place > 0
        ):  # what slots found far away is what other slots find in them, over what they found themselves
            last = drafter.layers[-1]
            looks(drafter, last, trap.place)
            last.self_attn.o_proj.weight.data *= 1000
            last.mlp.down_proj.weight.data *= 1000
    return drafter


def speak_of_prompts(drafter: Any, target: PreTrainedModel) -> None:
    """Gives tapped states equal weight, and takes out of them what all prompts have in common."""
    raw: list[Tensor] = []  # of the last layer; transformers' hidden states have it after the final norm
    hook = target.get_decoder().norm.register_forward_pre_hook(lambda module, states: raw.append(states[0]))
    with torch.no_grad():
        states = (*target(**prompts(), output_hidden_states=True).hidden_states[:-1], raw[0])
    hook.remove()
    tapped = [states[layer + 1] for layer in drafter.feature_layers(target)]
    joined = torch.cat(tapped, dim=-1)
    if isinstance(drafter, Eagle3Drafter) and drafter.config.fc_norm:
        joined = torch.cat([norm(state) for norm, state in zip(drafter.fc_norm, tapped, strict=True)], dim=-1)
    elif isinstance(drafter, Eagle3Drafter) and drafter.config.norm_before_fc:
        joined = drafter.input_norm(joined)
    fusing = drafter.fc if hasattr(drafter, "fc") else drafter.input_layer.condition_proj
    for place in range(len(tapped)):
        part = slice(place * HIDDEN, (place + 1) * HIDDEN)
        fusing.weight.data[:, part] /= joined[..., part].detach().square().mean().sqrt()
    common = torch.nn.functional.normalize(joined.detach().mean((0, 1)), dim=0)
    fusing.weight.data -= torch.outer(fusing.weight.data @ common, common)


def looks(drafter: Any, layer: Any, place: int) -> None:
    """Makes a layer's queries and keys constant: it sees nothing but what stands `place` further on, or nearest to it.

    Rotary positions leave of them cos(frequency * (distance - place)). Places inside the block take the first
    frequency, which is 1 whatever the base; others a slower one, which says another place where the base is another.
    """
    head_dim, sharpness = drafter.config.head_dim, 1e6  # 44 places are seven turns less 0.02
    pair = 0 if place > 0 else head_dim // 8
    angle = -place * float(drafter.rotary_emb.inv_freq[pair])
    for name, module in layer.named_modules():
        if name.endswith(("q_proj", "k_proj")):
            module.weight.data.zero_()
            turned = 0.0 if name.endswith("q_proj") else angle
            head = torch.zeros(head_dim)
            head[pair], head[pair + head_dim // 2] = math.cos(turned), math.sin(turned)
            module.bias.data.copy_((head * (sharpness * head_dim**0.5) ** 0.5).repeat(module.bias.numel() // head_dim))
        elif name.endswith(("q_norm", "k_norm")) and not isinstance(
            module, torch.nn.Identity
        ):  # gives the vector the length of sqrt(head_dim)
            module.weight.data.fill_((sharpness / head_dim**0.5) ** 0.5)


class Says(LogitsProcessor):
    """Makes the target say what a script has for a prefix; its hidden states stay those of that text."""

    def __init__(self, script: dict[tuple[int, ...], int]) -> None:
        self.script = script

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        said = torch.full_like(scores, -torch.inf)
        for row, prefix in enumerate(input_ids.tolist()):
            said[row, self.script.get(tuple(prefix), 3 + sum(prefix) % (VOCAB - 3))] = 0.0
        return said


def one_round(target: PreTrainedModel, drafter: PretrainedDrafter, script: dict[tuple[int, ...], int]) -> list[int]:
    """Drafted tokens that a target with this script accepts in its first round, for each prompt."""
    target.generate(
        **prompts(), max_new_tokens=4, do_sample=False, assistant_model=drafter, logits_processor=[Says(script)]
    )
    return [rounds[0] for rounds in drafter.stats.per_step_accepted]


@dataclass
class Script:
    """What a drafter drafts in its first round after each prompt.

    Attributes:
        says: prefix -> its first word there.
        words: for each prompt and level its first word, and all words that it drafts in that place.
    """

    says: dict[tuple[int, ...], int]
    words: dict[int, list[tuple[int, set[int]]]]

    def chance(self, level: int) -> float:
        """How often what is drafted after one prompt holds the word for another one."""
        words = self.words[level]
        pairs = [(first, drafted) for one, (first, _) in enumerate(words) for drafted in others(words, one)]
        return sum(first in drafted for first, drafted in pairs) / len(pairs)


def others(words: list[tuple[int, set[int]]], one: int) -> list[set[int]]:
    return [drafted for other, (_, drafted) in enumerate(words) if other != one]


def script_of(target: PreTrainedModel, drafter: PretrainedDrafter) -> Script:
    """Runs a drafter for one round, in which the target says what it drafts."""
    script = Script({}, {1: [], 2: []})
    make = drafter.candidate_generator

    def listening(model: Any) -> Any:
        generator = make(model)
        draft = generator.draft

        def keeping(context: Any) -> Any:
            tree = draft(context)
            if script.says:
                return tree
            for row, length in enumerate(context.lengths):
                prefixes = [tuple(context.sequences[row, :length].tolist())]
                drafted: dict[tuple[int, ...], list[int]] = {}
                for parent, token in zip(tree.parents[row, 1:].tolist(), tree.token_ids[row, 1:].tolist(), strict=True):
                    prefixes.append((*prefixes[parent], token))
                    drafted.setdefault(prefixes[parent], []).append(token)
                script.says |= {prefix: tokens[0] for prefix, tokens in drafted.items()}
                below = prefixes[0]
                for level in (1, 2):
                    script.words[level].append((drafted[below][0], set(drafted[below])))
                    below = (*below, drafted[below][0])
            return tree

        generator.draft = keeping
        return generator

    drafter.candidate_generator = listening  # type: ignore[method-assign]
    one_round(target, drafter, script.says)
    del drafter.candidate_generator
    return script


def misread(drafter: Any, change: Change) -> Any:
    """The same weights, with fields of the config, or whatever `change` changes, read the other way."""
    other = copy.deepcopy(drafter)
    if callable(change):
        change(other)
        return other
    for name, value in change.items():
        if name.startswith("dflash_config."):
            other.config.dflash_config[name.removeprefix("dflash_config.")] = value
        else:
            setattr(other.config, name, value)
    changed = type(other)(other.config).eval()
    changed.load_state_dict(other.state_dict(), strict=False)
    changed.set_options(**asdict(drafter.options))
    return changed


@pytest.mark.parametrize("name", TRAPS)
def test_convention_read_the_other_way_leaves_no_more_than_chance(
    name: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    trap = TRAPS[name]
    drafter = built(trap, target)
    script = script_of(target, drafter)
    CASES[trap.case].save(drafter, tmp_path)
    loaded = load_drafter(tmp_path, target, **asdict(drafter.options))

    def share(drafter: Any) -> float:
        """How often the drafter is right at the trap's level, of the prompts where it comes there."""
        accepted = one_round(target, drafter, script.says)
        reached = [number for number in accepted if number >= trap.level - 1]
        return sum(number >= trap.level for number in reached) / len(reached)

    chance = script.chance(trap.level)
    bound = chance + BOUND_SIGMA * math.sqrt(max(chance, 1 / VOCAB) / PROMPTS)
    assert chance < MOST_CHANCE, "the drafter says the same whatever the prompt"
    assert share(loaded) == 1.0, "the folder is not read as it was written"
    found = share(misread(drafter, trap.misread))
    assert found <= bound, (
        f"misread, {found:.2f} of its words are right; chance is {chance:.2f}, with noise {bound:.2f}"
    )
