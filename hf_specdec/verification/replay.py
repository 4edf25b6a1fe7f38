"""Trees of a real sampled call, frozen: walked again and again by the acceptance rule, and verified again.

Two things are held apart. The rule must follow the law of the logits that verification gave it, exactly in every dtype.
And verification must give the target's own logits. This is asked in high precision (`precision.py`): the call is made
again with the same trees and the same tokens, and the logits of its rounds are held to those of plain forwards without
tree, cache or mask of ours. In the target's own dtype rounding may hide an error, so that the difference there is only
reported. Drafts that are said to have been drawn from a law are checked to look drawn from it.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper

from hf_specdec.chi_square import p_value
from hf_specdec.decoding import loop
from hf_specdec.decoding.accept import Verdict
from hf_specdec.decoding.chains import best_path
from hf_specdec.decoding.generator import Committed, DraftContext, TreeCandidateGenerator
from hf_specdec.decoding.sequences import Sequences
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.options import DrafterOptions
from hf_specdec.drafters.specbound.pending import PendingGenerator
from hf_specdec.verification.precision import TOP, Precision, top_difference

TEMPERATURE, TOP_K = 1.0, TOP  # top-k keeps the laws short enough to be counted
DRAWS = 2000  # walks of each frozen tree


@dataclass(frozen=True)
class TreeReplay:
    """One frozen tree.

    Attributes:
        num_nodes: drafted nodes.
        num_draws: walks.
        p_values: of the walks, by the law of the verified logits: one test, or one per node whose token was drawn.
        rounding: largest difference of a logit between tree verification and plain forwards in the target's own dtype,
            over the best tokens of each node.
        logit_error: the same in high precision; None where that was not to be had.
        bound: the largest `logit_error` that rounding may explain.
    """

    num_nodes: int
    num_draws: int
    p_values: tuple[float, ...]
    rounding: float
    logit_error: float | None = None
    bound: float = 0.0


@dataclass
class FrozenRound:
    """A frozen tree: what was drafted after which tokens, and what the tree's verification said of it."""

    prefix: Tensor  # [length] int64, root included
    tree: DraftTree
    logits: Tensor  # [nodes, vocab] float32, or float64 in that precision
    layers_passed: list[int] | None  # of each node before verification, where the drafter runs the target's layers


def settings(model: PreTrainedModel, **own: Any) -> GenerationConfig:
    """Settings of a call with the target's special tokens."""
    given = model.generation_config
    ids = {name: getattr(given, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if ids["pad_token_id"] is None:
        ends = ids["eos_token_id"]
        ids["pad_token_id"] = ends[0] if isinstance(ends, list) else (0 if ends is None else ends)
    return GenerationConfig(**ids, **own)


def generate(
    model: PreTrainedModel, prompt: Tensor, config: GenerationConfig, drafter: Drafter | None, **arguments: Any
) -> Tensor:
    """[length] int64: the text of one call, prompt included."""
    mask = torch.ones_like(prompt)
    output: Tensor = model.generate(
        prompt, attention_mask=mask, generation_config=config, assistant_model=drafter, **arguments
    )
    return output[0]


@contextlib.contextmanager
def listening(drafter: Drafter, rounds: list[FrozenRound], most: int) -> Iterator[None]:
    """Keeps the rounds of the calls made meanwhile; the drafter's own classes do all the work."""
    make = drafter.candidate_generator

    def listening(target: TargetModel) -> Any:
        generator: Any = make(target)
        generator.drafts_early = False  # the text of a round must be known when its tree is drafted
        draft, observe = generator.draft, generator.observe
        drafted: list[tuple[Tensor, list[int] | None]] = []

        def keeping(context: DraftContext) -> DraftTree:
            prefix = context.sequences[0, : context.lengths[0]].clone()
            tree: DraftTree = draft(context)
            chain = getattr(generator, "chain", None)
            drafted.append((prefix, None if chain is None else chain.layers_passed))
            return tree

        def noting(committed: Committed) -> None:
            if committed.tree is not None and bool(committed.tree.valid[0, 1:].any()) and len(rounds) < most:
                tree = committed.tree.of_rows([0])  # a copy: captured drafts are written over by the next ones
                if committed.target_logits.shape[1] < tree.num_nodes:
                    tree = _as_verified_by_host(tree, committed.target_logits.shape[1])
                prefix, layers_passed = drafted[-1]
                rounds.append(FrozenRound(prefix, tree, committed.target_logits[0].clone(), layers_passed))
            observe(committed)

        generator.draft, generator.observe = keeping, noting
        return generator

    drafter.candidate_generator = listening  # type: ignore[method-assign]
    try:
        yield
    finally:
        del drafter.candidate_generator


def _as_verified_by_host(tree: DraftTree, nodes: int) -> DraftTree:
    """The chain of that many nodes which the host's loop verifies of a tree of one row."""
    path = best_path(tree)[:nodes]
    probs = None if tree.draft_probs is None else tree.draft_probs[:, : len(path) - 1]
    return replace(DraftTree.chain(tree.token_ids[:, path]), draft_probs=probs)


class FrozenDrafter(Drafter):
    """Drafts the frozen trees of a call again, each after the tokens that it was drafted after; else nothing."""

    method = "frozen"

    def __init__(self, rounds: Sequence[FrozenRound]) -> None:
        self.options = DrafterOptions()
        self.rounds = {len(each.prefix): each for each in rounds}

    def check_target(self, model: PreTrainedModel) -> None:
        """Fits the target that the trees were drafted for."""

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return _FrozenGenerator(self.rounds, target)


class _FrozenGenerator(PendingGenerator):
    def __init__(self, rounds: dict[int, FrozenRound], target: TargetModel) -> None:
        super().__init__(target)
        self.rounds = rounds

    def draft(self, context: DraftContext) -> DraftTree:
        frozen = self.rounds.get(context.lengths[0])
        if frozen is None:
            return DraftTree.root_only(context.root_ids)
        tree = replace(frozen.tree, draft_probs=None, path_logprobs=None)
        if frozen.layers_passed is None:
            return tree
        pending = self.begin_chain(context.root_positions, tree.num_nodes)
        for node, layer in enumerate(frozen.layers_passed):
            pending.extend(tree.token_ids[:, node])
            pending.advance(layer)
        return tree


class Following(LogitsProcessor):
    """Lets nothing come but the tokens of one text, [length] int64."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.text[min(input_ids.shape[1], len(self.text) - 1)]] = 0.0
        return forced


def verify_again(
    model: PreTrainedModel, rounds: Sequence[FrozenRound], text: Tensor, num_prompt: int, precision: Precision
) -> dict[int, tuple[float, float]]:
    """Makes a call again in high precision, with the same trees and tokens.

    Args:
        model: the target.
        rounds: the frozen trees of that call.
        text: [length] int64, its tokens, prompt included.
        num_prompt: tokens of the prompt.
        precision: of the target.

    Returns:
        `logit_error` and `bound` of each tree that was reached, by the length of the prefix.
    """
    again: list[FrozenRound] = []
    drafter, stop = FrozenDrafter(rounds), len(rounds[-1].prefix) + 1
    deepest = max(each.tree.max_depth for each in rounds)  # deep nodes need positions, too
    with listening(drafter, again, most=len(rounds)), precision():
        generate(
            model,
            text[None, :num_prompt],
            settings(model, do_sample=False, max_new_tokens=stop + deepest - num_prompt),
            drafter,
            logits_processor=LogitsProcessorList([Following(text)]),
            stopping_criteria=[
                lambda ids, scores, **_: torch.full((len(ids),), ids.shape[1] >= stop, device=ids.device)
            ],
        )
        plain = [plain_logits(model, each) for each in again]
    return {
        len(each.prefix): (
            top_difference(each.logits[nodes_of(each)].to(logits.device), logits),
            precision.bound(logits),
        )
        for each, logits in zip(again, plain, strict=True)
    }


def walk(model: PreTrainedModel, frozen: FrozenRound) -> TreeReplay:
    """Walks one frozen tree many times."""
    tree = frozen.tree
    nodes = nodes_of(frozen)
    place = {node: index for index, node in enumerate(nodes)}
    token_ids = tree.token_ids[0, nodes].tolist()
    parents = [place[int(tree.parents[0, node])] if node else -1 for node in nodes]
    verified = frozen.logits[nodes]
    rounding = top_difference(verified, plain_logits(model, frozen).to(verified))

    # Only tokens that can be sampled somewhere, or were drafted, matter; the others share the last place.
    top = verified.topk(min(TOP_K, verified.shape[-1]), dim=-1).indices
    kept = torch.cat([top.flatten(), torch.tensor(token_ids, device=verified.device)]).unique()
    names = {int(token): index for index, token in enumerate(kept.tolist())}
    verified = torch.cat([verified[:, kept], verified.new_full((len(nodes), 1), -torch.inf)], dim=1)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE), TopKLogitsWarper(TOP_K)])
    laws = warpers(torch.zeros(1, 1), verified).cpu().double().softmax(-1).tolist()
    drafted = [names[token] for token in token_ids]
    if tree.draft_probs is None:
        values = [p_value(_walks(drafted, parents, verified, warpers), _law(drafted, parents, laws))]
    else:
        probs = tree.draft_probs[0][:, kept.to(tree.draft_probs.device)].to(verified.device)
        probs = torch.cat([probs, (1 - probs.sum(-1, keepdim=True)).clamp(min=0)], dim=-1)
        values = [
            p_value(
                _steps(probs[node - 1], verified[place[node] - 1], warpers),
                dict(enumerate(laws[place[node] - 1])),
            )
            for node in nodes[1:]
        ]
    return TreeReplay(len(nodes) - 1, DRAWS, tuple(values), rounding)


def nodes_of(frozen: FrozenRound) -> list[int]:
    """The nodes of the tree that are no padding."""
    return frozen.tree.valid[0].nonzero().flatten().tolist()


def plain_logits(model: PreTrainedModel, frozen: FrozenRound) -> Tensor:
    """[nodes, vocab] of the target's own dtype: after each node's own path, by a forward that knows no tree and cache.

    The row of a leaf gives the logits of all nodes above it. Shorter rows go on with anything, which they do not see.
    """
    parents, token_ids = frozen.tree.parents[0].tolist(), frozen.tree.token_ids[0].tolist()
    paths = {0: [0]}
    for node in nodes_of(frozen)[1:]:
        paths[node] = [*paths[parents[node]], node]
    above = {parents[node] for node in paths}
    leaves = [path for node, path in paths.items() if node not in above]
    width, start = max(map(len, leaves)), len(frozen.prefix) - 1
    tails = [[token_ids[node] for node in path + path[-1:] * (width - len(path))] for path in leaves]
    rows = torch.cat([frozen.prefix[:-1].expand(len(leaves), -1), torch.tensor(tails).to(frozen.prefix)], dim=1)
    parts = rows.to(model.device).split(8)  # the logits of a large vocabulary take their room
    logits = torch.cat([model(part, use_cache=False).logits[:, start:] for part in parts])
    places = {node: (row, depth) for row, path in enumerate(leaves) for depth, node in enumerate(path)}
    return torch.stack([logits[places[node]] for node in paths])


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
        verdict = _accept(tree, logits.expand(rows, -1, -1), warpers)
        last = verdict.path.gather(1, verdict.counts.tensor.unsqueeze(1) - 1)
        counts.update(zip(last.squeeze(1).tolist(), verdict.bonus_ids.tolist(), strict=True))
    return counts


def _steps(draft_probs: Tensor, logits: Tensor, warpers: LogitsProcessorList) -> Counter[int]:
    """How often each token came next where a draft is drawn from `draft_probs` and offered to the acceptance rule."""
    drafts = torch.multinomial(draft_probs, DRAWS, replacement=True)
    tree = DraftTree.chain(
        torch.stack([torch.zeros_like(drafts), drafts], dim=1), draft_probs=draft_probs.expand(DRAWS, 1, -1).clone()
    )
    verdict = _accept(tree, logits.expand(DRAWS, 2, -1), warpers)
    return Counter(row[0] for row in verdict.read().tokens)


def _accept(tree: DraftTree, logits: Tensor, warpers: LogitsProcessorList) -> Verdict:
    """The rule that the loop uses, as the loop finds it."""
    rule = loop.Acceptor(warpers, do_sample=True, keep_scores=False)  # type: ignore[attr-defined]
    return rule(tree, logits, Sequences(tree.token_ids[:, :1], StoppingCriteriaList(), None, None))


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


def drawn_p_value(rounds: Sequence[FrozenRound]) -> float | None:
    """A bound of the probability that drafted tokens lie as far from the laws they are said to be drawn from.

    With s the sum of the drafted tokens' own probabilities, exp(t s) over its expectation has mean 1 for every t, and
    so has the mean of several t: by Markov's inequality it exceeds 1/p with a probability of p at most, however few
    drafts there are and whatever their laws. Positive t find drafts that are too likely, negative ones too unlikely.

    Returns:
        None without such drafts.
    """
    slopes = torch.cat([sign * torch.logspace(-1, 2, 13, dtype=torch.float64) for sign in (-1, 1)]).unsqueeze(1)
    log_ratios, drawn = torch.zeros(len(slopes), dtype=torch.float64), False
    for each in rounds:
        if each.tree.draft_probs is None:
            continue
        drawn = True
        for node in nodes_of(each)[1:]:
            law = each.tree.draft_probs[0, node - 1].cpu().double()
            seen = law[each.tree.token_ids[0, node]]
            log_ratios += slopes[:, 0] * seen - (law.log() + slopes * law).logsumexp(1)
    return min(1.0, math.exp(math.log(len(slopes)) - float(log_ratios.logsumexp(0)))) if drawn else None
