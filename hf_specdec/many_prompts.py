"""generate_many: a stream of prompts through one batch, with or without drafts.

Each prompt is prepared by the target's own `generate`, with its own arguments, and becomes a row of the batch
(`decoding/shared.py`), which ended rows leave to the next prompts. What cannot share a batch is decoded by a call of
its own, with a warning that says why.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.decoding.devices import without_inference_mode
from hf_specdec.decoding.exchange import DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.loop import SpeculativeDecoding
from hf_specdec.decoding.policies import DraftingPolicy
from hf_specdec.decoding.shared import SharedRounds
from hf_specdec.decoding.speed.cudnn import without_cudnn_attention
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.modules import runs_in_inference_mode
from hf_specdec.decoding.targets.support import TreesRefusedError
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.call_settings import limits_of_drafts
from hf_specdec.drafting.drafter import Drafter, check_is_drafter
from hf_specdec.drafting.options import DrafterOptions
from hf_specdec.integration import CallRefusedError, attached_to, prepared

# Token ids; or arguments of `generate` for this prompt alone, among them `input_ids`, and `seed`.
Prompt: TypeAlias = Tensor | Sequence[int] | Mapping[str, Any]


def generate_many(
    model: Any,
    prompts: Iterable[Prompt],
    *,
    assistant_model: Drafter | None = None,
    batch_size: int = 32,
    max_cache_tokens: int | None = None,
    **generate_arguments: Any,
) -> Iterator[tuple[int, Tensor | Exception]]:
    """Continues many prompts in one batch, whose ended rows are replaced by the next prompts.

    Each output is that of `model.generate` for its prompt alone: the same tokens if they are chosen greedily, up to
    rounding; of the same distribution if they are sampled; and with a `seed` the same tokens whoever shares the batch
    and whatever drafts, those of a call after `torch.manual_seed(seed)` with a drafter that draws no drafts.

    Args:
        model: the target.
        prompts: token ids, one prompt each, without padding; or dictionaries with `input_ids` and arguments of
            `generate` for this prompt, such as `max_new_tokens`, `temperature`, `stop_strings` or `streamer`, and
            `seed`. Read one by one, as rows become free.
        assistant_model: the drafter; None for the attached one, or for plain decoding in the same batch.
        batch_size: most rows at once.
        max_cache_tokens: most entries of the target's cache, rows times the length of the longest text; a prompt waits
            until it fits. None for no limit.
        generate_arguments: of `generate`, for all prompts.

    Yields:
        The index of a prompt and what `generate` would have returned for it, [1, length] int64, in the order in which
        they end. In the place of an output an exception, if this prompt, a processor, a criterion or a streamer of its
        own raised it; the others go on. Closing the iterator ends all rows.

    Raises:
        TypeError: `assistant_model` is no drafter.
        ValueError: a size is out of range.

    Examples:
        >>> for index, output in generate_many(model, prompts, max_new_tokens=200):  # doctest: +SKIP
        ...     print(index, tokenizer.decode(output[0]))
    """
    for name, value in (("batch_size", batch_size), ("max_cache_tokens", max_cache_tokens or 1)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r} must be an integer of at least 1.")
    drafter = assistant_model if assistant_model is not None else attached_to(model) or Undrafted()
    check_is_drafter(drafter, "It is the argument assistant_model of generate_many.")
    batch = Batch(model, drafter, batch_size, max_cache_tokens, generate_arguments)
    return _outputs(batch, enumerate(prompts))


def _outputs(batch: Batch, prompts: Iterator[tuple[int, Prompt]]) -> Iterator[tuple[int, Tensor | Exception]]:
    try:
        waiting = True
        while waiting or batch.num_rows:
            while waiting and batch.has_room:
                if waiting := (following := next(prompts, None)) is not None:
                    batch.add(*following)
                    yield from _results(batch)
            batch.round()
            yield from _results(batch)
    finally:
        batch.close()


def _results(batch: Batch) -> Iterator[tuple[int, Tensor | Exception]]:
    for ended in batch.take_ended():
        yield ended.key, ended.result


class Undrafted(Drafter):
    """Drafts nothing: for plain decoding in the rounds of a batch."""

    def __init__(self) -> None:
        self.options = _NoOptions()

    def check_target(self, model: PreTrainedModel) -> None:
        """Any target fits."""

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return _RootOnly()


class _NoOptions(DrafterOptions):
    method = "none"


class _RootOnly(TreeCandidateGenerator):
    def draft(self, context: DraftContext) -> DraftTree:
        return DraftTree.root_only(context.root_ids)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """It keeps nothing of a row."""

    def join(self, others: Sequence[Any], places: Sequence[int]) -> None:
        """It keeps nothing of a row."""


class Ended(NamedTuple):
    """A prompt that has ended: what it was added with, its output or error, and its counts, None without drafts."""

    key: Any
    result: Tensor | Exception
    stats: SpeculationStats | None


@dataclass(eq=False)
class Request:
    """A prompt whose call was prepared.

    Attributes:
        key: what its output is returned with.
        arguments: of its own call of `generate`.
        seed: of its noise; None for torch's own generator.
        row: the loop of its call.
    """

    key: Any
    arguments: dict[str, Any]
    seed: int | None
    row: SpeculativeDecoding


class Batch:
    """The rows in flight, and what has ended since it was last asked for.

    Args:
        model: the target.
        drafter: for all rows.
        batch_size: most rows.
        max_cache_tokens: most rows times the longest text; None for no limit.
        arguments: of `generate`, for all prompts.
    """

    def __init__(
        self, model: Any, drafter: Drafter, batch_size: int, max_cache_tokens: int | None, arguments: dict[str, Any]
    ) -> None:
        self.model, self.drafter, self.arguments = model, drafter, arguments
        self.batch_size, self.max_cache_tokens = batch_size, max_cache_tokens
        found = isinstance(drafter, Undrafted) or attached_to(model) is drafter
        self.assistant = {} if found else {"assistant_model": drafter}  # of a prompt's own call
        self.stats, self.started = SpeculationStats(method=drafter.method), time.perf_counter()
        self.shared: SharedRounds | None = None
        self.waiting: list[Request] = []  # for room in the cache
        self.begun: list[SpeculativeDecoding] = []  # to join the next round
        self.running: dict[SpeculativeDecoding, Any] = {}  # the keys of all rows that have begun
        self.ended: list[Ended] = []
        self._policies: dict[int, DraftingPolicy] = {}
        self._reasons: set[str] = set()

    @property
    def num_rows(self) -> int:
        """Rows in flight, and those that wait for room in the cache."""
        return len(self.running) + len(self.waiting)

    @property
    def keys(self) -> list[Any]:
        """Of the prompts that have not ended."""
        return [*self.running.values(), *(request.key for request in self.waiting)]

    @property
    def has_room(self) -> bool:
        """Whether another prompt may be added."""
        return self.num_rows < self.batch_size and not self.waiting

    def take_ended(self) -> list[Ended]:
        """What has ended since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def add(self, key: Any, prompt: Prompt) -> None:
        """Prepares a prompt, and runs it if there is room in the cache."""
        try:
            arguments = self._arguments(prompt)
            seed = arguments.pop("seed", None)
            try:
                request = Request(key, arguments, seed, prepared(self.model, self.drafter, **arguments))
            except (TreesRefusedError, CallRefusedError) as refusal:
                if isinstance(refusal, CallRefusedError) and self.assistant:
                    raise  # as its own call would
                self._decode_alone(key, arguments, seed, str(refusal))
                return
            self._check_size(request)
        except Exception as error:  # the result of this prompt
            self.ended.append(Ended(key, error, None))
            return
        self.waiting.append(request)
        self._begin()

    def _arguments(self, prompt: Prompt) -> dict[str, Any]:
        """The arguments of the prompt's own call of `generate`, and its seed."""
        own = dict(prompt) if isinstance(prompt, Mapping) else {"input_ids": prompt}
        if "input_ids" not in own:
            raise ValueError(f"A prompt has the arguments {sorted(own)}, but no input_ids.")
        ids = torch.as_tensor(own["input_ids"], device=self.model.device)
        ids = ids.unsqueeze(0) if ids.dim() == 1 else ids
        if ids.dim() != 2 or len(ids) != 1 or not ids.shape[1] or ids.is_floating_point():
            raise ValueError(
                f"A prompt has input_ids of shape {list(ids.shape)} and {ids.dtype}; they must be the integers of one "
                "prompt, [length] or [1, length]."
            )
        return {"attention_mask": torch.ones_like(ids), **self.arguments, **own, "input_ids": ids}

    def _check_size(self, request: Request) -> None:
        row, most = request.row, self.max_cache_tokens
        if most is not None and row.config.max_length > most:
            raise ValueError(
                f"Prompt {request.key!r} has {row.sequences.prompt_length} tokens and may become "
                f"{row.config.max_length} tokens long, more than max_cache_tokens={most}: it never fits. Lower its "
                "max_new_tokens, or raise max_cache_tokens."
            )

    def _fits(self, row: SpeculativeDecoding) -> bool:
        longest = max(each.config.max_length for each in (row, *self.running))
        return self.max_cache_tokens is None or longest * (len(self.running) + 1) <= self.max_cache_tokens

    @without_cudnn_attention()
    def _begin(self) -> None:
        """Runs the prompts for which there is room."""
        while self.waiting and self._fits(self.waiting[0].row):
            request = self.waiting.pop(0)
            row = request.row
            try:
                with self._mode(row):
                    row.begin_row(request.seed)
            except TreesRefusedError as refusal:
                row.close()
                self._decode_alone(request.key, request.arguments, request.seed, str(refusal))
                continue
            except Exception as error:  # the result of this prompt
                row.close()
                self.ended.append(Ended(request.key, error, None))
                continue
            self.running[row] = request.key
            if row.sequences.done:
                row.close()
                self._end(row, None)
            else:
                self.begun.append(row)

    @without_cudnn_attention()
    def round(self) -> None:
        """One round of all rows; those that have begun since the last one join it."""
        self._begin()
        begun, self.begun = self.begun, []
        if self.shared is None and not begun:
            return
        with self._mode(next(iter(self.running))):
            if self.shared is None:
                self.shared = SharedRounds(begun, self._policy)
            elif begun:
                self.shared.join(begun)
            self.shared.drop_ended()
            for row, error in self.shared.round():
                self._end(row, error)
        if not self.shared.num_running:
            self._close_shared()

    def _policy(self, rows: int) -> DraftingPolicy:
        """The policy of rounds with so many rows, the same up to the next power of 2."""
        size = 1 << (rows - 1).bit_length()
        if size not in self._policies:
            row = next(iter(self.running))
            policy = self.drafter.drafting_policy(row.target.model, size, self.stats)
            self._policies[size] = policy.restrict(*limits_of_drafts(row.config))
        return self._policies[size]

    def _mode(self, row: SpeculativeDecoding) -> AbstractContextManager[None]:
        networks = (row.target.model, *self.drafter.networks)
        return nullcontext() if all(map(runs_in_inference_mode, networks)) else without_inference_mode()

    def _end(self, row: SpeculativeDecoding, error: Exception | None) -> None:
        self.stats.add_row(row.stats)
        self.drafter.stats = row.stats  # which the end of a streamer may look at
        result: Tensor | Exception
        try:
            result = row.sequences.finish() if error is None else error
        except Exception as raised:  # of the streamer
            result = raised
        self.ended.append(Ended(self.running.pop(row), result, row.stats))

    def _decode_alone(self, key: Any, arguments: dict[str, Any], seed: int | None, reason: str) -> None:
        """The prompt's own call of `generate`, while the rows of the batch wait."""
        if reason not in self._reasons:
            self._reasons.add(reason)
            warnings.warn(
                f"Prompt {key!r} and others like it cannot share a batch: {reason}. Each is decoded by a call of its "
                "own, one after the other.",
                stacklevel=2,
            )
        self.drafter.stats = None  # it stays None if the call is decoded plainly
        result: Tensor | Exception
        try:
            with _seeded(seed, self.model.device):
                result = self.model.generate(**arguments, **self.assistant)
        except Exception as error:  # the result of this prompt
            result = error
        self.ended.append(Ended(key, result, self.drafter.stats))

    def _close_shared(self) -> None:
        if self.shared is not None:
            self.stats.num_target_forwards += self.shared.target.num_forwards
            self.stats.num_layers_run += self.shared.target.num_layers_run
            self.shared.close()
            self.shared = None

    def close(self) -> None:
        """Ends all rows."""
        for row in (*self.begun, *(request.row for request in self.waiting)):
            row.close()
        self._close_shared()
        self.stats.total_time_s = time.perf_counter() - self.started
        self.drafter.stats = self.stats


@contextlib.contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """In this context, torch's generators begin with the seed, if there is one."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
