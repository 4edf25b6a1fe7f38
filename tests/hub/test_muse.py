"""transformers' own DFlash drafter (Muse Glimmer's): it drafts here what it drafts in transformers' own decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
    PreTrainedModel,
)
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from hf_specdec import export_drafter, inspect_drafter, load_drafter
from hf_specdec.methods.dflash.layouts import read_muse as read
from tests.targets import make_target, one_prompt
from tests.watched import Watched

SETTINGS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
BLOCK, MASK_TOKEN = 5, 1


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    torch.manual_seed(0)
    text = SHAPE | {"vocab_size": 64, "num_hidden_layers": 4, "sliding_window": 6}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    config = MuseGlimmerConfig(text_config=text, vision_config=vision | {"layer_types": ["full_attention"]})
    model = MuseGlimmerForConditionalGeneration._from_config(config, dtype=torch.float64).eval()
    model.generation_config.update(pad_token_id=0, eos_token_id=None, bos_token_id=None)
    return model


def assistant_of(window: int, **settings: Any) -> MuseGlimmerAssistantModel:
    config = MuseGlimmerAssistantConfig(
        **SHAPE | {"num_hidden_layers": 2, "sliding_window": window, "block_size": BLOCK}, mask_token_id=MASK_TOKEN,
        target_layer_ids=[0, 2], **settings,
    )  # fmt: skip
    torch.manual_seed(1)
    assistant = MuseGlimmerAssistantModel(config).to(torch.float64).eval()
    for name, parameter in assistant.named_parameters():
        if parameter.dim() == 1:  # norms start as ones, which hides whether they are used
            parameter.data += 0.5 * torch.randn_like(parameter)
        elif name.endswith(("v_proj.weight", "o_proj.weight")):
            parameter.data *= 4
    return assistant


# Windows shorter than a block, than a prompt, and of no effect.
@pytest.mark.parametrize(("window", "layers"), [(3, "sliding"), (6, "mixed"), (2048, "sliding")])
def test_drafts_are_those_of_transformers_own_decoding(
    window: int, layers: str, target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = {"layer_types": ["full_attention", "sliding_attention"]} if layers == "mixed" else {}
    assistant = assistant_of(window, **mixed)
    assistant.save_pretrained(tmp_path)
    assert inspect_drafter(tmp_path).problems == []
    watched = Watched(load_drafter(tmp_path, target, method="dflash", tree_budget=8))
    theirs: dict[tuple[int, ...], Tensor] = {}
    get_candidates = DFlashTokenCandidateGenerator.get_candidates

    def listening(self: Any, input_ids: Tensor, *arguments: Any, **named: Any) -> Any:
        ids, logits = get_candidates(self, input_ids, *arguments, **named)
        if logits is not None:
            theirs[tuple(input_ids[0].tolist())] = logits[0].float()
        return ids, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", listening)
    alone = target.generate(**one_prompt(), **SETTINGS)
    stock = target.generate(**one_prompt(), **SETTINGS, assistant_model=assistant, speculation_type="dflash")
    output = target.generate(**one_prompt(), **SETTINGS, assistant_model=watched)
    assert output.tolist() == stock.tolist() == alone.tolist()
    ours = {tuple(drafted.text(0)): drafted.logits[0] for drafted in watched.rounds}
    both = set(theirs) & set(ours)
    assert len(both) > 10
    for text in both:
        expected = theirs[text].clone()
        expected[:, MASK_TOKEN] = -torch.inf  # which is never drafted here
        torch.testing.assert_close(ours[text], expected, rtol=1e-4, atol=1e-4)


def test_drafter_is_saved_in_our_layout_and_loads_again(target: PreTrainedModel, tmp_path: Path) -> None:
    assistant_of(6).save_pretrained(tmp_path)
    drafter = load_drafter(tmp_path)
    drafter.save_pretrained(tmp_path / "ours")
    assert inspect_drafter(tmp_path / "ours").problems == []
    again = load_drafter(tmp_path / "ours", target)
    assert again.config.vocab_size is None
    assert [again.config.window(layer) for layer in range(2)] == [7, 7]
    accepted = []
    for one in (drafter, again):
        one.set_options(tree_budget=8)
        target.generate(**one_prompt(), **SETTINGS, assistant_model=one)
        accepted.append(one.stats.per_step_accepted)
    assert accepted[0] == accepted[1]


def test_fields_left_out_are_at_the_defaults_of_the_config_class() -> None:
    defaults = MuseGlimmerAssistantConfig()
    reading = read({"model_type": "muse_glimmer_assistant"}, None).fields
    assert reading["dflash_config"] == {
        name: getattr(defaults, name) for name in ("block_size", "mask_token_id", "target_layer_ids")
    }
    assert reading["layer_types"] == defaults.layer_types
    assert reading["rope_parameters"] == defaults.rope_parameters
    assert reading["sliding_window"] == defaults.sliding_window + 1


def test_what_needs_the_vocabulary_is_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    assistant_of(6).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    drafter = load_drafter(tmp_path, target)
    with pytest.raises(ValueError, match="vocab_size is None, and this layout needs the target's"):
        export_drafter(drafter, tmp_path / "out", target_id="owner/target")
    drafter.config.vocab_size = 64
    export_drafter(drafter, tmp_path / "out", target_id="owner/target")
    assert load_drafter(tmp_path / "out", target).config.window(0) == 7
    (tmp_path / "config.json").write_text(json.dumps(config | {"mask_token_id": 64}))
    with pytest.raises(ValueError, match="mask_token_id 64, but target .* has only 64 embeddings"):
        load_drafter(tmp_path, target)
    with pytest.raises(ValueError, match="hidden states of size 32, but target .* has hidden_size 48"):
        load_drafter(tmp_path, make_target(hidden_size=48))
