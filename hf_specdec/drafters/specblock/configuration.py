"""SpecBlockConfig: the published layout of a SpecBlock checkpoint, and every choice that changes its numbers.

The file on disk says `model_type: "llama"` whatever the target, and calls the tokens of a block
`diffspec_draft_token_num`. Fields that the published files lack have defaults with which those files give their own
numbers; the class docstring says where paper and published code differ.
Sources: SpecBlock, Sections 3.1 and 3.2, Appendices A and B; shared facts on formats, section 7;
shiweijiezero/SpecBlock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from transformers import LlamaConfig

from hf_specdec.drafters.options import TreeOptions

ARCHITECTURE = "LlamaForCausalLMSpecBlock"
DraftCondition = Literal["pre_norm", "normed"]
RankState = Literal["normed", "pre_norm"]
BlockPositions = Literal["start", "path"]
MAX_BLOCKS = 64
# The four buckets of Section 3.2; a rank beyond the last bound is in the last bucket.
RANK_BOUNDS = (1, 4, 10)


class SpecBlockConfig(LlamaConfig):
    """A Llama decoder shape plus what SpecBlock adds.

    Args:
        diffspec_draft_token_num: K, tokens that one forward drafts from one start. 7 where a file names none, as the
            published code has it; the published checkpoints and the paper use 4.
        rank_classes: buckets of the rank head.
        draft_vocab_size: tokens the drafter can say; None for the whole vocabulary.
        target_hidden_size: width of one tapped target state; None for `hidden_size`.
        target_layer_ids: 0-based target layers whose outputs are joined in this order; None for the published rule,
            see `default_target_layer_ids`.
        draft_head_dim: None for `hidden_size // num_attention_heads`, which the published code uses whatever the
            file's `head_dim` says.
        qk_norm: RMS norm on queries and keys, as Qwen3 layers have it. The published drafters leave it out, even where
            the target has it; Section 3.1 has layers of the target's own shape.
        prefix_broadcast: all K slots receive condition and token; else only the first does (Table 2).
        layer_wise_shift: Eq. 3 between layers; without it there are no `shift_proj` weights (Table 2).
        draft_condition: which state of a slot conditions a block that starts there: the last layer's as it is, or
            after the final norm. The published code uses the former.
        draft_condition_norm: the norm on conditions also applies to a drafter's own state (Eq. 2).
        rank_state: which state the rank head reads. Eq. 4 has the last layer's; the published code reads it after the
            final norm.
        rank_features_top: the summary of the distribution is normalised over this many largest logits; None for all of
            them, as in Appendix B. Published drafters were trained with 20; their inference code defaults to 10.
        block_positions: rotary position of a later block's slots: "start", those of the first block (published), or
            "path", which go on from the place of the token that the block starts at.
        target_name_or_path: the target it was trained for, if known.
        target_revision: the commit or branch of that target.
        target_tokenizer_sha256: `tokenizer_fingerprint` of the target's tokenizer.
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
        target_name_or_path: str | None = None,
        target_revision: str | None = None,
        target_tokenizer_sha256: str | None = None,
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
        self.target_name_or_path = target_name_or_path
        self.target_revision = target_revision
        self.target_tokenizer_sha256 = target_tokenizer_sha256
        self.architectures = [ARCHITECTURE]

    @property
    def block_size(self) -> int:
        """K: tokens that one forward drafts from one start; the start itself is not counted."""
        return self.diffspec_draft_token_num

    @property
    def num_taps(self) -> int:
        """Target states that are joined."""
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
                f"draft_vocab_size {self.draft_vocab_size} is larger than vocab_size {self.vocab_size}: a drafter "
                "says a part of the target's vocabulary."
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
        # Readers from before rope_parameters look for the base at the top level.
        rope = fields.get("rope_parameters") or {}
        return fields | ({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {})

    def to_diff_dict(self) -> dict[str, Any]:
        """What `save_pretrained` writes: fields that are None are left out where that is what None means."""
        fields = super().to_diff_dict() | {
            key: value for key, value in self.to_dict().items() if key in _ALWAYS_WRITTEN
        }
        return {key: value for key, value in fields.items() if value is not None or key == "rank_features_top"}


# Other readers have other defaults, or none.
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
    """Low, middle and top target layer where a file names none: `hidden_states[2]`, `[n // 2]` and `[n - 3]`.

    Example:
        >>> default_target_layer_ids(32)
        [1, 15, 28]
    """
    # Targets of a few layers only occur in tests; they have no three such layers.
    places = (2, num_target_layers // 2, num_target_layers - 3)
    return [min(max(1, place), num_target_layers) - 1 for place in places]


@dataclass(slots=True, kw_only=True)
class SpecBlockOptions(TreeOptions):
    """How a SpecBlock drafter drafts.

    Attributes:
        tree_budget: see `TreeOptions`.
        num_blocks: M, drafter forwards per round; at most 64, whatever number the drafter was trained with.
        branching: candidates of a place by predicted bucket, the chain's own token counted; 0 gives up: no
            alternatives there nor later in the block. `[2, 4, 10, 0]` (default; 2 everywhere where the rank head has
            other than four buckets) and `[2, 4, 6, 4]` are the paper's two; equal numbers make a fixed top-k tree.
        beam_width: candidates below the root whatever its bucket, and most starts of a third or later block; None lets
            the root follow its bucket, and starts be as many as there are.
        max_starts: most starts of any block, the likeliest ones; None for no such limit.
        merge_duplicates: a path that two blocks draft is kept once. The published builder keeps both.
    """

    method = "specblock"
    tree_budget: int | Literal["auto"] = 60
    num_blocks: int = 2
    branching: list[int]
    beam_width: int | None = 10
    max_starts: int | None = None
    merge_duplicates: bool = True

    @classmethod
    def defaults(cls, config: Any = None) -> SpecBlockOptions:
        """As every drafter's; `config` is a `SpecBlockConfig`."""
        paper = [2, 4, 10, 0]
        return cls(branching=paper if config.rank_classes == len(paper) else [2] * config.rank_classes)

    def validate(self, config: Any = None) -> None:
        """As every drafter's; `config` is a `SpecBlockConfig`."""
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
                f"ranks 1, up to {RANK_BOUNDS[1]}, up to {RANK_BOUNDS[2]}, beyond (for example [2, 4, 10, 0])."
            )
        if not all(type(width) is int and width >= 0 for width in branching):
            raise ValueError(f"branching={branching!r} must be integers of at least 0: candidates per bucket.")
