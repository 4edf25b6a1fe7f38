"""TargetFields: what the config of every drafter with weights records of its target."""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel


class TargetFields(PreTrainedConfig):
    """A base class of configs, before the config of transformers that they extend.

    As in transformers, a field is an annotated class attribute, and `__post_init__` completes the fields and gets all
    other arguments. `@strict` adds the checks of the decoder's config class, such as that of heads and hidden size.

    Args:
        target_name_or_path: the target it was trained for, if known.
        target_revision: the commit or branch of that target.
        target_tokenizer_sha256: `tokenizer_fingerprint` of the target's tokenizer.

    Attributes:
        architecture: the one that `config.json` names; None for the name of the drafter's class.
    """

    architecture: ClassVar[str | None] = None

    target_name_or_path: str | None = None
    target_revision: str | None = None
    target_tokenizer_sha256: str | None = None

    @property
    def maps_vocabulary(self) -> bool:
        """Whether draft ids differ from target ids, for drafters with a draft vocabulary."""
        own: Any = self
        return bool(own.draft_vocab_size != own.vocab_size)

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.architectures = [self.architecture or type(self).__name__.replace("Config", "Drafter")]

    def check_sizes(self, *names: str, least: int = 1, where: str = "") -> None:
        """Raises ValueError, naming field and value, unless each of these fields is an integer of at least `least`.

        Args:
            names: of the fields.
            least: for all of them.
            where: which config it is, for the message.
        """
        for name in names:
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is {value!r}{where}; it must be an integer of at least {least}.")


def eagle3_layer_ids(num_target_layers: int) -> list[int]:
    """Low, middle and top target layer if a file lists none: `hidden_states[2]`, `[n // 2]` and `[n - 3]`.

    Examples:
        >>> eagle3_layer_ids(32)
        [1, 15, 28]
    """
    # Targets with too few layers for three different ones occur only in tests.
    indices = (2, num_target_layers // 2, num_target_layers - 3)
    return [min(max(1, index), num_target_layers) - 1 for index in indices]


@strict
class FeatureFields(TargetFields, LlamaConfig):
    """A base class of configs of Llama layers that read several layers of the target and have a head of their own.

    Args:
        draft_vocab_size: rows of the drafter's head; None for the complete vocabulary.
        target_layer_ids: 0-based target layers whose outputs are concatenated in this order; -1 is the input of the
            first layer. None for `eagle3_layer_ids` of the target.
        target_hidden_size: the target's hidden size; None for `hidden_size`.
    """

    draft_vocab_size: Any = None
    target_layer_ids: list[int] | None = None
    target_hidden_size: Any = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size

    def check(self) -> None:
        """Raises ValueError, naming the field and its value, if no drafter can be built from this config."""
        if not isinstance(self.draft_vocab_size, int) or not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size!r}; it must be an integer from 1 to vocab_size "
                f"{self.vocab_size}, the target's vocabulary."
            )
        layers = self.target_layer_ids
        if layers is not None and (
            not isinstance(layers, (list, tuple)) or not layers or not all(isinstance(layer, int) for layer in layers)
        ):
            raise ValueError(f"target_layer_ids is {layers!r}; it must be a list of 0-based layer numbers, or absent.")

    @property
    def num_taps(self) -> int:
        """Number of target states that are concatenated."""
        return 3 if self.target_layer_ids is None else len(self.target_layer_ids)

    def layers_of(self, model: PreTrainedModel) -> tuple[int, ...]:
        """The layers of a target that the drafter reads."""
        depth = model.config.get_text_config(decoder=True).num_hidden_layers
        return tuple(eagle3_layer_ids(depth) if self.target_layer_ids is None else self.target_layer_ids)
