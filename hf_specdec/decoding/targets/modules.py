"""Modules of a target as callers may have prepared them: quantised, offloaded, spread over devices, with adapters.

The attributes of a weight do not show how such a module is to be called: a quantised weight may be of integers, a
buffer or a method, and an offloaded one is on the meta device until the module's own hook loads it; a wrapper lacks the
attributes of what it wraps. Therefore whoever needs sizes, device or type of a target's embeddings or head asks here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.decoding.once import once_per_model

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # in the order in which a head is tried


def core_of(module: nn.Module) -> nn.Module:
    """The embedding or head in PEFT's wrappers: what they adapt, or the copy that runs instead; others as they are.

    Its table and sizes are those of the wrapper, but for what an adapter adds to some rows.
    """
    while (inner := _within(module)) is not None:
        module = inner
    return module


def _within(module: Any) -> nn.Module | None:
    if hasattr(module, "get_base_layer"):  # of an adapter, which is added to the layer
        base: nn.Module = module.get_base_layer()
        return base
    copies = getattr(module, "modules_to_save", {})
    if len(copies) and not module.disable_adapters:
        return next((copies[name] for name in module.active_adapters if name in copies), module.original_module)
    return getattr(module, "original_module", None)


def table_shape(model: PreTrainedModel) -> tuple[int, int]:
    """Rows and width of a model's token embeddings, in whatever wrapper.

    Raises:
        ValueError: no module of them states its size.
    """
    embeddings = model.get_input_embeddings()
    for part in (core_of(embeddings), *embeddings.modules()):
        if hasattr(part, "num_embeddings"):
            return part.num_embeddings, part.embedding_dim
    raise ValueError(
        f"The token embeddings of {type(model).__name__}, a {type(embeddings).__name__}, state no num_embeddings, and "
        "neither does a module in them. Give their class the attributes num_embeddings and embedding_dim."
    )


def num_tokens(model: PreTrainedModel) -> int:
    """Rows of a model's token embeddings."""
    return table_shape(model)[0]


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
        if is_linear and not _is_plain(core_of(part)._parameters.get("weight")):
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
    core = core_of(head)  # the weight of a wrapper may be computed anew
    weight = getattr(core, "weight", None)
    if isinstance(weight, Tensor):
        if weight.is_floating_point():
            return weight.dtype
    elif (first := next(core.parameters(), None)) is not None and first.is_floating_point():
        return first.dtype
    found = _tried_dtype(head)
    return own if found is None else found


@once_per_model
@torch.no_grad()
def _tried_dtype(head: Any) -> torch.dtype | None:
    width = getattr(core_of(head), "in_features", None)
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

    Where the class may apply one, what an adapter adds to them is left out.

    Raises:
        ValueError: the class may scale its rows, and the table itself is quantised or offloaded.
    """
    home, core = home_of(embeddings), core_of(embeddings)
    if has_plain_weight(core) and type(core) is not nn.Embedding:
        return nn.functional.embedding(token_ids.to(home), core.weight)  # type: ignore[arg-type]
    check_table(embeddings)
    rows: Tensor = embeddings(token_ids.to(home))
    return rows


def check_table(embeddings: nn.Module) -> None:
    """Raises ValueError if `table_rows` cannot read an embedding's table."""
    core = core_of(embeddings)
    is_subclass = isinstance(core, nn.Embedding) and type(core) is not nn.Embedding
    if is_subclass and not has_plain_weight(core):
        raise ValueError(
            f"The drafter reads the rows of the target's token embeddings, but their class {type(core).__name__} "
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
