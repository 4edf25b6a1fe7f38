"""DFlash2Config: a DFlash config, in z-lab's layout, with the fields of DFlash 2; and the drafting options.

Source: shared facts on formats of 2026, section 1.1; z-lab/dflash.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hf_specdec.drafters.dflash.configuration import DFlashConfig
from hf_specdec.drafters.dspark.configuration import DSparkOptions

TREE, CHAIN = "dflash2", "dflash2_chain"


class DFlash2Config(DFlashConfig):
    """A `DFlashConfig` whose `dflash_config` has DFlash 2's own fields.

    `conv_kernel_size` (slots that a convolution reads) and `conv_group_size` (channels that share a kernel's dynamic
    part), `selector_rank` and `selector_top_k` (width of the selector, and candidates of a slot), `output_multiplier`
    (of the head's logits, before their cap) and `input_embedding_scale` (of the block's unscaled embeddings).
    """

    architecture: ClassVar[str] = "DFlash2DraftModel"

    # transformers generates an __init__ for a config class without one, and it would not call DFlashConfig's.
    def __init__(self, dflash_config: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(dflash_config=dflash_config, **kwargs)

    def check(self) -> None:
        super().check()
        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            if type(value := getattr(self, key)) is not int or value < 1:
                raise ValueError(f"{key} is {value!r} in this DFlash 2 config; it must be an integer of at least 1.")
        if self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"conv_group_size is {self.conv_group_size} in this DFlash 2 config, which does not divide hidden_size "
                f"{self.hidden_size}. Correct the wrong one."
            )
        if self.vocab_size is None or self.maps_vocabulary or self.selector_top_k > self.vocab_size:
            raise ValueError(
                f"vocab_size is {self.vocab_size}, draft_vocab_size {self.draft_vocab_size} and selector_top_k "
                f"{self.selector_top_k} in this DFlash 2 config: its selector chooses from the target's complete "
                "vocabulary, whose size vocab_size must state."
            )

    @property
    def conv_kernel_size(self) -> Any:
        """Slots that a convolution reads, this one included."""
        return self.dflash_config.get("conv_kernel_size")

    @property
    def conv_group_size(self) -> Any:
        """Channels that share the dynamic part of a kernel."""
        return self.dflash_config.get("conv_group_size")

    @property
    def selector_rank(self) -> Any:
        """Width of the selector's codebooks."""
        return self.dflash_config.get("selector_rank")

    @property
    def selector_top_k(self) -> Any:
        """Candidates of a slot."""
        return self.dflash_config.get("selector_top_k")

    @property
    def output_multiplier(self) -> float:
        """Factor on the head's logits, before their cap."""
        return float(self.dflash_config.get("output_multiplier", 1.0))

    @property
    def input_embedding_scale(self) -> float:
        """Factor on the block's unscaled embeddings."""
        return float(self.dflash_config.get("input_embedding_scale", 1.0))


@dataclass(slots=True, kw_only=True)
class DFlash2Options(DSparkOptions):
    """Drafting options of a DFlash 2 drafter.

    Attributes:
        method: `"dflash2"` for the best-first tree, `"dflash2_chain"` for one path, as published; it is sampled in
            calls that sample.
        tree_budget: see `DSparkOptions`.
        block_size: see `DSparkOptions`.
    """

    METHODS: ClassVar[tuple[str, str]] = (TREE, CHAIN)

    method: str = TREE
