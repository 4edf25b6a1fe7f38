"""DSpark: a DFlash block whose slots are conditioned on the token drafted before them; layout, network and drafting.

The block is run once per round, as in DFlash. The logits of its slots are then computed in order, each given the token
drafted before it: U_k + W2 z(previous token). The network is not run again. So a tree is grown level by level, with
each node's children from its own distribution, and the likeliest `tree_budget` paths are selected. DDTree builds the
same tree from marginals, which are not conditioned on the previous token. The confidence head estimates how much of a
chain will be accepted (`tree_budget="auto"`); trees are ranked by the distributions alone. `dflash2.py` has the other
`ConditionalDrafter`, whose slots are conditioned on the previous token too. Source: DSpark, arXiv 2607.05147; shared
facts on formats of 2026, sections 2.2 to 2.4; sgl-project/SpecForge; deepseek-ai/DeepSpec; DDTree, arXiv 2604.12989,
for the tree.

Layouts: DeepSpec has the keys at the top level and stores embeddings and head; SpecForge has the keys in
`dflash_config` and uses the target's embeddings and head. Some files mix the two, so keys are read in either place, and
tensor names determine which heads exist. Slots are next-token by default, in AngelSpec's layout fill-in. Source: shared
facts on formats of 2026, section 2.

In training the Markov head reads the row's tokens in training and drafted tokens when it drafts. The confidence head
learns the probability that a sampled draft is accepted, 1 - TV between the target's probs and the drafter's; with loss
"ce", which does not compute the target's probs, whether the most probable draft is right. It passes no gradient to
other layers. Source: DSpark, arXiv 2607.05147; shared facts on formats of 2026, section 2.4.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid
from transformers import PreTrainedModel
from transformers.hf_argparser import HfArg

from hf_specdec.decoding.devices import in_inference_mode
from hf_specdec.decoding.exchange import Committed, DraftContext, NodeNotes, path_notes
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.noise import draw
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.draft_logits import TargetVocabularyLogitsProcessor
from hf_specdec.drafting.growth import Slots, conditional_tree
from hf_specdec.drafting.registry import register
from hf_specdec.drafting.vocabulary import head_of_rows, known_ids
from hf_specdec.hub.formats.base import (
    Config,
    Format,
    Headers,
    Reading,
    Unsupported,
    architecture,
    check_vocabulary_maps,
    decoder_shape,
    once,
)
from hf_specdec.hub.formats.deepspec import GEMMA_4_LAYERS
from hf_specdec.hub.formats.keys import OURS, ROPES, Section, decoder
from hf_specdec.hub.formats.speculators import section, speculators
from hf_specdec.methods.dflash.drafting import DFlashMarginals
from hf_specdec.methods.dflash.layouts import (
    BLOCK_KEYS,
    BLOCK_SERVING,
    block_config,
    check_causality,
    dflash_reading,
    read_speculators_dflash,
)
from hf_specdec.methods.dflash.network import DFlashConfig, DFlashDrafter, DFlashOptions, block_field
from hf_specdec.methods.dflash.training import DFlashStep, DFlashTrainOptions, new_drafter, prepare, read_rows
from hf_specdec.training.options import Count
from hf_specdec.training.recipe import Recipe, register_recipe
from hf_specdec.training.source import RowSource

TREE, CHAIN = "dspark", "dspark_chain"
MARKOV_HEADS = ("vanilla", "gated", "rnn")


@strict
class DSparkConfig(DFlashConfig):
    """A `DFlashConfig` whose `dflash_config` has DSpark's own fields.

    `markov_rank` (0: no Markov head), `markov_head_type` (one of `MARKOV_HEADS`), `enable_confidence_head` and
    `confidence_head_with_markov` (whether that head also reads the embedding of the previous token); `projector_type`
    is "dspark". `sample_from_anchor` is true by default.
    """

    architecture: ClassVar[str | None] = "DSparkDraftModel"

    def __post_init__(self, **kwargs: Any) -> None:
        block = {"projector_type": "dspark", "sample_from_anchor": True}
        self.dflash_config = block | (self.dflash_config or {})
        super().__post_init__(**kwargs)

    def check(self) -> None:
        super().check()
        rank, kind = self.markov_rank, self.markov_head_type
        self.check_sizes("markov_rank", least=0, where=" in this DSpark config")
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

    markov_rank = block_field("markov_rank", 0)
    markov_head_type = block_field("markov_head_type", "vanilla")
    enable_confidence_head = block_field("enable_confidence_head", False)

    @property
    def confidence_head_with_markov(self) -> bool:
        """Whether that head also reads the previous token."""
        return bool(self.enable_confidence_head and self.dflash_config.get("confidence_head_with_markov"))


@dataclass(slots=True, kw_only=True)
class DSparkOptions(DFlashOptions):
    """Drafting options of a DSpark drafter.

    Attributes:
        method: `"dspark"` for the best-first tree, `"dspark_chain"` for one path, as published; it is sampled in calls
            that sample.
        tree_budget: see `TreeOptions`. An integer does not affect the chain, which has the length of the block;
            `"auto"` shortens chains that are not sampled too.
        block_size: slots of a block, root included; at most the trained number, which None selects.
    """

    METHODS = (TREE, CHAIN)

    method: str = TREE


class MarkovHead(nn.Module):
    """The bias b = W2 z of a slot's logits, where z comes from W1[previous token] and, by `kind`, from the slot.

    Args:
        kind: "vanilla": z is the embedding e of the previous token. "gated": e times a gate of the slot's state and e.
            "rnn": z comes from a recurrent state over the earlier slots, the slot's state and e.
        rank: width of e and z.
        vocab_size: rows of W1, the target's ids.
        draft_vocab_size: rows of W2, the drafter's ids.
        hidden_size: of a slot's state.
    """

    def __init__(self, kind: str, rank: int, *, vocab_size: int, draft_vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[...] int64 ids of the target -> [..., rank]; may include tokens that the table lacks."""
        return self.markov_w1(known_ids(token_ids, self.markov_w1.num_embeddings))

    def start(self, embedded: Tensor) -> Tensor:
        """[..., rank], the recurrent state before the first slot, for embeddings of this shape."""
        return torch.zeros_like(embedded)

    def forward(self, hidden: Tensor, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One slot: the input of W2, and the recurrent state after it.

        Args:
            hidden: [..., hidden], the slot's.
            embedded: [..., rank], from `embed`, of the token before the slot.
            state: [..., rank], from `start` or from the slot before; only "rnn" uses it.
        """
        if self.kind == "vanilla":
            return embedded, state
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1))) * embedded, state
        gate, candidate, output = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def of_blocks(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """[..., slots, hidden] and [..., slots, rank] -> [..., slots, rank], the input of W2 at all slots, in order."""
        if self.kind != "rnn":
            return self(hidden, embedded, embedded)[0]
        state, codes = self.start(embedded[..., 0, :]), []
        for slot, token in zip(hidden.unbind(-2), embedded.unbind(-2), strict=True):
            code, state = self(slot, token, state)
            codes.append(code)
        return torch.stack(codes, dim=-2)


class ConfidenceHead(nn.Module):
    """A logit of the probability that a slot is accepted, given that the earlier slots were.

    Args:
        in_size: input size: the slot's state, and the embedding of the previous token if the config says so.
    """

    def __init__(self, in_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(in_size, 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """[..., hidden] and [..., rank] -> [...]."""
        read = hidden if embedded is None else torch.cat([hidden, embedded], dim=-1)
        return self.proj(read).squeeze(-1)


class ConditionalDrafter(DFlashDrafter):
    """A DFlash drafter whose slots are conditioned on the previous token."""

    options_class: ClassVar[type[DSparkOptions]] = DSparkOptions
    options: DSparkOptions

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        if self.method == self.methods[0]:
            return DSparkTree(self, target)
        return DSparkChain(self, target)

    def slots(self, states: Tensor, logits: Tensor, root_ids: Tensor) -> Slots:
        """The slots of one round.

        Args:
            states: [batch, block, hidden] of all slots.
            logits: [batch, depth, draft_vocab] float32 of the slots that draft.
            root_ids: [batch] int64.
        """
        raise NotImplementedError


class DSparkDrafter(ConditionalDrafter):
    """A DSpark checkpoint as a drafter: `method="dspark"` drafts the best-first tree, `"dspark_chain"` one path.

    Drafting options: `DSparkOptions`.
    """

    config_class = DSparkConfig
    config: DSparkConfig
    card_summary = (
        "A DSpark drafter: it fills a block of masked slots in one forward, from the hidden states of the target, "
        "and conditions each slot on the token drafted before it. hf_specdec drafts with it either the likeliest "
        'tree (`method="dspark"`, the default) or one chain (`method="dspark_chain"`).'
    )

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        hidden, rank = config.hidden_size, config.markov_rank
        self.markov_head: MarkovHead | None = None
        self.confidence_head: ConfidenceHead | None = None
        if rank:
            self.markov_head = MarkovHead(
                config.markov_head_type,
                rank,
                vocab_size=config.vocab_size,
                draft_vocab_size=config.draft_vocab_size,
                hidden_size=hidden,
            )
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(hidden + (rank if config.confidence_head_with_markov else 0))
        self.post_init()

    def keep_draft_rows(self, rows: Tensor) -> None:
        if self.markov_head is not None:
            self.markov_head.markov_w2 = head_of_rows(self.markov_head.markov_w2, rows)

    def draft_logits(self, hidden: Tensor, lm_head: nn.Module) -> Tensor:
        # The Markov head has `draft_vocab_size` columns; the target's head may have more or fewer.
        logits = super().draft_logits(hidden, lm_head)
        return TargetVocabularyLogitsProcessor(self.config.draft_vocab_size)(None, logits)

    def confidence(self, hidden: Tensor, embedded: Tensor | None) -> Tensor | None:
        """Logits of the probability that slots are accepted; None without a confidence head.

        Args:
            hidden: [..., hidden], of the slots.
            embedded: [..., rank], of the tokens before them; None without a Markov head.
        """
        if self.confidence_head is None:
            return None
        return self.confidence_head(hidden, embedded if self.config.confidence_head_with_markov else None)

    def slots(self, states: Tensor, logits: Tensor, root_ids: Tensor) -> Slots:
        return MarkovSlots(self, states, logits, root_ids)

    def card_facts(self) -> dict[str, str]:
        config, facts = self.config, super().card_facts()
        facts["Method"] = f"{self.loaded_options().method}, on a DSpark drafter"
        if config.markov_rank:
            facts["Markov head"] = f"{config.markov_head_type}, rank {config.markov_rank}"
        facts["Confidence head"] = "yes" if config.enable_confidence_head else "no"
        return facts


class MarkovSlots(Slots):
    """A DSpark drafter's slots, see `Slots`; `state` is the Markov head's."""

    def __init__(self, drafter: DSparkDrafter, states: Tensor, logits: Tensor, root_ids: Tensor) -> None:
        self.drafter, self.logits = drafter, logits
        first = drafter.config.first_slot
        self.states = states[:, first:]
        self.depth = self.states.shape[1]
        if (head := drafter.markov_head) is not None:
            embedded = head.embed(root_ids.unsqueeze(1))
            self.state = head.start(embedded)
            if first:  # recurrent heads were trained with the root's slot as first step, although it drafts nothing
                _, self.state = head(states[:, :1], embedded, self.state)

    def step(self, slot: int, token_ids: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See `Slots.step`."""
        logits, head = self.logits[:, slot, None], self.drafter.markov_head
        if head is None:
            return logits.expand(-1, token_ids.shape[1], -1), state
        assert state is not None
        hidden = self.states[:, slot, None].expand(-1, token_ids.shape[1], -1)
        code, state = head(hidden, head.embed(token_ids), state)
        return logits + head.markov_w2(code).float(), state

    def confidence(self, slot: int, token_ids: Tensor) -> Tensor | None:
        """See `Slots.confidence`."""
        head = self.drafter.markov_head
        logit = self.drafter.confidence(self.states[:, slot], None if head is None else head.embed(token_ids))
        return None if logit is None else logsigmoid(logit.float())


class DSparkGenerator(DFlashMarginals, TreeCandidateGenerator):
    """One `generate` call of a `ConditionalDrafter`; subclasses build a tree from the slots.

    Args:
        drafter: with its options.
        target: of the call.
    """

    def __init__(self, drafter: ConditionalDrafter, target: TargetModel) -> None:
        super().__init__(drafter, target, states=True)
        self.drafts_early = False  # a tree is not of one shape, and a chain may be sampled
        self.target_ids = drafter.target_ids
        self.columns = 0  # of the target's logits

    @abstractmethod
    def tree(self, context: DraftContext, slots: Slots) -> DraftTree:
        """The tree of a round."""

    @in_inference_mode
    def draft(self, context: DraftContext) -> DraftTree:
        states = self.marginals(context)
        logits = self.drafter.draft_logits(states[:, self.drafter.config.first_slot :], self.lm_head).to(states.device)
        logits[..., self.excluded_ids] = -torch.inf
        slots = self.drafter.slots(states, logits, context.root_ids.to(states.device))
        context.lap("draft")
        tree = self.tree(context, slots)
        context.lap("tree")
        return tree

    def observe(self, committed: Committed) -> None:
        if committed.tree is None:
            self.columns = committed.target_logits.shape[-1]
            # Draft ids that are never drafted: the mask token, and tokens beyond the target's logits.
            ids, mask_id = self.target_ids, self.drafter.config.mask_token_id
            self.excluded_ids = ((ids == mask_id) | (ids >= self.columns)).nonzero().squeeze(1)
        super().observe(committed)

    def describe(self, tree: DraftTree) -> NodeNotes | None:
        return path_notes(tree, tree.depths.clamp(max=1))  # one forward for all depths


class DSparkTree(DSparkGenerator):
    """The likeliest `tree_budget` paths, with each token's probability conditioned on the path before it."""

    def tree(self, context: DraftContext, slots: Slots) -> DraftTree:
        budget = context.at_most(self.drafter.options.node_limit)
        return conditional_tree(context.root_ids, slots, self.target_ids, budget)


class DSparkChain(DSparkGenerator):
    """One path: each slot's likeliest token, or in calls that sample a sampled one with its distribution."""

    def tree(self, context: DraftContext, slots: Slots) -> DraftTree:
        device = slots.logits.device
        to_target = TargetVocabularyLogitsProcessor(self.drafter.config.vocab_size or self.columns, self.target_ids)
        to_columns = TargetVocabularyLogitsProcessor(self.columns)
        finite = slots.logits.amax(-1).isfinite().all(1)
        token_ids, state = context.root_ids.to(device).unsqueeze(1), slots.state
        draft_probs, paths = [], [torch.zeros(token_ids.shape, device=device)]
        for slot in range(slots.depth):
            before = token_ids[:, -1]
            logits, state = slots.step(slot, before.unsqueeze(1), state)
            logits = to_columns(None, to_target(None, logits.squeeze(1)))
            # Rows with non-finite logits get no draft, but must have a distribution.
            logits = logits.masked_fill(~finite.unsqueeze(1), 0.0)
            if context.choice.do_sample:
                draft_probs.append(context.choice.warpers(token_ids[:, -1:], logits).softmax(-1))
                chosen = draw(draft_probs[-1]).unsqueeze(1)
            else:
                chosen = logits.argmax(-1, keepdim=True)
                survival = slots.confidence(slot, before)
                if survival is None:
                    survival = logits.log_softmax(-1).gather(1, chosen).squeeze(1)
                paths.append(paths[-1] + survival.unsqueeze(1))
            token_ids = torch.cat([token_ids, chosen], dim=1)
        if draft_probs:
            return DraftTree.chain(token_ids, finite=finite, draft_probs=torch.stack(draft_probs, dim=1))
        return replace(DraftTree.chain(token_ids, finite=finite), path_logprobs=torch.cat(paths, 1))


class DSparkStep(DFlashStep):
    """Loss of one batch of rows for a `DSparkDrafter`; arguments as for `DFlashStep`."""

    drafter: DSparkDrafter

    def head_input(self, hidden: Tensor, previous_ids: Tensor) -> Tensor:
        """[batch, anchors, depth, hidden + 2 rank]: the slots' states, the input of W2, and the previous tokens."""
        states, head = super().head_input(hidden, previous_ids), self.drafter.markov_head
        if head is None:
            return states
        embedded = head.embed(previous_ids)
        if self.config.first_slot:  # the recurrent head starts at the anchor's own slot
            whole = torch.cat([embedded[:, :, :1], embedded], dim=2)
            codes = head.of_blocks(hidden, whole)[:, :, 1:]
        else:
            codes = head.of_blocks(states, embedded)
        return torch.cat([states, codes, embedded], dim=-1)

    def _parts(self, head_input: Tensor) -> tuple[Tensor, ...]:
        rank = self.drafter.config.markov_rank
        return head_input.split([head_input.shape[-1] - 2 * rank, rank, rank], dim=-1)

    def draft_head(self, head_input: Tensor) -> Tensor:
        states, codes, _ = self._parts(head_input)
        logits = super().draft_head(states)
        head = self.drafter.markov_head
        return logits if head is None else logits + head.markov_w2(codes).float()

    @property
    def wants_agreement(self) -> bool:
        return self.drafter.confidence_head is not None

    def further_losses(self, head_input: Tensor, agreement: Tensor) -> Tensor:
        states, _, embedded = self._parts(head_input.detach())
        confidence = self.drafter.confidence(states, embedded)
        assert confidence is not None, "agreement is computed only with a confidence head"
        return binary_cross_entropy_with_logits(confidence.float(), agreement.clamp(0, 1), reduction="none")


def new_dspark_drafter(
    target: PreTrainedModel,
    *,
    block_size: int = 7,
    markov_rank: int = 64,
    markov_head_type: str = "vanilla",
    **options: Any,
) -> DSparkDrafter:
    """A DSpark drafter for a target, with random weights, next-token slots and a confidence head.

    Args:
        target: the model to draft for.
        block_size: slots of a block, including the root's; all of them draft.
        markov_rank: width of the Markov head.
        markov_head_type: "vanilla", "gated" or "rnn".
        options: as for DFlash's; `mask_token_id` is required.
    """
    return new_drafter(
        target,
        drafter_class=DSparkDrafter,
        block_size=block_size,
        markov_rank=markov_rank,
        markov_head_type=markov_head_type,
        sample_from_anchor=True,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        **options,
    )


@dataclass(kw_only=True)
class DSparkTrainOptions(DFlashTrainOptions):
    """Options of the training command for DSpark."""

    block_size: Count = HfArg(default=7, help="slots of a block, including the root's; all of them draft")
    markov_rank: Count = HfArg(default=64, help="width of the Markov head")
    markov_head_type: str = HfArg(default="vanilla", help="of the Markov head", metadata={"choices": MARKOV_HEADS})


def _prepare(
    options: DSparkTrainOptions, target: PreTrainedModel, source: RowSource
) -> tuple[DFlashDrafter, DFlashStep]:
    return prepare(
        options,
        target,
        source,
        new=new_dspark_drafter,
        step=DSparkStep,
        markov_rank=options.markov_rank,
        markov_head_type=options.markov_head_type,
    )


HEAD_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_BLOCK = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "sample_from_anchor",
    "causal",
    "projector_type",
    *HEAD_KEYS,
)
_IN_BLOCK_MASK = ("is_causal", "dflash_query_causal")
# DSpark classes with Qwen3 layers.
_CLASSES = ("Qwen3DSparkModel", "DSparkDraftModel", "Lfm2DSparkDraftModel")
# AngelSpec's names, and ours.
_ANGELSPEC = {"context_proj.": "fc.", "context_norm.": "hidden_norm.", "final_norm.": "norm."}


def is_dspark(fields: Config) -> bool:
    """Whether a `config.json` describes a DSpark drafter with Qwen3 layers."""
    block: Any = fields.get("dflash_config") or {}
    named = any(name in _CLASSES for name in fields.get("architectures") or ())
    ranked = bool(fields.get("markov_rank") or block.get("markov_rank"))
    return named or block.get("projector_type") == "dspark" or ranked


def read_dspark(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of a DSpark drafter.

    Raises:
        ValueError: a key is in two places, with different values.
    """
    angelspec = fields.get("model_type") == "dspark"
    nested = dict(fields.get("dflash_config") or {})
    block = {key: once(fields, nested, key) for key in _BLOCK}
    block = {key: value for key, value in block.items() if value is not None}
    block.setdefault("sample_from_anchor", not angelspec)
    alpha = once(fields, nested, "confidence_head_alpha")  # weight of its loss: positive if it was trained
    block.setdefault("enable_confidence_head", bool(alpha))
    causal = {key: fields[key] for key in _IN_BLOCK_MASK if fields.get(key) is not None}
    check_causality(causal | {"causal": block.get("causal")})
    rope = once(fields, nested, "rope_is_neox_style")
    shape = decoder_shape(fields, "qwen3")
    shape["rope_parameters"].pop("partial_rotary_factor", None)  # the target's; draft layers rotate all dimensions
    ours = shape | {
        "draft_vocab_size": once(fields, nested, "draft_vocab_size") or fields.get("vocab_size"),
        "final_logit_softcapping": fields.get("final_logit_softcapping"),
        # In AngelSpec's configs, num_target_layers is the number of layers that are read.
        "num_target_layers": fields.get("target_num_hidden_layers" if angelspec else "num_target_layers"),
        "is_causal": next(map(bool, causal.values()), None),
        "target_name_or_path": fields.get("target_name_or_path", fields.get("target_model_name_or_path")),
        **{key: fields[key] for key in OURS if fields.get(key) is not None},
        **({} if rope is None else {"rope_is_neox_style": rope}),
    }
    if nested.get("own_head") or nested.get("own_embeddings"):  # saved by this library; headers may still be unknown
        block |= {key: bool(nested.get(key)) for key in ("own_head", "own_embeddings")}
    return with_heads(dflash_reading(ours, block, stored), stored)


def with_heads(reading: Reading, stored: Headers | None) -> Reading:
    """Completes a reading with the heads that the headers have, and converts tensor names."""
    if stored is None:
        return reading
    block = dict(reading.fields["dflash_config"])
    names = {name: _our_name(ours) for name, ours in reading.names.items()}
    of = {ours: stored[name].shape for name, ours in names.items()}
    proj = of.get("confidence_head.proj.weight")
    block["enable_confidence_head"] = proj is not None
    if proj is not None:
        block["confidence_head_with_markov"] = proj[-1] > reading.fields["hidden_size"]
    return Reading(reading.fields | {"dflash_config": block}, names)


def _our_name(name: str) -> str:
    name = re.sub(r"^(draft_model|logit_head)\.", "", name)
    for theirs, ours in _ANGELSPEC.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


_READ = (*_BLOCK, "confidence_head_alpha", "rope_is_neox_style", "draft_vocab_size")
# Training settings, and fields of the target in configs that were copied from its config.
_IDLE = (
    "attention_mode", "has_lm_head", "has_own_embed_tokens", "loss_decay_gamma", "num_anchors", "partial_rotary_factor",
    "target_hidden_size", "target_model_type", "target_text_model_type",
)  # fmt: skip
DSPARK = Format(
    "DSpark",
    "dspark",
    read_dspark,
    decoder(
        "final_logit_softcapping", "num_target_layers", "target_model_name_or_path", "target_num_hidden_layers",
        *_IN_BLOCK_MASK, *_READ, *OURS,
        idle=_IDLE,
        only={"attention_sink_bias": (False,), "enable_qwen35_gated_q_proj": (False,), "fusion_type": ("concat_fc",)},
        nested={
            **{key: replace(rope, idle=rope.idle | {"partial_rotary_factor"}, only={}) for key, rope in ROPES.items()},
            "dflash_config": Section(
                frozenset((*_READ, "own_embeddings", "own_head")),
                frozenset((*_IDLE, "num_target_layers")),
                {"attention_sink_bias": (False,)},
            ),
        },
    ),
    check=check_vocabulary_maps,
    recognises=is_dspark,
    rank=51,
)  # fmt: skip
NOT_READ = (
    Unsupported(
        "Domino",
        "a recurrent net over the drafted prefix that corrects the logits",
        architecture("Domino"),
        rank=50,
    ),
    Unsupported("DSpark for Gemma 4", GEMMA_4_LAYERS, architecture("Gemma4DSpark"), rank=52),
    Unsupported(
        "DSpark for Qwen3.5",
        "draft layers with gated queries and norms of gain 1 + w",
        architecture("Qwen35DSpark"),
        rank=52,
    ),
    Unsupported("DSpark of another architecture", "draft layers that are not Qwen3's", architecture("DSpark"), rank=53),
)


def read_speculators_dspark(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of a DSpark drafter in the speculators layout."""
    # Defaults of the class; engines have different ones for the slots (shared facts on formats of 2026, section 2.6).
    given = {"sample_from_anchor": True, "markov_rank": 256, "markov_head_type": "vanilla"} | fields
    reading = read_speculators_dflash(given, stored)
    heads = {key: given[key] for key in HEAD_KEYS if given.get(key) is not None}
    block = {"projector_type": "dspark"} | reading.fields["dflash_config"] | heads
    return with_heads(Reading(reading.fields | {"dflash_config": block}, reading.names), stored)


def write_dspark(fields: Config, target: Config) -> Config:
    """The `config.json` for a `DSparkDrafter` whose config has these fields; arguments as for `write_eagle3`."""
    block = fields["dflash_config"]
    if not block.get("markov_rank") or block.get("markov_head_type", "vanilla") != "vanilla":
        raise ValueError(
            f"markov_rank is {block.get('markov_rank', 0)!r} and markov_head_type {block.get('markov_head_type')!r}, "
            "and vLLM has vanilla Markov heads only."
        )
    config = block_config("dspark", "DSparkDraftModel", fields, target)
    return config | {key: block.get(key) or False for key in HEAD_KEYS} | {"markov_head_type": "vanilla"}


SPECULATORS_DSPARK = speculators(
    "dspark",
    "DSpark",
    read_speculators_dspark,
    write_dspark,
    section(*BLOCK_KEYS, *HEAD_KEYS, layer=decoder("is_causal")),
)


register(
    "dspark",
    DSparkDrafter,
    layouts=(DSPARK, SPECULATORS_DSPARK),
    not_read=NOT_READ,
    serving=replace(BLOCK_SERVING, method="dspark"),
)


register_recipe(
    Recipe(
        "dspark",
        DSparkTrainOptions,
        _prepare,
        read_rows=read_rows,
        eval_batch_size=32,
        further=lambda drafter, target: DSparkStep(drafter, target, loss="kl"),
    )
)
