"""The SpecBlock training step: blocks from every position at once, chained with random cuts, and two masked losses.

Position i of a row is a start with the target's feature after token i as condition and token i + 1 as input; slot k is
for token i + 2 + k. All starts of a row run in one forward, and each later block continues the block before at a cut
that is drawn for it. A slot counts only where all slots before it were right, as the drafter will meet it.
Source: SpecBlock, Section 3.3 and Appendix A; where the published code does otherwise, an option says so. The drafter
is in `hf_specdec/drafters/specblock/`, the target's side in `features.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.decoding.slices import decoder_layers
from hf_specdec.drafters.specblock.configuration import RANK_BOUNDS, SpecBlockConfig, default_target_layer_ids
from hf_specdec.drafters.specblock.modeling import BlockOutput, SpecBlockDrafter
from hf_specdec.drafters.specblock.quality import rank_classes
from hf_specdec.training.features import TargetReader, TargetStates
from hf_specdec.training.recipe import Recipe, Rows, add_shape_arguments, register_recipe
from hf_specdec.training.step import AdaptiveStep, StepOutput

RankLoss = Literal["paper", "published"]
SlotWeights = Literal["alike", "by_count"]


def smoothed_classes(num_classes: int) -> Tensor:
    """Row t: the soft label of bucket t. Mass falls with distance, faster towards better buckets (published code).

    Example:
        >>> smoothed_classes(2)
        tensor([[0.8000, 0.2000],
                [0.1000, 0.9000]])
    """
    classes = torch.arange(num_classes)
    ahead = (classes - classes.unsqueeze(1)).float()
    weights = (1 + torch.where(ahead >= 0, ahead, -2 * ahead)) ** -2
    return weights / weights.sum(1, keepdim=True)


@dataclass(frozen=True)
class BlockLosses:
    """Losses of one block of slots over all starts.

    Attributes:
        draft: [slots] float32, Eq. 6 of each slot.
        rank: scalar float32.
        correct: [batch, positions, slots] bool, whether a slot's likeliest token is the target's likeliest in the
            draft vocabulary; False past the end.
        valid: [batch, positions, slots + 1] bool, Eq. 5: valid[..., k] is whether slots before k were all right.
        rank_classes: [batch, positions, slots] int64, true buckets; -1 where the rank loss does not count them.
    """

    draft: Tensor
    rank: Tensor
    correct: Tensor
    valid: Tensor
    rank_classes: Tensor


def block_losses(
    logits: Tensor,
    rank_logits: Tensor,
    target_probs: Tensor,
    position_mask: Tensor,
    start_mask: Tensor,
    *,
    offset: int = 0,
    valid_prefix: bool = True,
    slot_weights: SlotWeights = "alike",
    top_k: int | None = None,
    rank_loss: RankLoss = "paper",
    rank_budget: int | None = None,
) -> BlockLosses:
    """Draft and rank loss of one block (Section 3.3).

    Args:
        logits: [batch, positions, slots, draft_vocab] float32.
        rank_logits: [batch, positions, slots, classes] float32.
        target_probs: [batch, rows, draft_vocab] float32, the target's over the draft vocabulary. Slot k of position i
            belongs to row i + offset + k; rows past the end may be missing.
        position_mask: [batch, rows] bool, rows that can be learned: real text, best token in the draft vocabulary.
        start_mask: [batch, positions] bool, positions that count as starts.
        offset: tokens that earlier blocks of the chain have drafted.
        valid_prefix: apply the mask of Eq. 5; without it every slot counts (Table 2).
        slot_weights: "alike" has every slot's mean in the sum, Eq. 6. "by_count" divides the sums of all slots by the
            positions of the first: in a small batch a late slot has a handful of valid positions, or none, and their
            mean is mostly noise, as loud as the first slot's hundreds.
        top_k: the draft loss looks at the target's likeliest tokens only, with their probabilities as they are.
        rank_loss: "paper" is cross-entropy on the positions of the draft loss. "published" has smoothed labels, weighs
            1 + distance and once more the distance to worse buckets than said, and follows a mask of its own, which
            ends a path where the rank head was wrong.
        rank_budget: with it, a bucket of a slot counts as this many examples at most.
    """
    _, positions, slots, _ = logits.shape
    missing = positions + offset + slots - target_probs.shape[1]
    if missing > 0:
        target_probs = torch.nn.functional.pad(target_probs, (0, 0, 0, missing))
        position_mask = torch.nn.functional.pad(position_mask, (0, missing))
    labels = smoothed_classes(rank_logits.shape[-1]).to(logits.device)
    if rank_loss == "paper":
        labels = torch.eye(len(labels), device=logits.device)
    best_ids = target_probs.argmax(-1)
    path = start_mask & position_mask[:, :positions]
    rank_path = path
    valid, draft, correct, classes = [path], [], [], []
    rank_sum, rank_count = logits.new_zeros(()), logits.new_zeros(())
    # Not indexed slot by slot: each index would fill a gradient as large as all logits with zeros.
    for slot, (at_slot, said) in enumerate(zip(logits.unbind(2), rank_logits.unbind(2), strict=True)):
        rows = slice(offset + slot, offset + slot + positions)
        # The last positions have no room for later slots.
        room = torch.arange(positions, device=logits.device) < positions - slot
        there = position_mask[:, rows] & room
        probs = target_probs[:, rows]
        logprobs = at_slot.log_softmax(-1)
        if top_k is None:
            entropy = -(probs * logprobs).sum(-1)
        else:
            likeliest = probs.topk(top_k, dim=-1)
            entropy = -(likeliest.values * logprobs.gather(-1, likeliest.indices)).sum(-1)
        mask = there & path
        if slot == 0 or slot_weights == "alike":
            normaliser = mask.sum().clamp(min=1)
        draft.append((entropy * mask).sum() / normaliser)
        token_ids = best_ids[:, rows]
        right = at_slot.argmax(-1) == token_ids
        correct.append(right & room)

        truth = rank_classes(at_slot.detach(), token_ids)
        mask = there & (path if rank_loss == "paper" else rank_path)
        rank_entropy = -(labels[truth] * said.log_softmax(-1)).sum(-1)
        weight = mask.float()
        if rank_budget is not None:
            seen = torch.stack([(mask & (truth == kind)).sum() for kind in range(len(labels))])
            weight = weight * (rank_budget / seen.clamp(min=1)).clamp(max=1)[truth]
        if rank_loss == "published":
            distance = truth - said.argmax(-1)
            rank_entropy = rank_entropy * (1 + distance.abs() + distance.clamp(min=0))
        rank_sum = rank_sum + (rank_entropy * weight).sum()
        rank_count = rank_count + weight.sum()
        classes.append(truth.where(mask, -1))

        if valid_prefix:
            path = path & (right | ~room)
            rank_path = rank_path & ((said.argmax(-1) == truth) | ~room)
        valid.append(path)
    return BlockLosses(
        torch.stack(draft),
        rank_sum / rank_count.clamp(min=1e-6),
        torch.stack(correct, -1),
        torch.stack(valid, -1),
        torch.stack(classes, -1),
    )


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

    Raises:
        ValueError: the drafter does not fit the target, or an argument is out of range.
    """

    heads = ("lm_head.", "rank_head.")

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
    ) -> None:
        drafter.check_target(target)
        for name, value, least in (
            ("num_blocks", num_blocks, 1),
            ("rank_start_step", rank_start_step, 0),
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
        self.window = window
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

    def head_loss(self, model: nn.Module, states: Tensor, target_hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits, rank_logits = model.heads(states)  # type: ignore[operator]
        best_ids, target_probs = self._law(target_hidden)
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
        earliest = int(batch["first_anchor"].min()) - 1
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
        return self._law(torch.cat([last_hidden[:, 1:], last_hidden[:, -1:]], 1))

    @torch.no_grad()
    def _law(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.reader.head(hidden)
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
                conditions, embeddings, at.expand(batch, -1), from_target=block == 0, mask=mask, cache=stored
            )
            if kept is not None:
                kept.append(output.logits[start_mask].flatten(0, 1))
            losses.append(
                block_losses(
                    output.logits, output.rank_logits, target_probs, position_mask, start_mask, offset=offset,
                    **self.options,
                )
            )  # fmt: skip
            if block < len(cuts):
                conditions = self.drafter.condition_of(output.hidden[:, :, cuts[block] - 1])
                offset += cuts[block]
        return losses


def block_masks(
    positions: int,
    slots: int,
    cuts: Sequence[int],
    *,
    cross_position: bool = False,
    device: torch.device | None = None,
) -> list[Tensor | None]:
    """Per chained block what its slots see: [1, 1, positions * slots, blocks so far * positions * slots] bool.

    The rules of drafting (Figure 3), for all positions at once: of the first block all slots of earlier positions; of
    every block before, the slots up to the cut at the same position; of the own block, slots up to itself. None for
    the first block, whose order is plainly causal.

    Args:
        positions: starts of a row.
        slots: K.
        cuts: slots kept of every block but the last.
        cross_position: see `SpecBlockStep`.
        device: of the masks.
    """
    order = torch.arange(positions * slots, device=device)
    place, slot = order // slots, order % slots
    earlier = place.unsqueeze(1) > place
    same = place.unsqueeze(1) == place
    own = same & (slot.unsqueeze(1) >= slot)
    if cross_position:
        own = own | earlier
    masks: list[Tensor | None] = [None]
    for block in range(1, len(cuts) + 1):
        parts = [same & (slot < cut) for cut in cuts[:block]]
        parts[0] = parts[0] | earlier
        masks.append(torch.cat([*parts, own], 1)[None, None])
    return masks


class GradientStore:
    """Keys and values of earlier blocks, joined with their gradients: what training has in place of a cache."""

    def __init__(self, num_layers: int) -> None:
        self.layers = [_GradientLayer() for _ in range(num_layers)]


class _GradientLayer:
    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys.append(keys)
        self.values.append(values)
        return torch.cat(self.keys, 2), torch.cat(self.values, 2)


def frequent_tokens(rows: Iterable[Mapping[str, Any]], size: int, vocab_size: int) -> tuple[Tensor, float]:
    """The draft vocabulary: the most frequent tokens of the training text, as FR-Spec chooses them.

    Args:
        rows: with the columns of `data.py`; padding is not counted.
        size: tokens wanted.
        vocab_size: of the target. Ids that never occur fill up in order of their number.

    Returns:
        ids [size] int64, ascending, and the share of the text's tokens that they cover, from 0 to 1.

    Raises:
        ValueError: `size` is not between 1 and `vocab_size`.

    Example:
        >>> frequent_tokens([{"input_ids": [5, 5, 2, 7, 0], "length": 4}], 2, 10)
        (tensor([2, 5]), 0.75)
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(
            f"A draft vocabulary of {size} tokens cannot be chosen from {vocab_size}; choose 1 to {vocab_size}."
        )
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for row in rows:
        counts += torch.bincount(torch.as_tensor(row["input_ids"])[: int(row["length"])], minlength=vocab_size)
    chosen = counts.argsort(descending=True, stable=True)[:size].sort().values
    return chosen, float(counts[chosen].sum() / counts.sum().clamp(min=1))


def new_drafter(
    target: PreTrainedModel,
    vocabulary: Tensor,
    *,
    num_layers: int = 2,
    block_size: int = 4,
    target_layer_ids: Sequence[int] | None = None,
    intermediate_size: int | None = None,
    prefix_broadcast: bool = True,
    layer_wise_shift: bool = True,
    warm_start: bool = False,
) -> SpecBlockDrafter:
    """A SpecBlock drafter with random weights that fits a target; its layers have the target's shape.

    Args:
        target: the model to draft for.
        vocabulary: [draft_vocab] int64, ascending target ids that it can say; see `frequent_tokens`.
        num_layers: L.
        block_size: K.
        target_layer_ids: target layers to read; the published three where None.
        intermediate_size: of the MLPs; by default the target's.
        prefix_broadcast: see `SpecBlockConfig`; off is an ablation of Table 2.
        layer_wise_shift: likewise.
        warm_start: begin with the target's final norm and the rows of its head that the drafter can say, and with
            projections that pass states on: means of the taps and of condition, token and query, a slot's own state in
            place of the shift. The paper trains all from scratch (A.1), which short trainings cannot afford.
    """
    config = target.config.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    modules = dict(decoder_layers(target)[0].named_modules())
    query_norm = modules.get("self_attn.q_norm")
    draft_config = SpecBlockConfig(
        diffspec_draft_token_num=block_size,
        draft_vocab_size=len(vocabulary),
        vocab_size=target.get_input_embeddings().num_embeddings,
        target_layer_ids=list(target_layer_ids or default_target_layer_ids(config.num_hidden_layers)),
        target_name_or_path=target.name_or_path or None,
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size or config.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        draft_head_dim=head_dim,
        # Norms per head, as in Qwen3; others have none, or one over all heads.
        qk_norm=query_norm is not None and list(query_norm.weight.shape) == [head_dim],
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=config.rope_parameters,
        prefix_broadcast=prefix_broadcast,
        layer_wise_shift=layer_wise_shift,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
    )
    drafter = SpecBlockDrafter(draft_config)
    drafter.set_vocabulary(vocabulary)
    drafter.check_target(target)
    if warm_start:
        _pass_states_on(drafter)
        with torch.no_grad():
            drafter.lm_head.weight.copy_(target.get_output_embeddings().weight[vocabulary.to(target.device)])
            drafter.norm.weight.copy_(target.get_decoder().norm.weight)
    return drafter


@torch.no_grad()
def _pass_states_on(drafter: SpecBlockDrafter) -> None:
    """Adds to the random weights of the projections what makes each begin as a mean of its inputs."""
    entry = drafter.input_layer
    for projection in (entry.condition_proj, entry.fuse):
        width = projection.out_features
        parts = projection.in_features // width
        if projection.in_features == parts * width:  # taps may be of another width than the drafter
            projection.weight.add_(torch.eye(width).repeat(1, parts) / parts)
    for shift in drafter.shift_proj:
        assert isinstance(shift, nn.Linear)
        width = drafter.config.hidden_size
        shift.weight[:, :width].add_(torch.eye(width))


def _add_arguments(group: argparse._ArgumentGroup) -> None:
    switch = argparse.BooleanOptionalAction
    add_shape_arguments(group)
    group.add_argument("--block-size", type=int, default=4, help="tokens that a block drafts")
    group.add_argument("--draft-vocab", type=int, default=32000, help="tokens that the drafter can say")
    group.add_argument("--prefix-broadcast", action=switch, default=True)
    group.add_argument("--layer-wise-shift", action=switch, default=True)
    group.add_argument("--warm-start", action=switch, default=False, help="begin with the target's head")
    group.add_argument("--window", type=int, help="positions of a row to train on, drawn anew each step; default: all")
    group.add_argument("--blocks", type=int, default=2, help="chained blocks of a start")
    group.add_argument("--valid-prefix", action=switch, default=True)
    group.add_argument("--slot-weights", choices=get_args(SlotWeights), default="alike", help="by_count: small batches")
    group.add_argument("--rank-start-step", type=int, default=2000, help="first step of the rank loss")
    group.add_argument("--rank-loss", choices=["paper", "published"], default="paper")
    group.add_argument("--rank-budget", type=int, help="most examples of a rank class per slot and batch")


def _prepare(
    arguments: argparse.Namespace, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Rows
) -> tuple[SpecBlockDrafter, SpecBlockStep]:
    """A drafter whose vocabulary is the most frequent tokens of the rows, and its step."""
    vocab_size = target.get_input_embeddings().num_embeddings
    size = min(arguments.draft_vocab, vocab_size)
    vocabulary, coverage = frequent_tokens(rows, size, vocab_size)
    print(f"draft vocabulary: {size} of {vocab_size} tokens, {coverage:.2%} of the training text")
    drafter = new_drafter(
        target,
        vocabulary,
        num_layers=arguments.layers,
        block_size=arguments.block_size,
        target_layer_ids=arguments.taps,
        intermediate_size=arguments.intermediate_size,
        prefix_broadcast=arguments.prefix_broadcast,
        layer_wise_shift=arguments.layer_wise_shift,
        warm_start=arguments.warm_start,
    )
    step = SpecBlockStep(
        drafter,
        target,
        num_blocks=arguments.blocks,
        rank_start_step=arguments.rank_start_step,
        valid_prefix=arguments.valid_prefix,
        slot_weights=arguments.slot_weights,
        rank_loss=arguments.rank_loss,
        rank_budget=arguments.rank_budget,
        window=arguments.window,
    )
    return drafter, step


register_recipe(
    Recipe(
        "specblock",
        _add_arguments,
        _prepare,
        recorded=(
            "blocks",
            "valid_prefix",
            "prefix_broadcast",
            "layer_wise_shift",
            "rank_start_step",
            "rank_loss",
            "rank_budget",
            "slot_weights",
            "warm_start",
            "window",
        ),
        adapting=lambda drafter, target: SpecBlockStep(drafter, target, rank_start_step=0),
    )
)
