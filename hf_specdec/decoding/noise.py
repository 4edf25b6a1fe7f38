"""Noise for sampling: a function of the seed, the row, the position and the token, whatever was drafted.

A token is sampled as the argmax of its logits plus Gumbel noise (Gumbel-max), which is exact for any logits. All nodes
of a row at one depth share the noise of that position: at most one of them is on the accepted path, and drafts are
chosen without it. So one seed gives one text: with any drafter, any tree, any number of rounds.

Numbers are hashed from a counter instead of drawn in order. Rows are at different positions, which the host may not
know yet, and a position that a round does not reach needs the same numbers again in the next round.
Source of the hash: SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), with one
start per row and position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_specdec.decoding.tree import DraftTree, from_host

# As signed numbers of 64 bits. Products and sums wrap around.
STEP, FIRST_FACTOR, SECOND_FACTOR = (
    number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


class PositionNoise:
    """The noise of one call. It draws one number from a generator, however long the text is.

    Args:
        rows: number of rows.
        device: of the logits.
        seed: of the generator; None for torch's default generator.

    Attributes:
        position: [rows] int64, tokens that each row has chosen so far.
    """

    def __init__(self, rows: int, device: torch.device, seed: int | None = None) -> None:
        generator = None if seed is None else torch.Generator(device).manual_seed(seed)
        number = torch.empty(1, dtype=torch.int64, device=device).random_(generator=generator)
        self._rows = _hash(number + STEP * torch.arange(1, rows + 1, device=device))
        self._tokens = torch.empty(0, dtype=torch.int64, device=device)
        self.position = torch.zeros(rows, dtype=torch.int64, device=device)

    def at(self, rows: Tensor, positions: Tensor, vocab: int) -> Tensor:
        """[..., vocab] float32 Gumbel noise for `rows` and `positions`, both [...] int64.

        The same for the same row and position, and independent for others.
        """
        if len(self._tokens) != vocab:
            self._tokens = STEP * torch.arange(1, vocab + 1, device=positions.device)
        starts = _hash(self._rows[rows] + STEP * (positions + 1))
        bits = _hash(starts.unsqueeze(-1) + self._tokens)
        # 63 bits as a number between 0 and 1, with all its digits near 0: an unlikely token needs a small one to win.
        uniform = bits.bitwise_and_(2**63 - 1).to(torch.float32).mul_(2.0**-63).clamp_(2.0**-63, 1 - 2.0**-24)
        return uniform.neg_().log1p_().neg_().log_().neg_()

    def at_nodes(self, tree: DraftTree, vocab: int) -> Tensor:
        """[batch, nodes, vocab]: for the choices after the nodes of a tree; those of a row at one depth share it."""
        rows = torch.arange(len(self.position), device=self.position.device).unsqueeze(1)
        steps = torch.arange(tree.max_depth + 1, device=self.position.device)
        noise = self.at(rows, self.position.unsqueeze(1) + steps, vocab)
        return noise[rows, tree.depths.clamp(max=tree.max_depth)] if tree.max_depth else noise

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Continues with these rows."""
        kept = from_host(rows, self._rows.device)
        self._rows, self.position = self._rows[kept], self.position[kept]


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One token from each distribution: [..., vocab] -> [...] int64. Nothing is checked, so nothing waits for `probs`.

    With independent E ~ Exp(1), p / E is largest at a token with its probability p, as in Gumbel-max.
    `torch.multinomial` draws the same way, but on CUDA it reads a check of its input in the oldest supported torch.

    Examples:
        >>> draw(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        tensor([1, 0])
    """
    return (probs / torch.empty_like(probs).exponential_(generator=generator)).argmax(-1)


def _hash(numbers: Tensor) -> Tensor:
    """The output function of SplitMix64, written over `numbers`, int64.

    Examples:
        >>> [hex(number % 2**64) for number in _hash(torch.tensor([1, 2]) * STEP).tolist()]  # from the seed 0
        ['0xe220a8397b1dcdaf', '0x6e789e6aa1b965f4']
    """
    shifted = torch.empty_like(numbers)
    for shift, factor in ((30, FIRST_FACTOR), (27, SECOND_FACTOR), (31, 1)):
        torch.bitwise_right_shift(numbers, shift, out=shifted)
        numbers.bitwise_xor_(shifted.bitwise_and_(2 ** (64 - shift) - 1))  # the shift repeats the sign
        if factor != 1:
            numbers.mul_(factor)
    return numbers
