"""Aurora: a drafter is trained in another process on the rounds that are served, and its weights are swapped in.

    served = AuroraDrafter(target, drafter, "rounds")  # beside `python -m hf_specdec.adaptation.aurora_trainer`
    for inputs in stream:
        output = target.generate(**inputs, assistant_model=served)

The serving process writes each text that it has served into a folder: the tokens, the target's states that the drafter
reads, the input of the target's head, from which its logits over any draft vocabulary follow, and the drafts that were
refused. The folder is bounded; the oldest texts leave. The trainer reads them, trains its own copy of the drafter and
publishes weights into the same folder. Between calls the serving process loads them, replays recent rounds that it has
kept from the trainer with the old and the new weights, and swaps if no fewer tokens would be accepted. The trainer
reads the verdict; after weights that were refused it goes back to the last ones that served.

The output is still the target's: weights change the drafted tokens, never the accepted ones. Experimental: names and
defaults may change without notice.
Source: When RL Meets Adaptive Speculative Training, arXiv 2602.06932. `aurora_trainer.py` is the other process,
`base.py` has what is shared with `AdaptiveDrafter`, which learns in the process that serves.
"""

from __future__ import annotations

import copy
import json
import os
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.adaptation.base import LearningDrafter, recipe_for
from hf_specdec.adaptation.learner import batch_of, copy_weights
from hf_specdec.adaptation.policy import check_at_least
from hf_specdec.adaptation.recording import RefusalRecorder
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.hub.pretrained import PretrainedDrafter
from hf_specdec.training.step import TrainingStep

__all__ = ["AuroraDrafter", "RoundsFolder", "Swap", "replayed_length"]

MAX_POSITIONS = 512  # of a text that are trained on or replayed, the last ones
KEPT_WEIGHTS = 3  # files of published weights


@dataclass(frozen=True)
class Swap:
    """Published weights, and what became of them.

    Attributes:
        number: of the publication, from 1.
        calls: number of calls before it.
        length: accepted length of the recent rounds, replayed with the weights that served.
        new_length: with the published weights.
        serving: the publication whose weights serve from then on, 0 for the first weights.
    """

    number: int
    calls: int
    length: float
    new_length: float
    serving: int

    @property
    def swapped(self) -> bool:
        """Whether the published weights serve from then on."""
        return self.serving == self.number


class RoundsFolder:
    """The folder that both processes share. Every file gets its final name when it is complete.

    Args:
        path: is made if it does not exist.
        max_bytes: of recorded texts; the oldest ones are deleted.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int = 2**30) -> None:
        self.path, self.max_bytes = Path(path), max_bytes
        self.path.mkdir(parents=True, exist_ok=True)
        self.texts = deque((file, file.stat().st_size) for file in self.files("text"))

    def files(self, kind: str) -> list[Path]:
        """The files of "text" or "weights", the oldest first."""
        return sorted(self.path.glob(f"{kind}-*.safetensors"))

    def add(self, kind: str, last: Path | None, tensors: dict[str, Tensor], **notes: str) -> Path:
        """Writes a file with the number after that of the last one of its kind."""
        file = self.path / f"{kind}-{1 if last is None else number_of(last) + 1:08d}.safetensors"
        unfinished = file.with_suffix(".unfinished")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished, notes)
        unfinished.replace(file)
        return file

    def add_text(self, row: dict[str, Any]) -> None:
        """Writes a recorded text, and deletes the oldest ones beyond the bound; for one process."""
        tensors = {name: value for name, value in row.items() if isinstance(value, Tensor)}
        last = self.texts[-1][0] if self.texts else None
        file = self.add("text", last, tensors, first_anchor=str(row["first_anchor"]))
        self.texts.append((file, file.stat().st_size))
        while len(self.texts) > 1 and sum(size for _, size in self.texts) > self.max_bytes:
            oldest, _ = self.texts.popleft()
            oldest.unlink(missing_ok=True)

    def read_text(self, file: Path) -> dict[str, Any] | None:
        """A recorded text; None if it has been deleted meanwhile."""
        try:
            with safe_open(file, framework="pt") as stored:
                row: dict[str, Any] = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
                return row | {"first_anchor": int(stored.metadata()["first_anchor"])}
        except (OSError, SafetensorError):
            return None

    def add_weights(self, model: PretrainedDrafter) -> int:
        """Publishes the weights of a drafter; returns the number of the publication."""
        files = self.files("weights")
        tensors = {name: each.detach().cpu() for name, each in model.named_parameters()}
        file = self.add("weights", files[-1] if files else None, tensors)
        for old in self.files("weights")[:-KEPT_WEIGHTS]:
            old.unlink(missing_ok=True)
        return number_of(file)

    def newest_weights(self, after: int) -> tuple[int, dict[str, Tensor]] | None:
        """Number and tensors of the newest publication, if its number is above `after`."""
        files = self.files("weights")
        if not files or number_of(files[-1]) <= after:
            return None
        return number_of(files[-1]), load_file(files[-1])

    def write_verdict(self, swap: Swap) -> None:
        """Tells the trainer what became of a publication."""
        unfinished = self.path / "verdict.unfinished"
        unfinished.write_text(json.dumps(asdict(swap)))
        unfinished.replace(self.path / "verdict.json")

    def verdict(self) -> Swap | None:
        """The latest one."""
        file = self.path / "verdict.json"
        return Swap(**json.loads(file.read_text())) if file.exists() else None


def number_of(file: Path) -> int:
    """The number in the name of a file of `RoundsFolder`."""
    return int(file.stem.rpartition("-")[2])


class AuroraDrafter(LearningDrafter):
    """Drafts with a drafter, records the rounds, and swaps in weights that another process has trained.

    A call is one text per row of the batch. The drafter's method must have `Recipe.further`.

    Args:
        target: of the drafter.
        drafter: the serving copy, on its target's device: its weights change, between calls only.
        folder: shared with the trainer.
        max_bytes: of recorded texts on disk.
        replay_every: every n-th text, the first included, is kept from the trainer and replayed.
        replayed: texts that are replayed, the most recent ones.

    Attributes:
        swaps: the publications so far, in order.
        num_calls: calls so far.

    Raises:
        ValueError: the drafter's method cannot be trained further, an argument is out of range, or the drafter does not
            fit the target.
        TypeError: `drafter` is not a drafter.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: PretrainedDrafter,
        folder: str | os.PathLike[str],
        *,
        max_bytes: int = 2**30,
        replay_every: int = 4,
        replayed: int = 16,
    ) -> None:
        super().__init__(target, drafter)
        check_at_least(1, max_bytes=max_bytes, replay_every=replay_every, replayed=replayed)
        further = recipe_for(self.drafter, "further")
        self.folder, self.replay_every = RoundsFolder(folder, max_bytes), replay_every
        self.published = copy.deepcopy(self.drafter).eval()
        self.steps = [further(model, self.target) for model in (self.drafter, self.published)]
        self.recent: deque[dict[str, Any]] = deque(maxlen=replayed)
        self.swaps: list[Swap] = []
        self.num_calls = self.num_texts = 0

    @property
    def learned(self) -> str | None:
        swapped = sum(swap.swapped for swap in self.swaps)
        return f"{swapped} of {len(self.swaps)} publications of another process in {self.num_calls} calls"

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        self.swap()
        self.num_calls += 1
        inner = self.drafter.candidate_generator(target)
        return RefusalRecorder(inner, self.feature_width(target.model), self._finished)

    def swap(self) -> Swap | None:
        """Loads newly published weights, replays, and swaps if they are not worse; called before each call.

        Returns:
            what became of them; None if nothing new was published, or there is nothing to replay yet.
        """
        if not self.recent:
            return None
        found = self.folder.newest_weights(self.swaps[-1].number if self.swaps else 0)
        if found is None:
            return None
        number, tensors = found
        copy_weights((tensors[name] for name, _ in self.published.named_parameters()), self.published)
        rows = list(self.recent)
        length, new_length = (
            replayed_length(step, model, rows)
            for step, model in zip(self.steps, (self.drafter, self.published), strict=True)
        )
        serving = self.swaps[-1].serving if self.swaps else 0
        # Not true for NaN.
        swap = Swap(number, self.num_calls, length, new_length, number if new_length >= length else serving)
        if swap.swapped:
            copy_weights(self.published.parameters(), self.drafter)
        self.swaps.append(swap)
        self.folder.write_verdict(swap)
        return swap

    def _finished(self, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            row = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in row.items()}
            if self.num_texts % self.replay_every == 0:
                self.recent.append(row)
            else:
                self.folder.add_text(row)
            self.num_texts += 1


@torch.no_grad()
def replayed_length(step: TrainingStep, model: PretrainedDrafter, rows: Iterable[dict[str, Any]]) -> float:
    """Mean accepted length of the chain that a drafter drafts from each position of recorded texts, bonus included."""
    leading = []
    for row in rows:
        output = step(model, batch_of([row], MAX_POSITIONS, model.device), training=False)
        hits = (output.correct & output.labelled).int().cumprod(-1).sum(-1)
        leading.append(hits[output.labelled[..., 0]].float())
    return 1 + float(torch.cat(leading).mean())
