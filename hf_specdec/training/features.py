"""The frozen target's side of training: hidden states of the tapped layers, computed in each step or cached on disk.

The text of a row is given, so one target forward over whole rows computes all states. `TargetReader` runs it.
`cache_states` writes the states once and `CachedStates` reads them back row by row, for several passes over the same
text. Rows are stored without their padding. With a reader of no states, `reader.only([])`, the rows come back alone,
and each step computes their states.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from hf_specdec.decoding.targets.modules import apply_head
from hf_specdec.decoding.targets.taps import decoder_states, tap_layer
from hf_specdec.drafting.draft_logits import SoftCapLogitsProcessor
from hf_specdec.drafting.vocabulary import HeadRows
from hf_specdec.progress import Progress
from hf_specdec.training.losses import MAX_CHUNK_ELEMENTS
from hf_specdec.training.source import Rows
from hf_specdec.training.vocabulary import draft_ids


@dataclass(frozen=True)
class TargetStates:
    """The target's states of a batch of rows.

    Attributes:
        features: [batch, seq, taps * hidden], outputs of the tapped layers, concatenated in the reader's order.
        last_hidden: [batch, seq, hidden], input of the target's head; None if the reader does not read it.
    """

    features: Tensor
    last_hidden: Tensor | None


class TargetReader:
    """Runs the frozen target over rows of tokens.

    Args:
        model: the target; sets evaluation mode and turns off the gradients of its parameters.
        layers: 0-based decoder layers to read, in the order of concatenation; -1 is the input of the first layer, and
            the number of layers is the output of the decoder after its final norm.
        last_hidden: also read the input of the head; the losses that compare distributions need it.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], *, last_hidden: bool = False) -> None:
        self.model = model.eval().requires_grad_(False)
        self.layers = tuple(layers)
        self.wants_last_hidden = last_hidden
        self.lm_head: nn.Module = model.get_output_embeddings()
        cap = getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
        self._soft_cap = SoftCapLogitsProcessor(cap)
        self._head_checked = False

    def only(self, layers: Sequence[int | None]) -> TargetReader:
        """A reader of these layers of the same target; None stands for the input of the head."""
        other = copy.copy(self)
        other.layers = tuple(layer for layer in layers if layer is not None)
        other.wants_last_hidden = None in layers
        return other

    def of_batch(self, batch: Mapping[str, Tensor]) -> TargetStates:
        """The cached states in the batch, or the states of a forward over its `input_ids`.

        Raises:
            ValueError: the batch has features but not the last hidden states that this reader needs.
        """
        if "features" not in batch:
            return self.read(batch["input_ids"])
        if self.wants_last_hidden and "last_hidden" not in batch:
            raise ValueError(
                "This loss needs last_hidden, but the cached states have none: cache them again with a TargetReader "
                'made with last_hidden=True, or train with loss="ce".'
            )
        return TargetStates(batch["features"], batch.get("last_hidden"))

    @torch.no_grad()
    def read(self, input_ids: Tensor) -> TargetStates:
        """States at every position of [batch, seq] rows. Padding must be at the end, where no token attends to it."""
        taken: dict[int, Tensor] = {}
        with ExitStack() as taps:
            for index in dict.fromkeys(self.layers):
                taps.callback(tap_layer(self.model, index, functools.partial(taken.__setitem__, index)).remove)
            # The decoder without the head: the logits of all positions would be expensive and are not used.
            last_hidden = decoder_states(self.model, input_ids)
        parts = [taken[index].to(input_ids.device) for index in self.layers]
        features = torch.cat(parts, dim=-1) if parts else last_hidden.new_empty(*input_ids.shape, 0)
        if not self.wants_last_hidden:
            return TargetStates(features, None)
        self._check_head(input_ids[:1], last_hidden[:1])
        return TargetStates(features, last_hidden.to(input_ids.device))

    def head(self, hidden: Tensor, target_ids: Tensor | None = None) -> Tensor:
        """The target's logits, of these tokens or of all: [..., hidden] -> [..., tokens] float32."""
        head = self.lm_head if target_ids is None else HeadRows(self.lm_head, target_ids.to(hidden.device))
        return self._soft_cap(None, apply_head(head, hidden))

    def draft_labels(self, hidden: Tensor, target_ids: Tensor | None, *, whole: bool) -> tuple[Tensor, Tensor]:
        """The target's logits over a draft vocabulary, and its most probable token.

        Args:
            hidden: [..., hidden], input of the target's head.
            target_ids: [draft_vocab] int64, ascending; None for the whole vocabulary.
            whole: take the most probable of all tokens, which computes the whole head; False: of `target_ids` only.

        Returns:
            logits [..., draft_vocab] float32, and the most probable token [...] int64 as a draft id, -1 if it is not in
            the draft vocabulary.
        """
        if target_ids is None or not whole:
            logits = self.head(hidden, target_ids)
            return logits, logits.argmax(-1)
        best_ids, logits = self.labels(hidden, target_ids)
        return logits, draft_ids(best_ids, target_ids.to(hidden.device))

    def labels(self, hidden: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The most probable of all tokens, and the logits of these; at most `MAX_CHUNK_ELEMENTS` logits at a time.

        Args:
            hidden: [..., positions, hidden], input of the target's head.
            target_ids: [draft_vocab] int64.

        Returns:
            token ids [..., positions] int64, and logits [..., positions, draft_vocab] float32.
        """
        length = max(1, MAX_CHUNK_ELEMENTS // self.model.config.get_text_config(decoder=True).vocab_size)
        chunks = map(self.head, hidden.flatten(0, -2).split(length))
        found = [(logits.argmax(-1), logits[:, target_ids.to(logits.device)]) for logits in chunks]
        best_ids, logits = (torch.cat(parts).unflatten(0, hidden.shape[:-1]) for parts in zip(*found, strict=True))
        return best_ids, logits

    def _check_head(self, input_ids: Tensor, hidden: Tensor) -> None:
        """Raises ValueError if the target's logits are not its head's, with a soft cap if set. Checks once."""
        if self._head_checked:
            return
        logits = self.model(input_ids=input_ids, use_cache=False).logits.float()
        apart = (self.head(hidden) - logits).abs().max().item()
        # Two kernels of a low-precision head may round differently; a missing scale differs by much more.
        if apart > 0.05 * logits.abs().max().item() + 1e-3:
            raise ValueError(
                f"The logits of target {type(self.model).__name__} differ by {apart:.3g} from its head applied to its "
                'last hidden state: it transforms them in a way that is not supported. Train with loss="ce".'
            )
        self._head_checked = True


def settings_of(config: PreTrainedConfig | GenerationConfig) -> dict[str, Any]:
    """A config without the keys that depend on where and how it was loaded."""
    ignored = ("_name_or_path", "architectures", "dtype", "transformers_version")
    settings: dict[str, Any] = json.loads(
        config.to_json_string(use_diff=False),
        object_hook=lambda fields: {name: value for name, value in fields.items() if name not in ignored},
    )
    return settings


def fingerprint(model: PreTrainedModel, dtype: torch.dtype | None = None) -> str:
    """A short hash of a model's config and of a sample of every weight; caches are named after it.

    Args:
        model: the model to hash.
        dtype: hash the weights as converted to this dtype; None for the model's own.
    """
    dtype = dtype or model.dtype
    settings = json.dumps(settings_of(model.config), sort_keys=True)
    digest = hashlib.sha256(f"{type(model).__name__} {dtype} {settings}".encode())
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 64)][:64].to("cpu", dtype).float()
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]


@torch.no_grad()
def cache_states(
    reader: TargetReader,
    rows: Rows,
    folder: str | Path,
    *,
    batch_size: int = 16,
    rows_per_file: int = 256,
    dtype: torch.dtype = torch.bfloat16,
    worker: tuple[int, int] = (0, 1),
) -> CachedStates:
    """Writes the target's states of every row that are not yet in `folder`, and returns the rows with their states.

    A file holds one layer of some rows and is named after them: drafters that read the same layers share its files, and
    only added rows are computed. A file gets its final name when it is complete, so an interrupted run can be
    continued. Each target has its own subfolder.

    Args:
        reader: the target's.
        rows: a map-style dataset with the columns of `data.py`.
        folder: parent of the cache.
        batch_size: rows per target forward; the rows of a file are sorted by length.
        rows_per_file: rows per safetensors file.
        dtype: of the states on disk.
        worker: (rank, number of workers); this call writes every n-th file. The result can be read when all workers
            have written their files.
    """
    token_ids = [list(row["input_ids"][: int(row["length"])]) for row in rows]
    parts = [token_ids[start : start + rows_per_file] for start in range(0, len(token_ids), rows_per_file)]
    names = [hashlib.sha256(json.dumps(part).encode()).hexdigest()[:16] for part in parts]
    own = Path(folder) / f"states-{fingerprint(reader.model)}-{str(dtype).removeprefix('torch.')}"
    cached = CachedStates(rows, own, reader.layers, reader.wants_last_hidden, rows_per_file, names)
    rank, workers = worker
    missing = {number: lacking for number in range(rank, len(parts), workers) if (lacking := cached.missing(number))}
    total = sum(len(ids) for number in missing for ids in parts[number])
    with Progress("target states", total, unit="tokens", shown=rank == 0) as progress:
        for number, layers in missing.items():
            found = _read_rows(reader.only(layers), parts[number], batch_size, dtype, progress)
            for layer, states in found.items():
                file = cached.file(layer, number)
                own.mkdir(parents=True, exist_ok=True)
                unfinished = file.with_suffix(f".{os.getpid()}.tmp")
                save_file(states, unfinished)
                unfinished.replace(file)
    return cached


def _read_rows(
    reader: TargetReader, token_ids: Sequence[list[int]], batch_size: int, dtype: torch.dtype, progress: Progress
) -> dict[int | None, dict[str, Tensor]]:
    """Per layer (None: input of the head) the states [tokens, hidden] of each row, by the row's index as a string."""
    found: dict[int | None, dict[str, Tensor]] = {}
    order = sorted(range(len(token_ids)), key=lambda index: len(token_ids[index]))
    for first in range(0, len(order), batch_size):
        batch = {index: torch.tensor(token_ids[index]) for index in order[first : first + batch_size]}
        padded = nn.utils.rnn.pad_sequence(list(batch.values()), batch_first=True)
        states = reader.read(padded.to(reader.model.device))
        parts = states.features.chunk(max(1, len(reader.layers)), dim=-1)
        read: dict[int | None, Tensor] = dict(zip(reader.layers, parts, strict=False))  # no layers: one empty part
        if states.last_hidden is not None:
            read[None] = states.last_hidden
        for layer, values in read.items():
            of_layer = found.setdefault(layer, {})
            for row, (index, ids) in zip(values.to("cpu", dtype), batch.items(), strict=True):
                of_layer[str(index)] = row[: len(ids)].clone()
        progress.update(sum(map(len, batch.values())))
    return found


@dataclass(eq=False)
class CachedStates(Dataset):
    """Rows with their tokens and the target's states; the states of a row are read from disk on access.

    Attributes:
        rows: with the columns of `data.py`; their padding is removed on access.
        folder: of the files.
        layers: layers of `features`, in the order of concatenation.
        last_hidden: whether rows have `last_hidden`.
        rows_per_file: rows per file.
        names: one per file, a hash of its rows.
    """

    rows: Rows
    folder: Path
    layers: Sequence[int]
    last_hidden: bool
    rows_per_file: int
    names: Sequence[str]

    def __post_init__(self) -> None:
        self.lengths = [int(row["length"]) for row in self.rows]
        self._open: dict[Path, Any] = {}

    def file(self, layer: int | None, number: int) -> Path:
        """The file of a layer with this number; a layer of None is the input of the head."""
        kind = "last-hidden" if layer is None else f"layer-{layer}"
        return self.folder / f"{kind}-{self.names[number]}.safetensors"

    def missing(self, number: int) -> list[int | None]:
        """The layers that have no file with this number."""
        wanted: list[int | None] = [*dict.fromkeys(self.layers), *([None] if self.last_hidden else [])]
        return [layer for layer in wanted if not self.file(layer, number).exists()]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, length = dict(self.rows[index]), self.lengths[index]
        row["input_ids"] = row["input_ids"][:length]
        if not self.layers and not self.last_hidden:
            return row
        parts = [self._read(layer, index) for layer in self.layers]
        row["features"] = torch.cat(parts, -1) if parts else torch.empty(length, 0)
        return row | ({"last_hidden": self._read(None, index)} if self.last_hidden else {})

    def _read(self, layer: int | None, index: int) -> Tensor:
        number, row = divmod(index, self.rows_per_file)
        file = self.file(layer, number)
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        states: Tensor = self._open[file].get_tensor(str(row))  # the file is mapped: only this row is read
        return states

    def __getstate__(self) -> dict[str, Any]:
        # Open files cannot be pickled for the worker processes of a DataLoader.
        return self.__dict__ | {"_open": {}}
