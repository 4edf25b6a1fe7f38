"""SpecBlockDrafter: K dependent tokens per forward from each start, a reduced vocabulary, and a rank head.

Config, options, layers and drafter. The config file has `model_type: "llama"` for every target, and calls the block
size `diffspec_draft_token_num`. Fields that the published files lack default to the values with which these files
reproduce their own numbers; the docstring of `SpecBlockConfig` says where paper and published code differ.

The network of Section 3.1: condition, token and slot query are normalised and fused (Eq. 1, 2); decoder layers with a
shift between slots (Eq. 3), the drafter's own head and the rank head (Eq. 4) follow. The caller gives the attention
mask. `drafting.py` chooses the starts, builds the tree and holds the state of a `generate` call; training is in
`training.py`. Sources: SpecBlock, Sections 3.1 and 3.2, Appendices A and B; shared facts on formats, section
7; shiweijiezero/SpecBlock.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.modules import apply_head, num_tokens
from hf_specdec.drafting.config import FeatureFields
from hf_specdec.drafting.layers import DraftLayer, KeyValueStore
from hf_specdec.drafting.options import TreeOptions
from hf_specdec.drafting.registry import name_of
from hf_specdec.drafting.shapes import check_shapes
from hf_specdec.drafting.vocabulary import MappedVocabulary, check_draft_to_target
from hf_specdec.hub.pretrained import PretrainedDrafter
from hf_specdec.methods.specblock.drafting import SpecBlockGenerator
from hf_specdec.methods.specblock.quality import RANK_BOUNDS, report

DraftCondition = Literal["pre_norm", "normed"]
RankState = Literal["normed", "pre_norm"]
BlockPositions = Literal["start", "path"]
MAX_BLOCKS = 64


@strict
class SpecBlockConfig(FeatureFields):
    """The config of a Llama decoder and what SpecBlock adds.

    Args:
        diffspec_draft_token_num: K, tokens that one forward drafts from one start. Default 7, as in the published code;
            the published checkpoints and the paper use 4.
        rank_classes: buckets of the rank head.
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

    architecture = "LlamaForCausalLMSpecBlock"

    diffspec_draft_token_num: int = 7
    rank_classes: int = 4
    draft_head_dim: int | None = None
    qk_norm: bool = False
    prefix_broadcast: bool = True
    layer_wise_shift: bool = True
    draft_condition: DraftCondition = "pre_norm"
    draft_condition_norm: bool = True
    rank_state: RankState = "normed"
    rank_features_top: int | None = 20
    block_positions: BlockPositions = "start"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.head_dim = self.draft_head_dim or self.hidden_size // self.num_attention_heads

    @property
    def block_size(self) -> int:
        """K: tokens that one forward drafts from one start; the start itself is not counted."""
        return self.diffspec_draft_token_num

    def check(self) -> None:
        """Raises ValueError, naming the field, its value and its range, if the drafter cannot be built."""
        super().check()
        self.check_sizes("diffspec_draft_token_num", where=" in this SpecBlock config")
        self.check_sizes("rank_classes", least=2, where=" in this SpecBlock config")
        if self.rank_features_top is not None and self.rank_features_top < 2:
            raise ValueError(f"rank_features_top is {self.rank_features_top!r}; it must be None or at least 2.")
        kinds = {"draft_condition": DraftCondition, "rank_state": RankState, "block_positions": BlockPositions}
        for field, kind in kinds.items():
            if getattr(self, field) not in get_args(kind):
                raise ValueError(f"{field} is {getattr(self, field)!r}; it must be one of {list(get_args(kind))}.")

    def to_dict(self) -> dict[str, Any]:
        """All fields, in the published layout."""
        fields = super().to_dict() | {"model_type": "llama", "architectures": [self.architecture]}
        # Readers older than rope_parameters expect the base at the top level.
        rope = fields.get("rope_parameters") or {}
        return fields | ({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {})

    def to_diff_dict(self) -> dict[str, Any]:
        """What `save_pretrained` writes: fields that are None are omitted if None is their default."""
        every = self.to_dict()
        fields = super().to_diff_dict() | {key: every[key] for key in _ALWAYS_WRITTEN if key in every}
        return {key: value for key, value in fields.items() if value is not None or key == "rank_features_top"}


# Other readers have other defaults for these, or none.
_ALWAYS_WRITTEN = (
    "architectures", "diffspec_draft_token_num", "draft_vocab_size", "hidden_size", "model_type", "num_hidden_layers",
    "rank_classes", "rank_features_top", "rope_theta", "vocab_size",
)  # fmt: skip


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


class SpecBlockInput(nn.Module):
    """Fuses condition, token and slot query into one state per slot (Eq. 1 and 2)."""

    def __init__(self, config: SpecBlockConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.prefix_broadcast = config.prefix_broadcast
        self.norms_draft_condition = config.draft_condition_norm
        self.condition_proj = nn.Linear(config.num_taps * config.target_hidden_size, width, bias=False)
        self.condition_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.token_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.query_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.position_queries = nn.Embedding(config.block_size, width)
        self.fuse = nn.Linear(3 * width, width, bias=False)

    def forward(self, conditions: Tensor, embeddings: Tensor, *, from_target: bool) -> Tensor:
        """Conditions [batch, starts, taps * target_hidden, or hidden] -> [batch, starts, slots, hidden]."""
        if from_target:
            conditions = self.condition_proj(conditions)
        if from_target or self.norms_draft_condition:
            conditions = self.condition_norm(conditions)
        # The prefix is the same for all slots of a start, so it is projected once.
        prefix = torch.cat([conditions, self.token_norm(embeddings)], dim=-1)
        shared, own = self.fuse.weight.split([prefix.shape[-1], conditions.shape[-1]], dim=1)
        prefix = linear(prefix, shared).unsqueeze(2)
        queries = linear(self.query_norm(self.position_queries.weight), own)
        if not self.prefix_broadcast:
            first = torch.zeros(len(queries), 1, dtype=prefix.dtype, device=prefix.device)
            first[0] = 1
            prefix = prefix * first
        return prefix + queries


def rank_features(logits: Tensor, top: int | None) -> Tensor:
    """The 15-number summary of a draft distribution (Appendix B).

    Ten largest log-probabilities; logit gaps of the best to the second, third and fifth; probability of the best;
    entropy. If the vocabulary has fewer than ten tokens, the least likely one is repeated.

    Args:
        logits: [..., draft_vocab] float32, or only the largest of them: `top`, and at least 10.
        top: probabilities and entropy are normalised over this many largest logits; None for all.

    Returns:
        [..., 15] float32, nats.

    Examples:
        >>> rank_features(torch.tensor([3.0, 1.0, 0.0]), None)[10:13]
        tensor([2., 3., 3.])
    """
    known = logits.shape[-1]
    best = logits.topk(min(known, max(10, top or known)), dim=-1).values
    logprobs = best[..., : top or known].log_softmax(-1)
    probs = logprobs.exp()
    normaliser = best[..., :1] - logprobs[..., :1]
    if best.shape[-1] < 10:
        best = torch.cat([best, best[..., -1:].expand(*best.shape[:-1], 10 - best.shape[-1])], dim=-1)
    profile, first = best[..., :10] - normaliser, best[..., :1]
    gaps = first - best[..., 1:3], first - best[..., 4:5]
    entropy = -(probs * logprobs).sum(-1, keepdim=True)
    return torch.cat([profile, *gaps, probs[..., :1], entropy], dim=-1)


NUM_RANK_FEATURES = 15
RANK_HIDDEN = 256
VOCABULARY_FILE = "vocab_mapping.pt"


@dataclass(frozen=True)
class BlockOutput:
    """One forward from a number of starts.

    Attributes:
        hidden: [batch, starts, slots, hidden], after the last layer, before the final norm.
        logits: [batch, starts, slots, draft_vocab] float32; [read, slots, draft_vocab] if only some starts were read.
        rank_logits: [batch, starts, slots, classes] float32, or [read, slots, classes].
    """

    hidden: Tensor
    logits: Tensor
    rank_logits: Tensor


class SpecBlockDrafter(MappedVocabulary, PretrainedDrafter):
    """A SpecBlock checkpoint as a drafter.

    Unlike `dflash`, whose block comes from one forward at the root, it grows a tree with `num_blocks` forwards, each
    from all selected nodes of the previous block, and the tokens of a block depend on each other. Unlike `ddtree`, the
    rank head decides how many alternatives a slot gets.

    Drafting options: `SpecBlockOptions`.
    """

    config_class = SpecBlockConfig
    config: SpecBlockConfig
    options_class = SpecBlockOptions
    options: SpecBlockOptions
    _no_split_modules: ClassVar = ["DraftLayer"]
    # The embedding is a frozen copy of the target's: official checkpoints omit it, some savers include it.
    _keys_to_ignore_on_load_unexpected: ClassVar = [r"rotary_emb\.inv_freq$", r"^input_layer\.embed_tokens\."]
    side_files: ClassVar[tuple[str, ...]] = (VOCABULARY_FILE,)
    card_summary = (
        "A SpecBlock drafter: each forward drafts a block of dependent tokens from all selected starts together, "
        "and a rank head decides how many alternatives each slot gets and where blocks start."
    )

    def __init__(self, config: SpecBlockConfig) -> None:
        config.check()
        super().__init__(config)
        width = config.hidden_size
        self.input_layer = SpecBlockInput(config)
        self.layers = nn.ModuleList([DraftLayer(config) for _ in range(config.num_hidden_layers)])
        shifts = config.num_hidden_layers - 1 if config.layer_wise_shift else 0
        self.shift_proj = nn.ModuleList([nn.Linear(2 * width, width, bias=False) for _ in range(shifts)])
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.rank_head = nn.Sequential(
            nn.Linear(width + NUM_RANK_FEATURES, RANK_HIDDEN, bias=False),
            nn.SiLU(),
            nn.Linear(RANK_HIDDEN, config.rank_classes, bias=False),
        )
        self.rotary_emb = LlamaRotaryEmbedding(config)
        # Published names: target id = draft id + d2t[draft id]; t2d is True for target ids in the draft vocabulary.
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        self.post_init()

    def forward(self, *inputs: Tensor, read: Tensor | None = None, **settings: Any) -> BlockOutput:
        """States, draft logits and rank logits of every slot of every start; other arguments as for `block_hidden`.

        `read`, [batch, starts] bool, selects the starts at which the heads are computed; None for all.
        """
        hidden = self.block_hidden(*inputs, **settings)
        return BlockOutput(hidden, *self.heads(hidden if read is None else hidden[read]))

    def block_hidden(
        self,
        conditions: Tensor,
        embeddings: Tensor,
        position_ids: Tensor,
        *,
        from_target: bool,
        mask: Tensor | None = None,
        cache: KeyValueStore | None = None,
    ) -> Tensor:
        """Runs K slots from each of a number of starts.

        Args:
            conditions: [batch, starts, taps * target_hidden] target features with `from_target`, else
                [batch, starts, hidden], from `condition_of`.
            embeddings: [batch, starts, hidden], the target's embedding of the token at each start: the one after the
                position whose feature is the condition.
            position_ids: [batch, starts] int64, rotary position of the first slot; slot k has k more.
            from_target: whether `conditions` are target features.
            mask: [batch, 1, starts * slots, stored + starts * slots] bool, True where a slot attends to an entry; None
                for causal attention over all slots, which is right for consecutive positions and an empty cache.
            cache: holds earlier entries, K per position; those of this forward are appended.

        Returns:
            [batch, starts, slots, hidden], before the final norm. Slot k predicts the token k + 1 positions after the
            start's token.
        """
        hidden = self.input_layer(conditions, embeddings, from_target=from_target)
        starts, slots = hidden.shape[1:3]
        within = torch.arange(slots, device=position_ids.device)
        cos, sin = self.rotary_emb(hidden, (position_ids.unsqueeze(-1) + within).flatten(1))
        rotary = cos.unsqueeze(2), sin.unsqueeze(2)
        for index, layer in enumerate(self.layers):
            if index > 0 and self.shift_proj:
                before = torch.cat([hidden[:, :, :1], hidden[:, :, :-1]], dim=2)
                hidden = self.shift_proj[index - 1](torch.cat([hidden, before], dim=-1))
            hidden = layer(hidden.flatten(1, 2), rotary, mask, mask is None, cache, index)
            hidden = hidden.unflatten(1, (starts, slots))
        return hidden

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[..., hidden] before the final norm -> draft logits [..., draft_vocab], rank logits [..., classes], float32.

        No gradient flows from the rank logits into the drafter (Eq. 4).
        """
        normed = self.norm(hidden)
        logits = apply_head(self.lm_head, normed)
        state = (normed if self.config.rank_state == "normed" else hidden).detach()
        features = rank_features(logits.detach(), self.config.rank_features_top)
        return logits, self.rank_head(torch.cat([state, features.to(state.dtype)], dim=-1)).float()

    def condition_of(self, hidden: Tensor) -> Tensor:
        """[..., hidden] state of a slot -> the condition of a block that starts there."""
        return hidden if self.config.draft_condition == "pre_norm" else self.norm(hidden)

    def set_vocabulary(self, target_ids: Tensor) -> None:
        super().set_vocabulary(target_ids)
        self.t2d.zero_()[target_ids.to(self.t2d.device)] = True

    def check_vocabulary(self) -> None:
        """Raises ValueError if the draft vocabulary's map repeats a token, does not ascend, or is out of range."""
        ids = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
        steps = (ids.diff() <= 0).nonzero()
        if len(steps):
            index = int(steps[0])
            raise ValueError(
                f"The draft vocabulary of {name_of(self)!r} (d2t) is not increasing: draft id {index} is target id "
                f"{int(ids[index])}, draft id {index + 1} is {int(ids[index + 1])}. The map is damaged or of another "
                "drafter: download the checkpoint again, or leave the file out."
            )
        check_draft_to_target(self.d2t, self.config.vocab_size, name_of(self))

    @classmethod
    def side_tensors(cls, folder: Path, name: str) -> dict[str, Tensor]:
        """The draft vocabulary in `vocab_mapping.pt`, if it exists; it overrides the map in the weights.

        Raises:
            ValueError: the file holds anything but the two tensors.
        """
        file = folder / VOCABULARY_FILE
        if not file.is_file():
            return {}
        try:
            maps: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
            kinds = {key: value.dtype for key, value in maps.items()}
        except Exception as error:  # a damaged or hostile pickle may raise anything; its code is not run
            raise ValueError(
                f"{VOCABULARY_FILE} of {name!r} cannot be loaded as plain tensors ({type(error).__name__}): it is "
                "damaged, or contains code, which is never run. Download it again, or remove it if the weights "
                "contain d2t."
            ) from error
        if kinds != {"d2t": torch.int64, "t2d": torch.bool}:
            raise ValueError(
                f"{VOCABULARY_FILE} of {name!r} holds {kinds}; it must be a dict of the tensors d2t (int64) and t2d "
                "(bool)."
            )
        return maps

    @classmethod
    def of_tensors(cls, config: SpecBlockConfig, tensors: dict[str, Tensor], dtype: torch.dtype | None) -> Any:
        """As for every drafter; also checks the draft vocabulary."""
        drafter = super().of_tensors(config, tensors, dtype)
        drafter.check_vocabulary()
        named = drafter.target_ids
        if drafter.d2t.any() and not torch.equal(named, drafter.t2d.nonzero().flatten()):
            raise ValueError(
                f"The vocabulary maps d2t and t2d of {drafter.name_or_path!r} have different target ids: they belong "
                "to two drafters, or one is damaged. Save the drafter again with the maps it was trained with."
            )
        if drafter.config.draft_vocab_size < drafter.config.vocab_size and not drafter.d2t.any():
            warnings.warn(
                f"The draft vocabulary of {drafter.name_or_path!r} is the first {drafter.config.draft_vocab_size} of "
                f"{drafter.config.vocab_size} target ids, which usually means that its map was lost. The output stays "
                f"correct, but few drafts may be accepted: look for {VOCABULARY_FILE} where the drafter came from.",
                stacklevel=2,
            )
        return drafter

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As for every drafter; replaces an existing `vocab_mapping.pt`, which would override the new map."""
        super().save_pretrained(save_directory, *args, **kwargs)
        file = Path(save_directory) / VOCABULARY_FILE
        if file.exists():
            torch.save({"d2t": self.d2t.cpu(), "t2d": self.t2d.cpu()}, file)

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        return self.config.layers_of(model)

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return SpecBlockGenerator(self, target)

    def card_facts(self) -> dict[str, str]:
        config = self.config
        layers = config.target_layer_ids
        return {
            "Method": "specblock",
            "Layers": f"{config.num_hidden_layers}, hidden size {config.hidden_size}",
            "Tokens per block": str(config.block_size),
            "Target layers read": ", ".join(map(str, layers)) if layers else "low, middle and top",
            "Draft vocabulary": f"{config.draft_vocab_size} of {config.vocab_size} tokens",
        }

    def report_tables(
        self, model: PreTrainedModel, prompts: Sequence[Mapping[str, Tensor]]
    ) -> Iterable[tuple[str, list[str], list[list[str]]]]:
        return report(self, model, prompts)

    def check_target(self, model: PreTrainedModel) -> None:
        is_smaller = num_tokens(model) < self.config.vocab_size
        check_shapes(
            self,
            model,
            hidden_size=self.config.target_hidden_size,
            embedding_size=self.config.hidden_size,
            vocab_size=self.config.vocab_size,
            may_exceed=True,
            layers=self.feature_layers(model),
            d2t=self.d2t if is_smaller else None,  # else `check_vocabulary` has checked the same
        )
