"""SpecBoundDrafter: exit heads on shallow layers of a frozen target, which drafts for itself.

A head is the target's final norm, followed by the target's head with its own low-rank update ("lora", the default) or
by its own matrix ("full", as in the paper). The drafter has no layers; `drafting.py` runs the target's. A low-rank
update is a PEFT adapter on disk: `PeftModel.from_pretrained(target, checkpoint, subfolder="exit-layer-04")` is the
target with the exit head of its 4th layer. Source: SpecBound, Sections 2.2, 2.3 and 3.1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import LoraConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.hooks import are_steady, foreign_functions, names_of
from hf_specdec.decoding.targets.modules import apply_head, has_plain_weight
from hf_specdec.decoding.targets.support import ignores_cache
from hf_specdec.drafting.config import TargetFields
from hf_specdec.drafting.draft_logits import AnnealedConfidenceLogitsProcessor, check_annealing
from hf_specdec.drafting.options import PausingOptions, is_number
from hf_specdec.drafting.registry import name_of
from hf_specdec.drafting.shapes import check_shapes, way_out
from hf_specdec.drafting.vocabulary import MappedVocabulary
from hf_specdec.drafting.wrapped import unwrapped
from hf_specdec.hub.pretrained import PretrainedDrafter
from hf_specdec.methods.specbound.calibration import ExitCalibration, calibrate
from hf_specdec.methods.specbound.drafting import EarlyExitGenerator, LayerSlices, check_slices

HEAD_KINDS = ("lora", "full")
# Section 3.1 of the paper: 10 of Vicuna-7B's 32 layers.
PAPER_WIDTH, PAPER_DEPTH_SHARE, PAPER_ALPHA, PAPER_THRESHOLD = 8, 10 / 32, 0.2, 0.55
SIDE_FILES = ("exit-layer-*/adapter_config.json", f"exit-layer-*/{SAFETENSORS_WEIGHTS_NAME}")
# Least cosine similarity of two samples of the same head, which may be loaded in different dtypes or quantised.
LEAST_LIKENESS = 0.8


class SpecBoundConfig(TargetFields):
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

    num_target_layers: int = 32
    hidden_size: int = 4096
    vocab_size: int = 32000
    exit_layers: Any = (4, 7, 10)
    head: str = "lora"
    lora_rank: int = 64
    draft_vocab_size: Any = None
    head_module: str = "lm_head"
    w_max: int = PAPER_WIDTH
    d_max: Any = None
    alpha: float = PAPER_ALPHA
    threshold: float = PAPER_THRESHOLD
    use_exit_layers: Sequence[int] | None = None
    learn_refusals: bool = True
    target_head_sample: list[float] | None = None
    calibration: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.exit_layers, (list, tuple)):
            raise ValueError(f"exit_layers is {self.exit_layers!r}; it must be a list of at least one layer.")
        self.exit_layers = list(self.exit_layers)
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.d_max is None:
            self.d_max = paper_depth(self.num_target_layers, self.exit_layers)
        if self.use_exit_layers is not None:
            self.use_exit_layers = list(self.use_exit_layers)
        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Raises ValueError, naming the field, if no heads can be built from this config."""
        self.check_sizes("num_target_layers", "hidden_size", "vocab_size", "lora_rank", "draft_vocab_size")
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

    Examples:
        >>> paper_depth(32, [4, 7, 10]), paper_depth(24, [9, 13])
        (10, 9)
    """
    return max(round(PAPER_DEPTH_SHARE * num_target_layers), 1, *exit_layers[:1])


@dataclass(slots=True, kw_only=True)
class SpecBoundOptions(PausingOptions):
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
        return cls(**{name: getattr(config, name) for name in cls.names() if name not in PausingOptions.names()})

    def validate(self, config: Any = None) -> None:
        """As for every drafter; `config` is a `SpecBoundConfig`."""
        PausingOptions.validate(self, config)
        self.check_switches("learn_refusals")
        self.check_integers(w_max=1024)
        num_layers, heads, chosen = config.num_target_layers, config.exit_layers, self.use_exit_layers
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


class ExitHead(nn.Module):
    """The weights that one exit layer adds to the target's head.

    Args:
        config: of the drafter.
    """

    def __init__(self, config: SpecBoundConfig) -> None:
        super().__init__()
        hidden, rank = config.hidden_size, config.lora_rank
        if config.head == "lora":
            self.lora_A = nn.Parameter(torch.zeros(rank, hidden))
            self.lora_B = nn.Parameter(torch.zeros(config.vocab_size, rank))
        else:
            self.weight = nn.Parameter(torch.zeros(config.draft_vocab_size, hidden))


class SpecBoundDrafter(MappedVocabulary, PretrainedDrafter):
    """Exit heads as a drafter: drafts a chain by early exit, and verifies it by running the remaining layers.

    Drafting options: `SpecBoundOptions`.

    Relation to its siblings: the only one without its own network, cache and forward. The shallow layers of a rejected
    draft are not extra work for the target, but each draft costs layers of the target, so it gains less per round.
    """

    config_class = SpecBoundConfig
    config: SpecBoundConfig
    options_class = SpecBoundOptions
    mergeable = False
    states_at_nodes = False
    options: SpecBoundOptions
    _no_split_modules: ClassVar = ["ExitHead"]
    side_files: ClassVar[tuple[str, ...]] = SIDE_FILES
    saved_side_files: ClassVar[tuple[str, ...]] = SIDE_FILES
    card_summary = (
        "SpecBound exit heads: the target drafts for itself. A token exits at the first exit layer whose annealed "
        "confidence reaches a threshold, the hidden states of drafted tokens are stored, and one pass through the "
        "remaining layers verifies all of them. The heads are LoRA adapters on the target's own head."
    )

    def __init__(self, config: SpecBoundConfig) -> None:
        config.check()
        super().__init__(config)
        self.heads = nn.ModuleDict({str(layer): ExitHead(config) for layer in config.exit_layers})
        # As in other formats: target id = draft id + d2t[draft id].
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self._merged: dict[int, tuple[Any, Tensor, Tensor | None]] = {}
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ExitHead):
            # As in LoRA: the update is zero initially, and its first gradient is not.
            if self.config.head == "lora":
                nn.init.normal_(module.lora_A, std=self.config.hidden_size**-0.5)
                nn.init.zeros_(module.lora_B)
            else:
                nn.init.normal_(module.weight, std=0.02)
        elif module is self:
            nn.init.zeros_(self.d2t)

    @property
    def exits(self) -> list[int]:
        """Exit layers in use, ascending: the chosen ones up to d_max."""
        chosen = self.options.use_exit_layers
        layers = self.config.exit_layers if chosen is None else chosen
        return [layer for layer in layers if layer <= self.options.d_max]

    def exit_rules(self, layers: Sequence[int] | None = None) -> dict[int, AnnealedConfidenceLogitsProcessor]:
        """The annealed confidence threshold per exit layer; None for the layers in use."""
        depth, options = self.config.num_target_layers, self.options
        return {
            layer: AnnealedConfidenceLogitsProcessor(layer, depth, alpha=options.alpha, threshold=options.threshold)
            for layer in (self.exits if layers is None else layers)
        }

    def forward(self, layer: int, states: Tensor, slices: LayerSlices) -> Tensor:
        """The logits of an exit layer's head.

        Args:
            layer: an exit layer.
            states: [..., hidden] after that many layers of the target.
            slices: the target's; its final norm and, for "lora", its head are used.

        Returns:
            [..., draft_vocab] logits; "lora" without a draft vocabulary: of the tokens that drafter and target share.
        """
        head: Any = self.heads[str(layer)]
        normed = slices.norm(states)
        if self.config.head == "full":
            return nn.functional.linear(normed.to(head.weight.dtype), head.weight)
        lm_head, up = slices.lm_head, head.lora_B
        ids = self.target_ids
        if not self.config.maps_vocabulary:
            logits = apply_head(lm_head, normed)[..., : len(up)]  # the target may have more or fewer
            up = up[: logits.shape[-1]]
        elif has_plain_weight(lm_head):
            weight, up = lm_head.weight[ids].to(up.dtype), up[ids]
            bias = None if lm_head.bias is None else lm_head.bias[ids].to(up.dtype)
            logits = nn.functional.linear(normed.to(up.dtype), weight, bias)
        else:  # quantised or offloaded
            logits, up = apply_head(lm_head, normed)[..., ids], up[ids]
        low = nn.functional.linear(normed.to(up.dtype), head.lora_A)
        return slices.shape_logits(logits + nn.functional.linear(low, up))

    def exit_logits(self, layer: int, states: Tensor, slices: LayerSlices) -> Tensor:
        """`forward` in float32; heads of a reduced vocabulary are gathered and merged once per target.

        Args:
            layer: an exit layer.
            states: [batch, hidden] on the target's device.
            slices: the target's.
        """
        if self.config.head == "full" or not self.config.maps_vocabulary or not has_plain_weight(slices.lm_head):
            return self(layer, states, slices).float()
        weight, bias = self._merged_head(layer, slices)
        return slices.shape_logits(nn.functional.linear(slices.norm(states).to(weight.dtype), weight, bias).float())

    def _merged_head(self, layer: int, slices: LayerSlices) -> tuple[Tensor, Tensor | None]:
        """[draft_vocab, hidden] with the low-rank update added, and the bias."""
        head: Any = self.heads[str(layer)]
        lm_head = slices.lm_head
        inputs = (lm_head.weight, head.lora_A, head.lora_B, self.d2t)
        versions = tuple((tensor.data_ptr(), tensor._version) for tensor in inputs)
        if layer not in self._merged or self._merged[layer][0] != versions:
            ids = self.target_ids
            with torch.no_grad():
                weight = lm_head.weight[ids]
                weight = torch.addmm(weight, head.lora_B[ids].to(weight.dtype), head.lora_A.to(weight.dtype))
                self._merged[layer] = versions, weight, None if lm_head.bias is None else lm_head.bias[ids]
        return self._merged[layer][1:]

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return EarlyExitGenerator(self, target)

    def calibrate(
        self,
        prompts: Sequence[str | Sequence[int] | Tensor],
        target: PreTrainedModel | None = None,
        **settings: Any,
    ) -> ExitCalibration:
        """Sets exit layers, threshold, w_max and d_max from measurements on these prompts and this machine.

        The target continues each prompt greedily; see `calibration.py` for what is measured and how choices are
        compared (Eq. 5 with measured times). The annealing is not changed. The result is stored in
        `config.calibration`, which `save_pretrained` saves with the new options.

        Args:
            prompts: texts, or token ids [seq]; about a dozen that resemble the later ones.
            target: None for that of the `generate` calls so far, if there is one only.
            settings: `new_tokens` per prompt (64); `thresholds` and `widths` to choose from.

        Raises:
            ValueError: no target, no prompts, or a target that does not fit.
        """
        if target is None:
            if len(known := self.known_targets()) != 1:
                raise ValueError("calibrate() needs a target: pass target=, or call generate with this drafter first.")
            (target,) = known
        target = unwrapped(target)
        self.check_target(target)
        return calibrate(self, target, prompts, **settings)

    # On disk.

    @classmethod
    def side_tensors(cls, folder: Path, name: str) -> dict[str, Tensor]:
        return read_adapters(folder, name)

    def main_tensors(self) -> dict[str, Tensor] | None:
        if self.config.head != "lora":
            return None
        return {name: tensor for name, tensor in self.state_dict().items() if ".lora_" not in name}

    def write_side_files(self, folder: Path) -> None:
        for layer in self.config.exit_layers if self.config.head == "lora" else ():
            head: Any = self.heads[str(layer)]
            rank, module = self.config.lora_rank, self.config.head_module
            adapter = folder / folder_of(layer)
            LoraConfig(
                r=rank,
                lora_alpha=rank,  # lora_alpha / r scales the update: 1
                target_modules=[module],
                base_model_name_or_path=self.config.target_name_or_path,
                task_type="CAUSAL_LM",
                inference_mode=True,
            ).save_pretrained(str(adapter))
            parts = {"lora_A": head.lora_A, "lora_B": head.lora_B}
            tensors = {f"base_model.model.{module}.{part}.weight": parts[part].detach().cpu() for part in parts}
            save_file(tensors, adapter / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})

    def store_options(self) -> None:
        """As for every drafter; also sets the config's own fields for the options."""
        for name, value in self.options.to_dict(self.config).items():
            if hasattr(self.config, name):
                setattr(self.config, name, value)
        super().store_options()

    # Card and checks.

    def card_facts(self) -> dict[str, str]:
        config, options = self.config, self.options
        heads = f"LoRA of rank {config.lora_rank}" if config.head == "lora" else "a matrix each"
        facts = {
            "Method": "specbound",
            "Exit layers": f"{', '.join(map(str, config.exit_layers))} of {config.num_target_layers}; heads: {heads}",
            "Draft vocabulary": f"{config.draft_vocab_size} of {config.vocab_size}",
            "Drafting": f"exits at {', '.join(map(str, self.exits))}, threshold {options.threshold}, "
            f"alpha {options.alpha}, w_max {options.w_max}, d_max {options.d_max}",
        }
        if config.calibration is not None:
            facts["Calibrated"] = config.calibration["summary"]
        return facts

    def check_target(self, model: PreTrainedModel) -> None:
        """Compares sizes and a sample of the target's head, and checks that its layers can be run in slices.

        Once per target, so that later calls do not wait for it, and again with functions of the user in its forwards.
        """
        known, functions = self.known_of(model), foreign_functions(model)
        names = ("fits", *names_of(model, functions)) if functions else ("fits",)
        if names in known and are_steady(functions):
            return
        config = self.config
        check_shapes(
            self,
            model,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            may_exceed=True,
            num_layers=config.num_target_layers,
            # Of a complete vocabulary, tokens that the target lacks are cut off.
            d2t=self.d2t if config.maps_vocabulary else None,
        )
        lm_head = model.get_output_embeddings()
        if config.target_head_sample is not None and has_plain_weight(lm_head):
            found = sample_of(lm_head.weight, config.vocab_size)
            recorded = torch.tensor(config.target_head_sample[: len(found)], device=found.device)
            likeness = nn.functional.cosine_similarity(found, recorded, dim=0).item()
            if not likeness >= LEAST_LIKENESS:
                raise ValueError(
                    f"Drafter {name_of(self)!r} holds adapters trained for another target: values of the head of "
                    f"{name_of(model)!r} have a cosine similarity of {likeness:.2f} with those recorded at training "
                    f"(at least {LEAST_LIKENESS} is required). {way_out(self)}"
                )
        if not ignores_cache(model):  # else `generate` refuses it
            check_slices(model)
            known[names] = True


def folder_of(layer: int) -> str:
    """The folder of an exit layer's adapter within a checkpoint.

    Examples:
        >>> folder_of(4)
        'exit-layer-04'
    """
    return f"exit-layer-{layer:02d}"


def read_adapters(checkpoint: Path, name: str) -> dict[str, Tensor]:
    """The adapters of a checkpoint, by their names in the drafter's state dict; empty without such folders.

    Args:
        checkpoint: its folder.
        name: what the user has passed, for messages.

    Raises:
        ValueError: an adapter is not a LoRA of one module, or is damaged; names the file.
    """
    found: dict[str, Tensor] = {}
    for folder in sorted(checkpoint.glob("exit-layer-*")):
        where = f"{folder.name} of {name!r}"
        layer = folder.name.removeprefix("exit-layer-")
        if not layer.isdigit():
            raise ValueError(f"{where} does not end in a layer number; adapter folders are {folder_of(4)!r}, ...")
        try:
            config = LoraConfig.from_pretrained(str(folder))
            tensors = load_file(folder / SAFETENSORS_WEIGHTS_NAME)
            if type(config.r) is not int or config.r < 1 or not 0 <= config.lora_alpha < float("inf"):
                raise ValueError(
                    f"r is {config.r!r} and lora_alpha {config.lora_alpha!r}; both must be numbers above 0"
                )
        except Exception as error:  # foreign files, read by foreign classes: any exception is possible
            raise ValueError(
                f"{where} cannot be read as a PEFT LoRA adapter ({type(error).__name__}: {error}). Copy or download "
                "the checkpoint again."
            ) from error
        parts = {key.split(".")[-2]: tensor for key, tensor in tensors.items() if key.endswith(".weight")}
        if len(tensors) != 2 or parts.keys() != {"lora_A", "lora_B"}:
            raise ValueError(
                f"{where} holds {', '.join(sorted(tensors)) or 'no tensors'}; an exit head is the lora_A and lora_B "
                "of one module, the target's head."
            )
        scale, update = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r), parts["lora_B"]
        found[f"heads.{int(layer)}.lora_A"] = parts["lora_A"]
        found[f"heads.{int(layer)}.lora_B"] = update if scale == 1 else (update.float() * scale).to(update.dtype)
    return found


def sample_of(weight: Tensor, rows: int, count: int = 32) -> Tensor:
    """[count] float32: values of a matrix at indices that depend only on `rows` and the number of columns.

    Fewer values if the matrix has fewer rows.
    """
    flat = weight.detach().flatten()
    indices = torch.arange(count, device=flat.device) * (rows * weight.shape[1] // count)
    return flat[indices[indices < flat.numel()]].float().cpu()


def adapter_shapes(fields: dict[str, Any]) -> dict[str, dict[str, tuple[int, ...]]]:
    """The tensors of the adapters that a config describes, by file."""
    if fields.get("head", "lora") != "lora":
        return {}
    rank = fields.get("lora_rank", 64)
    parts: dict[str, tuple[int, ...]] = {
        ".lora_A.weight": (rank, fields["hidden_size"]),
        ".lora_B.weight": (fields["vocab_size"], rank),
    }
    return {f"{folder_of(layer)}/{SAFETENSORS_WEIGHTS_NAME}": parts for layer in fields["exit_layers"]}
