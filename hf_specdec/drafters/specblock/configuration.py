"""SpecBlockConfig: the published layout of a SpecBlock checkpoint, and every choice that changes its numbers.

The file has `model_type: "llama"` for every target, and calls the block size `diffspec_draft_token_num`. Fields that
the published files lack default to the values with which these files reproduce their own numbers; the class docstring
says where paper and published code differ.
Sources: SpecBlock, Sections 3.1 and 3.2, Appendices A and B; shared facts on formats, section 7;
shiweijiezero/SpecBlock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from transformers import LlamaConfig

from hf_specdec.drafters.config import TargetFields
from hf_specdec.drafters.options import TreeOptions

ARCHITECTURE = "LlamaForCausalLMSpecBlock"
DraftCondition = Literal["pre_norm", "normed"]
RankState = Literal["normed", "pre_norm"]
BlockPositions = Literal["start", "path"]
MAX_BLOCKS = 64
# The four buckets of Section 3.2; a rank above the last bound is in the last bucket.
RANK_BOUNDS = (1, 4, 10)


class SpecBlockConfig(TargetFields, LlamaConfig):
    """The config of a Llama decoder and what SpecBlock adds.

    Args:
        diffspec_draft_token_num: K, tokens that one forward drafts from one start. Default 7, as in the published code;
            the published checkpoints and the paper use 4.
        rank_classes: buckets of the rank head.
        draft_vocab_size: tokens that can be drafted; None for the complete vocabulary.
        target_hidden_size: size of one target state; None for `hidden_size`.
        target_layer_ids: 0-based target layers whose outputs are concatenated in this order; None for the published
            rule, see `default_target_layer_ids`.
        draft_head_dim: None for `hidden_size // num_attention_heads`, which the published code always uses, even if the
            file has another `head_dim`.
        qk_norm: RMS norm on queries and keys, as in Qwen3 layers. The published drafters have none, even if the target
            does; in Section 3.1 the layers have the target's own shape.
        prefix_broadcast: whether all K slots receive condition and token, or only the first one (Table 2).
        layer_wise_shift: whether Eq. 3 is applied between layers; if not, there are no `shift_proj` weights (Table 2).
        draft_condition: the state of a slot that conditions a block that starts there: before or after the final norm.
            The published code uses the former.
        draft_condition_norm: whether the norm on conditions also applies to a drafter's own state (Eq. 2).
        rank_state: the input state of the rank head. Eq. 4 has the last layer's; the published code reads it after the
            final norm.
        rank_features_top: the summary of the distribution is normalised over this many largest logits; None for all of
            them, as in Appendix B. Published drafters were trained with 20; their inference code defaults to 10.
        block_positions: rotary position of a later block's slots: "start", those of the first block (published), or
            "path", the positions after the token at which the block starts.
    """

    def __init__(
        self,
        diffspec_draft_token_num: int = 7,
        rank_classes: int = 4,
        draft_vocab_size: int | None = None,
        target_hidden_size: int | None = None,
        target_layer_ids: list[int] | None = None,
        draft_head_dim: int | None = None,
        qk_norm: bool = False,
        prefix_broadcast: bool = True,
        layer_wise_shift: bool = True,
        draft_condition: DraftCondition = "pre_norm",
        draft_condition_norm: bool = True,
        rank_state: RankState = "normed",
        rank_features_top: int | None = 20,
        block_positions: BlockPositions = "start",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.diffspec_draft_token_num = diffspec_draft_token_num
        self.rank_classes = rank_classes
        self.draft_vocab_size = self.vocab_size if draft_vocab_size is None else draft_vocab_size
        self.target_hidden_size = self.hidden_size if target_hidden_size is None else target_hidden_size
        self.target_layer_ids = target_layer_ids
        self.draft_head_dim = draft_head_dim
        self.head_dim = draft_head_dim or self.hidden_size // self.num_attention_heads
        self.qk_norm = qk_norm
        self.prefix_broadcast = prefix_broadcast
        self.layer_wise_shift = layer_wise_shift
        self.draft_condition = draft_condition
        self.draft_condition_norm = draft_condition_norm
        self.rank_state = rank_state
        self.rank_features_top = rank_features_top
        self.block_positions = block_positions
        self.architectures = [ARCHITECTURE]

    @property
    def block_size(self) -> int:
        """K: tokens that one forward drafts from one start; the start itself is not counted."""
        return self.diffspec_draft_token_num

    @property
    def num_taps(self) -> int:
        """Number of target states that are concatenated."""
        return 3 if self.target_layer_ids is None else len(self.target_layer_ids)

    def check(self) -> None:
        """Raises ValueError, naming the field, its value and its range, if the drafter cannot be built."""
        for field, least in (("diffspec_draft_token_num", 1), ("rank_classes", 2), ("draft_vocab_size", 1)):
            value = getattr(self, field)
            if not isinstance(value, int) or value < least:
                raise ValueError(
                    f"{field} is {value!r} in this SpecBlock config; it must be an integer of at least {least}."
                )
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}; it must be an integer from 1 to vocab_size "
                f"{self.vocab_size}, the target's vocabulary."
            )
        if self.rank_features_top is not None and self.rank_features_top < 2:
            raise ValueError(f"rank_features_top is {self.rank_features_top!r}; it must be None or at least 2.")
        for field, kind in (
            ("draft_condition", DraftCondition),
            ("rank_state", RankState),
            ("block_positions", BlockPositions),
        ):
            if getattr(self, field) not in get_args(kind):
                raise ValueError(f"{field} is {getattr(self, field)!r}; it must be one of {list(get_args(kind))}.")
        layers = self.target_layer_ids
        if layers is not None and (not layers or not all(isinstance(layer, int) for layer in layers)):
            raise ValueError(f"target_layer_ids is {layers!r}; it must be None or a list of 0-based layer numbers.")

    def to_dict(self) -> dict[str, Any]:
        """All fields, in the published layout."""
        fields = super().to_dict() | {"model_type": "llama", "architectures": [ARCHITECTURE]}
        # Readers older than rope_parameters expect the base at the top level.
        rope = fields.get("rope_parameters") or {}
        return fields | ({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {})

    def to_diff_dict(self) -> dict[str, Any]:
        """What `save_pretrained` writes: fields that are None are omitted if None is their default."""
        fields = super().to_diff_dict() | {
            key: value for key, value in self.to_dict().items() if key in _ALWAYS_WRITTEN
        }
        return {key: value for key, value in fields.items() if value is not None or key == "rank_features_top"}


# Other readers have other defaults for these, or none.
_ALWAYS_WRITTEN = (
    "architectures",
    "diffspec_draft_token_num",
    "draft_vocab_size",
    "hidden_size",
    "model_type",
    "num_hidden_layers",
    "rank_classes",
    "rank_features_top",
    "rope_theta",
    "vocab_size",
)


def default_target_layer_ids(num_target_layers: int) -> list[int]:
    """Low, middle and top target layer if a file lists none: `hidden_states[2]`, `[n // 2]` and `[n - 3]`.

    Example:
        >>> default_target_layer_ids(32)
        [1, 15, 28]
    """
    # Targets with too few layers for three different ones occur only in tests.
    indices = (2, num_target_layers // 2, num_target_layers - 3)
    return [min(max(1, index), num_target_layers) - 1 for index in indices]


@dataclass(slots=True, kw_only=True)
class SpecBlockOptions(TreeOptions):
    """Drafting options of a SpecBlock drafter.

    Attributes:
        tree_budget: see `TreeOptions`.
        num_blocks: M, drafter forwards per round; at most 64, independent of the number at training.
        branching: number of candidates of a slot for each predicted bucket, the chain's token included; with 0 neither
            this nor later slots of the block have alternatives. `[2, 4, 10, 0]` (default; 2 everywhere if the rank head
            does not have four buckets) and `[2, 4, 6, 4]` are the paper's two; equal numbers give a fixed top-k tree.
        beam_width: number of candidates at the root, independent of its bucket, and most starts of the third and later
            blocks; None for the root's bucket and no limit on starts.
        max_starts: most starts of any block, the likeliest ones; None for no limit.
        merge_duplicates: whether a path that two blocks draft is verified only once. The published code verifies both.
    """

    method = "specblock"
    tree_budget: int | Literal["auto"] = "auto"
    num_blocks: int = 2
    branching: list[int]
    beam_width: int | None = 10
    max_starts: int | None = None
    merge_duplicates: bool = True

    @classmethod
    def defaults(cls, config: Any = None) -> SpecBlockOptions:
        """As for every drafter; `config` is a `SpecBlockConfig`."""
        paper = [2, 4, 10, 0]
        return cls(branching=paper if config.rank_classes == len(paper) else [2] * config.rank_classes)

    def validate(self, config: Any = None) -> None:
        """As for every drafter; `config` is a `SpecBlockConfig`."""
        TreeOptions.validate(self, config)
        self.check_integers(num_blocks=MAX_BLOCKS)
        self.check_switches("merge_duplicates")
        for name in ("beam_width", "max_starts"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r} must be an integer of at least 1, or None for no limit.")
        branching, classes = self.branching, config.rank_classes
        if not isinstance(branching, (list, tuple)) or len(branching) != classes:
            raise ValueError(
                f"branching={branching!r} must have {classes} numbers, one per bucket of this drafter's rank head: "
                f"ranks 1, up to {RANK_BOUNDS[1]}, up to {RANK_BOUNDS[2]}, above (for example [2, 4, 10, 0])."
            )
        if not all(type(width) is int and width >= 0 for width in branching):
            raise ValueError(f"branching={branching!r} must be integers of at least 0: candidates per bucket.")
