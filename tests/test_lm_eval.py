"""The evaluation harness with a drafter: the answers of its own model class, drafted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_specdec.integration import _ATTACHED
from hf_specdec.lm_eval import register
from tests.method_table import make_ddtree
from tests.targets import make_target, tiny_tokenizer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("pair")
    target = make_target("llama", "sdpa", torch.float32)
    target.save_pretrained(folder / "target")
    tokenizer = tiny_tokenizer().__class__(tokenizer_object=tiny_tokenizer()._tokenizer, eos_token="b", pad_token="a")
    tokenizer.save_pretrained(folder / "target")
    make_ddtree(target).save_pretrained(folder / "drafter")
    return {"pretrained": str(folder / "target"), "drafter": str(folder / "drafter")}


@pytest.mark.parametrize("batch_size", [1, 3])
def test_answers_are_those_of_the_harness_and_drafted(pair: dict[str, str], batch_size: int) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    register()
    register()
    texts = ["hello", "abracadabra", "more", "be"]
    settings = {"device": "cpu", "dtype": "float32", "batch_size": batch_size}
    answers = []
    for name, others in (("hf", {}), ("hf-specdec", {"drafter": pair["drafter"]})):
        model = get_model(name)(pretrained=pair["pretrained"], **settings, **others)
        asked = {"until": ["ab", "c"], "max_gen_toks": 24, "do_sample": False}
        requests = [Instance("generate_until", {}, (text, dict(asked)), number) for number, text in enumerate(texts)]
        answers.append(model.generate_until(requests, disable_tqdm=True))
        continuations = [Instance("loglikelihood", {}, (text, "ace"), number) for number, text in enumerate(texts)]
        answers.append(model.loglikelihood(continuations, disable_tqdm=True))
    assert answers[:2] == answers[2:]
    stats = _ATTACHED[model.model].stats
    assert stats is not None
    assert stats.num_draft_tokens > 0


def test_the_command_line_knows_the_model_and_names_what_is_wrong(pair: dict[str, str]) -> None:
    pytest.importorskip("lm_eval")
    command = [sys.executable, "-m", "hf_specdec.lm_eval", "run", "--model", "hf-specdec", "--tasks", "no_such_task"]
    done = subprocess.run([*command, "--model_args", "pretrained=x,drafter=y"], capture_output=True, text=True)
    assert "no_such_task" in done.stdout + done.stderr
    assert "no model for this name" not in done.stderr


def test_a_missing_harness_is_named(lacking: Callable[[str], None]) -> None:
    lacking("lm_eval.api.registry")
    with pytest.raises(ImportError, match=r"needs the package lm_eval.*, which is not installed: pip install 'lm_eval"):
        register()
