"""The whole command on a tiny random target: what it measures, writes and refuses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import register_backend
from torch._inductor.exc import InductorError

from hf_specdec.benchmark import benchmark, calls, records
from hf_specdec.benchmark.__main__ import main
from hf_specdec.benchmark.calls import compare, generate, lengths
from hf_specdec.benchmark.records import Call, Environment, Note, Record, Table
from hf_specdec.benchmark.variants import ASSISTED, BUNDLED, COMPILED, PACKED, PLAIN, Variant
from hf_specdec.drafting.registry import WEIGHTLESS, named_alone, register
from hf_specdec.methods.lookup import NGramDrafter
from tests.hub.test_saving import small_disk
from tests.method_table import make_dflash
from tests.scripted import right_for
from tests.targets import make_target, one_prompt, ragged_prompts, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    target = make_target()
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    make_dflash(target, method="ddtree").save_pretrained(folder / "drafter")
    prompts = [{"prompt": "abcd" * (index + 2), "group": ["even", "odd"][index % 2]} for index in range(3)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    return folder


def bench(folder: Path, output: Path, *arguments: str) -> list[Record]:
    """Runs the command with settings that take a second; returns the records."""
    common = {
        "--target": str(folder / "target"), "--prompts": str(folder / "prompts.jsonl"), "--dtype": "float64",
        "--device": "cpu", "--output": str(output), "--new-tokens": "6", "--repeats": "2",
    }  # fmt: skip
    assert main([*(part for pair in common.items() for part in pair), *arguments]) == 0
    return records.read(output / "report.jsonl")


class TellingDrafter(NGramDrafter):
    """Has a table of its own."""

    def report_tables(self, model: Any, prompts: Any) -> list[tuple[str, list[str], list[list[str]]]]:
        return [("own", ["prompts"], [[str(len(prompts))]])]


@pytest.fixture(scope="module")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    register("telling", TellingDrafter, origin="name")
    try:
        return bench(
            folder, tmp_path_factory.mktemp("out"), "--drafter", "telling", "--drafter", str(folder / "drafter"),
            "--draft-model", str(folder / "target"), "--batch-size", "1", "2", "--budgets", "2", "4",
            "--sweep-prompts", "1", "--compile-backend", "eager",  # building kernels takes minutes
        )  # fmt: skip
    finally:
        del WEIGHTLESS["telling"]


@pytest.mark.slow
def test_every_way_meets_every_prompt_equally_often(made: list[Record]) -> None:
    own = [call for call in made if isinstance(call, Call) and call.swept_from is None]
    counts = Counter((call.variant, call.temperature, call.batch_size) for call in own)
    # Three prompts, two repeats; as pairs there is one batch, and stock assisted generation takes no pairs.
    for variant in (PLAIN, COMPILED, "ngram", "ddtree", "dflash"):
        for temperature in (0.0, 1.0):
            assert counts[variant, temperature, 1] == 6
            assert counts[variant, temperature, 2] == 2
    assert counts[ASSISTED, 0.0, 1] == 6
    assert counts[ASSISTED, 0.0, 2] == 0
    notes = " ".join(note.text for note in made if isinstance(note, Note))
    assert "stock assisted, batch size 2, was not measured: supports only one prompt at a time" in notes
    assert "Batch size 2: 1 prompts fill no batch" in notes


def test_greedy_output_is_compared_and_is_plain_decodings(made: list[Record]) -> None:
    for call in made:
        if isinstance(call, Call):
            assert call.identical is (None if call.temperature else True), call.variant


def test_a_call_says_what_it_took_and_leaves_nothing_out(made: list[Record]) -> None:
    for call in made:
        if isinstance(call, Call):
            assert call.new_tokens == [6] * call.batch_size
            assert 0 < call.ttft_s < call.seconds
            drafted = call.variant not in (PLAIN, COMPILED, ASSISTED)
            assert bool(call.per_round) == drafted
            assert sum(call.stages_s.values()) < call.seconds
            assert len(call.groups) == len(call.prompt_tokens) == call.batch_size


def test_swept_ways_run_on_few_prompts_and_greedily(made: list[Record]) -> None:
    swept = [call for call in made if isinstance(call, Call) and call.swept_from is not None]
    assert {call.variant for call in swept} == {"ngram @ 2", "ngram @ 4", "ddtree @ 2", "ddtree @ 4"}
    assert {(call.temperature, call.batch) for call in swept} == {(0.0, 0)}
    assert {call.budget for call in swept} == {2, 4}


def test_a_run_says_where_and_how_it_was_made(made: list[Record]) -> None:
    environment = made[0]
    assert isinstance(environment, Environment)
    assert environment.dtype == "float64"
    assert environment.prompts.startswith("3 of ")
    assert environment.command.startswith("hf-specdec bench ")
    assert environment.versions["torch"] == torch.__version__
    assert environment.weight_bytes > 0
    assert environment.copy_bytes_per_s > 0
    assert environment.variants["ngram"]["tree_budget"] == NGramDrafter().options.tree_budget


def test_drafters_show_tables_of_their_own(made: list[Record]) -> None:
    assert [table for table in made if isinstance(table, Table)] == [Table("ngram", "own", ["prompts"], [["3"]])]


def test_a_report_can_be_made_again_from_its_records(
    made: list[Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records.write(made, tmp_path / "run.jsonl")
    assert main(["--from-records", str(tmp_path / "run.jsonl"), "--output", str(tmp_path)]) == 0
    assert (tmp_path / "report.md").read_text().count("## ") >= 4
    assert str(tmp_path / "report.md") in capsys.readouterr().out
    assert main(["--from-records", str(tmp_path / "run.jsonl"), "--output", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [json.loads(line) for line in map(records.line, made)]


def test_a_measurement_is_printed_as_json_with_its_progress_on_stderr(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--temperature", "0", "--no-compiled", "--num-prompts", "1", "--budgets", "--json"]
    bench(folder, tmp_path, "--drafter", "ngram", *settings)
    printed = capsys.readouterr()
    made = json.loads(printed.out)
    assert made == [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    assert sum("seconds" in record for record in made) == 4  # plain decoding and the look-up, twice
    assert "bench:   0%|" in printed.err
    assert " 6/6 [" in printed.err  # with a first call of each


def test_a_run_that_is_stopped_leaves_records_that_make_a_report(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, measured = calls.measure, []

    def stopping(*arguments: Any, **details: Any) -> Any:
        if len(measured) == 5:
            raise KeyboardInterrupt
        measured.append(details)
        return measure(*arguments, **details)

    monkeypatch.setattr(calls, "measure", stopping)
    variants = ["--drafter", "ngram", "--no-compiled", "--temperature", "0", "--budgets", "2", "--sweep-prompts", "1"]
    with small_disk(1000):
        assert (
            main(["--output", str(tmp_path / "full"), "--target", str(folder / "target"), "--prompts", "a.jsonl"]) == 2
        )
    assert list(tmp_path.iterdir()) == []
    part = tmp_path / "report.part.jsonl"
    with pytest.raises(KeyboardInterrupt) as stop:
        bench(folder, tmp_path, *variants)
    assert f"what was measured is in {part}; hf-specdec bench --from-records {part} makes" in str(stop.value)
    assert [path.name for path in tmp_path.iterdir()] == ["report.part.jsonl"]
    kept = [record for record in records.read(tmp_path / "report.part.jsonl") if isinstance(record, Call)]
    assert {call.batch for call in kept} == {0, 1}, "whole prompts, so that variants are compared on the same ones"
    assert main(["--from-records", str(tmp_path / "report.part.jsonl")]) == 0
    assert "ngram" in (tmp_path / "report.md").read_text()


def test_reports_made_again_lie_beside_their_records_and_touch_no_others(
    made: list[Record], tmp_path: Path, chdir: Callable[[Path], None]
) -> None:
    (tmp_path / "earlier").mkdir()
    (tmp_path / "benchmark").mkdir()
    (tmp_path / "benchmark" / "report.md").write_text("of another run")
    records.write(made, tmp_path / "earlier" / "report.jsonl")
    chdir(tmp_path)
    assert main(["--from-records", "earlier/report.jsonl"]) == 0
    assert sorted(path.name for path in (tmp_path / "earlier").iterdir()) == [
        "report.jsonl", "report.md",
    ]  # fmt: skip
    assert records.read(tmp_path / "earlier" / "report.jsonl") == made
    assert (tmp_path / "benchmark" / "report.md").read_text() == "of another run"


@pytest.mark.slow
def test_the_bundled_target_given_by_its_path_brings_its_drafters_and_prompts_too(
    tmp_path: Path, chdir: Callable[[Path], None]
) -> None:
    chdir(BUNDLED)
    small = ["--new-tokens", "2", "--repeats", "1", "--num-prompts", "1", "--temperature", "0", "--budgets"]
    asked = ["--target", "./target/", "--device", "cpu", "--no-compiled", "--output", str(tmp_path)]
    assert main([*asked, *small]) == 0
    made = records.read(tmp_path / "report.jsonl")
    methods = {
        *named_alone(),
        "ddtree",
        "dflash",
        "dspark",
        "dspark_chain",
        "specblock",
        "specbound",
        "specbranch",
        "causal_lm_chain",
        "causal_lm_tree",
    }
    assert {call.variant for call in made if isinstance(call, Call)} == {PLAIN, PACKED, ASSISTED, *methods}


def test_without_a_compiler_the_second_baseline_is_missing_and_the_report_says_so(folder: Path, tmp_path: Path) -> None:
    made = bench(
        folder,
        tmp_path,
        "--drafter",
        "ngram",
        "--temperature",
        "0",
        "--compile-backend",
        "without_compiler",
        "--budgets",
    )
    assert COMPILED not in {call.variant for call in made if isinstance(call, Call)}
    notes = [note.text for note in made if isinstance(note, Note)]
    assert notes == [f"{COMPILED}, batch size 1, was not measured: RuntimeError: No working C++ compiler found."]


@register_backend
def without_compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
    """Of `torch.compile`: what "inductor" raises on a machine that cannot build kernels."""
    raise InductorError(RuntimeError("No working C++ compiler found"), None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "nowhere/at-all/drafter"], "nowhere/at-all/drafter"),
        (["--drafter", "ngram:tree_budget=0"], "tree_budget"),
        ([], "No --drafter was given"),
        (["--drafter", "ngram", "--prompts", "gsm"], "Unknown prompt set 'gsm'"),
        (["--drafter", "ngram", "--chat", "on"], "has no chat template"),
        (["--from-records", "nothing.jsonl"], "nothing.jsonl"),
        (["--drafter", "ngram", "--device", "cuda:99"], "device='cuda:99' is not available"),
        (["--drafter", "ngram", "--dtype", "flot32"], "dtype='flot32' is not a floating-point type"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_measured(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    common = ["--target", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl")]
    assert main([*common, "--output", str(tmp_path / "out"), "--no-compiled", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_difference_is_found_and_measured_by_the_targets_two_best_logits() -> None:
    target, inputs = make_target(), one_prompt()
    prompt_length = inputs["input_ids"].shape[1]
    plain = target.generate(**inputs, max_new_tokens=6, do_sample=False)[:, prompt_length:]
    assert compare(target, inputs, plain, plain) is None
    other = plain.clone()
    other[0, 4] = (other[0, 4] + 1) % 64
    difference = compare(target, inputs, other, plain)
    assert difference is not None
    assert (difference.row, difference.index) == (0, 4)
    with torch.no_grad():
        logits = target(torch.cat([inputs["input_ids"], plain[:, :4]], dim=1)).logits[0, -1].float().topk(2).values
    assert difference.top2_gap == pytest.approx(float(logits[0] - logits[1]))
    shorter = compare(target, inputs, plain[:, :3], plain)
    assert shorter is not None
    assert shorter.index == 3


def test_tokens_behind_the_end_of_a_text_are_not_counted() -> None:
    model = make_target()
    ids = torch.tensor([[5, 6, 2, 0, 0], [5, 6, 7, 8, 9]])
    assert lengths(ids, model) == [5, 5]
    model.generation_config.eos_token_id = 2
    try:
        assert lengths(ids, model) == [3, 5]
    finally:
        model.generation_config.eos_token_id = None


def test_the_clock_sees_every_token_of_batches_and_of_bursts() -> None:
    target, inputs = make_target("llama", "sdpa"), ragged_prompts()
    script = target.generate(**inputs, max_new_tokens=12, do_sample=False)
    for variant in (Variant(PLAIN, "plain"), Variant("own", "drafter", drafter=right_for([2, 0, 1], script))):
        new_ids, seconds, clock = generate(target, inputs, variant, 0.0, 9, seed=0)
        assert new_ids.tolist() == script[:, 9 : 9 + 9].tolist()
        assert len(clock.times) == 9
        assert 0 < clock.times[-1] - clock.started <= seconds


def test_the_function_measures_loaded_models_and_writes_the_same_files(tmp_path: Path) -> None:
    target = make_target()
    drafter = make_dflash(target, method="ddtree", tree_budget=3)
    made = benchmark(
        target, [drafter, "ngram"], tokenizer=tiny_tokenizer(), prompts=["abcdabcd", "abcabc"], temperature=[0.0],
        new_tokens=4, repeats=1, budgets=[], compiled=False, output=tmp_path,
    )  # fmt: skip
    counts = Counter(call.variant for call in made if isinstance(call, Call))
    assert counts == {PLAIN: 2, "ddtree": 2, "ngram": 2}
    assert all(call.identical for call in made if isinstance(call, Call))
    environment = made[0]
    assert isinstance(environment, Environment)
    assert environment.variants["ddtree"]["tree_budget"] == 3
    assert environment.prompts == "2 of 2 given texts"
    assert records.read(tmp_path / "report.jsonl") == made
    assert "| ddtree |" in (tmp_path / "report.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.jsonl", "report.md"]


def test_settings_of_a_named_target_are_refused_for_a_loaded_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'float64' is for a target given by its name"):
        benchmark(make_target(), "ngram", prompts=["a"], dtype="float64", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
