"""SpecBranchConfig: the shape of H-RAD, the pair of models it was trained for, and the draft model's location."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import PreTrainedConfig

from hf_specdec.drafters.config import TargetFields
from hf_specdec.drafters.options import NOT_SAVED, DrafterOptions, is_number
from hf_specdec.drafters.registry import unknown_name

ARCHITECTURE = "SpecBranchDrafter"
MOST_BRANCHES = 64
MOST_TOKENS = 256
MOST_THREADS = 1024
LENGTHS = ("h_rad", "confidence", "fixed")
SELECTIONS = ("posterior", "a_priori")
CANDIDATES = ("top_k", "drawn")
WORKERS = ("auto", "process", "thread")
OWN_DRAFT_MODEL = "draft_model"  # subfolder of a checkpoint that contains its draft model


class SpecBranchConfig(TargetFields, PreTrainedConfig):
    """A pair of models, and the predictor of draft lengths for them.

    Args:
        draft_model: the draft model: a Hub id, a folder relative to this checkpoint (begins with a dot), or
            `"draft_model"`, the subfolder of that name in this checkpoint.
        draft_hidden_size: the draft model's at H-RAD's training; None if H-RAD was not trained.
        draft_num_layers: the draft model's at H-RAD's training; None if H-RAD was not trained.
        h_rad: whether the checkpoint has an H-RAD.
        target_hidden_size: the target's.
        num_target_layers: the target's decoder layers.
        num_feature_layers: K, number of the target's last layers that H-RAD reads.
        h_rad_sizes: sizes of its hidden layers.
        dropout: after each of them, in training.
        min_confidence: epsilon, the default of the drafting option.
    """

    model_type = "hf_specdec_specbranch"

    def __init__(
        self,
        draft_model: str | None = None,
        draft_hidden_size: int | None = None,
        draft_num_layers: int | None = None,
        h_rad: bool = True,
        target_hidden_size: int = 4096,
        num_target_layers: int = 32,
        num_feature_layers: int = 4,
        h_rad_sizes: Sequence[int] = (256, 64),
        dropout: float = 0.4,
        min_confidence: float = 0.4,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.draft_model = draft_model
        self.draft_hidden_size = draft_hidden_size
        self.draft_num_layers = draft_num_layers
        self.h_rad = h_rad
        self.target_hidden_size = target_hidden_size
        self.num_target_layers = num_target_layers
        self.num_feature_layers = num_feature_layers
        self.h_rad_sizes = list(h_rad_sizes)
        self.dropout = dropout
        self.min_confidence = min_confidence
        self.architectures = [ARCHITECTURE]

    def check(self) -> None:
        """Raises ValueError, naming the field, if no H-RAD can be built from this config."""
        names = ("target_hidden_size", "num_target_layers", "num_feature_layers")
        sizes = {name: getattr(self, name) for name in names}
        sizes |= {f"h_rad_sizes[{index}]": size for index, size in enumerate(self.h_rad_sizes)}
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1.")
        if self.num_feature_layers > self.num_target_layers:
            raise ValueError(
                f"num_feature_layers={self.num_feature_layers} is larger than "
                f"num_target_layers={self.num_target_layers}: correct the wrong one."
            )


@dataclass(slots=True, kw_only=True)
class SpecBranchOptions(DrafterOptions):
    """Drafting options of a draft model that runs in parallel with the target.

    Attributes:
        parallel: whether the draft model runs during verification. If not, the same code drafts serially, as in
            speculative sampling (SpS).
        k_max: most branches at a branch point; the number falls with the draft model's confidence there (Eq. 7).
        hedge: whether k_max - 1 branches are also drafted from nodes within the chain that is being verified, so that a
            rejection there does not waste all parallel drafts. A chosen branch is then verified completely, and
            `lengths` decides how much is drafted if none was chosen; H-RAD runs only for those rows. Not in the paper.
        lengths: what decides how much of a draft is verified: `"h_rad"`; `"confidence"`, up to the first token for
            which the draft model's confidence is low; or `"fixed"`, always all, which with `k_max=1` is PEARL. The
            default is `"h_rad"` if the checkpoint has one, else `"confidence"`. It lowers the rollback rate. On the
            bundled pair, whose models mostly agree, this cost time when serial and without hedges, and with hedges it
            lowered the rate only a little.
        min_confidence: epsilon; the confidence is low if the likeliest token has less. The default is the config's (0.4
            if it has none).
        min_certainty: H-RAD's classes "all reject" and "all accept" are used if their probability is at least this;
            else the draft model's confidence decides. With 0 the likeliest class is always used, as in Eq. 5.
        max_depth: most tokens of a draft; the speed ratio is another limit.
        selection: `"posterior"`: H-RAD runs on a branch after the target has chosen it; `"a_priori"`: H-RAD runs while
            it is being drafted, on features of the previous round (Appendix G.2).
        candidates: in calls that sample, the tokens of a branch point are the likeliest ones (`"top_k"`) or sampled
            without replacement and coupled with the target's choice (`"drawn"`). Both are lossless.
        speed_ratio: c = T_p / T_q, which limits draft lengths; None measures it in the first call with a target. Not
            saved.
        worker: `"process"` or `"thread"`; `"auto"` uses a process for draft models on a CPU if the system can start
            one, else a thread, on CUDA with its own stream, and serial drafting on devices without streams. Not saved.
        worker_threads: intra-op threads of the worker on a CPU; the target uses the remaining cores. Not saved.
    """

    method = "specbranch"
    parallel: bool = True
    k_max: int = 6
    hedge: bool = True
    lengths: Literal["h_rad", "confidence", "fixed"]
    min_confidence: float
    min_certainty: float = 0.6
    max_depth: int = 16
    selection: Literal["posterior", "a_priori"] = "posterior"
    candidates: Literal["top_k", "drawn"] = "top_k"
    speed_ratio: float | None = field(default=None, metadata=NOT_SAVED)
    worker: Literal["auto", "process", "thread"] = field(default="auto", metadata=NOT_SAVED)
    worker_threads: int = field(default=1, metadata=NOT_SAVED)

    @classmethod
    def defaults(cls, config: Any = None) -> SpecBranchOptions:
        """As for every drafter; `config` is a `SpecBranchConfig`."""
        return cls(lengths="h_rad" if config.h_rad else "confidence", min_confidence=config.min_confidence)

    def validate(self, config: Any = None) -> None:
        """As for every drafter; `config` is a `SpecBranchConfig`."""
        DrafterOptions.validate(self, config)
        self.check_integers(k_max=MOST_BRANCHES, max_depth=MOST_TOKENS, worker_threads=MOST_THREADS)
        for name, known in (
            ("lengths", LENGTHS),
            ("selection", SELECTIONS),
            ("candidates", CANDIDATES),
            ("worker", WORKERS),
        ):
            if getattr(self, name) not in known:
                raise unknown_name(name, getattr(self, name), known)
        self.check_switches("parallel", "hedge")
        for name in ("min_confidence", "min_certainty"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value <= 1:
                raise ValueError(f"{name}={value!r} must be from 0 to 1.")
        ratio = self.speed_ratio
        if ratio is not None and not (is_number(ratio) and 0 < ratio < float("inf")):
            raise ValueError(f"speed_ratio={ratio!r} must be a positive number, or None to measure it.")
        if self.lengths == "h_rad" and not config.h_rad:
            raise ValueError(
                f"lengths='h_rad' needs an H-RAD, and {config.name_or_path or 'this drafter'!r} has none: train one "
                "for this pair, or use lengths='confidence'."
            )
        if self.selection == "a_priori" and self.lengths != "h_rad":
            raise ValueError(
                f"selection='a_priori' uses H-RAD, but lengths={self.lengths!r}: use lengths='h_rad', or leave "
                "selection out."
            )
