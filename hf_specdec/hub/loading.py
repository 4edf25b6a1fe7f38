"""load_drafter: a drafter from a local folder or the Hub.

Everything that can be refused is refused before weights are downloaded or read: the format, the options, the pairing
with the target, and from the headers alone whether the weights are complete. Files are the business of `files.py`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel

from hf_specdec.drafters.card import MEASUREMENTS_FILE, TRAINING_FILE, read_record
from hf_specdec.drafters.fingerprint import tokenizer_fingerprint
from hf_specdec.drafters.pretrained import PretrainedDrafter
from hf_specdec.drafters.registry import Family
from hf_specdec.hub.files import (
    CONFIG_FILE,
    DTYPES,
    INDEX_FILE,
    Source,
    StoredTensor,
    check_tensors,
    read_headers,
    read_json,
    weight_files,
)
from hf_specdec.hub.recognition import recognise


def load_drafter(
    path_or_repo: str | os.PathLike[str],
    target: PreTrainedModel | None = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    **drafting_options: Any,
) -> PretrainedDrafter:
    """Loads a drafter, to be passed to the target's `generate` as `assistant_model=`.

    Args:
        path_or_repo: a local folder, or a Hub id `owner/name`.
        target: the model to draft for. Where given, the two are checked against each other at once, and the drafter
            takes the target's dtype and device; else they are checked at the first `generate`.
        revision: branch, tag or commit on the Hub.
        token: for private repos; None for the stored one.
        local_files_only: takes the files from the Hub cache, never asks the Hub.
        dtype: of the drafter; None for the target's, without a target the checkpoint's.
        device: of the drafter; None for the target's, without a target the CPU.
        cache_dir: of the Hub client.
        **drafting_options: attributes of the drafter, such as `method` and `tree_budget`.

    Raises:
        OSError: there is no such folder or repo, files are missing, or the Hub cannot be asked.
        ValueError: the files are not a drafter that is known here, are damaged, or do not fit together; an option is
            unknown or out of range; the drafter does not fit the target.
        TypeError: `target` is not a model.
    """
    name = os.fspath(path_or_repo)
    if target is not None and not isinstance(target, nn.Module):
        raise TypeError(
            f"target={target!r} is a {type(target).__name__}; it must be the loaded target model itself, or left out."
        )
    asked_dtype = _floating_dtype(dtype)
    source = Source(name, revision, token, local_files_only, cache_dir)
    folder = source.locate([CONFIG_FILE])
    family, config = _read_config(folder, name)

    blueprint = _blueprint(family, config, name)
    blueprint.set_options(**drafting_options)
    if target is not None:
        blueprint.check_target(target)
        _check_tokenizer(blueprint, target)

    # The folder of a snapshot is named after its commit: the weights must be of the same one.
    folder = source.locate(["model*.safetensors", INDEX_FILE, TRAINING_FILE, MEASUREMENTS_FILE], revision=folder.name)
    files = weight_files(folder, name)
    ignorable = [re.compile(pattern) for pattern in blueprint._keys_to_ignore_on_load_unexpected or ()]
    stored = {
        key: tensor
        for key, tensor in read_headers(files, name).items()
        if not any(pattern.search(key) for pattern in ignorable)
    }
    check_tensors(blueprint.state_dict(), stored, name, family.name)

    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= load_file(file)
    drafter = family.drafter.from_pretrained(
        None,
        config=config,
        state_dict={key: tensors[key] for key in stored},
        dtype=asked_dtype or _dtype_of(target) or _stored_dtype(stored),
    )
    drafter.name_or_path = drafter.config.name_or_path = name
    drafter.training_record = read_record(folder, TRAINING_FILE)
    drafter.measurements = read_record(folder, MEASUREMENTS_FILE)
    drafter.set_options(**drafting_options)
    return drafter.to(_device_for(target) if device is None else device)


def _read_config(folder: Path, name: str) -> tuple[Family, PreTrainedConfig]:
    fields = read_json(folder / CONFIG_FILE, name)
    family = recognise(fields, name)
    if "quantization_config" in fields:
        raise ValueError(
            f"{name!r} is quantised ({fields['quantization_config']!r}), and quantised drafters are not supported: load "
            "the checkpoint that it was made from."
        )
    fields.pop("transformers_weights", None)  # would have the host look for weights in a file of its choice
    with _naming_config(family, name):
        return family, family.drafter.config_class.from_dict(fields)


def _blueprint(family: Family, config: PreTrainedConfig, name: str) -> PretrainedDrafter:
    """The drafter without storage: knows its options, its needs of a target, and the shapes of its weights."""
    with _naming_config(family, name), torch.device("meta"):
        blueprint = family.drafter(config)
    blueprint.name_or_path = name
    return blueprint


@contextmanager
def _naming_config(family: Family, name: str) -> Iterator[None]:
    """Says which file is at fault for whatever the host's classes raise on values that make no sense."""
    try:
        yield
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, StrictDataclassError) as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(
            f"{CONFIG_FILE} of {name!r} does not describe a {family.name} drafter. {kind}{str(error).strip()}"
        ) from error


def _check_tokenizer(drafter: PretrainedDrafter, target: PreTrainedModel) -> None:
    """Raises ValueError if the target's tokenizer is at hand and not the one recorded at training."""
    recorded = drafter.config.target_tokenizer_sha256
    if recorded is None or not target.name_or_path:
        return
    try:
        if not _has_vocabulary(target.name_or_path):
            return
        tokenizer = AutoTokenizer.from_pretrained(target.name_or_path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError):
        return  # one that needs more than is installed or allowed: nothing to compare with
    found = tokenizer_fingerprint(tokenizer)
    if found != recorded:
        raise ValueError(
            f"Drafter {drafter.name_or_path!r} was trained with the tokenizer of "
            f"{drafter.config.target_name_or_path or 'its target'!r} (vocabulary sha256 {recorded[:12]}...), but target "
            f"{target.name_or_path!r} has another one (sha256 {found[:12]}..., {len(tokenizer)} tokens): the same ids are "
            "other tokens. Use the target it was trained for, or a drafter trained for this target."
        )


def _has_vocabulary(name: str) -> bool:
    """Whether a tokenizer's vocabulary is here; without one AutoTokenizer makes up an empty tokenizer."""
    files = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if Path(name).is_dir():
        return any((Path(name) / file).is_file() for file in files)
    return any(isinstance(try_to_load_from_cache(name, file), str) for file in files)


def _floating_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if found is None and dtype is None:
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype={dtype!r} is not a floating-point type; use for example torch.bfloat16 or 'float32'.")
    return found


def _dtype_of(target: PreTrainedModel | None) -> torch.dtype | None:
    return target.dtype if target is not None and target.dtype.is_floating_point else None


def _stored_dtype(stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """The type that most weights are stored in."""
    return DTYPES[Counter(tensor.dtype for tensor in stored.values()).most_common(1)[0][0]]


def _device_for(target: PreTrainedModel | None) -> torch.device:
    # An offloaded target keeps its weights on the meta device between forwards.
    return target.device if target is not None and target.device.type != "meta" else torch.device("cpu")
