"""Packed rows: what they keep, and that training reads them as it reads JSONL."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.training import packed_rows, write
from hf_specdec.training.answer_files import read_answers
from hf_specdec.training.command import main
from hf_specdec.training.packed_rows import packed, read_packed, unpacked
from tests.training.test_conversations import NEW_TOKENS, arguments, place, record

pytest.importorskip("datasets", reason="training needs the extra hf_specdec[train]")
__all__ = ["place"]  # a fixture


def row(prompt: list[int], answer: list[int], **columns: Any) -> dict[str, Any]:
    return {"prompt_ids": prompt, "answer_ids": answer, **columns}


@pytest.mark.parametrize(("largest", "id_bytes"), [(65535, 2), (65536, 4), (2**31, 4)])
def test_every_id_and_column_comes_back_and_ids_take_as_few_bytes_as_fit(largest: int, id_bytes: int) -> None:
    rows = [
        row([1, 0, largest], [7], ended=True, temperature=0.7, group="a\n\u2028", turn=0),
        row([256], [], ended=False, temperature=0.0, group="", turn=1),
        row([], [10, 13, 255], ended=True, temperature=1.0, group="a", turn=0),
    ]
    content = packed([each | {"messages": [{}], "number": 5} for each in rows])
    assert unpacked(content) == rows
    head, ids = lzma.decompress(content).split(b"\n", 1)
    assert (json.loads(head)["id_bytes"], len(ids)) == (id_bytes, 8 * id_bytes)


def written(folder: str, *options: str) -> None:
    write.main(["--target", "target", "--data", "talks.jsonl", "--output", folder, "--no-bf16",
                "--max-new-tokens", str(NEW_TOKENS), "--temperature", "0", "0.7", *options])  # fmt: skip


def test_a_folder_is_packed_into_files_that_stay_as_rows_are_added(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packed_rows, "ROWS_PER_FILE", 30)
    written("answers", "--pack")
    files = sorted((place / "answers/packed").glob("rows-*.xz"))
    assert [len(read_packed(file)) for file in files] == [30, 30, 20]
    size = sum(file.stat().st_size for file in files)
    assert f"{Path('answers/packed')}: {size:,} bytes in 3 files" in capsys.readouterr().out
    rows = read_answers(place / "answers")
    kept = [{name: each[name] for name in each if name not in ("messages", "number")} for each in rows]
    assert read_answers(place / "answers/packed") == kept
    before = [file.read_bytes() for file in files]

    write.main(["--output", "answers", "--pack=elsewhere"])
    assert [file.read_bytes() for file in sorted((place / "elsewhere").glob("rows-*.xz"))] == before
    with (place / "answers/answers-000000.jsonl").open("a") as file:
        file.write(json.dumps(rows[0]) + "\n")
    write.main(["--output", "answers", "--pack"])
    assert [file.read_bytes() for file in files[:2]] == before[:2]
    assert len(read_answers(place / "answers/packed")) == 81


def test_what_cannot_be_packed_is_refused_and_packed_rows_stay(place: Path) -> None:
    written("answers", "--pack")
    content = (place / "answers/packed/rows-000000.xz").read_bytes()
    lines = (place / "answers/answers-000000.jsonl").read_text().splitlines(keepends=True)
    (place / "answers/answers-000000.jsonl").write_text("".join(lines[:50]))
    with pytest.raises(ValueError, match=r"'answers.packed' holds 80 rows, and 'answers' only 50"):
        write.main(["--output", "answers", "--pack"])
    with pytest.raises(ValueError, match="'answers' is the folder of the answers, which would be read twice"):
        write.main(["--output", "answers", "--pack", "answers"])
    written("others", "--seed", "3")
    with pytest.raises(ValueError, match=r"answers.packed' holds answers .* other settings: seed 0, now 3"):
        write.main(["--output", "others", "--pack", "answers/packed"])
    with pytest.raises(ValueError, match="'nothing' holds no answers yet"):
        write.main(["--output", "nothing", "--pack"])
    with pytest.raises(SystemExit):  # without a target
        write.main(["--output", "more", "--data", "talks.jsonl", "--pack"])
    file = place / "answers/packed/rows-000000.xz"
    assert file.read_bytes() == content
    file.write_bytes(content[:-20])
    with pytest.raises(ValueError, match=r"rows-000000.xz' is not a file of packed rows, or damaged"):
        read_answers(place / "answers/packed")


def test_a_drafter_trained_on_packed_rows_is_that_of_the_jsonl(place: Path) -> None:
    written("answers", "--pack", "packed")
    for folder in ("answers", "packed"):
        options = arguments("dflash", "--output", f"of-{folder}", "--work-dir", f"work-{folder}")
        at = options.index("--data")
        main([*options[:at], "--data", folder, *options[at + 2 :]])
        assert record(place / f"of-{folder}")["data"]["rows_written_by_target"] == 80
    weights = [(place / f"of-{folder}/model.safetensors").read_bytes() for folder in ("answers", "packed")]
    assert weights[0] == weights[1]
