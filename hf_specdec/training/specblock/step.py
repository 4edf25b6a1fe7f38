"""The SpecBlock training step: blocks from every position at once, chained with random cuts.

Position i of a row is a start with the target's feature after token i as condition and token i + 1 as input; slot k is
for token i + 2 + k. All starts of a row run in one forward, and each later block continues the block before at a cut
that is drawn for it. A slot counts only where all slots before it were right, as the drafter will meet it: the losses
are in `losses.py`. Source: SpecBlock, Section 3.3 and Appendix A. The drafter is in `hf_specdec/drafters/specblock/`,
the target's side in `features.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.drafters.specblock.configuration import RANK_BOUNDS
from hf_specdec.drafters.specblock.modeling import BlockOutput, SpecBlockDrafter
from hf_specdec.drafters.vocabulary import check_same_size
from hf_specdec.training.features import TargetReader, TargetStates
from hf_specdec.training.passes import GradientStore, block_masks
from hf_specdec.training.specblock.losses import BlockLosses, RankLoss, SlotWeights, block_losses
from hf_specdec.training.step import AdaptiveStep, StepOutput


class SpecBlockStep(AdaptiveStep):
    """Loss of one batch of rows for a `SpecBlockDrafter`: Eq. 7, summed over chained blocks.

    Args:
        drafter: the drafter in training.
        target: the frozen target it drafts for.
        num_blocks: chained blocks; the first and those that continue it at random cuts.
        rank_start_step: optimizer steps before the rank loss counts.
        valid_prefix: the mask of Eq. 5; off is an ablation of Table 2.
        slot_weights: see `block_losses`.
        top_k: see `block_losses`.
        rank_loss: see `block_losses`.
        rank_budget: see `block_losses`.
        cross_position: slots of a later block also see that block's slots at earlier positions, as in the published
            training code. Drafting never sees them.
        window: positions of a row that are trained on, drawn anew for every batch; None for all. The K entries per
            position make attention the most expensive part of long rows.
        sparse: read the heads only at starts that count. The loss is the same, and cheaper where few of the positions
            do; the shapes vary from batch to batch.

    Raises:
        ValueError: the drafter does not fit the target, or an argument is out of range.
    """

    heads = ("lm_head.", "rank_head.")
    sparse = False

    def __init__(
        self,
        drafter: SpecBlockDrafter,
        target: PreTrainedModel,
        *,
        num_blocks: int = 2,
        rank_start_step: int = 2000,
        valid_prefix: bool = True,
        slot_weights: SlotWeights = "alike",
        top_k: int | None = None,
        rank_loss: RankLoss = "paper",
        rank_budget: int | None = None,
        cross_position: bool = False,
        window: int | None = None,
        sparse: bool = False,
    ) -> None:
        drafter.check_target(target)
        check_same_size(drafter, target, "training")
        for name, value, least in (
            ("num_blocks", num_blocks, 1),
            ("rank_start_step", rank_start_step, 0),
            ("rank_budget", rank_budget, 1),
            ("window", window, drafter.config.block_size + 2),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}.")
        for name, choice, known in (("rank_loss", rank_loss, RankLoss), ("slot_weights", slot_weights, SlotWeights)):
            if choice not in get_args(known):
                raise ValueError(f"{name}={choice!r} is not known; choose one of {list(get_args(known))}.")
        if drafter.config.rank_classes != len(RANK_BOUNDS) + 1:
            raise ValueError(
                f"The drafter's rank head has {drafter.config.rank_classes} classes, but labels have "
                f"{len(RANK_BOUNDS) + 1}: ranks up to {', '.join(map(str, RANK_BOUNDS))} and beyond."
            )
        self.reader = TargetReader(target, drafter.feature_layers(target), last_hidden=True)
        self.drafter = drafter
        self.embed_tokens = target.get_input_embeddings()
        self.num_blocks, self.rank_start_step = num_blocks, rank_start_step
        self.cross_position = cross_position
        self.window, self.sparse = window, sparse
        self.options: dict[str, Any] = {
            "valid_prefix": valid_prefix, "slot_weights": slot_weights, "top_k": top_k, "rank_loss": rank_loss,
            "rank_budget": rank_budget,
        }  # fmt: skip

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor], *, training: bool) -> StepOutput:
        states = self.reader.of_batch(batch)
        if self.window is not None and self.window < batch["input_ids"].shape[1]:
            batch, states = self._windowed(batch, states, training)
        assert states.last_hidden is not None
        input_ids = batch["input_ids"]
        best_ids, target_probs = self.target_law(states.last_hidden)
        length = input_ids.shape[1]
        # A start is a token that somebody drafts from, and something must follow it.
        starts = torch.arange(1, length + 1, device=input_ids.device)
        start_mask = (starts >= batch["first_anchor"].unsqueeze(1)) & (starts + 1 < batch["length"].unsqueeze(1))
        sayable = self.drafter.t2d.to(best_ids.device)[best_ids]
        kept: list[Tensor] | None = [] if self.keep_logits else None
        losses = self.chain(
            model, states.features, input_ids, target_probs, start_mask, start_mask & sayable, training, kept=kept
        )

        rank_weight = 1.0 if not training or self.num_updates >= self.rank_start_step else 0.0
        loss = torch.stack([part.draft.sum() + rank_weight * part.rank for part in losses]).sum()
        # With cuts at the end of every block the slots of all blocks are one chain; a random cut makes them overlap.
        shown = losses[:1] if training else losses
        correct = torch.cat([part.correct for part in shown], -1)
        within = torch.arange(correct.shape[-1], device=input_ids.device)
        rows = torch.arange(length, device=input_ids.device).unsqueeze(-1) + within
        inside = (rows < length).expand(correct.shape)
        rows = rows.clamp(max=length - 1)
        labelled = start_mask.unsqueeze(-1) & start_mask[:, rows] & inside
        # A token that the drafter cannot say is one that it gets wrong.
        return StepOutput(loss, correct & sayable[:, rows], labelled, None if kept is None else torch.cat(kept))

    def head_logits(self, model: nn.Module, states: Tensor) -> Tensor:
        logits: Tensor = model.heads(states)[0]  # type: ignore[operator]
        return logits

    def head_loss(self, model: nn.Module, states: Tensor, law: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits, rank_logits = model.heads(states)  # type: ignore[operator]
        best_ids, target_probs = law
        # Each position stands alone, a row with one start and one slot.
        alone = torch.ones_like(best_ids, dtype=torch.bool).unsqueeze(1)
        losses = block_losses(
            logits[:, None, None], rank_logits[:, None, None], target_probs.unsqueeze(1),
            (self.draft_ids(best_ids) >= 0).unsqueeze(1), alone, **self.options,
        )  # fmt: skip
        return losses.draft.sum() + losses.rank, logits

    def draft_ids(self, token_ids: Tensor) -> Tensor:
        t2d = self.drafter.t2d.to(token_ids.device)
        return (t2d.cumsum(0) - 1)[token_ids].where(t2d[token_ids], -1)

    def _windowed(
        self, batch: Mapping[str, Tensor], states: TargetStates, training: bool
    ) -> tuple[dict[str, Tensor], TargetStates]:
        """The same columns of all rows; without training, the ones after the shortest beginning."""
        assert self.window is not None
        assert states.last_hidden is not None
        earliest = max(0, int(batch["first_anchor"].min()) - 1)
        latest = max(earliest, int(batch["length"].max()) - self.window)
        start = self._draw(earliest, latest + 1, 1)[0] if training else earliest
        part = slice(start, start + self.window)
        columns = {
            "input_ids": batch["input_ids"][:, part],
            "first_anchor": batch["first_anchor"] - start,
            "length": (batch["length"] - start).clamp(max=self.window),
        }
        return columns, TargetStates(states.features[:, part], states.last_hidden[:, part])

    def _draw(self, low: int, high: int, count: int) -> list[int]:
        numbers: list[int] = torch.randint(low, high, (count,), generator=self.generator).tolist()
        return numbers

    @torch.no_grad()
    def target_law(self, last_hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The target's choice and its law over the draft vocabulary, for the token after each start.

        Row i is what follows token i + 1, the start of position i.

        Returns:
            best_ids [batch, positions] int64 over the whole vocabulary, probs [batch, positions, draft_vocab] float32.
        """
        return self.head_law(torch.cat([last_hidden[:, 1:], last_hidden[:, -1:]], 1))

    @torch.no_grad()
    def head_law(self, target_hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.reader.head(target_hidden)
        draft_ids = torch.arange(len(self.drafter.d2t), device=logits.device) + self.drafter.d2t.to(logits.device)
        return logits.argmax(-1), logits[..., draft_ids].softmax(-1)

    def chain(
        self,
        model: nn.Module,
        features: Tensor,
        input_ids: Tensor,
        target_probs: Tensor,
        start_mask: Tensor,
        position_mask: Tensor,
        training: bool,
        cuts: Sequence[int] | None = None,
        kept: list[Tensor] | None = None,
    ) -> list[BlockLosses]:
        """Runs all blocks and returns the losses of each.

        Args:
            model: the drafter, or what a distributed run wrapped around it.
            features: [batch, positions, taps * hidden].
            input_ids: [batch, positions] int64, the row's tokens; past its end the last one stands in.
            target_probs: [batch, positions, draft_vocab] float32, see `target_law`.
            start_mask: [batch, positions] bool.
            position_mask: [batch, positions] bool.
            training: draw cuts; else every block goes on at the end of the one before.
            cuts: slots kept of every block but the last; drawn from 1 to K where None.
            kept: receives the logits [positions, draft_vocab] of all slots that starts which count have.
        """
        config = self.drafter.config
        batch, positions, _ = features.shape
        slots, device = config.block_size, input_ids.device
        if cuts is None:
            # On the CPU whatever the device: the cuts of a run do not depend on where it runs.
            drawn = self._draw(1, slots + 1, self.num_blocks - 1) if training else []
            cuts = drawn or [slots] * (self.num_blocks - 1)
        masks = block_masks(positions, slots, cuts, cross_position=self.cross_position, device=device)
        stored = GradientStore(config.num_hidden_layers)
        places = torch.arange(1, positions + 1, device=device)
        conditions, offset = features.to(next(model.parameters()).dtype), 0
        losses = []
        for block, mask in enumerate(masks):
            following = (places + offset).clamp(max=input_ids.shape[1] - 1)
            with torch.no_grad():
                embeddings = self.embed_tokens(input_ids[:, following]).to(conditions.dtype)
            at = places + offset if block and config.block_positions == "path" else places
            output: BlockOutput = model(
                conditions, embeddings, at.expand(batch, -1), from_target=block == 0, mask=mask, cache=stored,
                read=start_mask if self.sparse else None,
            )  # fmt: skip
            if kept is not None:
                kept.append((output.logits if self.sparse else output.logits[start_mask]).flatten(0, 1))
            compute = sparse_block_losses if self.sparse else block_losses
            losses.append(
                compute(
                    output.logits, output.rank_logits, target_probs, position_mask, start_mask, offset=offset,
                    **self.options,
                )
            )  # fmt: skip
            if block < len(cuts):
                conditions = self.drafter.condition_of(output.hidden[:, :, cuts[block] - 1])
                offset += cuts[block]
        return losses


def sparse_block_losses(
    logits: Tensor,
    rank_logits: Tensor,
    target_probs: Tensor,
    position_mask: Tensor,
    start_mask: Tensor,
    *,
    offset: int,
    **options: Any,
) -> BlockLosses:
    """`block_losses` where the heads were read at the starts alone; both give the same losses.

    `logits` [starts, slots, draft_vocab] and `rank_logits` [starts, slots, classes] are those of the places in
    `start_mask`, in order; all other arguments are as there.
    """
    slots, length = logits.shape[1], target_probs.shape[1]
    row, place = start_mask.nonzero(as_tuple=True)
    # Each start becomes a row of its own, with the rows of the target that its slots are for.
    ahead = place.unsqueeze(1) + torch.arange(offset + slots, device=place.device)
    at = row.unsqueeze(1), ahead.clamp(max=length - 1)
    losses = block_losses(
        logits.unsqueeze(1), rank_logits.unsqueeze(1), target_probs[at], position_mask[at] & (ahead < length),
        torch.ones_like(row, dtype=torch.bool).unsqueeze(1), offset=offset, length=slots, **options,
    )  # fmt: skip

    def spread(found: Tensor, empty: Any) -> Tensor:
        whole = torch.full((*start_mask.shape, found.shape[-1]), empty, dtype=found.dtype, device=found.device)
        whole[start_mask] = found.squeeze(1)
        return whole

    return replace(
        losses,
        correct=spread(losses.correct, False),
        valid=spread(losses.valid, False),
        rank_classes=spread(losses.rank_classes, -1),
    )
