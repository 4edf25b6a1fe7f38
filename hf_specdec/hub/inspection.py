"""inspect_drafter: the format and problems of a checkpoint, from its config and the headers of its weights.

It reads no weights: headers are compared with the drafter built on the meta device. Weights on the Hub are downloaded
only if the config does not determine the format. It checks what `load_drafter` checks before it loads weights; the
pairing with a target is checked by `load_drafter(..., target=model)`.
"""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, is_offline_mode
from huggingface_hub.errors import EntryNotFoundError, NotASafetensorsRepoError

from hf_specdec.drafting.registry import FAMILIES, check_has_checkpoint, methods_within_targets
from hf_specdec.hub.checkpoint import read_config
from hf_specdec.hub.files import CONFIG_FILE, INDEX_FILE, Source, read_json, weight_files
from hf_specdec.hub.formats.base import Format, StoredTensor
from hf_specdec.hub.loading import check_amount, make_blueprint, naming_config, registered_formats
from hf_specdec.hub.tensors import differences, read_headers
from hf_specdec.hub.wording import printable
from hf_specdec.unsafe_keys import CODE

# The fields that a report shows; also found in `dflash_config`.
_FACTS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "draft_vocab_size", "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "backbone_hidden_size",
    "num_centroids", "sample_from_anchor", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
    "norm_before_head", "medusa_num_heads", "medusa_num_layers", "diffspec_draft_token_num", "rank_classes",
    "rope_parameters",
)  # fmt: skip
MOST_PROBLEMS = 12  # number of different tensors that are listed


@dataclass
class Inspection:
    """Description of a checkpoint; `str(inspection)` is the report that `hf-specdec inspect` prints.

    Attributes:
        name: the folder or Hub id.
        format: name of the layout; None if it is unknown.
        family: the family that loads it, a folder under `hf_specdec/methods/`; None if no family does.
        target: the target that the checkpoint names.
        target_revision: revision of the target, if the checkpoint names one.
        facts: sizes and settings, by the field names of this library.
        tensors: stored name -> shape.
        dtypes: dtype, by its name in safetensors -> number of tensors.
        files: names of the weight files.
        notes: keys of its config that are dropped or have no effect, other warnings, and a multi-token-prediction layer
            that it holds as a target.
        problems: reasons why it does not load, or drafts badly; empty if there are none.
    """

    name: str
    format: str | None = None
    family: str | None = None
    target: str | None = None
    target_revision: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, int] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def num_parameters(self) -> int:
        """Number of elements of all tensors."""
        return sum(map(math.prod, self.tensors.values()))

    def __str__(self) -> str:
        target = self.target or "not named"
        rows = {
            "format": self.format or "unknown",
            "loads as": self.family or "nothing",
            "target": f"{target} at {self.target_revision}" if self.target_revision else target,
        }
        rows |= {name: str(value) for name, value in self.facts.items()}
        if self.tensors:
            types = ", ".join(f"{count} {kind}" for kind, count in self.dtypes.items())
            rows["weights"] = f"{self.num_parameters:,} numbers in {len(self.tensors)} tensors ({types})"
            rows["files"] = ", ".join(self.files)
            largest = sorted(self.tensors.items(), key=lambda item: -math.prod(item[1]))[:3]
            rows["largest"] = ", ".join(f"{name} {list(shape)}" for name, shape in largest)
        width = max(map(len, rows)) + 2
        lines = [self.name, *(f"  {name:<{width}}{printable(value)}" for name, value in rows.items())]
        if self.notes:
            lines += ["notes:", *(f"  - {printable(note)}" for note in self.notes)]
        if not self.problems:
            return "\n".join([*lines, "  no problems found"])
        return "\n".join([*lines, "problems:", *(f"  - {printable(problem)}" for problem in self.problems)])


def inspect_drafter(
    path_or_repo: str | os.PathLike[str],
    *,
    revision: str | None = None,
    subfolder: str = "",
    token: str | bool | None = None,
    local_files_only: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Inspection:
    """Describes a drafter and its problems, without loading it.

    Args:
        path_or_repo: a local folder, or a Hub id `owner/name`.
        revision: branch, tag or commit on the Hub.
        subfolder: of the folder or repo, in which the drafter lies.
        token: Hub token for private repos; None for the stored one.
        local_files_only: read from the Hub cache only, without requests.
        cache_dir: cache folder of the Hub client.

    Raises:
        OSError: the folder or repo does not exist, or the Hub cannot be reached. Problems with the files of a
            checkpoint are reported, not raised.
        ValueError: the name is neither a folder nor a Hub id.
    """
    check_has_checkpoint(os.fspath(path_or_repo))
    source = Source(os.fspath(path_or_repo), revision, token, local_files_only, cache_dir, subfolder)
    found = Inspection(source.name)
    folder = source.locate([CONFIG_FILE])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fill(found, source, folder)
    found.notes += [str(warning.message) for warning in caught]
    with suppress(OSError, ValueError):  # which are among the problems
        fields = read_json(folder / CONFIG_FILE, found.name)
        # `found.tensors` is empty if the config was refused.
        names: Collection[str] = found.tensors or read_headers(weight_files(folder, found.name), found.name)
        said = [method.in_target(names, fields) for method in methods_within_targets()]
        found.notes += [note for note in said if note is not None]
    return found


def _fill(found: Inspection, source: Source, folder: Path) -> None:
    """Fills in the attributes, except notes, for which it warns."""
    try:
        format, fields = read_config(
            folder,
            source,
            registered_formats(),
            recognised=lambda format: setattr(found, "format", format.name),
        )
        found.family = format.family
        for key in (key for key in CODE if fields.get(key)):
            warnings.warn(f"{CONFIG_FILE} names Python code ({key}), which is never run here.", stacklevel=2)
        headers = _headers(source, folder, format)
        beside = source.locate(list(format.beside), revision=source.commit_of(folder)) if format.beside else folder
        held = {name for file, names in format.beside.items() if (beside / file).is_file() for name in names}
        _describe(found, format, fields, headers, held, folder)
        local = Path(source.name).expanduser().is_dir()
        found.problems += format.missing(fields, folder if local else None)
        if not found.problems and local:
            found.problems += _own_files(source, folder, format, fields)
    except (OSError, ValueError) as error:
        found.problems.append(str(error))


def _headers(source: Source, folder: Path, format: Format) -> dict[str, StoredTensor]:
    """Headers of the weight files; of files on the Hub only the first bytes are downloaded."""
    local = Path(source.name).expanduser().is_dir() or source.local_files_only or is_offline_mode()
    if local or source.subfolder:  # the Hub client reads headers at the top of a repo only
        folder = source.locate(
            ["model*.safetensors", INDEX_FILE, *format.other_weights], revision=source.commit_of(folder)
        )
        return read_headers(weight_files(folder, source.name, format.other_weights), source.name)
    api = HfApi(token=source.token)
    try:
        parts = api.get_safetensors_metadata(source.name, revision=source.commit_of(folder)).files_metadata
    except NotASafetensorsRepoError as error:
        parts = {}
        for file in (file for file in format.other_weights if file.endswith(".safetensors")):
            with suppress(EntryNotFoundError):
                parts[file] = api.parse_safetensors_file_metadata(source.name, file, revision=source.commit_of(folder))
        if not parts:
            raise ValueError(
                "There are no safetensors weights in the repo; pickles are read only in a local folder."
            ) from error
    return {
        name: StoredTensor(tuple(tensor.shape), tensor.dtype, Path(file))
        for file, content in parts.items()
        for name, tensor in content.tensors.items()
    }


def _own_files(source: Source, folder: Path, format: Format, fields: dict[str, Any]) -> list[str]:
    """Problems with the further safetensors files of a layout, in a local folder."""
    problems = []
    own_files = format.own_files(fields)
    source.locate([f"{Path(file).parent}/*" for file in own_files])  # refuses links out of the folder
    for file, parts in own_files.items():
        if not (folder / file).is_file():
            problems.append(f"{file} is missing")
            continue
        stored = read_headers([folder / file], source.name)
        for end, shape in parts.items():
            if [tensor.shape for name, tensor in stored.items() if name.endswith(end)] != [shape]:
                held = {name: list(tensor.shape) for name, tensor in stored.items()}
                problems.append(f"{file} holds {held}, but {CONFIG_FILE} makes one ...{end} {list(shape)}")
    return problems


def _describe(
    found: Inspection,
    format: Format,
    fields: dict[str, Any],
    headers: dict[str, StoredTensor],
    held: set[str],
    folder: Path,
) -> None:
    """Fills in what follows from config and headers; `held` are names of tensors in further files, not read here."""
    found.tensors = {name: tensor.shape for name, tensor in headers.items()}
    found.dtypes = dict(Counter(tensor.dtype for tensor in headers.values()).most_common())
    found.files = sorted({tensor.file.name for tensor in headers.values()})
    try:
        reading = format.read(fields, headers)
    except ValueError as error:
        found.problems.append(f"{CONFIG_FILE}: {error}")
        return
    assert reading is not None, "the headers are sufficient for every format"
    ours = reading.fields
    found.target, found.target_revision = ours.get("target_name_or_path"), ours.get("target_revision")
    nested = ours.get("dflash_config") or {}
    found.facts = {
        name: {**ours, **nested}[name] for name in _FACTS if {**ours, **nested}.get(name) not in (None, False)
    }
    load = FAMILIES[format.family].load
    if load is not None:  # a model of transformers
        found.problems += format.problems(fields, headers)
        try:
            with naming_config(format, found.name):
                model = load(fields, found.name, folder, None, False).model
            check_amount(model, headers, found.name, [])
        except ValueError as error:
            found.problems.append(str(error))
            return
        expected = model.state_dict()
        if not found.problems and headers.keys() <= expected.keys():  # otherwise transformers renames some
            tied = getattr(model, "all_tied_weights_keys", {})
            own = {name: tensor for name, tensor in expected.items() if name in headers or name not in tied}
            _list_differences(found, own, headers)
        return
    stored = reading.stored(headers)
    _, blueprint = make_blueprint(format, ours, found.name)
    tensors = blueprint.main_tensors() or blueprint.state_dict()
    expected = {name: tensor for name, tensor in tensors.items() if name not in held - set(stored)}
    _list_differences(found, expected, stored)


def _list_differences(found: Inspection, expected: dict[str, Any], stored: dict[str, StoredTensor]) -> None:
    problems = [f"{kind}: {each}" for kind, parts in differences(expected, stored).items() for each in parts]
    found.problems += problems[:MOST_PROBLEMS]
    if len(problems) > MOST_PROBLEMS:
        found.problems.append(f"and {len(problems) - MOST_PROBLEMS} more")
