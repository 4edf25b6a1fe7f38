"""Folders that are written to: checked before work that takes hours, and complete when they change.

What is saved gets its names when all of it is written: neither a full disk nor Ctrl-C leaves half a drafter, or costs
the one that was there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

PROBE_BYTES = 1 << 20
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".index.json")


def check_writable(folder: Path) -> None:
    """Raises OSError if nothing can be written to a folder, which need not exist; leaves no trace."""
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
    except OSError as error:
        raise OSError(
            f"Nothing can be written to {str(folder)!r}: {error.strerror or error}. Make room or give write access "
            "there, or give another folder."
        ) from error
    finally:
        for place in new:
            with suppress(OSError):
                place.rmdir()


def checkpoint_files(folder: Path) -> list[str]:
    """Names of the files of a checkpoint in a folder."""
    found = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    return [name for name in found if name == CONFIG_NAME or name.endswith(WEIGHTS)]


def check_free(folder: Path, way_out: str) -> None:
    """Raises ValueError, with this way out, if a folder holds a checkpoint, which would be overwritten."""
    if found := checkpoint_files(folder):
        raise ValueError(
            f"{str(folder)!r} already holds a model or a drafter ({', '.join(found)}), which would be overwritten: "
            f"{way_out}"
        )


@contextmanager
def saved_whole(folder: Path, replaced: Sequence[str] = ()) -> Iterator[Path]:
    """A folder to write to; when all is written, its files come to `folder` and replace those of the same names.

    Weights in `folder` that are not among the new ones, such as further shards, are then removed.

    Args:
        folder: created if needed.
        replaced: patterns of further files that are removed if they are not among the new ones.

    Raises:
        OSError: something cannot be written; `folder` is as it was.
    """
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with writing_errors(folder), tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder) as unfinished:
            place = Path(unfinished)
            yield place
            files = [file for file in sorted(place.rglob("*")) if file.is_file()]
            files.sort(key=lambda file: file.name == CONFIG_NAME)  # last: a folder without it is no drafter
            for file in files:
                final = folder / file.relative_to(place)
                final.parent.mkdir(parents=True, exist_ok=True)
                file.replace(final)
        written = {folder / file.relative_to(place) for file in files}
        for home in {file.parent for file in written if file.name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)}:
            # Readers prefer a single file to shards, and transformers removes neither it nor an index.
            for stale in {*home.glob("model*.safetensors"), *home.glob(SAFE_WEIGHTS_INDEX_NAME)} - written:
                stale.unlink()
        for stale in {file for pattern in replaced for file in folder.glob(pattern)} - written:
            stale.unlink()
            with suppress(OSError):  # not empty
                stale.parent.rmdir()
    finally:
        if new:
            with suppress(OSError):  # not empty
                folder.rmdir()


@contextmanager
def writing_errors(folder: Path) -> Iterator[None]:
    """Raises OSError, naming the folder, for what safetensors raises on a full disk, too."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(f"Nothing was saved to {str(folder)!r}: {error}") from error


@contextmanager
def going_on(how: Callable[[], str]) -> Iterator[None]:
    """Adds to the message of Ctrl-C and of errors how to go on; see `cli.main`."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(how()) from error
    except OSError as error:
        raise OSError(f"{error}; {how()}") from error
    except (ValueError, RuntimeError) as error:  # among them those of an accelerator
        error.args = (f"{error}; {how()}",)
        raise
