"""Functions that others have put into the forwards of a model: hooks, and a `forward` set on an instance.

They may treat some positions of a forward differently, as steering does with the last one. In a draft tree a position
is at another place than in plain decoding, so a trial compares the two (`trial.check_hooks`).
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_modules

# Packages whose functions do the same in all calls: one trial suffices.
STEADY = frozenset({"accelerate", "peft", "torch", "transformers"})


def foreign_functions(model: nn.Module) -> list[tuple[nn.Module | None, str, Any]]:
    """Module, kind and function of each; without those of this library. The module is None for hooks of all modules.

    Every call asks, since a hook may be added between two: this takes 0.14 ms for a model of 547 modules.
    """
    found: list[tuple[nn.Module | None, str, Any]] = []
    for table in (torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks):
        found += [(None, "hook", hook) for hook in table.values()]
    stack: list[nn.Module | None] = [model]
    while stack:
        if (module := stack.pop()) is None:
            continue
        own = module.__dict__
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
            hooks = (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
            found += [(module, "hook", hook) for hook in hooks]
            found += [(module, "forward", own["forward"])] if "forward" in own else []
        stack += own["_modules"].values()
    return [each for each in found if _package_of(each[2]) != "hf_specdec"]


def are_steady(functions: list[tuple[nn.Module | None, str, Any]]) -> bool:
    """Whether they do the same in all calls, as far as is known."""
    return all(_package_of(function) in STEADY for *_, function in functions)


def _package_of(function: Any) -> str:
    """The package that defines a function, a method, or the class of a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    name: str = getattr(function, "__module__", None) or type(function).__module__
    return name.partition(".")[0]


def names_of(model: nn.Module, functions: list[tuple[nn.Module | None, str, Any]]) -> list[str]:
    """A description of each, for messages: its kind, its name and its module."""
    paths = {id(module): path for path, module in model.named_modules()}
    return [
        f"{kind} {_name(function)} of {'all modules' if module is None else paths[id(module)] or type(model).__name__}"
        for module, kind, function in functions
    ]


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return f"{getattr(function, '__qualname__', type(function).__qualname__)!r}"
