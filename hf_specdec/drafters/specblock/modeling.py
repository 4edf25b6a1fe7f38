"""SpecBlockDrafter: K dependent tokens per forward from each start, a reduced vocabulary, and a rank head.

The network of Section 3.1: condition, token and slot query are normalised and fused (Eq. 1, 2); decoder layers with a
shift between slots (Eq. 3; `layers.py`), the drafter's own head and the rank head (Eq. 4) follow. The caller gives the
attention mask. `candidates.py` chooses the starts and holds the state of a `generate` call; training is in
`training/specblock/`. Sources: SpecBlock, Section 3.1 and Appendix B; shared facts on formats, section 7.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.modules import apply_head
from hf_specdec.decoding.target import TargetModel
from hf_specdec.drafters.pretrained import PretrainedDrafter
from hf_specdec.drafters.registry import name_of
from hf_specdec.drafters.shapes import check_shapes
from hf_specdec.drafters.specblock.configuration import SpecBlockConfig, SpecBlockOptions, default_target_layer_ids
from hf_specdec.drafters.specblock.layers import KeyValueStore, SpecBlockInput, SpecBlockLayer, rank_features
from hf_specdec.drafters.vocabulary import check_draft_to_target

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


class SpecBlockDrafter(PretrainedDrafter):
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
    base_model_prefix = ""
    _no_split_modules: ClassVar = ["SpecBlockLayer"]
    # The embedding is a frozen copy of the target's: official checkpoints omit it, some savers include it.
    _keys_to_ignore_on_load_unexpected: ClassVar = [r"rotary_emb\.inv_freq$", r"^input_layer\.embed_tokens\."]
    side_files: ClassVar[tuple[str, ...]] = (VOCABULARY_FILE,)

    def __init__(self, config: SpecBlockConfig) -> None:
        config.check()
        super().__init__(config)
        width = config.hidden_size
        self.input_layer = SpecBlockInput(config)
        self.layers = nn.ModuleList([SpecBlockLayer(config) for _ in range(config.num_hidden_layers)])
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

    def forward(
        self,
        conditions: Tensor,
        embeddings: Tensor,
        position_ids: Tensor,
        *,
        from_target: bool,
        mask: Tensor | None = None,
        cache: KeyValueStore | None = None,
        read: Tensor | None = None,
    ) -> BlockOutput:
        """States, draft logits and rank logits of every slot of every start; arguments as in `block_hidden`.

        `read`, [batch, starts] bool, selects the starts at which the heads are computed; None for all.
        """
        hidden = self.block_hidden(
            conditions, embeddings, position_ids, from_target=from_target, mask=mask, cache=cache
        )
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
            hidden = layer(hidden.flatten(1, 2), rotary, mask, cache, index).unflatten(1, (starts, slots))
        return hidden

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[..., hidden] before the final norm -> draft logits [..., draft_vocab], rank logits [..., classes], float32.

        No gradient flows from the rank logits into the drafter (Eq. 4).
        """
        normed = self.norm(hidden)
        logits = apply_head(self.lm_head, normed)
        return logits, self._rank_logits(hidden, normed, logits)

    def ranked(self, hidden: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The outputs of the heads that a tree needs, with one top-k over the draft vocabulary.

        Args:
            hidden: [..., hidden], before the final norm.
            width: most candidates of a slot.

        Returns:
            The `width` largest draft logits [..., width] float32, descending; their ids in the draft vocabulary
            [..., width] int64; logsumexp of all draft logits [..., 1]; rank logits [..., classes].
        """
        normed = self.norm(hidden)
        logits = apply_head(self.lm_head, normed)
        top = self.config.rank_features_top
        most = min(logits.shape[-1], max(width, 10, top or 0))
        best, draft_ids = logits.topk(most, dim=-1)
        ordered = top is not None
        rank_logits = self._rank_logits(hidden, normed, best if ordered else logits, ordered=ordered)
        return best[..., :width], draft_ids[..., :width], logits.logsumexp(-1, keepdim=True), rank_logits

    def _rank_logits(self, hidden: Tensor, normed: Tensor, logits: Tensor, *, ordered: bool = False) -> Tensor:
        state = (normed if self.config.rank_state == "normed" else hidden).detach()
        features = rank_features(logits.detach(), self.config.rank_features_top, ordered=ordered)
        rank_logits: Tensor = self.rank_head(torch.cat([state, features.to(state.dtype)], dim=-1)).float()
        return rank_logits

    def condition_of(self, hidden: Tensor) -> Tensor:
        """[..., hidden] state of a slot -> the condition of a block that starts there."""
        return hidden if self.config.draft_condition == "pre_norm" else self.norm(hidden)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids in the draft vocabulary, any shape -> ids in the target's."""
        return draft_ids + self.d2t[draft_ids]

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Sets the draft vocabulary to these ids of the target.

        Args:
            target_ids: [draft_vocab] int64, ascending.

        Raises:
            ValueError: their number is not `draft_vocab_size`, they are not ascending, or one is out of range.
        """
        if len(target_ids) != self.config.draft_vocab_size:
            raise ValueError(
                f"{len(target_ids)} target ids were given for a draft vocabulary of {self.config.draft_vocab_size}."
            )
        target_ids = target_ids.to(self.d2t.device)
        self.d2t.copy_(target_ids - torch.arange(len(target_ids), device=self.d2t.device))
        self.check_vocabulary()
        self.t2d.zero_()[target_ids] = True

    def check_vocabulary(self) -> None:
        """Raises ValueError if the draft vocabulary's map repeats a token, does not ascend, or is out of range."""
        ids = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
        name = name_of(self)
        way_out = "The map is damaged or of another drafter: download the checkpoint again, or leave the file out."
        steps = (ids.diff() <= 0).nonzero()
        if len(steps):
            index = int(steps[0])
            raise ValueError(
                f"The draft vocabulary of {name!r} (d2t) is not increasing: draft id {index} is target id "
                f"{int(ids[index])}, draft id {index + 1} is {int(ids[index + 1])}. {way_out}"
            )
        if int(ids[0]) < 0 or int(ids[-1]) >= self.config.vocab_size:
            raise ValueError(
                f"The draft vocabulary of {name!r} (d2t) spans target ids {int(ids[0])} to {int(ids[-1])}, but the "
                f"target's vocabulary ends at {self.config.vocab_size - 1} (vocab_size {self.config.vocab_size}). "
                f"{way_out}"
            )

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
            maps = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged or hostile pickle may raise anything; its code is not run
            raise ValueError(
                f"{VOCABULARY_FILE} of {name!r} cannot be loaded as plain tensors ({type(error).__name__}): it is "
                "damaged, or contains code, which is never run. Download it again, or remove it if the weights "
                "contain d2t."
            ) from error
        kinds = {key: value.dtype for key, value in maps.items()} if isinstance(maps, dict) and all(
            isinstance(value, Tensor) for value in maps.values()
        ) else type(maps).__name__  # fmt: skip
        if kinds != {"d2t": torch.int64, "t2d": torch.bool}:
            raise ValueError(
                f"{VOCABULARY_FILE} of {name!r} holds {kinds}; it must be a dict of the tensors d2t (int64) and t2d "
                "(bool)."
            )
        return dict(maps)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As for every drafter; also checks the draft vocabulary."""
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        drafter = loaded[0] if isinstance(loaded, tuple) else loaded
        drafter.check_vocabulary()
        named = drafter.target_ids(torch.arange(len(drafter.d2t), device=drafter.d2t.device))
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
        return loaded

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As for every drafter; replaces an existing `vocab_mapping.pt`, which would override the new map."""
        super().save_pretrained(save_directory, *args, **kwargs)
        file = Path(save_directory) / VOCABULARY_FILE
        if file.exists():
            torch.save({"d2t": self.d2t.cpu(), "t2d": self.t2d.cpu()}, file)

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        layers = self.config.target_layer_ids
        depth = model.config.get_text_config(decoder=True).num_hidden_layers
        return tuple(default_target_layer_ids(depth) if layers is None else layers)

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        from hf_specdec.drafters.specblock.candidates import SpecBlockGenerator

        return SpecBlockGenerator(self, target)

    def card_summary(self) -> str:
        return (
            "A SpecBlock drafter: each forward drafts a block of dependent tokens from all selected starts together, "
            "and a rank head decides how many alternatives each slot gets and where blocks start."
        )

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
        from hf_specdec.drafters.specblock import quality

        return quality.report(self, model, prompts)

    def check_target(self, model: PreTrainedModel) -> None:
        check_shapes(
            self,
            model,
            hidden_size=self.config.target_hidden_size,
            embedding_size=self.config.hidden_size,
            vocab_size=self.config.vocab_size,
            layers=self.feature_layers(model),
        )
        rows = model.get_input_embeddings().num_embeddings
        if rows < self.config.vocab_size:  # else `check_vocabulary` has checked the same
            check_draft_to_target(self.d2t, rows, name_of(self))
