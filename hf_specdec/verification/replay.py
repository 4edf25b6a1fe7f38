"""Draft trees of a real sampled call, recorded, then accepted many times and verified again.

Two properties are tested separately. The acceptance rule must follow the distribution of the verified logits, exactly
in every dtype. And the verified logits must be those of plain forwards, without a tree, a cache or our masks. The
second is tested in high precision (`precision.py`): the call is repeated with the same trees and tokens. In the
target's own dtype, rounding may hide an error, so that difference is only reported. Drafts that come with the
distribution they were drawn from are tested against it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper

from hf_specdec.chi_square import p_value
from hf_specdec.decoding import loop, upstream
from hf_specdec.decoding.accept import Verdict
from hf_specdec.decoding.chains import best_path
from hf_specdec.decoding.exchange import Committed, DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.observers import Observer
from hf_specdec.decoding.once import undisturbed
from hf_specdec.decoding.sequences import Sequences
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.modules import home_of
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.drafting.options import DrafterOptions
from hf_specdec.drafting.registry import method_of
from hf_specdec.integration import observing
from hf_specdec.verification.precision import TOP, Precision, top_difference

TEMPERATURE, TOP_K = 1.0, TOP  # top-k limits the number of outcomes, so that each is counted often enough
DRAWS = 2000  # of each chi-square test


@dataclass(frozen=True)
class TreeReplay:
    """Results of one recorded tree.

    Attributes:
        num_nodes: drafted nodes.
        num_draws: of each chi-square test.
        p_values: of the acceptance rule, under the distribution of the verified logits: one test of the whole tree, or
            one per drafted node if the tree has `draft_probs`.
        rounding: largest difference of a logit between tree verification and plain forwards in the target's own dtype,
            over the best tokens of each node.
        logit_error: the same in high precision; None if it was not measured.
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
    """A recorded round: the text before the draft, the draft tree and its verified logits."""

    prefix: Tensor  # [length] int64, root included
    tree: DraftTree
    logits: Tensor  # [nodes, vocab] float32, or float64 in that precision


@dataclass(frozen=True)
class Prompt:
    """What a call of `generate` gets.

    Attributes:
        ids: [1, seq] int64.
        more: its other arguments, such as pictures.
    """

    ids: Tensor
    more: Mapping[str, Any] = field(default_factory=dict)

    def has_pictures(self, model: PreTrainedModel) -> bool:
        """Whether plain forwards need more than ids: other arguments, or positions that the model may not remember."""
        return bool(self.more) or upstream.position_axes(model) > 1

    def whole_logits(self, model: PreTrainedModel, texts: Tensor) -> Tensor:
        """[rows, length, vocab] of forwards without a cache over texts [rows, length] that begin with the prompt."""
        if not self.has_pictures(model):
            logits: Tensor = model(texts, use_cache=False).logits
            return logits
        with undisturbed(model):  # pictures belong to one row, so texts are run one by one
            inputs = (upstream.whole_text_inputs(model, text, self.more) for text in texts.split(1))
            return torch.cat([model(**each, return_dict=True).logits for each in inputs])


class RoundRecorder(Observer):
    """Copies rounds of a call of one row.

    Args:
        prompt: [1, seq] int64.
        limit: rounds to record.

    Attributes:
        rounds: the first `limit` rounds that drafted something.
    """

    waits = True  # `Committed.num_committed` must be known

    def __init__(self, prompt: Tensor, limit: int) -> None:
        self.text, self.limit = prompt[0], limit  # `text` lacks the root of the next round
        self.rounds: list[FrozenRound] = []

    def on_commit(self, committed: Committed) -> None:
        tree, logits = committed.tree, committed.target_logits
        assert tree is not None, "a round has a tree"
        if len(self.rounds) < self.limit and bool(tree.valid[0, 1:].any()):
            prefix = torch.cat([self.text, tree.token_ids[0, :1]])
            tree = tree.of_rows([0])  # a copy: the next draft overwrites a captured one
            if logits.shape[1] < tree.num_nodes:
                tree = _chain_of_assisted_loop(tree, logits.shape[1])
            self.rounds.append(FrozenRound(prefix, tree, logits[0].clone()))
        self.text = torch.cat([self.text, committed.token_ids[0, : committed.num_committed[0]]])


def _chain_of_assisted_loop(tree: DraftTree, nodes: int) -> DraftTree:
    """The chain of `nodes` nodes that transformers' own loop verifies of a tree of one row."""
    path = best_path(tree)[:nodes]
    probs = None if tree.draft_probs is None else tree.draft_probs[:, : len(path) - 1]
    return replace(DraftTree.chain(tree.token_ids[:, path]), draft_probs=probs)


def settings(model: PreTrainedModel, **own: Any) -> GenerationConfig:
    """A generation config with the target's special tokens."""
    given = model.generation_config
    ids = {name: getattr(given, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if ids["pad_token_id"] is None:
        ends = ids["eos_token_id"]
        ids["pad_token_id"] = ends[0] if isinstance(ends, list) else (0 if ends is None else ends)
    return GenerationConfig(**ids, **own)


def generate(
    model: PreTrainedModel, prompt: Prompt, config: GenerationConfig, drafter: Drafter | None, **arguments: Any
) -> Tensor:
    """[length] int64: prompt and continuation."""
    given = {"attention_mask": torch.ones_like(prompt.ids), **prompt.more}
    output: Tensor = model.generate(prompt.ids, generation_config=config, assistant_model=drafter, **given, **arguments)
    return output[0]


class FrozenDrafter(Drafter):
    """Drafts recorded trees again, each after its recorded prefix length; elsewhere nothing.

    Args:
        rounds: the recorded rounds.
        drafter: that of the recorded call.
    """

    method = "frozen"

    def __init__(self, rounds: Sequence[FrozenRound], drafter: Drafter) -> None:
        self.options = DrafterOptions()
        self.trees = {len(each.prefix): replace(each.tree, draft_probs=None, path_logprobs=None) for each in rounds}
        self.recorded = drafter

    def check_target(self, model: PreTrainedModel) -> None:
        """Fits the target that the trees were drafted for."""

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        method = method_of(self.recorded)
        if method is not None and method.replays is not None:
            return method.replays(self.recorded, target, self.draft)
        return _FrozenGenerator(self)

    def draft(self, context: DraftContext) -> DraftTree:
        """The recorded tree of a round; its root alone if there is none."""
        tree = self.trees.get(context.lengths[0])
        return DraftTree.root_only(context.root_ids) if tree is None else tree


class _FrozenGenerator(TreeCandidateGenerator):
    def __init__(self, drafter: FrozenDrafter) -> None:
        self.drafter = drafter

    def draft(self, context: DraftContext) -> DraftTree:
        return self.drafter.draft(context)


class ForcedText(LogitsProcessor):
    """Allows only the tokens of one text, [length] int64; after its end, only its last token."""

    keeps_no_state = True  # targets that verify chains draft with it, see `decoding/user_code.py`

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.text[min(input_ids.shape[1], len(self.text) - 1)]] = 0.0
        return forced


def verify_again(
    model: PreTrainedModel,
    drafter: Drafter,
    rounds: Sequence[FrozenRound],
    text: Tensor,
    prompt: Prompt,
    precision: Precision,
    until: float,
) -> dict[int, tuple[float, float]]:
    """Repeats a call in high precision, with the same trees and tokens.

    Args:
        model: the target.
        drafter: that of the call.
        rounds: recorded in that call.
        text: [length] int64, prompt and continuation of that call.
        prompt: of that call.
        precision: of the target.
        until: no tree but the first is compared after this time of `time.perf_counter`.

    Returns:
        By length of the prefix, `logit_error` and `bound` of each tree that was verified again.
    """
    # transformers' loop reports a round when the next one begins. Deep nodes need positions, too.
    stop = len(rounds[-1].prefix) + 2 + max(each.tree.max_depth for each in rounds)
    recorder = RoundRecorder(prompt.ids, limit=len(rounds))
    plain: list[Tensor] = []
    with observing(recorder), precision():
        generate(
            model,
            prompt,
            settings(model, do_sample=False, max_new_tokens=stop - prompt.ids.shape[1]),
            FrozenDrafter(rounds, drafter),
            logits_processor=LogitsProcessorList([ForcedText(text)]),
        )
        for each in recorder.rounds:
            if plain and time.perf_counter() > until:
                break
            plain.append(plain_logits(model, each, prompt))
    return {
        len(each.prefix): (
            top_difference(each.logits[nodes_of(each)].to(logits.device), logits),
            precision.bound(logits),
        )
        for each, logits in zip(recorder.rounds, plain, strict=False)  # as far as there was time
    }


def replay(model: PreTrainedModel, frozen: FrozenRound, prompt: Prompt) -> TreeReplay:
    """Tests the acceptance rule on a recorded tree, and measures the rounding of its logits."""
    nodes = nodes_of(frozen)
    verified = frozen.logits[nodes]
    rounding = top_difference(verified, plain_logits(model, frozen, prompt).to(verified))
    return TreeReplay(len(nodes) - 1, DRAWS, acceptance_p_values(frozen), rounding)


def acceptance_p_values(frozen: FrozenRound) -> tuple[float, ...]:
    """Chi-square tests of the acceptance rule on a recorded tree, against the distribution of its verified logits.

    Returns:
        One p-value, of the last accepted node together with the bonus token; for a tree with `draft_probs` one per
        drafted node, of the token that follows the node's parent.
    """
    tree = frozen.tree
    nodes = nodes_of(frozen)
    index = {node: at for at, node in enumerate(nodes)}
    token_ids = tree.token_ids[0, nodes].tolist()
    parents = [index[int(tree.parents[0, node])] if node else -1 for node in nodes]
    verified = frozen.logits[nodes]

    # Only drafted tokens, and those that some node can sample, matter; all others share the last column.
    top = verified.topk(min(TOP_K, verified.shape[-1]), dim=-1).indices
    columns = torch.cat([top.flatten(), torch.tensor(token_ids, device=verified.device)]).unique()
    column_of = {int(token): at for at, token in enumerate(columns.tolist())}
    verified = torch.cat([verified[:, columns], verified.new_full((len(nodes), 1), -torch.inf)], dim=1)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE), TopKLogitsWarper(TOP_K)])
    probs = warpers(torch.zeros(1, 1), verified).cpu().double().softmax(-1).tolist()
    if tree.draft_probs is None:
        drafted = [column_of[token] for token in token_ids]
        return (p_value(_count_ends(drafted, parents, verified, warpers), _end_probs(drafted, parents, probs)),)
    draft_probs = tree.draft_probs[0][:, columns.to(tree.draft_probs.device)].to(verified.device)
    draft_probs = torch.cat([draft_probs, (1 - draft_probs.sum(-1, keepdim=True)).clamp(min=0)], dim=-1)
    return tuple(
        p_value(
            _count_tokens(draft_probs[node - 1], verified[index[node] - 1], warpers),
            dict(enumerate(probs[index[node] - 1])),
        )
        for node in nodes[1:]
    )


def nodes_of(frozen: FrozenRound) -> list[int]:
    """The valid nodes of the tree."""
    return frozen.tree.valid[0].nonzero().flatten().tolist()


def plain_logits(model: PreTrainedModel, frozen: FrozenRound, prompt: Prompt) -> Tensor:
    """[nodes, vocab] in the target's own dtype: after each node's path, by forwards without a tree and a cache.

    Each leaf is a row of the batch, which gives the logits of all nodes above it. Shorter rows are padded on the right.
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
    home = home_of(model.get_input_embeddings())
    parts = rows.to(home).split(8)  # limits the memory for logits of a large vocabulary
    logits = torch.cat([prompt.whole_logits(model, part)[:, start:] for part in parts])
    places = {node: (row, depth) for row, path in enumerate(leaves) for depth, node in enumerate(path)}
    return torch.stack([logits[places[node]] for node in paths])


def _count_ends(
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


def _end_probs(drafted: list[int], parents: list[int], probs: list[list[float]]) -> dict[tuple[int, int], float]:
    """Probability of ending at (node, bonus token): that of the path, times that of a token which is no child."""
    reached = [1.0]
    for node in range(1, len(drafted)):
        reached.append(reached[parents[node]] * probs[parents[node]][drafted[node]])
    children = {(parents[node], drafted[node]) for node in range(1, len(drafted))}
    return {
        (node, token): reached[node] * probability
        for node in range(len(drafted))
        for token, probability in enumerate(probs[node])
        if probability > 0 and reached[node] > 0 and (node, token) not in children
    }


def _count_tokens(draft_probs: Tensor, logits: Tensor, warpers: LogitsProcessorList) -> Counter[int]:
    """How often each token came next when the draft was drawn from `draft_probs`, both [vocab]."""
    drafts = torch.multinomial(draft_probs, DRAWS, replacement=True)
    tree = DraftTree.chain(
        torch.stack([torch.zeros_like(drafts), drafts], dim=1), draft_probs=draft_probs.expand(DRAWS, 1, -1).clone()
    )
    verdict = _accept(tree, logits.expand(DRAWS, 2, -1), warpers)
    return Counter(row[0] for row in verdict.read().tokens)


def _accept(tree: DraftTree, logits: Tensor, warpers: LogitsProcessorList) -> Verdict:
    """The acceptance rule of the loop."""
    rule = loop.Acceptor(warpers, do_sample=True, keep_scores=False)  # type: ignore[attr-defined]
    return rule(tree, logits, Sequences(tree.token_ids[:, :1], StoppingCriteriaList(), None, None))


def drawn_p_value(rounds: Sequence[FrozenRound]) -> float | None:
    """An upper bound of the p-value of the drafted tokens, under the distributions they come with.

    With s the sum of the drafted tokens' own probabilities, exp(t s) over its expectation has mean 1 for every t, and
    so has the mean over several t. By Markov's inequality it exceeds 1/p with a probability of at most p, for any
    number of drafts and any distributions. Positive t detect drafts that are too likely, negative ones too unlikely.

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
            probs = each.tree.draft_probs[0, node - 1].cpu().double()
            seen = probs[each.tree.token_ids[0, node]]
            log_ratios += slopes[:, 0] * seen - (probs.log() + slopes * probs).logsumexp(1)
    return min(1.0, math.exp(math.log(len(slopes)) - float(log_ratios.logsumexp(0)))) if drawn else None
