"""Packed rows: the token ids of a target's answers, in a tenth of the bytes of the JSONL that they were made from.

A file is an xz archive. Its first line is JSON: the bytes of a token id, and a list per column, such as the lengths of
prompts and answers, `ended` and `temperature`; `xz -dc rows-000000.xz | head -1` prints it. The token ids of all rows
follow, of each row prompt and answer, in little-endian order: 2 bytes each if all are below 65,536, otherwise 4.
Messages are left out, because the ids have their text: `tokenizer.decode(row["answer_ids"], skip_special_tokens=True)`.

On 706 rows of SmolLM2-135M (138,481 tokens of answers, 56,767 of prompts) LZMA takes 1.29 bytes per token of an answer,
prompts and columns included, zlib 1.50; JSONL takes 14.0.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROWS_PER_FILE = 4096
_OWN = ("prompt_ids", "answer_ids", "messages", "number")  # not columns


def pack_rows(rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Writes rows to `rows-*.xz` in a folder; the same rows give the same files.

    Args:
        rows: as `answer_files.read_answers` returns them, all with the same keys.
        folder: created if needed.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for start in range(0, len(rows), ROWS_PER_FILE):
        files.append(folder / f"rows-{start // ROWS_PER_FILE:06d}.xz")
        unfinished = files[-1].with_suffix(".tmp")
        unfinished.write_bytes(packed(rows[start : start + ROWS_PER_FILE]))
        unfinished.replace(files[-1])
    return files


def packed(rows: Sequence[dict[str, Any]]) -> bytes:
    """The content of a file with these rows.

    Examples:
        >>> row = {"prompt_ids": [5, 6], "answer_ids": [70000], "ended": True, "turn": 0}
        >>> unpacked(packed([row, row])) == [row, row]
        True
    """
    ids = [token for row in rows for token in (*row["prompt_ids"], *row["answer_ids"])]
    id_bytes = 2 if max(ids) < 1 << 16 else 4
    columns = {
        "prompt_lengths": [len(row["prompt_ids"]) for row in rows],
        "answer_lengths": [len(row["answer_ids"]) for row in rows],
        **{name: [row[name] for row in rows] for name in rows[0] if name not in _OWN},
    }
    head = json.dumps({"id_bytes": id_bytes, **columns}, separators=(",", ":"))
    return lzma.compress(f"{head}\n".encode() + np.array(ids, f"<u{id_bytes}").tobytes(), preset=9)


def unpacked(content: bytes) -> list[dict[str, Any]]:
    """The rows of a file."""
    head, _, packed_ids = lzma.decompress(content).partition(b"\n")
    columns = json.loads(head)
    ids = np.frombuffer(packed_ids, f"<u{columns.pop('id_bytes')}").tolist()
    lengths = zip(columns.pop("prompt_lengths"), columns.pop("answer_lengths"), strict=True)
    rows, start = [], 0
    for (prompt, answer), *values in zip(lengths, *columns.values(), strict=True):
        middle, end = start + prompt, start + prompt + answer
        row = {"prompt_ids": ids[start:middle], "answer_ids": ids[middle:end]}
        rows.append(row | dict(zip(columns, values, strict=True)))
        start = end
    return rows


def read_packed(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of `pack_rows`.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        return unpacked(file.read_bytes())
    except (lzma.LZMAError, EOFError, ValueError, KeyError) as error:
        raise ValueError(
            f"{str(file)!r} is not a file of packed rows, or damaged ({error}): copy it again, or write it again with "
            "`hf-specdec write --pack`."
        ) from error
