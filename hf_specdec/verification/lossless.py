"""verify_lossless: plain and assisted greedy runs compared, frozen trees of a sampled one replayed, and a verdict."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.chi_square import BOUND_SIGMA
from hf_specdec.drafters.base import Drafter, check_is_drafter
from hf_specdec.drafters.fingerprint import tokenizer_at_hand
from hf_specdec.verification.differences import Difference, first_difference
from hf_specdec.verification.replay import TEMPERATURE, TOP_K, FrozenRound, TreeReplay, drawn_sigma, listening, replay

MOST_TREES = 8  # to be frozen

PROMPTS = (
    "def quicksort(values):\n    ",
    "The history of the bridge begins in 1874, when",
    "Question: What is 17 + 25?\nAnswer:",
    "import json\n\nclass Config:\n    def __init__(self, path):\n        ",
)


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
        """Whether every frozen tree was walked by the law of its verified logits, and drawn drafts were drawn."""
        drawn = self.drawn_sigma is None or abs(self.drawn_sigma) <= BOUND_SIGMA
        return drawn and all(replay.sigma <= BOUND_SIGMA for replay in self.replays)

    @property
    def rounding(self) -> float:
        """How far rounding alone moves the logits of these trees; 0 where there are none."""
        return max((replay.rounding for replay in self.replays), default=0.0)

    @property
    def verified(self) -> bool:
        """Whether the logits of tree verification are those of plain forwards: both may have moved by `rounding`."""
        return all(replay.logit_error <= 2 * self.rounding for replay in self.replays)

    @property
    def lossless(self) -> bool:
        """The verdict."""
        return self.greedy and self.sampled and self.verified

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
            error = max(replay.logit_error for replay in self.replays)
            lines.append(
                f"  sampled  {len(self.replays)} frozen trees, {draws} walks: largest deviation from the law of the "
                f"verified logits {worst.sigma:.1f} sigma (bound {BOUND_SIGMA})"
            )
            lines.append(
                f"  logits   of tree and plain forwards differ by at most {error:.2g}; rounding moves them by "
                f"{self.rounding:.2g}: {'rounding' if self.verified else 'MORE than rounding'}"
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
    prompts: str | Sequence[str | Tensor] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 48,
    max_time_s: float = 60.0,
    seed: int = 0,
    verbose: bool = True,
) -> LosslessReport:
    """Checks that `drafter` leaves the output of `model` as it is, and prints a verdict.

    What rounding hides is not seen: in float32 errors of the logits are found that are smaller than bfloat16 rounds to.

    Args:
        model: the target.
        drafter: any drafter, with or without weights.
        prompts: a text, or a list of texts and of [1, seq] int64 token ids. None for four short texts, or for random
            ids where no tokenizer of the target is at hand.
        tokenizer: for texts; None for the one that lies where the target was loaded from.
        max_new_tokens: of each greedy run.
        max_time_s: begins nothing new after so many seconds; a step that runs is finished. Half of it is for greedy.
        seed: of the sampled part. The global random state is put back afterwards.
        verbose: prints the report.

    Raises:
        ValueError: the drafter does not fit the target; a text was given and there is no tokenizer; there is no prompt,
            or one is neither text nor ids.
        TypeError: `model` is no model, or `drafter` no drafter.

    Example:
        >>> from hf_specdec.drafters.ngram import NGramDrafter
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
    drafter.check_all_options()
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
    model: PreTrainedModel, prompts: str | Sequence[str | Tensor] | None, tokenizer: PreTrainedTokenizerBase | None
) -> list[Tensor]:
    """[1, seq] int64 of every prompt, on the target's device."""
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts, Mapping):  # such as what a tokenizer gives; its keys are texts
        raise ValueError(
            f"prompts is a {type(prompts).__name__}; it must be a list of texts or of ids of shape [1, seq], such as "
            "[it['input_ids']]."
        )
    if prompts is not None and not len(prompts):
        raise ValueError("prompts is empty, so there is nothing to compare: give a text, or None for four short ones.")
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
        if not isinstance(prompt, Tensor):
            raise ValueError(
                f"A prompt is a {type(prompt).__name__}, {prompt!r}; prompts must be texts or ids of shape [1, seq]."
            )
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


def _replay_sampled(
    report: LosslessReport, model: PreTrainedModel, drafter: Drafter, prompts: list[Tensor], until: float
) -> None:
    config = _settings(model, do_sample=True, temperature=TEMPERATURE, top_k=TOP_K, top_p=1.0, max_new_tokens=24)
    rounds: list[FrozenRound] = []
    for index, prompt in enumerate(prompts):
        if index and time.perf_counter() > until:
            break
        with listening(drafter, rounds, most=MOST_TREES * (index + 1) // len(prompts) or 1):
            _generate(model, prompt, config, drafter)
    report.drawn_sigma = drawn_sigma([each for each in rounds if each.tree.draft_probs is not None])
    for number, each in enumerate(rounds):
        if number and time.perf_counter() > until:
            break
        report.replays.append(replay(model, each))
