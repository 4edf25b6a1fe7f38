"""Quality of a rank head as a classifier: the table of SpecBlock's Appendix B for any drafter and text.

    quality = rank_head_quality(drafter, target, texts)
    print(quality)

The rank head decides how a tree spends its budget, so its precision and recall per bucket explain a tree's shape.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.decoding.targets.modules import num_tokens
from hf_specdec.decoding.targets.taps import tap_layer

# The four buckets of Section 3.2; a rank above the last bound is in the last bucket.
RANK_BOUNDS = (1, 4, 10)


def rank_classes(logits: Tensor, token_ids: Tensor) -> Tensor:
    """The bucket of a token's rank in a draft distribution (Section 3.3): rank 1, 2 to 4, 5 to 10, above.

    Args:
        logits: [..., draft_vocab].
        token_ids: [...] int64, ids in the draft vocabulary.

    Examples:
        >>> rank_classes(torch.arange(12.0).expand(3, 12), torch.tensor([11, 10, 0]))
        tensor([0, 1, 3])
    """
    rank = (logits > logits.gather(-1, token_ids.unsqueeze(-1))).sum(-1)  # 0 is the best
    return sum((rank >= bound).long() for bound in RANK_BOUNDS)  # type: ignore[return-value]


@dataclass(frozen=True)
class RankHeadQuality:
    """Precision, recall and F1 of each bucket.

    Attributes:
        counts: [buckets, buckets] int64: positions by true bucket (row) and predicted one (column).
    """

    counts: Tensor

    @property
    def num_positions(self) -> int:
        """Number of counted positions."""
        return int(self.counts.sum())

    def rows(self) -> list[dict[str, float | str]]:
        """Per bucket its name, share of the positions, precision, recall and F1, each from 0 to 1."""
        counts = self.counts.double()
        correct, true, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
        columns = {
            "frequency": true / max(1, self.num_positions),
            "precision": correct / predicted.clamp(min=1),
            "recall": correct / true.clamp(min=1),
            "f1": 2 * correct / (true + predicted).clamp(min=1),
        }
        return [
            {"bucket": name} | {column: float(values[bucket]) for column, values in columns.items()}
            for bucket, name in enumerate(bucket_names())
        ]

    def record(self) -> dict[str, str]:
        """The same rows as short texts, for a model card."""
        names = ("frequency", "precision", "recall", "f1")
        rows = {str(row["bucket"]): ", ".join(f"{name} {row[name]:.3f}" for name in names) for row in self.rows()}
        return rows | {"positions": f"{self.num_positions}"}

    def __str__(self) -> str:
        lines = [f"rank head on {self.num_positions} held-out positions"]
        lines.append(f"{'bucket':<12}{'frequency':>10}{'precision':>10}{'recall':>10}{'f1':>10}")
        for row in self.rows():
            numbers = "".join(f"{row[name]:>10.3f}" for name in ("frequency", "precision", "recall", "f1"))
            lines.append(f"{row['bucket']:<12}{numbers}")
        return "\n".join(lines)


def bucket_names() -> list[str]:
    """Names of the four buckets, best first.

    Examples:
        >>> bucket_names()
        ['rank 1', 'rank 2-4', 'rank 5-10', 'rank > 10']
    """
    ends = [f"rank {low + 1}-{high}" for low, high in itertools.pairwise(RANK_BOUNDS)]
    return ["rank 1", *ends, f"rank > {RANK_BOUNDS[-1]}"]


def report(
    drafter: Any, target: PreTrainedModel, prompts: Sequence[Mapping[str, Tensor]], *, new_tokens: int = 64
) -> list[tuple[str, list[str], list[list[str]]]]:
    """The table for `Drafter.report_tables`, on what the target writes after the prompts.

    Empty if the rank head has other buckets, or if no written text is as long as a block.
    """
    if drafter.config.rank_classes != len(bucket_names()):
        return []
    texts = []
    for prompt in prompts:
        for ids, mask in zip(prompt["input_ids"], prompt["attention_mask"], strict=True):
            alone = ids[mask.bool()].unsqueeze(0).to(target.device)
            written = target.generate(alone, max_new_tokens=new_tokens, do_sample=False)
            texts.append((written[0], alone.shape[1]))
    if not any(_fits_block(len(ids), prompt_length, drafter) for ids, prompt_length in texts):
        return []
    quality = rank_head_quality(drafter, target, texts)
    names = ("frequency", "precision", "recall", "f1")
    rows = [[str(row["bucket"]), *(f"{row[name]:.3f}" for name in names)] for row in quality.rows()]
    return [(f"rank head on {quality.num_positions} positions that the target wrote", ["bucket", *names], rows)]


def _fits_block(length: int, prompt_length: int, drafter: Any) -> bool:
    return length > prompt_length + drafter.config.block_size


@torch.no_grad()
def rank_head_quality(drafter: Any, target: PreTrainedModel, texts: Iterable[tuple[Tensor, int]]) -> RankHeadQuality:
    """Classifies every slot of a block from every position of some texts, and compares with the true buckets.

    As in Appendix B, a slot counts only if the earlier slots of its block were correct, and only the first block of a
    start counts, whose condition is the target's. The true token is the target's likeliest one; if it is not in the
    draft vocabulary, it has no rank.

    Args:
        drafter: on the target's device.
        target: that the drafter was trained for.
        texts: token ids [length] int64, best written by the target itself from held-out prompts, each with its number
            of prompt tokens; blocks start after these.

    Raises:
        ValueError: the drafter does not fit the target, its rank head has other buckets, or no text is long enough for
            a block.
    """
    drafter.check_target(target)
    buckets = len(RANK_BOUNDS) + 1
    if drafter.config.rank_classes != buckets:
        raise ValueError(
            f"The rank head of {drafter.name_or_path!r} has {drafter.config.rank_classes} classes, but there are "
            f"{buckets} true buckets: {', '.join(bucket_names())}. Only rank heads with these buckets can be compared."
        )
    counts = torch.zeros(buckets * buckets, dtype=torch.int64, device="cpu")
    slots, rows = drafter.config.block_size, num_tokens(target)
    for ids, prompt_length in texts:
        length = len(ids)
        if not _fits_block(length, prompt_length, drafter):
            continue
        features, best_ids = _states_of(drafter, target, ids.to(target.device))
        # Position i is the condition, token i + 1 the start, and slot k predicts the token after token i + 1 + k.
        positions = torch.arange(1, length, device=features.device)
        embeddings = target.get_input_embeddings()(ids[1:].to(target.device)).to(drafter.device, drafter.dtype)
        hidden = drafter.block_hidden(features[None, :-1], embeddings[None], positions[None], from_target=True)[0]
        logits, rank_logits = drafter.heads(hidden)
        starts = torch.arange(max(0, prompt_length - 1), length - slots, device=features.device)
        valid = torch.ones_like(starts, dtype=torch.bool)
        t2d = torch.nn.functional.pad(drafter.t2d, (0, rows - len(drafter.t2d)))  # the target may have more tokens
        draft_id_of = t2d.cumsum(0) - 1
        for slot in range(slots):
            true_ids = best_ids[starts + 1 + slot].to(drafter.device)
            counted = valid & t2d[true_ids]
            at_slot, wanted = logits[starts, slot], draft_id_of[true_ids].clamp(min=0)
            true, predicted = rank_classes(at_slot, wanted), rank_logits[starts, slot].argmax(-1)
            counts += (true * buckets + predicted)[counted].bincount(minlength=buckets**2).cpu()
            valid = counted & (at_slot.argmax(-1) == wanted)
    if not counts.any():
        raise ValueError(f"No text is long enough: a block needs {slots + 1} tokens after the prompt.")
    return RankHeadQuality(counts.view(buckets, buckets))


def _states_of(drafter: Any, target: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Features [length, taps * hidden] and the target's choices [length] at every position of a text."""
    taken: dict[int, Tensor] = {}
    wanted, handles = drafter.feature_layers(target), []
    try:
        for index in dict.fromkeys(wanted):
            handles.append(tap_layer(target, index, functools.partial(taken.__setitem__, index)))
        logits = target(input_ids=ids[None], use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    features = torch.cat([taken[index][0].to(drafter.device) for index in wanted], -1).to(drafter.dtype)
    return features, logits[0].argmax(-1)
