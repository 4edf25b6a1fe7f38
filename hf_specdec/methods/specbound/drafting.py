"""How SpecBound drafts: the target's layers run a few at a time, bounded speculation with cached states.

A round runs the root, then each drafted token, through shallow layers one at a time. A position drafts the next token
at the first exit layer whose annealed confidence reaches the threshold. The draft ends at a difficult position, one
without an exit up to d_max, or after w_max positions; no head is evaluated at the last of these, because the target
decodes it next. Then all positions run through their remaining layers together: this is the verification (`verify`),
which also decodes the last position. So a round of w positions runs at most
(w - 1) d_max + L = w d_max + (L - d_max) layers (Eq. 3), and stores one hidden state per position.
With d_max = L, the ablation of Figure 4, a difficult position is decoded alone and the draft continues after it.
Beyond the paper: if a text repeats itself, a head repeats its errors with the same confidence, and then drafts the full
width after an error in every round. Therefore a position is difficult, too, if its draft was rejected after the same
token the last time (`learn_refusals`).
Source: SpecBound, Sections 2.2 and 2.3, Figures 2 and 5. The paper has one row; here the rows of a batch run each layer
together, each exits at its own layer, and the draft continues while any row has found an exit.

From the bottom up: `LayerSlices` runs a target's decoder a few layers at a time, with the modules, masks and cache of a
complete forward; `PendingChain` decides which layers run when; `EarlyExitGenerator` decides what is drafted.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_specdec.decoding.devices import in_inference_mode
from hf_specdec.decoding.exchange import ChoiceRule, Committed, DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.noise import draw
from hf_specdec.decoding.state import RoundState
from hf_specdec.decoding.target import TargetModel, TargetOutput
from hf_specdec.decoding.targets.hooks import foreign_functions, names_of
from hf_specdec.decoding.targets.modules import home_of, num_tokens
from hf_specdec.decoding.targets.support import TreesRefusedError, check_supported
from hf_specdec.decoding.targets.taps import decoder_of
from hf_specdec.decoding.tree import DraftTree, from_host
from hf_specdec.decoding.upstream import CACHE
from hf_specdec.drafting.draft_logits import SoftCapLogitsProcessor, TargetVocabularyLogitsProcessor

if TYPE_CHECKING:
    from hf_specdec.methods.specbound.network import SpecBoundDrafter


@dataclass(frozen=True)
class StepLayout:
    """What the decoder of a family computes around its layers.

    Attributes:
        norm: name of its final norm.
        rotary: whether `rotary_emb` gives cos and sin once for all layers, once per layer type, or does not exist.
        cache_argument: a layer's argument for the cache.
        embed: (decoder, embeddings of the tokens, position ids) -> input of the first layer.
        logits: (model, output of its head) -> its logits.
    """

    norm: str = "norm"
    rotary: Literal["shared", "per_type", "none"] = "shared"
    cache_argument: str = CACHE
    embed: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    logits: Callable[[Any, Tensor], Tensor] | None = None


def _softcapped(model: Any, logits: Tensor) -> Tensor:
    cap = model.config.get_text_config(decoder=True).final_logit_softcapping
    return SoftCapLogitsProcessor(cap)(None, logits)


def _add_opt_positions(decoder: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    if decoder.project_in is not None:
        tokens = decoder.project_in(tokens)
    embedded: Tensor = tokens + decoder.embed_positions(None, position_ids=positions)
    return embedded


# By `model_type` of the text config. tests/methods/specbound/test_slices.py compares every entry with the complete
# model.
LAYOUTS: dict[str, StepLayout] = {
    **{
        name: StepLayout()
        for name in (
            "gpt_oss", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3",
            "starcoder2",
        )
    },
    "cohere2": StepLayout(logits=lambda model, logits: logits * model.logit_scale),
    "gemma2": StepLayout(logits=_softcapped),
    "gemma3_text": StepLayout(rotary="per_type", logits=_softcapped),
    "gpt2": StepLayout(
        norm="ln_f", rotary="none", embed=lambda decoder, tokens, positions: tokens + decoder.wpe(positions)
    ),
    "gpt_neox": StepLayout(norm="final_layer_norm", cache_argument="layer_past"),
    "granite": StepLayout(
        embed=lambda decoder, tokens, positions: tokens * decoder.embedding_multiplier,
        logits=lambda model, logits: logits / model.config.logits_scaling,
    ),
    "opt": StepLayout(norm="final_layer_norm", rotary="none", embed=_add_opt_positions),
}  # fmt: skip


class LayerSlices:
    """The parts of a target's forward.

    Args:
        model: the target.

    Raises:
        ValueError: it is not known whether slices of its family are exact; names the family and how to add it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config(decoder=True)
        layout = LAYOUTS.get(config.model_type)
        if layout is None:
            raise ValueError(
                f"Target {type(model).__name__} is of the decoder family {config.model_type!r}, whose layers are not "
                f"known to be exact when run in slices; known families: {', '.join(sorted(LAYOUTS))}. To add it, "
                "describe what its decoder computes around its layers in an entry in LAYOUTS "
                "(hf_specdec/methods/specbound/drafting.py) and a row in FAMILIES (tests/targets.py); or use a method "
                "that runs complete forwards."
            )
        self.model, self.layout = model, layout
        self.decoder, self.layers = decoder_of(model)
        self.num_layers = len(self.layers)
        self.types: Sequence[str] = getattr(config, "layer_types", None) or ["all"] * self.num_layers
        self.embed_tokens: nn.Module = model.get_input_embeddings()
        self.norm: nn.Module = getattr(self.decoder, layout.norm)
        self.lm_head: Any = model.get_output_embeddings()

    def embed(self, token_ids: Tensor, position_ids: Tensor) -> Tensor:
        """[batch, nodes] int64 tokens and positions -> [batch, nodes, hidden], the input of the first layer."""
        tokens = self.embed_tokens(token_ids)
        return tokens if self.layout.embed is None else self.layout.embed(self.decoder, tokens, position_ids)

    def rotary(self, like: Tensor, position_ids: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Rotary cos and sin [batch, nodes, head_dim] per layer type, or under the key "all"; empty without rotary."""
        if self.layout.rotary == "none":
            return {}
        rotary_emb: Any = self.decoder.rotary_emb
        if self.layout.rotary == "shared":
            return {"all": rotary_emb(like, position_ids)}
        return {kind: rotary_emb(like, position_ids, kind) for kind in dict.fromkeys(self.types)}

    def run(
        self,
        hidden: Tensor,
        first: int,
        last: int,
        *,
        position_ids: Tensor,
        rotary: dict[str, tuple[Tensor, Tensor]],
        masks: dict[str, Tensor] | None,
        cache: Cache,
    ) -> Tensor:
        """Layers `first` to `last` - 1; the cache receives the same entries as in a complete forward.

        Args:
            hidden: [batch, nodes, hidden], the input of layer `first`.
            first: number of layers already passed.
            last: number of layers passed afterwards.
            position_ids: [batch, nodes] int64.
            rotary: from `rotary`, for these nodes.
            masks: additive [batch, 1, nodes, entries] by layer type or under the key "all"; None for no mask.
            cache: for the nodes' keys and values.
        """
        by_type: dict[str, dict[str, Any]] = {}
        for kind in set(self.types[first:last]):
            by_type[kind] = {
                "attention_mask": None if masks is None else masks["all"] if "all" in masks else masks[kind],
                "position_ids": position_ids,
                self.layout.cache_argument: cache,
            }
            if rotary:
                by_type[kind]["position_embeddings"] = rotary["all"] if "all" in rotary else rotary[kind]
        for index in range(first, last):
            hidden = self.layers[index](hidden, **by_type[self.types[index]])
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[batch, nodes, hidden], the last layer's output -> [batch, nodes, vocab], the target's logits."""
        return self.shape_logits(self.lm_head(self.norm(hidden)))

    def shape_logits(self, logits: Tensor) -> Tensor:
        """Applies the family's scales and soft caps to the output of its head."""
        return logits if self.layout.logits is None else self.layout.logits(self.model, logits)


class PendingChain:
    """Draft nodes of one round that have passed a part of the target's layers, root first.

    The chain stores the hidden state of every node at the last layer that it has passed (one state per node,
    independent of the prompt's length). When a later node needs keys and values of earlier nodes, these are advanced
    together first: a node never runs a layer before its ancestors, and never runs one twice. Verification runs the
    remaining layers, so that every node has then passed every layer, and the target's cache equals that of a complete
    forward. All rows of a batch have passed the same layers.

    Args:
        target: of the call.
        slices: its layers.
        root_positions: [batch] int64, `target.root_positions()` at the start of the round.
        width: most nodes that the chain may get, root included.
    """

    def __init__(self, target: TargetModel, slices: LayerSlices, root_positions: Tensor, width: int) -> None:
        self.target, self.slices, self.cache = target, slices, target.cache
        self.width, self.num_nodes = width, 0
        self.cache.reserve(width)
        # The structure of the whole chain, with zeros as tokens.
        zeros = torch.zeros(len(root_positions), width, dtype=torch.int64, device=self.cache.device)
        self._template = DraftTree.chain(zeros)
        self._positions = target.position_ids(self._template, root_positions)
        self._masks: dict[str, Tensor] | None = None
        self._rotary: dict[str, tuple[Tensor, Tensor]] | None = None
        # [(layers passed, [batch, nodes, hidden])] in the order of the nodes: a node passes a layer after its parent.
        self._segments: list[tuple[int, Tensor]] = []

    def extend(self, token_ids: Tensor) -> None:
        """Appends a node to each row: [batch] int64. It has passed no layers."""
        assert self.num_nodes < self.width, f"the chain was made for {self.width} nodes"
        node = slice(self.num_nodes, self.num_nodes + 1)
        with self.target.inference_mode(token_ids.device):
            hidden = self.slices.embed(token_ids.unsqueeze(1), self._positions[:, node])
            if self._rotary is None:  # for all nodes of the round
                self._rotary = self.slices.rotary(hidden, self._positions)
        self._segments.append((0, hidden))
        self.num_nodes += 1

    def advance(self, layer: int) -> Tensor:
        """Runs the last node up to `layer` passed layers, and its ancestors where their keys and values are missing.

        Returns:
            [batch, hidden], the last node's state there.
        """
        segments = self._segments
        with self.target.inference_mode(segments[-1][1].device):
            while segments[-1][0] < layer:
                passed, states = segments.pop()
                while segments and segments[-1][0] == passed:
                    states = torch.cat([segments.pop()[1], states], dim=1)
                stop = min(layer, segments[-1][0]) if segments else layer
                segments.append((stop, self._run(states, passed, stop)))
        return segments[-1][1][:, -1]

    def finish(self) -> Tensor:
        """Runs all nodes through all remaining layers: [batch, nodes, vocab], the target's logits."""
        self.advance(self.slices.num_layers)
        states = torch.cat([states for _, states in self._segments], dim=1)
        with self.target.inference_mode(states.device):
            return self.slices.logits(states).to(self._positions.device)  # where a complete forward returns them

    def _run(self, states: Tensor, first: int, last: int) -> Tensor:
        """Layers `first` to `last` - 1 for the last nodes of the chain, as many as there are states."""
        start, stop = self.num_nodes - states.shape[1], self.num_nodes
        assert self._rotary is not None
        nodes = slice(start, stop)
        masks = None
        target = self.target
        # Without padding, shorter rows and windows the last node attends to all entries, and needs no mask.
        sees_all = self.cache.batch == 1 and target.prompt_mask is None
        sees_all &= all(limits.is_whole for limits in target.ranges.values())
        if states.shape[1] > 1 or not sees_all:
            if self._masks is None:
                self._masks = target.attention_masks(self._template)
            entries = self.cache.longest + stop
            masks = {kind: mask[:, :, nodes, :entries] for kind, mask in self._masks.items()}
        target.num_layers_run += last - first
        with self.cache.writing_after(start), target.on_nodes(self._template.first_nodes(stop - 1), start):
            return self.slices.run(
                states,
                first,
                last,
                position_ids=self._positions[:, nodes],
                rotary={kind: (cos[:, nodes], sin[:, nodes]) for kind, (cos, sin) in self._rotary.items()},
                masks=masks,
                cache=self.cache,
            )


def check_slices(model: PreTrainedModel) -> None:
    """Raises ValueError unless layers of `model` run in slices give the logits of its complete forward.

    The family must have an entry in `LAYOUTS`, and the model is tested on six tokens.
    """
    slices = LayerSlices(model)
    try:
        check_supported(model)
    except TreesRefusedError as error:
        raise ValueError(
            f"{error}. SpecBound runs the target's own layers on the nodes that it drafts, so it cannot use "
            "transformers' own loop; use another method for this target."
        ) from error
    apart, own, largest = _try_slices(model, slices)
    # Other batch sizes may round differently in low precision; a missing scale gives far larger differences.
    share = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1
    if not apart <= max(share * largest, 2 * own):
        names = names_of(model, foreign_functions(model))
        reason = (
            f"so {', '.join(names)} may change what lies between them"
            if names
            else (
                "so this model computes something around its layers that the entry for "
                f"{model.config.get_text_config(decoder=True).model_type!r} in LAYOUTS "
                "(hf_specdec/methods/specbound/drafting.py) does not describe"
            )
        )
        raise ValueError(
            f"The layers of target {type(model).__name__} run in slices give logits that differ by {apart:.3g} "
            f"from those of its complete forward (up to {largest:.3g}; complete forwards differ by up to {own:.3g}), "
            f"{reason}. Use a method that runs complete forwards."
        )


@torch.no_grad()
def _try_slices(model: PreTrainedModel, slices: LayerSlices) -> tuple[float, float, float]:
    """Largest difference of logits between a chain run in slices and a complete forward, and the largest logit.

    In between: the same difference of complete forwards, of all tokens and of the last ones behind a cache. It is more
    than rounding where activations are quantised, and then slices differ as much.
    """
    target, embeddings = TargetModel(model), model.get_input_embeddings()
    token_ids = torch.arange(1, 7, device=home_of(embeddings)) % num_tokens(model)
    token_ids, known = token_ids.expand(target.bound_rows or 1, -1), 3
    whole = model(input_ids=token_ids, use_cache=False).logits
    target.prefill_alone(token_ids[:, :known], max_length=token_ids.shape[1])
    target.begin_rounds(token_ids.shape[1])
    chain = PendingChain(target, slices, target.root_positions(), 3)
    for node, layer in zip(range(known, token_ids.shape[1]), (slices.num_layers // 2, 1, 0), strict=True):
        chain.extend(token_ids[:, node])
        chain.advance(layer)
    difference = (chain.finish() - whole[:, known:]).float().abs().max()
    target.cache.rollback()
    verified = target.verify(DraftTree.chain(token_ids[:, known:]), target.root_positions()).logits
    own = (verified - whole[:, known:]).float().abs().max()
    return difference.item(), own.item(), whole.float().abs().max().item()


class PendingGenerator(TreeCandidateGenerator):
    """A generator whose drafts have passed some of the target's layers before they are verified.

    Args:
        target: of the call.

    Attributes:
        chain: the chain of the latest round.
    """

    reads_cache = True

    def __init__(self, target: TargetModel) -> None:
        self.target, self.slices = target, LayerSlices(target.model)
        self.chain: PendingChain | None = None

    def begin_chain(self, root_positions: Tensor, width: int) -> PendingChain:
        """A chain of up to `width` nodes, root included, for this round.

        Raises:
            ValueError: the call has an input that slices do not support.
        """
        model, given = self.target.model, self.target.step.token_types
        if given and (read := [name for name in given if name in inspect.signature(model.forward).parameters]):
            raise ValueError(
                f"Target {type(model).__name__} reads {', '.join(read)} in its embeddings, which is not supported "
                "when it drafts layer by layer; leave them out, or use a method that runs complete forwards."
            )
        self.chain = PendingChain(self.target, self.slices, root_positions, width)
        return self.chain

    def verify(self, target: TargetModel, tree: DraftTree, state: RoundState) -> TargetOutput:
        """The chain's remaining layers; a complete forward if the tree differs or all layers' outputs are requested."""
        chain, self.chain = self.chain, None
        if chain is None or chain.num_nodes != tree.num_nodes or tree.no_drafts is not None or target.output_options:
            return target.verify(tree, state.root_positions)
        target.num_forwards += 1
        return TargetOutput(chain.finish().to(torch.float32))


class ReplayGenerator(PendingGenerator):
    """Runs the nodes of recorded trees up to the exit layers, in turn, before they are verified.

    Args:
        drafter: that drafted the trees.
        target: of the call.
        recorded: returns the tree of a round.
    """

    def __init__(
        self, drafter: SpecBoundDrafter, target: TargetModel, recorded: Callable[[DraftContext], DraftTree]
    ) -> None:
        super().__init__(target)
        self.layers, self.recorded = drafter.exits, recorded

    def draft(self, context: DraftContext) -> DraftTree:
        tree = self.recorded(context)
        if tree.num_nodes > 1:
            chain = self.begin_chain(context.root_positions, tree.num_nodes)
            for node, layer in zip(range(tree.num_nodes), itertools.cycle(self.layers), strict=False):
                chain.extend(tree.token_ids[:, node])
                chain.advance(layer)
        return tree


class EarlyExitGenerator(PendingGenerator):
    """Drafts chains with the target's own layers.

    Args:
        drafter: heads and options.
        target: of the call.
    """

    def __init__(self, drafter: SpecBoundDrafter, target: TargetModel) -> None:
        super().__init__(target)
        self.drafter = drafter
        self.width = drafter.options.w_max
        self.rules = drafter.exit_rules()
        self.is_unbounded = drafter.options.d_max == drafter.config.num_target_layers
        self.vocabulary: TargetVocabularyLogitsProcessor
        # Per row the pairs (token, draft after it) whose draft was rejected the last time.
        self.refused: list[set[tuple[int, int]]] = []
        # Per row the root and the drafts of this round; empty before the first draft.
        self.chains: list[list[int]] = []

    @in_inference_mode  # cheaper than no_grad; only the target's cache outlives the round
    def draft(self, context: DraftContext) -> DraftTree:
        device = context.root_ids.device
        chain = self.begin_chain(context.root_positions, self.width)
        chain.extend(context.root_ids)
        active = list(context.active)
        self.chains = [[token] for token in context.root_ids.tolist()]
        columns, draft_probs = [context.root_ids], []
        finite = [True] * len(active)
        width = 1 + context.at_most(self.width - 1)
        while chain.num_nodes < width:
            active, token_ids, probs, are_finite = self.next_tokens(chain, active, context.choice)
            if chain.num_nodes == 1:
                finite = are_finite
            if token_ids is None:
                break
            for drafted, token, exited in zip(self.chains, token_ids.tolist(), active, strict=True):
                if exited:
                    drafted.append(token)
            columns.append(token_ids.to(device))
            if probs is not None:
                draft_probs.append(probs)
            chain.extend(columns[-1])
        lengths = [len(drafted) for drafted in self.chains]
        valid = None
        if min(lengths) < chain.num_nodes:
            valid = torch.arange(chain.num_nodes, device=device) < from_host(lengths, device).unsqueeze(1)
        return DraftTree.chain(
            torch.stack(columns, dim=1),
            valid=valid,
            finite=None if all(finite) else from_host(finite, device),
            draft_probs=torch.stack(draft_probs, dim=1).to(device) if draft_probs else None,
        )

    def observe(self, committed: Committed) -> None:
        if committed.tree is None:
            ids = self.drafter.target_ids if self.drafter.config.maps_vocabulary else None
            self.vocabulary = TargetVocabularyLogitsProcessor(committed.target_logits.shape[-1], ids)
            # Here and not in `draft`: rows that end with the prefill's token leave before the first draft.
            self.refused = [set() for _ in committed.token_ids]
        if not self.drafter.options.learn_refusals:
            return
        chains, self.chains = self.chains, []  # after a round without a draft there are none
        for refused, chain, num_accepted in zip(self.refused, chains, committed.num_accepted, strict=False):
            pairs = list(itertools.pairwise(chain))
            refused.difference_update(pairs[:num_accepted])
            refused.update(pairs[num_accepted : num_accepted + 1])  # later pairs follow a rejected token

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.refused = [self.refused[row] for row in rows]

    def next_tokens(
        self, chain: PendingChain, active: list[bool], choice: ChoiceRule
    ) -> tuple[list[bool], Tensor | None, Tensor | None, list[bool]]:
        """Runs the last position from exit to exit, until every active row has exited or no exit is left.

        Returns:
            Per row, whether it found an exit; [batch] int64, the target ids drafted there, undefined for other rows, or
            None if no row did; [batch, vocab] float32, the distribution that they were sampled from, or None for the
            likeliest tokens; and per row, False if no exit was found and a head gave NaN or infinite logits.
        """
        found, finite, waiting = [False] * len(active), [True] * len(active), list(active)
        token_ids: Tensor | None = None
        logits: Tensor | None = None  # of the exits, in calls that sample

        def leave(leaving: list[bool], likeliest: Tensor, here: Tensor) -> None:
            nonlocal found, token_ids, logits
            found = [before or now for before, now in zip(found, leaving, strict=True)]
            mask = from_host(leaving, likeliest.device)
            token_ids = likeliest if token_ids is None else likeliest.where(mask, token_ids)
            if choice.do_sample:
                logits = here if logits is None else here.where(mask.unsqueeze(1), logits)

        for layer, rule in self.rules.items():
            here = self.drafter.exit_logits(layer, chain.advance(layer), chain.slices)
            here = here[:, : self.vocabulary.vocab_size]
            confidence, likeliest = rule.confidence(here)
            sure = confidence.tolist()
            # The decision must not depend on the token sampled later, or drafts would have another distribution.
            leaving = [waits and value >= rule.threshold for waits, value in zip(waiting, sure, strict=True)]
            rows = zip(finite, waiting, leaving, sure, strict=True)
            finite = [exits or (so_far and not (waits and math.isnan(value))) for so_far, waits, exits, value in rows]
            if not any(leaving):
                continue
            likeliest = self.drafter.to_target_ids(likeliest)
            if choice.do_sample:
                here = self.vocabulary(None, here)
            waiting = [waits and not exits for waits, exits in zip(waiting, leaving, strict=True)]
            if any(self.refused):
                pairs = zip((row[-1] for row in self.chains), likeliest.tolist(), strict=True)
                refused = [pair in known for pair, known in zip(pairs, self.refused, strict=True)]
                leaving = [exits and not pair for exits, pair in zip(leaving, refused, strict=True)]
            if any(leaving):
                leave(leaving, likeliest, here)
            if not any(waiting):
                break
        if self.is_unbounded and found != active:
            here = chain.slices.logits(chain.advance(chain.slices.num_layers)).float()
            leaving = [row and not exited for row, exited in zip(active, found, strict=True)]
            leave(leaving, here.argmax(-1), here)
        if logits is None:
            return found, token_ids, None, finite
        return found, *self.sample(logits, found, choice), finite

    def sample(self, logits: Tensor, found: list[bool], choice: ChoiceRule) -> tuple[Tensor, Tensor]:
        """Tokens [batch] sampled with the call's settings, and their distribution [batch, vocab]; not annealed."""
        if not all(found):  # rows without an exit get no draft, but must have a distribution
            logits = logits.where(from_host(found, logits.device).unsqueeze(1), 0.0)
        scores = choice.warpers(logits.new_zeros(len(logits), 1, dtype=torch.int64), logits)
        # A warper may forbid the complete reduced vocabulary; then the distribution is uniform.
        probs = torch.softmax(scores.where((scores > -torch.inf).any(1, keepdim=True), 0.0), dim=-1)
        return draw(probs), probs
