"""A small sibling that is published as an image-text class only: its language model drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_specdec import load_drafter
from hf_specdec.methods.causal_lm.network import CausalLMDrafter
from tests.targets import fresh_target

TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("Llava", {"text_config": {"model_type": "llama", **TEXT}, "image_token_index": 60,
                        "vision_config": {"model_type": "clip_vision_model", **VISION}}),
    "gemma3": ("Gemma3", {"text_config": {"model_type": "gemma3_text", **TEXT, "sliding_window": 6},
                          "mm_tokens_per_image": 4, "image_token_index": 60,
                          "vision_config": {"model_type": "siglip_vision_model", **VISION}}),
    "mistral3": ("Mistral3", {"text_config": {"model_type": "mistral", **TEXT}, "image_token_index": 60,
                              "vision_config": {"model_type": "pixtral", **VISION, "head_dim": 8}}),
    "idefics3": ("Idefics3", {"text_config": {"model_type": "llama", **TEXT}, "image_token_id": 60,
                              "vision_config": VISION}),
}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_language_model_of_an_image_text_class_drafts(family: str, tied: bool, tmp_path: Path) -> None:
    name, settings = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**settings, tie_word_embeddings=tied)
    config.get_text_config().tie_word_embeddings = tied
    torch.manual_seed(1)
    whole = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    whole.save_pretrained(tmp_path)
    target = fresh_target("llama", "sdpa", torch.float32)
    drafter = load_drafter(tmp_path, target, depth=3)
    assert isinstance(drafter, CausalLMDrafter)
    ids = torch.tensor([[3, 9, 4, 1, 7, 5, 8, 6]])
    with torch.no_grad():
        torch.testing.assert_close(drafter.model(ids).logits, whole(input_ids=ids).logits)
    names = [each for each, _ in drafter.model.named_parameters()]
    assert not [each for each in names if "vision" in each or "multi_modal" in each or "connector" in each]
    plain = target.generate(ids, max_new_tokens=12, do_sample=False)
    found = target.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=drafter)
    assert found.tolist() == plain.tolist()
    assert drafter.stats is not None
    assert drafter.stats.num_draft_tokens > 0

    drafter.save_pretrained(tmp_path / "text")  # as a language model of its own
    again = load_drafter(tmp_path / "text", target)
    with torch.no_grad():
        torch.testing.assert_close(again.model(ids).logits, drafter.model(ids).logits)
