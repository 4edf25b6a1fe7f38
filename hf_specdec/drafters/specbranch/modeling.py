"""SpecBranchDrafter: a draft model that drafts while the target verifies, and H-RAD, which predicts draft lengths.

Only H-RAD is trained; the draft model is any causal language model with the target's tokenizer. The code of a call is
in `candidates.py` and `drafting.py`. Source: SpecBranch, Sections 5.1 and 5.2.
"""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from hf_specdec.decoding.generator import ChoiceRule, TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.card import is_hub_id
from hf_specdec.drafters.causal_lm import CausalLMDrafter
from hf_specdec.drafters.pretrained import PretrainedDrafter
from hf_specdec.drafters.publishing import one_layout
from hf_specdec.drafters.registry import name_of
from hf_specdec.drafters.specbranch.branches import CONFIDENCE, DraftingPlan
from hf_specdec.drafters.specbranch.configuration import OWN_DRAFT_MODEL, SpecBranchConfig, SpecBranchOptions
from hf_specdec.drafters.specbranch.drafting import BranchDrafting
from hf_specdec.drafters.specbranch.placement import choose_worker, make_worker
from hf_specdec.drafters.specbranch.process import DraftingProcesses, process_refusal
from hf_specdec.drafters.specbranch.worker import Worker
from hf_specdec.drafters.wrapped import has_adapters, merged_adapters, unwrapped

NUM_CLASSES = 3  # all reject, by confidence, all accept


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
    base_model_prefix = ""
    late_files: ClassVar[tuple[str, ...]] = (f"{OWN_DRAFT_MODEL}/*",)
    _device_marker: Tensor

    def __init__(self, config: SpecBranchConfig) -> None:
        config.check()
        super().__init__(config)
        # Device and dtype of a drafter without H-RAD and draft model.
        self.register_buffer("_device_marker", torch.empty(0), persistent=False)
        self.h_rad = HRAD(config) if config.h_rad else None
        # Not a submodule: its weights are stored in separate files, mostly in another repo.
        self.__dict__["_pair"] = None
        self._processes = DraftingProcesses()
        self._measured: tuple[weakref.ref[PreTrainedModel], Any] | None = None
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
        target_config = target.config.get_text_config(decoder=True)
        config = SpecBranchConfig(
            draft_model=draft_model.name_or_path if is_hub_id(draft_model.name_or_path) else OWN_DRAFT_MODEL,
            h_rad=h_rad,
            target_hidden_size=target_config.hidden_size,
            num_target_layers=target_config.num_hidden_layers,
            num_feature_layers=min(4, target_config.num_hidden_layers),
            target_name_or_path=target.name_or_path or None,
        )
        drafter = cls(config).eval()
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
        for field, found in (
            ("draft_hidden_size", own.hidden_size),
            ("draft_num_layers", own.num_hidden_layers),
        ):
            trained = getattr(self.config, field)
            if trained not in (None, found):
                raise ValueError(
                    f"The H-RAD of {self.name_or_path or 'this drafter'!r} was trained with a draft model whose "
                    f"{field.removeprefix('draft_')} is {trained}, but {draft_model.name_or_path!r} has {found}. "
                    f"It fits only the pair it was trained for: use {self.config.draft_model!r}, or train another."
                )
        self.__dict__["_pair"] = CausalLMDrafter(draft_model.eval())
        self._processes = DraftingProcesses()  # those of the previous draft model end

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
        if _is_found(location, folder) and not adapted:
            yield
            return
        if self.draft_model is None:
            where = "the Hub" if folder is None else repr(str(folder))
            warnings.warn(
                f"The draft model {location!r} cannot be found from {where}, and this drafter has not loaded it, "
                "so it cannot be saved too: load it with load_drafter(), or call attach(draft_model), and save it "
                "again.",
                stacklevel=4,
            )
            yield
            return
        self.config.draft_model = OWN_DRAFT_MODEL
        try:
            yield
        finally:
            self.config.draft_model = location

    def write_side_files(self, folder: Path) -> None:
        if self.h_rad is None:  # transformers would write no file, and leave that of an earlier drafter
            save_file({}, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
        if self.config.draft_model == OWN_DRAFT_MODEL and self.draft_model is not None:
            with one_layout(folder / OWN_DRAFT_MODEL):
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

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        from hf_specdec.drafters.specbranch.candidates import SpecBranchGenerator, SpeedRatio

        options, draft_model = self.options, self.draft_model
        assert draft_model is not None, "check_target requires it"
        if self._measured is None or self._measured[0]() is not target.model:
            self._measured = weakref.ref(target.model), SpeedRatio()

        kind = choose_worker(options.worker if options.parallel else "none", draft_model, self._processes)

        def make_drafting(choice: ChoiceRule, vocab_size: int) -> BranchDrafting:
            branches = options.k_max if options.parallel else 1
            plan = DraftingPlan(
                most_tokens=options.max_depth,
                most_branches=branches,
                most_hedges=branches - 1 if options.hedge else 0,
                min_confidence=options.min_confidence,
                draw_candidates=options.candidates == "drawn",
                choice=choice,
                vocab_size=vocab_size,
            )
            return BranchDrafting(draft_model, plan)

        def run_in_worker(drafting: BranchDrafting) -> Worker:
            return make_worker(kind, drafting, options.worker_threads, self._processes)

        embeddings = target.model.get_input_embeddings()
        return SpecBranchGenerator(
            target,
            make_drafting,
            run_in_worker,
            self._measured[1] if options.speed_ratio is None else SpeedRatio(options.speed_ratio),
            predict=(lambda features, ids: self.predict(features, ids, embeddings))
            if options.lengths == "h_rad"
            else None,
            lengths=options.lengths,
            posterior=options.selection == "posterior",
            hedged=options.parallel and options.hedge and options.k_max > 1,
            num_threads=options.worker_threads,
        )

    def card_summary(self) -> str:
        return (
            "SpecBranch: a draft model that drafts the next branches while the target verifies the current ones, and "
            "H-RAD, a small network on the target's hidden states that predicts how much of a draft will be accepted."
        )

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
        target = model.config.get_text_config(decoder=True)
        name, target_name = name_of(self), name_of(model)
        if self.config.h_rad:
            named = repr(self.config.target_name_or_path) if self.config.target_name_or_path else "that target"
            for field, found in (
                ("target_hidden_size", target.hidden_size),
                ("num_target_layers", target.num_hidden_layers),
            ):
                trained = getattr(self.config, field)
                if trained != found:
                    raise ValueError(
                        f"The H-RAD of {name!r} was trained for a target whose {field.removeprefix('target_')} is "
                        f"{trained}, but target {target_name!r} has {found}. It fits only the pair it was trained for: "
                        f"use {named}, or train one for this pair."
                    )
        if self._pair is None:
            if self.device.type != "meta":  # on the meta device only shapes are checked
                raise ValueError(
                    f"{name!r} has no draft model yet: load it with load_drafter(), or call attach(draft_model)."
                )
            return
        self._pair.check_target(model)
        if self.options.worker == "process" and self.options.parallel:
            assert self.draft_model is not None
            refusal = process_refusal(self.draft_model.device)
            if refusal is not None:
                raise ValueError(f"worker='process' cannot be used: {refusal}. Use worker='thread', or 'auto'.")


def _is_found(location: str | None, folder: Path | None) -> bool:
    """Whether a config's `draft_model` can be resolved from a folder; None for the Hub."""
    if location is None:
        return False
    if location == OWN_DRAFT_MODEL or location.startswith("."):
        return folder is not None and (folder / location).resolve().is_dir()
    if Path(location).is_absolute():
        return folder is not None and Path(location).is_dir()
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", location) is not None and not Path(location).exists()  # a Hub id


def last_layers(model: PreTrainedModel, count: int) -> tuple[int, ...]:
    """The 0-based indices of a model's last decoder layers."""
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return tuple(range(layers - count, layers))
