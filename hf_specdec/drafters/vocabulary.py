"""Draft vocabularies: some drafters can say only a part of the target's tokens.

A published map `d2t` holds offsets: target id = draft id + d2t[draft id].
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_draft_to_target(d2t: Tensor, vocab_size: int, name: str) -> None:
    """Raises ValueError if a map leads outside the target's vocabulary, or twice to one of its ids.

    Args:
        d2t: [draft_vocab] int64; one without storage is not looked at.
        vocab_size: the target's.
        name: the drafter's, for the message.
    """
    if d2t.is_meta:
        return
    target_ids = torch.arange(d2t.numel(), device=d2t.device) + d2t
    way_out = (
        "It must hold offsets (target id minus draft id): save the drafter again with the map it was trained with."
    )
    lowest, highest = torch.stack(target_ids.aminmax()).tolist()
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(
            f"The vocabulary map d2t of drafter {name!r} leads to target ids from {lowest} to {highest}, but the "
            f"target has ids 0 to {vocab_size - 1}. {way_out}"
        )
    named, counts = target_ids.unique(return_counts=True)
    if len(named) < len(target_ids):
        raise ValueError(
            f"The vocabulary map d2t of drafter {name!r} leads {int(counts.max())} times to target id "
            f"{int(named[counts.argmax()])}, but each draft id must be a target id of its own. {way_out}"
        )
