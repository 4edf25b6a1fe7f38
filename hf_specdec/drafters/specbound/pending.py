"""PendingChain: a chain of draft nodes that have passed a part of the target's layers, for self-speculative drafters.

Such a drafter decides after a few layers of a node which token to draft next. The chain stores the hidden state of
every node at the last layer that it has passed (one state per node, independent of the prompt's length). When a later
node needs keys and values of earlier nodes, these are advanced together first: a node never runs a layer before its
ancestors, and never runs one twice. Verification runs the remaining layers, so that every node has then passed every
layer, and the target's cache equals that of a complete forward.
Source: SpecBound (bounded speculation with cached states), Section 2.3, Figures 2 and 5.
"""

from __future__ import annotations

import inspect
import weakref

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.modules import home_of
from hf_specdec.decoding.state import RoundState
from hf_specdec.decoding.support import TreesRefusedError, check_supported
from hf_specdec.decoding.target import TargetModel, TargetOutput
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.specbound.slices import LayerSlices

_SLICES_ARE_EXACT: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()  # models that passed `check_slices`


class SlicedTarget:
    """The target of a call, run a few layers at a time.

    Args:
        target: of the call.

    Raises:
        ValueError: it is not known whether slices of its family are exact.
    """

    def __init__(self, target: TargetModel) -> None:
        self.target, self.slices = target, LayerSlices(target.model)
        self._template: DraftTree | None = None

    def begin_chain(self, root_positions: Tensor, width: int) -> PendingChain:
        """A chain of up to `width` nodes, root included.

        Args:
            root_positions: [batch] int64, `target.root_positions()` at the start of the round.
            width: most nodes that the chain may get.

        Raises:
            ValueError: the call has an input that slices do not support.
        """
        parameters = inspect.signature(self.target.model.forward).parameters if self.target.step.token_types else ()
        read = [name for name in self.target.step.token_types if name in parameters]
        if read:
            raise ValueError(
                f"Target {type(self.target.model).__name__} reads {', '.join(read)} in its embeddings, which is not "
                "supported when it drafts layer by layer; leave them out, or use a method that runs complete "
                "forwards."
            )
        return PendingChain(self, root_positions, width)

    def chain_template(self, batch: int, width: int) -> DraftTree:
        """The structure of a chain of `width` nodes, with zeros as tokens; cached, since all rounds need the same."""
        if self._template is None or self._template.token_ids.shape != (batch, width):
            zeros = torch.zeros(batch, width, dtype=torch.int64, device=self.target.cache.device)
            self._template = DraftTree.chain(zeros)
        return self._template


def check_slices(model: PreTrainedModel) -> None:
    """Raises ValueError unless layers of `model` run in slices give the logits of its complete forward.

    The family must have an entry in `LAYOUTS`, and the model is tested on six tokens, once per process.
    """
    slices = LayerSlices(model)
    try:
        check_supported(model)
    except TreesRefusedError as error:
        raise ValueError(
            f"{error}. SpecBound runs the target's own layers on the nodes that it drafts, so it cannot use "
            "transformers' own loop; use another method for this target."
        ) from error
    if model not in _SLICES_ARE_EXACT:
        apart, own, largest = _try_slices(model, slices.num_layers)
        # Other batch sizes may round differently in low precision; a missing scale gives far larger differences.
        share = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1
        if not apart <= max(share * largest, 2 * own):
            raise ValueError(
                f"The layers of target {type(model).__name__} run in slices give logits that differ by {apart:.3g} "
                f"from those of its complete forward (up to {largest:.3g}), so this model computes something around "
                f"its layers that the entry for {model.config.get_text_config(decoder=True).model_type!r} in LAYOUTS "
                "(hf_specdec/drafters/specbound/slices.py) does not describe. Use a method that runs complete "
                "forwards."
            )
        _SLICES_ARE_EXACT.add(model)


@torch.no_grad()
def _try_slices(model: PreTrainedModel, num_layers: int) -> tuple[float, float, float]:
    """Largest difference of logits between a chain run in slices and a complete forward, and the largest logit.

    In between: the same difference of the target's own forwards, of all tokens and of each prefix. It is more than
    rounding where one scale for a whole tensor quantises activations, and then slices differ as much.
    """
    target, embeddings = TargetModel(model), model.get_input_embeddings()
    token_ids = torch.arange(1, 7, device=home_of(embeddings)) % embeddings.num_embeddings
    token_ids, known = token_ids.expand(target.bound_rows or 1, -1), 3
    whole = model(input_ids=token_ids, use_cache=False).logits
    target.prefill_alone(token_ids[:, :known], max_length=token_ids.shape[1])
    target.begin_rounds(token_ids.shape[1])
    chain = SlicedTarget(target).begin_chain(target.root_positions(), 3)
    for node, layer in zip(range(known, token_ids.shape[1]), (num_layers // 2, 1, 0), strict=True):
        chain.extend(token_ids[:, node])
        chain.advance(layer)
    difference = (chain.finish() - whole[:, known:]).float().abs().max()
    prefixes = [model(input_ids=token_ids[:, : end + 1], use_cache=False).logits[:, -1] for end in range(known, 6)]
    own = (torch.stack(prefixes, 1) - whole[:, known:]).float().abs().max()
    return difference.item(), own.item(), whole.float().abs().max().item()


class PendingChain:
    """Nodes of one round, root first; all rows of a batch have passed the same layers.

    Args:
        sliced: the target whose layers are run.
        root_positions: [batch] int64, `target.root_positions()` at the start of the round.
        width: most nodes that the chain may get, root included.
    """

    def __init__(self, sliced: SlicedTarget, root_positions: Tensor, width: int) -> None:
        self.target, self.slices, self.cache = sliced.target, sliced.slices, sliced.target.cache
        self.width, self.num_nodes = width, 0
        self.cache.reserve(width)
        self._template = sliced.chain_template(len(root_positions), width)
        self._positions = self.target.position_ids(self._template, root_positions)
        self._masks: dict[str, Tensor] | None = None
        self._rotary: dict[str, tuple[Tensor, Tensor]] | None = None
        # [(layers passed, [batch, nodes, hidden])] in the order of the nodes: a node passes a layer after its parent.
        self._segments: list[tuple[int, Tensor]] = []

    @property
    def num_states(self) -> int:
        """Number of stored hidden states per row: one per node."""
        return sum(states.shape[1] for _, states in self._segments)

    @property
    def layers_passed(self) -> list[int]:
        """Number of layers that each node has passed."""
        return [passed for passed, states in self._segments for _ in range(states.shape[1])]

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
            return self.slices.logits(states)

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
                self._masks = self.target.attention_masks(self._template)
            entries = self.cache.longest + stop
            masks = {kind: mask[:, :, nodes, :entries] for kind, mask in self._masks.items()}
        self.target.num_layers_run += last - first
        with self.cache.writing_after(start), self.target.own_attention:
            return self.slices.run(
                states,
                first,
                last,
                position_ids=self._positions[:, nodes],
                rotary={kind: (cos[:, nodes], sin[:, nodes]) for kind, (cos, sin) in self._rotary.items()},
                masks=masks,
                cache=self.cache,
            )


class PendingGenerator(TreeCandidateGenerator):
    """A generator whose drafts have passed some of the target's layers before they are verified.

    Args:
        target: of the call.

    Attributes:
        chain: the chain of the latest round.
    """

    reads_cache = True

    def __init__(self, target: TargetModel) -> None:
        self.target = target
        self.chain: PendingChain | None = None
        self._sliced: SlicedTarget | None = None

    def begin_chain(self, root_positions: Tensor, width: int) -> PendingChain:
        """A chain of up to `width` nodes, root included, for this round; see `SlicedTarget.begin_chain`."""
        if self._sliced is None:
            self._sliced = SlicedTarget(self.target)
        self.chain = self._sliced.begin_chain(root_positions, width)
        return self.chain

    def verify(self, target: TargetModel, tree: DraftTree, state: RoundState) -> TargetOutput:
        """The chain's remaining layers; a complete forward if the tree differs or all layers' outputs are requested."""
        chain, self.chain = self.chain, None
        if chain is None or chain.num_nodes != tree.num_nodes or tree.no_drafts is not None or target.output_options:
            return target.verify(tree, state.root_positions)
        target.num_forwards += 1
        return TargetOutput(chain.finish().to(torch.float32))
