"""Modules of a target as callers may have prepared them: quantised, offloaded, spread over devices.

The attributes of a weight do not show how such a module is to be called: a quantised weight may be of integers, a
buffer or a method, and an offloaded one is on the meta device until the module's own hook loads it. Therefore drafters
that share a target's embeddings or head ask here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.decoding.once import once_per_model

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # in the order in which a head is tried


def has_plain_weight(module: nn.Module) -> bool:
    """Whether `module.weight` is an ordinary floating-point parameter, in memory."""
    weight = module._parameters.get("weight")
    return weight is not None and _is_plain(weight) and not weight.is_meta


def _is_plain(weight: Tensor | None) -> bool:
    # Numbers of 8 bits have scales beside them.
    return type(weight) is nn.Parameter and weight.is_floating_point() and weight.element_size() > 1


def is_quantised(model: nn.Module) -> bool:
    """Whether a linear layer of a model keeps its weight in another form than a floating-point parameter."""
    for part in model.modules():
        is_linear = hasattr(part, "in_features") and hasattr(part, "out_features")
        if is_linear and not _is_plain(part._parameters.get("weight")):
            return True
    return False


def home_of(module: nn.Module) -> torch.device:
    """The device on which a module takes its inputs: of accelerate's hook if there is one, else of its weights.

    Examples:
        >>> home_of(nn.Linear(2, 2))
        device(type='cpu')
    """
    for part in module.modules():
        hook = getattr(part, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            device = getattr(each, "execution_device", None)
            if device is not None:
                return torch.device(device)
    devices = [tensor.device for tensor in (*module.parameters(), *module.buffers())]
    # Without any, the weights are no tensors of the module, as in torch's own quantised layers.
    return next((device for device in devices if device.type != "meta"), devices[0] if devices else torch.device("cpu"))


def apply_head(head: nn.Module, states: Tensor) -> Tensor:
    """[..., hidden] states of any dtype -> [..., vocab] float32 logits of a head, of a target's or a drafter's own.

    The rows are given to the head as one matrix: given a slice such as [1, 5, hidden] of [1, 6, hidden], torch computes
    a batch of products and copies the whole weight first.
    """
    rows = states.reshape(-1, states.shape[-1])
    device = rows.device if rows.is_meta else home_of(head)  # where only shapes are computed, there is no other device
    logits: Tensor = head(rows.to(device=device, dtype=_dtype_of(head, rows.dtype))).float()
    return logits.reshape(*states.shape[:-1], logits.shape[-1])


def _dtype_of(head: nn.Module, own: torch.dtype) -> torch.dtype:
    """The dtype of states that a head takes; that of its weight, or found by a trial if it has none."""
    weight = getattr(head, "weight", None)
    if isinstance(weight, Tensor):
        if weight.is_floating_point():
            return weight.dtype
    elif (first := next(head.parameters(), None)) is not None and first.is_floating_point():
        return first.dtype
    found = _tried_dtype(head)
    return own if found is None else found


@once_per_model
@torch.no_grad()
def _tried_dtype(head: Any) -> torch.dtype | None:
    width = getattr(head, "in_features", None)
    if width is None:
        return None
    for dtype in FLOATING:
        try:
            head(torch.zeros(1, width, dtype=dtype, device=home_of(head)))
        except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError):
            continue
        return dtype
    return None


def table_rows(embeddings: nn.Module, token_ids: Tensor) -> Tensor:
    """Rows of an embedding's table, without the scale that its class may apply (Gemma): [...] -> [..., hidden].

    Raises:
        ValueError: the class may scale its rows, and the table itself is quantised or offloaded.
    """
    home = home_of(embeddings)
    if has_plain_weight(embeddings) and type(embeddings) is not nn.Embedding:
        return nn.functional.embedding(token_ids.to(home), embeddings.weight)  # type: ignore[arg-type]
    check_table(embeddings)
    rows: Tensor = embeddings(token_ids.to(home))
    return rows


def check_table(embeddings: nn.Module) -> None:
    """Raises ValueError if `table_rows` cannot read an embedding's table."""
    is_subclass = isinstance(embeddings, nn.Embedding) and type(embeddings) is not nn.Embedding
    if is_subclass and not has_plain_weight(embeddings):
        raise ValueError(
            f"The drafter reads the rows of the target's token embeddings, but their class {type(embeddings).__name__} "
            "may scale them, and the table itself is offloaded or quantised. Keep the embeddings of the target in "
            "memory in a floating-point type, or use a drafter that does not share them."
        )


def runs_in_inference_mode(network: nn.Module) -> bool:
    """Whether forwards of a network run in torch's inference mode; a trial decides if a weight is not a plain one.

    Some classes of quantised weights make views of themselves that inference mode does not allow.
    """
    if all(type(weight) is nn.Parameter and weight.is_floating_point() for weight in network.parameters()):
        return True
    return isinstance(network, PreTrainedModel) and network.can_generate() and _runs_in_inference_mode(network)


@once_per_model
def _runs_in_inference_mode(model: PreTrainedModel) -> bool:
    token_ids = torch.zeros(1, 2, dtype=torch.int64, device=home_of(model.get_input_embeddings()))
    try:
        with torch.inference_mode(), torch.random.fork_rng(devices=[]):
            model(input_ids=token_ids, use_cache=False)
    except (RuntimeError, ValueError):
        return False
    return True
