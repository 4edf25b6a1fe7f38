"""Aurora's other process: trains a drafter on the rounds that a server records, and publishes its weights.

    python -m hf_specdec.adaptation.aurora_trainer rounds --target TARGET --drafter DRAFTER

It runs until it is stopped, or for --minutes. Target and drafter are those that serve, the folder is that of the
`AuroraDrafter`. The loss is that of the method's recipe at the positions that the target wrote, with the refused drafts
as negatives (`refusal_loss`). Half of each batch are the newest texts, half are drawn from all that the folder holds.
Where weights are refused because much less would be accepted, training continues from the last ones that served, with a
new optimizer; after others it goes on, since a few more steps may make them better.
Source: arXiv 2602.06932; the other process is described in `aurora.py`.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_specdec
from hf_specdec.adaptation.aurora import MAX_POSITIONS, RoundsFolder
from hf_specdec.adaptation.base import recipe_for
from hf_specdec.adaptation.learner import batch_of, copy_weights, gradient_step, new_optimizer, weights_of
from hf_specdec.adaptation.policy import check_at_least
from hf_specdec.decoding.speed.cudnn import without_cudnn_attention
from hf_specdec.hub.pretrained import PretrainedDrafter

__all__ = ["AuroraTrainer", "main"]

WAIT_S = 0.2  # between looks for new texts
MUCH_WORSE = 0.95  # a replayed length below this share of the serving weights'


@dataclass(frozen=True)
class Publication:
    """What was published.

    Attributes:
        number: of the publication, from 1.
        loss: mean over the steps since the one before.
        texts: recorded texts that were held then.
    """

    number: int
    loss: float
    texts: int


class AuroraTrainer:
    """Trains a drafter on recorded texts.

    Args:
        target: the frozen target; its head and embeddings are read, and no forward of it runs.
        drafter: the drafter as it begins to serve. It is trained in place, in float32.
        folder: shared with the server.
        learning_rate: of AdamW.
        steps: gradient steps between publications.
        batch_size: texts of a step.
        fresh: new texts between publications; without any the trainer waits.
        seed: of the choice of texts and of the step's random choices.

    Raises:
        ValueError: the drafter's method cannot be trained further, or an argument is out of range.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: PretrainedDrafter,
        folder: str | Path,
        *,
        learning_rate: float = 3e-4,
        steps: int = 16,
        batch_size: int = 8,
        fresh: int = 8,
        seed: int = 0,
    ) -> None:
        check_at_least(1, steps=steps, batch_size=batch_size, fresh=fresh)
        if not 0 < learning_rate < math.inf:
            raise ValueError(f"learning_rate={learning_rate!r} must be a finite number above 0.")
        self.drafter = drafter.float().train()
        self.step = recipe_for(drafter, "further")(drafter, target)
        self.folder = RoundsFolder(folder)
        self.learning_rate, self.steps, self.batch_size, self.fresh = learning_rate, steps, batch_size, fresh
        self.chosen = random.Random(seed)
        torch.manual_seed(seed)
        self.texts: dict[str, dict[str, Any]] = {}  # by file, the oldest first
        self.unseen = 0
        self.serving = weights_of(drafter)  # the last ones that served
        self.published: dict[int, list[Tensor]] = {}  # those that may come to serve
        self.heeded = 0  # the publication of the last verdict
        self.optimizer = new_optimizer(self.drafter, self.learning_rate)

    def publish(self) -> Publication | None:
        """Trains on what is recorded and publishes; None if there are too few new texts."""
        self._read()
        if self.unseen < self.fresh:
            return None
        self._heed_verdict()
        newest = list(self.texts.values())[-max(self.unseen, self.batch_size // 2) :]
        self.unseen = 0
        losses = [self._step(newest) for _ in range(self.steps)]
        weights = weights_of(self.drafter)
        if not all(map(math.isfinite, losses)) or not all(bool(each.isfinite().all()) for each in weights):
            self._go_back()
            return None
        number = self.folder.add_weights(self.drafter)
        self.published[number] = weights
        return Publication(number, sum(losses) / len(losses), len(self.texts))

    def _read(self) -> None:
        """Takes in new texts, and drops those that the folder no longer holds."""
        files = {file.name: file for file in self.folder.files("text")}
        for name in self.texts.keys() - files.keys():
            del self.texts[name]
        for name, file in files.items():
            if name not in self.texts and (row := self.folder.read_text(file)) is not None:
                self.texts[name] = row
                self.unseen += 1

    @without_cudnn_attention()
    def _step(self, newest: Sequence[dict[str, Any]]) -> float:
        half = self.batch_size // 2
        rows = self.chosen.choices(newest, k=half) + self.chosen.choices(
            list(self.texts.values()), k=self.batch_size - half
        )
        loss = self.step(self.drafter, batch_of(rows, MAX_POSITIONS, self.drafter.device), training=True).loss
        gradient_step(self.drafter, self.optimizer, loss)
        return loss.item()

    def _heed_verdict(self) -> None:
        verdict = self.folder.verdict()
        if verdict is None or verdict.number <= self.heeded:
            return
        self.heeded = verdict.number
        self.serving = self.published.get(verdict.serving, self.serving)
        self.published = {number: kept for number, kept in self.published.items() if number > verdict.serving}
        if not verdict.new_length >= MUCH_WORSE * verdict.length:  # or NaN
            self._go_back()

    def _go_back(self) -> None:
        copy_weights(self.serving, self.drafter)
        self.optimizer = new_optimizer(self.drafter, self.learning_rate)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_specdec.adaptation.aurora_trainer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="shared with the server")
    parser.add_argument("--target", required=True, help="Hub id or folder of the target that serves")
    parser.add_argument("--drafter", required=True, help="Hub id or folder of the drafter that serves")
    parser.add_argument("--minutes", type=float, default=math.inf, help="default: until it is stopped")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=16, help="gradient steps between publications")
    parser.add_argument("--batch-size", type=int, default=8, help="texts of a step")
    parser.add_argument("--fresh", type=int, default=8, help="new texts between publications")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype="auto").to(options.device).eval()
    drafter: Any = hf_specdec.load_drafter(options.drafter, target)
    trainer = AuroraTrainer(
        target, drafter, options.folder, learning_rate=options.learning_rate, steps=options.steps,
        batch_size=options.batch_size, fresh=options.fresh,
    )  # fmt: skip
    ends = time.monotonic() + 60 * options.minutes
    while True:
        publication = trainer.publish()
        if publication is not None:
            print(f"{publication.number}: loss {publication.loss:.3f}, {publication.texts} texts", flush=True)
        if time.monotonic() >= ends:
            return
        if publication is None:
            time.sleep(WAIT_S)


if __name__ == "__main__":
    main()
