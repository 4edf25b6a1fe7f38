"""recognise: the order in which formats are told apart, as in table A1 of the facts on formats. First match wins."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from hf_specdec import inspect_drafter, load_drafter
from hf_specdec.hub.recognition import recognise

# One sign for each row of the table, and what it means; rows 10 and 11 are told by tensors, or by nothing else.
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "1": ({"speculators_model_type": "eagle3"}, "EAGLE-3 (speculators)"),
    "2": ({"model_type": "gemma4_assistant"}, "Gemma 4 assistant (transformers)"),
    "3": ({"diffspec_draft_token_num": 4}, "specblock"),
    "4": ({"dflash_config": {"selector_rank": 256}}, "DFlash 2"),
    "5": (
        {"architectures": ["Qwen3DSparkModel"], "markov_rank": 0, "enable_confidence_head": False},
        "DFlash (DeepSpec)",
    ),
    "6": ({"architectures": ["Qwen3Eagle3Model"]}, "EAGLE-3 (DeepSpec)"),
    "7": ({"dflash_config": {}}, "dflash"),
    "8": ({"architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE-3 (SpecForge)"),
    "9": ({"medusa_num_heads": 5}, "Medusa"),
}
EAGLE_1 = {"fc.weight", "layers.0.mlp.up_proj.weight"}


def name_of(config: dict[str, Any], tensor_names: Collection[str] = ()) -> str:
    """The format that a config is recognised as, also where it is not loaded."""
    try:
        return recognise(config, "it", lambda: tensor_names).name
    except ValueError as error:
        found = re.search(r"a drafter in the (.*) format, which load_drafter does not read yet", str(error))
        return found[1] if found else str(error)


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(ROWS, 2)))
def test_first_row_of_the_table_that_matches_wins(first: str, second: str) -> None:
    (one, name), (other, _) = ROWS[first], ROWS[second]
    both = other | one | {"architectures": [*other.get("architectures", []), *one.get("architectures", [])]}
    assert name == name_of(both)


@pytest.mark.parametrize("row", ROWS)
def test_model_type_and_class_of_a_plain_language_model_are_never_trusted(row: str) -> None:
    signs, name = ROWS[row]
    architectures = ["LlamaForCausalLM", *signs.get("architectures", [])]
    assert name == name_of({"model_type": "llama"} | signs | {"architectures": architectures})


def test_tensors_tell_where_the_config_is_a_plain_language_models() -> None:
    plain = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    assert name_of(plain, {"midlayer.mlp.up_proj.weight"}) == "EAGLE-3 (SafeAILab)"
    assert name_of(plain | {"draft_vocab_size": 9}) == "EAGLE-3 (SafeAILab)"
    assert name_of(plain, {"medusa_head.0.0.linear.weight"}) == "Medusa"
    assert name_of(plain, EAGLE_1) == "EAGLE-1 and EAGLE-2"
    assert name_of(plain, {"model.embed_tokens.weight"}) == "causal_lm"


def test_family_of_another_version_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "hf_specdec_eagle31"}')
    message = "model_type 'hf_specdec_eagle31', but there is no family 'eagle31'. Did you mean 'eagle3'.*update"
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path)
    assert re.search(message, inspect_drafter(tmp_path).problems[0])
