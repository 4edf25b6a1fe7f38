"""Two copies of a drafter: one that serves, one that learns beside it, and the weights that can be gone back to.

Updates run in a thread of their own, on a GPU on a CUDA stream of their own, and touch only the learning copy. The
serving copy changes in `swap` and `revert` alone, which the caller calls between rounds or calls. Random choices come
from a generator of the learner's, so that sampling draws the same numbers as without it. Source: SpecBlock, Section 3.4
and Appendix A.3.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specdec.adaptation.policy import Action
from hf_specdec.adaptation.recording import Query
from hf_specdec.drafters.pretrained import PretrainedDrafter
from hf_specdec.training.step import AdaptiveStep


@dataclass(frozen=True)
class Update:
    """What an update did.

    Attributes:
        action: `"head"` or `"full"`.
        loss: of its first gradient step, the anchor's share excluded.
        divergence: KL from the pre-deployment drafter at its first gradient step, nats per position.
        seconds: it took, beside the queries.
    """

    action: Action
    loss: float
    divergence: float
    seconds: float


class Learner:
    """Learns on one copy of a drafter while the other serves.

    Args:
        serving: the drafter; its weights change in `swap` and `revert` only.
        make_step: makes the step for the learning copy.
        learning_rate: of AdamW.
        kl_weight: lambda, weight of KL(learning || pre-deployment).
        steps_per_update: gradient steps that an update takes on its buffer.
        max_positions: of a query's text, its last ones, that are learned from.
        seed: of random choices of the step.
    """

    def __init__(
        self,
        serving: PretrainedDrafter,
        make_step: Callable[[PretrainedDrafter], AdaptiveStep],
        *,
        learning_rate: float,
        kl_weight: float,
        steps_per_update: int,
        max_positions: int,
        seed: int = 0,
    ) -> None:
        self.serving = serving
        # Small steps would be lost in the rounding of half precision.
        self.learning = copy.deepcopy(serving).float().train()
        self.before = copy.deepcopy(self.learning).eval().requires_grad_(False)  # theta_0
        self.step = make_step(self.learning)
        self.step.keep_logits = True
        self.step.generator = torch.Generator().manual_seed(seed)
        self.kl_weight, self.learning_rate = kl_weight, learning_rate
        self.steps_per_update, self.max_positions = steps_per_update, max_positions
        self.optimizer = self._new_optimizer()
        self.good = self.candidate = self._weights_of(serving)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter update")
        self._running: Future[Update] | None = None
        self._stream = torch.cuda.Stream(serving.device) if serving.device.type == "cuda" else None

    @property
    def busy(self) -> bool:
        """Whether an update runs, or has finished and awaits `swap`."""
        return self._running is not None

    @property
    def ready(self) -> bool:
        """Whether an update has finished well and awaits `swap`, which will not raise."""
        return self._running is not None and self._running.done() and self._running.exception() is None

    def start(self, action: Action, queries: Sequence[Query]) -> None:
        """Begins an update on the queries of a buffer."""
        assert not self.busy
        if self._stream is not None:  # what the queries hold was written on the serving stream
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._running = self._thread.submit(self._update, action, list(queries))

    def swap(self, *, wait: bool = False) -> Update | None:
        """Brings a finished update's weights to the serving copy; call it between rounds.

        Args:
            wait: for a running update to finish.

        Returns:
            The update, or None if there was none to bring.

        Raises:
            RuntimeError: the update failed; its error is the cause. The serving copy is as it was, and learning goes on
                from there.
        """
        running = self._running
        if running is None or not (wait or running.done()):
            return None
        self._running = None
        try:
            update = running.result()
        except Exception as error:
            # The gradient steps before the error are no part of "the weights from before".
            self._copy(_tensors_of(self.serving), self.learning)
            self.optimizer = self._new_optimizer()
            raise RuntimeError(
                f"An update of the drafter failed: {type(error).__name__}: {error}. It serves on with the weights "
                "from before; to go on without learning, pass the drafter itself as assistant_model."
            ) from error
        self._copy(_tensors_of(self.learning), self.serving)
        return update

    def keep(self) -> None:
        """Takes note that a window of the fail-safe was good.

        Then those weights are good that stood when the good one before it ended: they have served since. Those of now
        may come from an update that no query of the window has met, and wait for the next good one.
        """
        self.good, self.candidate = self.candidate, self._weights_of(self.serving)

    def revert(self) -> None:
        """Brings both copies back to the weights last noted as good, and forgets the optimizer's momentum.

        An update that is running is waited for and dropped; if it failed, the next `swap` raises its error.
        """
        if self._running is not None and self._running.exception() is None:
            self._running = None
        for model in (self.serving, self.learning):
            self._copy(self.good, model)
        self.candidate = self.good
        self.optimizer = self._new_optimizer()

    def close(self) -> Update | None:
        """Waits for a running update, brings its weights over and ends the thread. Raises as `swap` does."""
        try:
            return self.swap(wait=True)
        finally:
            self._thread.shutdown()

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.learning.parameters(), lr=self.learning_rate, weight_decay=0.0)

    @staticmethod
    @torch.no_grad()
    def _copy(tensors: list[Tensor], model: PretrainedDrafter) -> None:
        for own, other in zip(_tensors_of(model), tensors, strict=True):
            own.copy_(other)

    @staticmethod
    def _weights_of(model: PretrainedDrafter) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in _tensors_of(model)]

    def _update(self, action: Action, queries: list[Query]) -> Update:
        """In the thread: takes the gradient steps of one update.

        Raises:
            FloatingPointError: a loss, or a weight as it would serve, is not finite.
        """
        started = time.perf_counter()
        with torch.cuda.stream(self._stream):  # nothing where there is no stream
            try:
                loss, divergence = self._steps(action, queries)
            finally:  # nothing is at work on the learning copy any more, after an error either
                if self._stream is not None:
                    self._stream.synchronize()
        return Update(action, loss, divergence, seconds=time.perf_counter() - started)

    def _steps(self, action: Action, queries: list[Query]) -> tuple[float, float]:
        """Loss and divergence of the first gradient step."""
        for name, parameter in self.learning.named_parameters():
            parameter.requires_grad_(action == "full" or name.startswith(self.step.heads))
        losses = (self._head_losses if action == "head" else self._full_losses)(queries)
        found: list[tuple[float, float]] = []
        for number in range(self.steps_per_update):
            loss, divergence = losses()
            found.append((loss.item(), divergence.item()))
            if not all(map(math.isfinite, found[-1])):
                raise FloatingPointError(
                    f"loss is {found[-1][0]} at gradient step {number + 1} of {self.steps_per_update}, divergence from "
                    f"the drafter of before {found[-1][1]}"
                )
            self.optimizer.zero_grad()
            (loss + self.kl_weight * divergence).backward()
            torch.nn.utils.clip_grad_norm_(self.learning.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        pairs = zip(_tensors_of(self.serving), _tensors_of(self.learning), strict=True)
        if not torch.stack([learned.to(own.dtype).isfinite().all() for own, learned in pairs]).all():
            raise FloatingPointError("weights are not finite after the last gradient step")
        return found[0]

    def _head_losses(self, queries: Sequence[Query]) -> Callable[[], tuple[Tensor, Tensor]]:
        """Computes loss and divergence of a gradient step; what all steps share is computed once."""
        states = torch.cat([query.states for query in queries]).float()
        law = self.step.head_law(torch.cat([query.target_hidden for query in queries]))
        with torch.no_grad():
            before = self.step.head_logits(self.before, states)

        def losses() -> tuple[Tensor, Tensor]:
            loss, logits = self.step.head_loss(self.learning, states, law)
            return loss, kl_divergence(logits, before)

        return losses

    def _full_losses(self, queries: Sequence[Query]) -> Callable[[], tuple[Tensor, Tensor]]:
        """The same for the whole drafter, with other random choices in each step."""
        batch = self._batch_of(queries)
        generator = self.step.generator
        assert generator is not None

        def losses() -> tuple[Tensor, Tensor]:
            state = generator.get_state()
            output = self.step(self.learning, batch, training=True)
            generator.set_state(state)  # the same random choices for both
            with torch.no_grad():
                before = self.step(self.before, batch, training=True)
            assert output.logits is not None
            assert before.logits is not None
            return output.loss, kl_divergence(output.logits, before.logits)

        return losses

    def _batch_of(self, queries: Sequence[Query]) -> dict[str, Tensor]:
        """The last `max_positions` of every row, padded behind to one length."""
        rows = [row for query in queries for row in query.rows]
        columns: dict[str, list[Any]] = {name: [] for name in ("input_ids", "features", "last_hidden")}
        first, lengths = [], []
        for row in rows:
            length = len(row["input_ids"])
            skipped = max(0, length - self.max_positions)
            for name, parts in columns.items():
                parts.append(row[name][skipped:])
            first.append(max(1, row["first_anchor"] - skipped))
            lengths.append(length - skipped)
        device = self.learning.device
        padded = {name: torch.nn.utils.rnn.pad_sequence(parts, batch_first=True) for name, parts in columns.items()}
        return {name: tensor.to(device) for name, tensor in padded.items()} | {
            "first_anchor": torch.tensor(first, device=device),
            "length": torch.tensor(lengths, device=device),
        }


def kl_divergence(logits: Tensor, reference_logits: Tensor) -> Tensor:
    """KL(p || reference) over the last axis, mean over positions: [positions, vocab] twice -> scalar, nats.

    Example:
        >>> kl_divergence(torch.zeros(1, 2), torch.tensor([[0.0, 0.0]]))
        tensor(0.)
    """
    logprobs, reference = logits.float().log_softmax(-1), reference_logits.float().log_softmax(-1)
    return (logprobs.exp() * (logprobs - reference)).sum(-1).mean()


def _tensors_of(model: PretrainedDrafter) -> list[Tensor]:
    return list(model.parameters())
