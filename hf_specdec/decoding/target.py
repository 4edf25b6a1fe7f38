"""TargetModel: the target as the loop sees it: one prefill, then one forward per draft tree.

Knows how host models want their masks (one tensor, or one per layer type) and how to read hidden states from chosen
layers; running a few layers only is the business of `slices.py`. It leaves the model as it was: taps are forward
hooks that live as long as one `generate` call, our attention stands in the config during a forward. The tree's meaning
is in `tree.py`, the stored keys and values in `cache.py`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.decoding.attention import tree_attention, usable
from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.graphs import CompileMode, can_capture, compiled_forward, run, workspace_of
from hf_specdec.decoding.modes import inference_on_cpu
from hf_specdec.decoding.next_step import NextStep, check_attended, next_step
from hf_specdec.decoding.pending import PendingChain
from hf_specdec.decoding.rotary import rotary_limits
from hf_specdec.decoding.slices import LayerSlices, tap_layer
from hf_specdec.decoding.static_verify import StaticVerify, capacity_for
from hf_specdec.decoding.support import bound_rows, check_supported
from hf_specdec.decoding.tree import DraftTree, from_host

_SLICES_ARE_EXACT: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()  # models that were tried


@dataclass
class TargetOutput:
    """What one target forward gave.

    Attributes:
        logits: [batch, nodes, vocab] in float32, whatever the model's dtype; nodes is 1 after a prefill.
        features: [batch, nodes, taps * hidden], outputs of the tapped layers joined in the order asked for, or None
            without taps. After a prefill: of all entries that this call added.
        attentions: per layer [batch, heads, nodes, entries], or None unless asked for.
        hidden_states: embedding output and per layer [batch, nodes, hidden], or None unless asked for.
    """

    logits: Tensor
    features: Tensor | None
    attentions: tuple[Tensor, ...] | None
    hidden_states: tuple[Tensor, ...] | None


class TargetModel:
    """A host model bound to the needs of one `generate` call.

    Args:
        model: the target, any decoder-only `PreTrainedModel` with full or sliding-window softmax attention.
        feature_layers: 0-based decoder layers whose outputs the drafter reads, in the order it wants them joined. -1 is
            what enters the first layer, `num_hidden_layers` what leaves the decoder after its final norm.
        compile_mode: "reduce-overhead" captures `verify` in CUDA graphs, one per shape, and elsewhere compiles it with
            `torch.compile`; both take their time once per model.

    Attributes:
        num_layers_run: forwards of single decoder layers since the prefill, over any number of rows and nodes.
        bound_rows: how many rows every forward must have, if that is not open (`support.bound_rows`).
        own_attention: a context, entered for each forward of nodes, in which layers attend with `tree_attention` where
            that can be used.

    Raises:
        ValueError: the target cannot verify trees; the message says why and what to do.
    """

    def __init__(
        self, model: PreTrainedModel, feature_layers: Sequence[int] = (), *, compile_mode: CompileMode = "none"
    ) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.feature_layers = tuple(feature_layers)
        check_supported(model)
        self.bound_rows = bound_rows(model)
        self.windows = _windows(model)
        self.rotary_limits = rotary_limits(self.config)
        self.known_positions: int = getattr(self.config, "max_position_embeddings", None) or 0
        self.dtype = model.dtype
        self.num_layers: int = self.config.num_hidden_layers  # a config takes its time to answer
        # Attention code of a family's own may need contiguous keys; a product over several rows copies them anyway.
        self.copies_entries = not (model._supports_attention_backend or model._supports_sdpa)
        self.own_attention = tree_attention(self.config) if usable(model) else nullcontext()
        self.compiles = compile_mode == "reduce-overhead"
        self.static: StaticVerify | None = None
        self.forward = compiled_forward() if self.compiles and not can_capture(model.device) else run
        self.cache: TreeCache
        # What `keep_rows` has put away: per row of the whole batch its entries, and what is known of all prompts.
        self._aside: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._whole_batch: tuple[Tensor, Tensor | None, Tensor | None, NextStep] | None = None
        self._rows: list[int] = []
        self.prompt_mask: Tensor | None  # which entries may be seen; None when all of them
        self.prompt_starts: Tensor | None  # where each row's prompt begins; None where there are gaps in the mask
        self.step = NextStep(None, {}, {})
        self.num_layers_run = 0
        self._template: DraftTree | None = None
        self._taps: dict[int, list[Tensor]] = {layer: [] for layer in self.feature_layers}
        self._tap_hooks: list[int] = []  # their ids

    @classmethod
    def check_slices(cls, model: PreTrainedModel) -> None:
        """Raises ValueError unless layers of `model` run in slices give the logits of its whole forward.

        The family must be known, and the model itself is tried on six tokens, once in its life.
        """
        slices = LayerSlices(model)
        if model not in _SLICES_ARE_EXACT:
            apart, largest = cls(model)._try_slices(slices.num_layers)
            # Batches of other sizes may round differently in low precision; a missing scale is off by far more.
            share = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1
            if not apart <= share * largest:
                raise ValueError(
                    f"The layers of target {type(model).__name__} run in slices give logits that differ by {apart:.3g} "
                    f"from those of its whole forward (up to {largest:.3g}), so this model does something around its "
                    f"layers that the entry for {model.config.get_text_config(decoder=True).model_type!r} in LAYOUTS "
                    "(hf_specdec/decoding/slices.py) does not describe. Draft with a method that runs whole forwards."
                )
            _SLICES_ARE_EXACT.add(model)

    @torch.no_grad()
    def _try_slices(self, num_layers: int) -> tuple[float, float]:
        """Largest difference of logits between a chain run in slices and a whole forward, and the largest logit."""
        embeddings = self.model.get_input_embeddings()
        device = embeddings.weight.device
        token_ids = torch.arange(1, 7, device=None if device.type == "meta" else device) % embeddings.num_embeddings
        token_ids, known = token_ids.expand(self.bound_rows or 1, -1), 3
        whole = self.model(input_ids=token_ids, use_cache=False).logits
        self.begin_alone(token_ids[:, :known], room=3)
        chain = self.begin_chain(self.root_positions(), 3)
        for node, layer in zip(range(known, token_ids.shape[1]), (num_layers // 2, 1, 0), strict=True):
            chain.extend(token_ids[:, node])
            chain.advance(layer)
        difference = (chain.finish() - whole[:, known:]).float().abs().max()
        return difference.item(), whole.float().abs().max().item()

    def begin_alone(self, token_ids: Tensor, room: int) -> None:
        """Begins rounds of up to `room` nodes behind [batch, seq] tokens, outside of `generate`: to try or time one."""
        self.cache = TreeCache(self.config.num_hidden_layers)
        self.model(input_ids=token_ids, past_key_values=self.cache, use_cache=True)
        self.prompt_mask, self.last_entry = None, token_ids.shape[1] + room
        self.prompt_starts = torch.zeros(len(token_ids), dtype=torch.int64, device=token_ids.device)
        self.position_offset = self.prompt_starts
        self.begin_rounds(token_ids.shape[1] + room)

    @contextmanager
    def tapping(self) -> Iterator[None]:
        """Reads the outputs of `feature_layers` while the context is open."""
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

        def keep(states: Tensor) -> None:
            if torch.compiler.is_compiling() or threading.get_ident() == thread:  # others may run the same model
                taken.append(states)

        return tap_layer(self.model, index, keep)

    def read_taps(self) -> Tensor | None:
        """What the taps have seen since the last reading, joined; None without taps."""
        if not self.feature_layers:
            return None
        chunks = []
        for layer in self.feature_layers:
            states = self._taps[layer]
            if not states:
                raise ValueError(
                    f"The drafter reads layer {layer} of target {type(self.model).__name__}, but saw nothing there: "
                    "its forward was compiled (torch.compile) without the hooks that read it. Generate with a target "
                    "that is not compiled; the drafter's compile_mode='reduce-overhead' compiles what can be compiled."
                )
            chunks.append(states[0] if len(states) == 1 else torch.cat(states, 1))
        for states in self._taps.values():
            states.clear()
        device = chunks[-1].device
        if any(chunk.device != device for chunk in chunks):  # layers of a model that is spread over devices
            chunks = [chunk.to(device) for chunk in chunks]
        return torch.cat(chunks, dim=-1)

    def prefill(
        self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> TargetOutput:
        """Runs the prompt through the target as plain `generate` does, chunked and multimodal inputs included.

        Args:
            input_ids: [batch, seq] int64, left-padded.
            generation_config: of the `generate` call.
            model_kwargs: of the `generate` call; attention mask, position ids and a cache to continue are read here.

        Raises:
            ValueError: positions of several axes, a cache that cannot be continued, cross-attention to something given,
                no cache from the target, or a tensor at every step that nodes of a tree cannot share.
        """
        given = model_kwargs.get("past_key_values")
        self.cache = TreeCache.continuing(given, self.num_layers) if given is not None else TreeCache(self.num_layers)
        attention_mask = model_kwargs.get("attention_mask")
        position_ids = model_kwargs.get("position_ids")
        if position_ids is not None and position_ids.dim() != 2:
            raise ValueError(
                f"position_ids have shape {list(position_ids.shape)}; draft trees need [batch, seq] positions. "
                "Multi-axis positions (images, video) are not supported: generate without assistant_model."
            )
        check_attended(self.model, model_kwargs)
        already = self.cache.get_seq_length()
        arguments = dict(model_kwargs, past_key_values=self.cache)
        outputs = self.model._prefill(input_ids, generation_config, arguments)
        returned = getattr(outputs, "past_key_values", None)
        if returned is None:
            raise ValueError(
                f"Target {type(self.model).__name__} returned no cache after the prompt; speculative decoding keeps "
                "accepted tokens in it. Generate without assistant_model."
            )
        if returned is not self.cache:  # Phi3 drops what it is given where the text passes its rotary limit
            self.cache, already = TreeCache.continuing(returned, self.num_layers), 0

        length = self.cache.get_seq_length()
        batch = outputs.logits.shape[0]
        device = outputs.logits.device
        self.prompt_mask, self.prompt_starts = None, torch.zeros(batch, dtype=torch.int64, device=device)
        if attention_mask is not None:
            self._set_prompt_mask(attention_mask[:, :length].to(device=device, dtype=torch.bool))
        self.step = next_step(self.model, outputs, input_ids, self.cache, model_kwargs)
        # A node's position id is its row's entry index plus this offset: left padding shifts a row down.
        self.position_offset = torch.zeros(batch, dtype=torch.int64, device=device)
        if self.step.positions is not None:
            self.position_offset = self.step.positions.to(device) - length
        features = self.read_taps()
        self.prefilled = slice(already, length)
        # No output token is placed beyond this entry, drafted nodes may be.
        self.last_entry = length + generation_config.max_length - input_ids.shape[1] - 1
        return TargetOutput(
            outputs.logits[:, -1:].to(torch.float32, copy=True),
            features,
            outputs.get("attentions"),
            outputs.get("hidden_states"),
        )

    def prefill_for_drafting(self, token_ids: Tensor, mask: Tensor | None, max_length: int) -> None:
        """`prefill` of a draft model, where padding is run behind the text, and its entries in the cache are zeros.

        On the left, padding has nothing to see. Eager attention in float64 gives NaN there, and one layer later to all
        tokens of the row. A target must do what the host does; a draft model need not.

        Args:
            token_ids: [batch, seq] int64.
            mask: [batch, seq] bool, False at padding; None where there is none.
            max_length: most tokens that a text may have.
        """
        batch, length = token_ids.shape
        order = None
        if mask is not None and not bool(mask.all()):
            order = (~mask).to(torch.int8).argsort(dim=1, stable=True)
            token_ids = token_ids.gather(1, order)
        positions = torch.arange(length, device=token_ids.device).expand(batch, -1)
        arguments = {"attention_mask": torch.ones_like(token_ids), "position_ids": positions, "use_cache": True}
        self.prefill(token_ids, GenerationConfig(max_length=max_length), arguments)
        if mask is not None and order is not None:
            mask = mask.to(self.position_offset.device)
            self.cache.spread(order, mask)
            self.position_offset = self.position_offset - (~mask).sum(1)
            self._set_prompt_mask(mask)

    def _set_prompt_mask(self, mask: Tensor) -> None:
        """Notes which prompt entries may be seen, [batch, entries] bool, and where each row's prompt begins."""
        if bool(mask.all()):
            return
        length = mask.shape[1]
        self.prompt_mask, self.prompt_starts = mask, length - mask.sum(1)
        # No interval where there are gaps.
        if not bool((mask == (torch.arange(length, device=mask.device) >= self.prompt_starts[:, None])).all()):
            self.prompt_starts = None

    def begin_rounds(self, capacity: int) -> None:
        """Prepares for `verify`; `capacity` is the number of entries a row may need in all."""
        if self.compiles and self.prompt_starts is not None and self.step.is_plain:
            workspace = workspace_of(self.model, self.cache.layers[0].keys.device)
            if workspace is not None and workspace.claim(self, self.model, passing=self._tap_hooks):
                self.static = StaticVerify(workspace)
                self.cache.workspace = workspace
                capacity = capacity_for(capacity)
        self.cache.begin_rounds(capacity, contiguous=self.copies_entries)
        device = self.cache.lengths.device
        self.visible = torch.zeros((), dtype=self.dtype, device=device)
        self.hidden = torch.full((), torch.finfo(self.dtype).min, dtype=self.dtype, device=device)

    def keep_rows(self, rows: Sequence[int], *, for_good: bool = False) -> None:
        """Goes on with these rows, counted among those that are left.

        The others wait for `restore_rows`, or are forgotten if this is `for_good`.
        """
        if not for_good:
            if not self._whole_batch:
                self._whole_batch = (self.position_offset, self.prompt_mask, self.prompt_starts, self.step)
                self._rows = list(range(self.cache.batch))
            for place in sorted(set(range(self.cache.batch)) - set(rows)):
                self._aside[self._rows[place]] = self.cache.entries_of(place)
            self._rows = [self._rows[place] for place in rows]
        self.cache.keep_rows(rows)
        index = from_host(rows, self.position_offset.device)
        self.position_offset = self.position_offset[index]
        self.prompt_mask = None if self.prompt_mask is None else self.prompt_mask[index]
        self.prompt_starts = None if self.prompt_starts is None else self.prompt_starts[index]
        self.step = self.step.of_rows(index)

    def restore_rows(self) -> None:
        """Brings back the rows that `keep_rows` has set aside."""
        if self._whole_batch:
            self.position_offset, self.prompt_mask, self.prompt_starts, self.step = self._whole_batch
            self.cache.insert_rows(self._aside)
            self._whole_batch, self._aside = None, {}

    def prompt_positions(self) -> tuple[Tensor, Tensor | None]:
        """Position ids [batch, entries] of the entries that the prefill added, and which are no padding (None: all)."""
        entries = torch.arange(self.prefilled.start, self.prefilled.stop, device=self.position_offset.device)
        positions = self.position_offset.unsqueeze(1) + entries
        return positions, None if self.prompt_mask is None else self.prompt_mask[:, self.prefilled]

    def root_positions(self) -> Tensor:
        """[batch] int64 position ids of the next token to be committed."""
        return self.position_offset + self.cache.lengths

    def position_ids(self, tree: DraftTree, root_positions: Tensor) -> Tensor:
        """[batch, nodes] int64 position ids of a tree's nodes; nodes beyond the last output token stay in range."""
        position_ids = root_positions.unsqueeze(1) + tree.depths
        if self.cache.longest + tree.max_depth > self.last_entry:
            # Such nodes are never kept, but learned positions may have no embedding for them.
            last_position = (self.position_offset + self.last_entry).clamp(min=self.known_positions - 1)
            position_ids = position_ids.minimum(last_position.unsqueeze(1))
        if self.rotary_limits:
            position_ids = position_ids.minimum(self._reach(root_positions).unsqueeze(1))
        return position_ids

    def _reach(self, root_positions: Tensor) -> Tensor:
        """[batch] int64: the largest position that this round may run, by all rotary limits."""
        return torch.stack([limit.reach(root_positions) for limit in self.rotary_limits]).amin(0)

    def within_reach(self, tree: DraftTree, root_positions: Tensor) -> DraftTree:
        """The same tree without nodes that would change the rotary frequencies of the round (`decoding/rotary.py`)."""
        if not self.rotary_limits:
            return tree
        return tree.up_to_depth(self._reach(root_positions) - root_positions)

    def check_reach(self) -> None:
        """Raises ValueError if rows that pass a rotary limit at paces of their own would not be what they are together.

        To be asked after the prefill.
        """
        if not self.rotary_limits or len(self.position_offset) == 1:
            return
        first = (self.position_offset + self.cache.get_seq_length()).tolist()
        last = (self.position_offset + self.last_entry - 1).tolist()
        for limit in self.rotary_limits:
            if limit.divides(first, last):
                raise ValueError(
                    f"Target {type(self.model).__name__} has other rotary frequencies from position {limit.first} on "
                    f"(rope type {limit.rope_type!r}). Rows of this batch, now at positions {first}, may pass it on "
                    f"their way to {max(last)}, each in a round of its own; plain decoding takes them there together. "
                    f"Generate one row at a time, at most {max(0, limit.first - max(first) + 1)} new tokens, or "
                    "without assistant_model."
                )

    @property
    def at_rotary_limit(self) -> bool:
        """Whether the root of a batch of one without padding is the first token behind a rotary limit."""
        if self.cache.longest not in [limit.first for limit in self.rotary_limits]:
            return False
        return self.cache.batch == 1 and int(self.position_offset) == 0

    def renew(self, token_ids: Tensor) -> None:
        """Computes the cache anew where the host would: Phi3 does so when a text grows past its rotary limit.

        Args:
            token_ids: [1, seq] int64, all tokens up to the root, which is at the limit.
        """
        anew = self.model.prepare_inputs_for_generation(
            token_ids, past_key_values=self.cache, attention_mask=torch.ones_like(token_ids), use_cache=True
        )
        if anew.get("past_key_values") is not None:
            return
        cache = TreeCache(self.num_layers)
        self.model(input_ids=token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.begin_rounds(self.cache.capacity, contiguous=self.copies_entries)
        cache.rollback([token_ids.shape[1] - 1])  # the root is run with its tree
        self.cache = cache

    @functools.cached_property
    def slices(self) -> LayerSlices:
        """Its layers, to be run a few at a time."""
        return LayerSlices(self.model)

    def begin_chain(self, root_positions: Tensor, width: int) -> PendingChain:
        """A chain of up to `width` nodes, root included, whose drafter runs this target's own layers.

        Handed back with the tree (`DraftTree.pending`), its nodes go on from where they stand when they are verified.

        Raises:
            ValueError: the slices of this family are not known to be exact, or the call gives something they miss.
        """
        self.step.check_slices(self.model)
        return PendingChain(self, root_positions, width)

    def chain_template(self, batch: int, width: int) -> DraftTree:
        """The shape of a chain of `width` nodes, its tokens all zero; made once, since rounds ask for the same."""
        if self._template is None or self._template.token_ids.shape != (batch, width):
            zeros = torch.zeros(batch, width, dtype=torch.int64, device=self.cache.lengths.device)
            self._template = DraftTree.chain(zeros)
        return self._template

    @property
    def all_entries_visible(self) -> bool:
        """Whether a node that comes last may see every entry there is: no padding, no shorter rows, no windows."""
        return self.cache.batch == 1 and self.prompt_mask is None and not any(self.windows.values())

    def verify(
        self,
        tree: DraftTree,
        root_positions: Tensor,
        *,
        first: int = 0,
        lead: int = 0,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> TargetOutput:
        """One forward over all nodes of a tree, each seeing the committed prefix and its own ancestors only.

        Node i's logits are the target's for the token after node i. DDTree (arXiv 2604.12989), Section 4.4. Nodes that
        have passed some layers already (`tree.pending`) run the others only, unless something of all layers is asked
        for.

        Args:
            tree: what to verify.
            root_positions: [batch] int64, `root_positions()` at the start of the round.
            first: runs nodes from this index on; earlier forwards of the round ran the others, and the cache holds
                them (`TreeCache.hold`). The output then has nodes from `first` on only.
            lead: the first nodes, as many, are committed next, and the round goes on from the one after them
                (`TreeCache.commit_lead`). A captured forward puts that one where roots always lie.
            output_attentions: also return attention weights.
            output_hidden_states: also return hidden states of all layers.
        """
        if tree.pending is not None and not (output_attentions or output_hidden_states or self.feature_layers):
            return TargetOutput(tree.pending.finish().to(torch.float32), None, None, None)
        self.cache.reserve(tree.num_nodes)
        self.num_layers_run += self.num_layers
        for states in self._taps.values():
            states.clear()  # a logits processor may have run the target in between
        position_ids = self.position_ids(tree, root_positions)
        if self.static is not None:
            if not (output_attentions or output_hidden_states):
                return TargetOutput(*self.static(self, tree, position_ids, first, lead), None, None)
            self.cache.place_nodes(None)
        token_ids, mask = tree.token_ids, self.masks_as_wanted(self.attention_masks(tree, first))
        if first:
            token_ids, position_ids = token_ids[:, first:], position_ids[:, first:]
        extra = {} if self.step.is_plain else self.step.arguments(token_ids.shape[1])
        if output_attentions:
            extra["output_attentions"] = True
        if output_hidden_states:
            extra["output_hidden_states"] = True
        with inference_on_cpu(position_ids.device), self.own_attention:
            outputs = self.forward(
                self.model,
                input_ids=token_ids,
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=self.cache,
                use_cache=True,
                return_dict=True,
                **extra,
            )
        return TargetOutput(
            outputs.logits.to(torch.float32),
            self.read_taps(),
            outputs.attentions if output_attentions else None,
            outputs.hidden_states if output_hidden_states else None,
        )

    def attention_masks(self, tree: DraftTree, first: int = 0) -> dict[str, Tensor]:
        """Additive masks [batch, 1, nodes, entries] of the nodes from `first` on.

        By layer type where the target takes a dict, else one for all layers under the key "all".
        """
        masks = {kind: self._additive(tree, window).unsqueeze(1) for kind, window in self.windows.items()}
        return {kind: mask[:, :, first:] for kind, mask in masks.items()} if first else masks

    def masks_as_wanted(self, masks: dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """Masks by the keys of `windows` in the form that the host takes."""
        return masks if len(masks) > 1 or "sliding_attention" in masks else masks["all"]

    def _additive(self, tree: DraftTree, window: int | None) -> Tensor:
        """[batch, nodes, entries]: 0 where a node may look, the lowest number elsewhere."""
        # Always additive: eager attention would add a bool mask as 0 and 1 without complaint.
        longest = self.cache.longest
        if window is None and self.prompt_mask is None and self.cache.is_even:
            own = torch.where(tree.ancestor_mask.to(self.visible.device), self.visible, self.hidden)
            # All of the prefix is seen. (`functional.pad` would call this, after 25 us of questions on a CPU.)
            return torch.constant_pad_nd(own, (longest, 0))
        visible = self._visible_entries(tree)
        if window is not None:
            depths = tree.depths
            own_entry = self.cache.lengths.unsqueeze(1) + depths
            entries = torch.arange(longest, device=depths.device)
            distance = torch.cat(
                [own_entry.unsqueeze(-1) - entries, depths.unsqueeze(-1) - depths.unsqueeze(1)], dim=-1
            )
            visible = visible & (distance < window)
        return torch.where(visible, self.visible, self.hidden)

    def _visible_entries(self, tree: DraftTree) -> Tensor:
        """[batch, nodes, entries] bool: the entries that belong to each node's own past, windows left aside."""
        lengths, longest = self.cache.lengths, self.cache.longest
        prefix = torch.arange(longest, device=lengths.device) < lengths.unsqueeze(1)
        if self.prompt_mask is not None:
            prefix[:, : self.prompt_mask.shape[1]] &= self.prompt_mask
        prefix = prefix.unsqueeze(1).expand(-1, tree.num_nodes, -1)
        return torch.cat([prefix, tree.ancestor_mask.to(prefix.device)], dim=-1)


def _windows(model: PreTrainedModel) -> dict[str, int | None]:
    """The masks a target wants: by layer type where it takes a dict, else under the key "all"."""
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or ()
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in types:
        return {"full_attention": None, "sliding_attention": window}
    # Without layer types a window holds for all layers (Mistral); with all layers full it is not in use (Qwen2).
    return {"all": None if types else window}
