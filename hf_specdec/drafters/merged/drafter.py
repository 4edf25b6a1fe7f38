"""MergedDrafter: several drafters for one target, merged into one tree. A call's state is in `candidates.py`."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.drafters.base import Drafter, check_is_drafter
from hf_specdec.drafters.merged.calibration import Calibration, SourceGain
from hf_specdec.drafters.options import TreeOptions


@dataclass(slots=True, kw_only=True)
class MergedOptions(TreeOptions):
    """Drafting options of a merged drafter; the sources have their own options.

    Attributes:
        tree_budget: see `TreeOptions`; of the whole tree. Default: the first source's.
    """

    method = "merged"
    tree_budget: int | Literal["auto"] = 16


class Knowledge:
    """What calls on one target have measured, for later ones."""

    def __init__(self, num_sources: int) -> None:
        self.calibration = Calibration()
        self.gains = [SourceGain() for _ in range(num_sources)]
        self._rounds: deque[tuple[float, float]] = deque(maxlen=32)  # seconds, and tokens per row, of the latest rounds

    def note_round(self, seconds: float, tokens: float) -> None:
        """Records the seconds of a round and its mean number of tokens per row."""
        self._rounds.append((seconds, tokens))

    @property
    def pace(self) -> tuple[float, float]:
        """Seconds per token of a row, and per round, of the latest rounds."""
        seconds, tokens = (sum(each) for each in zip(*self._rounds, strict=True))
        return seconds / tokens, seconds / len(self._rounds)


class MergedDrafter(Drafter):
    """Drafts one tree from the proposals of several drafters: the paths that the target will most likely follow.

    Look-ups and trained drafters are right on different texts. How often each is right is counted while they draft, so
    a source that is often wrong gets fewer nodes, and one that gains less than its time costs is skipped in most
    rounds. Drafts therefore depend on measured times; the output does not.

    Args:
        sources: at least two drafters for the same target. Drafters that run the target's own layers, or draft while it
            verifies (SpecBound, SpecBranch), are not supported.
        drafting_options: of `MergedOptions`.

    Raises:
        TypeError: a source is not a drafter.
        ValueError: there are fewer than two, one occurs twice or cannot be merged, or an option is out of range.

    Example:
        >>> from hf_specdec.drafters.lookup import NGramDrafter, SuffixDrafter
        >>> merged = MergedDrafter(SuffixDrafter(tree_budget=8), NGramDrafter())
        >>> merged.names, merged.options.tree_budget
        (('suffix', 'ngram'), 8)
    """

    options_class = MergedOptions
    options: MergedOptions
    mergeable = False

    def __init__(self, *sources: Drafter, **drafting_options: Any) -> None:
        for source in sources:
            check_is_drafter(source)
        if len(sources) < 2 or len(set(map(id, sources))) < len(sources):
            raise ValueError(f"{len(set(map(id, sources)))} drafters were given; a merged drafter needs two or more.")
        for source in sources:
            if not source.mergeable:
                raise ValueError(
                    f"A drafter of method {source.method!r} cannot be merged: it runs layers of the target, drafts "
                    "while the target verifies, or is merged itself. Leave it out, or pass it to generate alone."
                )
        self.sources = sources
        budget = getattr(sources[0].options, "tree_budget", None)
        self.options = self.options_class(**({} if budget is None else {"tree_budget": budget}))
        self.set_options(**drafting_options)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the sources: their methods, numbered if several are equal."""
        methods = [source.method for source in self.sources]
        seen: Counter[str] = Counter()
        names = []
        for method in methods:
            seen[method] += 1
            names.append(f"{method} {seen[method]}" if methods.count(method) > 1 else method)
        return tuple(names)

    @property
    def networks(self) -> tuple[nn.Module, ...]:
        return tuple(network for source in self.sources for network in source.networks)

    def knowledge(self, model: PreTrainedModel) -> Knowledge:
        """What was measured of the sources with this target."""
        by_target = _KNOWLEDGE.setdefault(self, weakref.WeakKeyDictionary())
        return by_target.setdefault(model, Knowledge(len(self.sources)))

    def forget(self) -> None:
        for source in self.sources:
            source.forget()

    def check_target(self, model: PreTrainedModel) -> None:
        for source in self.sources:
            source.check_target(model)

    def check_options(self) -> None:
        super().check_options()
        for source in self.sources:
            source.check_options()

    def check_pairing(self, model: PreTrainedModel, input_ids: Tensor | None = None) -> None:
        for source in self.sources:
            source.check_pairing(model, input_ids)

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        return tuple(layer for source in self.sources for layer in source.feature_layers(model))

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        from hf_specdec.drafters.merged.candidates import MergedGenerator

        return MergedGenerator(self, target)


# Not an attribute of the drafters, because it is not copied.
_KNOWLEDGE: weakref.WeakKeyDictionary[MergedDrafter, weakref.WeakKeyDictionary[PreTrainedModel, Knowledge]] = (
    weakref.WeakKeyDictionary()
)
