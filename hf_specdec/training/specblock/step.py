"""The SpecBlock training step: blocks from every position at once, chained with random cuts.

Position i of a row is a start with the target's feature after token i as condition and token i + 1 as input; slot k
drafts token i + 2 + k. All starts of a row run in one forward, and each later block continues the previous block at a
random cut. A slot counts only if all slots before it are right, as in drafting; the losses are in `losses.py`.
Source: SpecBlock, Section 3.3 and Appendix A. The drafter is in `hf_specdec/drafters/specblock/`, the target's side in
`features.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.drafters.specblock.modeling import BlockOutput, SpecBlockDrafter
from hf_specdec.drafters.specblock.quality import RANK_BOUNDS
from hf_specdec.drafters.vocabulary import check_same_size
from hf_specdec.training.features import TargetReader, TargetStates
from hf_specdec.training.losses import LossName, check_loss
from hf_specdec.training.passes import block_masks, growing_cache
from hf_specdec.training.specblock.losses import BlockLosses, RankLoss, SlotWeights, block_losses
from hf_specdec.training.step import AdaptiveStep, StepOutput


class SpecBlockStep(AdaptiveStep):
    """Loss of one batch of rows for a `SpecBlockDrafter`: Eq. 7, summed over chained blocks.

    Args:
        drafter: the drafter to train.
        target: the frozen target it drafts for.
        num_blocks: chained blocks, including the first.
        rank_start: share of the run's steps before the rank loss is added. The paper has 2,000 steps of 20 epochs.
        rank_start_step: number of steps before it, instead of `rank_start`; None for that share.
        valid_prefix: the mask of Eq. 5; False is an ablation of Table 2.
        slot_weights: see `block_losses`.
        loss: of the draft, see `block_losses`.
        rank_loss: see `block_losses`.
        rank_budget: see `block_losses`.
        cross_position: slots of a later block also see that block's slots at earlier positions, as in the published
            training code. Drafting never sees them.
        window: length of the part of a row to train on, drawn for every batch; None for the whole row. With K entries
            per position, attention is the most expensive part of long rows.
        sparse: compute the heads only at starts that count. The loss is the same, and cheaper if few positions count;
            the shapes vary from batch to batch.

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
        rank_start: float = 0.1,
        rank_start_step: int | None = None,
        valid_prefix: bool = True,
        slot_weights: SlotWeights = "alike",
        loss: LossName = "kl",
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
            ("rank_budget", rank_budget, 1),
            ("window", window, drafter.config.block_size + 2),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}.")
        check_loss(loss)
        if not 0 <= rank_start < 1:
            raise ValueError(f"rank_start={rank_start} must be a share of the steps, at least 0 and less than 1.")
        for name, choice, known in (("rank_loss", rank_loss, RankLoss), ("slot_weights", slot_weights, SlotWeights)):
            if choice not in get_args(known):
                raise ValueError(f"{name}={choice!r} is not known; choose one of {list(get_args(known))}.")
        if drafter.config.rank_classes != len(RANK_BOUNDS) + 1:
            raise ValueError(
                f"The drafter's rank head has {drafter.config.rank_classes} classes, but the labels have "
                f"{len(RANK_BOUNDS) + 1}: ranks up to {', '.join(map(str, RANK_BOUNDS))} and above. Train a drafter "
                f"with rank_classes={len(RANK_BOUNDS) + 1}."
            )
        self.reader = TargetReader(target, drafter.feature_layers(target), last_hidden=True)
        self.drafter = drafter
        self.embed_tokens = target.get_input_embeddings()
        self.num_blocks, self.rank_start, self.rank_start_step = num_blocks, rank_start, rank_start_step
        self.cross_position = cross_position
        self.window, self.sparse = window, sparse
        self.options: dict[str, Any] = {
            "valid_prefix": valid_prefix, "slot_weights": slot_weights, "loss": loss, "rank_loss": rank_loss,
            "rank_budget": rank_budget,
        }  # fmt: skip

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor], *, training: bool) -> StepOutput:
        states = self.reader.of_batch(batch)
        if self.window is not None and self.window < batch["input_ids"].shape[1]:
            batch, states = self._windowed(batch, states, training)
        assert states.last_hidden is not None
        input_ids = batch["input_ids"]
        best_ids, target_logits = self.target_labels(states.last_hidden)
        length = input_ids.shape[1]
        # A start is a token that drafting may start from; a token must follow it.
        starts = torch.arange(1, length + 1, device=input_ids.device)
        start_mask = (starts >= batch["first_anchor"].unsqueeze(1)) & (starts + 1 < batch["length"].unsqueeze(1))
        draftable = self.drafter.t2d.to(best_ids.device)[best_ids]
        logits: list[Tensor] | None = [] if self.keep_logits else None
        position_mask = start_mask & draftable
        # Row i is for the token after the start of position i.
        text_ids = nn.functional.pad(self.draft_ids(input_ids[:, 2:]), (0, 2), value=-1)
        losses = self.chain(
            model, states.features, input_ids, target_logits, start_mask, position_mask, training,
            text_ids=text_ids, refused=self._refused(batch), all_logits=logits,
        )  # fmt: skip

        first = int(self.rank_start * self.num_steps) if self.rank_start_step is None else self.rank_start_step
        rank_weight = 1.0 if not training or self.num_updates >= first else 0.0
        loss = torch.stack([part.draft.sum() + rank_weight * part.rank for part in losses]).sum()
        # Without training all cuts are at the ends of blocks, and the slots of all blocks are one chain; random cuts
        # make them overlap.
        measured = losses[:1] if training else losses
        correct = torch.cat([part.correct for part in measured], -1)
        within = torch.arange(correct.shape[-1], device=input_ids.device)
        rows = torch.arange(length, device=input_ids.device).unsqueeze(-1) + within
        inside = (rows < length).expand(correct.shape)
        rows = rows.clamp(max=length - 1)
        labelled = start_mask.unsqueeze(-1) & start_mask[:, rows] & inside
        # A token outside the draft vocabulary counts as a miss.
        return StepOutput(loss, correct & draftable[:, rows], labelled, None if logits is None else torch.cat(logits))

    def head_logits(self, model: nn.Module, states: Tensor) -> Tensor:
        logits: Tensor = model.heads(states)[0]  # type: ignore[operator]
        return logits

    def head_loss(self, model: nn.Module, states: Tensor, labels: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits, rank_logits = model.heads(states)  # type: ignore[operator]
        best_ids, target_logits = labels
        # Each position is a row with one start and one slot.
        alone = torch.ones_like(best_ids, dtype=torch.bool).unsqueeze(1)
        losses = block_losses(
            logits[:, None, None], rank_logits[:, None, None], target_logits.unsqueeze(1),
            (self.draft_ids(best_ids) >= 0).unsqueeze(1), alone, **self.options,
        )  # fmt: skip
        return losses.draft.sum() + losses.rank, logits

    def draft_ids(self, token_ids: Tensor) -> Tensor:
        t2d = self.drafter.t2d.to(token_ids.device)
        return (t2d.cumsum(0) - 1)[token_ids].where(t2d[token_ids], -1)

    def _windowed(
        self, batch: Mapping[str, Tensor], states: TargetStates, training: bool
    ) -> tuple[dict[str, Tensor], TargetStates]:
        """The same part of all rows: random in training, else from the first position that a row drafts."""
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
        if "refused" in batch:
            columns["refused"] = batch["refused"][:, part]
        return columns, TargetStates(states.features[:, part], states.last_hidden[:, part])

    def _refused(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        """The refused drafts of a recorded batch as `block_losses` expects them: row i is for token i + 2."""
        if "refused" not in batch:
            return None
        refused = batch["refused"][:, 2:]
        return nn.functional.pad(self.draft_ids(refused.clamp(min=0)).where(refused >= 0, -1), (0, 0, 0, 2), value=-1)

    def _draw(self, low: int, high: int, count: int) -> list[int]:
        numbers: list[int] = torch.randint(low, high, (count,), generator=self.generator).tolist()
        return numbers

    @torch.no_grad()
    def target_labels(self, last_hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The target's most probable token and its logits over the draft vocabulary, for the token after each start.

        Row i belongs to the token after token i + 1, which is the start of position i.

        Returns:
            best_ids [batch, positions] int64 over the whole vocabulary, logits [batch, positions, draft_vocab] float32.
        """
        return self.head_labels(torch.cat([last_hidden[:, 1:], last_hidden[:, -1:]], 1))

    @torch.no_grad()
    def head_labels(self, target_hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.reader.head(target_hidden)
        draft_ids = torch.arange(len(self.drafter.d2t), device=logits.device) + self.drafter.d2t.to(logits.device)
        return logits.argmax(-1), logits[..., draft_ids]

    def chain(
        self,
        model: nn.Module,
        features: Tensor,
        input_ids: Tensor,
        target_logits: Tensor,
        start_mask: Tensor,
        position_mask: Tensor,
        training: bool,
        cuts: Sequence[int] | None = None,
        text_ids: Tensor | None = None,
        refused: Tensor | None = None,
        all_logits: list[Tensor] | None = None,
    ) -> list[BlockLosses]:
        """Runs all blocks and returns the losses of each.

        Args:
            model: the drafter, or its wrapper in a distributed run.
            features: [batch, positions, taps * hidden].
            input_ids: [batch, positions] int64, the row's tokens; the last one is repeated beyond the end.
            target_logits: [batch, positions, draft_vocab] float32, see `target_labels`.
            start_mask: [batch, positions] bool.
            position_mask: [batch, positions] bool.
            training: draw the cuts; otherwise every block continues at the end of the previous one.
            cuts: slots kept of every block except the last; None to draw them from 1 to K.
            text_ids: see `block_losses`.
            refused: see `block_losses`.
            all_logits: a list to which the logits [positions, draft_vocab] of all slots of `start_mask` are appended.
        """
        config = self.drafter.config
        batch, positions, _ = features.shape
        slots, device = config.block_size, input_ids.device
        if cuts is None:
            # Always drawn on the CPU, so that the cuts do not depend on the device.
            drawn = self._draw(1, slots + 1, self.num_blocks - 1) if training else []
            cuts = drawn or [slots] * (self.num_blocks - 1)
        masks = block_masks(positions, slots, cuts, cross_position=self.cross_position, device=device)
        stored = growing_cache(config.num_hidden_layers)
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
            if all_logits is not None:
                all_logits.append((output.logits if self.sparse else output.logits[start_mask]).flatten(0, 1))
            compute = sparse_block_losses if self.sparse else block_losses
            losses.append(
                compute(
                    output.logits, output.rank_logits, target_logits, position_mask, start_mask, offset=offset,
                    text_ids=text_ids, refused=refused, **self.options,
                )
            )  # fmt: skip
            if block < len(cuts):
                conditions = self.drafter.condition_of(output.hidden[:, :, cuts[block] - 1])
                offset += cuts[block]
        return losses


def sparse_block_losses(
    logits: Tensor,
    rank_logits: Tensor,
    target_logits: Tensor,
    position_mask: Tensor,
    start_mask: Tensor,
    *,
    offset: int,
    text_ids: Tensor | None = None,
    refused: Tensor | None = None,
    **options: Any,
) -> BlockLosses:
    """`block_losses` for heads that were computed at the starts only; the losses are the same.

    `logits` [starts, slots, draft_vocab] and `rank_logits` [starts, slots, classes] belong to the True positions of
    `start_mask`, in order; see `block_losses` for the other arguments.
    """
    slots, length = logits.shape[1], target_logits.shape[1]
    row, position = start_mask.nonzero(as_tuple=True)
    # Each start becomes a row, with the target's logits for its slots.
    ahead = position.unsqueeze(1) + torch.arange(offset + slots, device=position.device)
    at = row.unsqueeze(1), ahead.clamp(max=length - 1)
    losses = block_losses(
        logits.unsqueeze(1), rank_logits.unsqueeze(1), target_logits[at], position_mask[at] & (ahead < length),
        torch.ones_like(row, dtype=torch.bool).unsqueeze(1), offset=offset, length=slots,
        text_ids=None if text_ids is None else text_ids[at].where(ahead < length, -1),
        refused=None if refused is None else refused[at], **options,
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
