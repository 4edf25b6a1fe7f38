"""DSparkConfig: a DFlash config with two more heads, in SpecForge's layout; and the drafting options.

Source: DSpark, arXiv 2607.05147; shared facts on formats of 2026, section 2.2; sgl-project/SpecForge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hf_specdec.drafters.dflash.configuration import DFlashConfig, check_block_option
from hf_specdec.drafters.options import TreeOptions
from hf_specdec.drafters.registry import unknown_name

TREE, CHAIN = "dspark", "dspark_chain"
MARKOV_HEADS = ("vanilla", "gated", "rnn")


class DSparkConfig(DFlashConfig):
    """A `DFlashConfig` whose `dflash_config` has DSpark's own fields.

    `markov_rank` (0: no Markov head), `markov_head_type` (one of `MARKOV_HEADS`), `enable_confidence_head` and
    `confidence_head_with_markov` (whether that head also reads the embedding of the previous token); `projector_type`
    is "dspark". `sample_from_anchor` is true by default.
    """

    architecture: ClassVar[str] = "DSparkDraftModel"

    def __init__(self, dflash_config: dict[str, Any] | None = None, **kwargs: Any) -> None:
        block = {"projector_type": "dspark", "sample_from_anchor": True} | (dflash_config or {})
        super().__init__(dflash_config=block, **kwargs)

    def check(self) -> None:
        super().check()
        rank, kind = self.markov_rank, self.markov_head_type
        if type(rank) is not int or rank < 0:
            raise ValueError(f"markov_rank is {rank!r} in this DSpark config; it must be an integer of at least 0.")
        if rank and kind not in MARKOV_HEADS:
            raise ValueError(f"markov_head_type is {kind!r} in this DSpark config; it must be in {list(MARKOV_HEADS)}.")
        if self.confidence_head_with_markov and not rank:
            raise ValueError(
                "confidence_head_with_markov is true and markov_rank 0 in this DSpark config: there is no embedding "
                "that the confidence head could read. Correct the wrong one."
            )
        if self.vocab_size is None:
            raise ValueError(
                "This DSpark config has no vocab_size, which its Markov head needs: add the target's to it."
            )

    @property
    def markov_rank(self) -> Any:
        """Width of the Markov head; 0 without one."""
        return self.dflash_config.get("markov_rank", 0)

    @property
    def markov_head_type(self) -> Any:
        """How the bias is computed from the previous token."""
        return self.dflash_config.get("markov_head_type", "vanilla")

    @property
    def enable_confidence_head(self) -> bool:
        """Whether a head predicts the acceptance probability of each slot."""
        return bool(self.dflash_config.get("enable_confidence_head"))

    @property
    def confidence_head_with_markov(self) -> bool:
        """Whether that head also reads the previous token."""
        return self.enable_confidence_head and bool(self.dflash_config.get("confidence_head_with_markov"))


@dataclass(slots=True, kw_only=True)
class DSparkOptions(TreeOptions):
    """Drafting options of a DSpark drafter.

    Attributes:
        method: `"dspark"` for the best-first tree, `"dspark_chain"` for one path, as published; it is sampled in calls
            that sample.
        tree_budget: see `TreeOptions`. An integer does not affect the chain, which has the length of the block;
            `"auto"` shortens chains that are not sampled too.
        block_size: slots of a block, root included; at most the trained number, which None selects.
    """

    METHODS: ClassVar[tuple[str, str]] = (TREE, CHAIN)

    method: str = TREE
    tree_budget: int | Literal["auto"] = 16
    block_size: int | None = None

    def validate(self, config: Any = None) -> None:
        """As for every drafter; `config` is a `DFlashConfig`."""
        TreeOptions.validate(self, config)
        if self.method not in self.METHODS:
            raise unknown_name("method", self.method, self.METHODS)
        check_block_option(self.block_size, config.block_size)
