"""Look-ahead decoding: the target guesses its own n-grams by Jacobi iteration, and verifies them later. No weights.

Every round verifies one tree with two parts. The first are n-grams of a pool that begin with the root. The second is a
window of guesses: a chain of `window` tokens under the root, and below each of them the guesses of the next
iterations, `ngram` - 2 levels. What the target chooses after the last token of each of these paths is the newest
iteration; the path and it are an n-gram for the pool. Then the oldest iteration is dropped. In the paper a mask says
which guess sees which; here they are paths of the tree, so the target's forward needs nothing special. All of it is
verified, so the guesses of the window may be accepted too.

Source: Lookahead Decoding, arXiv 2402.02057, Section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_specdec.decoding.exchange import Committed, DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.state import with_rows
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.drafting.options import PausingOptions
from hf_specdec.drafting.registry import Serving, register

__all__ = ["LookaheadDrafter", "LookaheadOptions"]

MOST = 64  # of each option


@dataclass(slots=True, kw_only=True)
class LookaheadOptions(PausingOptions):
    """Drafting options of look-ahead decoding. A round verifies up to (window + guesses) * (ngram - 1) nodes.

    Attributes:
        window: W, tokens that are guessed ahead in each iteration.
        ngram: N, tokens of an n-gram, its first included.
        guesses: G, n-grams of the pool that are verified in a round.
        pauses: see `PausingOptions`.
    """

    method = "lookahead"
    window: int = 7
    ngram: int = 4
    guesses: int = 7

    def validate(self, config: Any = None) -> None:
        PausingOptions.validate(self, config)
        self.check_integers(window=MOST, ngram=MOST, guesses=MOST)
        if self.ngram < 2:
            raise ValueError(f"ngram={self.ngram} must be at least 2: an n-gram is a token and what follows it.")


class LookaheadDrafter(Drafter):
    """Drafts n-grams that the target guessed in parallel with its own decoding.

    It needs no earlier text, but every round verifies the window besides, so it gains only where verifying some tens
    of nodes costs little more than one.

    Args:
        drafting_options: of `LookaheadOptions`.

    Examples:
        >>> LookaheadDrafter(window=5).options.ngram
        4
    """

    options_class = LookaheadOptions
    options: LookaheadOptions

    def __init__(self, **drafting_options: Any) -> None:
        self.options = LookaheadOptions()
        self.set_options(**drafting_options)

    def check_target(self, model: PreTrainedModel) -> None:
        """Any target fits."""

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return LookaheadGenerator(self.options)


class LookaheadGenerator(TreeCandidateGenerator):
    """The window and the pool of each row."""

    def __init__(self, options: LookaheadOptions) -> None:
        self.window, self.guesses, self.depth = options.window, options.guesses, options.ngram - 1
        self.levels: list[list[list[int]]] | None = None  # [row][iteration, oldest first][window]
        self.pools: list[dict[int, list[tuple[int, ...]]]] = []  # per row the n-grams by first token, latest first
        self.leaves: list[list[int]] = []  # of the latest tree, per row: the last node of each path of the window

    def draft(self, context: DraftContext) -> DraftTree:
        texts = context.texts
        if self.levels is None:
            self.levels = [self._start(text) for text in texts]
            self.pools = [{} for _ in texts]
        trees = [
            self._tree(text[-1], levels, pool.get(text[-1], []))
            for text, levels, pool in zip(texts, self.levels, self.pools, strict=True)
        ]
        self.leaves = [leaves for _, _, leaves in trees]
        return DraftTree.from_lists([tokens for tokens, _, _ in trees], [parents for _, parents, _ in trees])

    def _start(self, text: list[int]) -> list[list[int]]:
        """First guesses, from the end of the prompt."""
        return [[text[-1 - (level + place) % len(text)] for place in range(self.window)] for level in range(self.depth)]

    def _tree(
        self, root: int, levels: list[list[int]], ngrams: Sequence[tuple[int, ...]]
    ) -> tuple[list[int], list[int], list[int]]:
        """Tokens, parents, and the last node of each path of the window; paths share their first nodes."""
        tokens, parents = [root], [-1]
        children: dict[tuple[int, int], int] = {}

        def add(node: int, path: Sequence[int]) -> int:
            for token in path:
                child = children.setdefault((node, token), len(tokens))
                if child == len(tokens):
                    tokens.append(token)
                    parents.append(node)
                node = child
            return node

        for ngram in ngrams[: self.guesses]:
            add(0, ngram)
        trunk, leaves = 0, []
        for place in range(self.window):
            trunk = add(trunk, [levels[0][place]])
            leaves.append(add(trunk, [level[place] for level in levels[1:]]))
        return tokens, parents, leaves

    def observe(self, committed: Committed) -> None:
        tree = committed.tree
        if tree is None or tree.num_nodes == 1 or self.levels is None:  # nothing was drafted
            return
        # transformers' own loop verifies one path only, and policies may cut a tree: unknown guesses stay as they are.
        known = committed.target_logits.shape[1] if committed.target_logits.shape[1] == tree.num_nodes else 0
        choices = committed.target_logits.argmax(-1).tolist()
        for row, (levels, leaves) in enumerate(zip(self.levels, self.leaves, strict=True)):
            newest = [choices[row][leaf] if leaf < known else old for leaf, old in zip(leaves, levels[-1], strict=True)]
            for place in range(self.window):
                self._remember(row, [*(level[place] for level in levels), newest[place]])
            self.levels[row] = [*levels[1:], newest]

    def _remember(self, row: int, ngram: list[int]) -> None:
        first, rest = ngram[0], tuple(ngram[1:])
        same = self.pools[row].setdefault(first, [])
        if rest in same:
            same.remove(rest)
        same.insert(0, rest)
        del same[self.guesses :]

    def keep_rows(self, rows: Sequence[int]) -> None:
        if self.levels is not None:
            self.levels = [self.levels[row] for row in rows]
            self.pools = [self.pools[row] for row in rows]
            self.leaves = [self.leaves[row] for row in rows]

    def join(self, others: Sequence[Any], places: Sequence[int]) -> None:
        for name in ("levels", "pools", "leaves"):
            own = getattr(self, name)
            both = [*own, *(row for other in others for row in getattr(other, name))]
            setattr(self, name, [both[row] for row in with_rows(len(own), places)])


register(
    "lookahead",
    LookaheadDrafter,
    origin="name",
    serving=Serving(not_exported="vLLM has no look-ahead decoding"),
)
