"""DrafterOptions: how a drafter drafts, apart from its weights. Each method has a subclass of its own, beside it.

Options are checked together, by `validate`, and saved as a `GenerationConfig` is: only what differs from the defaults.
The drafter that holds them is in `base.py`; which checkpoint states which options is a matter of its config.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from hf_specdec.decoding.graphs import CompileMode
from hf_specdec.decoding.policies import MOST_NODES
from hf_specdec.drafters.registry import unknown_name

if TYPE_CHECKING:
    from typing_extensions import Self

COMPILE_MODES: tuple[CompileMode, ...] = get_args(CompileMode)
MAX_TREE_BUDGET = 1024
# Metadata of fields that suit a machine and not the weights, so that they are not saved with them.
OF_THE_MACHINE = {"saved": False}


@dataclass(slots=True, kw_only=True)
class DrafterOptions:
    """Drafting options that every drafter has.

    A subclass adds fields, each with the paper's or the published default; a field without one takes its default from
    the drafter's config, in `defaults`. With slots, the assignment to a name that is no option is an AttributeError.

    Attributes:
        compile_mode: "reduce-overhead" has the target's forwards captured in CUDA graphs, and the drafter's where its
            shapes allow; on a CPU it has the target's compiled by `torch.compile`. "none" runs all as they are. Not
            saved.

    Example:
        >>> options = DrafterOptions()
        >>> options.replace(compile_mode="reduce-overhead")
        DrafterOptions(compile_mode='reduce-overhead')
        >>> options.replace(compile_mod="none")
        Traceback (most recent call last):
        ValueError: Unknown drafting option 'compile_mod'. Did you mean 'compile_mode'? Known: 'compile_mode'.
    """

    compile_mode: CompileMode = field(default="none", metadata=OF_THE_MACHINE)

    @property
    def method(self) -> str:
        """Name of the way of drafting: a class attribute, or a field where the drafter offers several."""
        raise NotImplementedError(f"{type(self).__name__} names no method.")

    @classmethod
    def names(cls) -> list[str]:
        """Names of all options."""
        return [field.name for field in dataclasses.fields(cls)]

    @classmethod
    def defaults(cls, config: Any = None) -> Self:
        """What holds for a drafter whose config has no `drafting_options`.

        Args:
            config: of the drafter; None for drafters without one.
        """
        return cls()

    @classmethod
    def from_dict(cls, saved: Any, config: Any = None) -> Self:
        """The options that `to_dict` gave; whatever is not named has its default.

        Args:
            saved: `drafting_options` of a config.
            config: as for `defaults`.

        Raises:
            ValueError: it is no dict, or as `replace` and `validate`.
        """
        if not isinstance(saved, dict):
            raise ValueError(f"drafting_options is {saved!r}; it must hold options by name.")
        options = cls.defaults(config).replace(**saved)
        options.validate(config)
        return options

    def to_dict(self, config: Any = None) -> dict[str, Any]:
        """Options by name, as they are saved: those that differ from the defaults and do not depend on the machine.

        Args:
            config: as for `defaults`.
        """
        default = self.defaults(config)
        saved = [field.name for field in dataclasses.fields(self) if field.metadata.get("saved", True)]
        return {name: getattr(self, name) for name in saved if getattr(self, name) != getattr(default, name)}

    def replace(self, **changes: Any) -> Self:
        """A copy with these changes, not yet validated.

        Raises:
            ValueError: there is no such option; the nearest name is suggested. Or there is no choice of a method.
        """
        known = self.names()
        if "method" in changes and "method" not in known:
            raise ValueError(
                f"method={changes['method']!r} was given, but this drafter drafts in one way only, {self.method!r}: "
                "leave method out, or load another drafter."
            )
        for name in changes:
            if name not in known:
                raise unknown_name("drafting option", name, known)
        return dataclasses.replace(self, **changes)

    def validate(self, config: Any = None) -> None:
        """Raises ValueError, naming option, value and range, if a drafter with this config cannot draft so.

        Args:
            config: as for `defaults`.
        """
        if self.compile_mode not in COMPILE_MODES:
            raise ValueError(f"compile_mode={self.compile_mode!r} must be one of {list(COMPILE_MODES)}.")

    def check_integers(self, **most: int) -> None:
        """Raises ValueError unless each of these options is an integer from 1 to the given one."""
        for name, limit in most.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= limit:
                raise ValueError(f"{name}={value!r} must be an integer from 1 to {limit}.")

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
        tree_budget: most drafted nodes of a tree, root not counted; at most 1024, or `"auto"`, which chooses among up
            to 64 by what drafting and verifying cost and how often drafts are accepted.
    """

    tree_budget: int | Literal["auto"]

    @property
    def node_limit(self) -> int:
        """Most nodes of a tree: `tree_budget` itself, or what "auto" may choose from."""
        return MOST_NODES if self.tree_budget == "auto" else self.tree_budget

    def validate(self, config: Any = None) -> None:
        DrafterOptions.validate(self, config)  # `super()` does not work in classes with slots before Python 3.14
        budget = self.tree_budget
        if budget != "auto" and (type(budget) is not int or not 1 <= budget <= MAX_TREE_BUDGET):
            raise ValueError(f"tree_budget={budget!r} must be an integer from 1 to {MAX_TREE_BUDGET}, or 'auto'.")


def is_number(value: object) -> bool:
    """Whether it is an int or a float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
