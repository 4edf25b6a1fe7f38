"""PEagleConfig: EAGLE-3's config, and what P-EAGLE adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hf_specdec.drafters.eagle3 import Eagle3Config
from hf_specdec.drafters.options import TreeOptions
from hf_specdec.drafters.registry import MARGINAL_METHODS, unknown_name

ARCHITECTURE = "PEagleDrafter"


class PEagleConfig(Eagle3Config):
    """An `Eagle3Config` with the placeholders for unknown tokens.

    Args:
        mask_token_id: token of a placeholder pair.
        num_draft_tokens: tokens that it drafts in one forward.
        kwargs: see `Eagle3Config`.
    """

    model_type = "hf_specdec_peagle"

    def __init__(self, mask_token_id: int | None = None, num_draft_tokens: int = 8, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mask_token_id = mask_token_id
        self.num_draft_tokens = num_draft_tokens
        self.architectures = [ARCHITECTURE]

    def check(self) -> None:
        super().check()
        if type(self.mask_token_id) is not int or not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id is {self.mask_token_id!r}; a P-EAGLE drafter needs the id of its placeholder token, "
                f"from 0 to {self.vocab_size - 1}. Some trainers do not write it: add the id used at training to its "
                "config.json."
            )
        if type(self.num_draft_tokens) is not int or self.num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens is {self.num_draft_tokens!r}; it must be an integer of at least 1.")


@dataclass(slots=True, kw_only=True)
class PEagleOptions(TreeOptions):
    """Drafting options of a P-EAGLE drafter.

    Attributes:
        method: `"ddtree"`, or any other method that drafts from per-position marginals.
        tree_budget: see `TreeOptions`. An integer does not affect chains (`"dflash"`).
    """

    method: str = "ddtree"
    tree_budget: int | Literal["auto"] = 59

    def validate(self, config: Any = None) -> None:
        TreeOptions.validate(self, config)
        if self.method not in tuple(MARGINAL_METHODS):
            raise unknown_name("method", self.method, MARGINAL_METHODS)
