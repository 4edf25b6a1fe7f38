"""SpecBranchDrafter: a draft model that drafts while the target verifies, and H-RAD, which tells it how far.

H-RAD is the only network that is trained here; the draft model is any causal language model with the target's
tokenizer. How a call drafts is in `candidates.py` and `drafting.py`. Source: SpecBranch, Sections 5.1 and 5.2.
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
from hf_specdec.drafters.specbranch.branches import CONFIDENCE, DraftingPlan
from hf_specdec.drafters.specbranch.configuration import OWN_DRAFT_MODEL, SpecBranchConfig, SpecBranchOptions
from hf_specdec.drafters.specbranch.drafting import BranchDrafting
from hf_specdec.drafters.specbranch.placement import make_worker, place
from hf_specdec.drafters.specbranch.process import DraftingProcesses, process_refusal
from hf_specdec.drafters.specbranch.worker import Worker

NUM_CLASSES = 3  # all reject, by confidence, all accept


class HRAD(nn.Module):
    """The hybrid rollback-aware draft length predictor: will the draft be rejected, in part accepted, or accepted?

    Three linear layers with ReLU and dropout on the target's last K layers at the last verified token and the embedding
    of the token after it. SpecBranch, Eq. 4 and 5, and Appendix E.4. Its inputs are standardised by the mean and the
    spread of the training data, which the paper does only while it augments them: hidden states of some layers are a
    hundred times larger than embeddings, and a learning rate of 5e-5 would not make up for that.
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
    """Drafts the next branches while the target verifies this one.

    Drafting options: `SpecBranchOptions`.

    Relation to its siblings: `causal_lm` drafts with the same kind of model, but only while the target waits. The other
    drafters read the target's hidden states, and so cannot draft before it has finished.
    """

    config_class = SpecBranchConfig
    config: SpecBranchConfig
    options_class = SpecBranchOptions
    mergeable = False
    options: SpecBranchOptions
    base_model_prefix = ""
    late_files: ClassVar[tuple[str, ...]] = (f"{OWN_DRAFT_MODEL}/*",)
    _whereabouts: Tensor

    def __init__(self, config: SpecBranchConfig) -> None:
        config.check()
        super().__init__(config)
        # Without an H-RAD there is nothing else of a device and dtype.
        self.register_buffer("_whereabouts", torch.empty(0), persistent=False)
        self.h_rad = HRAD(config) if config.h_rad else None
        # No submodule: its weights are files of their own, and mostly somebody else's.
        self.__dict__["_pair"] = None
        self._processes = DraftingProcesses()
        self._measured: tuple[weakref.ref[PreTrainedModel], Any] | None = None
        self.post_init()

    @classmethod
    def from_models(
        cls, draft_model: PreTrainedModel, target: PreTrainedModel, *, h_rad: bool = False, **drafting_options: Any
    ) -> SpecBranchDrafter:
        """A drafter for two models that are loaded already.

        Args:
            draft_model: not changed, and shared rather than copied.
            target: the model to draft for.
            h_rad: with an H-RAD, yet to be trained; without, drafting goes by the draft model's confidence.
            drafting_options: of `SpecBranchOptions`.
        """
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
        return self._whereabouts if self.draft_model is None else self.draft_model

    @property
    def num_tokens(self) -> int | None:
        """None: the draft model's vocabulary is compared with the target's in `check_target`."""
        return None

    @property
    def draft_model(self) -> PreTrainedModel | None:
        """The language model that drafts."""
        return None if self._pair is None else self._pair.model

    def attach(self, draft_model: PreTrainedModel) -> None:
        """Sets the draft model.

        Raises:
            ValueError: H-RAD was trained with one of another shape.
        """
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
        self._processes = DraftingProcesses()  # those of another draft model end

    def load_beside(
        self,
        folder: Path,
        locate: Callable[[Sequence[str]], Path],
        fetch: Callable[[str], Drafter],
        *,
        from_hub: bool,
    ) -> None:
        place = self.config.draft_model
        name = self.name_or_path
        if place is None:
            raise ValueError(
                f"{name!r} names no draft model (draft_model in its config.json), so it cannot draft: save it again "
                "with a draft model attached."
            )
        if from_hub and place != OWN_DRAFT_MODEL and not _is_found(place, None):
            raise ValueError(
                f"{name!r} is from the Hub and names {place!r} as its draft model, but a checkpoint from there can "
                f"only name a Hub id, 'owner/name', that is no folder here, or {OWN_DRAFT_MODEL!r} in its repo. "
                "Nothing was opened: use another drafter, or download this one and its draft model to folders."
            )
        if place == OWN_DRAFT_MODEL or place.startswith("."):
            if place == OWN_DRAFT_MODEL:
                folder = locate(self.late_files)
            found = (folder / place).resolve()
            if not found.is_dir():
                raise FileNotFoundError(
                    f"The draft model of {name!r} should be in the folder {place!r}, seen from there, but it is not. "
                    "Put it there, or name another one as draft_model in config.json."
                )
            place = str(found)
        try:
            loaded = fetch(place)
        except (OSError, ValueError) as error:
            kind = OSError if isinstance(error, OSError) else ValueError
            raise kind(f"The draft model of {name!r} cannot be had. {error}") from error
        assert isinstance(loaded, CausalLMDrafter)
        self.attach(loaded.model)
        self._pair.tokenizer_folder = loaded.tokenizer_folder

    @contextmanager
    def config_for(self, folder: Path | None) -> Iterator[None]:
        """A draft model that would not be found from there goes along, into a folder of the checkpoint."""
        place = self.config.draft_model
        if _is_found(place, folder):
            yield
            return
        if self.draft_model is None:
            warnings.warn(
                f"The draft model {place!r} is not found from {'the Hub' if folder is None else repr(str(folder))}, "
                "and this drafter has none at hand that could go along: load it with load_drafter(), or call "
                "attach(draft_model), and save it again.",
                stacklevel=4,
            )
            yield
            return
        self.config.draft_model = OWN_DRAFT_MODEL
        try:
            yield
        finally:
            self.config.draft_model = place

    def write_side_files(self, folder: Path) -> None:
        if self.h_rad is None:  # transformers writes no file then, and would leave an earlier drafter's
            save_file({}, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
        if self.config.draft_model == OWN_DRAFT_MODEL and self.draft_model is not None:
            with one_layout(folder / OWN_DRAFT_MODEL):
                self.draft_model.save_pretrained(folder / OWN_DRAFT_MODEL)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self.draft_model is not None:
            self.draft_model._apply(fn)
        return super()._apply(fn, recurse)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Moves H-RAD and the draft model, as `torch.nn.Module.to` does.

        Raises:
            ValueError: there is no such device.
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
            token_ids: [batch] int64, the token after it, which the target has not seen.
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
        assert draft_model is not None, "check_target has looked"
        if self._measured is None or self._measured[0]() is not target.model:
            self._measured = weakref.ref(target.model), SpeedRatio()

        kind = place(options.worker if options.parallel else "none", draft_model, self._processes)

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

        def place_worker(drafting: BranchDrafting) -> Worker:
            return make_worker(kind, drafting, options.worker_threads, self._processes)

        embeddings = target.model.get_input_embeddings()
        return SpecBranchGenerator(
            target,
            make_drafting,
            place_worker,
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
        name, target_name = self.name_or_path or type(self).__name__, model.name_or_path or type(model).__name__
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
            if self.device.type != "meta":  # a blueprint, which only knows the shapes
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


def _is_found(place: str | None, folder: Path | None) -> bool:
    """Whether what a config names as its draft model would be found from a folder; None for the Hub."""
    if place is None:
        return False
    if place == OWN_DRAFT_MODEL or place.startswith("."):
        return folder is not None and (folder / place).resolve().is_dir()
    if Path(place).is_absolute():
        return folder is not None and Path(place).is_dir()
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", place) is not None and not Path(place).exists()  # a Hub id


def last_layers(model: PreTrainedModel, count: int) -> tuple[int, ...]:
    """The 0-based indices of a model's last decoder layers."""
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return tuple(range(layers - count, layers))
