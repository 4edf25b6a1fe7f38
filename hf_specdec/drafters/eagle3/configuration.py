"""Eagle3Config: one config for all published EAGLE-3 layouts.

The layouts differ in names, in the meaning of their layer ids and in defaults. `hub/formats/` translates them to these
fields and sets every field whose default differs between projects. Saved checkpoints have this config, with their own
`model_type`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from transformers import LlamaConfig

from hf_specdec.drafters.options import TreeOptions

ARCHITECTURE = "Eagle3Drafter"
# Upper bounds of the drafting options: far above useful values, they only catch typing errors.
MAX_DEPTH = 64
MAX_TOP_K = 128


def default_target_layer_ids(num_target_layers: int) -> list[int]:
    """Target layers that EAGLE-3 reads if a checkpoint lists none: one near the start, the middle, one near the end.

    As indices of `output_hidden_states` they are 2, n // 2 and n - 3; the output of layer i has index i + 1.

    Example:
        >>> default_target_layer_ids(32)
        [1, 15, 28]
    """
    return [1, num_target_layers // 2 - 1, num_target_layers - 4]


class Eagle3Config(LlamaConfig):
    """The config of a Llama decoder (usually with one layer) and what EAGLE-3 adds.

    `vocab_size` is the target's. The input of the first layer is the concatenation of embedding and state, so its q, k
    and v projections have twice the input size; further layers are Llama layers.

    Args:
        draft_vocab_size: rows of the drafter's head; None for the complete vocabulary.
        target_layer_ids: 0-based target layers whose outputs are concatenated in this order; -1 is the input of the
            first layer. None for `default_target_layer_ids` of the target.
        target_hidden_size: the target's hidden size; None for `hidden_size`.
        qk_norm: whether each head's queries and keys are normalised before RoPE.
        norm_before_residual: whether the residual of the first layer is the normalised state.
        norm_before_fc: one norm over the concatenated target states.
        fc_norm: a norm for each target state, before the concatenation.
        norm_output: whether the state passed to the next draft step is taken after the final norm.
        norm_before_head: whether the final norm is applied before the head.
        own_embeddings: whether the checkpoint has token embeddings; if not, the target's are used, unscaled.
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
            raise ValueError("norm_before_fc and fc_norm are both true, but a checkpoint has at most one of them.")

    @property
    def num_taps(self) -> int:
        """Number of target states that are concatenated."""
        return 3 if self.target_layer_ids is None else len(self.target_layer_ids)

    @property
    def maps_vocabulary(self) -> bool:
        """Whether draft ids differ from target ids."""
        return self.draft_vocab_size != self.vocab_size


@dataclass(slots=True, kw_only=True)
class Eagle3Options(TreeOptions):
    """Drafting options of an EAGLE-3 drafter; the defaults are the published settings.

    Attributes:
        depth: levels of the tree below the root. EAGLE's own `depth` counts the forwards after the first, one less.
        top_k: number of nodes of a level that are extended, and of continuations of each. 1 drafts a chain.
        tree_budget: see `TreeOptions`. EAGLE's own `total_token` counts the root, one more.
    """

    method = "eagle3"
    depth: int = 8
    top_k: int = 10
    tree_budget: int | Literal["auto"] = 59

    def validate(self, config: Any = None) -> None:
        TreeOptions.validate(self, config)
        self.check_integers(depth=MAX_DEPTH, top_k=MAX_TOP_K)
