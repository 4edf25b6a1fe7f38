"""LearningDrafter: what `AdaptiveDrafter` and `AuroraDrafter` share, a serving copy and what its training reads."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from hf_specdec.drafting.drafter import Drafter, check_is_drafter
from hf_specdec.drafting.options import DrafterOptions
from hf_specdec.drafting.registry import method_of
from hf_specdec.hub.pretrained import PretrainedDrafter
from hf_specdec.training.recipe import RECIPES


class LearningDrafter(Drafter):
    """A drafter for one target object, whose weights change between rounds or calls.

    Args:
        target: of the drafter.
        drafter: the serving copy, on its target's device. The drafter may also come first, then the target.

    Raises:
        ValueError: the drafter does not fit the target.
        TypeError: `drafter` is not a drafter.
    """

    def __init__(self, target: PreTrainedModel, drafter: PretrainedDrafter) -> None:
        if isinstance(target, Drafter):
            target, drafter = drafter, target
        check_is_drafter(drafter, "The target comes first, then the drafter.")
        drafter.check_target(target)
        self.target, self.drafter = target, drafter

    @property
    def options(self) -> DrafterOptions:  # of the serving copy
        return self.drafter.options

    @options.setter
    def options(self, options: DrafterOptions) -> None:
        self.drafter.options = options

    def validate_options(self, options: DrafterOptions) -> None:
        self.drafter.validate_options(options)

    def check_target(self, model: PreTrainedModel) -> None:
        if model is not self.target:
            raise ValueError(
                f"This {type(self).__name__} learns from target {self.target.name_or_path!r}, but was passed to "
                f"another one, {model.name_or_path!r}. Make one {type(self).__name__} per target object."
            )
        self.drafter.check_target(model)

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """The drafter's own layers, and the input of the target's head."""
        depth = model.config.get_text_config(decoder=True).num_hidden_layers
        return (*self.drafter.feature_layers(model), depth)

    def feature_width(self, model: PreTrainedModel) -> int:
        """Width of the features that the drafter itself reads."""
        hidden: int = model.config.get_text_config(decoder=True).hidden_size
        return len(self.drafter.feature_layers(model)) * hidden

    @property
    def learned(self) -> str | None:
        """What was learnt, for the drafter's record; None if the weights are the first ones."""
        return None

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Saves the serving drafter, with a record of its adaptation; see `PretrainedDrafter.save_pretrained`."""
        self._record()
        self.drafter.save_pretrained(save_directory, **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Publishes the serving drafter; see `PretrainedDrafter.push_to_hub`."""
        self._record()
        return self.drafter.push_to_hub(repo_id, **kwargs)

    def _record(self) -> None:
        """Removes measurements of the weights before the adaptation, and records the adaptation."""
        if self.learned is not None:
            self.drafter.measurements = None
            self.drafter.training_record = (self.drafter.training_record or {}) | {"adapted": self.learned}


def recipe_for(drafter: PretrainedDrafter, what: str) -> Any:
    """`Recipe.adapting` or `Recipe.further` of the drafter's method.

    Raises:
        ValueError: the method does not have it.
    """
    able = {name: getattr(recipe, what) for name, recipe in RECIPES.items() if getattr(recipe, what) is not None}
    method = method_of(drafter)
    if method is not None and method.name in able:
        return able[method.name]
    raise ValueError(
        f"A {type(drafter).__name__} does not support adaptation; methods that do: {', '.join(sorted(able))}. Pass the "
        "drafter itself as assistant_model."
    )
