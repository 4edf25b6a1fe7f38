"""MedusaConfig: the shape of Medusa heads. Published configs lack it; `hub/formats/medusa.py` reads it from tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedConfig

from hf_specdec.drafters.options import TreeOptions, is_number
from hf_specdec.drafters.registry import MARGINAL_METHODS, unknown_name

ARCHITECTURE = "MedusaDrafter"
STATIC_TREE = "static_tree"
MAX_LAYERS = 256  # of all heads together


class MedusaConfig(PreTrainedConfig):
    """Shape of Medusa-1 heads.

    Args:
        vocab_size: the target's; None if the heads use the target's head and no file states the size.
        hidden_size: the target's.
        medusa_num_heads: heads; head i, from 0, predicts the token i + 1 positions after the root.
        medusa_num_layers: residual blocks of a head.
        own_head: whether each head has its own output matrix; if not, all use the target's.
        target_name_or_path: the target it was trained for, if known.
        target_revision: the commit or branch of that target.
        target_tokenizer_sha256: `tokenizer_fingerprint` of the target's tokenizer.
    """

    model_type = "hf_specdec_medusa"

    def __init__(
        self,
        vocab_size: int | None = 32000,
        hidden_size: int = 4096,
        medusa_num_heads: int = 5,
        medusa_num_layers: int = 1,
        own_head: bool = True,
        target_name_or_path: str | None = None,
        target_revision: str | None = None,
        target_tokenizer_sha256: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.medusa_num_heads = medusa_num_heads
        self.medusa_num_layers = medusa_num_layers
        self.own_head = own_head
        self.target_name_or_path = target_name_or_path
        self.target_revision = target_revision
        self.target_tokenizer_sha256 = target_tokenizer_sha256
        self.architectures = [ARCHITECTURE]

    def check(self) -> None:
        """Raises ValueError, naming the field, if no heads can be built from this config."""
        sizes = {"hidden_size": 1, "medusa_num_heads": 1, "medusa_num_layers": 0} | (
            {"vocab_size": 1} if self.own_head else {}
        )
        for field, least in sizes.items():
            value = getattr(self, field)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{field} is {value!r}; it must be an integer of at least {least}.")
        if self.medusa_num_heads * self.medusa_num_layers > MAX_LAYERS:
            raise ValueError(
                f"medusa_num_heads is {self.medusa_num_heads} and medusa_num_layers {self.medusa_num_layers}: together "
                f"more than {MAX_LAYERS} layers, the most that can be built."
            )


@dataclass(slots=True, kw_only=True)
class MedusaOptions(TreeOptions):
    """Drafting options of Medusa heads.

    Attributes:
        method: `"ddtree"`, or any other method that drafts from per-position marginals; `"static_tree"` for the paper's
            tree, whose shape is the same in every round.
        tree_budget: see `TreeOptions`. An integer does not affect chains (`"dflash"`), which have one token per head.
        rank_accuracies: [heads][ranks], how often each prediction of each head is correct; the static tree is built
            from them (Section 2.3.3). `rank_accuracies(...)` measures them; no published checkpoint states them. None
            for an assumption of hf_specdec, neither measured nor from the paper: prediction r of head h, both from 0,
            is correct with probability 0.6 * 0.8^h * 0.4^r. It changes only the tree, and so the speed.
    """

    method: str = "ddtree"
    tree_budget: int | Literal["auto"] = 63
    rank_accuracies: list[list[float]] | None = None

    def validate(self, config: Any = None) -> None:
        """As for every drafter; `config` is a `MedusaConfig`."""
        TreeOptions.validate(self, config)
        if self.method not in (*MARGINAL_METHODS, STATIC_TREE):
            raise unknown_name("method", self.method, [*MARGINAL_METHODS, STATIC_TREE])
        rates = self.rank_accuracies
        if rates is not None and not (
            isinstance(rates, (list, tuple))
            and 1 <= len(rates) <= config.medusa_num_heads
            and all(isinstance(head, (list, tuple)) and len(head) for head in rates)
            and all(is_number(rate) and 0 <= rate <= 1 for head in rates for rate in head)
        ):
            raise ValueError(
                f"rank_accuracies={rates!r} must be a list of shares from 0 to 1 for each of at most "
                f"{config.medusa_num_heads} heads, or None."
            )
