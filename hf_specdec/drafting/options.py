"""DrafterOptions: the drafting options of a drafter. Each method has its own subclass, in its folder.

Options are validated together. Only those that differ from the defaults are saved, as in a `GenerationConfig`. The
drafter that holds them is in `base.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from hf_specdec.decoding.policies import MOST_NODES
from hf_specdec.decoding.speed.cuda_graphs import CompileMode
from hf_specdec.drafting.registry import unknown_name

if TYPE_CHECKING:
    from typing_extensions import Self

COMPILE_MODES: tuple[CompileMode, ...] = get_args(CompileMode)
MAX_TREE_BUDGET = 1024
# Metadata of fields that depend on the machine and are not saved with the weights.
NOT_SAVED = {"saved": False}


@dataclass(slots=True, kw_only=True)
class DrafterOptions:
    """Drafting options of every drafter.

    A subclass adds fields, each with the paper's or the published default; a field without a default takes it from the
    drafter's config, in `defaults`. Assigning to an unknown name is an AttributeError, because of the slots.

    Attributes:
        compile_mode: "reduce-overhead" captures the target's forwards in CUDA graphs, and the drafter's if its shapes
            are static; on a CPU it compiles the target's with `torch.compile`. "auto" captures what has run twice in
            the same shape, and compiles nothing. "none" does neither. Not saved.
        same_bits: the target's logits are computed with the bits of plain decoding where a trial finds that possible
            (`decoding/speed/same_bits.py`): in low precision, near ties then never differ. Else a call warns with the
            reason, and is exact up to rounding as always. `stats.same_bits` says which it was. Rounds take longer. Not
            saved.

    Examples:
        >>> options = DrafterOptions()
        >>> options.replace(compile_mode="reduce-overhead")
        DrafterOptions(compile_mode='reduce-overhead', same_bits=False)
        >>> options.replace(compile_mod="none")
        Traceback (most recent call last):
        ValueError: Unknown drafting option 'compile_mod'. Did you mean 'compile_mode'? ...
    """

    # The allowed values of `method` where it is a field; registered ones where any method of a kind can be used.
    METHODS: ClassVar[Collection[str]] = ()

    compile_mode: CompileMode = field(default="none", metadata=NOT_SAVED)
    same_bits: bool = field(default=False, metadata=NOT_SAVED)

    @property
    def method(self) -> str:
        """Name of the drafting method: a class attribute, or a field if the drafter offers several."""
        raise NotImplementedError(f"{type(self).__name__} names no method.")

    @property
    def pauses(self) -> bool:
        """Whether drafting pauses while it does not pay."""
        return False

    @classmethod
    def names(cls) -> list[str]:
        """Names of all options."""
        return [field.name for field in dataclasses.fields(cls)]

    @classmethod
    def defaults(cls, config: Any = None) -> Self:
        """The options of a drafter whose config has no `drafting_options`.

        Args:
            config: of the drafter; None for drafters without one.
        """
        return cls()

    @classmethod
    def from_dict(cls, saved: Any, config: Any = None) -> Self:
        """The options from the output of `to_dict`; missing ones have their defaults.

        Args:
            saved: `drafting_options` of a config.
            config: as for `defaults`.

        Raises:
            ValueError: `saved` is not a dict, or as `replace` and `validate`.
        """
        if not isinstance(saved, dict):
            raise ValueError(f"drafting_options is {saved!r}; it must be a dict of options by name.")
        options = cls.defaults(config).replace(**saved)
        options.validate(config)
        return options

    def to_dict(self, config: Any = None) -> dict[str, Any]:
        """Options by name, as saved: those that differ from the defaults and do not depend on the machine.

        Args:
            config: as for `defaults`.
        """
        default = self.defaults(config)
        saved = [field.name for field in dataclasses.fields(self) if field.metadata.get("saved", True)]
        return {name: getattr(self, name) for name in saved if getattr(self, name) != getattr(default, name)}

    def replace(self, **changes: Any) -> Self:
        """A copy with these changes, not yet validated.

        Raises:
            ValueError: an option does not exist (the nearest name is suggested), or the drafter has only one method.
        """
        known = self.names()
        if "method" in changes and "method" not in known:
            raise ValueError(
                f"method={changes['method']!r} was given, but this drafter has only the method {self.method!r}: "
                "leave method out, or load another drafter."
            )
        if "acceptance" in changes:
            raise ValueError(
                f"acceptance={changes['acceptance']!r} is no drafting option, because it may change the output: no "
                "file can set it. Pass it to load_drafter, or set drafter.acceptance in your program."
            )
        for name in changes:
            if name not in known:
                raise unknown_name("drafting option", name, known)
        return dataclasses.replace(self, **changes)

    def validate(self, config: Any = None) -> None:
        """Raises ValueError, with option, value and range, if a drafter with this config cannot use these options.

        Args:
            config: as for `defaults`.
        """
        if self.compile_mode not in COMPILE_MODES:
            raise ValueError(f"compile_mode={self.compile_mode!r} must be one of {list(COMPILE_MODES)}.")
        if self.METHODS:
            self.check_choices(method=self.METHODS)
        self.check_switches("same_bits")
        if self.same_bits and self.compile_mode != "none":
            raise ValueError(
                f"same_bits=True was given with compile_mode={self.compile_mode!r}, but compiled forwards have bits of "
                'their own: use compile_mode="none".'
            )

    def check_integers(self, **most: int) -> None:
        """Raises ValueError unless each of these options is an integer from 1 to the given one."""
        for name, limit in most.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= limit:
                raise ValueError(f"{name}={value!r} must be an integer from 1 to {limit}.")

    def check_choices(self, **known: Iterable[str]) -> None:
        """Raises ValueError, suggesting the nearest, unless each of these options is one of the given names."""
        for name, choices in known.items():
            if getattr(self, name) not in tuple(choices):
                raise unknown_name(name, getattr(self, name), choices)

    def check_switches(self, *names: str) -> None:
        """Raises ValueError unless each of these options is True or False."""
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value!r} must be True or False.")


@dataclass(slots=True, kw_only=True)
class TreeOptions(DrafterOptions):
    """Options of drafters whose draft may have any number of nodes.

    Attributes:
        tree_budget: most drafted nodes of a tree, root not counted; at most 1024. Or `"auto"`, the default: up to 64,
            chosen from measured times of drafting and verifying and the acceptance rate, and no draft while drafting
            does not pay.
    """

    tree_budget: int | Literal["auto"] = "auto"

    @property
    def node_limit(self) -> int:
        """Most nodes of a tree: `tree_budget`, or the upper limit of "auto"."""
        return MOST_NODES if self.tree_budget == "auto" else self.tree_budget

    @property
    def pauses(self) -> bool:
        return self.tree_budget == "auto"

    def validate(self, config: Any = None) -> None:
        DrafterOptions.validate(self, config)  # `super()` does not work in classes with slots before Python 3.14
        budget = self.tree_budget
        if budget != "auto" and (type(budget) is not int or not 1 <= budget <= MAX_TREE_BUDGET):
            raise ValueError(f"tree_budget={budget!r} must be an integer from 1 to {MAX_TREE_BUDGET}, or 'auto'.")


@dataclass(slots=True, kw_only=True)
class PausingOptions(DrafterOptions):
    """Options of drafters that choose the length of their drafts themselves.

    Attributes:
        pauses: whether drafting pauses while it does not pay, by measured times; False drafts in every round. In calls
            that sample, drafts are the likeliest tokens with pauses, so that the seed alone decides, and drawn without.
    """

    pauses: bool = True

    def validate(self, config: Any = None) -> None:
        DrafterOptions.validate(self, config)
        self.check_switches("pauses")


def is_number(value: object) -> bool:
    """Whether a value is an int or a float; a bool is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
