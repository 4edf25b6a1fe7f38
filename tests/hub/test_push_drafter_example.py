"""examples/push_drafter.py, run as it is against the Hub on loopback."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from hf_specdec import load_drafter
from tests.hub.loopback_hub import TOKEN, LoopbackHub

EXAMPLE = Path(__file__).parents[2] / "examples" / "push_drafter.py"


def run(*arguments: object) -> None:
    runpy.run_path(str(EXAMPLE))["main"](list(map(str, arguments)))


def test_example_publishes_a_drafter(
    hub: LoopbackHub, token_file: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token_file.write_text(TOKEN)
    run(folder, "me/drafter", "--target", "owner/target", "--tag", "v1", "--private")
    assert "Published: " in capsys.readouterr().out
    assert hub.repos["me/drafter"].private
    assert load_drafter("me/drafter", revision="v1").config.target_name_or_path == "owner/target"


def test_example_publishes_nothing_that_would_not_load(hub: LoopbackHub, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(SystemExit, match="Not published: fix the problems"):
        run(folder, "me/drafter")
    assert not hub.requests
