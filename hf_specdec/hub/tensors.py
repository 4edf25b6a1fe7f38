"""Tensors of a checkpoint: loading and saving them, and comparing them with those that a network needs.

Pickles are read here only, with `weights_only`. `files.py` finds the files and reads the headers of safetensors files.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_specdec.hub.files import safetensors_headers
from hf_specdec.hub.formats.base import StoredTensor
from hf_specdec.unsafe_keys import listed

# safetensors' names of the dtypes that the weights of a drafter may have.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Those of index tables and masks, which are not converted.
WHOLE_DTYPES = {"I64": torch.int64, "BOOL": torch.bool}


def load_tensors(file: Path, name: str) -> dict[str, Tensor]:
    """Loads a weight file to the CPU; a pickle with `weights_only`, which runs no code of the file.

    Tensors of a pickle may be views of any shape, such as expanded ones: check the shape before copying a tensor.

    Raises:
        ValueError: a pickle is damaged, compressed, or holds anything but tensors by name.
    """
    return load_file(file) if file.suffix == ".safetensors" else _unpickle(file, name, "cpu")


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Saves tensors by name as safetensors; to a file of another suffix as a pickle, a dict of tensors."""
    if file.suffix == ".safetensors":
        save_file(dict(tensors), file, metadata={"format": "pt"})
    else:
        torch.save({name: tensor.clone() for name, tensor in tensors.items()}, file)  # a view would save its storage


def pickle_header(file: Path, name: str) -> dict[str, StoredTensor]:
    """Names, shapes and dtypes of the tensors in a pickle, without their values.

    Raises:
        ValueError: as `load_tensors`.
    """
    return {key: describe(tensor, file) for key, tensor in _unpickle(file, name, "meta").items()}


def read_headers(files: Sequence[Path], name: str) -> dict[str, StoredTensor]:
    """Shapes and dtypes of the tensors in weight files, pickles among them, without their values.

    Raises:
        ValueError: as `load_tensors` and `safetensors_headers`.
    """
    stored = safetensors_headers([file for file in files if file.suffix == ".safetensors"], name)
    for file in files:
        if file.suffix != ".safetensors":
            stored |= pickle_header(file, name)
    return stored


def describe(tensor: Tensor, file: Path) -> StoredTensor:
    """The description of a tensor in the header of a safetensors file."""
    names = {dtype: name for name, dtype in (DTYPES | WHOLE_DTYPES).items()}
    return StoredTensor(tuple(tensor.shape), names.get(tensor.dtype, str(tensor.dtype)), file)


def _unpickle(file: Path, name: str, device: str) -> dict[str, Tensor]:
    """Loads a pickle with `weights_only`; on the meta device without the values."""
    entries: list[zipfile.ZipInfo] = []
    try:
        if zipfile.is_zipfile(file):  # as torch writes since 1.6
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):  # torch never writes it
            raise ValueError("it is compressed, and may take far more memory than its file has bytes")
        content = torch.load(file, map_location=device, weights_only=True)
        plain = isinstance(content, dict) and all(
            isinstance(tensor, Tensor) and tensor.layout == torch.strided for tensor in content.values()
        )
        sizes = {tensor.untyped_storage().nbytes() for tensor in content.values()} if plain and entries else set()
        if missing := sizes - {entry.file_size for entry in entries}:
            raise ValueError(f"a tensor needs {max(missing)} bytes, and no entry of the archive has that size")
    except Exception as error:  # torch raises many types of errors for damaged files; none of them has run code
        raise ValueError(
            f"{file.name} of {name!r} ({file.stat().st_size} bytes) cannot be read as plain tensors: it is damaged, or "
            f"holds objects whose loading would run code ({type(error).__name__}). Nothing in it was run: use a "
            "drafter saved as safetensors."
        ) from error
    if not plain:
        raise ValueError(f"{file.name} of {name!r} must hold tensors by name, but holds something else.")
    return {str(key): tensor for key, tensor in content.items()}


def differences(expected: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> dict[str, list[str]]:
    """Compares the tensors that a network needs with those of the files.

    Args:
        expected: the network's state dict, on any device.
        stored: headers, without tensors that the format permits in addition.

    Returns:
        Tensors by kind of difference, each with the values that differ. Kinds without tensors are left out.
    """
    tables = {name: describe(tensor, Path()) for name, tensor in expected.items() if not tensor.is_floating_point()}
    found = {
        "missing": [f"{name} {list(tensor.shape)}" for name, tensor in expected.items() if name not in stored],
        "unexpected": [f"{name} {list(tensor.shape)}" for name, tensor in stored.items() if name not in expected],
        "of another shape": [
            f"{name} is {list(stored[name].shape)} in {stored[name].file.name}, but config.json makes it "
            f"{list(tensor.shape)}"
            for name, tensor in expected.items()
            if name in stored and stored[name].shape != tuple(tensor.shape)
        ],
        "of another dtype": [
            f"{name} is {tensor.dtype}, not {tables[name].dtype if name in tables else ' or '.join(DTYPES)}"
            for name, tensor in stored.items()
            if (tensor.dtype != tables[name].dtype if name in tables else tensor.dtype not in DTYPES)
        ],
    }
    return {kind: tensors for kind, tensors in found.items() if tensors}


def check_tensors(expected: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], name: str, kind: str) -> None:
    """Raises ValueError if there are `differences`; `name` and `kind` describe the checkpoint in the message."""
    if found := differences(expected, stored):
        problems = "; ".join(f"{problem}: {listed(tensors)}" for problem, tensors in found.items())
        raise ValueError(
            f"The weights of {name!r} are not those of the {kind} drafter that its config.json describes. {problems}. "
            "Nothing was loaded: check that weights and config.json are of one checkpoint."
        )
