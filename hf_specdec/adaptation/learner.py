"""Two copies of a drafter, one that serves and one that is trained in parallel, and the last good weights.

Updates run in a separate thread, on a GPU in a separate CUDA stream, and change only the learning copy. The serving
copy changes only in `swap` and `revert`, which are called between rounds or calls. Random choices use the learner's own
generator, so that sampling draws the same numbers as without adaptation. Source: SpecBlock, Section 3.4 and Appendix
A.3.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specdec.adaptation.policy import Action
from hf_specdec.adaptation.recording import Query
from hf_specdec.decoding.speed.cudnn import without_cudnn_attention
from hf_specdec.hub.pretrained import PretrainedDrafter
from hf_specdec.training.data import collate
from hf_specdec.training.losses import kl_loss
from hf_specdec.training.step import AdaptiveStep


@dataclass(frozen=True)
class Update:
    """Results of an update.

    Attributes:
        action: `"head"` or `"full"`.
        loss: of its first gradient step, the anchor's share excluded.
        divergence: KL from the pre-deployment drafter at its first gradient step, nats per position.
        seconds: duration, in parallel with the queries.
    """

    action: Action
    loss: float
    divergence: float
    seconds: float


class Learner:
    """Trains one copy of a drafter while the other serves.

    Args:
        serving: the drafter; its weights change only in `swap` and `revert`.
        make_step: makes the training step of the learning copy.
        learning_rate: of AdamW.
        kl_weight: lambda, weight of KL(learning || pre-deployment).
        steps_per_update: gradient steps per buffer.
        max_positions: train on at most this many last positions of a query's text.
        seed: of the step's random choices.
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
        # float32, because half precision would round small steps to 0.
        self.learning = copy.deepcopy(serving).float().train()
        self.before = copy.deepcopy(self.learning).eval().requires_grad_(False)  # theta_0
        self.step = make_step(self.learning)
        self.step.keep_logits = True
        self.step.generator = torch.Generator().manual_seed(seed)
        self.kl_weight, self.learning_rate = kl_weight, learning_rate
        self.steps_per_update, self.max_positions = steps_per_update, max_positions
        self.optimizer = new_optimizer(self.learning, self.learning_rate)
        self.good = self.candidate = weights_of(serving)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter update")
        self._running: Future[Update] | None = None
        self._stream = torch.cuda.Stream(serving.device) if serving.device.type == "cuda" else None

    @property
    def busy(self) -> bool:
        """Whether an update is running, or finished and not yet swapped."""
        return self._running is not None

    @property
    def ready(self) -> bool:
        """Whether an update has finished without an error and is not yet swapped."""
        return self._running is not None and self._running.done() and self._running.exception() is None

    def start(self, action: Action, queries: Sequence[Query]) -> None:
        """Starts an update on the queries of a buffer."""
        assert not self.busy
        if self._stream is not None:  # the tensors of the queries were written on the serving stream
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._running = self._thread.submit(self._update, action, list(queries))

    def swap(self, *, wait: bool = False) -> Update | None:
        """Copies the weights of a finished update to the serving copy; call it between rounds.

        Args:
            wait: wait for a running update.

        Returns:
            The update, or None if no update has finished.

        Raises:
            RuntimeError: the update failed; its error is the cause. The serving copy is unchanged, and the next update
                starts from its weights.
        """
        running = self._running
        if running is None or not (wait or running.done()):
            return None
        self._running = None
        try:
            update = running.result()
        except Exception as error:
            # Undoes the gradient steps before the error.
            copy_weights(self.serving.parameters(), self.learning)
            self.optimizer = new_optimizer(self.learning, self.learning_rate)
            raise RuntimeError(
                f"An update of the drafter failed: {type(error).__name__}: {error}. The drafter keeps its earlier "
                "weights; to continue without adaptation, pass the drafter itself as assistant_model."
            ) from error
        copy_weights(self.learning.parameters(), self.serving)
        return update

    def mark_good(self) -> None:
        """Called after a good window of the fail-safe.

        The weights at the end of the previous good window become the good ones, because they have served since. The
        present weights may come from an update after the last query of this window; they are the next candidate.
        """
        self.good, self.candidate = self.candidate, weights_of(self.serving)

    def revert(self) -> None:
        """Restores the last good weights of both copies and resets the optimizer.

        Waits for a running update and discards it; if it failed, the next `swap` raises its error.
        """
        if self._running is not None and self._running.exception() is None:
            self._running = None
        for model in (self.serving, self.learning):
            copy_weights(self.good, model)
        self.candidate = self.good
        self.optimizer = new_optimizer(self.learning, self.learning_rate)

    def close(self) -> Update | None:
        """Waits for a running update, swaps its weights and ends the thread; raises as `swap` does."""
        try:
            return self.swap(wait=True)
        finally:
            self._thread.shutdown()

    def _update(self, action: Action, queries: list[Query]) -> Update:
        """Runs in the thread: the gradient steps of one update.

        Raises:
            FloatingPointError: a loss, or a weight in the serving dtype, is not finite.
        """
        started = time.perf_counter()
        with torch.cuda.stream(self._stream):  # no effect if there is no stream
            try:
                loss, divergence = self._steps(action, queries)
            finally:  # after an error too, no kernel may still write to the learning copy
                if self._stream is not None:
                    self._stream.synchronize()
        return Update(action, loss, divergence, seconds=time.perf_counter() - started)

    @without_cudnn_attention()
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
                    f"at gradient step {number + 1} of {self.steps_per_update} the loss is {found[-1][0]} and the "
                    f"divergence from the drafter before the adaptation {found[-1][1]}"
                )
            gradient_step(self.learning, self.optimizer, loss + self.kl_weight * divergence)
        pairs = zip(self.serving.parameters(), self.learning.parameters(), strict=True)
        if not torch.stack([learned.to(own.dtype).isfinite().all() for own, learned in pairs]).all():
            raise FloatingPointError("weights are not finite after the last gradient step")
        return found[0]

    def _head_losses(self, queries: Sequence[Query]) -> Callable[[], tuple[Tensor, Tensor]]:
        """A function that computes loss and divergence of a gradient step; labels are computed once."""
        states = torch.cat([query.states for query in queries]).float()
        labels = self.step.head_labels(torch.cat([query.target_hidden for query in queries]))
        with torch.no_grad():
            before = self.step.head_logits(self.before, states)

        def losses() -> tuple[Tensor, Tensor]:
            loss, logits = self.step.head_loss(self.learning, states, labels)
            return loss, kl_loss(before, logits).mean()

        return losses

    def _full_losses(self, queries: Sequence[Query]) -> Callable[[], tuple[Tensor, Tensor]]:
        """The same for the whole drafter, with new random choices in each step."""
        batch = batch_of((row for query in queries for row in query.rows), self.max_positions, self.learning.device)
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
            return output.loss, kl_loss(before.logits, output.logits).mean()

        return losses


def batch_of(rows: Iterable[Mapping[str, Any]], max_positions: int, device: torch.device) -> dict[str, Tensor]:
    """The last `max_positions` of every recorded row, right-padded to the same length."""
    parts = []
    for row in rows:
        length = len(row["input_ids"])
        skipped = max(0, length - max_positions)
        columns = {name: column[skipped:] for name, column in row.items() if isinstance(column, Tensor)}
        parts.append(columns | {"first_anchor": max(1, row["first_anchor"] - skipped), "length": length - skipped})
    return {name: column.to(device) for name, column in collate(parts).items()}


def new_optimizer(model: PretrainedDrafter, learning_rate: float) -> torch.optim.Optimizer:
    """For the updates of a drafter; both ways of learning use it."""
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)


def gradient_step(model: PretrainedDrafter, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step of the optimizer, with a gradient of norm 1 at most; leaves no gradients."""
    optimizer.zero_grad()  # of a step that failed
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def weights_of(model: PretrainedDrafter) -> list[Tensor]:
    """Copies of a drafter's parameters, in their order."""
    return [each.detach().clone() for each in model.parameters()]


@torch.no_grad()
def copy_weights(tensors: Iterable[Tensor], model: PretrainedDrafter) -> None:
    """Writes values into a drafter's parameters, in their order; captured forwards read the same memory."""
    for own, other in zip(model.parameters(), tensors, strict=True):
        own.copy_(other)
