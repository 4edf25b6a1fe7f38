"""TargetModel: the target's interface for the loop: one prefill, then one forward per draft tree.

It makes masks in the form that the model needs (one tensor, or one per layer type) and reads hidden states. The
model itself is not changed: taps are forward hooks that exist during one `generate` call, and our attention function is
set in the config only during a forward. `tree.py` defines trees; `cache.py` stores what layers need.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from hf_specdec.decoding import upstream
from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.devices import inference_on_cpu
from hf_specdec.decoding.speed.cuda_graphs import (
    CompileMode,
    Workspace,
    can_capture,
    compiled_forward,
    run,
    workspace_of,
)
from hf_specdec.decoding.speed.same_bits import most_rows
from hf_specdec.decoding.speed.static_verify import capacity_for, static_verify
from hf_specdec.decoding.state import Counts, joined
from hf_specdec.decoding.targets import places, standins
from hf_specdec.decoding.targets.attention import tree_attention, usable
from hf_specdec.decoding.targets.masks import node_mask, ranges_of, whole_prefix_mask
from hf_specdec.decoding.targets.modules import runs_in_inference_mode
from hf_specdec.decoding.targets.nodes import Prefix, on_nodes
from hf_specdec.decoding.targets.rotary import rotary_limits
from hf_specdec.decoding.targets.step_arguments import NextStep, next_step, refuse_cross_attention
from hf_specdec.decoding.targets.stepped import STEPPED, stepping
from hf_specdec.decoding.targets.support import TreesRefusedError, bound_rows, check_supported
from hf_specdec.decoding.targets.taps import tap_layer
from hf_specdec.decoding.tree import DraftTree, from_host

if TYPE_CHECKING:
    from hf_specdec.decoding.accept import DrawnCandidates

logger = logging.getLogger(__name__)

FIRST_ROOM = 512  # entries after the prompt, before the buffers grow


@dataclass
class TargetOutput:
    """The outputs of one target forward.

    Attributes:
        logits: [batch, nodes, vocab] float32, for any dtype of the model; nodes is 1 after a prefill.
        features: [batch, nodes, taps * hidden], outputs of the tapped layers concatenated in the requested order; None
            without taps. After a prefill: of all entries that this call added.
        attentions: per layer [batch, heads, nodes, entries]; None unless requested.
        hidden_states: embedding output and per layer [batch, nodes, hidden]; None unless requested.
        drawn: candidates that a method has sampled during verification; see `TreeCandidateGenerator.verify`.
        states: [batch, nodes, hidden], the target's states after its final norm, for an acceptance rule that reads
            them; None otherwise.
    """

    logits: Tensor
    features: Tensor | None = None
    attentions: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    drawn: DrawnCandidates | None = None
    states: Tensor | None = None

    def without_padding(self, nodes: int) -> TargetOutput:
        """The outputs for the first `nodes` nodes, without the entries of the others."""
        surplus = self.logits.shape[1] - nodes
        return TargetOutput(
            self.logits[:, :nodes],
            None if self.features is None else self.features[:, :nodes],
            self.attentions and tuple(each[:, :, :nodes, : each.shape[-1] - surplus] for each in self.attentions),
            self.hidden_states and tuple(each[..., :nodes, :] for each in self.hidden_states),
            self.drawn,
            None if self.states is None else self.states[:, :nodes],
        )


@dataclass(frozen=True)
class CommittedEntries:
    """What a decoder layer of the target has stored of the committed tokens, for drafters that attend to it.

    Attributes:
        keys: [batch, kv_heads, entries, head_dim], at rotary positions of their own. A view of the cache: good until
            the next commit.
        values: [batch, kv_heads, entries, value_dim], likewise.
        mask: [batch, entries] bool. False for padding, nodes of the last round that were not committed, and entries
            before the window.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor


class TargetModel:
    """A model of transformers in one `generate` call.

    Args:
        model: the target, any decoder-only `PreTrainedModel` with full or sliding-window softmax attention.
        feature_layers: 0-based decoder layers whose outputs the drafter reads, in the order of concatenation. -1 is the
            input of the first layer, `num_hidden_layers` the output of the final norm.
        compile_mode: "reduce-overhead" captures `verify` in CUDA graphs, one per shape, and elsewhere compiles it with
            `torch.compile`; both happen once per model. "auto" captures shapes that come again, and compiles nothing.
        same_bits: nodes are verified with the bits of plain decoding, see `same_bits.py`; the model must allow it.
        output_attentions: whether forwards return attention weights.
        output_hidden_states: whether forwards return hidden states of all layers.
        reads_states: whether forwards return the states after the final norm (`TargetOutput.states`).

    Attributes:
        most_rows: of a forward of nodes with `same_bits`.
        num_forwards: over nodes, since the prefill.
        num_layers_run: forwards of single decoder layers since the prefill, for any number of rows and nodes.
        output_options: the requested outputs besides logits.
        bound_rows: the fixed number of rows of every forward, if there is one (`support.bound_rows`).
        own_attention: a context in which layers use `tree_attention` if possible.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        feature_layers: Sequence[int] = (),
        *,
        compile_mode: CompileMode = "none",
        same_bits: bool = False,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        reads_states: bool = False,
    ) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.reads_states = reads_states
        self.feature_layers = (*feature_layers, *([self.config.num_hidden_layers] if reads_states else []))
        options = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
        self.output_options = {name: True for name, requested in options.items() if requested}
        self.bound_rows = bound_rows(model)
        self.ranges = ranges_of(model)
        self.layers_need_nodes = standins.counts_entries(model)
        self.cache_name = upstream.cache_name(model)
        self.takes_positions = upstream.takes_positions(model)
        self.unmasked = [kind for kind in getattr(self.config, "layer_types", None) or () if kind not in self.ranges]
        self.rotary_limits = rotary_limits(self.config)
        self.known_positions: int = getattr(self.config, "max_position_embeddings", None) or 0
        self.dtype = model.dtype
        self.num_layers: int = self.config.num_hidden_layers  # attributes of a config are slow to read
        # A family's own attention code may need contiguous keys; a product over several rows copies them anyway.
        self.copies_entries = upstream.has_own_attention(model)
        self.own_attention = tree_attention(self.config) if usable(model) else nullcontext()
        self.same_bits, self.most_rows = same_bits, most_rows(model) if same_bits else 0
        self.runs_in_inference_mode = runs_in_inference_mode(model)
        self.compile_mode = compile_mode
        self.static: Workspace | None = None  # of captured forwards
        compiles = compile_mode == "reduce-overhead" and not can_capture(model.device)
        self.forward = compiled_forward() if compiles else run
        self.cache = TreeCache(self.num_layers)
        self.prefilled = slice(0, 0)  # entries that the prefill added
        # Entry e of the cache holds token e - entry_offset of a row; not 0 if only new tokens were passed with a cache.
        self.entry_offset = 0
        self.last_entry = 0  # of output tokens; drafted nodes may have larger indices
        # A node's position id is its row's entry index plus this offset: left padding shifts a row down. Of positions
        # with several axes it is the first one; `step` has the others.
        self.position_offset = torch.zeros(0, dtype=torch.int64)
        self.prompt_mask: Tensor | None = None  # which entries are visible; None for all
        self.prompt_starts: Tensor | None = None  # first entry of each row's prompt; None if the mask has gaps
        self.step = NextStep(None, {}, {})
        # Rows dropped by `keep_rows`: per row of the whole batch its entries, and the tensors of all prompts.
        self._stored_rows: dict[int, tuple[int, Any]] = {}
        self._whole_batch: tuple[Tensor, Tensor | None, Tensor | None, NextStep] | None = None
        self._rows: list[int] = []
        self.num_forwards = self.num_layers_run = 0
        self._taps: dict[int, list[Tensor]] = {layer: [] for layer in self.feature_layers}
        self._tap_hooks: list[int] = []  # their ids

    @property
    def is_compiled(self) -> bool:
        """Whether forwards of nodes are compiled by torch."""
        return self.forward is not run

    def inference_mode(self, device: torch.device) -> AbstractContextManager[object]:
        """`inference_on_cpu`, for forwards of this target."""
        return inference_on_cpu(device) if self.runs_in_inference_mode else nullcontext()

    @contextmanager
    def tapping(self) -> Iterator[None]:
        """Records the outputs of `feature_layers` while the context is active."""
        handles = []
        try:
            for index in dict.fromkeys(self.feature_layers):
                handles.append(self._tap(index))
            self._tap_hooks = [handle.id for handle in handles]
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _tap(self, index: int) -> RemovableHandle:
        taken, thread = self._taps[index], threading.get_ident()

        def store(states: Tensor) -> None:
            if torch.compiler.is_compiling() or threading.get_ident() == thread:  # other threads may run the same model
                taken.append(states)

        return tap_layer(self.model, index, store)

    def read_taps(self) -> Tensor | None:
        """The outputs recorded since the last call, concatenated; None without taps."""
        if not self.feature_layers:
            return None
        chunks = []
        for layer in self.feature_layers:
            states = self._taps[layer]
            if not states:
                raise ValueError(
                    f"The drafter reads layer {layer} of target {type(self.model).__name__}, but its hook did not run: "
                    "the target's forward was compiled (torch.compile) without hooks. Generate with a target that is "
                    "not compiled; the drafter's compile_mode='reduce-overhead' compiles it where possible."
                )
            if states[0].dim() != 3:
                raise ValueError(
                    f"The drafter reads layer {layer} of target {type(self.model).__name__}, which returns states of "
                    f"shape {tuple(states[0].shape)}, several per token: no supported drafter reads such states. Use "
                    "a drafter without features, such as a draft model or an n-gram look-up."
                )
            chunks.append(states[0] if len(states) == 1 else torch.cat(states, 1))
        self.forget_taps()
        device = chunks[-1].device
        if any(chunk.device != device for chunk in chunks):  # the model is spread over several devices
            chunks = [chunk.to(device) for chunk in chunks]
        return torch.cat(chunks, dim=-1)

    def _split(self, features: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The features that the drafter reads, and the states that an acceptance rule reads, which are the last."""
        if features is None or not self.reads_states:
            return features, None
        width = features.shape[-1] // len(self.feature_layers)
        return features[..., :-width] if len(self.feature_layers) > 1 else None, features[..., -width:]

    def forget_taps(self) -> None:
        """Drops the outputs recorded so far."""
        for states in self._taps.values():
            states.clear()

    def prefill(
        self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> TargetOutput:
        """Runs the prompt through the target as plain `generate` does, chunked and multimodal inputs included.

        Args:
            input_ids: [batch, seq] int64, left-padded.
            generation_config: of the `generate` call.
            model_kwargs: of the `generate` call; attention mask, position ids and a cache to continue are used here.

        Raises:
            TreesRefusedError: trees cannot be verified with this target or input: a cache that cannot be continued,
                cross-attention, a per-step tensor that nodes cannot share.
            ValueError: the target is not a decoder, or its cache is not supported.
        """
        check_supported(self.model)
        given = model_kwargs.get(self.cache_name)
        self.cache = self._new_cache() if given is None else TreeCache.continuing(given, self.num_layers)
        self.layers_need_nodes = self.cache.keeps_states or standins.counts_entries(self.model)
        if self.layers_need_nodes:
            standins.install(self.model)
            if self.compile_mode != "none":
                logger.warning(
                    "Forwards of %s are neither compiled nor captured: its layers need the nodes of each round.",
                    type(self.model).__name__,
                )
                self.compile_mode, self.forward = "none", run
        attention_mask = model_kwargs.get("attention_mask")
        if len(input_ids) > 1 and standins.names_of(self.model) & standins.OF_ONE_ROW:
            raise TreesRefusedError(
                f"Target {type(self.model).__name__} supports position biases only for one row, and the batch has "
                f"{len(input_ids)}: in trees, rows of different lengths would need different biases"
            )
        refuse_cross_attention(self.model, model_kwargs)
        already = self.cache.get_seq_length()
        arguments = dict(model_kwargs, **{self.cache_name: self.cache})
        if self.feature_layers and isinstance(arguments.get("logits_to_keep"), int) and self.cache.has_dummies:
            # With an integer, Gemma 4 also cuts the states that enter layers which share keys and values.
            arguments["logits_to_keep"] = torch.tensor([-1], device=input_ids.device)
        outputs = upstream.prefill(self.model, input_ids, generation_config, arguments)
        features = self.read_taps()  # before `next_step`, which may run the model for a trial
        returned = getattr(outputs, self.cache_name, None)
        if returned is None:
            raise TreesRefusedError(f"Target {type(self.model).__name__} returned no cache after the prompt")
        if returned is not self.cache:  # Phi3 drops the given cache if the text passes its rotary limit
            self.cache, already = TreeCache.continuing(returned, self.num_layers), 0

        length = self.cache.get_seq_length()
        batch = outputs.logits.shape[0]
        device = outputs.logits.device
        self.prompt_mask, self.prompt_starts = None, torch.zeros(batch, dtype=torch.int64, device=device)
        if attention_mask is not None:
            self.set_prompt_mask(attention_mask[:, :length].to(device=device, dtype=torch.bool))
        self.step = next_step(self.model, outputs, input_ids, self.cache, model_kwargs)
        self.position_offset = torch.zeros(batch, dtype=torch.int64, device=device)
        if self.step.positions is not None:
            self.position_offset = self.step.positions.to(device) - length
        self.prefilled, self.entry_offset = slice(already, length), length - input_ids.shape[1]
        self.last_entry = length + generation_config.max_length - input_ids.shape[1] - 1
        return TargetOutput(
            outputs.logits[:, -1:].to(torch.float32, copy=True),
            self._split(features)[0],
            outputs.get("attentions"),
            outputs.get("hidden_states"),
        )

    def prefill_alone(self, token_ids: Tensor, max_length: int, mask: Tensor | None = None) -> TargetOutput:
        """Runs tokens outside of `generate`.

        Args:
            token_ids: [batch, seq] int64.
            max_length: most tokens that a row may have.
            mask: [batch, seq], 0 at left padding; None for no padding.
        """
        mask = torch.ones_like(token_ids) if mask is None else mask.to(torch.int64)
        arguments = {"attention_mask": mask, "use_cache": True}
        if self.takes_positions:
            arguments["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        return self.prefill(token_ids, GenerationConfig(max_length=max_length), arguments)

    def _new_cache(self) -> TreeCache:
        return TreeCache(self.num_layers, upstream.cache_layers(self.model))

    def set_prompt_mask(self, mask: Tensor) -> None:
        """Sets which prompt entries are visible, [batch, entries] bool, and the first entry of each row's prompt."""
        if bool(mask.all()):
            return
        length = mask.shape[1]
        self.prompt_mask, self.prompt_starts = mask, length - mask.sum(1)
        # With gaps the visible entries are not an interval.
        if not bool((mask == (torch.arange(length, device=mask.device) >= self.prompt_starts[:, None])).all()):
            self.prompt_starts = None

    def begin_rounds(self, capacity: int) -> None:
        """Prepares for `verify`; `capacity` is the total number of entries that a row may need.

        Only captured forwards, which need fixed addresses, make room for all of them at once.
        """
        if self.compile_mode != "none" and self.prompt_starts is not None and self.step.is_plain:
            workspace = workspace_of(self.model, self.cache.layers[0].keys.device, self.compile_mode)
            if workspace is not None and workspace.claim(self, self.model, passing=self._tap_hooks):
                self.static = self.cache.workspace = workspace
        room = self.cache.get_seq_length() + FIRST_ROOM
        capacity = min(capacity, room) if self.static is None else capacity_for(capacity)
        self.cache.begin_rounds(capacity, contiguous=self.copies_entries)

    def keep_rows(self, rows: Sequence[int], *, permanent: bool = False) -> None:
        """Selects these rows, as indices into the current ones.

        The others are stored for `restore_rows`, or dropped if `permanent`.
        """
        if not permanent:
            if not self._whole_batch:
                self._whole_batch = (self.position_offset, self.prompt_mask, self.prompt_starts, self.step)
                self._rows = list(range(self.cache.batch))
            for index in sorted(set(range(self.cache.batch)) - set(rows)):
                self._stored_rows[self._rows[index]] = self.cache.take_row(index)
            self._rows = [self._rows[index] for index in rows]
        self.cache.keep_rows(rows)
        selected = from_host(rows, self.position_offset.device)
        self.position_offset = self.position_offset[selected]
        self.prompt_mask = None if self.prompt_mask is None else self.prompt_mask[selected]
        self.prompt_starts = None if self.prompt_starts is None else self.prompt_starts[selected]
        self.step = self.step.of_rows(selected)

    def why_apart(self) -> str | None:
        """After a prefill of one row: why it cannot share rounds with rows of other calls; None if it can."""
        name = type(self.model).__name__
        if self.prompt_mask is not None:
            return "its prompt is padded"
        if not self.step.is_plain:
            return f"{name} gets further arguments in every step of it"
        if self.rotary_limits or standins.names_of(self.model) & standins.OF_ONE_ROW:
            return f"rows of {name} depend on the length of the others, by its position biases or its rotary limit"
        return None

    def join(self, others: Sequence[TargetModel], places: Sequence[int]) -> None:
        """The rows of others, of one row each, take these places, see `state.with_rows`; for none is `why_apart`."""
        self.cache.join([other.cache for other in others], places)
        self.position_offset = joined(self.position_offset, [other.position_offset for other in others], places)
        self.prompt_starts = torch.zeros_like(self.position_offset)
        self.last_entry = max(self.last_entry, *(other.last_entry for other in others))

    def restore_rows(self) -> None:
        """Restores the rows that `keep_rows` has stored."""
        if self._whole_batch:
            self.position_offset, self.prompt_mask, self.prompt_starts, self.step = self._whole_batch
            self.cache.put_rows(self._stored_rows)
            self._whole_batch, self._stored_rows = None, {}

    def prompt_positions(self) -> tuple[Tensor, Tensor | None]:
        """Position ids [batch, entries] of the entries that the prefill added; which are not padding, None for all."""
        entries = torch.arange(self.prefilled.start, self.prefilled.stop, device=self.position_offset.device)
        positions = self.position_offset.unsqueeze(1) + entries
        return positions, None if self.prompt_mask is None else self.prompt_mask[:, self.prefilled]

    def text_mask(self, length: int) -> Tensor | None:
        """[batch, length] bool: which of the first tokens of each row's text are not padding; None for all."""
        if self.prompt_mask is None:
            return None
        mask = self.prompt_mask[:, self.entry_offset :]
        return torch.nn.functional.pad(mask, (0, length - mask.shape[1]), value=True)

    def root_positions(self) -> Tensor:
        """[batch] int64, position ids of the next token to be committed."""
        return self.position_offset + self.cache.lengths

    def committed_entries(self, layer: int, window: int | None = None) -> CommittedEntries:
        """Keys and values of a layer, of the tokens before the root. Needs the host to have read the last round.

        Args:
            layer: 0-based decoder layer that stores keys and values, and does not read those of another layer.
            window: only the last `window` entries of each row; None for all.
        """
        cache = self.cache
        stored, lengths = cache.layers[layer], cache.lengths.unsqueeze(1)
        first = 0 if window is None else max(0, min(cache.row_lengths) - window)
        entries = torch.arange(first, cache.longest, device=lengths.device)
        seen = entries < lengths
        if window is not None:
            seen &= entries >= lengths - window
        if self.prompt_mask is not None:
            known = self.prompt_mask[:, first : cache.longest].to(seen.device)
            seen[:, : known.shape[1]] &= known
        keys, values = (part[:, :, first : cache.longest] for part in (stored.keys, stored.values))
        return CommittedEntries(keys, values, seen)

    def position_ids(self, tree: DraftTree, root_positions: Tensor) -> Tensor:
        """[batch, nodes] int64 position ids of a tree's nodes; nodes beyond the last output token stay in range."""
        position_ids = root_positions.unsqueeze(1) + tree.depths
        if self.cache.longest + tree.max_depth > self.last_entry:
            # Such nodes are never accepted, but learned positions may have no embedding for them.
            last_position = (self.position_offset + self.last_entry).clamp(min=self.known_positions - 1)
            position_ids = position_ids.minimum(last_position.unsqueeze(1))
        if self.rotary_limits:
            position_ids = position_ids.minimum(self._reach(root_positions).unsqueeze(1))
        return position_ids

    def _reach(self, root_positions: Tensor) -> Tensor:
        """[batch] int64: the largest position that this round may use, by all rotary limits."""
        return torch.stack([limit.reach(root_positions) for limit in self.rotary_limits]).amin(0)

    def verifiable_part(self, tree: DraftTree, root_positions: Tensor) -> DraftTree:
        """The same tree without nodes that would change rotary frequencies (`rotary.py`) or bits (`same_bits.py`)."""
        if self.same_bits:
            tree = tree.first_nodes(self.most_rows // len(tree.token_ids) - 1)
        if not self.rotary_limits:
            return tree
        return tree.up_to_depth(self._reach(root_positions) - root_positions)

    def check_reach(self) -> None:
        """Raises TreesRefusedError if rows may pass a rotary limit in different rounds: that would change their output.

        Call it after the prefill.
        """
        if not self.rotary_limits or len(self.position_offset) == 1:
            return
        first = (self.position_offset + self.cache.get_seq_length()).tolist()
        last = (self.position_offset + self.last_entry - 1).tolist()
        for limit in self.rotary_limits:
            if limit.divides(first, last):
                raise TreesRefusedError(
                    f"Target {type(self.model).__name__} has other rotary frequencies from position {limit.first} on "
                    f"(rope type {limit.rope_type!r}). Rows of this batch, now at positions {first}, may pass it in "
                    f"different rounds before position {max(last)}, but in plain decoding they pass it together. "
                    "To draft, generate one row at a time, or at most "
                    f"{max(0, limit.first - max(first) + 1)} new tokens"
                )

    def renew_at_rotary_limit(self, ids: Tensor, lengths: Sequence[int]) -> None:
        """Recomputes the cache where transformers does: Phi3 does so when a text grows past its rotary limit.

        Only for a batch of one without padding, whose root is the first token after the limit.

        Args:
            ids: [1, capacity] int64, all tokens.
            lengths: of the rows, root included.
        """
        at = self.cache.longest if self.rotary_limits else -1
        if at not in [limit.first for limit in self.rotary_limits] or at != lengths[0] - 1:
            return
        if self.cache.batch > 1 or int(self.position_offset):
            return
        token_ids = ids[:, : at + 1]
        anew = self.model.prepare_inputs_for_generation(
            token_ids, attention_mask=torch.ones_like(token_ids), use_cache=True, **{self.cache_name: self.cache}
        )
        if anew.get(self.cache_name) is not None:
            return
        cache = self._new_cache()
        self.model(input_ids=token_ids, use_cache=True, logits_to_keep=1, **{self.cache_name: cache})
        cache.begin_rounds(self.cache.capacity, contiguous=self.copies_entries)
        cache.rollback([at])  # the root is run with its tree
        self.cache = cache

    def verify(
        self, tree: DraftTree, root_positions: Tensor, *, first: int = 0, lead: int = 0, logits: bool = True
    ) -> TargetOutput:
        """One forward over all nodes of a tree; each attends to the committed prefix and its ancestors.

        Node i's logits are the target's for the token after node i. DDTree (arXiv 2604.12989), Section 4.4.

        Args:
            tree: to verify.
            root_positions: [batch] int64, `root_positions()` at the start of the round.
            first: only nodes from this index on are run and returned; earlier forwards of the round ran the others,
                whose entries are in the cache (`TreeCache.continue_round`).
            lead: number of first nodes that are committed next; the round then continues from the following node
                (`TreeCache.commit_and_continue`), which a captured forward writes to the position of roots.
            logits: False if only the cache is needed; then there may be logits of fewer nodes.
        """
        nodes, padding = tree.num_nodes - first, 0
        if nodes == 1 and self.cache.keeps_states:  # for a single token, transformers' own code would change the states
            tree, padding = tree.with_padding(1), 1
        self.cache.reserve(tree.num_nodes)
        self.num_forwards += 1
        self.num_layers_run += self.num_layers
        self.forget_taps()  # a logits processor may have run the target in between
        position_ids = self.position_ids(tree, root_positions)
        if self.static is not None:
            if not self.output_options:
                logits_of_nodes, features = static_verify(self.static, self, tree, position_ids, first, lead)
                features, states = self._split(features)
                return TargetOutput(logits_of_nodes, features, states=states)
            self.cache.place_nodes(None)
        token_ids, masks = tree.token_ids, self.attention_masks(tree, first)
        if first:
            token_ids, position_ids = token_ids[:, first:], position_ids[:, first:]
        extra = {} if self.step.is_plain else self.step.arguments(token_ids.shape[1])
        if not logits and upstream.takes_logits_to_keep(self.model):
            extra["logits_to_keep"] = 1
        if self.takes_positions:
            extra["position_ids"] = self.step.on_axes(position_ids)
        with self.inference_mode(position_ids.device), self.on_nodes(tree, first):
            outputs = self.forward(
                self.model,
                input_ids=token_ids,
                attention_mask=self.masks_for_host(masks),
                use_cache=True,
                return_dict=True,
                **{self.cache_name: self.cache},
                **extra,
                **self.output_options,
            )
        features, states = self._split(self.read_taps())
        output = TargetOutput(
            outputs.logits.to(torch.float32),
            features,
            outputs.get("attentions"),
            outputs.get("hidden_states"),
            states=states,
        )
        return output.without_padding(nodes) if padding else output

    def on_nodes(self, tree: DraftTree, first: int) -> AbstractContextManager[None]:
        """A context for forwards of the nodes of a tree from `first` on."""
        return self._giving_nodes(tree, first) if self.layers_need_nodes or self.same_bits else self.own_attention

    @contextmanager
    def _giving_nodes(self, tree: DraftTree, first: int) -> Iterator[None]:
        """Layers that need the current nodes find them."""
        prefix = Prefix(self.cache.lengths, self.cache.node_start, self.prompt_mask)
        with self.own_attention, ExitStack() as contexts:
            nodes = contexts.enter_context(on_nodes(tree, first, prefix, alone=self.same_bits))
            if self.model in STEPPED:
                contexts.enter_context(stepping(self.model))
            for module, hook in places.counting(self.model):
                contexts.callback(module.register_forward_hook(functools.partial(hook, nodes)).remove)
            yield

    def attention_masks(self, tree: DraftTree, first: int = 0) -> dict[str, Tensor]:
        """Additive masks [batch, 1, nodes, entries] of the nodes from `first` on.

        By layer type if the target takes a dict, else one for all layers under the key "all".
        """
        cache, sees = self.cache, tree.ancestor_mask[:, first:].to(self.cache.device)
        plain = self.prompt_mask is None and cache.is_even
        return {
            kind: whole_prefix_mask(sees, cache.longest, self.dtype)
            if plain and limits.is_whole
            else node_mask(
                sees,
                tree.depths,
                cache.lengths,
                cache.longest,
                self.dtype,
                window=limits.window,
                chunk=limits.chunk,
                prompt_mask=self.prompt_mask,
            )
            for kind, limits in self.ranges.items()
        }

    def masks_for_host(self, masks: dict[str, Tensor]) -> Tensor | dict[str, Tensor | None] | None:
        """Converts masks by the keys of `ranges` to the form of transformers."""
        if not masks:  # no layer has attention
            return None
        if "all" in masks:
            return masks["all"]
        # Layers without attention have their own key, and need no mask: padding comes before the first node.
        return {**masks, **dict.fromkeys(self.unmasked)}

    def close(self) -> None:
        """Ends the call, also after an error: later calls may then use the captured forwards.

        An exception's traceback may keep this object alive, so that its end alone would not release them.
        """
        if self.static is not None:
            self.static.release(self)

    def hand_back(self, like: Cache, output_ids: Tensor, lengths: Sequence[int]) -> None:
        """Leaves the caller's cache as plain decoding would: all output tokens of every row except the last.

        Args:
            like: of the caller.
            output_ids: [batch, length] int64, with padding after rows that ended early.
            lengths: tokens of each row.
        """
        self.restore_rows()
        cache, entry_offset = self.cache, self.entry_offset
        entries = output_ids.shape[1] - 1 + entry_offset
        known = [min(length - 1 + entry_offset, entries) for length in lengths]
        cache.rollback([min(have, length) for have, length in zip(known, cache.row_lengths, strict=True)])
        missing = [entries - length for length in cache.row_lengths]
        if any(missing):
            # Rows that ended early: plain decoding has also run their padding through the target.
            columns = torch.arange(max(missing), device=output_ids.device)
            starts = torch.tensor(cache.row_lengths, device=output_ids.device).unsqueeze(1) - entry_offset
            token_ids = output_ids.gather(1, (starts + columns).clamp(max=output_ids.shape[1] - 1))
            self.verify(DraftTree.chain(token_ids), self.root_positions(), logits=False)
            cache.commit_first(Counts.of(missing, cache.device))
        cache.hand_back(like, entries)
