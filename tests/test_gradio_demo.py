"""The generators behind `examples/gradio_demo.py`; the page itself is built where gradio is installed."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.method_table import METHODS
from tests.scripted import right_for
from tests.targets import fresh_target, make_target, tiny_tokenizer

PROMPT, NEW = "abcabc", 12


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / "gradio_demo.py"
    sys.path.insert(0, str(path.parent))  # as where it is run, for what lies beside it
    spec = importlib.util.spec_from_file_location("gradio_demo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gradio_demo"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def plain_ids() -> list[int]:
    inputs = tiny_tokenizer()(PROMPT, return_tensors="pt")
    output = make_target().generate(**inputs, max_new_tokens=NEW, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("method", ["ddtree", "ngram", "causal_lm_tree"])
def test_both_sides_of_a_race_write_what_plain_decoding_writes(demo: ModuleType, method: str) -> None:
    drafter = METHODS[method](make_target())
    steps = list(demo.race(make_target(), tiny_tokenizer(), drafter, PROMPT, NEW, 0.0))
    plain, speculative = steps[-1]
    assert plain.token_ids == speculative.token_ids == plain_ids()
    assert plain.done
    assert speculative.done
    assert plain.seconds > 0
    assert speculative.seconds > 0
    assert f"{NEW} tokens" in plain.caption()
    assert "mean acceptance length" in speculative.caption()
    assert "mean acceptance length" not in plain.caption()


def test_only_one_side_runs_at_a_time(demo: ModuleType) -> None:
    target = fresh_target()
    running: list[int] = []
    seen_together = []

    def begins(*args: object) -> None:
        running.append(threading.get_ident())
        seen_together.append(len(set(running)))

    def ends(*args: object) -> None:
        running.remove(threading.get_ident())

    target.register_forward_pre_hook(begins)
    target.register_forward_hook(ends)
    list(demo.race(target, tiny_tokenizer(), METHODS["ngram"](target), PROMPT, NEW, 0.0))
    assert len(seen_together) > NEW
    assert max(seen_together) == 1


def test_a_race_that_nobody_watches_any_more_ends_and_leaves_no_thread(demo: ModuleType) -> None:
    before = threading.active_count()
    watching = demo.race(make_target(), tiny_tokenizer(), METHODS["ngram"](make_target()), PROMPT, 10_000, 0.0)
    next(watching)
    watching.close()
    assert threading.active_count() == before


def test_what_goes_wrong_in_a_side_is_told_to_whoever_asked(demo: ModuleType) -> None:
    def broken(context: object) -> None:
        raise RuntimeError("no draft today")

    drafter = right_for(1, torch.zeros(1, 4, dtype=torch.int64))
    drafter.draft = broken
    with pytest.raises(RuntimeError, match="no draft today"):
        list(demo.race(make_target(), tiny_tokenizer(), drafter, PROMPT, NEW, 0.0))


def test_the_drawing_shows_the_text_and_trees_and_turns_the_trace_off_again(demo: ModuleType) -> None:
    drafter = METHODS["ddtree"](make_target())
    html = demo.draw(make_target(), tiny_tokenizer(), drafter, PROMPT, NEW)
    assert html.count("<svg") == 3
    assert "class='shaded'" in html
    assert drafter.trace is None


def test_without_gradio_the_extra_is_named_before_a_model_is_loaded(
    demo: ModuleType, lacking: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    lacking("gradio")
    with pytest.raises(SystemExit):
        demo.main(["--model", "nowhere/at-all"])
    told = capsys.readouterr().err
    assert "pip install '.[gradio]'" in told
    assert "examples/quickstart.py" in told  # what works without
    with pytest.raises(ImportError, match=r"pip install '\.\[gradio\]'"):
        demo.page(make_target(), tiny_tokenizer(), METHODS["ngram"](make_target()), [PROMPT])


def test_the_page_is_built_where_gradio_is_installed(demo: ModuleType) -> None:
    pytest.importorskip("gradio")
    app = demo.page(make_target(), tiny_tokenizer(), METHODS["ngram"](make_target()), [PROMPT])
    assert app.title == "Speculative decoding, side by side"
