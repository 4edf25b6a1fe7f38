"""The state at the start of a round, and counts per row that the host may read later than the device knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdec.decoding.tree import from_host


class Counts:
    """One number per row, on the device, and on the host once it has been read.

    Args:
        tensor: [batch] int64.
        most: an upper bound of the numbers, known on the host.
        known: the numbers on the host, if it knows them already.

    Attributes:
        known: the numbers on the host; None until they are read, so look it up again each time.
    """

    def __init__(self, tensor: Tensor, most: int, known: list[int] | None = None) -> None:
        self.tensor, self.most, self.known = tensor, most, known

    @classmethod
    def of(cls, known: Sequence[int], device: torch.device | str = "cpu") -> Counts:
        """Numbers that the host knows already."""
        return cls(from_host(list(known), device), max(known), list(known))

    def of_rows(self, rows: Sequence[int]) -> Counts:
        """Selects rows; the host must know the numbers."""
        assert self.known is not None, "rows are dropped only after the host has read the last verdict"
        return Counts.of([self.known[row] for row in rows], self.tensor.device)

    def plus(self, later: Counts) -> Counts:
        """The sums of these numbers and others, on this device; known as soon as both are."""
        known, later_known = self.known, later.known
        if known is not None and later_known is not None:
            return Counts.of([sum(both) for both in zip(known, later_known, strict=True)], self.tensor.device)
        return _Sum([*(self.parts if isinstance(self, _Sum) else [self]), later])

    def times(self, factor: int) -> Counts:
        """The numbers times `factor`; known as soon as these are."""
        return _Multiple(self, factor)

    def to(self, device: torch.device) -> Counts:
        """The same numbers, with `tensor` on `device`."""
        return self if self.tensor.device == device else _Multiple(self, 1, device)


class _Multiple(Counts):
    def __init__(self, counts: Counts, factor: int, device: torch.device | None = None) -> None:
        self.counts, self.factor = counts, factor
        tensor = counts.tensor if device is None else counts.tensor.to(device)
        self.tensor, self.most = tensor if factor == 1 else tensor * factor, counts.most * factor

    @property
    def known(self) -> list[int] | None:  # type: ignore[override]
        known = self.counts.known
        return None if known is None else [number * self.factor for number in known]


class _Sum(Counts):
    def __init__(self, parts: Sequence[Counts]) -> None:
        device = parts[0].tensor.device
        self.parts, self.most = parts, sum(part.most for part in parts)
        self.tensor = torch.stack([part.tensor.to(device) for part in parts]).sum(0)

    @property
    def known(self) -> list[int] | None:  # type: ignore[override]
        known = [part.known for part in self.parts]
        return None if None in known else [sum(numbers) for numbers in zip(*known, strict=True)]


def with_rows(batch: int, places: Sequence[int]) -> list[int]:
    """Where each row comes from when new rows take `places`: an index among the batch's rows, followed by the new ones.

    Places from `batch` on, without gaps, are further rows.

    Examples:
        >>> with_rows(3, [1, 3])
        [0, 3, 2, 4]
    """
    order = [*range(max(batch, *(place + 1 for place in places)))]
    for number, place in enumerate(places):
        order[place] = batch + number
    return order


def joined(own: Tensor, new: Sequence[Tensor], places: Sequence[int]) -> Tensor:
    """[batch, ...] with new rows, [1, ...] each, at `places`, see `with_rows`."""
    return torch.cat([own, *new])[from_host(with_rows(len(own), places), own.device)]


@dataclass
class RoundState:
    """The remaining rows at the start of a round, on the device.

    Attributes:
        root_ids: [batch] int64, the last token of each row; the target has not seen it yet.
        root_positions: [batch] int64, its position id in the target.
    """

    root_ids: Tensor
    root_positions: Tensor

    def next(self, bonus_ids: Tensor, counts: Counts) -> RoundState:
        """The state after a round. The bonus token becomes the root; rows that kept nothing keep their root.

        Args:
            bonus_ids: [batch] int64.
            counts: entries committed, root included.
        """
        if counts.known is None or min(counts.known) == 0:
            bonus_ids = bonus_ids.where(counts.tensor > 0, self.root_ids)
        return RoundState(bonus_ids, self.root_positions + counts.tensor)

    def of_rows(self, rows: Sequence[int]) -> RoundState:
        """Selects rows."""
        index = from_host(rows, self.root_ids.device)
        return RoundState(self.root_ids[index], self.root_positions[index])

    def joined(self, others: Sequence[RoundState], places: Sequence[int]) -> RoundState:
        """With the rows of others at `places`."""
        return RoundState(
            joined(self.root_ids, [other.root_ids for other in others], places),
            joined(self.root_positions, [other.root_positions for other in others], places),
        )
