"""The frozen target's side of training: hidden states of the tapped layers, on the fly or cached to disk.

A drafter trains on what the target computed for text that is already there, so one plain forward over whole rows gives
everything. `TargetReader` runs it; `cache_states` writes its results once and `CachedStates` reads them back row by
row, for runs that pass over the same text several times.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from hf_specdec.decoding.logits_process import SoftCapLogitsProcessor
from hf_specdec.decoding.taps import tap_layer
from hf_specdec.training.progress import TokenProgress


@dataclass(frozen=True)
class TargetStates:
    """What a drafter's training reads of the target for a batch of rows.

    Attributes:
        features: [batch, seq, taps * hidden], outputs of the tapped layers joined in the order asked for.
        last_hidden: [batch, seq, hidden], input of the target's head, or None unless asked for.
    """

    features: Tensor
    last_hidden: Tensor | None


class TargetReader:
    """Runs the frozen target over rows of tokens.

    Args:
        model: the target; it is put in evaluation mode and its parameters stop requiring gradients.
        layers: 0-based decoder layers to read, in the order in which to join them; -1 is what enters the first, and
            their number what leaves the decoder, past its final norm.
        last_hidden: also read what enters the head, which the losses that compare distributions need.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], *, last_hidden: bool = False) -> None:
        self.model = model.eval().requires_grad_(False)
        self.layers = tuple(layers)
        self.wants_last_hidden = last_hidden
        self.lm_head: nn.Module = model.get_output_embeddings()
        cap = getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
        self._soft_cap = SoftCapLogitsProcessor(cap)
        self._head_checked = False

    def of_batch(self, batch: Mapping[str, Tensor]) -> TargetStates:
        """The cached states that the batch carries, or those of a forward over its `input_ids`.

        Raises:
            ValueError: the batch carries features without the last hidden states that are needed here.
        """
        if "features" not in batch:
            return self.read(batch["input_ids"])
        if self.wants_last_hidden and "last_hidden" not in batch:
            raise ValueError(
                "The cached states hold no last_hidden, which this loss needs; cache them again with a reader made "
                'with last_hidden=True, or train with loss="ce".'
            )
        return TargetStates(batch["features"], batch.get("last_hidden"))

    @torch.no_grad()
    def read(self, input_ids: Tensor) -> TargetStates:
        """States at every position of [batch, seq] rows. Padding belongs at the end, where causality hides it."""
        taken: dict[int, Tensor] = {}

        handles = []
        try:
            for index in dict.fromkeys(self.layers):
                handles.append(tap_layer(self.model, index, functools.partial(taken.__setitem__, index)))
            # The decoder alone: logits of every position are the most expensive thing that nobody reads.
            last_hidden = self.model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state
        finally:
            for handle in handles:
                handle.remove()
        device = input_ids.device
        features = torch.cat([taken[index].to(device) for index in self.layers], dim=-1)
        if not self.wants_last_hidden:
            return TargetStates(features, None)
        self._check_head(input_ids[:1], last_hidden[:1])
        return TargetStates(features, last_hidden.to(device))

    def head(self, hidden: Tensor) -> Tensor:
        """The target's logits: [positions, hidden] -> [positions, vocab] float32."""
        logits = self.lm_head(hidden.to(next(self.lm_head.parameters()).dtype)).float()
        return self._soft_cap(None, logits)

    def _check_head(self, input_ids: Tensor, hidden: Tensor) -> None:
        """Raises ValueError, once, if the target does more to its logits than its head and a soft cap."""
        if self._head_checked:
            return
        logits = self.model(input_ids=input_ids, use_cache=False).logits.float()
        apart = (self.head(hidden) - logits).abs().max().item()
        # Two kernels of a low-precision head may round differently; a missing scale is off by far more.
        if apart > 0.05 * logits.abs().max().item() + 1e-3:
            raise ValueError(
                f"The logits of target {type(self.model).__name__} differ by {apart:.3g} from its head applied to its "
                'last hidden state, so it transforms them in a way unknown here; train with loss="ce".'
            )
        self._head_checked = True


def settings_of(config: PreTrainedConfig | GenerationConfig) -> dict[str, Any]:
    """What a config says of the model, without where it came from and what it was loaded with."""
    beside = ("_name_or_path", "architectures", "dtype", "transformers_version")
    settings: dict[str, Any] = json.loads(
        config.to_json_string(use_diff=False),
        object_hook=lambda fields: {name: value for name, value in fields.items() if name not in beside},
    )
    return settings


def fingerprint(model: PreTrainedModel) -> str:
    """A short hash of a model's config and of a sample of every weight, to tell whether a cache belongs to it."""
    settings = json.dumps(settings_of(model.config), sort_keys=True)
    digest = hashlib.sha256(f"{type(model).__name__} {model.dtype} {settings}".encode())
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 64)][:64].to(device="cpu", dtype=torch.float32)
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]


@torch.no_grad()
def cache_states(
    reader: TargetReader,
    rows: Sequence[Mapping[str, Any]],
    folder: str | Path,
    *,
    batch_size: int = 16,
    rows_per_file: int = 256,
    dtype: torch.dtype = torch.bfloat16,
) -> CachedStates:
    """Writes the target's states of every row to `folder`, or finds them there, and returns the rows with them.

    Files appear one by one under their final name, so an interrupted run goes on where it stopped. A folder made for
    other rows, layers or another target is told apart by a name derived from all three; `folder` may hold several.

    Args:
        reader: the target's.
        rows: a map-style dataset of the columns in `data.py`.
        folder: parent of the cache.
        batch_size: rows per target forward.
        rows_per_file: rows per safetensors file.
        dtype: of the states on disk.
    """
    input_ids = torch.tensor([row["input_ids"] for row in rows])
    identity = {
        "target": fingerprint(reader.model),
        "layers": list(reader.layers),
        "last_hidden": reader.wants_last_hidden,
        "dtype": str(dtype),
        "rows": list(input_ids.shape),
        "tokens": hashlib.sha256(input_ids.numpy().tobytes()).hexdigest(),
        "rows_per_file": rows_per_file,
    }
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    own = Path(folder) / f"states-{name}"
    own.mkdir(parents=True, exist_ok=True)
    (own / "identity.json").write_text(json.dumps(identity, indent=2) + "\n")
    files = {start: own / f"rows-{start:08d}.safetensors" for start in range(0, len(input_ids), rows_per_file)}
    missing = {start: file for start, file in files.items() if not file.exists()}
    device = reader.model.device
    with TokenProgress(
        "target states", sum(input_ids[start : start + rows_per_file].numel() for start in missing)
    ) as progress:
        for start, file in missing.items():
            parts: dict[str, list[Tensor]] = {"features": [], "last_hidden": []}
            for chunk in input_ids[start : start + rows_per_file].split(batch_size):
                states = reader.read(chunk.to(device))
                parts["features"].append(states.features.to("cpu", dtype))
                if states.last_hidden is not None:
                    parts["last_hidden"].append(states.last_hidden.to("cpu", dtype))
                progress.add(chunk.numel())
            unfinished = file.with_suffix(f".{os.getpid()}.tmp")
            save_file({key: torch.cat(value) for key, value in parts.items() if value}, unfinished)
            unfinished.replace(file)
    return CachedStates(rows, list(files.values()), rows_per_file)


class CachedStates(Dataset):
    """Rows with the target's states next to their tokens; states are read from disk when a row is asked for."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], files: Sequence[Path], rows_per_file: int) -> None:
        self.rows, self.files, self.rows_per_file = rows, list(files), rows_per_file
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, place = divmod(index, self.rows_per_file)
        if number not in self._open:
            self._open[number] = safe_open(self.files[number], framework="pt")
        file = self._open[number]
        # Read by slice: the file is mapped, and only the pages of this row are touched.
        states = {key: file.get_slice(key)[place] for key in file.keys()}  # noqa: SIM118 - no dict
        return dict(self.rows[index]) | states

    def __getstate__(self) -> dict[str, Any]:
        # Open files do not travel to the processes of a DataLoader.
        return self.__dict__ | {"_open": {}}
