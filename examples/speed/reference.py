"""The DDTree loop of the paper (arXiv 2604.12989) in plain host code, as a baseline for our rounds.

In each round the drafter runs eagerly and the best tokens of its marginals are copied to the host. There a heap builds
the tree (Algorithm 1). A new dense mask over cache and tree is made, and the target verifies with a stock
`DynamicCache` and the hidden states of all layers. The target's choices are copied to the host, which finds the
accepted path. The accepted entries are gathered from the cache of every layer. Greedy, one row.

This was written from the paper; golden tests compare our rounds with the published implementation.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_specdec.decoding.upstream import CACHE
from hf_specdec.methods.dflash.network import DFlashDrafter

HostTree = tuple[list[int], list[int]]  # tokens and parents, root first


@dataclass
class ReferenceRun:
    """Result of a run.

    Attributes:
        token_ids: [1, seq] int64, prompt included.
        acceptance_lengths: tokens committed per round.
        seconds: of all rounds, without the prefill.
        marginals_seconds: of these, the time to compute the drafter's marginals, inputs and cache included.
    """

    token_ids: Tensor
    acceptance_lengths: list[int] = field(default_factory=list)
    seconds: float = 0.0
    marginals_seconds: float = 0.0


def heap_tree(logits: Tensor, root: int, budget: int) -> HostTree:
    """The `budget` most probable prefixes by Algorithm 1; `logits` [depth, vocab] are normalised on their device."""
    best, ranked = logits.float().log_softmax(-1).topk(min(budget, logits.shape[-1]), dim=-1)
    logprobs, ids = best.tolist(), ranked.tolist()
    tokens, parents = [root], [-1]
    heap: list[tuple[float, tuple[int, ...], int]] = [(-logprobs[0][0], (0,), 0)]
    while heap and len(tokens) <= budget:
        score, ranks, parent = heapq.heappop(heap)
        level, rank = len(ranks) - 1, ranks[-1]
        tokens.append(ids[level][rank])
        parents.append(parent)
        if rank + 1 < len(ids[level]):
            sibling = score + logprobs[level][rank] - logprobs[level][rank + 1]
            heapq.heappush(heap, (sibling, (*ranks[:-1], rank + 1), parent))
        if level + 1 < len(ids):
            heapq.heappush(heap, (score - logprobs[level + 1][0], (*ranks, 0), len(tokens) - 1))
    return tokens, parents


def reference_ddtree(
    target: PreTrainedModel,
    drafter: DFlashDrafter,
    prompt: Tensor,
    new_tokens: int,
    budget: int,
    script: Callable[[int], HostTree] | None = None,
) -> ReferenceRun:
    """Generates greedily with the reference loop.

    Args:
        target: must accept 4D masks and a `DynamicCache`.
        drafter: computes the marginals.
        prompt: [1, seq] int64.
        new_tokens: exact number; the end of the text is ignored.
        budget: maximum number of drafted nodes.
        script: maps the root's token to a tree that is verified instead of the drafted one. The drafted tree is still
            made, so that the round has its full cost.
    """
    with torch.inference_mode():
        return _Loop(target, drafter, prompt, budget, script).run(new_tokens)


class _Loop:
    def __init__(
        self,
        target: PreTrainedModel,
        drafter: DFlashDrafter,
        prompt: Tensor,
        budget: int,
        script: Callable[[int], HostTree] | None,
    ) -> None:
        self.target, self.drafter, self.prompt, self.budget, self.script = target, drafter, prompt, budget, script
        self.layers = drafter.config.target_layer_ids
        self.cache, self.draft_cache = DynamicCache(), DynamicCache(config=drafter.config)

    def run(self, new_tokens: int) -> ReferenceRun:
        output = self.target(self.prompt, output_hidden_states=True, logits_to_keep=1, **{CACHE: self.cache})
        tokens = [int(output.logits[0, -1].argmax())]
        features = self._features(output.hidden_states)
        run = ReferenceRun(self.prompt)
        began = time.perf_counter()
        while len(tokens) < new_tokens:
            round_began = time.perf_counter()
            logits = self._marginals(tokens[-1], features)
            run.marginals_seconds += time.perf_counter() - round_began
            drafted = heap_tree(logits, tokens[-1], self.budget)
            tree, parents = drafted if self.script is None else self.script(tokens[-1])
            new, features = self._verify(tree, parents)
            tokens += new
            run.acceptance_lengths.append(len(new))
        run.seconds = time.perf_counter() - began
        ids = torch.tensor([tokens[:new_tokens]], device=self.prompt.device)
        run.token_ids = torch.cat([self.prompt, ids], dim=1)
        return run

    def _features(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([hidden_states[layer + 1] for layer in self.layers], dim=-1)

    def _marginals(self, root: int, features: Tensor) -> Tensor:
        """Logits [block - 1, vocab] of the slots after the root."""
        drafter, device = self.drafter, self.prompt.device
        start, block = self.draft_cache.get_seq_length() + features.shape[1], drafter.num_slots
        block_ids = torch.tensor([[root] + [drafter.config.mask_token_id] * (block - 1)], device=device)
        positions = torch.arange(start - features.shape[1], start + block, device=device).unsqueeze(0)
        logits = drafter(
            block_ids,
            features,
            positions,
            embed_tokens=self.target.get_input_embeddings(),
            cache=self.draft_cache,
            lm_head=self.target.get_output_embeddings(),
        )
        self.draft_cache.crop(start - self.draft_cache.get_seq_length())
        return logits[0]

    def _verify(self, tokens: list[int], parents: list[int]) -> tuple[list[int], Tensor]:
        """Accepted tokens with the bonus token, and features [1, accepted + 1, ...] of root and accepted nodes."""
        device, past, nodes = self.prompt.device, self.cache.get_seq_length(), len(tokens)
        depths, sees = [0] * nodes, torch.eye(nodes, dtype=torch.bool)
        for node in range(1, nodes):
            depths[node] = depths[parents[node]] + 1
            sees[node, :node] = sees[parents[node], :node]
        mask = torch.zeros(1, 1, nodes, past + nodes, dtype=self.target.dtype, device=device)
        mask[0, 0, :, past:].masked_fill_(~sees.to(device), torch.finfo(mask.dtype).min)
        output = self.target(
            torch.tensor([tokens], device=device),
            attention_mask=mask,
            position_ids=past + torch.tensor([depths], device=device),
            **{CACHE: self.cache},
            output_hidden_states=True,
        )
        choices = output.logits[0].argmax(-1).tolist()
        children = {(parents[node], tokens[node]): node for node in range(1, nodes)}
        path = [0]
        while (child := children.get((path[-1], choices[path[-1]]))) is not None:
            path.append(child)
        kept = torch.tensor(path, device=device)
        for layer in self.cache.layers:
            layer.keys = torch.cat([layer.keys[:, :, :past], layer.keys[:, :, past + kept]], dim=2)
            layer.values = torch.cat([layer.values[:, :, :past], layer.values[:, :, past + kept]], dim=2)
        new = [tokens[node] for node in path[1:]] + [choices[path[-1]]]
        return new, self._features(output.hidden_states)[:, kept]
