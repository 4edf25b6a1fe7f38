"""Acceptance rules that are NOT lossless: they accept drafted tokens that the target did not choose.

Nobody gets one without asking: a user sets `drafter.acceptance` for the calls that follow; it is neither a default nor
saved. `accept.py` has the lossless rule. A relaxed rule changes the choices that it made, on one path of the tree: the
longest one whose nodes the target chose or the rule accepts, and the likeliest of several. The token after the path is
the target's own choice.
Sources: Medusa, arXiv 2401.10774, Section 2.3.1; Judge Decoding, arXiv 2501.19309.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_specdec.decoding.tree import DraftTree

__all__ = ["Judge", "Relaxed", "Typical", "acceptance_rule"]


class Relaxed(ABC):
    """A rule that is not lossless.

    Attributes:
        reads_states: whether it needs the target's states after the final norm.
    """

    reads_states: bool = False

    @abstractmethod
    def accepts(self, token_probs: Tensor, entropies: Tensor, states: Tensor | None) -> Tensor:
        """Which nodes may follow their parents, [batch, nodes] bool; the root's entry is ignored.

        Args:
            token_probs: [batch, nodes] float32, probability of each node's token after its parent.
            entropies: [batch, nodes] float32, in nats, of the target's distribution after each node's parent.
            states: [batch, nodes, hidden], the target's states at the nodes; None unless `reads_states`.
        """

    def check(self, hidden_size: int, target: str) -> None:
        """Raises ValueError if this rule is not for a target of this name and size."""

    def choices(self, tree: DraftTree, scores: Tensor, choices: Tensor, states: Tensor | None) -> Tensor:
        """The target's choices, changed along the path that is accepted.

        Args:
            tree: the tree that was verified.
            scores: [batch, nodes, vocab] float32, processed logits of the target.
            choices: [batch, nodes] int64, what the target chose after each node; -1 for nodes without a choice.
            states: see `accepts`.

        Returns:
            [batch, nodes] int64.

        Examples:
            >>> tree = DraftTree.from_lists([[7, 1, 2]], [[-1, 0, 1]])
            >>> scores = torch.tensor([[0.4, 0.6, 0.0], [0.6, 0.0, 0.4], [1.0, 0.0, 0.0]]).log().unsqueeze(0)
            >>> Typical().choices(tree, scores, torch.tensor([[0, 0, 0]]), None)
            tensor([[1, 2, 0]])
        """
        batch, nodes = choices.shape
        rows = torch.arange(batch, device=choices.device).unsqueeze(1)
        parents = tree.parents.clamp(min=0)
        token_ids = tree.token_ids.clamp(max=scores.shape[-1] - 1)
        logprobs = scores.log_softmax(-1)
        token_logprobs = logprobs[rows, parents, token_ids]
        entropies = torch.special.entr(logprobs.exp()).sum(-1)[rows, parents]
        possible = (token_logprobs > -torch.inf) & (token_ids == tree.token_ids)  # under the call's processors
        follows = self.accepts(token_logprobs.exp(), entropies, states) & possible
        follows |= choices[rows, parents] == tree.token_ids
        follows &= tree.valid
        follows[:, 0] = True
        blocked = ((~follows | (choices < 0)).unsqueeze(1) & tree.ancestor_mask).any(-1)
        depths = tree.depths.masked_fill(blocked, -1)
        # Of the deepest nodes the likeliest path; the root has no probability.
        token_logprobs = token_logprobs.masked_fill(blocked, 0)
        token_logprobs[:, 0] = 0
        paths = (token_logprobs.unsqueeze(1) * tree.ancestor_mask).sum(-1)
        leaf = paths.masked_fill(depths < depths.max(1, keepdim=True).values, -torch.inf).argmax(1, keepdim=True)
        on_path = tree.ancestor_mask[rows, leaf].squeeze(1) & ~blocked
        on_path[:, 0] = False
        # Every node of the path is written to the column of its parent, all others to a last column, which is cut off.
        columns = parents.masked_fill(~on_path, nodes)
        return torch.nn.functional.pad(choices, (0, 1)).scatter(1, columns, tree.token_ids)[:, :-1]


@dataclass(frozen=True)
class Typical(Relaxed):
    """Accepts a token whose probability is above min(epsilon, delta * exp(-entropy)): Medusa, Section 2.3.1.

    Where the target is certain, a token needs the probability epsilon; where it is not, less is enough. The defaults
    are those of Medusa's code.

    Attributes:
        epsilon: hard threshold, in (0, 1].
        delta: of the threshold by entropy, in (0, 1].
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 < value <= 1:
                raise ValueError(f"{name}={value!r} of Typical must be a number above 0 and at most 1.")

    def accepts(self, token_probs: Tensor, entropies: Tensor, states: Tensor | None) -> Tensor:
        return token_probs > (self.delta * (-entropies).exp()).clamp(max=self.epsilon)


@dataclass(frozen=True, eq=False)
class Judge(Relaxed):
    """Accepts a token that a linear head on the target's state at this token takes for a good one: Judge Decoding.

    `training/judge.py` trains one for a target.

    Attributes:
        weight: [hidden] float32.
        bias: of the head.
        threshold: least probability of a good token.
        target: name of the target that it was trained for.
    """

    weight: Tensor
    bias: float = 0.0
    threshold: float = 0.5
    target: str = ""

    reads_states = True

    def __repr__(self) -> str:
        return f"Judge(target={self.target!r}, hidden_size={len(self.weight)}, threshold={self.threshold})"

    def check(self, hidden_size: int, target: str) -> None:
        if len(self.weight) != hidden_size:
            raise ValueError(
                f"The judge reads states of size {len(self.weight)}, but target {target!r} has hidden_size "
                f"{hidden_size}. A judge fits only the target it was trained for, {self.target!r}."
            )

    def probs(self, states: Tensor) -> Tensor:
        """[..., hidden] -> [...] float32: the probability that the token at each state is a good one."""
        return torch.sigmoid(states.float() @ self.weight.to(states.device) + self.bias)

    def accepts(self, token_probs: Tensor, entropies: Tensor, states: Tensor | None) -> Tensor:
        assert states is not None
        return self.probs(states).to(token_probs.device) > self.threshold

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes it to a safetensors file."""
        facts = {"bias": repr(self.bias), "threshold": repr(self.threshold), "target": self.target}
        save_file({"weight": self.weight.float().cpu().contiguous()}, file, metadata=facts)

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Judge:
        """Reads a file written by `save`.

        Raises:
            OSError: the file does not exist.
            ValueError: it is of another kind, or damaged.
        """
        try:
            with safe_open(file, "pt") as stored:
                facts, weight = stored.metadata() or {}, stored.get_tensor("weight")
            return cls(weight, float(facts["bias"]), float(facts["threshold"]), facts["target"])
        except OSError:
            raise
        except Exception as error:
            raise ValueError(f"{os.fspath(file)!r} was not written by Judge.save ({error}).") from error


def acceptance_rule(given: object) -> Relaxed | None:
    """The rule that a user named: None and "exact" for the lossless one.

    Raises:
        ValueError: it is no rule.
    """
    if given is None or given == "exact":
        return None
    if given == "typical":
        return Typical()
    if isinstance(given, Relaxed):
        return given
    raise ValueError(
        f"acceptance={given!r} must be 'exact', which is lossless, or one that is not: 'typical', Typical(epsilon=..., "
        "delta=...), or a Judge."
    )
