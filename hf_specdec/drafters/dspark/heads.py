"""DSpark's two heads: a bias on a slot's logits from the previous token, and the slot's acceptance probability.

Source: DSpark, arXiv 2607.05147; shared facts on formats of 2026, sections 2.3 and 2.4; deepseek-ai/DeepSpec.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_specdec.drafters.vocabulary import known_ids


class MarkovHead(nn.Module):
    """The bias b = W2 z of a slot's logits, where z comes from W1[previous token] and, by `kind`, from the slot.

    Args:
        kind: "vanilla": z is the embedding e of the previous token. "gated": e times a gate of the slot's state and e.
            "rnn": z comes from a recurrent state over the earlier slots, the slot's state and e.
        rank: width of e and z.
        vocab_size: rows of W1, the target's ids.
        draft_vocab_size: rows of W2, the drafter's ids.
        hidden_size: of a slot's state.
    """

    def __init__(self, kind: str, rank: int, *, vocab_size: int, draft_vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[...] int64 ids of the target -> [..., rank]; may include tokens that the table lacks."""
        return self.markov_w1(known_ids(token_ids, self.markov_w1.num_embeddings))

    def start(self, embedded: Tensor) -> Tensor:
        """[..., rank], the recurrent state before the first slot, for embeddings of this shape."""
        return torch.zeros_like(embedded)

    def forward(self, hidden: Tensor, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One slot: the input of W2, and the recurrent state after it.

        Args:
            hidden: [..., hidden], the slot's.
            embedded: [..., rank], from `embed`, of the token before the slot.
            state: [..., rank], from `start` or from the slot before; only "rnn" uses it.
        """
        if self.kind == "vanilla":
            return embedded, state
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1))) * embedded, state
        gate, candidate, output = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def of_blocks(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """[..., slots, hidden] and [..., slots, rank] -> [..., slots, rank], the input of W2 at all slots, in order."""
        if self.kind != "rnn":
            return self(hidden, embedded, embedded)[0]
        state, codes = self.start(embedded[..., 0, :]), []
        for slot, token in zip(hidden.unbind(-2), embedded.unbind(-2), strict=True):
            code, state = self(slot, token, state)
            codes.append(code)
        return torch.stack(codes, dim=-2)


class ConfidenceHead(nn.Module):
    """A logit of the probability that a slot is accepted, given that the earlier slots were.

    Args:
        in_size: input size: the slot's state, and the embedding of the previous token if the config says so.
    """

    def __init__(self, in_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(in_size, 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """[..., hidden] and [..., rank] -> [...]."""
        read = hidden if embedded is None else torch.cat([hidden, embedded], dim=-1)
        return self.proj(read).squeeze(-1)
