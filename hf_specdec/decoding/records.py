"""TokenRecords: scores, logits, attentions and hidden states of every generated token, as `generate` returns them.

Plain decoding appends one entry per step for the whole batch. Here rows advance by different numbers of tokens, so
entries are collected per row and joined at the end. After a row has stopped, its entries are zeros; in plain decoding
they are the target's outputs for padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer
from transformers.generation import GenerateDecoderOnlyOutput

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.observers import Observer, Round
from hf_specdec.decoding.sequences import ScoresSoFar
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.tree import DraftTree


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """The output of plain `generate` with `return_dict_in_generate=True`, and the statistics of the speculation."""

    speculation: SpeculationStats | None = None


class TokenRecords(Observer):
    """Collects the outputs that the generation config requests with `return_dict_in_generate`.

    Args:
        generation_config: of the `generate` call.
        batch: number of rows.
        host_cache: the cache that plain decoding would use. Attention weights omit the entries that its layers drop.
        layer_types: of the target's layers, because some store nothing and attend to another one of their type.
    """

    def __init__(
        self,
        generation_config: GenerationConfig,
        batch: int,
        host_cache: Cache | None,
        layer_types: Sequence[str] = (),
    ) -> None:
        requested = generation_config.return_dict_in_generate
        self.keeps_scores = bool(requested and generation_config.output_scores)
        self.keeps_logits = bool(requested and generation_config.output_logits)
        self.keeps_attentions = bool(requested and generation_config.output_attentions)
        self.keeps_hidden_states = bool(requested and generation_config.output_hidden_states)
        self.waits = self.keeps_scores or self.keeps_logits or self.keeps_attentions or self.keeps_hidden_states
        host_layers = host_cache.layers if isinstance(host_cache, DynamicCache) else []
        self._windows = {
            index: layer.sliding_window
            for index, layer in enumerate(host_layers)
            if isinstance(layer, DynamicSlidingWindowLayer)
        }
        windows = {layer_types[index]: window for index, window in self._windows.items() if layer_types}
        self._windows |= {index: windows[kind] for index, kind in enumerate(layer_types) if kind in windows}
        # [row][token] -> [1, vocab]; for states [row][token][layer] -> [1, ...]
        self._scores: list[list[Tensor]] = [[] for _ in range(batch)]
        self._logits: list[list[Tensor]] = [[] for _ in range(batch)]
        self._attentions: list[list[tuple[Tensor, ...]]] = [[] for _ in range(batch)]
        self._hidden_states: list[list[tuple[Tensor, ...]]] = [[] for _ in range(batch)]
        # The prefill's outputs cover the whole prompt and are stored as transformers returned them.
        self._prefill_attentions: tuple[Tensor, ...] | None = None
        self._prefill_hidden_states: tuple[Tensor, ...] | None = None

    def scores_including(self, new: Tensor | None) -> ScoresSoFar:
        """A function of all scores including new ones; `new` is [batch, steps, vocab], at the accepted path."""

        def scores(source_rows: list[int], count: int) -> tuple[Tensor, ...] | None:
            if new is None:
                return None
            past = zip(*(self._scores[row] for row in source_rows), strict=True)
            steps = [torch.cat(step) if len(step) > 1 else step[0] for step in past]
            return (*steps, *(new[source_rows, step] for step in range(count)))

        return scores

    def on_prefill(self, prefill: Round) -> None:
        if not self.waits:
            return
        self._record_logits(prefill)
        if self.keeps_hidden_states:
            self._prefill_hidden_states = prefill.output.hidden_states
        if self.keeps_attentions and prefill.output.attentions is not None:
            self._prefill_attentions = self._within_windows(prefill.output.attentions)

    def on_round(self, step: Round) -> None:
        if not self.waits:
            return
        self._record_logits(step)
        hidden_states, attentions = step.output.hidden_states, step.output.attentions
        for row, count in enumerate(step.kept):
            nodes = step.verdict.path[row, :count] if count else None
            if nodes is not None and self.keeps_hidden_states and hidden_states is not None:
                # A family with several residual streams has them before the batch: [streams, batch, nodes, hidden].
                layers = [
                    states[..., row : row + 1, :, :].index_select(-2, nodes.to(states.device)).split(1, -2)
                    for states in hidden_states
                ]
                self._hidden_states[row] += list(zip(*layers, strict=True))
            if nodes is not None and self.keeps_attentions and attentions is not None:
                self._attentions[row] += self._own_attentions(attentions, row, nodes, step.tree, step.cache)

    def _record_logits(self, step: Round) -> None:
        """Records scores and logits of the tokens that each row kept, bonus token included. No row has been dropped."""
        for row, count in enumerate(step.kept):
            if count and step.verdict.scores is not None:
                self._scores[row] += list(step.verdict.scores[row, :count].split(1))
            if count and self.keeps_logits:
                self._logits[row] += list(step.output.logits[row, step.verdict.path[row, :count]].split(1))

    def _within_windows(self, attentions: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Without the entries that a sliding layer of transformers has dropped before the prefill's last chunk."""
        return tuple(
            layer[..., -(self._windows[index] - 1 + layer.shape[-2]) :] if index in self._windows else layer
            for index, layer in enumerate(attentions)
        )

    def _own_attentions(
        self, attentions: tuple[Tensor, ...], row: int, nodes: Tensor, tree: DraftTree, cache: TreeCache
    ) -> list[tuple[Tensor, ...]]:
        """Per node, per layer [1, heads, 1, entries of its own path]: without columns of other nodes of the tree."""
        prefix = torch.arange(cache.row_lengths[row], device=nodes.device)
        per_node = []
        for node in nodes.tolist():
            ancestors = tree.ancestor_mask[row, node].nonzero().squeeze(-1)
            entries = torch.cat([prefix, cache.longest + ancestors])
            own = []
            for index, layer in enumerate(attentions):
                seen = entries[-self._windows[index] :] if index in self._windows else entries
                own.append(layer[row, :, node, seen.to(layer.device)][None, :, None])
            per_node.append(tuple(own))
        return per_node

    def finish(self, num_tokens: int) -> dict[str, tuple[Tensor, ...] | tuple[tuple[Tensor, ...], ...]]:
        """The fields of `GenerateDecoderOnlyOutput` for the first `num_tokens` tokens of every row."""
        fields: dict[str, tuple[Tensor, ...] | tuple[tuple[Tensor, ...], ...]] = {}
        if self.keeps_scores:
            fields["scores"] = _join(self._scores, num_tokens)
        if self.keeps_logits:
            fields["logits"] = _join(self._logits, num_tokens)
        if self._prefill_hidden_states is not None:
            following = _join_layers(self._hidden_states, num_tokens - 1, batch_dim=-3)
            fields["hidden_states"] = (self._prefill_hidden_states, *following)
        if self._prefill_attentions is not None:
            fields["attentions"] = (self._prefill_attentions, *_join_layers(self._attentions, num_tokens - 1))
        return fields


def _join(rows: list[list[Tensor]], num_tokens: int, batch_dim: int = 0) -> tuple[Tensor, ...]:
    filler = [torch.zeros_like(max(rows, key=len)[step]) for step in range(num_tokens)]
    return tuple(
        torch.cat([row[step] if step < len(row) else filler[step] for row in rows], batch_dim)
        for step in range(num_tokens)
    )


def _join_layers(
    rows: list[list[tuple[Tensor, ...]]], num_tokens: int, batch_dim: int = 0
) -> tuple[tuple[Tensor, ...], ...]:
    if not num_tokens:
        return ()
    num_layers = len(max(rows, key=len)[0])
    if not num_layers:  # attentions of kernels that return none
        return ((),) * num_tokens
    layers = [
        _join([[token[layer] for token in row] for row in rows], num_tokens, batch_dim) for layer in range(num_layers)
    ]
    return tuple(zip(*layers, strict=True))
