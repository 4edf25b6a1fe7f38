"""Rotary embeddings whose frequencies depend on the length of the text: rope types "longrope" and "dynamic".

transformers chooses the frequencies of a forward by its largest position. Plain decoding runs one position at a time, a
tree several: a node beyond the position where frequencies change would change them for the nodes before it too. So a
round ends at that position and the next one continues after it (`TargetModel.verifiable_part`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig


@dataclass(frozen=True)
class RotaryLimit:
    """A position at which frequencies change.

    Attributes:
        rope_type: from the config.
        first: the first position with other frequencies.
    """

    rope_type: str
    first: int

    @property
    def keeps_changing(self) -> bool:
        """Whether they change with every further position ("dynamic"), not just once ("longrope")."""
        return "dynamic" in self.rope_type

    def reach(self, root_positions: Tensor) -> Tensor:
        """[batch] int64: the largest position that may run in one forward with these roots [batch] int64.

        Examples:
            >>> RotaryLimit("longrope", 8).reach(torch.tensor([5, 8])) < 100
            tensor([ True, False])
            >>> RotaryLimit("dynamic", 8).reach(torch.tensor([5, 8, 9]))
            tensor([7, 8, 9])
        """
        unbounded = torch.full_like(root_positions, torch.iinfo(torch.int64).max)
        beyond = root_positions if self.keeps_changing else unbounded
        return beyond.where(root_positions >= self.first, self.first - 1)

    def divides(self, first: Sequence[int], last: Sequence[int]) -> bool:
        """Whether positions `first` to `last` of each row get other frequencies in one batch than row by row."""
        beyond = [position >= self.first for position in first]
        return max(last) >= self.first and (self.keeps_changing or not all(beyond))


def rotary_limits(config: PreTrainedConfig) -> list[RotaryLimit]:
    """The limits of a text config; several if layer types have their own rotary parameters."""
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [part for part in parameters.values() if isinstance(part, dict)] or [parameters]
    limits = set()
    for each in sets:
        rope_type = each.get("rope_type") or "default"
        if "dynamic" in rope_type:
            limits.add(RotaryLimit(rope_type, config.max_position_embeddings))
        elif rope_type == "longrope":
            limits.add(RotaryLimit(rope_type, each["original_max_position_embeddings"]))
    return sorted(limits, key=lambda limit: limit.first)
