"""verify_lossless: a self-test that any user can run on any pair of target and drafter, in about a minute.

Greedy: the tokens of plain `generate`, prompt by prompt; where two runs part, how near the target's two best tokens
were, since a near tie may fall either way in the rounding of any library. Sampling: trees of a real call are frozen,
and the acceptance rule walks each of them again and again; what comes out must follow the law that the target alone has
on these paths, computed by plain forwards without tree, cache or mask of ours. Drafts that are said to have been drawn
from a law are checked to look drawn from it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper

from hf_specdec.chi_square import BOUND_SIGMA, deviation_sigma
from hf_specdec.decoding import loop
from hf_specdec.decoding.candidates import DraftContext, RoundOutcome
from hf_specdec.decoding.sequences import Sequences
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.fingerprint import tokenizer_at_hand

TEMPERATURE, TOP_K = 1.0, 16  # of the sampled part; top-k keeps the laws short enough to be counted
DRAWS, MOST_TREES = 2000, 8  # walks of each frozen tree, and trees

PROMPTS = (
    "def quicksort(values):\n    ",
    "The history of the bridge begins in 1874, when",
    "Question: What is 17 + 25?\nAnswer:",
    "import json\n\nclass Config:\n    def __init__(self, path):\n        ",
)


@dataclass(frozen=True)
class Difference:
    """Where an assisted greedy run left the plain one.

    Attributes:
        position: generated tokens before it, equal in both runs.
        plain_token: id that plain `generate` chose.
        assisted_token: id that came with the drafter.
        gap: the target's logit of its best token minus that of `assisted_token`, by a forward over the whole prefix.
        rounding: how far logits of this target move by rounding alone, there: one `ulp`, or more where two plain
            forwards of the target (over the whole prefix; over its last token, after a cache of the others) give logits
            that differ by more.
        top2_gap: between the target's two best logits there.
        ulp: unit in the last place, in the target's dtype, of its largest logit there.
    """

    position: int
    plain_token: int
    assisted_token: int
    gap: float
    rounding: float
    top2_gap: float = math.inf
    ulp: float = 1.0

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains it: both logits may have moved, each by `rounding`."""
        return abs(self.gap) <= 2 * self.rounding


@dataclass(frozen=True)
class TreeReplay:
    """One frozen tree.

    Attributes:
        num_nodes: drafted nodes.
        num_draws: walks.
        sigma: deviation of the walks from the target's law, in standard deviations.
        logprob_error: largest difference of a log-probability between tree verification and plain forward, over the
            tokens that can be sampled.
    """

    num_nodes: int
    num_draws: int
    sigma: float
    logprob_error: float


@dataclass
class LosslessReport:
    """What was compared, and the verdict; `str()` is the printed report, `bool()` the verdict.

    Attributes:
        target: the target's name.
        drafter: the drafter's name.
        num_prompts: prompts whose greedy continuations were compared.
        num_tokens: generated tokens in them.
        differences: per prompt where the runs parted, its index and what was found.
        mean_acceptance_length: of the greedy runs; 1 means that no draft was ever kept.
        replays: frozen trees.
        drawn_sigma: for drafts that come with the law they were drawn from: deviation of the drafts from it; None
            where there were none.
        seconds: spent.
    """

    target: str
    drafter: str
    num_prompts: int = 0
    num_tokens: int = 0
    differences: dict[int, Difference] = field(default_factory=dict)
    mean_acceptance_length: float = 0.0
    replays: list[TreeReplay] = field(default_factory=list)
    drawn_sigma: float | None = None
    seconds: float = 0.0

    @property
    def greedy(self) -> bool:
        """Whether greedy output was the target's, near ties aside."""
        return all(difference.is_near_tie for difference in self.differences.values())

    @property
    def sampled(self) -> bool:
        """Whether every frozen tree was walked by the target's law, and drawn drafts were drawn."""
        drawn = self.drawn_sigma is None or abs(self.drawn_sigma) <= BOUND_SIGMA
        return drawn and all(replay.sigma <= BOUND_SIGMA for replay in self.replays)

    @property
    def lossless(self) -> bool:
        """The verdict."""
        return self.greedy and self.sampled

    def __bool__(self) -> bool:
        return self.lossless

    def __str__(self) -> str:
        lines = [
            f"{'LOSSLESS' if self else 'NOT LOSSLESS'}: {self.drafter} drafting for {self.target}",
            f"  greedy   {self.num_prompts} prompts, {self.num_tokens} tokens, mean acceptance length "
            f"{self.mean_acceptance_length:.2f}: {self._greedy_words()}",
        ]
        for prompt, difference in self.differences.items():
            lines.append(
                f"    prompt {prompt}, token {difference.position}: {difference.assisted_token} in place of "
                f"{difference.plain_token}, {difference.gap:.2g} below the best logit (the second best "
                f"{difference.top2_gap:.2g}); rounding moves logits by {difference.rounding:.2g}: "
                f"{'a near tie' if difference.is_near_tie else 'NOT a near tie'}"
            )
        if self.replays:
            worst = max(self.replays, key=lambda replay: replay.sigma)
            draws = sum(replay.num_draws for replay in self.replays)
            lines.append(
                f"  sampled  {len(self.replays)} frozen trees, {draws} walks: largest deviation from the target's law "
                f"{worst.sigma:.1f} sigma (bound {BOUND_SIGMA}); log-probabilities of tree and plain forwards differ "
                f"by at most {max(replay.logprob_error for replay in self.replays):.2g}"
            )
        else:
            lines.append("  sampled  no round drafted anything, so there was nothing to accept wrongly")
        if self.drawn_sigma is not None:
            lines.append(f"  drafts   {self.drawn_sigma:+.1f} sigma from the law they are said to be drawn from")
        lines.append(f"  {self.seconds:.0f} s")
        return "\n".join(lines)

    def _greedy_words(self) -> str:
        if not self.differences:
            return "identical"
        if self.greedy:
            return f"identical up to {len(self.differences)} near ties"
        return "DIFFERENT"


def verify_lossless(
    model: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[str | Tensor] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 48,
    max_time_s: float = 60.0,
    seed: int = 0,
    verbose: bool = True,
) -> LosslessReport:
    """Checks that `drafter` leaves the output of `model` as it is, and prints a verdict.

    Args:
        model: the target.
        drafter: any drafter, with or without weights.
        prompts: texts, or [1, seq] int64 token ids. None for four short texts, or for random ids where no tokenizer of
            the target is at hand.
        tokenizer: for texts; None for the one that lies where the target was loaded from.
        max_new_tokens: of each greedy run.
        max_time_s: begins nothing new after so many seconds; a step that runs is finished. Half of it is for greedy.
        seed: of the sampled part. The global random state is put back afterwards.
        verbose: prints the report.

    Raises:
        ValueError: the drafter does not fit the target; a text was given and there is no tokenizer.

    Example:
        >>> from hf_specdec.drafters.ngram import NGramDrafter
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 32}
        >>> target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **shape)).eval()
        >>> verify_lossless(target, NGramDrafter(), max_new_tokens=8, verbose=False).lossless
        True
    """
    began = time.perf_counter()
    drafter.check_options()
    drafter.check_target(model)
    inputs = _prompt_ids(model, prompts, tokenizer)
    report = LosslessReport(
        model.name_or_path or type(model).__name__,
        f"{getattr(drafter, 'name_or_path', '') or type(drafter).__name__} ({drafter.method})",
    )
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        _compare_greedy(report, model, drafter, inputs, max_new_tokens, began + max_time_s / 2)
        torch.manual_seed(seed)
        _replay_sampled(report, model, drafter, inputs, began + max_time_s)
    report.seconds = time.perf_counter() - began
    if verbose:
        print(report)
    return report


def _prompt_ids(
    model: PreTrainedModel, prompts: Sequence[str | Tensor] | None, tokenizer: PreTrainedTokenizerBase | None
) -> list[Tensor]:
    """[1, seq] int64 of every prompt, on the target's device."""
    tokenizer = tokenizer or tokenizer_at_hand(model.name_or_path)
    vocab_size = model.get_input_embeddings().num_embeddings
    if prompts is None and tokenizer is not None:
        prompts = PROMPTS
    elif prompts is None:
        generator = torch.Generator().manual_seed(0)
        prompts = [torch.randint(vocab_size, (1, 24), generator=generator) for _ in PROMPTS]
    found = []
    for prompt in prompts:
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ValueError(
                    f"prompts has texts, but no tokenizer of target {model.name_or_path!r} is at hand: pass "
                    "tokenizer=, or prompts as [1, seq] token ids."
                )
            prompt = tokenizer(prompt, return_tensors="pt")["input_ids"]
        if prompt.dim() != 2 or len(prompt) != 1 or not prompt.shape[1]:
            raise ValueError(
                f"A prompt has shape {list(prompt.shape)}; prompts must be texts or ids of shape [1, seq]."
            )
        found.append(prompt.to(model.device))
    return found


def _settings(model: PreTrainedModel, **settings: Any) -> GenerationConfig:
    """Settings with the target's special tokens."""
    own = model.generation_config
    ids = {name: getattr(own, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if ids["pad_token_id"] is None:
        ends = ids["eos_token_id"]
        ids["pad_token_id"] = ends[0] if isinstance(ends, list) else (0 if ends is None else ends)
    return GenerationConfig(**ids, **settings)


def _generate(model: PreTrainedModel, prompt: Tensor, config: GenerationConfig, drafter: Drafter | None) -> list[int]:
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        generation_config=config,
        assistant_model=drafter,
    )
    return output[0, prompt.shape[1] :].tolist()


# Greedy.


def _compare_greedy(
    report: LosslessReport,
    model: PreTrainedModel,
    drafter: Drafter,
    prompts: list[Tensor],
    max_new_tokens: int,
    until: float,
) -> None:
    config = _settings(model, do_sample=False, max_new_tokens=max_new_tokens)
    committed = rounds = 0
    for index, prompt in enumerate(prompts):
        if index and time.perf_counter() > until:
            break
        plain, assisted = (_generate(model, prompt, config, each) for each in (None, drafter))
        assert drafter.stats is not None, "a call leaves its statistics"
        committed += drafter.stats.num_accepted_draft_tokens + drafter.stats.num_spec_steps
        rounds += drafter.stats.num_spec_steps
        report.num_prompts += 1
        report.num_tokens += len(plain)
        if plain != assisted:
            report.differences[index] = first_difference(model, prompt, plain, assisted)
    report.mean_acceptance_length = committed / rounds if rounds else 0.0


def first_difference(model: PreTrainedModel, prompt: Tensor, plain: list[int], assisted: list[int]) -> Difference:
    """Where two continuations part, and how the target sees it.

    Args:
        model: the target.
        prompt: [1, seq] int64.
        plain: tokens of plain decoding.
        assisted: other ones.
    """
    pairs = zip(plain, assisted, strict=False)
    position = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(plain), len(assisted)))
    if position == min(len(plain), len(assisted)):  # one ends where the other goes on: no choice of tokens explains it
        ends = -1
        tokens = [row[position] if position < len(row) else ends for row in (plain, assisted)]
        return Difference(position, tokens[0], tokens[1], math.inf, 0.0)
    prefix = torch.cat([prompt, torch.tensor([plain[:position]], dtype=torch.int64, device=prompt.device)], dim=1)
    logits = _last_logits(model, prefix)[0]
    # The same logits on another way: the last token alone, after a cache of the others.
    cached = model(prefix[:, :-1], use_cache=True) if prefix.shape[1] > 1 else None
    rounding = ulp = unit_in_the_last_place(float(logits.abs().max()), model.dtype)
    if cached is not None:
        step = model(prefix[:, -1:], past_key_values=cached.past_key_values, use_cache=True).logits[0, -1].float()
        rounding = max(rounding, float((step - logits).abs().max()))
    gap = float(logits.max() - logits[assisted[position]])
    best, second = logits.topk(2).values.tolist()
    return Difference(position, plain[position], assisted[position], gap, rounding, best - second, ulp)


def unit_in_the_last_place(value: float, dtype: torch.dtype) -> float:
    """From `value` to the next larger number of a floating `dtype`; NaN where it is not finite.

    Example:
        >>> unit_in_the_last_place(20.0, torch.bfloat16)
        0.125
    """
    if not math.isfinite(value):
        return math.nan
    known = torch.finfo(dtype)
    return known.eps * 2.0 ** math.floor(math.log2(max(abs(value), known.smallest_normal)))


def _last_logits(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """[rows, vocab] float32: what the target alone says after each row of [rows, seq] ids."""
    return model(token_ids, use_cache=False).logits[:, -1].float()


# Sampling.


@dataclass
class _Round:
    """A frozen tree: what was drafted after which tokens, and what the tree's verification said of it."""

    prefix: Tensor  # [length] int64, root included
    tree: DraftTree
    logits: Tensor  # [nodes, vocab] float32


@contextlib.contextmanager
def _listening(drafter: Drafter, rounds: list[_Round], most: int) -> Iterator[None]:
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
                rounds.append(_Round(prefixes[-1], tree, outcome.target_logits[0].clone()))
            observe(outcome)

        generator.draft, generator.observe = keeping, noting
        return generator

    drafter.candidate_generator = listening  # type: ignore[method-assign]
    try:
        yield
    finally:
        del drafter.candidate_generator


def _replay_sampled(
    report: LosslessReport, model: PreTrainedModel, drafter: Drafter, prompts: list[Tensor], until: float
) -> None:
    config = _settings(model, do_sample=True, temperature=TEMPERATURE, top_k=TOP_K, top_p=1.0, max_new_tokens=24)
    rounds: list[_Round] = []
    for index, prompt in enumerate(prompts):
        if index and time.perf_counter() > until:
            break
        with _listening(drafter, rounds, most=MOST_TREES * (index + 1) // len(prompts) or 1):
            _generate(model, prompt, config, drafter)
    report.drawn_sigma = _drawn_sigma([each for each in rounds if each.tree.draft_probs is not None])
    for number, each in enumerate(rounds):
        if number and time.perf_counter() > until:
            break
        report.replays.append(_replay(model, each))


def _replay(model: PreTrainedModel, frozen: _Round) -> TreeReplay:
    """Walks one frozen tree many times."""
    tree = frozen.tree
    nodes = [node for node in range(tree.num_nodes) if bool(tree.valid[0, node])]
    place = {node: index for index, node in enumerate(nodes)}
    token_ids = [int(tree.token_ids[0, node]) for node in nodes]
    parents = [place[int(tree.parents[0, node])] if node else -1 for node in nodes]
    plain = _plain_logits(model, frozen.prefix, token_ids, parents)
    verified = frozen.logits[nodes].to(plain.device)

    # Only tokens that can be sampled somewhere, or were drafted, matter; the others share the last place.
    top = torch.cat([plain, verified]).topk(min(TOP_K, plain.shape[-1]), dim=-1).indices
    kept = torch.cat([top.flatten(), torch.tensor(token_ids, device=top.device)]).unique()
    names = {int(token): index for index, token in enumerate(kept.tolist())}
    nothing = plain.new_full((len(nodes), 1), -torch.inf)
    plain, verified = (torch.cat([logits[:, kept], nothing], dim=1) for logits in (plain, verified))
    warpers = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE), TopKLogitsWarper(TOP_K)])
    laws = [warpers(torch.zeros(1, 1), logits).double().softmax(-1) for logits in (plain, verified)]
    both = (laws[0] > 0) & (laws[1] > 0)
    error = float((laws[0].log() - laws[1].log()).where(both, 0.0).abs().max())

    drafted = [names[token] for token in token_ids]
    if tree.draft_probs is None:
        counts, law = _walks(drafted, parents, verified, warpers), _law(drafted, parents, laws[0].tolist())
        sigma = deviation_sigma(counts, law)
    else:
        probs = tree.draft_probs[0][:, kept.to(tree.draft_probs.device)].to(verified.device)
        probs = torch.cat([probs, (1 - probs.sum(-1, keepdim=True)).clamp(min=0)], dim=-1)
        sigma = max(
            deviation_sigma(
                _steps(probs[node - 1], verified[place[node] - 1], warpers),
                dict(enumerate(laws[0][place[node] - 1].tolist())),
            )
            for node in nodes[1:]
        )
    return TreeReplay(len(nodes) - 1, DRAWS, sigma, error)


def _plain_logits(model: PreTrainedModel, prefix: Tensor, token_ids: list[int], parents: list[int]) -> Tensor:
    """[nodes, vocab] float32: the target's logits after each node's own path, by forwards that know no tree."""
    paths: list[list[int]] = [[]]
    for node in range(1, len(token_ids)):
        paths.append([*paths[parents[node]], token_ids[node]])
    found: dict[int, Tensor] = {}
    for depth in sorted({len(path) for path in paths}):
        level = [node for node, path in enumerate(paths) if len(path) == depth]
        tails = torch.tensor([paths[node] for node in level], dtype=torch.int64, device=prefix.device)
        rows = torch.cat([prefix.expand(len(level), -1), tails.view(len(level), depth)], dim=1)
        found |= dict(zip(level, _last_logits(model, rows.to(model.device)), strict=True))
    return torch.stack([found[node] for node in range(len(token_ids))])


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
    """Probability of ending at (node, bonus token): the target's law along the path, and off it at the end."""
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


def _drawn_sigma(rounds: list[_Round]) -> float | None:
    """How far drafted tokens lie from the laws they are said to be drawn from; positive where they are too likely.

    The mean of the drafted tokens' own probabilities against its expectation, in standard deviations.
    """
    seen, expected, variance = 0.0, 0.0, 0.0
    for each in rounds:
        assert each.tree.draft_probs is not None
        for node in range(1, each.tree.num_nodes):
            if bool(each.tree.valid[0, node]):
                law = each.tree.draft_probs[0, node - 1].double()
                mean = float((law * law).sum())
                seen += float(law[each.tree.token_ids[0, node]])
                expected += mean
                variance += float((law * law * law).sum()) - mean**2
    if not rounds:
        return None
    return (seen - expected) / math.sqrt(variance) if variance > 1e-12 else 0.0
