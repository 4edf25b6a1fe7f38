from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from examples.speed import __main__ as speed
from examples.speed.bundled import bundled, exact_variants
from examples.speed.criteria import CRITERIA, NOT_MEASURED, verdicts
from examples.speed.exactness import compare
from examples.speed.host_time import timed
from examples.speed.scripted import NETWORKS, ScriptedDrafter, counting_target, dflash_network, draft_shape, rate_for
from examples.speed.stock_dflash import ARGUMENTS, stock_dflash
from hf_specdec.benchmark.floor import weight_bytes
from hf_specdec.benchmark.variants import BUNDLED
from hf_specdec.verification import Difference, unit_in_the_last_place


@pytest.mark.slow
def test_target_counts_and_scripted_drafts_are_right_as_often_as_told() -> None:
    target = counting_target("tiny", "cpu", torch.float32)
    prompt = torch.arange(10).unsqueeze(0) + torch.tensor([[0], [400]])
    expected = (torch.arange(210) + torch.tensor([[0], [400]])) % 512
    for rate, low, high in ((0.0, 1.0, 1.0), (0.7, 2.6, 3.8), (1.0, 8.9, 9.0)):
        drafter = ScriptedDrafter(depth=8, tree_budget=20, rate=rate)
        output = target.generate(prompt, max_new_tokens=200, do_sample=False, assistant_model=drafter)
        assert output.tolist() == expected.tolist()
        assert drafter.stats is not None
        # 1 + 0.7 (1 - 0.7^8) / 0.3 = 3.2 and some 125 rounds: 0.6 is 3 sigma, and the seed is fixed.
        assert low <= drafter.stats.mean_acceptance_length <= high
        assert drafter.stats.num_draft_tokens == 20 * drafter.stats.num_spec_steps


def test_rate_gives_the_mean_acceptance_length() -> None:
    rate = rate_for(6.5, 15)
    assert 1 + sum(rate**level for level in range(1, 16)) == pytest.approx(6.5)


def test_network_beside_the_script_changes_no_token() -> None:
    target = counting_target("tiny", "cpu", torch.float32)
    drafter = ScriptedDrafter(dflash_network(target, layers=1), tree_budget=16)
    prompt = torch.arange(12).unsqueeze(0)
    output = target.generate(prompt, max_new_tokens=40, do_sample=False, assistant_model=drafter)
    assert output.tolist() == [list(range(52))]


@pytest.mark.parametrize("network", NETWORKS)
def test_each_network_drafts_beside_the_script(network: str) -> None:
    bench = speed.Bench(speed.parser().parse_args(["--device", "cpu", "--networks", network, "--repeats", "1"]))
    figures = bench.of_calls(bench.prompt(20), bench.drafter(8, "none"))
    assert figures["tau"] > 2
    assert figures["drafter_floor_ms"] > 0


def test_dry_run_of_every_part_on_random_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "speed.json"
    parts = ["rounds", "batch", "length", "reference"]
    small = ["--contexts", "32", "64", "--nodes", "8", "--batches", "1", "2", "--new-tokens", "12", "--repeats", "1"]
    small += ["--length", "90"]
    assert speed.main(["--part", *parts, "--device", "cpu", *small, "--output", str(out)]) == 0
    report = json.loads(out.read_text())
    assert {row["part"] for row in report["rows"]} == set(parts)
    for row in report["rows"]:
        if row["part"] in ("rounds", "reference"):
            assert row["round_to_floor"] > 0
            assert row["tau"] >= 1
        if row["part"] == "rounds":
            assert row["drafter_floor_ms"] > 0
            assert (row["times_first_context"] == 1) == (row["context"] == 32)
    assert {row["way"] for row in report["rows"] if row["part"] == "batch"} == {"plain", "none"}
    assert len(report["judged"]) == len(CRITERIA)
    assert all(line["holds"] == NOT_MEASURED == line["figure"] for line in report["judged"])
    environment = report["environment"]
    assert environment["shape"] == "tiny"
    assert environment["command"].startswith("python -m examples.speed --part rounds")
    assert "round_to_floor" in capsys.readouterr().out


def test_rows_of_a_ragged_batch_end_one_after_the_other() -> None:
    options = speed.parser().parse_args(["--device", "cpu", "--new-tokens", "24", "--networks", "none"])
    bench = speed.Bench(options)
    inputs, tokens = bench.ragged(context=20, batch=4)
    assert tokens == [6, 12, 18, 24]
    assert inputs["attention_mask"].sum(1).tolist() == [20, 18, 15, 13]
    drafter = bench.drafter(8, "none")
    output, _ = bench.generate(new_tokens=24, **inputs, assistant_model=drafter)
    bench.check(output, inputs["prompt"], tokens)
    assert drafter.stats is not None
    assert [1 + sum(kept + 1 for kept in row) for row in drafter.stats.per_step_accepted] >= tokens
    with pytest.raises(AssertionError):
        bench.check(output, inputs["prompt"], [6, 12, 18, 23])


def test_draft_model_errs_as_often_as_told() -> None:
    model = counting_target(draft_shape("tiny"), "cpu", torch.float32, error_rate=0.2)
    with torch.no_grad():
        said = model(torch.arange(512).unsqueeze(1)).logits[:, -1].argmax(-1)
    right = said == (torch.arange(512) + 1) % 512
    assert 0.14 < 1 - float(right.float().mean()) < 0.26  # 3 sigma
    assert sorted(said.tolist()) == list(range(512))


@pytest.mark.slow
def test_exact_tells_rounding_from_error(tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    command = ["--part", "exact", "--device", "cpu", "--dtype", "bfloat16", "--groups", "python", "--new-tokens", "12"]
    command += ["--nodes", "8", "--output", str(out), "--variants", "ddtree", "medusa, random weights"]
    assert speed.main(command) == 0
    report = json.loads(out.read_text())
    assert [row["group"] for row in report["rows"]] == ["python"] * 2
    assert [row["way"] for row in report["rows"]] == ["ddtree", "medusa, random weights"]
    assert [row["above_rounding"] for row in report["rows"]] == [0, 0]
    assert report["judged"][-1]["holds"] is True
    assert report["judged"][-2]["holds"] == NOT_MEASURED  # that is about float32

    class Wrong(Qwen3ForCausalLM):
        """Writes another token where there is a drafter."""

        def generate(self, *arguments: Any, **settings: Any) -> torch.Tensor:
            output = super().generate(*arguments, **settings)
            if "assistant_model" in settings:
                output[:, -5] = (output[:, -5] + 100) % 4096
            return output

    bench = speed.Bench(speed.parser().parse_args(command))
    _, groups = bundled(bench)
    prompts = {"python": groups["python"][:2]}
    for dtype, line in ((torch.bfloat16, -1), (torch.float32, -2)):
        model = Wrong.from_pretrained(BUNDLED / "target", dtype=dtype)
        (row,) = rows = compare(model, exact_variants(bench, model)[:1], bench.modes, prompts, 12)
        assert row["identical"] == 0
        assert row["above_rounding"] == len(row["gap_ulps"]) == 2
        assert min(row["apart_ulps"]) > 2 * max(row["rounding_ulps"])
        environment = report["environment"] | {"dtype": str(dtype).removeprefix("torch.")}
        assert verdicts(environment, rows)[line]["holds"] is False


def test_exact_is_asked_of_all_drafters_and_of_names_that_there_are() -> None:
    bench = speed.Bench(speed.parser().parse_args(["--device", "cpu"]))
    model, _ = bundled(bench)
    drafted = ["ddtree", "dflash", "specblock", "causal_lm_tree", "eagle3, random weights", "medusa, random weights"]
    assert set(drafted) <= {variant.name for variant in exact_variants(bench, model)}
    bench.options.variants = ["ddtre"]
    with pytest.raises(ValueError, match=r"Unknown --variants 'ddtre'\. Did you mean 'ddtree'"):
        exact_variants(bench, model)


def test_near_ties_are_told_from_errors_by_a_bound_in_units_of_the_last_place() -> None:
    assert unit_in_the_last_place(8.0, torch.bfloat16) == 8 * 2**-7
    assert unit_in_the_last_place(-15.9, torch.bfloat16) == 8 * 2**-7
    for value in (0.3, 1.0, 77.7):
        near = torch.tensor(value, dtype=torch.bfloat16)
        step = torch.nextafter(near, torch.tensor(torch.inf, dtype=torch.bfloat16)) - near
        assert unit_in_the_last_place(float(near), torch.bfloat16) == float(step)
    for gap, near_tie in ((0.25, True), (0.26, False)):
        assert Difference(3, 1, 2, gap, rounding=0.125).is_near_tie is near_tie


def test_lines_about_the_gpu_are_judged_by_what_a_gpu_measured() -> None:
    rows = [
        {
            "part": "rounds",
            "network": "dflash",
            "nodes": 64,
            "context": 1024,
            "round_to_floor": value,
            "verify_to_floor": 1.2,
        }
        | {"tokens_per_s": 900.0, "times_first_context": 1.0}
        for value in (1.7, 1.4)
    ]
    environment = {"on_gpu": True, "shape": "qwen3-8b", "dtype": "bfloat16"}
    found = {line["line"].split(",")[0]: line["holds"] for line in verdicts(environment, rows)}
    assert found["round-to-floor"] is True  # the better mode counts
    assert found["tokens/s at a mean acceptance length of 6.5"] is False
    assert found["round at context 8192 over one at 1024"] == NOT_MEASURED
    for other in ({"on_gpu": False}, {"shape": "tiny"}, {"dtype": "float32"}):
        assert {line["holds"] for line in verdicts(environment | other, rows)} == {NOT_MEASURED}
    without = {
        line["line"].split(",")[0]: line["holds"]
        for line in verdicts(environment, [row | {"network": "none"} for row in rows])
    }
    assert without["round-to-floor"] == NOT_MEASURED


def test_a_time_is_divided_by_the_time_to_read_the_weights_once() -> None:
    bench = speed.Bench(speed.parser().parse_args(["--device", "cpu"]))
    bench.bandwidth = 1e9
    assert bench.over_floor(3 * weight_bytes(bench.target) / 1e9) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda:99"], "device='cuda:99' is not available"),
        (["--device", "bogus"], "device='bogus' is not available (Expected one of"),
        (["--device", "cpu", "--dtype", "flot32"], "dtype='flot32' is not a floating-point type"),
        (["--device", "cpu", "--part", "exact", "--variants", "ddtre"], "Did you mean 'ddtree'"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert speed.main(arguments) == 2
    (told,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert told.startswith("python -m examples.speed: ")
    assert message in told


def test_help_names_what_is_run_where_nothing_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        speed.main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    options = speed.parser().parse_args([])
    assert f"(default: {' '.join(options.part)})" in told
    assert f"(default: {options.shape})" in told


def test_stock_dflash_counts_and_errs_as_often_as_told() -> None:
    target = counting_target("tiny", "cpu", torch.float32)
    prompt = torch.arange(10).unsqueeze(0)
    for rate, low, high in ((0.0, 1.0, 1.01), (0.7, 2.6, 4.1), (1.0, 13.0, 16.0)):
        assistant = stock_dflash(target, rate=rate, layers=1)
        rounds: list[int] = []
        assistant.register_forward_hook(lambda *inputs, rounds=rounds: rounds.append(1))
        output = target.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=160, do_sample=False,
            assistant_model=assistant, **ARGUMENTS,
        )  # fmt: skip
        assert output.tolist() == [list(range(170))]
        # 1 + 0.7 (1 - 0.7^15) / 0.3 = 3.3 and some 48 rounds: 0.7 is 2 sigma, and the seed is fixed.
        assert low <= 159 / len(rounds) <= high  # the last token is not drafted for


@pytest.mark.slow
def test_stock_dflash_has_its_row_where_transformers_has_it() -> None:
    small = ["--device", "cpu", "--contexts", "32", "--new-tokens", "12", "--repeats", "1"]
    small += ["--compile-backend", "eager"]  # building kernels takes minutes
    rows = {row["way"]: row for row in speed.baselines(speed.Bench(speed.parser().parse_args(small)))}
    assert set(rows) == {"plain", "plain compiled", "stock assisted", "stock DFlash"}
    assert math.isfinite(rows["stock DFlash"]["tokens_per_s"])  # of 11 tokens: noise may exceed their time


def test_without_stock_dflash_its_row_says_why(lacking: Callable[[str], None]) -> None:
    lacking("examples.speed.stock_dflash")
    variants, note = speed.stock_variants(speed.Bench(speed.parser().parse_args(["--device", "cpu"])))
    assert set(variants) == {"plain", "plain compiled", "stock assisted"}
    assert note is not None
    assert "has no DFlash assistant" in note


def test_host_time_leaves_the_forwards_out_and_the_models_as_they_were(tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    command = ["--part", "host", "--device", "cpu", "--groups", "python", "--new-tokens", "16", "--nodes", "8"]
    assert speed.main([*command, "--repeats", "1", "--prompts-per-group", "1", "--output", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [row["way"] for row in report["rows"]] == ["ours", "reference"]
    for row in report["rows"]:
        assert row["nodes"] == 8
        assert 0 < row["host_ms"] < row["round_ms"]
        assert row["host_share"] == pytest.approx(row["host_ms"] / row["round_ms"])
        assert 0 < row["host_share_of_stages"] < row["host_share"]  # drafting is more than its forward
    verdict = next(line for line in report["judged"] if line["line"].startswith("host time"))
    ours, reference = (row["host_ms"] for row in report["rows"])
    assert verdict["figure"] == ours / reference


def test_calls_are_timed_one_by_one_and_the_method_is_given_back() -> None:
    model = counting_target("tiny", "cpu", torch.float32)
    with timed(model, "forward") as seconds, torch.no_grad():
        model(torch.tensor([[1, 2]]))
        model(torch.tensor([[3]]))
    assert len(seconds) == 2
    assert min(seconds) > 0
    assert "forward" not in vars(model)
    with timed(type(model), "get_input_embeddings") as of_all:
        embedding = model.get_input_embeddings()
    assert len(of_all) == 1
    assert model.get_input_embeddings() is embedding
    assert len(of_all) == 1  # not counted any more
