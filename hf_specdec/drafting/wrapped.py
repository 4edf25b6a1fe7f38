"""Models inside wrappers, and adapters inside models.

`torch.compile(model)` and PEFT's models are modules around the model that their own `generate` runs. A drafter reads
its target's modules, or runs a draft model's, so it needs that model itself.
"""

from __future__ import annotations

import copy
import sys
from typing import Any, TypeVar

from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def unwrapped(model: Any) -> Any:
    """The model that `generate` of a compiled or PEFT model runs; other models as they are.

    Its layers are not compiled, as in its own `generate`. Adapters are modules of it, and stay in use.

    Raises:
        ValueError: the wrapper adds virtual tokens, which are not in the model.
    """
    # Nothing is an instance of a class of a module that was not imported, and both imports take seconds.
    compiled, peft = sys.modules.get("torch._dynamo.eval_frame"), sys.modules.get("peft")
    if compiled is not None and isinstance(model, compiled.OptimizedModule):
        return unwrapped(model._orig_mod)
    if peft is None or not isinstance(model, (peft.PeftModel, peft.PeftMixedModel)):
        return model
    if any(config.is_prompt_learning for config in model.peft_config.values()):
        kinds = ", ".join(sorted({str(config.peft_type.value) for config in model.peft_config.values()}))
        raise ValueError(
            f"{model.get_base_model().name_or_path!r} has a PEFT adapter of type {kinds}, whose virtual tokens shift "
            "every position; prompt learning is not supported. Use a LoRA adapter, or the model without an adapter."
        )
    return unwrapped(model.get_base_model())


def has_adapters(model: nn.Module) -> bool:
    """Whether layers of a model have PEFT adapters, active or not."""
    peft = sys.modules.get("peft")
    return peft is not None and any(isinstance(each, _adapting(peft)) for each in model.modules())


def merged_adapters(model: Model) -> Model:
    """A copy with the active adapters merged into the weights, for saving; the model itself if it has no adapters.

    Raises:
        ValueError: an adapter of this kind cannot be merged.
    """
    if not has_adapters(model):
        return model
    peft: Any = sys.modules["peft"]
    merged: Any = copy.deepcopy(model)
    layers: list[tuple[str, Any]] = [
        (name, each) for name, each in merged.named_modules() if isinstance(each, _adapting(peft))
    ]
    for name, layer in layers:
        try:
            if not layer.disable_adapters:
                layer.merge()
            plain = layer.get_base_layer()
        except (AttributeError, NotImplementedError, ValueError, TypeError) as error:
            raise ValueError(
                f"The adapter of {name} ({type(layer).__name__}) cannot be merged into the weights ({error}), so a "
                "saved drafter would draft without it. Save the adapter alone, with get_adapter_state_dict(), or "
                "delete_adapter() before saving."
            ) from error
        merged.set_submodule(name, plain)
    for attribute in ("peft_config", "_hf_peft_config_loaded"):
        vars(merged).pop(attribute, None)
    return merged


def _adapting(peft: Any) -> tuple[type, ...]:
    return peft.tuners.tuners_utils.BaseTunerLayer, peft.utils.other.AuxiliaryTrainingWrapper
