"""verify_lossless: compares greedy runs with and without a drafter, and tests recorded trees of sampled runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.chat_template import Thinking, render
from hf_specdec.decoding.relaxed import acceptance_rule
from hf_specdec.decoding.targets.modules import home_of, num_tokens
from hf_specdec.drafting.drafter import Drafter, WrappingDrafter, always_drafting, check_is_drafter
from hf_specdec.drafting.fingerprint import local_tokenizer
from hf_specdec.hub.card import Record
from hf_specdec.hub.publishing import PublishedDrafter
from hf_specdec.integration import observing
from hf_specdec.progress import Progress
from hf_specdec.verification.differences import Difference, first_difference
from hf_specdec.verification.precision import Precision, precision_of
from hf_specdec.verification.replay import (
    TEMPERATURE,
    TOP_K,
    FrozenRound,
    Prompt,
    RoundRecorder,
    TreeReplay,
    drawn_p_value,
    generate,
    replay,
    settings,
    verify_again,
)

MAX_TREES = 8  # to be recorded
FALSE_ALARM = 1e-6  # probability that some test of the draws of a lossless pair fails

PROMPTS = (
    "def quicksort(values):\n    ",
    "The history of the bridge begins in 1874, when",
    "Question: What is 17 + 25?\nAnswer:",
    "import json\n\nclass Config:\n    def __init__(self, path):\n        ",
)


@dataclass
class LosslessReport:
    """The comparisons and the verdict. `str()` gives the printed report, `bool()` the verdict.

    Attributes:
        target: the target's name.
        drafter: the drafter's name.
        num_prompts: prompts whose greedy continuations were compared.
        chat: whether texts were rendered with the chat template, because the drafter was trained in it.
        num_tokens: generated tokens in them.
        differences: index of a prompt -> first difference of its two greedy continuations.
        mean_acceptance_length: of the greedy runs; 1 means that no drafted token was accepted.
        replays: results of the recorded trees of sampled runs.
        drawn_p_value: of the drafted tokens, under the distributions they were drawn from, an upper bound
            (`replay.drawn_p_value`); None if no draft came with its distribution.
        dtype: the target's own.
        precision: in which logits were compared, and `differences` measured; None if no higher one works.
        same_bits: whether all greedy calls had the bits of plain decoding (option `same_bits`); then no difference is a
            near tie.
        own_difference: how much the target's own logits of a token differ between two plain forwards that contain other
            tokens besides, in a precision in which rounding cannot explain it; None if they do not.
        acceptance: the rule that is not lossless, if the drafter has one (`Drafter.acceptance`); "" otherwise.
        first_tokens_distance: with such a rule, total variation distance between the tokens of sampled calls with and
            without the drafter, the mean of the second to fifth token.
        distance_of_plain: the same between two sets of plain calls: what the number of samples alone explains.
        left_out: what was not checked, and why.
        seconds: spent.
    """

    target: str
    drafter: str
    num_prompts: int = 0
    chat: bool = False
    num_tokens: int = 0
    differences: dict[int, Difference] = field(default_factory=dict)
    mean_acceptance_length: float = 0.0
    replays: list[TreeReplay] = field(default_factory=list)
    drawn_p_value: float | None = None
    dtype: torch.dtype | None = None
    precision: torch.dtype | None = None
    same_bits: bool = False
    own_difference: float | None = None
    acceptance: str = ""
    first_tokens_distance: float = 0.0
    distance_of_plain: float = 0.0
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def greedy(self) -> bool:
        """Whether greedy output was the target's, except at near ties."""
        if self.same_bits or self.own_difference is not None:  # no token is a near tie, or every one
            return not self.differences
        return all(difference.is_near_tie for difference in self.differences.values())

    @property
    def p_values(self) -> list[float]:
        """Of all tests of sampling: those of each tree in `replays`, then `drawn_p_value`."""
        values = [value for replay in self.replays for value in replay.p_values]
        return values if self.drawn_p_value is None else [*values, self.drawn_p_value]

    @property
    def smallest_p_value(self) -> float:
        """The smallest of `p_values`; 1 without tests."""
        return min(self.p_values, default=1.0)

    @property
    def threshold(self) -> float:
        """Least p-value that passes: `FALSE_ALARM`, divided by the number of tests (Bonferroni)."""
        return FALSE_ALARM / max(1, len(self.p_values))

    @property
    def p_value(self) -> float:
        """The smallest p-value times the number of tests (Bonferroni), at most 1; to be compared with `FALSE_ALARM`."""
        return min(1.0, len(self.p_values) * self.smallest_p_value) if self.p_values else 1.0

    @property
    def sampled(self) -> bool:
        """Whether sampled tokens followed the verified logits, and drafted ones the distribution they came with."""
        return self.smallest_p_value >= self.threshold

    @property
    def verified(self) -> bool:
        """Whether the logits of the trees are those of plain forwards, for all trees that could be compared."""
        return all(replay.logit_error <= replay.bound for replay in self.replays if replay.logit_error is not None)

    @property
    def lossless(self) -> bool:
        """The verdict. No drafter is lossless for a target whose own logits depend on what else is in a forward.

        Nor is one with an acceptance rule that is not lossless, even if it changed nothing in this run.
        """
        return not self.acceptance and self.own_difference is None and self.greedy and self.sampled and self.verified

    @property
    def exact_match(self) -> float:
        """Share of the prompts whose greedy continuation is the target's, token for token."""
        return 1 - len(self.differences) / self.num_prompts if self.num_prompts else 1.0

    def __bool__(self) -> bool:
        return self.lossless

    def to_dict(self) -> dict[str, Any]:
        """The comparisons and the verdict as numbers, texts, lists and dictionaries, as for JSON."""
        verdict = ("lossless", "greedy", "sampled", "verified", "exact_match", "p_values", "threshold")
        return {name: getattr(self, name) for name in verdict} | {
            name: str(value) if isinstance(value, torch.dtype) else value for name, value in asdict(self).items()
        }

    def __str__(self) -> str:
        verdict = f"LOSSLESS{' as far as checked' if self.left_out else ''}" if self else "NOT LOSSLESS"
        if self.own_difference is not None:
            verdict = "CANNOT BE EXACT"
        lines = [f"{verdict}: {self.drafter} drafting for {self.target}"]
        if self.own_difference is not None:
            lines.append(
                "  target   its own logits of a token depend on what else is in the forward: two plain forwards of the "
                f"target differ by {self.own_difference:.2g}. So it is where activations are quantised with one scale "
                "for a tensor or a batch; there, no drafting can be exact, and plain decoding in batches is not either"
            )
        lines += [
            f"  greedy   {self.num_prompts} prompts{' in the chat template' if self.chat else ''}, {self.num_tokens} "
            f"tokens, mean acceptance length {self.mean_acceptance_length:.2f}: {self._greedy_verdict()}",
        ]
        for prompt, difference in self.differences.items():
            lines.append(
                f"    prompt {prompt}, token {difference.position}: {difference.assisted_token} instead of "
                f"{difference.plain_token}, {difference.gap:.2g} below the best logit (the second best "
                f"{difference.top2_gap:.2g}); rounding changes logits by {difference.rounding:.2g}: "
                f"{self._kind_of(difference)}"
            )
        if self.acceptance:
            lines += [
                f"  rule     acceptance={self.acceptance} accepts tokens that the target did not choose",
                f"  match    {self.exact_match:.0%} of the greedy continuations are the target's own",
                f"  distance of the first sampled tokens from the target's distribution (total variation): "
                f"{self.first_tokens_distance:.3f}; between two sets of plain samples: {self.distance_of_plain:.3f}",
            ]
        else:
            lines += self._sampling_lines()
        if self.replays:
            lines += self._logit_lines()
        lines += [f"  left out {part}" for part in self.left_out]
        lines.append(f"  {self.seconds:.0f} s")
        return "\n".join(lines)

    def _kind_of(self, difference: Difference) -> str:
        if self.own_difference is not None:
            return "not to be judged, as the target's own forwards differ"
        if self.same_bits:
            return "with the same bits, there are no near ties"
        return "a near tie" if difference.is_near_tie else "NOT a near tie"

    def _greedy_verdict(self) -> str:
        if not self.differences:
            return f"identical ({'the same bits' if self.same_bits else 'the same up to rounding'})"
        if self.greedy:
            return f"identical up to {len(self.differences)} near ties"
        return "DIFFERENT"

    def _sampling_lines(self) -> list[str]:
        """Each p-value, and the smallest with its threshold."""
        if not self.replays:
            return ["  sampled  no round drafted anything, so there is nothing to test"]
        tests = len(self.p_values)
        lines = [
            f"  sampled  {len(self.replays)} recorded trees, chi-square tests of {self.replays[0].num_draws} draws: "
            f"smallest p-value {self.smallest_p_value:.2g} of {tests} tests, threshold {self.threshold:.2g} = "
            f"{FALSE_ALARM:.0e} / {tests} (Bonferroni): {'pass' if self.sampled else 'FAIL'}"
        ]
        for index, each in enumerate(self.replays):
            values = " ".join(f"{value:.2g}" for value in each.p_values)
            lines.append(f"    tree {index}, {each.num_nodes} drafted nodes: p-value {values}")
        if self.drawn_p_value is not None:
            lines.append(f"    drafted tokens, under the drafter's distributions: p-value {self.drawn_p_value:.2g}")
        return lines

    def _logit_lines(self) -> list[str]:
        """Differences of the logits of tree and plain forwards, in high precision and in the target's own dtype."""
        own = max(each.rounding for each in self.replays)
        lines = [f"  rounding in {self.dtype}, logits of tree and plain forwards differ by at most {own:.2g}"]
        known = [(each.logit_error, each.bound) for each in self.replays if each.logit_error is not None]
        if known:
            error, bound = max(known, key=lambda pair: pair[0] / pair[1])
            verdict = "equal" if self.verified else "DIFFERENT"
            lines[:0] = [
                f"  logits   of both in {self.precision}: differ by at most {error:.2g} (bound {bound:.2g}): {verdict}"
            ]
        return lines


def verify_lossless(
    model: PreTrainedModel,
    drafter: Drafter,
    prompts: str | Sequence[str | Tensor | Mapping[str, Any]] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 48,
    max_time_s: float = 60.0,
    seed: int = 0,
    verbose: bool = True,
) -> LosslessReport:
    """Checks that `drafter` does not change the output of `model`, and prints a verdict.

    Logits of trees are compared with those of plain forwards on the same weights in float64 (float32 if the device or
    the target's kernels do not support float64); there, rounding is orders of magnitude smaller than the effect of any
    wrong mask or position. The report names what could not be checked.

    Args:
        model: the target.
        drafter: any drafter, with or without weights.
        prompts: a text, or a list of texts, which get the target's chat template if the drafter's training record says
            that it was trained in it, of [1, seq] int64 token ids, and of what a processor returns for one text
            with pictures or sound, with `input_ids` [1, seq]. None for four short texts, or for random ids if the
            target has no tokenizer.
        tokenizer: for texts; None for the one in the folder or repository that the target was loaded from.
        max_new_tokens: of each greedy run.
        max_time_s: half of it is for greedy runs. A step begins if it can end in time, judged by the longest one before
            it; the first text and the first tree are always checked.
        seed: of the sampled runs. The global random state is restored afterwards.
        verbose: prints the report, and shows progress on stderr.

    Raises:
        ValueError: the drafter does not fit the target; a prompt is a text and there is no tokenizer; there is no
            prompt; a prompt is neither text nor ids.
        TypeError: `model` is not a model, or `drafter` not a drafter.

    Examples:
        >>> from hf_specdec.methods.lookup import NGramDrafter
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 32}
        >>> target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **shape)).eval()
        >>> verify_lossless(target, NGramDrafter(), max_new_tokens=8, verbose=False).lossless
        True
    """
    began = time.perf_counter()
    check_is_drafter(drafter, "The target comes first, then the drafter.")
    given: Any = model  # a compiled or wrapped model is another module that generates
    if not (isinstance(given, nn.Module) and hasattr(given, "generate")):
        raise TypeError(f"model={given!r} is a {type(given).__name__}; it must be the loaded target model itself.")
    drafter.check_options()
    drafter.check_target(model)
    record = _chat_record(drafter)
    inputs = _prompts(model, prompts, tokenizer, record)
    report = LosslessReport(
        model.name_or_path or type(model).__name__,
        f"{getattr(drafter, 'name_or_path', '') or type(drafter).__name__} ({drafter.method})",
        chat=bool(record),
        dtype=model.dtype,
    )
    devices = [model.device] if model.device.type == "cuda" else []
    progress = Progress("verify", 2 * len(inputs) + 1, unit="steps", max_seconds=max_time_s, shown=verbose)
    with progress, torch.random.fork_rng(devices=devices), torch.no_grad(), always_drafting():
        precision, reason, report.own_difference = precision_of(model, _text_of(model, inputs[0]))
        progress.update()
        if precision is None:
            report.left_out.append(f"logits of tree forwards: {reason}")
        else:
            report.precision = precision.dtype
        if drafter.options.compile_mode != "none":
            report.left_out.append(
                f"logits of forwards with compile_mode={drafter.options.compile_mode!r}: they are compared without it"
            )
        _compare_greedy(
            report, model, drafter, _in_time(inputs, began + max_time_s / 2, progress), max_new_tokens, precision
        )
        torch.manual_seed(seed)
        if (rule := acceptance_rule(drafter.acceptance)) is not None:
            report.acceptance = repr(rule)
            _measure_distance(report, model, drafter, inputs[0])
            report.left_out.append("the acceptance rule and the logits of trees: they are checked of lossless rules")
        else:
            _test_sampled(report, model, drafter, inputs, precision, began + max_time_s, progress)
    report.seconds = time.perf_counter() - began
    if verbose:
        print(report)
    return report


def _in_time(prompts: Sequence[Prompt], until: float, progress: Progress) -> Iterator[tuple[int, Prompt]]:
    """The numbered prompts whose steps can end before `until`, judged by the longest so far; the first in any case."""
    longest = 0.0
    for index, prompt in enumerate(prompts):
        began = time.perf_counter()
        if index and began + longest > until:
            progress.total -= len(prompts) - index
            return
        yield index, prompt
        progress.update()
        longest = max(longest, time.perf_counter() - began)


def _chat_record(drafter: Drafter) -> Record | None:
    """The training record of a drafter, or of one of those that it drafts with, that was trained on chats."""
    sources = drafter.sources if isinstance(drafter, WrappingDrafter) else (drafter,)
    records = [source.training_record or {} for source in sources if isinstance(source, PublishedDrafter)]
    return next((record for record in records if record.get("chat_template")), None)


def _text_of(model: PreTrainedModel, prompt: Prompt) -> Tensor:
    """Ids [1, seq] of a text without pictures."""
    if not prompt.more:
        return prompt.ids
    count = min(24, num_tokens(model))
    return torch.arange(count, device=prompt.ids.device).unsqueeze(0)


def _prompts(
    model: PreTrainedModel,
    prompts: str | Sequence[str | Tensor | Mapping[str, Any]] | None,
    tokenizer: PreTrainedTokenizerBase | None,
    chat: Record | None,
) -> list[Prompt]:
    """Each prompt with ids of [1, seq] int64, on the target's device; texts as in this record of training on chats."""
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts, Mapping):  # such as the output of a tokenizer; its keys are texts
        raise ValueError(
            f"prompts is a {type(prompts).__name__}; it must be a list of texts or of ids of shape [1, seq], such as "
            "[it['input_ids']]."
        )
    if prompts is not None and not len(prompts):
        raise ValueError("prompts is empty, so there is nothing to compare: give a text, or None for four short ones.")
    tokenizer = tokenizer or local_tokenizer(model.name_or_path)
    vocab_size = num_tokens(model)
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
                    f"prompts has texts, but target {model.name_or_path!r} has no tokenizer: pass "
                    "tokenizer=, or prompts as [1, seq] token ids."
                )
            if chat is not None and tokenizer.chat_template:
                thinking: dict[bool | None, Thinking] = {None: "default", False: "off", True: "on"}
                messages = [{"role": "user", "content": prompt}]
                prompt = render(messages, tokenizer, thinking=thinking[chat.get("thinking")])
            prompt = tokenizer(prompt, return_tensors="pt", add_special_tokens=chat is None)["input_ids"]
        more: dict[str, Any] = {}
        if isinstance(prompt, Mapping) and "input_ids" in prompt:
            more = {name: value for name, value in prompt.items() if name not in ("input_ids", "attention_mask")}
            prompt = prompt["input_ids"]
        if not isinstance(prompt, Tensor):
            raise ValueError(
                f"A prompt is the {type(prompt).__name__} {prompt!r}; prompts must be texts or ids of shape [1, seq]."
            )
        if prompt.dim() != 2 or len(prompt) != 1 or not prompt.shape[1]:
            raise ValueError(
                f"A prompt has shape {list(prompt.shape)}; prompts must be texts or ids of shape [1, seq]."
            )
        home = home_of(model.get_input_embeddings())
        more = {name: value.to(home) if isinstance(value, Tensor) else value for name, value in more.items()}
        found.append(Prompt(prompt.to(home), more))
    return found


def _compare_greedy(
    report: LosslessReport,
    model: PreTrainedModel,
    drafter: Drafter,
    prompts: Iterable[tuple[int, Prompt]],
    max_new_tokens: int,
    precision: Precision | None,
) -> None:
    config = settings(model, do_sample=False, max_new_tokens=max_new_tokens)
    committed = rounds = 0
    report.same_bits = True
    for index, prompt in prompts:
        plain, assisted = (
            generate(model, prompt, config, each)[prompt.ids.shape[1] :].tolist() for each in (None, drafter)
        )
        assert drafter.stats is not None, "a call leaves its statistics"
        report.same_bits &= drafter.stats.same_bits
        committed += drafter.stats.num_accepted_draft_tokens + drafter.stats.num_spec_steps
        rounds += drafter.stats.num_spec_steps
        report.num_prompts += 1
        report.num_tokens += len(plain)
        if plain != assisted:
            report.differences[index] = first_difference(model, prompt, plain, assisted, precision or nullcontext)
    report.mean_acceptance_length = committed / rounds if rounds else 0.0


FIRST_TOKENS, SAMPLES = 5, 256  # of sampled calls, whose distance is measured


def _measure_distance(report: LosslessReport, model: PreTrainedModel, drafter: Drafter, prompt: Prompt) -> None:
    """Compares sampled tokens with and without the drafter; the first one is the target's own in any case."""
    config = settings(
        model, do_sample=True, temperature=TEMPERATURE, top_k=TOP_K, top_p=1.0, max_new_tokens=FIRST_TOKENS
    )  # fmt: skip
    rows = SAMPLES if not prompt.more else 1
    given = {"attention_mask": torch.ones_like(prompt.ids), **prompt.more}

    def sampled(assistant: Drafter | None) -> Tensor:
        parts = []
        for _ in range(SAMPLES // rows):
            text = model.generate(
                prompt.ids, generation_config=config, assistant_model=assistant, num_return_sequences=rows, **given
            )[:, prompt.ids.shape[1] :]
            parts.append(torch.nn.functional.pad(text, (0, FIRST_TOKENS - text.shape[1]), value=-1))
        return torch.cat(parts)[:, 1:]

    def distance(one: Tensor, other: Tensor) -> float:
        apart = 0.0
        for column in range(one.shape[1]):
            counts = [Counter(each[:, column].tolist()) for each in (one, other)]
            apart += sum(abs(counts[0][token] - counts[1][token]) for token in counts[0] | counts[1]) / 2
        return apart / one.numel()

    plain = sampled(None)
    report.first_tokens_distance = distance(sampled(drafter), plain)
    report.distance_of_plain = distance(sampled(None), plain)


def _test_sampled(
    report: LosslessReport,
    model: PreTrainedModel,
    drafter: Drafter,
    prompts: list[Prompt],
    precision: Precision | None,
    until: float,
    progress: Progress,
) -> None:
    config = settings(model, do_sample=True, temperature=TEMPERATURE, top_k=TOP_K, top_p=1.0, max_new_tokens=24)
    recorded: list[FrozenRound] = []
    for index, prompt in _in_time(prompts, until, progress):
        recorder = RoundRecorder(prompt.ids, limit=(MAX_TREES * (index + 1) // len(prompts) or 1) - len(recorded))
        with observing(recorder):
            text = generate(model, prompt, config, drafter)
        recorded += recorder.rounds
        if not recorder.rounds:
            continue
        found = verify_again(model, drafter, recorder.rounds, text, prompt, precision, until) if precision else {}
        for each in recorder.rounds:
            if report.replays and time.perf_counter() > until:
                break
            error, bound = found.get(len(each.prefix), (None, 0.0))
            report.replays.append(replace(replay(model, each, prompt), logit_error=error, bound=bound))
    report.drawn_p_value = drawn_p_value(recorded)
    missed = sum(replay.logit_error is None for replay in report.replays)
    if precision and missed:
        report.left_out.append(f"logits of {missed} recorded trees: the repeated call did not verify them")
