"""load_drafter: a drafter from a local folder or the Hub.

Everything that can be refused is refused before weights are downloaded or read: the format, the options, the pairing
with the target, and from the headers alone whether the weights are complete. Files are the business of `files.py`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

import hf_specdec.drafters  # noqa: F401 (registers the families)
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.card import MEASUREMENTS_FILE, TRAINING_FILE, read_record
from hf_specdec.drafters.fingerprint import TOKENIZER_FILES
from hf_specdec.drafters.merged import MergedDrafter
from hf_specdec.drafters.pairing import check_tokenizer
from hf_specdec.drafters.pretrained import PretrainedDrafter
from hf_specdec.drafters.publishing import PublishedDrafter
from hf_specdec.drafters.registry import FAMILIES, WEIGHTLESS, is_weightless
from hf_specdec.drafters.vocabulary import check_draft_to_target
from hf_specdec.hub.checkpoint import read_config
from hf_specdec.hub.files import (
    CONFIG_FILE,
    INDEX_FILE,
    Source,
    StoredTensor,
    read_headers,
    weight_files,
)
from hf_specdec.hub.formats.base import Format, as_it_is, check_sizes
from hf_specdec.hub.formats.language_model import LANGUAGE_MODEL
from hf_specdec.hub.mtp import load_mtp
from hf_specdec.hub.recognition import NotADrafterError
from hf_specdec.hub.source_layout import source_layout
from hf_specdec.hub.tensors import DTYPES, check_tensors, describe, load_tensors
from hf_specdec.hub.wording import printable

MAX_TABLE_BYTES = 2**30  # of rotary and mask tables that a language model makes itself


def load_drafter(
    path_or_repo: str | os.PathLike[str] | Sequence[str | os.PathLike[str] | Drafter],
    target: PreTrainedModel | None = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    **drafting_options: Any,
) -> Drafter:
    """Loads a drafter, to be passed to the target's `generate` as `assistant_model=`.

    Args:
        path_or_repo: a local folder, a Hub id `owner/name`, or the name of a drafter that needs no weights; "mtp", or
            the target's own name, for the multi-token-prediction layer in the target's checkpoint; or a list of such,
            and of drafters that are loaded already, which are merged into one (`MergedDrafter`).
        target: the model to draft for. Where given, the two are checked against each other at once, and the drafter
            takes the target's dtype and device; else they are checked at the first `generate`.
        revision: branch, tag or commit on the Hub.
        token: for private repos; None for the stored one.
        local_files_only: takes the files from the Hub cache, never asks the Hub.
        dtype: of the drafter; None for the target's, without a target the checkpoint's.
        device: of the drafter; None for the target's, without a target the CPU.
        cache_dir: of the Hub client.
        **drafting_options: of the drafter's `options`, such as `method` and `tree_budget`; of a list, those of the
            merged drafter.

    Raises:
        OSError: there is no such folder or repo, files are missing, or the Hub cannot be asked.
        ValueError: the files are not a drafter that is known here, are damaged, or do not fit together; an option is
            unknown or out of range; the drafter does not fit the target.
        TypeError: `target` is not a model.
    """
    if isinstance(path_or_repo, (list, tuple)):
        if revision is not None:
            raise ValueError(
                f"revision={revision!r} for {len(path_or_repo)} drafters: load the one that it is of by itself, and "
                "put it into the list."
            )
        common: dict[str, Any] = {
            "token": token, "local_files_only": local_files_only, "dtype": dtype, "device": device,
            "cache_dir": cache_dir,
        }  # fmt: skip
        sources = [each if isinstance(each, Drafter) else load_drafter(each, target, **common) for each in path_or_repo]
        return MergedDrafter(*sources, **drafting_options)
    assert not isinstance(path_or_repo, Sequence) or isinstance(path_or_repo, str)
    name = os.fspath(path_or_repo)
    # A compiled or wrapped model is another module that generates.
    if target is not None and not (isinstance(target, nn.Module) and hasattr(target, "generate")):
        raise TypeError(
            f"target={target!r} is a {type(target).__name__}; it must be the loaded target model itself, or left out."
        )
    asked_dtype = floating_dtype(dtype)
    if device is not None:  # else it is the target's
        usable_device(device)
    source = Source(name, revision, token, local_files_only, cache_dir)
    if (within_target := load_mtp(target, source, **drafting_options)) is not None:
        return within_target
    if is_weightless(name):
        if revision is not None:
            raise ValueError(
                f"revision={revision!r} of {name!r}, which has no checkpoint: leave it out, or name a drafter that has."
            )
        return WEIGHTLESS[name](**drafting_options)
    folder = source.locate([CONFIG_FILE])
    format, fields = read_config(folder, source, registered_formats(), _host_defaults)
    family = FAMILIES[format.family]
    if family.load is not None:
        dtype = asked_dtype or _dtype_of(target)
        host_model: Any = _load_host_model(format, fields, source, folder, dtype, target, drafting_options)
        return host_model.to(_device_for(target) if device is None else device)

    with _naming_config(format, name):
        by_config = format.read(fields, None)
    if by_config is not None:
        _, blueprint = make_blueprint(format, by_config.fields, name)
        _check(blueprint, drafting_options, target)

    # The folder of a snapshot is named after its commit: the weights must be of the same one.
    wanted = ["model*.safetensors", INDEX_FILE, TRAINING_FILE, MEASUREMENTS_FILE, *family.drafter.side_files]
    folder = source.locate(wanted, revision=folder.name)
    if not any(folder.glob("model*.safetensors")):
        for file in format.other_weights:
            folder = source.locate([file], revision=folder.name)
            if (folder / file).is_file():
                break  # the same weights in a further file need not be downloaded
    files = weight_files(folder, name, format.other_weights)
    headers = read_headers(files, name)
    with _naming_config(format, name):
        reading = format.read(fields, headers)
    assert reading is not None, "a format can always be read once the headers are there"
    config, blueprint = make_blueprint(format, reading.fields, name)
    if by_config is None or by_config.fields != reading.fields:  # the weights have told more than the config did
        _check(blueprint, drafting_options, target)
    side_tensors = family.drafter.side_tensors(folder, name)
    ignorable = [re.compile(pattern) for pattern in blueprint._keys_to_ignore_on_load_unexpected or ()]
    names = {
        theirs: ours for theirs, ours in reading.names.items() if not any(pattern.search(ours) for pattern in ignorable)
    }
    stored = replace(reading, names=names).stored(headers)
    stored |= {key: describe(tensor, folder) for key, tensor in side_tensors.items()}
    check_tensors(blueprint.state_dict(), stored, name, format.name)

    loaded: dict[str, Tensor] = {}
    for weights in files:
        loaded |= load_tensors(weights, name)
    format.check(loaded, name)
    tensors = {ours: loaded[theirs].contiguous() for theirs, ours in names.items()} | side_tensors
    if "d2t" in tensors:
        check_draft_to_target(tensors["d2t"], config.vocab_size, name)
    drafter = family.drafter.from_pretrained(
        None,
        config=config,
        state_dict={key: tensors[key] for key in stored},
        dtype=asked_dtype or _dtype_of(target) or _stored_dtype(stored) or floating_dtype(config.dtype),
    )
    if format.read is not as_it_is:  # a published layout
        drafter.source_layout = source_layout(format, folder, headers, names, loaded, side_tensors, drafter.config)
    drafter.training_record = read_record(folder, TRAINING_FILE) or dict(format.training) or None
    drafter.measurements = read_record(folder, MEASUREMENTS_FILE)
    drafter.load_beside(
        folder,
        lambda patterns: source.locate(patterns, revision=folder.name),
        lambda place: _draft_model(replace(source, name=place, revision=None), drafter.dtype),
        from_hub=not Path(name).expanduser().is_dir(),
    )
    drafter.set_options(**drafting_options)
    if target is not None:
        drafter.check_pairing(target)
    return drafter.to(_device_for(target) if device is None else device)


def registered_formats() -> list[tuple[Callable[[dict[str, Any]], bool], Format]]:
    """The layouts of families that say themselves what is theirs."""
    return [
        (family.recognises, LANGUAGE_MODEL if family.load is not None else Format(family.name, family.name, as_it_is))
        for family in FAMILIES.values()
        if family.recognises is not None
    ]


def _host_defaults(format: Format) -> dict[str, Any]:
    """What missing fields mean to the config class of a format's drafters, for keys of a newer transformers."""
    config_class = getattr(FAMILIES[format.family].drafter, "config_class", None)
    return {field.name: field.default for field in dataclasses.fields(config_class)} if config_class else {}


def _load_host_model(
    format: Format,
    fields: dict[str, Any],
    source: Source,
    folder: Path,
    dtype: torch.dtype | None,
    target: PreTrainedModel | None,
    options: dict[str, Any],
) -> Drafter:
    """Loads a drafter that is a model of transformers; what can be refused is refused before its weights are there."""
    load = FAMILIES[format.family].load
    assert load is not None
    folder = source.locate(TOKENIZER_FILES, revision=folder.name)
    with _naming_config(format, source.name):
        blueprint: Any = load(fields, source.name, folder, None, False)
    blueprint.set_options(**options)
    if target is not None:
        blueprint.check_target(target)
    wanted = ["model*.safetensors", INDEX_FILE, "generation_config.json", TRAINING_FILE, MEASUREMENTS_FILE]
    folder = source.locate(wanted, revision=folder.name)
    stored = read_headers(weight_files(folder, source.name), source.name)
    _check_amount(blueprint.model, stored, source.name, format.problems(fields, stored))
    try:
        drafter = load(fields, source.name, folder, dtype, True)
    except (OSError, ValueError):
        raise
    except Exception as error:  # as in _naming_config
        raise ValueError(
            f"The files of {source.name!r} cannot be loaded as a {format.name} drafter: they are damaged, or not of "
            f"one checkpoint. Copy or download them again. {_in_words(error)}"
        ) from error
    if isinstance(drafter, PublishedDrafter):
        drafter.training_record = read_record(folder, TRAINING_FILE)
        drafter.measurements = read_record(folder, MEASUREMENTS_FILE)
    drafter.set_options(**options)
    return drafter


def _draft_model(source: Source, dtype: torch.dtype) -> Drafter:
    """The language model that a drafter drafts with, as a drafter of its own.

    Raises:
        OSError, ValueError: as `load_drafter`, or it is no language model.
    """
    folder = source.locate([CONFIG_FILE])
    try:
        format, fields = read_config(folder, source, registered_formats(), _host_defaults)
    except NotADrafterError as error:
        raise ValueError(
            f"{source.name!r} is no language model that transformers has: {error.found}. A draft model must be one, as "
            "LlamaForCausalLM is: copy or download it again, or name another one."
        ) from error
    if FAMILIES[format.family].load is None:
        raise ValueError(f"{source.name!r} is a drafter ({format.name}), not a language model.")
    return _load_host_model(format, fields, source, folder, dtype, None, {})


def _check_amount(
    blueprint: nn.Module, stored: Mapping[str, StoredTensor], name: str, differences: Sequence[str]
) -> None:
    """Raises ValueError if a model needs far more numbers than its files hold, before memory for them is taken.

    transformers renames, splits and joins tensors as it loads them, so their sizes are compared as a whole: a model
    that needs more than there is lacks weights, whatever they are called. Where it lacks less than the files hold,
    loading it is cheap, and tells which weights.

    Args:
        blueprint: the model on the meta device.
        stored: headers of its files.
        name: what the user asked for.
        differences: what else is known of how the two differ; for the message.
    """
    held = sum(math.prod(tensor.shape) for tensor in stored.values())
    needed = sum(tensor.numel() for tensor in blueprint.parameters())
    tables = sum(tensor.nbytes for tensor in blueprint.buffers())
    if needed > 2 * held:
        raise ValueError(
            f"{CONFIG_FILE} of {name!r} describes a model of {needed:,} numbers, but its weight files hold {held:,}. "
            f"Nothing was loaded: check that weights and {CONFIG_FILE} are of one checkpoint. "
            f"{'; '.join(differences)}".rstrip()
        )
    if tables > MAX_TABLE_BYTES:
        raise ValueError(
            f"{CONFIG_FILE} of {name!r} describes a model whose tables, which no file holds, take {tables:,} bytes; "
            f"at most {MAX_TABLE_BYTES:,} are taken. The checkpoint is damaged or hostile: nothing was loaded."
        )


def make_blueprint(format: Format, fields: dict[str, Any], name: str) -> tuple[PreTrainedConfig, PretrainedDrafter]:
    """Builds the config, and the drafter on the meta device: options, needs of a target, shapes of weights.

    Raises:
        ValueError: the fields do not describe such a drafter; names the field.
    """
    drafter = FAMILIES[format.family].drafter
    with _naming_config(format, name):
        check_sizes(fields)
        config = drafter.config_class.from_dict(fields)
        with torch.device("meta"):
            blueprint = drafter(config)
    blueprint.name_or_path = config.name_or_path = name
    return config, blueprint


def _check(blueprint: PretrainedDrafter, options: dict[str, Any], target: PreTrainedModel | None) -> None:
    """Raises ValueError if an option or the target does not fit the drafter."""
    blueprint.set_options(**options)
    if target is not None:
        blueprint.check_target(target)
        check_tokenizer(blueprint.name_or_path, blueprint.config, target)


@contextmanager
def _naming_config(format: Format, name: str) -> Iterator[None]:
    """Says which file is at fault for whatever the host's classes raise on values that make no sense."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # classes of others meet values that nobody thought of: it shows in many kinds
        raise ValueError(
            f"{CONFIG_FILE} of {name!r} does not describe a {format.name} drafter. {_in_words(error)}"
        ) from error


def _in_words(error: Exception) -> str:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return kind + printable(" ".join(str(error).split()))


def floating_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The floating-point type of a name such as "bfloat16"; None for None.

    Raises:
        ValueError: there is none of that name, it is of another kind, or nothing is computed in it.
    """
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if found is None and dtype is None:
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype={dtype!r} is not a floating-point type; use for example torch.bfloat16 or 'float32'.")
    if found not in DTYPES.values():
        names = ", ".join(repr(str(each).removeprefix("torch.")) for each in reversed(DTYPES.values()))
        raise ValueError(f"dtype={dtype!r} is none that models run in here: use one of {names}.")
    return found


def usable_device(device: torch.device | str | int | None) -> torch.device:
    """That device; for None the accelerator that torch finds (CUDA, Apple's mps, Intel's xpu), else the CPU.

    Raises:
        ValueError: there is none of that name here.
    """
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:  # unknown, not there, or torch was built without it
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"device={device!r} cannot be used here ({reason}): use 'cpu' or one that torch lists, or leave it out."
        ) from error


def _dtype_of(target: PreTrainedModel | None) -> torch.dtype | None:
    return target.dtype if target is not None and target.dtype.is_floating_point else None


def _stored_dtype(stored: Mapping[str, StoredTensor]) -> torch.dtype | None:
    """The type that most weights are stored in; None where there are none."""
    floating = Counter(tensor.dtype for tensor in stored.values() if tensor.dtype in DTYPES)
    return DTYPES[floating.most_common(1)[0][0]] if floating else None


def _device_for(target: PreTrainedModel | None) -> torch.device:
    # An offloaded target keeps its weights on the meta device between forwards.
    return target.device if target is not None and target.device.type != "meta" else torch.device("cpu")
