"""SpecBranchDrafter: a draft model that drafts while the target verifies, and H-RAD, which predicts draft lengths.

Only H-RAD is trained; the draft model is any causal language model with the target's tokenizer. The two sides of a call
are in `generator.py` (the target's) and `drafting.py` (the draft model's). Source: SpecBranch, Sections 5.1 and 5.2.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.modules import home_of
from hf_specdec.drafting.config import TargetFields
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.drafting.options import NOT_SAVED, PausingOptions, is_number
from hf_specdec.drafting.registry import is_hub_id, name_of
from hf_specdec.drafting.wrapped import has_adapters, merged_adapters, unwrapped
from hf_specdec.hub.pretrained import PretrainedDrafter
from hf_specdec.methods.causal_lm.network import CausalLMDrafter
from hf_specdec.methods.specbranch.drafting import CONFIDENCE
from hf_specdec.methods.specbranch.generator import SpecBranchGenerator

NUM_CLASSES = 3  # of H-RAD: all reject, by confidence, all accept
OWN_DRAFT_MODEL = "draft_model"  # subfolder of a checkpoint that contains its draft model


class SpecBranchConfig(TargetFields):
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

    draft_model: str | None = None
    draft_hidden_size: int | None = None
    draft_num_layers: int | None = None
    h_rad: bool = True
    target_hidden_size: int = 4096
    num_target_layers: int = 32
    num_feature_layers: int = 4
    h_rad_sizes: Sequence[int] = (256, 64)
    dropout: float = 0.4
    min_confidence: float = 0.4

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.h_rad_sizes = list(self.h_rad_sizes)

    @classmethod
    def of_target(cls, target: PreTrainedModel, **fields: Any) -> SpecBranchConfig:
        """The config for a target, and further fields."""
        text = target.config.get_text_config(decoder=True)
        return cls(
            target_hidden_size=text.hidden_size,
            num_target_layers=text.num_hidden_layers,
            num_feature_layers=min(4, text.num_hidden_layers),
            target_name_or_path=target.name_or_path or None,
            **fields,
        )

    def check(self) -> None:
        """Raises ValueError, naming the field, if no H-RAD can be built from this config."""
        self.check_sizes("target_hidden_size", "num_target_layers", "num_feature_layers")
        if not all(type(size) is int and size >= 1 for size in self.h_rad_sizes):
            raise ValueError(f"h_rad_sizes is {self.h_rad_sizes!r}; they must be integers of at least 1.")
        if self.num_feature_layers > self.num_target_layers:
            raise ValueError(
                f"num_feature_layers={self.num_feature_layers} is larger than "
                f"num_target_layers={self.num_target_layers}: correct the wrong one."
            )


@dataclass(slots=True, kw_only=True)
class SpecBranchOptions(PausingOptions):
    """Drafting options of a draft model that runs in parallel with the target.

    Attributes:
        parallel: whether the draft model runs during verification, in a thread, on CUDA with its own stream. If not,
            and on devices without streams, the same code drafts serially, as in speculative sampling (SpS). `"auto"`:
            in parallel on two devices; on one, where both share cores, as it is faster, which one call of each shows.
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
        depth: most tokens of a draft; the speed ratio is another limit.
        selection: `"posterior"`: H-RAD runs on a branch after the target has chosen it; `"a_priori"`: H-RAD runs while
            it is being drafted, on features of the previous round (Appendix G.2).
        candidates: in calls that sample, the tokens of a branch point are the likeliest ones (`"top_k"`) or sampled
            without replacement and coupled with the target's choice (`"drawn"`, with `pauses=False`). Both are
            lossless.
        speed_ratio: c = T_p / T_q, which limits draft lengths; None measures it in the first call with a target. Not
            saved.
        worker_threads: intra-op threads of drafting on a CPU; the target uses the remaining cores. Not saved.
    """

    method = "specbranch"
    parallel: bool | Literal["auto"] = "auto"
    k_max: int = 6
    hedge: bool = True
    lengths: Literal["h_rad", "confidence", "fixed"]
    min_confidence: float
    min_certainty: float = 0.6
    depth: int = 16
    selection: Literal["posterior", "a_priori"] = "posterior"
    candidates: Literal["top_k", "drawn"] = "top_k"
    speed_ratio: float | None = field(default=None, metadata=NOT_SAVED)
    worker_threads: int = field(default=1, metadata=NOT_SAVED)

    @classmethod
    def defaults(cls, config: Any = None) -> SpecBranchOptions:
        """As for every drafter; `config` is a `SpecBranchConfig`."""
        return cls(lengths="h_rad" if config.h_rad else "confidence", min_confidence=config.min_confidence)

    def validate(self, config: Any = None) -> None:
        """As for every drafter; `config` is a `SpecBranchConfig`."""
        PausingOptions.validate(self, config)
        self.check_integers(k_max=64, depth=256, worker_threads=1024)
        self.check_choices(
            lengths=("h_rad", "confidence", "fixed"),
            selection=("posterior", "a_priori"),
            candidates=("top_k", "drawn"),
        )
        self.check_switches("hedge")
        if not isinstance(self.parallel, bool) and self.parallel != "auto":
            raise ValueError(f"parallel={self.parallel!r} must be True, False or 'auto'.")
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


class HRAD(nn.Module):
    """The hybrid rollback-aware draft length predictor: will a draft be rejected, accepted in part, or accepted?

    Three linear layers with ReLU and dropout on the target's last K layers at the last verified token and the embedding
    of the token after it. SpecBranch, Eq. 4 and 5, and Appendix E.4. Inputs are standardised with mean and standard
    deviation of the training data, which the paper does only for augmentation: hidden states of some layers are a
    hundred times larger than embeddings, too much for a learning rate of 5e-5.
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, config: SpecBranchConfig) -> None:
        super().__init__()
        size = (config.num_feature_layers + 1) * config.target_hidden_size
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("spread", torch.ones(size))
        layers: list[nn.Module] = []
        for width in config.h_rad_sizes:
            layers += [nn.Linear(size, width), nn.ReLU(), nn.Dropout(config.dropout)]
            size = width
        self.layers = nn.Sequential(*layers, nn.Linear(size, NUM_CLASSES))

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., (K + 1) * hidden] -> [..., 3] logits."""
        return self.layers((inputs.to(self.mean.dtype) - self.mean) / self.spread)


class SpecBranchDrafter(PretrainedDrafter):
    """Drafts the next branches while the target verifies the current one.

    Drafting options: `SpecBranchOptions`.

    Relation to its siblings: `causal_lm` uses the same kind of draft model, but alternates with the target. The other
    drafters read the target's hidden states, so they cannot draft before verification has finished.
    """

    config_class = SpecBranchConfig
    config: SpecBranchConfig
    options_class = SpecBranchOptions
    mergeable = False
    options: SpecBranchOptions
    late_files: ClassVar[tuple[str, ...]] = (f"{OWN_DRAFT_MODEL}/*",)
    _device_marker: Tensor
    card_summary = (
        "SpecBranch: a draft model that drafts the next branches while the target verifies the current ones, and "
        "H-RAD, a small network on the target's hidden states that predicts how much of a draft will be accepted."
    )

    def __init__(self, config: SpecBranchConfig) -> None:
        config.check()
        super().__init__(config)
        # Device and dtype of a drafter without H-RAD and draft model.
        self.register_buffer("_device_marker", torch.empty(0), persistent=False)
        self.h_rad = HRAD(config) if config.h_rad else None
        # Not a submodule: its weights are stored in separate files, mostly in another repo.
        self.__dict__["_pair"] = None
        self.post_init()

    @classmethod
    def from_models(
        cls, draft_model: PreTrainedModel, target: PreTrainedModel, *, h_rad: bool = False, **drafting_options: Any
    ) -> SpecBranchDrafter:
        """A drafter for two loaded models.

        Args:
            draft_model: shared, not copied, and not changed.
            target: the model to draft for.
            h_rad: whether to add an untrained H-RAD; without one, the draft model's confidence decides.
            drafting_options: of `SpecBranchOptions`.
        """
        draft_model, target = unwrapped(draft_model), unwrapped(target)
        place = draft_model.name_or_path if is_hub_id(draft_model.name_or_path) else OWN_DRAFT_MODEL
        drafter = cls(SpecBranchConfig.of_target(target, draft_model=place, h_rad=h_rad)).eval()
        drafter.attach(draft_model)
        drafter.set_options(**drafting_options)
        return drafter.to(dtype=target.dtype)

    @property
    def device(self) -> torch.device:
        """Of H-RAD; without one, of the draft model."""
        return self._parts.device

    @property
    def dtype(self) -> torch.dtype:
        """Of H-RAD; without one, of the draft model."""
        return self._parts.dtype

    @property
    def _parts(self) -> Tensor | PreTrainedModel:
        if self.h_rad is not None:
            return self.h_rad.mean
        return self._device_marker if self.draft_model is None else self.draft_model

    @property
    def num_tokens(self) -> int | None:
        """None: `check_target` compares the draft model's vocabulary with the target's."""
        return None

    @property
    def draft_model(self) -> PreTrainedModel | None:
        """The language model that drafts."""
        return None if self._pair is None else self._pair.model

    def attach(self, draft_model: PreTrainedModel) -> None:
        """Sets the draft model.

        Raises:
            ValueError: H-RAD was trained with a draft model of another shape.
        """
        draft_model = unwrapped(draft_model)
        own = draft_model.config.get_text_config(decoder=True)
        for name, found in (("hidden_size", own.hidden_size), ("num_layers", own.num_hidden_layers)):
            trained = getattr(self.config, f"draft_{name}")
            if trained not in (None, found):
                raise ValueError(
                    f"The H-RAD of {self.name_or_path or 'this drafter'!r} was trained with a draft model whose "
                    f"{name} is {trained}, but {draft_model.name_or_path!r} has {found}. "
                    f"It fits only the pair it was trained for: use {self.config.draft_model!r}, or train another."
                )
        self.__dict__["_pair"] = CausalLMDrafter(draft_model.eval())

    def load_beside(
        self,
        folder: Path,
        locate: Callable[[Sequence[str]], Path],
        fetch: Callable[[str], Drafter],
        *,
        from_hub: bool,
    ) -> None:
        location = self.config.draft_model
        name = self.name_or_path
        if location is None:
            raise ValueError(
                f"{name!r} has no draft_model in its config.json, so it cannot draft: save it again with a draft model "
                "attached."
            )
        if from_hub and location != OWN_DRAFT_MODEL and not _is_found(location, None):
            raise ValueError(
                f"{name!r} is from the Hub and has draft_model {location!r}, but a checkpoint from the Hub may only "
                f"have a Hub id, 'owner/name', that is not a local folder, or {OWN_DRAFT_MODEL!r} in its repo. Nothing "
                "was loaded: use another drafter, or download this one and its draft model to folders."
            )
        if location == OWN_DRAFT_MODEL or location.startswith("."):
            if location == OWN_DRAFT_MODEL:
                folder = locate(self.late_files)
            found = (folder / location).resolve()
            if not found.is_dir():
                raise FileNotFoundError(
                    f"The draft model of {name!r} should be in the folder {location!r}, relative to the checkpoint, "
                    "but there is no such folder. Put it there, or set draft_model in config.json to another one."
                )
            location = str(found)
        try:
            loaded = fetch(location)
        except (OSError, ValueError) as error:
            kind = OSError if isinstance(error, OSError) else ValueError
            raise kind(f"The draft model of {name!r} cannot be loaded. {error}") from error
        assert isinstance(loaded, CausalLMDrafter)
        self.attach(loaded.model)
        self._pair.tokenizer_folder = loaded.tokenizer_folder

    @contextmanager
    def config_for(self, folder: Path | None) -> Iterator[None]:
        """Sets `draft_model` to a subfolder of the checkpoint if the current value is not valid at the destination."""
        location = self.config.draft_model
        adapted = self.draft_model is not None and has_adapters(self.draft_model)  # what is there has no adapters
        stays = _is_found(location, folder) and not adapted
        if not stays and self.draft_model is None:
            where = "the Hub" if folder is None else repr(str(folder))
            warnings.warn(
                f"The draft model {location!r} cannot be found from {where}, and this drafter has not loaded it, "
                "so it cannot be saved too: load it with load_drafter(), or call attach(draft_model), and save it "
                "again.",
                stacklevel=4,
            )
            stays = True
        self.config.draft_model = location if stays else OWN_DRAFT_MODEL
        try:
            yield
        finally:
            self.config.draft_model = location

    def write_side_files(self, folder: Path) -> None:
        if self.h_rad is None:  # transformers would write no file, and leave that of an earlier drafter
            save_file({}, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
        if self.config.draft_model == OWN_DRAFT_MODEL and self.draft_model is not None:
            merged_adapters(self.draft_model).save_pretrained(folder / OWN_DRAFT_MODEL)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self.draft_model is not None:
            self.draft_model._apply(fn)
        return super()._apply(fn, recurse)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Moves H-RAD and the draft model, as `torch.nn.Module.to` does.

        Raises:
            ValueError: the device does not exist.
        """
        device, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"device={str(device)!r} does not exist: this machine has {torch.cuda.device_count()} CUDA devices. "
                "Leave device out to draft on the target's."
            )
        return super().to(*args, **kwargs)

    def predict(self, features: Tensor, token_ids: Tensor, embeddings: nn.Module) -> Tensor:
        """H-RAD's class of each row: 0 all reject, 1 by confidence, 2 all accept.

        Args:
            features: [batch, K * hidden], the target's last K layers at the last verified token.
            token_ids: [batch] int64, the token after it, which the target has not read.
            embeddings: the target's.
        """
        assert self.h_rad is not None
        device = self.h_rad.mean.device
        inputs = torch.cat([features.to(device), embeddings(token_ids).to(device)], dim=-1)
        certainty, classes = self.h_rad(inputs).float().softmax(-1).max(-1)
        return classes.where(certainty >= self.options.min_certainty, CONFIDENCE)

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        if self.options.lengths != "h_rad":
            return ()
        return last_layers(model, self.config.num_feature_layers)

    def runs_parallel(self, model: PreTrainedModel) -> bool:
        """Whether the next call with a target drafts while it verifies: the option, or what was faster."""
        if self.options.parallel != "auto":
            return self.options.parallel
        if self.draft_model is None or home_of(model.get_input_embeddings()) != self.draft_model.device:
            return True
        paces = self.known_of(model).get("paces", {})
        return next((way for way in (True, False) if way not in paces), min(paces, key=paces.__getitem__, default=True))

    def keep_pace(self, model: PreTrainedModel, parallel: bool, seconds_per_token: float) -> None:
        """Stores how fast the latest call with a target was, in parallel or in turn."""
        self.known_of(model).setdefault("paces", {})[parallel] = seconds_per_token

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return SpecBranchGenerator(self, target)

    def card_facts(self) -> dict[str, str]:
        config = self.config
        facts = {"Method": "specbranch", "Draft model": f"`{config.draft_model}`"}
        if self.draft_model is not None:
            facts["Draft model's parameters"] = f"{self.draft_model.num_parameters():,}"
        if config.h_rad:
            sizes = ", ".join(map(str, [*config.h_rad_sizes, NUM_CLASSES]))
            facts["H-RAD"] = f"layers of {sizes} on the target's last {config.num_feature_layers} layers"
        return facts

    def check_target(self, model: PreTrainedModel) -> None:
        config, target = self.config, model.config.get_text_config(decoder=True)
        name, target_name = name_of(self), name_of(model)
        for size, trained, found in (
            ("hidden_size", config.target_hidden_size, target.hidden_size),
            ("num_target_layers", config.num_target_layers, target.num_hidden_layers),
        ):
            if config.h_rad and trained != found:
                named = repr(config.target_name_or_path) if config.target_name_or_path else "that target"
                raise ValueError(
                    f"The H-RAD of {name!r} was trained for a target whose {size} is {trained}, but target "
                    f"{target_name!r} has {found}. It fits only the pair it was trained for: use {named}, or train "
                    "one for this pair."
                )
        if self._pair is None:
            if self.device.type != "meta":  # on the meta device only shapes are checked
                raise ValueError(
                    f"{name!r} has no draft model yet: load it with load_drafter(), or call attach(draft_model)."
                )
            return
        self._pair.check_target(model)


def _is_beside(location: str) -> bool:
    """Whether a config's `draft_model` is a folder, and no Hub id."""
    return location == OWN_DRAFT_MODEL or location.startswith(".") or Path(location).is_absolute()


def _is_found(location: str | None, folder: Path | None) -> bool:
    """Whether a config's `draft_model` can be resolved from a folder; None for the Hub."""
    if location is None:
        return False
    if _is_beside(location):
        return folder is not None and (folder / location).resolve().is_dir()
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", location) is not None and not Path(location).exists()


def missing_draft_model(fields: dict[str, Any], folder: Path | None) -> list[str]:
    """Problems with the draft model that a config names; a Hub id is not requested."""
    place = fields.get("draft_model")
    if not isinstance(place, str):
        return [f"config.json names no draft model: draft_model is {place!r}"]
    if _is_found(place, folder) or (place == OWN_DRAFT_MODEL if folder is None else not _is_beside(place)):
        return []
    return [f"the draft model {place!r}, relative to the checkpoint, does not exist"]


def last_layers(model: PreTrainedModel, count: int) -> tuple[int, ...]:
    """The 0-based indices of a model's last decoder layers."""
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return tuple(range(layers - count, layers))
