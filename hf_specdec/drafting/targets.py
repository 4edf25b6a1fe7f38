"""Loads a target and its tokenizer, and checks that its files hold all of it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def whole_target(name: str, *, trust_remote_code: bool = False, **settings: Any) -> PreTrainedModel:
    """A target with all its weights; transformers initialises missing ones randomly, with only a warning.

    Args:
        name: a folder or a Hub id.
        trust_remote_code: whether Python code of the checkpoint may run.
        settings: for `from_pretrained`.

    Raises:
        OSError: as `from_pretrained`.
        ValueError: as `from_pretrained`, with a way out; or files are damaged; or weights are missing or of another
            shape, names them.
    """
    with target_errors(name):
        model, info = AutoModelForCausalLM.from_pretrained(
            name,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=trust_remote_code,
            **settings,
        )
    lacking = {kind: info[kind] for kind in ("missing_keys", "mismatched_keys")}
    if differences := loading_differences(lacking | {"unexpected_keys": ()}):
        raise ValueError(
            f"The files of {name!r} do not hold all weights of the {type(model).__name__} that its config.json "
            f"describes. {differences[0].upper()}{differences[1:]}. Check that it is a complete language model and not "
            "a drafter; copy or download it again."
        )
    return model


def target_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a target.

    Args:
        name: of the target, a folder or a Hub id.
        trust_remote_code: whether Python code of the checkpoint may run.

    Raises:
        OSError: as `from_pretrained`.
        ValueError: its files are missing or damaged, or need code.
    """
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ImportError):
        raise
    except Exception as error:  # also of its config, which transformers reads first; does not name the target
        _refuse_code(name, error)
        raise ValueError(
            f"The tokenizer of target {name!r} cannot be loaded: its files are missing or damaged. "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


@contextmanager
def target_errors(name: str) -> Iterator[None]:
    """Names the target, and a way out, in errors of transformers about its files."""
    try:
        yield
    except (OSError, ImportError, torch.OutOfMemoryError, MemoryError):
        raise
    except (SafetensorError, pickle.UnpicklingError, EOFError, RecursionError) as error:
        raise ValueError(
            f"The files of target {name!r} are damaged ({type(error).__name__}: {error}): copy or download them again."
        ) from error
    except Exception as error:  # transformers' classes raise many types of errors for invalid values
        _refuse_code(name, error)
        text = " ".join(str(error).split())
        if text.startswith("Unrecognized configuration class"):  # and the names of all other classes
            raise ValueError(
                f"Target {name!r} is described by {text.split()[4].strip('>')}, of which transformers has no causal "
                "language model: a target continues texts, as LlamaForCausalLM does. Choose another one."
            ) from error
        raise ValueError(
            f"Target {name!r} cannot be loaded: its config.json does not describe a model of this transformers, or "
            f"its files do not fit it ({type(error).__name__}: {text}). Check its files, copy "
            "or download them again, or choose another target."
        ) from error


def _refuse_code(name: str, error: Exception) -> None:
    """Raises ValueError in other words where transformers asks for leave to run code."""
    if "trust_remote_code" in str(error):
        raise ValueError(
            f"Target {name!r} needs Python code of its own repository, which is not run unasked. Read it, then give "
            "--trust-remote-code to `hf-specdec verify`, `generate` or `chat`, or in Python load the target with "
            "trust_remote_code=True and pass it."
        ) from error


def check_numbers(model: nn.Module, name: str) -> None:
    """Raises ValueError if a model's parameters or buffers contain NaN."""
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and tensor.numel() and not tensor.is_meta and tensor.amax().isnan():
            raise ValueError(
                f"{key} of {name!r} contains NaN, so no tokens can be drafted. The checkpoint is damaged, or its "
                "training failed: copy or download it again, or use another drafter."
            )


def loading_differences(info: dict[str, Any]) -> str:
    """The weights that differ from the network's, as text from transformers' loading info; empty if there are none."""
    shapes = {
        f"{name} {list(stored)} in the files and {list(described)} by the config"
        for name, stored, described in info["mismatched_keys"]
    }
    parts = []
    kinds = {"missing": info["missing_keys"], "unexpected": info["unexpected_keys"], "of another shape": shapes}
    for kind, weights in kinds.items():
        if names := sorted(weights):
            parts.append(f"{kind}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}")
    return "; ".join(parts)
