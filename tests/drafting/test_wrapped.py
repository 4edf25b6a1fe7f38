"""Compiled and PEFT models as target and draft model, and drafters that are saved with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec import load_drafter
from hf_specdec.decoding.trace import Trace
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.methods.causal_lm.network import CausalLMDrafter
from hf_specdec.methods.specbranch import SpecBranchDrafter
from tests.method_table import METHODS, make_causal_lm, make_specbound
from tests.targets import fresh_target, needs_own_adapters

PROMPT = torch.tensor([[3, 9, 4, 1, 7]])


@pytest.fixture
def target() -> PreTrainedModel:
    return fresh_target("llama", "sdpa", torch.float32)


def generated(target: PreTrainedModel, drafter: Drafter) -> tuple[Tensor, list[list[int]]]:
    """The tokens of a call, and what was drafted in each of its rounds."""
    drafter.trace = Trace()
    found = target.generate(PROMPT, max_new_tokens=24, do_sample=False, assistant_model=drafter)
    return found, [each.token_ids for each in drafter.trace.rounds]


def adapt(model: nn.Module, seed: int = 1) -> None:
    """Draws the weights of all LoRA adapters so wide that drafts change."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(0.4 * torch.randn(parameter.shape, generator=generator))


def small(target: PreTrainedModel) -> CausalLMDrafter:
    """A draft model with one layer less, which has fewer parameters than the target with its adapter too."""
    drafter = make_causal_lm(target)
    drafter.model.model.layers = drafter.model.model.layers[:3]
    drafter.model.config.num_hidden_layers = 3
    return drafter


def make(method: str, target: PreTrainedModel) -> Drafter:
    return small(target) if method == "causal_lm_tree" else METHODS[method](target)


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("compiles", ["torch.compile(model)", "model.compile()"])
def test_specbound_is_paired_with_a_compiled_target(target: PreTrainedModel, tmp_path: Path, compiles: str) -> None:
    make_specbound(target).save_pretrained(tmp_path)
    plain, usual = generated(target, load_drafter(tmp_path, target))
    given: Any = target
    if compiles == "model.compile()":
        target.compile(backend="eager")
    else:
        given = torch.compile(target, backend="eager")
    found, kept = generated(given, load_drafter(tmp_path, given))
    assert found.tolist() == plain.tolist()
    assert kept == usual


def test_a_peft_model_drafts_through_its_adapter(target: PreTrainedModel) -> None:
    alone = target.generate(PROMPT, max_new_tokens=24, do_sample=False)
    without, kept_without = generated(target, small(target))
    tuned = get_peft_model(small(target).model, lora())
    adapt(tuned)
    with_adapter, kept = generated(target, CausalLMDrafter(tuned.eval(), depth=3, tree_budget=9, top_k=3))
    assert with_adapter.tolist() == without.tolist() == alone.tolist()
    assert kept != kept_without
    branches = SpecBranchDrafter.from_models(tuned, target, speed_ratio=4.0, parallel=False)
    assert generated(target, branches)[0].tolist() == alone.tolist()


def test_a_compiled_draft_model_drafts_as_its_own_generate_would(target: PreTrainedModel) -> None:
    _, usual = generated(target, small(target))
    compiled: Any = torch.compile(small(target).model, backend="eager")
    assert generated(target, CausalLMDrafter(compiled, depth=3, tree_budget=9, top_k=3))[1] == usual


def test_a_peft_model_with_virtual_tokens_is_refused(target: PreTrainedModel) -> None:
    tuned = get_peft_model(small(target).model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="adapter of type PREFIX_TUNING, whose virtual tokens shift every position"):
        CausalLMDrafter(tuned)


@needs_own_adapters
@pytest.mark.parametrize("method", ["dflash", "dspark", "specblock", "eagle3", "causal_lm_tree"])
def test_a_drafter_saved_with_an_active_adapter_drafts_as_before(
    target: PreTrainedModel, tmp_path: Path, method: str
) -> None:
    drafter: Any = make(method, target)
    adapted = drafter.model if method == "causal_lm_tree" else drafter
    adapted.add_adapter(lora(), "domain")
    _, off = generated(target, make(method, target))
    adapt(adapted)
    plain, on = generated(target, drafter)
    assert on != off, "the adapter changes no draft"
    drafter.save_pretrained(tmp_path / "on")
    assert not list((tmp_path / "on").glob("adapter*"))
    found, kept = generated(target, load_drafter(tmp_path / "on", target))
    assert found.tolist() == plain.tolist()
    assert kept == on
    assert generated(target, drafter)[1] == on, "saving has changed the drafter"

    adapted.disable_adapters()
    drafter.save_pretrained(tmp_path / "off")
    assert generated(target, load_drafter(tmp_path / "off", target))[1] == off


def test_specbranch_saves_the_adapted_draft_model(target: PreTrainedModel, tmp_path: Path) -> None:
    tuned = get_peft_model(small(target).model, lora())
    adapt(tuned)
    drafter = SpecBranchDrafter.from_models(tuned, target, speed_ratio=4.0, parallel=False)
    drafter.config.draft_model = "owner/name"  # where the model is without its adapter
    logits = drafter.draft_model(PROMPT).logits
    drafter.save_pretrained(tmp_path)
    again = load_drafter(tmp_path, target)
    torch.testing.assert_close(again.draft_model(PROMPT).logits, logits)
