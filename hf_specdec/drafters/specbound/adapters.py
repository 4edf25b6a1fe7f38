"""Exit heads on disk: one PEFT LoRA adapter per exit layer, on the target's own head.

`PeftModel.from_pretrained(target, checkpoint, subfolder="exit-layer-04")` reads `<checkpoint>/exit-layer-04/`: the
target with the exit head of its 4th layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file, save_file
from torch import Tensor

SIDE_FILES = ("exit-layer-*/adapter_config.json", f"exit-layer-*/{SAFETENSORS_WEIGHTS_NAME}")
_PARTS = ("lora_A", "lora_B")


def folder_of(layer: int) -> str:
    """The folder of an exit layer's adapter within a checkpoint.

    Example:
        >>> folder_of(4)
        'exit-layer-04'
    """
    return f"exit-layer-{layer:02d}"


def write_adapter(folder: Path, down: Tensor, up: Tensor, *, head_module: str, base_model: str | None) -> None:
    """Writes one adapter.

    Args:
        folder: created if needed.
        down: [rank, hidden], `lora_A`.
        up: [vocab, rank], `lora_B`.
        head_module: name of the target's head.
        base_model: name of the target, if known.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rank = len(down)
    LoraConfig(
        r=rank,
        lora_alpha=rank,  # lora_alpha / r scales the update: 1
        target_modules=[head_module],
        base_model_name_or_path=base_model,
        task_type="CAUSAL_LM",
        inference_mode=True,
    ).save_pretrained(str(folder))
    parts = {"lora_A": down, "lora_B": up}
    save_file(
        {f"base_model.model.{head_module}.{part}.weight": tensor.contiguous().cpu() for part, tensor in parts.items()},
        folder / SAFETENSORS_WEIGHTS_NAME,
        metadata={"format": "pt"},
    )


def remove_adapters(checkpoint: Path, keep: Sequence[int]) -> None:
    """Removes adapters of earlier saves for exit layers other than `keep`, which would be loaded too."""
    kept = {folder_of(layer) for layer in keep}
    for pattern in SIDE_FILES:
        for file in checkpoint.glob(pattern):
            if file.parent.name not in kept:
                file.unlink()
    for folder in checkpoint.glob("exit-layer-*"):
        if not any(folder.iterdir()):
            folder.rmdir()


def read_adapters(checkpoint: Path, name: str) -> dict[str, Tensor]:
    """The adapters of a checkpoint, by their names in the drafter's state dict; empty without such folders.

    Args:
        checkpoint: its folder.
        name: what the user has passed, for messages.

    Raises:
        ValueError: an adapter is not a LoRA of one module, or is damaged; names the file.
    """
    found: dict[str, Tensor] = {}
    for folder in sorted(checkpoint.glob("exit-layer-*")):
        where = f"{folder.name} of {name!r}"
        layer = folder.name.removeprefix("exit-layer-")
        if not layer.isdigit():
            raise ValueError(f"{where} does not end in a layer number; adapter folders are {folder_of(4)!r}, ...")
        try:
            config = LoraConfig.from_pretrained(str(folder))
            tensors = load_file(folder / SAFETENSORS_WEIGHTS_NAME)
            if type(config.r) is not int or config.r < 1 or not 0 <= config.lora_alpha < float("inf"):
                raise ValueError(
                    f"r is {config.r!r} and lora_alpha {config.lora_alpha!r}; both must be numbers above 0"
                )
        except Exception as error:  # foreign files, read by foreign classes: any exception is possible
            raise ValueError(
                f"{where} cannot be read as a PEFT LoRA adapter ({type(error).__name__}: {error}). Copy or download "
                "the checkpoint again."
            ) from error
        parts = {part: [key for key in tensors if key.endswith(f".{part}.weight")] for part in _PARTS}
        if len(tensors) != 2 or any(len(keys) != 1 for keys in parts.values()):
            raise ValueError(
                f"{where} holds {', '.join(sorted(tensors)) or 'no tensors'}; an exit head is the lora_A and lora_B "
                "of one module, the target's head."
            )
        rank = config.r**0.5 if config.use_rslora else config.r
        scale = config.lora_alpha / rank
        found[f"heads.{int(layer)}.lora_A"] = tensors[parts["lora_A"][0]]
        update = tensors[parts["lora_B"][0]]
        found[f"heads.{int(layer)}.lora_B"] = update if scale == 1 else (update.float() * scale).to(update.dtype)
    return found


def sample_of(weight: Tensor, rows: int, count: int = 32) -> Tensor:
    """[count] float32: values of a matrix at indices that depend only on `rows` and the number of columns.

    Fewer values if the matrix has fewer rows.
    """
    flat = weight.detach().flatten()
    indices = torch.arange(count, device=flat.device) * (rows * weight.shape[1] // count)
    return flat[indices[indices < flat.numel()]].float().cpu()
