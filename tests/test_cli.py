"""hf-specdec: every subcommand does what its Python call does, and says in one line what was wrong."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, logging

import hf_specdec
from hf_specdec import Trace, cli, load_drafter
from hf_specdec.cli import main
from tests.method_table import make_ddtree
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
    assert main(["export", str(drafter), str(vllm), "--to", "vllm", "--target-id", "owner/target"]) == 0
    assert json.loads((vllm / "config.json").read_text())["speculators_model_type"] == "dflash"
    assert main(["convert", str(vllm), str(back)]) == 0
    original, returned = load_drafter(drafter), load_drafter(back)
    for name, tensor in original.state_dict().items():
        torch.testing.assert_close(returned.state_dict()[name], tensor, rtol=0, atol=0)
    assert json.loads((back / "config.json").read_text())["architectures"] == ["DFlashDraftModel"]


def test_export_of_the_current_folder_is_named_after_it(drafter: Path, chdir: Callable[[Path], None]) -> None:
    chdir(drafter)
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


def test_generate_and_verify_print_json(
    target: PreTrainedModel, drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--max-new-tokens", "6", "--device", "cpu", "--prompt", "hello", "--json"]
    assert main(["generate", str(tmp_path / "target"), str(drafter), *more]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    inputs = tiny_tokenizer()("hello", return_tensors="pt")
    plain = target.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert (result["text"], result["num_tokens"]) == (tiny_tokenizer().decode(plain), len(plain))
    assert result["stats"]["mean_acceptance_length"] >= 1
    assert main(["verify", str(tmp_path / "target"), str(drafter), *more]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["lossless"] is True
    assert report["differences"] == {}
    assert "verify, at most 1 min:   0%|" in printed.err
    assert "\nLOSSLESS: " in printed.err


def test_quiet_leaves_out_progress_and_statistics_and_verbose_adds_tracebacks(
    target: PreTrainedModel, drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--max-new-tokens", "6", "--device", "cpu", "--prompt", "hello"]
    for command, words in (("generate", "tokens/s"), ("verify", "verify, at most 1 min")):
        assert main([command, "--quiet", str(tmp_path / "target"), str(drafter), *more]) == 0
        quiet = capsys.readouterr()
        assert main([command, str(tmp_path / "target"), str(drafter), *more]) == 0
        usual = capsys.readouterr()
        assert (words in quiet.err, words in usual.err) == (False, True)
        assert quiet.out.splitlines()[0] == usual.out.splitlines()[0]
    for options, shown in (([], False), (["--verbose"], True)):
        assert main(["inspect", str(tmp_path / "nothing"), *options]) == 1
        error = capsys.readouterr().err
        assert error.splitlines()[-1].startswith("hf-specdec: ")
        assert ("Traceback" in error) == shown
    logging.set_verbosity_warning()


@pytest.mark.parametrize("option", ["--prompt", "--system"])
def test_bytes_of_the_command_line_that_are_not_utf8_are_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "target", "ngram", "--prompt", "caf", option, os.fsdecode(b"caf\xe9")])
    assert f"argument {option}: 'caf\\udce9' is not UTF-8: convert it first" in capsys.readouterr().err


def test_version_is_printed_by_the_package_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"hf-specdec {hf_specdec.__version__}\n"
    done = subprocess.run([sys.executable, "-m", "hf_specdec", "--version"], capture_output=True, text=True)
    assert done.stdout == f"hf-specdec {hf_specdec.__version__}\n"


def test_statistics_and_traces_have_a_table_for_notebooks(target: PreTrainedModel) -> None:
    drafter = make_ddtree(target)
    drafter.trace = Trace()
    target.generate(torch.tensor([[1, 5, 9]]), assistant_model=drafter, max_new_tokens=8, do_sample=False)
    assert drafter.stats is not None
    assert "<td>ddtree</td>" in drafter.stats._repr_html_()
    assert drafter.trace._repr_html_().count("<tr>") == 1 + drafter.stats.num_spec_steps
    assert json.loads(json.dumps(drafter.stats.to_dict()))["num_spec_steps"] == drafter.stats.num_spec_steps


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
        (["inspect", ""], "The name is empty; give a folder ('.' for the current one) or a Hub id"),
        (["verify", "", "ngram"], "The name is empty; give a folder"),
        (["verify", "TARGET", ""], "The name is empty; give a folder"),
        (["export", "DRAFTER"], "names None as its target, but vllm loads the target by its Hub id"),
        (["verify", "TARGET", "DRAFTER", "--option", "tree_budget"], "must have the form NAME=VALUE"),
        (["verify", "TARGET", "DRAFTER", "--option", "tree_bugdet=3"], "Did you mean 'tree_budget'"),
        (["verify", "TARGET", "DRAFTER", "--option", "revision=v1"], "--option revision=... is not a drafting option"),
        (["verify", "TARGET", "ngram", "--option", "path_or_repo=x"], "path_or_repo=... is not a drafting option"),
        (["convert", "ngram", "OUT"], "'ngram' has no weights to convert"),
        (["verify", "TARGET", "ngram", "--device", "bogus"], "device='bogus' is not available (Expected one of"),
        (["verify", "TARGET", "ngram", "--device", "cuda:99"], "device='cuda:99' is not available"),
        (["verify", "TARGET", "ngram", "--dtype", "bogus"], "dtype='bogus' is not a floating-point type"),
        (["generate", "TARGET", "ngram", "--prompt", ""], "--prompt '' has no tokens"),
        (
            ["verify", "TARGET", "ngram", "--device", "meta"],
            "device='meta' has no weights",
        ),
        (["verify", "TARGET", "ngram", "--dtype", "float8_e4m3fn"], "dtype='float8_e4m3fn' is not supported"),
        (["convert", "DRAFTER", "OUT", "--dtype", "float8_e4m3fn"], "dtype='float8_e4m3fn' is not supported"),
        (
            ["generate", "TARGET", "ngram", "--prompt", "a", "--revision", "v1"],
            "revision='v1' was given for 'ngram', which has no",
        ),
        (
            ["export", "DRAFTER", "--target-id", "a/b", "--num-target-layers", "0"],
            "num_target_layers=0 must be at least 1",
        ),
    ],
)
def test_an_error_is_printed_in_one_line(
    arguments: list[str], message: str, drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {name: str(tmp_path / name.lower()) for name in ("DRAFTER", "TARGET", "OUT")}
    assert main([places.get(each, each) for each in arguments]) == 1
    printed = capsys.readouterr().err.strip().splitlines()[-1]
    assert printed.startswith("hf-specdec: ")
    assert message in printed


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5"}, "T5Config', of which transformers has no causal language model"),
        ({"model_type": "unheard", "auto_map": {"AutoConfig": "x.X", "AutoModelForCausalLM": "x.Y"}},
         "needs Python code of its own repository, which is not run unasked"),
        ({"num_hidden_layers": 10**9}, "has num_hidden_layers=1000000000, and the maximum is 256"),
        ({"vocab_size": 10**10}, "describes a model of 640,000,031,008 parameters, but its weight files hold 35,104"),
        ({"hidden_size": "wide"}, "Field 'hidden_size' expected int, got str"),
        ({"hidden_act": "unheard"}, "does not describe a model of this transformers"),
    ],
)  # fmt: skip
def test_target_that_no_class_describes_is_refused_in_a_short_line(
    config: dict[str, Any], message: str, target: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "target/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    assert main(["generate", str(tmp_path / "target"), "ngram", "--prompt", "a", "--device", "cpu"]) == 1
    printed = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in printed
    assert len(printed) < 700


@pytest.mark.parametrize(
    "arguments", [["inspect", "sufix"], ["generate", "TARGET", "sufix", "--prompt", "a"], ["verify", "n-gram", "ngram"]]
)
def test_a_name_that_is_nearly_a_drafters_is_not_looked_up_on_the_hub(
    arguments: list[str], target: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "target") if each == "TARGET" else each for each in arguments]) == 1
    assert re.search("There is no folder '(sufix|n-gram)' here. Did you mean '(suffix|ngram)'", capsys.readouterr().err)
    with pytest.raises(ValueError, match="Did you mean 'suffix'"):
        load_drafter("Sufix")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB\nmore"), MemoryError()])
def test_lack_of_memory_is_reported_in_one_line(
    error: Exception,
    target: PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def lacks_memory(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(type(target), "to", lacks_memory)
    assert main(["generate", str(tmp_path / "target"), "ngram", "--prompt", "a", "--device", "cpu"]) == 1
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("hf-specdec: memory ran out (")


@pytest.fixture
def no_weights(target: PreTrainedModel, drafter: Path) -> None:
    """The weight files of target and drafter are empty, so that loading them fails."""
    for folder in (drafter, drafter.parent / "target"):
        (folder / "model.safetensors").write_bytes(b"")


@pytest.mark.parametrize("command", [["verify"], ["generate", "--prompt", "a"]])
def test_swapped_target_and_drafter_are_reported_before_anything_is_loaded(
    command: list[str],
    target: PreTrainedModel,
    drafter: Path,
    capsys: pytest.CaptureFixture[str],
    no_weights: None,
) -> None:
    swapped = [*command[:1], str(drafter), str(drafter.parent / "target"), *command[1:]]
    assert main(swapped) == 1
    printed = capsys.readouterr().err
    assert f"{str(drafter)!r} was given as the target, but it is a drafter (dflash). Given as the drafter: " in printed
    assert f"{str(drafter.parent / 'target')!r}. Are the two swapped?" in printed


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["nowhere/at/all"], "There is no folder 'nowhere/at/all'"),
        (["ngram", "--option", "tree_budget"], "must have the form NAME=VALUE"),
    ],
)
def test_arguments_are_checked_before_the_target_is_loaded(
    wrong: list[str],
    message: str,
    drafter: Path,
    capsys: pytest.CaptureFixture[str],
    no_weights: None,
) -> None:
    for command in (["verify"], ["generate", "--prompt", "a"]):
        assert main([command[0], str(drafter.parent / "target"), *wrong, *command[1:]]) == 1
        assert message in capsys.readouterr().err


def test_target_whose_files_are_cut_short_is_refused(
    target: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "target" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert main(["verify", str(tmp_path / "target"), "ngram"]) == 1
    assert f"The files of target {str(tmp_path / 'target')!r} are damaged" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "[" * 100_000], ids=["missing", "endless"])
def test_target_without_a_tokenizer_is_reported_in_one_line(
    content: str | None, target: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (tmp_path / "target").glob("tokenizer*"):
        file.unlink() if content is None else file.write_text(content)
    assert main(["generate", str(tmp_path / "target"), "ngram", "--prompt", "a"]) == 1
    printed = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"The tokenizer of target {str(tmp_path / 'target')!r} cannot be loaded" in printed


def test_target_that_lacks_weights_is_refused(
    target: PreTrainedModel, drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = dict(target.state_dict())
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "target" / "model.safetensors", {"format": "pt"})
    assert main(["verify", str(tmp_path / "target"), "ngram"]) == 1
    assert "do not hold all weights of the LlamaForCausalLM" in (printed := capsys.readouterr().err)
    assert "Missing: model.norm.weight." in printed


def test_target_of_links_is_loaded(target: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    for file in (tmp_path / "target").iterdir():
        (tmp_path / "links" / file.name).symlink_to(file)
    arguments = ["generate", str(tmp_path / "links"), "ngram", "--prompt", "a b", "--max-new-tokens", "2"]
    assert main([*arguments, "--device", "cpu"]) == 0


@pytest.mark.slow
def test_no_progress_bars_are_written_to_a_pipe(target: PreTrainedModel, drafter: Path) -> None:
    pair = [str(drafter.parent / "target"), str(drafter), "--prompt", "hello", "--max-new-tokens", "2"]
    command = [sys.executable, "-m", "hf_specdec.cli", "generate", *pair, "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.startswith("ddtree: "), "only the statistics"


@pytest.mark.slow
def test_characters_that_an_ascii_terminal_cannot_print_are_escaped(drafter: Path) -> None:
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {"target_name_or_path": "owner/größer\x1b[2J"}))
    command = [sys.executable, "-m", "hf_specdec.cli", "inspect", str(drafter)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"owner/gr\xf6\xdfer\x1b[2J" in done.stdout


@pytest.mark.parametrize("temperature", ["-1", "nan", "inf"])
def test_an_invalid_temperature_is_refused_before_anything_is_loaded(
    temperature: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "target", "ngram", "--prompt", "a", "--temperature", temperature])
    printed = capsys.readouterr()
    assert f"{temperature} must be a finite number of at least 0" in printed.err
    assert not printed.out


@pytest.mark.parametrize("number", ["0", "-3"])
def test_fewer_than_one_new_token_is_refused_before_anything_is_loaded(
    number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "target", "ngram", "--prompt", "a", "--max-new-tokens", number])
    assert f"--max-new-tokens: {number} must be a finite number of at least 1" in capsys.readouterr().err


def test_ctrl_c_prints_one_line(type_in: Callable[[TextIO], None], capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted(io.StringIO):
        def read(self, *_: Any) -> str:
            raise KeyboardInterrupt

    type_in(Interrupted())
    assert main(["generate", "target", "ngram", "--prompt", "-"]) == 130
    assert capsys.readouterr().err == "\nhf-specdec: stopped\n"


@pytest.mark.parametrize("command", ["train", "bench"])
def test_ctrl_c_while_a_command_is_imported_prints_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    for name in ("hf_specdec.training.command", "hf_specdec.benchmark.__main__"):
        monkeypatch.setitem(sys.modules, name, Interrupted(name))
    assert main([command]) == 130
    assert capsys.readouterr().err == "\nhf-specdec: stopped\n"


def test_a_missing_package_is_reported_in_one_line(
    target: PreTrainedModel,
    tmp_path: Path,
    chdir: Callable[[Path], None],
    lacking: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    lacking("datasets")
    chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text " * 1000)
    assert main(["train", "--target", "target", "--output", "out", "--text", "text.txt"]) == 1
    assert "the package datasets, which is not installed: pip install '.[train]' in" in capsys.readouterr().err


@pytest.mark.slow
def test_a_closed_output_pipe_ends_the_command_without_a_message(drafter: Path) -> None:
    command = [sys.executable, "-m", "hf_specdec.cli", "inspect", str(drafter), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()  # before anything is written
    process.stdout = None
    assert process.communicate(timeout=600)[1] == b""
    assert process.returncode == 141  # the status of a shell for a process ended by SIGPIPE


def test_a_prompt_from_stdin_must_be_utf8(
    target: PreTrainedModel,
    tmp_path: Path,
    type_in: Callable[[TextIO], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["generate", str(tmp_path / "target"), "ngram", "--prompt", "-", "--max-new-tokens", "2"]
    for given, status in ((b"hello", 0), ("caf\u00e9".encode("latin1"), 1)):
        type_in(io.TextIOWrapper(io.BytesIO(given), encoding="ascii", errors="surrogateescape"))
        assert main([*arguments, "--device", "cpu"]) == status
    assert "hf-specdec: --prompt - reads UTF-8 from stdin, but byte 4, 0xe9, is not valid" in capsys.readouterr().err


def test_a_target_alone_needs_a_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "someone/target"]) == 1
    assert (
        "Target 'someone/target' needs a drafter: name one that was trained for it, or ngram."
        in capsys.readouterr().err
    )


def test_a_seed_that_torch_cannot_take_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "target", "ngram", "--prompt", "a", "--seed", "99999999999999999999"])
    printed = " ".join(capsys.readouterr().err.split())
    assert (
        "argument --seed: 99999999999999999999 must be a finite number of at least 0 and at most 18446744073709551615"
        in printed
    )


def test_a_drafter_is_overwritten_only_if_that_is_asked_for(
    drafter: Path, target: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_ddtree(target, seed=1).save_pretrained(tmp_path / "other")
    before = {file.name: file.read_bytes() for file in drafter.iterdir()}
    assert main(["convert", str(tmp_path / "other"), str(drafter)]) == 1
    assert "drafter' already holds a model or a drafter (config.json, model.safetensors)" in capsys.readouterr().err
    for more in ([], ["--overwrite"]):
        assert main(["convert", str(drafter), f"{drafter}/../drafter", *more]) == 1
        assert "is to be converted into itself: give another folder" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in drafter.iterdir()} == before
    assert main(["convert", str(tmp_path / "other"), str(drafter), "--overwrite"]) == 0
    weights = (tmp_path / "other/model.safetensors").read_bytes()
    assert (drafter / "model.safetensors").read_bytes() == weights != before["model.safetensors"]
    for name, status in (("drafter", 0), ("drafter", 0), ("other", 0)):
        out = ["export", str(tmp_path / name), str(tmp_path / "vllm"), "--target-id", "owner/target"]
        assert main(out) == status


@pytest.mark.parametrize("command", ["train", "bench"])
def test_train_and_bench_have_their_own_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"usage: hf-specdec {command}" in capsys.readouterr().out


def test_help_names_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    printed = capsys.readouterr().out
    for name in ("inspect", "convert", "export", "verify", "write", "train", "generate", "chat", "bench"):
        assert f"\n    {name} " in printed or f"hf-specdec {name}" in printed


def test_python_calls_named_in_the_help_can_be_imported() -> None:
    imports = re.findall(r"from (hf_specdec\S*) import (\w+)", cli.__doc__ or "")
    assert [module.rpartition("hf_specdec.")[2] for module, _ in imports] == [
        "training.write", "training.command", "benchmark",
    ]  # fmt: skip
    for module, name in imports:
        assert callable(getattr(importlib.import_module(module), name))
