"""Evaluation harness (lm_eval): its answers with a drafter are those of plain decoding, at every batch size.

Its stopping criterion keeps a flag per row and ends the run once all are set.
"""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import load_drafter
from tests.chains import assisted_loop

harness: Any = pytest.importorskip("lm_eval.models.utils_hf", reason="needs lm_eval, the evaluation harness")
TINY = Path(__file__).parents[2] / "examples" / "tiny-code"


@pytest.mark.parametrize("drafter", ["dflash", "suffix"])
@pytest.mark.parametrize("batch", [1, 3, 4, 6])
@pytest.mark.parametrize("chains", [False, True], ids=["trees", "chains"])
def test_answers_are_those_of_plain_decoding(chains: bool, batch: int, drafter: str) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype="float32")
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY / "target")
    lines = (TINY / "prompts.jsonl").read_text().splitlines()[:batch]
    prompts = [json.loads(line)["prompt"][: 40 + 30 * index] for index, line in enumerate(lines)]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    start = inputs["input_ids"].shape[1]

    def answers(assistant: Any, stop: str) -> Tensor:
        criteria = harness.stop_sequences_criteria(tokenizer, [stop, "\n\nclass"], start, batch)
        settings = {"max_new_tokens": 40, "do_sample": False, "stopping_criteria": criteria}
        output: Tensor = model.generate(**inputs, **settings, assistant_model=assistant)
        return output

    with assisted_loop() if chains else nullcontext(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(In this call|decodes it plainly)")
        assistant = load_drafter(drafter if drafter == "suffix" else str(TINY / drafter), target=model)
        for stop in ("return", ":\n"):
            assert answers(assistant, stop).tolist() == answers(None, stop).tolist()
