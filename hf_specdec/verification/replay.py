"""Trees of a real sampled call, frozen, and walked again and again by the acceptance rule.

Two things are held apart. The rule must follow the law of the logits that verification gave it, exactly in every dtype.
And those must be the target's own, by plain forwards without tree, cache or mask of ours, but for rounding: in bfloat16
that alone takes other tokens into the top k, so walks cannot be held to the law of plain forwards. Drafts that are said
to have been drawn from a law are checked to look drawn from it.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper

from hf_specdec.chi_square import deviation_sigma
from hf_specdec.decoding import loop
from hf_specdec.decoding.candidates import DraftContext, RoundOutcome
from hf_specdec.decoding.sequences import Sequences
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.base import Drafter
from hf_specdec.verification.differences import (
    largest_difference,
    last_logits,
    last_logits_after_cache,
    unit_in_the_last_place,
)

TEMPERATURE, TOP_K = 1.0, 16  # top-k keeps the laws short enough to be counted
DRAWS = 2000  # walks of each frozen tree


@dataclass(frozen=True)
class TreeReplay:
    """One frozen tree.

    Attributes:
        num_nodes: drafted nodes.
        num_draws: walks.
        sigma: deviation of the walks from the law of the verified logits, in standard deviations.
        logit_error: largest difference of a logit between tree verification and plain forwards, over the tokens that
            can be sampled or were drafted.
        rounding: how far logits of this target move by rounding alone, on these paths: one unit in the last place of
            the best, in the target's dtype, or more where two plain forwards (see `Difference`) differ by more.
    """

    num_nodes: int
    num_draws: int
    sigma: float
    logit_error: float
    rounding: float


@dataclass
class FrozenRound:
    """A frozen tree: what was drafted after which tokens, and what the tree's verification said of it."""

    prefix: Tensor  # [length] int64, root included
    tree: DraftTree
    logits: Tensor  # [nodes, vocab] float32


@contextlib.contextmanager
def listening(drafter: Drafter, rounds: list[FrozenRound], most: int) -> Iterator[None]:
    """Keeps the rounds of the calls made meanwhile; the drafter's own classes do all the work."""
    make = drafter.candidate_generator

    def listening(target: TargetModel) -> Any:
        generator: Any = make(target)
        generator.drafts_early = False  # the text of a round must be known when its tree is drafted
        draft, observe = generator.draft, generator.observe
        prefixes: list[Tensor] = []

        def keeping(context: DraftContext) -> DraftTree:
            prefixes.append(context.sequences[0, : context.lengths[0]].clone())
            return draft(context)

        def noting(outcome: RoundOutcome) -> None:
            if outcome.tree is not None and bool(outcome.tree.valid[0, 1:].any()) and len(rounds) < most:
                tree = outcome.tree.of_rows([0])  # a copy: captured drafts are written over by the next ones
                rounds.append(FrozenRound(prefixes[-1], tree, outcome.target_logits[0].clone()))
            observe(outcome)

        generator.draft, generator.observe = keeping, noting
        return generator

    drafter.candidate_generator = listening  # type: ignore[method-assign]
    try:
        yield
    finally:
        del drafter.candidate_generator


def replay(model: PreTrainedModel, frozen: FrozenRound) -> TreeReplay:
    """Walks one frozen tree many times."""
    tree = frozen.tree
    nodes = [node for node in range(tree.num_nodes) if bool(tree.valid[0, node])]
    place = {node: index for index, node in enumerate(nodes)}
    token_ids = [int(tree.token_ids[0, node]) for node in nodes]
    parents = [place[int(tree.parents[0, node])] if node else -1 for node in nodes]
    plain, cached = _plain_logits(model, frozen.prefix, token_ids, parents)
    verified = frozen.logits[nodes].to(plain.device)

    # Only tokens that can be sampled somewhere, or were drafted, matter; the others share the last place.
    top = torch.cat([plain, verified]).topk(min(TOP_K, plain.shape[-1]), dim=-1)
    kept = torch.cat([top.indices.flatten(), torch.tensor(token_ids, device=plain.device)]).unique()
    names = {int(token): index for index, token in enumerate(kept.tolist())}
    error = largest_difference(verified[:, kept], plain[:, kept])
    ulp = unit_in_the_last_place(float(top.values[: len(nodes), 0].abs().max()), model.dtype)
    rounding = max(ulp, largest_difference(cached, plain))

    verified = torch.cat([verified[:, kept], verified.new_full((len(nodes), 1), -torch.inf)], dim=1)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE), TopKLogitsWarper(TOP_K)])
    laws = warpers(torch.zeros(1, 1), verified).cpu().double().softmax(-1).tolist()
    drafted = [names[token] for token in token_ids]
    if tree.draft_probs is None:
        sigma = deviation_sigma(_walks(drafted, parents, verified, warpers), _law(drafted, parents, laws))
    else:
        probs = tree.draft_probs[0][:, kept.to(tree.draft_probs.device)].to(verified.device)
        probs = torch.cat([probs, (1 - probs.sum(-1, keepdim=True)).clamp(min=0)], dim=-1)
        sigma = max(
            deviation_sigma(
                _steps(probs[node - 1], verified[place[node] - 1], warpers),
                dict(enumerate(laws[place[node] - 1])),
            )
            for node in nodes[1:]
        )
    return TreeReplay(len(nodes) - 1, DRAWS, sigma, error, rounding)


def _plain_logits(
    model: PreTrainedModel, prefix: Tensor, token_ids: list[int], parents: list[int]
) -> tuple[Tensor, Tensor]:
    """[nodes, vocab] float32 twice: the target's logits after each node's own path, by forwards that know no tree.

    Once without a cache, once the last token of each path after a cache of the others.
    """
    paths: list[list[int]] = [[]]
    for node in range(1, len(token_ids)):
        paths.append([*paths[parents[node]], token_ids[node]])
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for depth in sorted({len(path) for path in paths}):
        level = [node for node, path in enumerate(paths) if len(path) == depth]
        tails = torch.tensor([paths[node] for node in level], dtype=torch.int64, device=prefix.device)
        rows = torch.cat([prefix.expand(len(level), -1), tails.view(len(level), depth)], dim=1)
        rows = rows.to(model.device)
        both = zip(last_logits(model, rows), last_logits_after_cache(model, rows), strict=True)
        found |= dict(zip(level, both, strict=True))
    plain, cached = zip(*(found[node] for node in range(len(token_ids))), strict=True)
    return torch.stack(plain), torch.stack(cached)


def _walks(
    drafted: list[int], parents: list[int], logits: Tensor, warpers: LogitsProcessorList
) -> Counter[tuple[int, int]]:
    """How often the acceptance rule ended at (node, bonus token)."""
    nodes, vocab = logits.shape
    counts: Counter[tuple[int, int]] = Counter()
    device = logits.device
    chunk = max(1, min(DRAWS, 2**25 // (nodes * vocab)))
    for start in range(0, DRAWS, chunk):
        rows = min(chunk, DRAWS - start)
        tree = DraftTree.from_parents(
            torch.tensor(drafted, device=device).expand(rows, -1),
            torch.tensor(parents, device=device).expand(rows, -1),
            max_depth=nodes - 1,
        )
        accepted = _accept(tree, logits.expand(rows, -1, -1).clone(), warpers)
        last = accepted.path.gather(1, torch.tensor(accepted.num_accepted, device=device).unsqueeze(1))
        counts.update(zip(last.squeeze(1).tolist(), accepted.bonus_ids.tolist(), strict=True))
    return counts


def _steps(draft_probs: Tensor, logits: Tensor, warpers: LogitsProcessorList) -> Counter[int]:
    """How often each token came next where a draft is drawn from `draft_probs` and offered to the acceptance rule."""
    drafts = torch.multinomial(draft_probs, DRAWS, replacement=True)
    tree = DraftTree.chain(
        torch.stack([torch.zeros_like(drafts), drafts], dim=1), draft_probs=draft_probs.expand(DRAWS, 1, -1).clone()
    )
    accepted = _accept(tree, logits.expand(DRAWS, 2, -1).clone(), warpers)
    return Counter(row[0] for row in accepted.tokens)


def _accept(tree: DraftTree, logits: Tensor, warpers: LogitsProcessorList) -> Any:
    """The rule that the loop uses, as the loop finds it."""
    rule = loop.FollowTarget(warpers, do_sample=True, keep_scores=False)  # type: ignore[attr-defined]
    return rule(tree, logits, Sequences(tree.token_ids[:, :1], [], None, None))


def _law(drafted: list[int], parents: list[int], law: list[list[float]]) -> dict[tuple[int, int], float]:
    """Probability of ending at (node, bonus token): the law of the logits along the path, and off it at the end."""
    reached = [1.0]
    for node in range(1, len(drafted)):
        reached.append(reached[parents[node]] * law[parents[node]][drafted[node]])
    children = {(parents[node], drafted[node]) for node in range(1, len(drafted))}
    return {
        (node, token): reached[node] * probability
        for node in range(len(drafted))
        for token, probability in enumerate(law[node])
        if probability > 0 and reached[node] > 0 and (node, token) not in children
    }


def drawn_sigma(rounds: list[FrozenRound]) -> float | None:
    """How far drafted tokens lie from the laws they are said to be drawn from; positive where they are too likely.

    The mean of the drafted tokens' own probabilities against its expectation, in standard deviations.
    """
    seen, expected, variance = 0.0, 0.0, 0.0
    for each in rounds:
        assert each.tree.draft_probs is not None
        for node in range(1, each.tree.num_nodes):
            if bool(each.tree.valid[0, node]):
                law = each.tree.draft_probs[0, node - 1].cpu().double()
                mean = float((law * law).sum())
                seen += float(law[each.tree.token_ids[0, node]])
                expected += mean
                variance += float((law * law * law).sum()) - mean**2
    if not rounds:
        return None
    return (seen - expected) / math.sqrt(variance) if variance > 1e-12 else 0.0
