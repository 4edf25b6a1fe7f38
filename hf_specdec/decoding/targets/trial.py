"""A trial of a target, once per model: compares draft trees, and chains, with transformers' own plain decoding.

How a family counts positions, stores states and masks attention is derived from its modules, not from its name. For
targets with more than standard attention, a trial checks the result before the first token. The reference is a run of
transformers' decoding on forced tokens, with the arguments that transformers passes, not those that rounds would pass.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation import MaxLengthCriteria

from hf_specdec.decoding import upstream
from hf_specdec.decoding.exchange import DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.loop import SpeculativeDecoding
from hf_specdec.decoding.once import REFUSED_RUN, once_per_model, products_of, undisturbed
from hf_specdec.decoding.policies import DraftingPolicy
from hf_specdec.decoding.records import TokenRecords
from hf_specdec.decoding.speed import same_bits
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets import hooks, standins
from hf_specdec.decoding.targets.entries import EntriesLayer
from hf_specdec.decoding.targets.kinds import KINDS
from hf_specdec.decoding.targets.modules import home_of, num_tokens
from hf_specdec.decoding.targets.replay import replaying
from hf_specdec.decoding.targets.stepped import STEPPED
from hf_specdec.decoding.targets.support import TreesRefusedError, bound_rows, can_be_cut_back, keeps_states
from hf_specdec.decoding.tree import DraftTree

PROMPT = 5  # tokens
PADDING = 2  # of them, in trials with left padding
FIRST = 16  # tokens of a call that are compared with an untested transformers
PARENTS = (-1, 0, 0, 1, 1, 2, 4)
PATHS = ((0, 1, 3), (0, 2, 5), (0, 1, 4, 6))  # from the root to every leaf
# The largest difference of logits that rounding can explain, as a share of the largest logit. States are always
# computed in float32. In low precision single nodes may differ by more if rounding changes which experts run.
EXACT_SHARE, LOW_SHARE = 1e-3, 0.25
# With functions of others in the forwards: what steering adds to the logits may be less than what a wrong layer does.
HOOKED_SHARE = 0.05


def check_trees(model: PreTrainedModel, *, padded: bool = False) -> None:
    """Raises TreesRefusedError if the logits of a tree's nodes differ from those of plain decoding.

    Args:
        model: the target.
        padded: whether prompts have left padding, for which some families have code of their own.
    """
    trouble = _why_no_trees(model)
    if trouble is None and padded and not upstream.looks_attention_up(model):
        trouble = _why_no_trees(model, PADDING)
    if trouble is not None:
        raise TreesRefusedError(trouble)


def check_hooks(model: PreTrainedModel, rows: int) -> bool:
    """Whether others have put functions into the forwards of a target that see the rows of a batch (`hooks.py`).

    Args:
        model: the target.
        rows: of the batch.

    Raises:
        TreesRefusedError: with them, the logits of a tree's nodes differ from those of plain decoding.
    """
    functions = hooks.foreign_functions(model)
    if not functions:
        return False
    steady = hooks.are_steady(functions)
    trouble = _afresh_unless(steady, _why_no_hooks)(model, rows, *hooks.names_of(model, functions))
    if trouble is not None:
        raise TreesRefusedError(trouble)
    return not steady


def _afresh_unless(steady: bool, find: Any) -> Any:
    """A trial of `once_per_model`, or one for every call: a function of the user may do something else in each."""
    return find if steady else find.__wrapped__


@once_per_model
def _why_no_hooks(model: PreTrainedModel, rows: int, *names: str) -> str | None:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    try:
        with undisturbed(model):
            found, plain = _tree(model, 0, rows=rows)[list(PATHS[0])], _plain_path(model, PATHS[0], 0, rows)
    except REFUSED_RUN as error:
        return f"With {shown}, target {type(model).__name__} could not be run on a draft tree in a trial: {error}"
    apart = _apart(model, found, plain, HOOKED_SHARE)
    if apart is None:
        return None
    return (
        f"With {shown}, the nodes of a draft tree get other logits from target {type(model).__name__} than in plain "
        f"decoding (a trial found {apart:.3g}, of up to {plain.abs().max():.3g}): not all positions are treated alike. "
        "To draft, remove it"
    )


def why_no_chains(model: PreTrainedModel, *, padded: bool = False) -> str | None:
    """Why transformers' own loop cannot verify chains on a target, determined by running one; None if it can."""
    compare = _afresh_unless(hooks.are_steady(hooks.foreign_functions(model)), _why_no_chains)
    return compare(model) or (compare(model, PADDING) if padded else None)


def why_not_same_bits(model: PreTrainedModel, rows: int, *, padded: bool = False) -> str | None:
    """Why trees cannot be verified with the bits of plain decoding, determined by running one; None if they can.

    Args:
        model: the target, whose trees are those of plain decoding within rounding (`check_trees`).
        rows: of the batch.
        padded: whether prompts have left padding.
    """
    trouble = same_bits.why_not(model) or _why_other_bits(model)
    if trouble is None and padded:
        trouble = _why_other_bits(model, PADDING)
    if trouble is None and same_bits.most_rows(model) < 2 * rows:
        return f"with this target and processor, at most {same_bits.most_rows(model)} rows and nodes get them at once"
    return trouble


@functools.partial(once_per_model, state=products_of)
def _why_other_bits(model: PreTrainedModel, padding: int = 0) -> str | None:
    with undisturbed(model):
        if torch.equal(_tree(model, padding, same_bits=True), _plain_tree(model, padding)):
            return None
    return f"in a trial, nodes of a tree got other bits from target {type(model).__name__} than plain decoding"


def _needs_trial(model: PreTrainedModel) -> bool:
    kinds = {KINDS[type(layer)] for layer in upstream.cache_layers(model)}
    if kinds - {EntriesLayer} or standins.counts_entries(model) or not upstream.looks_attention_up(model):
        return True
    return upstream.takes_positions(model) and upstream.position_axes(model) != 1


def _hooks_of(model: PreTrainedModel) -> tuple[str, ...]:
    return tuple(hooks.names_of(model, functions)) if (functions := hooks.foreign_functions(model)) else ()


@functools.partial(once_per_model, state=_hooks_of)
def _why_no_trees(model: PreTrainedModel, padding: int = 0) -> str | None:
    """Why trees do not work; None if they do, possibly with layers that step from node to node."""
    trouble = _compare_trees(model, padding) if padding or _needs_trial(model) else None
    if trouble is None or padding or not keeps_states(model) or model in STEPPED:
        return trouble
    STEPPED.add(model)
    if _compare_trees(model) is None:
        return None
    STEPPED.discard(model)
    return trouble


def _compare_trees(model: PreTrainedModel, padding: int = 0) -> str | None:
    name = type(model).__name__
    try:
        with undisturbed(model):
            found, plain = _tree(model, padding), _plain_tree(model, padding)
    except REFUSED_RUN as error:
        return f"In a trial, the layers of target {name} could not be run on a draft tree: {error}"
    apart = _apart(model, found, plain)
    if apart is None:
        return None
    layers = sorted({type(module).__name__ for module in model.modules() if hasattr(module, "layer_idx")})
    return (
        f"In a trial{' with left padding' if padding else ''}, a draft tree got logits from target {name} that differ "
        f"by {apart:.3g} from those of plain decoding (up to {plain.abs().max():.3g}), so one of its layers "
        f"({', '.join(layers)}) is not supported"
    )


@functools.partial(once_per_model, state=_hooks_of)
def _why_no_chains(model: PreTrainedModel, padding: int = 0) -> str | None:
    try:
        with undisturbed(model):
            tokens = _tokens(model)[1]
            found, plain = _forced(model, tokens, padding, drafted=True), _forced(model, tokens, padding)
    except REFUSED_RUN as error:
        return f"in a trial, several tokens in one forward after cached ones failed: {error}"
    apart = _apart(model, found, plain, HOOKED_SHARE if _hooks_of(model) else LOW_SHARE)
    if apart is None:
        return None
    return f"in a trial, several tokens in one forward after cached ones got logits that differ by {apart:.3g}"


def _apart(model: PreTrainedModel, found: Tensor, plain: Tensor, low_share: float = LOW_SHARE) -> float | None:
    """The largest difference of logits [nodes, rows, vocab]; None if rounding explains it."""
    exact = model.dtype in (torch.float32, torch.float64)
    apart = (found - plain).abs().where(found != plain, 0.0).amax((1, 2))  # of two that are infinite, 0
    wrong = ~(apart <= (EXACT_SHARE if exact else low_share) * plain[plain.isfinite()].abs().max())
    return float(apart.max()) if (bool(wrong.any()) if exact else 2 * int(wrong.sum()) > len(wrong)) else None


def _tokens(model: PreTrainedModel, padding: int = 0, rows: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """A prompt [rows, PROMPT], drafts [nodes], and the mask of the prompt, 0 at `padding` tokens."""
    ids = 3 + torch.arange(PROMPT + len(PARENTS), device=home_of(model.get_input_embeddings()))
    ids = ids % num_tokens(model)
    prompt = ids[:PROMPT].expand(bound_rows(model) or rows, -1)
    mask = torch.ones_like(prompt)
    mask[:, :padding] = 0
    return prompt, ids[PROMPT:], mask


@torch.no_grad()
def _tree(model: PreTrainedModel, padding: int, *, same_bits: bool = False, rows: int = 1) -> Tensor:
    """Logits [nodes, rows, vocab] of the nodes of a tree."""
    target, (prompt, drafts, mask) = TargetModel(model, same_bits=same_bits), _tokens(model, padding, rows)
    tree = DraftTree.from_lists([drafts.tolist()] * len(prompt), [list(PARENTS)] * len(prompt), device=drafts.device)
    length = PROMPT + len(PARENTS)
    with target.tapping():
        arguments = upstream.arguments_of_prompt(model, prompt, mask)
        del arguments[target.cache_name]
        target.prefill(prompt, GenerationConfig(max_length=length), arguments)
        target.begin_rounds(length)
        return target.verify(tree, target.root_positions()).logits.transpose(0, 1)


def _plain_tree(model: PreTrainedModel, padding: int) -> Tensor:
    """The logits of the same nodes by plain decoding, path by path."""
    logits: dict[int, Tensor] = {}
    for path in PATHS:
        logits |= dict(zip(path, _plain_path(model, path, padding), strict=True))
    return torch.stack([logits[node] for node in range(len(PARENTS))])


def _plain_path(model: PreTrainedModel, path: tuple[int, ...], padding: int, rows: int = 1) -> Tensor:
    return _forced(model, _tokens(model)[1][list(path)], padding, rows=rows)


@torch.no_grad()
def _forced(model: PreTrainedModel, tokens: Tensor, padding: int, *, drafted: bool = False, rows: int = 1) -> Tensor:
    """Logits [tokens, rows, vocab] of transformers after each token of a continuation.

    Args:
        model: the target.
        tokens: [tokens] int64, to follow the prompt.
        padding: of the prompt.
        drafted: in transformers' assisted loop, which verifies several tokens at once, beside wrong ones. Else plainly.
        rows: of the batch.
    """
    prompt, _, mask = _tokens(model, padding, rows)
    arguments = upstream.arguments_of_prompt(model, prompt, mask)
    length = PROMPT + len(tokens) + 1
    settings: dict[str, Any] = {
        "logits_processor": LogitsProcessorList([_Forced(tokens)]),
        "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(length)]),
        "generation_config": upstream.config_of_trial(length),
    }
    cache = arguments[upstream.cache_name(model)]
    if not drafted:
        output = upstream.sample(model, prompt, **settings, **arguments)
    else:
        with nullcontext() if can_be_cut_back(model) else replaying(model, cache):
            output = upstream.assist(model, prompt, _Script(tokens.unsqueeze(0), PROMPT), **settings, **arguments)
    return torch.stack(output.logits[1:])


def why_unlike_plain_trees(
    model: PreTrainedModel, input_ids: Tensor, arguments: dict[str, Any], max_length: int
) -> str | None:
    """Why the first tokens of a call differ if trees are verified, right and wrong in turn; None if they do not.

    Args:
        model: the target.
        input_ids: [batch, seq] int64, the call's prompts.
        arguments: of the call, for the model; its caches are copied.
        max_length: of the call.
    """

    def decode(script: _Script, settings: dict[str, Any], given: dict[str, Any]) -> Tensor:
        config = settings["generation_config"]
        records = TokenRecords(config, len(input_ids), given.get(upstream.cache_name(model)))
        stats = SpeculationStats(method="trial")
        target, policy = TargetModel(model), DraftingPolicy()
        loop = SpeculativeDecoding(
            target,
            lambda _: script,
            input_ids,
            model_kwargs=given,
            stats=stats,
            records=records,
            policy=policy,
            **settings,
        )
        return loop.run().sequences  # type: ignore[union-attr]

    return _why_unlike_plain(model, input_ids, arguments, max_length, decode)


def why_unlike_plain_chains(
    model: PreTrainedModel, input_ids: Tensor, arguments: dict[str, Any], max_length: int
) -> str | None:
    """The same for chains in transformers' assisted loop, of a batch of one."""

    def decode(script: _Script, settings: dict[str, Any], given: dict[str, Any]) -> Tensor:
        cache = given[upstream.cache_name(model)]
        with nullcontext() if can_be_cut_back(model) else replaying(model, cache):
            tokens: Tensor = upstream.assist(model, input_ids, script, **settings, **given).sequences
        return tokens

    return _why_unlike_plain(model, input_ids, arguments, max_length, decode)


@torch.no_grad()
def _why_unlike_plain(
    model: PreTrainedModel,
    input_ids: Tensor,
    arguments: dict[str, Any],
    max_length: int,
    decode: Callable[[_Script, dict[str, Any], dict[str, Any]], Tensor],
) -> str | None:
    length = min(max_length, input_ids.shape[1] + FIRST)

    def settings() -> dict[str, Any]:
        return {
            "logits_processor": LogitsProcessorList(),
            "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(length)]),
            "generation_config": upstream.config_of_trial(length),
        }

    def given() -> dict[str, Any]:
        return {name: copy.deepcopy(value) if isinstance(value, Cache) else value for name, value in arguments.items()}

    with undisturbed(model):
        plain: Tensor = upstream.sample(model, input_ids, **settings(), **given()).sequences
        script = _Script(plain[:, input_ids.shape[1] :], input_ids.shape[1])
        try:
            found = decode(script, settings(), given())
        except REFUSED_RUN as error:
            return f"the first tokens of this call could not be drafted for: {error}"
    if torch.equal(found, plain):
        return None
    return (
        f"with drafts, the first {length - input_ids.shape[1]} greedy tokens of this call were "
        f"{found[:, input_ids.shape[1] :].tolist()}, in plain decoding {plain[:, input_ids.shape[1] :].tolist()}"
    )


class _Forced(LogitsProcessor):
    """Lets the text continue with given tokens, and then with any."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens.tolist()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = input_ids.shape[1] - PROMPT
        scores = torch.zeros_like(scores)
        scores[:, self.tokens[place] if place < len(self.tokens) else 0] = 1
        return scores


class _Script(TreeCandidateGenerator):
    """Drafts a known continuation; the last token of the first draft is wrong, and so is each tree's first branch.

    Args:
        tokens: [batch, tokens] int64, the continuation.
        prompt_length: tokens before it.
    """

    def __init__(self, tokens: Tensor, prompt_length: int) -> None:
        self.tokens, self.prompt_length = tokens, prompt_length

    def get_candidates(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        place = input_ids.shape[1] - self.prompt_length
        if not place:  # as in calls, the prompt is run alone
            return input_ids, None
        return torch.cat([input_ids, torch.tensor([self._drafts(0, place)], device=input_ids.device)], 1), None

    def draft(self, context: DraftContext) -> DraftTree:
        trees = []
        for row, length in enumerate(context.lengths):
            first, *others = [*self._drafts(row, length - self.prompt_length), 0, 0, 0][:3]
            trees.append([int(context.root_ids[row]), self._wrong(first), first, *others])
        return DraftTree.from_lists(trees, [[-1, 0, 0, 2, 3]] * len(trees))

    def _drafts(self, row: int, place: int) -> list[int]:
        drafts: list[int] = self.tokens[row, place : place + 3].tolist()
        return [*drafts[:-1], self._wrong(drafts[-1])] if place == 1 and drafts else drafts

    def _wrong(self, token: int) -> int:
        return token - 1 if token else token + 1
