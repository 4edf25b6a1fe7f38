"""Eagle3Config: one description for every published EAGLE-3 layout.

The layouts differ in names, in what their layer ids mean and in defaults; `hub/formats/` translates each of them to the
fields here, where nothing is left to a default that another project reads differently. What is written to disk is this
description, under a `model_type` of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from transformers import LlamaConfig

from hf_specdec.drafters.options import TreeOptions

ARCHITECTURE = "Eagle3Drafter"
# Bounds of the drafting options: far above anything that pays, low enough to catch a slip of the keyboard.
MAX_DEPTH = 64
MAX_TOP_K = 128


def default_target_layer_ids(num_target_layers: int) -> list[int]:
    """Target layers that EAGLE-3 reads where a checkpoint names none: one near the start, the middle, one near the end.

    As indices of `output_hidden_states` they are 2, n // 2 and n - 3; a layer's output is one further on.

    Example:
        >>> default_target_layer_ids(32)
        [1, 15, 28]
    """
    return [1, num_target_layers // 2 - 1, num_target_layers - 4]


class Eagle3Config(LlamaConfig):
    """A Llama decoder shape (one layer, as a rule) plus what EAGLE-3 adds.

    `vocab_size` is the target's. The first layer reads embedding and state side by side, so its q, k and v projections
    are twice as wide as `hidden_size`; further layers are ordinary.

    Args:
        draft_vocab_size: rows of the drafter's own head; None for the whole vocabulary.
        target_layer_ids: 0-based target layers whose outputs are joined in this order; -1 is what enters the first
            layer. None for `default_target_layer_ids` of the target at hand.
        target_hidden_size: the target's hidden size; None where it is `hidden_size`.
        qk_norm: each head of queries and keys is normed before RoPE.
        norm_before_residual: the residual of the first layer is the normed state, not the state itself.
        norm_before_fc: one norm over the joined target states.
        fc_norm: a norm for each target state, before they are joined.
        norm_output: the state handed to the next draft step is the one after the final norm.
        norm_before_head: the final norm is applied before the head.
        own_embeddings: the checkpoint has token embeddings; else the target's are used, unscaled.
        target_name_or_path: the target it was trained for, if known.
        target_revision: the commit or branch of that target.
        target_tokenizer_sha256: `tokenizer_fingerprint` of the target's tokenizer.
    """

    model_type = "hf_specdec_eagle3"

    def __init__(
        self,
        draft_vocab_size: int | None = None,
        target_layer_ids: list[int] | None = None,
        target_hidden_size: int | None = None,
        qk_norm: bool = False,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        norm_before_head: bool = True,
        own_embeddings: bool = False,
        target_name_or_path: str | None = None,
        target_revision: str | None = None,
        target_tokenizer_sha256: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{"num_hidden_layers": 1} | kwargs)
        self.draft_vocab_size = self.vocab_size if draft_vocab_size is None else draft_vocab_size
        self.target_layer_ids = target_layer_ids
        self.target_hidden_size = self.hidden_size if target_hidden_size is None else target_hidden_size
        self.qk_norm = qk_norm
        self.norm_before_residual = norm_before_residual
        self.norm_before_fc = norm_before_fc
        self.fc_norm = fc_norm
        self.norm_output = norm_output
        self.norm_before_head = norm_before_head
        self.own_embeddings = own_embeddings
        self.target_name_or_path = target_name_or_path
        self.target_revision = target_revision
        self.target_tokenizer_sha256 = target_tokenizer_sha256
        self.architectures = [ARCHITECTURE]

    def check(self) -> None:
        """Raises ValueError, naming the field, if no drafter can be built from this config."""
        if not isinstance(self.draft_vocab_size, int) or not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size!r}; it must be an integer from 1 to vocab_size "
                f"{self.vocab_size}, the target's vocabulary."
            )
        layers = self.target_layer_ids
        if layers is not None and (
            not isinstance(layers, list) or not layers or not all(isinstance(layer, int) for layer in layers)
        ):
            raise ValueError(f"target_layer_ids is {layers!r}; it must be a list of 0-based layer numbers, or absent.")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are both true; a checkpoint has one of them at most.")

    @property
    def num_taps(self) -> int:
        """How many target states are joined."""
        return 3 if self.target_layer_ids is None else len(self.target_layer_ids)

    @property
    def maps_vocabulary(self) -> bool:
        """Whether draft ids differ from target ids."""
        return self.draft_vocab_size != self.vocab_size


@dataclass(slots=True, kw_only=True)
class Eagle3Options(TreeOptions):
    """How an EAGLE-3 drafter drafts; the defaults are the published settings.

    Attributes:
        depth: levels of the tree below the root. EAGLE's own `depth` counts the forwards after the first: one less.
        top_k: how many nodes of a level are extended, and by how many tokens each. 1 drafts a chain.
        tree_budget: see `TreeOptions`. EAGLE's own `total_token` counts the root: one more.
    """

    method = "eagle3"
    depth: int = 8
    top_k: int = 10
    tree_budget: int | Literal["auto"] = 59

    def validate(self, config: Any = None) -> None:
        TreeOptions.validate(self, config)
        self.check_integers(depth=MAX_DEPTH, top_k=MAX_TOP_K)
