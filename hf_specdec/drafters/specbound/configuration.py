"""SpecBoundConfig: layers and kind of the exit heads, and the default drafting options."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from hf_specdec.decoding.logits_process import check_annealing
from hf_specdec.drafters.config import TargetFields
from hf_specdec.drafters.options import DrafterOptions, is_number

ARCHITECTURE = "SpecBoundDrafter"
HEAD_KINDS = ("lora", "full")
MAX_WIDTH = 1024
# Section 3.1 of the paper: 10 of Vicuna-7B's 32 layers.
PAPER_WIDTH, PAPER_DEPTH_SHARE, PAPER_ALPHA, PAPER_THRESHOLD = 8, 10 / 32, 0.2, 0.55


class SpecBoundConfig(TargetFields, PreTrainedConfig):
    """Exit heads over a frozen target. Layers are counted as in the paper: exit layer l comes after l layers, from 1.

    Args:
        num_target_layers: L, decoder layers of the target.
        hidden_size: the target's.
        vocab_size: embeddings of the target.
        exit_layers: layers with a head, ascending, each below L.
        head: "lora" (the target's final norm and head plus a low-rank update per layer) or "full" (the target's final
            norm and a separate head per layer, as in the paper).
        lora_rank: of "lora".
        draft_vocab_size: tokens that can be drafted; None for the complete vocabulary.
        head_module: name of the target's head within the target, which the adapters update.
        w_max: default of the drafting option: positions run through shallow layers per round, root included.
        d_max: default of the drafting option: deepest exit layer; None for the paper's share of L.
        alpha: default of the drafting option: strength of the annealing.
        threshold: default of the drafting option: least annealed top probability for an exit.
        use_exit_layers: default of the drafting option: those of `exit_layers` in use; None for all.
        learn_refusals: default of the drafting option: whether rejected drafts are not repeated.
        target_head_sample: some values of the target's head, to recognise other targets; None if unknown.
        calibration: what `SpecBoundDrafter.calibrate` measured when it set the defaults; None before.
    """

    model_type = "hf_specdec_specbound"

    def __init__(
        self,
        num_target_layers: int = 32,
        hidden_size: int = 4096,
        vocab_size: int = 32000,
        exit_layers: Sequence[int] = (4, 7, 10),
        head: str = "lora",
        lora_rank: int = 64,
        draft_vocab_size: int | None = None,
        head_module: str = "lm_head",
        w_max: int = PAPER_WIDTH,
        d_max: int | None = None,
        alpha: float = PAPER_ALPHA,
        threshold: float = PAPER_THRESHOLD,
        use_exit_layers: Sequence[int] | None = None,
        learn_refusals: bool = True,
        target_head_sample: list[float] | None = None,
        calibration: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not isinstance(exit_layers, (list, tuple)):
            raise ValueError(f"exit_layers is {exit_layers!r}; it must be a list of at least one layer.")
        self.num_target_layers = num_target_layers
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.exit_layers = list(exit_layers)
        self.head = head
        self.lora_rank = lora_rank
        self.draft_vocab_size = vocab_size if draft_vocab_size is None else draft_vocab_size
        self.head_module = head_module
        self.w_max = w_max
        self.d_max = paper_depth(num_target_layers, exit_layers) if d_max is None else d_max
        self.alpha = alpha
        self.threshold = threshold
        self.use_exit_layers = None if use_exit_layers is None else list(use_exit_layers)
        self.learn_refusals = learn_refusals
        self.target_head_sample = target_head_sample
        self.calibration = calibration
        self.architectures = [ARCHITECTURE]

    def check(self) -> None:
        """Raises ValueError, naming the field, if no heads can be built from this config."""
        for field in ("num_target_layers", "hidden_size", "vocab_size", "lora_rank", "draft_vocab_size"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{field} is {value!r}; it must be an integer of at least 1.")
        if self.head not in HEAD_KINDS:
            raise ValueError(f"head is {self.head!r}; it must be one of {list(HEAD_KINDS)}.")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}, but the target's vocabulary has {self.vocab_size} "
                "tokens; leave it out to draft all of them."
            )
        check_exit_layers(self.exit_layers, self.num_target_layers)
        SpecBoundOptions.defaults(self).validate(self)


def check_exit_layers(layers: Sequence[int], num_target_layers: int) -> None:
    """Raises ValueError, with the list and the rule, unless exit layers ascend and exist in the target."""
    if not isinstance(layers, (list, tuple)) or not layers or not all(isinstance(layer, int) for layer in layers):
        raise ValueError(f"exit layers {layers!r} must be a list of at least one integer.")
    if any(earlier >= later for earlier, later in itertools.pairwise(layers)):
        raise ValueError(f"exit layers {list(layers)} must ascend without repetition: {sorted(set(layers))}.")
    if layers[0] < 1 or layers[-1] >= num_target_layers:
        raise ValueError(
            f"exit layers {list(layers)} must be from 1 to {num_target_layers - 1}: they count layers passed, and the "
            f"target has {num_target_layers}."
        )


def paper_depth(num_target_layers: int, exit_layers: Sequence[int]) -> int:
    """The paper's share of the layers, rounded, and at least the first exit.

    Example:
        >>> paper_depth(32, [4, 7, 10]), paper_depth(24, [9, 13])
        (10, 9)
    """
    return max(round(PAPER_DEPTH_SHARE * num_target_layers), 1, *exit_layers[:1])


@dataclass(slots=True, kw_only=True)
class SpecBoundOptions(DrafterOptions):
    """Drafting options of exit heads; `SpecBoundDrafter.calibrate` chooses them for heads and machine.

    The fields of the same names in the config are the defaults, and what is saved.

    Attributes:
        threshold: tau, the least annealed top probability for an exit; between 0 and 1.
        alpha: strength of the annealing (Eq. 1); 0 for none.
        w_max: positions that a round runs, root included; it commits at most as many tokens.
        d_max: deepest exit layer. A token without an exit up to there ends the round's draft. L, the number of the
            target's layers, means no bound: such a token is decoded alone and the draft continues.
        use_exit_layers: those of the trained exit layers that are in use; None for all. Each one adds the time of a
            head.
        learn_refusals: whether a draft also ends before a token that was rejected after the same previous token; False
            for exactly the paper's rule.
    """

    method = "specbound"
    threshold: float
    alpha: float
    w_max: int
    d_max: int
    use_exit_layers: Sequence[int] | None
    learn_refusals: bool

    @classmethod
    def defaults(cls, config: Any = None) -> SpecBoundOptions:
        """As for every drafter; `config` is a `SpecBoundConfig`."""
        return cls(
            threshold=config.threshold,
            alpha=config.alpha,
            w_max=config.w_max,
            d_max=config.d_max,
            use_exit_layers=config.use_exit_layers,
            learn_refusals=config.learn_refusals,
        )

    def validate(self, config: Any = None) -> None:
        """As for every drafter; `config` is a `SpecBoundConfig`."""
        DrafterOptions.validate(self, config)
        self.check_switches("learn_refusals")
        num_layers, heads, chosen = config.num_target_layers, config.exit_layers, self.use_exit_layers
        if type(self.w_max) is not int or not 1 <= self.w_max <= MAX_WIDTH:
            raise ValueError(f"w_max={self.w_max!r} must be an integer from 1 to {MAX_WIDTH}: positions per round.")
        if type(self.d_max) is not int or not 1 <= self.d_max <= num_layers:
            raise ValueError(
                f"d_max={self.d_max!r} must be an integer from 1 to {num_layers}, the layers of the target, which "
                "mean no bound."
            )
        for name in ("alpha", "threshold"):
            if not is_number(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a number.")
        check_annealing(self.alpha, self.threshold)
        if chosen is not None:
            check_exit_layers(chosen, num_layers)
            if unknown := [layer for layer in chosen if layer not in heads]:
                raise ValueError(f"use_exit_layers={list(chosen)} has {unknown}, but there are heads only for {heads}.")
        first = heads[0] if chosen is None else chosen[0]
        if first > self.d_max:
            raise ValueError(
                f"No exit is left: d_max={self.d_max}, but the first exit layer in use is {first}. Raise d_max, or use "
                f"a shallower head of {heads}."
            )
