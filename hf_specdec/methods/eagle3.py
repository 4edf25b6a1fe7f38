"""EAGLE-3: an autoregressive drafter on fused target features; its tree grows where its confidence is highest.

One decoder layer runs over the concatenation of a token's embedding and the state before that token. For committed
tokens the state is the target's (several of its layers, concatenated and fused); for drafted ones it is the drafter's
own output. A pair is a committed token and the target's features before it. The pairs of a round are appended to the
cache in one forward, after the token that follows the last of them, the next root, is known.

Each level of the tree extends the `top_k` likeliest nodes of the previous one by their `top_k` likeliest tokens. The
likeliest `tree_budget` of all these nodes form the tree. The probability is the drafter's, along the whole path.

The published layouts differ in names, in the meaning of their layer ids and in defaults. `hub/formats/` translates them
to the fields of `Eagle3Config` and sets every field whose default differs between projects. Saved checkpoints have this
config, with their own `model_type`.

In training the drafter reads its own outputs, as it will when it drafts. In the first pass over a row the states are
the target's. In each further pass the token is the next one of the row and the state is the drafter's output of the
previous pass, so that pass j learns what is drafted at depth j. A later pass sees what drafting sees: the pairs of the
first pass up to its own position, and its own chain after that. The labels are the target's probs over the draft
vocabulary; the loss "kl" has the gradient of the paper's cross entropy with them. Source: Section 3.2 (training-time
test); for the weights of the passes SafeAILab/EAGLE.

Source: EAGLE-3, arXiv 2503.01840; SafeAILab/EAGLE; EAGLE-2, arXiv 2406.16858, Sections 4.1 and 4.2 (expansion and
reranking), unchanged in EAGLE-3.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.hf_argparser import HfArg
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.devices import in_inference_mode
from hf_specdec.decoding.exchange import Committed, DraftContext, NodeNotes
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.masks import additive
from hf_specdec.decoding.targets.modules import apply_head, check_table, table_rows
from hf_specdec.decoding.tree import DraftTree, from_host
from hf_specdec.drafting.config import FeatureFields, default_target_layer_ids
from hf_specdec.drafting.draft_logits import TargetVocabularyLogitsProcessor
from hf_specdec.drafting.growth import best_tree, captured_tree, grow_levels, path_notes
from hf_specdec.drafting.layers import CachedAttention, DraftLayer
from hf_specdec.drafting.options import TreeOptions
from hf_specdec.drafting.pretrained import PretrainedDrafter
from hf_specdec.drafting.reader import CommittedReader, EntryShape, NewTokens, behind_committed
from hf_specdec.drafting.registry import Serving, name_of, register
from hf_specdec.drafting.shapes import check_shapes
from hf_specdec.drafting.vocabulary import MappedVocabulary, draftable_rows, head_of_rows, known_ids
from hf_specdec.hub.formats.deepspec import DEEPSPEC_EAGLE3, DEEPSPEC_GEMMA_4
from hf_specdec.hub.formats.safeailab import SAFEAILAB
from hf_specdec.hub.formats.specforge import LATENT_ATTENTION, SPECFORGE
from hf_specdec.hub.formats.speculators import SPECULATORS
from hf_specdec.training.losses import LossName, position_losses
from hf_specdec.training.options import Count, Positive
from hf_specdec.training.passes import block_masks, growing_cache
from hf_specdec.training.recipe import Recipe, ShapeOptions, decoder_shape, register_recipe
from hf_specdec.training.source import Rows, Source
from hf_specdec.training.step import StepOutput, TrainingStep
from hf_specdec.training.vocabulary import (
    DRAFT_VOCAB_SIZE,
    VOCABULARY_HELP,
    checked_vocabulary_size,
    choose_vocabulary,
    copy_final_norm,
    copy_head,
    draft_ids,
)

__all__ = ["Eagle3Config", "Eagle3Drafter", "Eagle3Generator", "Eagle3Options", "Eagle3Step", "new_drafter"]

# Upper bounds of the drafting options: far above useful values, they only catch typing errors.
MAX_DEPTH = 64
MAX_TOP_K = 128


@strict
class Eagle3Config(FeatureFields):
    """The config of a Llama decoder (usually with one layer) and what EAGLE-3 adds.

    `vocab_size` is the target's. The input of the first layer is the concatenation of embedding and state, so its q, k
    and v projections have twice the input size; further layers are Llama layers.

    Args:
        qk_norm: whether each head's queries and keys are normalised before RoPE.
        norm_before_residual: whether the residual of the first layer is the normalised state.
        norm_before_fc: one norm over the concatenated target states.
        fc_norm: a norm for each target state, before the concatenation.
        norm_output: whether the state passed to the next draft step is taken after the final norm.
        norm_before_head: whether the final norm is applied before the head.
        own_embeddings: whether the checkpoint has token embeddings; if not, the target's are used, unscaled.
    """

    model_type = "hf_specdec_eagle3"

    num_hidden_layers: int = 1
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_head: bool = True
    own_embeddings: bool = False

    def check(self) -> None:
        super().check()
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are both true, but a checkpoint has at most one of them.")


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

    def validate(self, config: Any = None) -> None:
        TreeOptions.validate(self, config)
        self.check_integers(depth=MAX_DEPTH, top_k=MAX_TOP_K)


class Eagle3FirstLayer(nn.Module):
    """EAGLE-3's own layer: attention over [embedding ; state], each with its own norm."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = CachedAttention(config, 2 * config.hidden_size, norms=config.qk_norm)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, embeddings: Tensor, states: Tensor, *attention_inputs: Any) -> Tensor:
        """Two [batch, seq, hidden] -> [batch, seq, hidden]."""
        normed = self.hidden_norm(states)
        residual = normed if self.norm_before_residual else states
        inputs = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        states = residual + self.self_attn(inputs, *attention_inputs)
        return states + self.mlp(self.post_attention_layernorm(states))


class PairDrafter(PretrainedDrafter):
    """A drafter that `PairReader` can use: its forward runs over pairs of a token and the state before it."""

    _keys_to_ignore_on_load_unexpected: ClassVar = [r"rotary_emb\.inv_freq$"]

    @property
    def entry_shape(self) -> EntryShape:
        """Number of layers and heads, and sizes of keys, of values and of an indexer's keys in its cache."""
        config = self.config
        return config.num_hidden_layers, config.num_key_value_heads, config.head_dim, None, None

    def fuse(self, features: Tensor) -> Tensor:
        """The states of the target, from its features [batch, seq, taps * hidden]: these, if there is one tap."""
        return features

    def recurrent(self, outputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden], the state that goes into the next draft step: the output itself."""
        return outputs

    def forward(
        self,
        embeddings: Tensor,
        states: Tensor,
        position_ids: Tensor,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        cache: TreeCache | None = None,
    ) -> Tensor:
        """One forward over pairs of a token and the state before it.

        Args:
            embeddings: [batch, seq, hidden], of the tokens.
            states: [batch, seq, hidden], of the position before each token: `fuse` of the target's features, or
                `recurrent` of an earlier output.
            position_ids: [batch, seq] int64, of the states.
            mask: [batch, 1, seq, cached + seq], additive or bool, or None.
            is_causal: causal attention without a mask; only for an empty cache or none.
            cache: holds keys and values of earlier pairs; those of these pairs are appended.

        Returns:
            [batch, seq, hidden], before the final norm; their `logits` are for the token after each pair's token.
        """
        cos, sin = self.rotary_emb(states, position_ids)
        return self.run_layers(embeddings, states, (cos.unsqueeze(2), sin.unsqueeze(2)), mask, is_causal, cache)

    @abstractmethod
    def run_layers(self, embeddings: Tensor, states: Tensor, *attention_inputs: Any) -> Tensor:
        """The layers; each gets the inputs of `CachedAttention.forward`, and its number as the last one."""


class Eagle3Network(MappedVocabulary, PairDrafter):
    """EAGLE-3's layers with head and fusion of target states; subclasses define how they draft."""

    config: Eagle3Config
    _no_split_modules: ClassVar = ["Eagle3FirstLayer", "DraftLayer"]

    def __init__(self, config: Eagle3Config) -> None:
        config.check()
        super().__init__(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        joined = config.num_taps * config.target_hidden_size
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(joined, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                [LlamaRMSNorm(config.target_hidden_size, eps=eps) for _ in range(config.num_taps)]
            )
        self.fc = nn.Linear(joined, hidden, bias=False)
        further = [DraftLayer(config) for _ in range(1, config.num_hidden_layers)]
        self.layers = nn.ModuleList([Eagle3FirstLayer(config), *further])
        self.norm = LlamaRMSNorm(hidden, eps=eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        if config.maps_vocabulary:
            # As published: target id = draft id + d2t[draft id].
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.post_init()

    def fuse(self, features: Tensor) -> Tensor:
        """Projects target states [batch, seq, taps * target_hidden] to [batch, seq, hidden]."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(self.config.num_taps, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def run_layers(self, embeddings: Tensor, states: Tensor, *attention_inputs: Any) -> Tensor:
        first, *further = self.layers
        states = first(embeddings, states, *attention_inputs, 0)
        for index, layer in enumerate(further, start=1):
            states = layer(states, *attention_inputs, index)
        return states

    def logits(self, outputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., draft_vocab] float32."""
        return apply_head(self.lm_head, self.norm(outputs) if self.config.norm_before_head else outputs)

    def recurrent(self, outputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden], the input state of the next draft step."""
        return self.norm(outputs) if self.config.norm_output else outputs

    def restrict_vocabulary(self, draft_vocab: Tensor | Sequence[int]) -> None:
        config, own = self.config, self.target_ids
        rows = draftable_rows(own, draft_vocab, config.vocab_size, name_of(self))
        if len(rows) < len(own):
            self.lm_head, config.draft_vocab_size = head_of_rows(self.lm_head, rows), len(rows)
            self.register_buffer("d2t", own[rows] - torch.arange(len(rows), device=self.device))
            self.source_layout = None  # its files have other shapes

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        return self.config.layers_of(model)

    def card_facts(self) -> dict[str, str]:
        config = self.config
        layers = (
            "EAGLE-3's default" if config.target_layer_ids is None else ", ".join(map(str, config.target_layer_ids))
        )
        return {
            "Method": self.method,
            "Layers": f"{config.num_hidden_layers}, hidden size {config.hidden_size}",
            "Target layers read": layers,
            "Vocabulary": f"{config.vocab_size}, of which {config.draft_vocab_size} can be drafted",
        }

    def check_target(self, model: PreTrainedModel) -> None:
        config = self.config
        check_shapes(
            self,
            model,
            hidden_size=config.target_hidden_size,
            embedding_size=None if config.own_embeddings else config.hidden_size,
            vocab_size=config.vocab_size,
            layers=self.feature_layers(model),
            first_layer=-1,
            d2t=self.d2t if config.maps_vocabulary else None,
        )


class Eagle3Drafter(Eagle3Network):
    """An EAGLE-3 checkpoint as a drafter.

    Drafting options: `Eagle3Options`.

    Relation to its siblings: `dflash` and `medusa` predict all depths in one forward, independently of each other;
    EAGLE-3 runs once per level, conditioned on the path's tokens. `peagle` has the same layers, and runs once.
    """

    config_class = Eagle3Config
    options_class = Eagle3Options
    options: Eagle3Options
    card_summary = (
        "An EAGLE-3 drafter: it drafts token by token, from fused hidden states of the target and then from its "
        "own, with its own head. hf_specdec grows the draft tree where its confidence is highest."
    )

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return Eagle3Generator(self, target)


class PairReader(CommittedReader):
    """Reads the committed pairs of each row.

    Args:
        drafter: an `Eagle3Drafter`, or one with its interface.
        target: of the call.
        depth: most tokens of a drafted path.
        room: cache entries that drafting needs after the pairs.
    """

    vocab_size: int  # columns of the target's logits

    def __init__(self, drafter: Any, target: TargetModel, *, depth: int, room: int) -> None:
        self.own_embeddings = drafter.config.own_embeddings
        self.embeddings: nn.Module = (
            drafter.embed_tokens if self.own_embeddings else target.model.get_input_embeddings()
        )
        check_table(self.embeddings)
        super().__init__(
            drafter, target, drafter.entry_shape, borrowed=(self.embeddings,), most=depth + 1, room=room,
            compile_mode=drafter.options.compile_mode,
        )  # fmt: skip

    def observe(self, committed: Committed) -> None:
        super().observe(committed)
        self.vocab_size = committed.target_logits.shape[-1]

    def embed(self, token_ids: Tensor) -> Tensor:
        """[batch, seq] -> [batch, seq, hidden] of the drafter's dtype, on its device."""
        table: Any = self.embeddings
        if self.own_embeddings:  # the target may have tokens that this table lacks
            token_ids = known_ids(token_ids, table.num_embeddings)
        # Subclasses of nn.Embedding may scale their outputs; drafters are trained on the unscaled table.
        return table_rows(table, token_ids).to(device=self.device, dtype=self.dtype)

    def read_pairs(self, root_ids: Tensor) -> Tensor:
        """Reads the pairs committed since the last round; [batch, 1, hidden], each row's output at its last pair."""
        self.last = self.read(_pairs, root_ids.to(self.device), *self.last)
        return self.last[0]


def _pairs(reader: PairReader, new: NewTokens, root_ids: Tensor, before: Tensor | None = None) -> tuple[Tensor]:
    """The drafter's output at each row's last pair, [batch, 1, hidden]; `before` in rows without new pairs."""
    drafter, seen = reader.drafter, new.causal_mask()
    outputs = drafter(
        reader.embed(new.following(root_ids)),
        drafter.fuse(new.features),
        new.position_ids,
        mask=None if seen is None else additive(seen, reader.dtype),
        is_causal=seen is None,
        cache=reader.cache,
    )
    return (new.at_last(outputs, before),)


class Eagle3Generator(PairReader, TreeCandidateGenerator):
    """Draft trees of an EAGLE-3 drafter: its nodes follow the pairs in the cache, and are dropped after the draft."""

    drops_rows = joins_rows = True

    def __init__(self, drafter: Any, target: TargetModel) -> None:  # an Eagle3Drafter, or one with its interface
        options = drafter.options
        self.depth, self.top_k, self.tree_budget = options.depth, options.top_k, options.node_limit
        super().__init__(drafter, target, depth=self.depth, room=(self.depth - 1) * self.top_k)

    @in_inference_mode
    def draft(self, context: DraftContext) -> DraftTree:
        return self._grow(context, self.read_pairs(context.root_ids))

    def _grow(self, context: DraftContext, outputs: Tensor) -> DraftTree:
        """The tree behind the roots, from the drafter's outputs [batch, 1, hidden] at them."""
        root_ids, positions = context.root_ids.to(self.device), context.root_positions.to(self.device)
        key = self.depth, self.top_k, self.vocab_size
        levels = self.run(_levels, outputs, positions, self.cache.lengths, key=key)
        context.lap("draft")
        build = functools.partial(best_tree, depth=self.depth, budget=self.tree_budget)
        tree = captured_tree(self.calls, self.tree_budget, self.depth, build, root_ids, *levels)
        context.lap("tree")
        return tree

    @property
    def rewinds(self) -> bool:
        """Whether `draft_text` can draft ahead: not in captured rounds, whose nodes have fixed places."""
        return self.calls is None

    @torch.no_grad()
    def draft_text(self, context: DraftContext, certain: Sequence[int]) -> DraftTree:
        """The tree for a text of which only the first tokens are committed, `certain` of each row; it is not kept.

        The target's states at the further tokens do not exist yet: the drafter reads its own outputs in their place, as
        below the root of a tree. So the tree is not that of drafting afterwards.
        """
        texts, device = context.texts, self.device
        ahead = [length - known for length, known in zip(context.lengths, certain, strict=True)]
        if self.pending is not None:
            self.read_pairs(from_host([text[known - 1] for text, known in zip(texts, certain, strict=True)], device))
        cache, (last,) = self.cache, self.last
        committed, steps = cache.row_lengths, max(ahead)
        cache.reserve(steps + self.room)
        positions = context.root_positions.to(device) - from_host(ahead, device)
        for step in range(steps):
            tokens = [text[min(known + step, len(text) - 1)] for text, known in zip(texts, certain, strict=True)]
            own = torch.ones(len(ahead), 1, 1, dtype=torch.bool, device=device)
            outputs = self.drafter(
                self.embed(from_host(tokens, device).unsqueeze(1)),
                self.drafter.recurrent(last),
                (positions + step).unsqueeze(1),
                mask=additive(behind_committed(own, cache.longest, cache.lengths), self.dtype),
                cache=cache,
            )
            more = Counts.of([int(step < count) for count in ahead], device)
            cache.commit_first(more)
            last = outputs.where((more.tensor > 0)[:, None, None], last)
        tree = self._grow(context, last)
        cache.rollback(committed)
        return tree

    def logits(self, outputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., draft_vocab] float32; tokens that the target lacks get -inf."""
        logits = self.drafter.logits(outputs)
        if self.drafter.config.maps_vocabulary:  # `check_target` has checked that the map has only the target's tokens
            return logits
        return TargetVocabularyLogitsProcessor(self.vocab_size)(None, logits)

    def describe(self, tree: DraftTree) -> NodeNotes | None:
        return path_notes(tree)


def _levels(
    at: int, generator: Eagle3Generator, outputs: Tensor, root_positions: Tensor, lengths: Tensor
) -> tuple[Tensor, ...]:
    """All candidates, level after level: scores, token ids, parents (see `best_tree`), and which rows are finite.

    Args:
        at: where the nodes' entries begin in the cache, after those of the pairs.
        generator: of the call.
        outputs: [batch, 1, hidden], the drafter's at the roots.
        root_positions: [batch] int64.
        lengths: [batch] int64, pairs of each row.
    """
    drafter, cache = generator.drafter, generator.cache
    batch, device = len(outputs), outputs.device
    width = min(generator.top_k, drafter.config.draft_vocab_size)
    positions = root_positions.unsqueeze(1)
    rows = torch.arange(batch, device=device).unsqueeze(1)
    itself = torch.eye(width, dtype=torch.bool, device=device).expand(batch, width, width)
    # Of the level above: the drafter's outputs, and the nodes of this round that each node sees.
    last, block = outputs, itself.new_empty(batch, 1, 0)

    def extend(level: int, token_ids: Tensor, above: Tensor) -> Tensor:
        nonlocal last, block
        block = torch.cat([block[rows, above], itself], dim=-1)
        with cache.writing_after((level - 1) * width):
            last = drafter(
                generator.embed(token_ids),
                drafter.recurrent(last)[rows, above],
                (positions + level - 1).expand(-1, width),
                mask=additive(behind_committed(block, at, lengths), generator.dtype),
                cache=cache,
            )
        return generator.logits(last)

    return grow_levels(generator.logits(outputs).squeeze(1), extend, generator.depth, width, drafter.to_target_ids)


class Eagle3Step(TrainingStep):
    """Loss of one batch of rows for an `Eagle3Drafter`: summed over the passes.

    Args:
        drafter: the drafter to train.
        target: the frozen target it drafts for.
        passes: depths to train.
        decay: weight of each pass relative to the previous one; 0.8 in the published code.
        loss: see `position_losses`.

    Raises:
        ValueError: the drafter does not fit the target, or an argument is out of range.
    """

    def __init__(
        self,
        drafter: Eagle3Drafter,
        target: PreTrainedModel,
        *,
        passes: int = 7,
        decay: float = 0.8,
        loss: LossName = "kl",
    ) -> None:
        super().__init__(drafter, target, loss, last_hidden=True)
        if drafter.config.own_embeddings:
            raise ValueError(
                f"Drafter {drafter.name_or_path or type(drafter).__name__!r} has token embeddings of its own, and this "
                "step does not train them. Train a new drafter, see hf_specdec.methods.eagle3.new_drafter."
            )
        if passes < 1:
            raise ValueError(f"passes={passes} must be at least 1.")
        if not 0 < decay <= 1:
            raise ValueError(f"decay={decay!r} must be above 0 and at most 1.")
        self.passes, self.decay = passes, decay
        self.table = target.get_input_embeddings().weight  # unscaled, also for targets that scale it

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor], *, training: bool) -> StepOutput:
        states = self.reader.of_batch(batch)
        assert states.last_hidden is not None
        drafter, input_ids = self.drafter, batch["input_ids"]
        dtype, (_, width) = next(model.parameters()).dtype, input_ids.shape
        # Read at each step: the training rows, or --start-from, replace the vocabulary after construction.
        ids = drafter.to_target_ids(torch.arange(drafter.config.draft_vocab_size, device=drafter.device))
        with torch.no_grad():
            target_ids = ids if drafter.config.maps_vocabulary else None
            target_logits, labels = self.reader.draft_labels(states.last_hidden, target_ids, whole=not training)
        # The token after each position; drafting starts there if the target wrote it and another token follows.
        starts = torch.arange(1, width + 1, device=input_ids.device)
        counted = starts >= batch["first_anchor"].unsqueeze(1)
        positions = torch.arange(width, device=input_ids.device)
        stored = growing_cache(drafter.config.num_hidden_layers)
        masks = block_masks(width, 1, [1] * (self.passes - 1), device=input_ids.device)
        refused = None if "refused" not in batch else draft_ids(batch["refused"], ids)
        recurrent, losses, correct, labelled = drafter.fuse(states.features.to(dtype)), [], [], []
        for depth, mask in enumerate(masks):
            following = (starts + depth).clamp(max=width - 1)
            outputs = model(
                nn.functional.embedding(input_ids[:, following], self.table).to(dtype),
                recurrent,
                (positions + depth).expand(len(input_ids), -1),
                mask=mask,
                is_causal=mask is None,
                cache=stored,
            )
            recurrent = drafter.recurrent(outputs)
            seen = counted & (starts + depth + 1 < batch["length"].unsqueeze(1))
            rows, places = seen.nonzero(as_tuple=True)
            at = rows, following[places]  # of the token that this pass has read: the labels are of the one after it
            logits = drafter.logits(outputs[seen])
            negatives = None if refused is None else refused[:, (starts + depth + 1).clamp(max=width - 1)][seen]
            values = position_losses(self.loss, logits, target_logits[at], refused=negatives)
            losses.append(self.decay**depth * values.sum() / seen.sum().clamp(min=1))
            correct.append(torch.zeros_like(seen).masked_scatter_(seen, logits.detach().argmax(-1) == labels[at]))
            labelled.append(seen)
        return StepOutput(torch.stack(losses).sum(), torch.stack(correct, -1), torch.stack(labelled, -1))


def new_drafter(
    target: PreTrainedModel,
    *,
    draft_vocab_size: int | None = None,
    target_layer_ids: Sequence[int] | None = None,
    intermediate_size: int | None = None,
) -> Eagle3Drafter:
    """A one-layer EAGLE-3 drafter for a target, with random weights; norm and head start as the target's.

    Args:
        target: the model to draft for.
        draft_vocab_size: tokens of the draft vocabulary: the first ones, until `set_vocabulary`; None for all.
        target_layer_ids: target layers to read; None for EAGLE's three.
        intermediate_size: of the MLP; None for the target's.
    """
    if target_layer_ids is None:
        target_layer_ids = default_target_layer_ids(target.config.get_text_config(decoder=True).num_hidden_layers)
    drafter = Eagle3Drafter(
        Eagle3Config(
            draft_vocab_size=draft_vocab_size,
            target_layer_ids=list(target_layer_ids),
            num_hidden_layers=1,
            **decoder_shape(target, intermediate_size),
        )
    )
    drafter.check_target(target)
    _copy_head(drafter, target)
    return drafter


def _copy_head(drafter: Eagle3Drafter, target: PreTrainedModel) -> None:
    """Copies the target's final norm and the rows of its head for the draft vocabulary."""
    copy_head(drafter.lm_head.weight, target, drafter.to_target_ids(torch.arange(drafter.config.draft_vocab_size)))
    copy_final_norm(drafter.norm.weight, target)


@dataclass(kw_only=True)
class Eagle3TrainOptions(ShapeOptions):
    """Options of the training command for EAGLE-3."""

    draft_vocab_size: Count | None = HfArg(default=None, help=f"{VOCABULARY_HELP}, but at most {DRAFT_VOCAB_SIZE}")
    passes: Count = HfArg(default=7, help="depths to train")
    decay: Positive = HfArg(default=0.8, help="weight of each pass relative to the previous one")


def _prepare(options: Eagle3TrainOptions, target: PreTrainedModel, source: Source) -> tuple[Eagle3Drafter, Eagle3Step]:
    drafter = new_drafter(
        target,
        draft_vocab_size=checked_vocabulary_size(options.draft_vocab_size, target, DRAFT_VOCAB_SIZE),
        target_layer_ids=options.taps,
        intermediate_size=options.intermediate_size,
    )
    return drafter, Eagle3Step(drafter, target, passes=options.passes, decay=options.decay, loss=options.loss)


def _read_rows(options: Eagle3TrainOptions, drafter: Eagle3Drafter, target: PreTrainedModel, rows: Rows) -> None:
    if drafter.config.maps_vocabulary:
        drafter.set_vocabulary(choose_vocabulary(rows, drafter.config.draft_vocab_size, target))
        _copy_head(drafter, target)


register(
    "eagle3",
    Eagle3Drafter,
    layouts=(SAFEAILAB, SPECFORGE, DEEPSPEC_EAGLE3, SPECULATORS["eagle3"]),
    not_read=(DEEPSPEC_GEMMA_4, LATENT_ATTENTION),
    serving=Serving("eagle3"),
)
register_recipe(
    Recipe(
        "eagle3",
        Eagle3TrainOptions,
        _prepare,
        read_rows=_read_rows,
        # As many passes as tokens of a drafted path.
        further=lambda drafter, target: Eagle3Step(drafter, target, passes=drafter.options.depth),
    )
)
