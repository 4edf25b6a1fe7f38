"""load_drafter: loads a drafter from a local folder or the Hub.

The format, the options and the pairing with the target are checked before weights are downloaded, and the headers of
the weights before the weights are read. `files.py` reads the files.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import hf_specdec.methods  # noqa: F401 (registers the families)
from hf_specdec.decoding.relaxed import Relaxed, acceptance_rule
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.drafting.fingerprint import TOKENIZER_FILES
from hf_specdec.drafting.pairing import check_tokenizer
from hf_specdec.drafting.registry import (
    FAMILIES,
    LOADERS,
    WEIGHTLESS,
    check_spelling,
    is_weightless,
    methods_within_targets,
    named_method,
)
from hf_specdec.drafting.targets import target_errors, whole_target
from hf_specdec.drafting.vocabulary import check_draft_to_target
from hf_specdec.drafting.wrapped import unwrapped
from hf_specdec.hub.card import MEASUREMENTS_FILE, TRAINING_FILE, read_record
from hf_specdec.hub.checkpoint import read_config
from hf_specdec.hub.files import CONFIG_FILE, INDEX_FILE, Source, safetensors_headers, weight_files
from hf_specdec.hub.formats.base import Format, StoredTensor, as_it_is, check_sizes
from hf_specdec.hub.formats.library import own_layout
from hf_specdec.hub.pretrained import PretrainedDrafter
from hf_specdec.hub.publishing import PublishedDrafter
from hf_specdec.hub.recognition import NotADrafterError
from hf_specdec.hub.source_layout import source_layout
from hf_specdec.hub.tensors import DTYPES, check_tensors, describe, load_tensors, read_headers
from hf_specdec.hub.wording import printable
from hf_specdec.methods.merged import MergedDrafter

P = ParamSpec("P")
T = TypeVar("T")

MAX_TABLE_BYTES = 2**30  # for buffers of a language model, such as rotary tables and masks


def is_drafter(name: str) -> bool:
    """Whether a name is that of a drafter, supported or not, rather than of a language model.

    A language model with a draft vocabulary is one too: by itself it reads other tokens than the target.

    Raises:
        OSError: there is no such folder or repo.
        ValueError: the name is neither a folder nor a Hub id.
    """
    if named_method(name) is not None:
        return True
    source = Source(name)
    folder = source.locate([CONFIG_FILE])
    found: list[Format] = []
    fields: dict[str, Any] = {}
    with warnings.catch_warnings(), suppress(ValueError):  # loading it says what is wrong
        warnings.simplefilter("ignore")
        _, fields = read_config(folder, source, registered_formats(), recognised=found.append)
    return bool(found) and (found[0].keys is not None or "draft_token_ids" in fields)


def _on_cpu(load: Callable[P, T]) -> Callable[P, T]:
    """The same function, with new tensors in host memory whatever the default device is."""

    @functools.wraps(load)
    def loaded(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.device("cpu"):
            return load(*args, **kwargs)

    return loaded


@_on_cpu
def load_drafter(
    path_or_repo: str | os.PathLike[str] | Sequence[str | os.PathLike[str] | Drafter],
    target: PreTrainedModel | None = None,
    *,
    revision: str | None = None,
    subfolder: str = "",
    token: str | bool | None = None,
    local_files_only: bool = False,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | int | None = None,
    device_map: torch.device | str | int | dict[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    acceptance: Relaxed | str | None = None,
    draft_vocab: Tensor | Sequence[int] | None = None,
    **drafting_options: Any,
) -> Drafter:
    """Loads a drafter, to be passed to the target's `generate` as `assistant_model=`.

    Args:
        path_or_repo: a local folder, a Hub id `owner/name`, or the name of a drafter without weights; "mtp", or the
            target's own name, for the multi-token-prediction layer in the target's checkpoint; or a list of these and
            of loaded drafters, which are merged into one (`MergedDrafter`).
        target: the model to draft for. If given, the pairing is checked immediately, and the drafter gets the target's
            dtype and device; otherwise it is checked in the first `generate` call.
        revision: branch, tag or commit on the Hub.
        subfolder: of the folder or repo, in which the drafter lies, as beside its target.
        token: Hub token for private repos; None for the stored one.
        local_files_only: read from the Hub cache only, without requests.
        dtype: dtype of the drafter; None for the target's, or without a target the checkpoint's.
        device: device of the drafter; None for the target's, or without a target the CPU.
        device_map: in place of `device`, as for transformers' models, but with one device: `"cuda:0"`, `{"": 0}`, or
            "auto" for the target's.
        cache_dir: cache folder of the Hub client.
        acceptance: None for output that is the target's own; see `Drafter.acceptance` for what is not.
        draft_vocab: ids of the target's most frequent tokens, as from `frequent_token_ids`: only these are drafted, so
            that the drafter's head is smaller (FR-Spec). None for all.
        **drafting_options: drafting options, such as `method` and `tree_budget`; for a list, those of the merged
            drafter.

    Raises:
        OSError: the folder or repo does not exist, files are missing, or the Hub cannot be reached.
        ValueError: the files are not a supported drafter, are damaged, or do not fit together; an option is unknown or
            out of range; the drafter does not fit the target.
        TypeError: `target` is not a model.
    """
    if device_map is not None:
        device = _device_of_map(device_map, device)
    common: dict[str, Any] = {
        "token": token, "local_files_only": local_files_only, "dtype": dtype, "device": device, "cache_dir": cache_dir,
    }  # fmt: skip
    if acceptance_rule(acceptance) is not None or draft_vocab is not None:
        drafter = load_drafter(
            path_or_repo, target, revision=revision, subfolder=subfolder, **common, **drafting_options
        )
        drafter.acceptance = acceptance
        if draft_vocab is not None:
            drafter.restrict_vocabulary(draft_vocab)
        return drafter
    if isinstance(path_or_repo, (list, tuple)):
        way_out = "load the drafter that has it separately, and put it into the list."
        _refuse_place(revision, subfolder, f"{len(path_or_repo)} drafters: {way_out}")
        sources = [each if isinstance(each, Drafter) else load_drafter(each, target, **common) for each in path_or_repo]
        return MergedDrafter(*sources, **drafting_options)
    assert not isinstance(path_or_repo, Sequence) or isinstance(path_or_repo, str)
    name = os.fspath(path_or_repo)
    # Compiled and wrapped models are other modules with `generate`.
    if target is not None and not (isinstance(target, nn.Module) and hasattr(target, "generate")):
        raise TypeError(
            f"target={target!r} is a {type(target).__name__}; it must be the loaded target model, or left out."
        )
    target = unwrapped(target)
    asked_dtype = floating_dtype(dtype)
    if device is not None:  # otherwise it is the target's
        usable_device(device)
    source = Source(name, revision, token, local_files_only, cache_dir, subfolder)
    for method in methods_within_targets() if not subfolder else ():
        if (drafter := method.of_target(target, source, **drafting_options)) is not None:
            return drafter
    if is_weightless(name):
        way_out = "leave it out, or name a drafter with a checkpoint."
        _refuse_place(revision, subfolder, f"{name!r}, which has no checkpoint: {way_out}")
        if isinstance(drafting_options.get("drafter"), (str, os.PathLike)):
            drafting_options["drafter"] = load_drafter(drafting_options["drafter"], target, **common)
        return WEIGHTLESS[name](**drafting_options)
    check_spelling(name)
    folder = source.locate([CONFIG_FILE])
    format, fields = read_config(folder, source, registered_formats(), _config_defaults)
    family = FAMILIES[format.family]
    if family.load is not None:
        dtype = asked_dtype or _dtype_of(target)
        language_model: Any = _load_language_model(format, fields, source, folder, dtype, target, drafting_options)
        return language_model.to(_device_for(target) if device is None else device)

    with naming_config(format, name):
        by_config = format.read(fields, None)
    if by_config is not None:
        _, blueprint = make_blueprint(format, by_config.fields, name)
        _check(blueprint, drafting_options, target)

    # The folder of a snapshot is named after its commit; the weights must be from the same commit.
    wanted = ["model*.safetensors", INDEX_FILE, TRAINING_FILE, MEASUREMENTS_FILE, *family.drafter.side_files]
    folder = source.locate(wanted, revision=source.commit_of(folder))
    if not any(folder.glob("model*.safetensors")):
        for file in format.other_weights:
            folder = source.locate([file], revision=source.commit_of(folder))
            if (folder / file).is_file():
                break  # do not download the same weights in another file
    files = weight_files(folder, name, format.other_weights)
    headers = read_headers(files, name)
    with naming_config(format, name):
        reading = format.read(fields, headers)
    assert reading is not None, "the headers are sufficient for every format"
    config, blueprint = make_blueprint(format, reading.fields, name)
    if by_config is None or by_config.fields != reading.fields:  # the headers have changed a field
        _check(blueprint, drafting_options, target)
    side_tensors = family.drafter.side_tensors(folder, name)
    ignorable = re.compile("|".join(blueprint._keys_to_ignore_on_load_unexpected))
    names = {theirs: ours for theirs, ours in reading.names.items() if not ignorable.search(ours)}
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
    dtype = asked_dtype or _dtype_of(target) or _stored_dtype(stored) or floating_dtype(config.dtype)
    drafter = family.drafter.of_tensors(config, {key: tensors[key] for key in stored}, dtype)
    if format.read is not as_it_is:  # a published layout
        drafter.source_layout = source_layout(format, folder, headers, names, loaded, side_tensors, drafter.config)
    drafter.training_record = read_record(folder, TRAINING_FILE) or dict(format.training) or None
    drafter.measurements = read_record(folder, MEASUREMENTS_FILE)
    drafter.load_beside(
        folder,
        lambda patterns: source.locate(patterns, revision=source.commit_of(folder)),
        lambda place: _draft_model(replace(source, name=place, revision=None, subfolder=""), drafter.dtype),
        from_hub=not Path(name).expanduser().is_dir(),
    )
    drafter.set_options(**drafting_options)
    if target is not None:
        drafter.check_pairing(target)
    return drafter.to(_device_for(target) if device is None else device)


def _refuse_place(revision: str | None, subfolder: str, of_what: str) -> None:
    """Raises ValueError if a place within a repo was given for what has none."""
    for setting, value in {"revision": revision, "subfolder": subfolder or None}.items():
        if value is not None:
            raise ValueError(f"{setting}={value!r} was given for {of_what}")


def registered_formats() -> list[Format]:
    """The layouts of this library, of registered families."""
    formats = []
    for family in FAMILIES.values():
        if family.load is None:
            parts = {"own_files": family.own_files, "missing": family.missing}
            formats.append(own_layout(family.name, family.drafter.config_class, family.own_keys, **parts))
    return formats


def _config_defaults(format: Format) -> dict[str, Any]:
    """Defaults of a format's config class, for keys that a newer transformers wrote."""
    config_class = getattr(FAMILIES[format.family].drafter, "config_class", None)
    return {field.name: field.default for field in dataclasses.fields(config_class)} if config_class else {}


def _load_language_model(
    format: Format,
    fields: dict[str, Any],
    source: Source,
    folder: Path,
    dtype: torch.dtype | None,
    target: PreTrainedModel | None,
    options: dict[str, Any],
) -> Drafter:
    """Loads a drafter that is a model of transformers; all checks come before its weights are downloaded."""
    load = FAMILIES[format.family].load
    assert load is not None
    folder = source.locate(TOKENIZER_FILES, revision=source.commit_of(folder))
    with naming_config(format, source.name):
        blueprint: Any = load(fields, source.name, folder, None, False)
    blueprint.set_options(**options)
    if target is not None:
        blueprint.check_target(target)
    wanted = ["model*.safetensors", INDEX_FILE, "generation_config.json", TRAINING_FILE, MEASUREMENTS_FILE]
    folder = source.locate(wanted, revision=source.commit_of(folder))
    stored = read_headers(weight_files(folder, source.name), source.name)
    check_amount(blueprint.model, stored, source.name, format.problems(fields, stored))
    try:
        drafter = load(fields, source.name, folder, dtype, True)
    except (OSError, ValueError):
        raise
    except Exception as error:  # as in naming_config
        raise ValueError(
            f"The files of {source.name!r} cannot be loaded as a {format.name} drafter: they are damaged, or from "
            f"different checkpoints. Copy or download them again. {_text(error)}"
        ) from error
    if isinstance(drafter, PublishedDrafter):
        drafter.training_record = read_record(folder, TRAINING_FILE)
        drafter.measurements = read_record(folder, MEASUREMENTS_FILE)
    drafter.set_options(**options)
    return drafter


def _draft_model(source: Source, dtype: torch.dtype) -> Drafter:
    """The draft model of a drafter such as SpecBranch, loaded as a drafter.

    Raises:
        OSError, ValueError: as `load_drafter`, or it is not a language model.
    """
    folder = source.locate([CONFIG_FILE])
    try:
        format, fields = read_config(folder, source, registered_formats(), _config_defaults)
    except NotADrafterError as error:
        raise ValueError(
            f"{source.name!r} is not a language model of transformers, such as LlamaForCausalLM: {error.found}. A "
            "draft model must be one: copy or download it again, or name another one."
        ) from error
    if FAMILIES[format.family].load is None:
        raise ValueError(f"{source.name!r} is a drafter ({format.name}), not a language model.")
    return _load_language_model(format, fields, source, folder, dtype, None, {})


def check_amount(
    blueprint: nn.Module, stored: Mapping[str, StoredTensor], name: str, differences: Sequence[str]
) -> None:
    """Raises ValueError if a model has far more parameters than its files hold, before memory for them is allocated.

    transformers renames, splits and joins tensors when it loads them, so only the total numbers are compared. If fewer
    parameters are missing than the files hold, loading needs little memory, and its error names the weights.

    Args:
        blueprint: the model on the meta device.
        stored: headers of its files.
        name: name of the checkpoint.
        differences: further differences between the two, for the message.
    """
    held = sum(math.prod(tensor.shape) for tensor in stored.values())
    needed = sum(tensor.numel() for tensor in blueprint.parameters())
    tables = sum(tensor.nbytes for tensor in blueprint.buffers())
    if needed > 2 * held:
        raise ValueError(
            f"{CONFIG_FILE} of {name!r} describes a model of {needed:,} parameters, but its weight files hold "
            f"{held:,}. Nothing was loaded: check that weights and {CONFIG_FILE} are of one checkpoint. "
            f"{'; '.join(differences)}".rstrip()
        )
    if tables > MAX_TABLE_BYTES:
        raise ValueError(
            f"{CONFIG_FILE} of {name!r} describes a model whose buffers need {tables:,} bytes; the maximum is "
            f"{MAX_TABLE_BYTES:,}. The checkpoint is damaged or hostile: nothing was loaded."
        )


def make_blueprint(format: Format, fields: dict[str, Any], name: str) -> tuple[PreTrainedConfig, PretrainedDrafter]:
    """Builds the config, and the drafter on the meta device.

    Raises:
        ValueError: the fields do not describe a drafter of the format; names the field.
    """
    drafter = FAMILIES[format.family].drafter
    with naming_config(format, name):
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
def naming_config(format: Format, name: str) -> Iterator[None]:
    """Names the file in errors that transformers' classes raise for invalid values."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # transformers' classes raise many types of errors for invalid values
        raise ValueError(
            f"{CONFIG_FILE} of {name!r} does not describe a {format.name} drafter. {_text(error)}"
        ) from error


def _text(error: Exception) -> str:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return kind + printable(" ".join(str(error).split()))


def floating_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The floating-point dtype of a name such as "bfloat16"; None for None.

    Raises:
        ValueError: the dtype does not exist, is not a floating-point dtype, or is not supported.
    """
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if found is None and dtype is None:
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype={dtype!r} is not a floating-point type; use for example torch.bfloat16 or 'float32'.")
    if found not in DTYPES.values():
        names = ", ".join(repr(str(each).removeprefix("torch.")) for each in reversed(DTYPES.values()))
        raise ValueError(f"dtype={dtype!r} is not supported: use one of {names}.")
    return found


def usable_device(device: torch.device | str | int | None) -> torch.device:
    """The device; for None the accelerator that torch finds (CUDA, Apple's mps, Intel's xpu), otherwise the CPU.

    Raises:
        ValueError: the device does not exist on this machine.
    """
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:  # unknown, missing, or torch was built without it
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"device={device!r} is not available ({reason}): use 'cpu' or a device that torch lists, or leave it out."
        ) from error


def placed_target(name: str, device: str | None, dtype: str, **settings: Any) -> PreTrainedModel:
    """A whole target on a device of this machine (`usable_device`), in a dtype of a known name or in "auto", its own.

    Raises:
        OSError, ValueError: as `usable_device`, `floating_dtype` and `whole_target`.
    """
    place = usable_device(device)
    if place.type == "meta":
        raise ValueError("device='meta' has no weights: use 'cpu', or leave it out.")
    if dtype != "auto":
        floating_dtype(dtype)  # raises with the known names
    if Path(name).is_dir() and not settings.get("trust_remote_code"):
        _check_target_size(name)
    model: PreTrainedModel = whole_target(name, dtype=dtype, **settings).to(place).eval()
    return model


def _check_target_size(name: str) -> None:
    """Raises ValueError if the config of a target in a folder describes another model than its weights hold."""
    folder = Path(name)
    files = sorted(folder.glob("model*.safetensors"))
    if not files or not (folder / CONFIG_FILE).is_file():
        return  # transformers says what it finds
    with target_errors(name), torch.device("meta"):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if getattr(config, "quantization_config", None) is not None:
            return  # packed weights are fewer numbers than the config's
        blueprint = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    try:
        stored = safetensors_headers(files, name)
    except ValueError as error:
        raise ValueError(f"The files of target {name!r} are damaged: {error}") from error
    check_amount(blueprint, stored, name, [])


def _dtype_of(target: PreTrainedModel | None) -> torch.dtype | None:
    return target.dtype if target is not None and target.dtype.is_floating_point else None


def _stored_dtype(stored: Mapping[str, StoredTensor]) -> torch.dtype | None:
    """The dtype of most stored weights; None if there are none."""
    floating = Counter(tensor.dtype for tensor in stored.values() if tensor.dtype in DTYPES)
    return DTYPES[floating.most_common(1)[0][0]] if floating else None


def _device_of_map(device_map: Any, device: Any) -> Any:
    """The one device of a `device_map`; None for the target's."""
    if device is not None:
        raise ValueError(f"device={device!r} and device_map={device_map!r} were both given: leave one of them out.")
    if not isinstance(device_map, dict):
        return None if device_map == "auto" else device_map
    if len(set(map(str, device_map.values()))) != 1:
        raise ValueError(
            f"device_map={device_map!r} does not name one device, and a drafter is not divided: give that of the "
            'target\'s first layer, as in device_map={"": 0}, or leave it out.'
        )
    return next(iter(device_map.values()))


def _device_for(target: PreTrainedModel | None) -> torch.device:
    # The weights of an offloaded target are on the meta device between forwards.
    return target.device if target is not None and target.device.type != "meta" else torch.device("cpu")


LOADERS.append(load_drafter)
