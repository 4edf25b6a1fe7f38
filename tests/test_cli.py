"""hf-specdec: every subcommand does what its Python call does, and says in one line what was wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hf_specdec import load_drafter
from hf_specdec.cli import main
from tests.methods import make_ddtree
from tests.targets import make_target, tiny_tokenizer


@pytest.fixture
def target(tmp_path: Path) -> PreTrainedModel:
    model = make_target("llama", dtype=torch.float32)
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    return model


@pytest.fixture
def drafter(target: PreTrainedModel, tmp_path: Path) -> Path:
    make_ddtree(target).save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def test_inspect_prints_a_report_or_json(drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(drafter)]) == 0
    assert "loads as" in capsys.readouterr().out
    assert main(["inspect", str(drafter), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["family"] == "dflash"
    (drafter / "model.safetensors").unlink()
    assert main(["inspect", str(drafter)]) == 1
    assert "there are no weights to load" in capsys.readouterr().out


def test_export_and_convert_bring_a_drafter_there_and_back(drafter: Path, tmp_path: Path) -> None:
    vllm, back = tmp_path / "vllm", tmp_path / "back"
    assert main(["export", str(drafter), "--to", "vllm", "--output", str(vllm), "--target-id", "owner/target"]) == 0
    assert json.loads((vllm / "config.json").read_text())["speculators_model_type"] == "dflash"
    assert main(["convert", str(vllm), str(back)]) == 0
    original, returned = load_drafter(drafter), load_drafter(back)
    for name, tensor in original.state_dict().items():
        torch.testing.assert_close(returned.state_dict()[name], tensor, rtol=0, atol=0)
    assert json.loads((back / "config.json").read_text())["architectures"] == ["DFlashDraftModel"]


def test_export_of_the_current_folder_is_named_after_it(drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(drafter)
    assert main(["export", ".", "--target-id", "owner/target"]) == 0
    assert (drafter / "drafter-vllm" / "config.json").is_file()


def test_generate_prints_the_targets_own_continuation(
    target: PreTrainedModel, drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tiny_tokenizer()
    inputs = tokenizer("hello", return_tensors="pt")
    plain = tokenizer.decode(target.generate(**inputs, max_new_tokens=6, do_sample=False)[0])
    for which in (str(drafter), "ngram"):
        arguments = ["generate", str(tmp_path / "target"), which, "--prompt", "hello", "--max-new-tokens", "6"]
        assert main([*arguments, "--device", "cpu", "--option", "tree_budget=3"]) == 0
        printed = capsys.readouterr()
        assert printed.out.strip() == plain
        assert "mean acceptance length" in printed.err


def test_verify_prints_a_verdict(
    target: PreTrainedModel, drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["verify", str(tmp_path / "target"), str(drafter), "--prompt", "hello", "--max-new-tokens", "5"]
    assert main([*arguments, "--device", "cpu", "--option", "tree_budget=3"]) == 0
    assert capsys.readouterr().out.startswith("LOSSLESS: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "./absent"], "There is no folder './absent'"),
        (["export", "DRAFTER"], "names None as its target, but vllm loads the target by its Hub id"),
        (["verify", "TARGET", "DRAFTER", "--option", "tree_budget"], "must have the form NAME=VALUE"),
        (["verify", "TARGET", "DRAFTER", "--option", "tree_bugdet=3"], "Did you mean 'tree_budget'"),
        (["verify", "TARGET", "DRAFTER", "--option", "revision=v1"], "--option revision=... is no drafting option"),
        (["verify", "TARGET", "ngram", "--option", "path_or_repo=x"], "path_or_repo=... is no drafting option"),
        (["convert", "ngram", "OUT"], "'ngram' has no weights, so there is nothing to convert"),
        (["verify", "TARGET", "ngram", "--device", "bogus"], "--device 'bogus' cannot be used here (Expected one of"),
        (["verify", "TARGET", "ngram", "--device", "cuda:99"], "--device 'cuda:99' cannot be used here"),
        (["verify", "TARGET", "ngram", "--dtype", "bogus"], "dtype='bogus' is not a floating-point type"),
        (["generate", "TARGET", "ngram", "--prompt", ""], "--prompt '' has no tokens"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(
    arguments: list[str], message: str, drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {name: str(tmp_path / name.lower()) for name in ("DRAFTER", "TARGET", "OUT")}
    assert main([places.get(each, each) for each in arguments]) == 1
    printed = capsys.readouterr().err.strip().splitlines()[-1]
    assert printed.startswith("hf-specdec: ")
    assert message in printed


def test_ctrl_c_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_specdec.cli._verify", interrupted)
    assert main(["verify", "target", "ngram"]) == 130
    assert capsys.readouterr().err == "\nhf-specdec: stopped\n"


@pytest.mark.parametrize("command", ["train", "bench"])
def test_train_and_bench_have_their_own_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"usage: hf-specdec {command}" in capsys.readouterr().out


def test_help_names_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    printed = capsys.readouterr().out
    for name in ("inspect", "convert", "export", "verify", "train", "generate", "bench"):
        assert f"\n    {name} " in printed or f"hf-specdec {name}" in printed
