"""SpecBoundDrafter: exit heads on shallow layers of a frozen target, which drafts for itself.

Source: SpecBound, Sections 2.2, 2.3 and 3.1. A head is the target's final norm, followed by the target's head with its
own low-rank update ("lora", the default) or by its own matrix ("full", as in the paper). The drafter has no layers;
`candidates.py` runs the target's.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.logits_process import AnnealedConfidenceLogitsProcessor
from hf_specdec.decoding.modules import apply_head, has_plain_weight
from hf_specdec.decoding.target import TargetModel
from hf_specdec.drafters.pretrained import PretrainedDrafter
from hf_specdec.drafters.registry import name_of
from hf_specdec.drafters.shapes import check_shapes, way_out
from hf_specdec.drafters.specbound.adapters import (
    SIDE_FILES,
    folder_of,
    read_adapters,
    remove_adapters,
    sample_of,
    write_adapter,
)
from hf_specdec.drafters.specbound.configuration import SpecBoundConfig, SpecBoundOptions
from hf_specdec.drafters.specbound.pending import check_slices
from hf_specdec.drafters.specbound.slices import LayerSlices
from hf_specdec.drafters.vocabulary import check_draft_to_target
from hf_specdec.drafters.wrapped import unwrapped

if TYPE_CHECKING:
    from hf_specdec.drafters.specbound.calibration import Calibration

# Least cosine similarity of two samples of the same head, which may be loaded in different dtypes or quantised.
LEAST_LIKENESS = 0.8


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


class SpecBoundDrafter(PretrainedDrafter):
    """Exit heads as a drafter: drafts a chain by early exit, and verifies it by running the remaining layers.

    Drafting options: `SpecBoundOptions`.

    Relation to its siblings: the only one without its own network, cache and forward. The shallow layers of a rejected
    draft are not extra work for the target, but each draft costs layers of the target, so it gains less per round.
    """

    config_class = SpecBoundConfig
    config: SpecBoundConfig
    options_class = SpecBoundOptions
    mergeable = False
    options: SpecBoundOptions
    d2t: Tensor
    base_model_prefix = ""
    _no_split_modules: ClassVar = ["ExitHead"]
    side_files: ClassVar[tuple[str, ...]] = SIDE_FILES

    def __init__(self, config: SpecBoundConfig) -> None:
        config.check()
        super().__init__(config)
        self.heads = nn.ModuleDict({str(layer): ExitHead(config) for layer in config.exit_layers})
        # As in other formats: target id = draft id + d2t[draft id].
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self._merged: dict[int, tuple[Any, Tensor, Tensor | None]] = {}
        self._paired: weakref.ref[PreTrainedModel] | None = None
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

    @property
    def draft_ids(self) -> Tensor | None:
        """[draft_vocab] int64 target ids that can be drafted; None for the complete vocabulary."""
        if self.config.draft_vocab_size == self.config.vocab_size:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Sets the draft vocabulary: [draft_vocab] int64, ascending target ids.

        Raises:
            ValueError: the number of ids differs, or they do not ascend or are outside the target's vocabulary.
        """
        size = self.config.draft_vocab_size
        ascending = bool((target_ids.diff() > 0).all())
        if target_ids.shape != (size,) or not ascending:
            raise ValueError(
                f"A draft vocabulary for draft_vocab_size={size} must be {size} ascending ids, but got "
                f"{list(target_ids.shape)} of them, {'' if ascending else 'not '}ascending."
            )
        self.d2t.copy_(target_ids - torch.arange(size))
        check_draft_to_target(self.d2t, self.config.vocab_size, name_of(self))

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
        ids = self.draft_ids
        if ids is None:
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
        if self.config.head == "full" or self.draft_ids is None or not has_plain_weight(slices.lm_head):
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
            ids = self.draft_ids
            with torch.no_grad():
                weight = lm_head.weight[ids]
                weight = torch.addmm(weight, head.lora_B[ids].to(weight.dtype), head.lora_A.to(weight.dtype))
                self._merged[layer] = versions, weight, None if lm_head.bias is None else lm_head.bias[ids]
        return self._merged[layer][1:]

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        from hf_specdec.drafters.specbound.candidates import EarlyExitGenerator

        return EarlyExitGenerator(self, target)

    def calibrate(
        self,
        prompts: Sequence[str | Sequence[int] | Tensor],
        target: PreTrainedModel | None = None,
        **settings: Any,
    ) -> Calibration:
        """Sets exit layers, threshold, w_max and d_max from measurements on these prompts and this machine.

        The target continues each prompt greedily; see `calibration.py` for what is measured and how choices are
        compared (Eq. 5 with measured times). The annealing is not changed. The result is stored in
        `config.calibration`, which `save_pretrained` saves with the new options; printing it shows the tables.

        Args:
            prompts: texts, or token ids [seq]; about a dozen that resemble the later ones.
            target: None for the target of the latest `generate` call; `load_drafter(target=...)` does not set it.
            settings: `new_tokens` per prompt (64); `thresholds` and `widths` to choose from.

        Raises:
            ValueError: no target, no prompts, or a target that does not fit.
        """
        from hf_specdec.drafters.specbound.calibration import calibrate

        target = target if target is not None else self._paired() if self._paired is not None else None
        if target is None:
            raise ValueError("calibrate() needs a target: pass target=, or call generate with this drafter first.")
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
        layers = self.config.exit_layers if self.config.head == "lora" else []
        remove_adapters(folder, keep=layers)
        for layer in layers:
            head: Any = self.heads[str(layer)]
            write_adapter(
                folder / folder_of(layer),
                head.lora_A.detach(),
                head.lora_B.detach(),
                head_module=self.config.head_module,
                base_model=self.config.target_name_or_path,
            )

    def remove_side_files(self, folder: Path) -> None:
        remove_adapters(folder, keep=())

    def store_options(self) -> None:
        """As for every drafter; also sets the config's own fields for the options."""
        for name, value in self.options.to_dict(self.config).items():
            setattr(self.config, name, value)
        super().store_options()

    # Card and checks.

    def card_summary(self) -> str:
        return (
            "SpecBound exit heads: the target drafts for itself. A token exits at the first exit layer whose annealed "
            "confidence reaches a threshold, the hidden states of drafted tokens are stored, and one pass through the "
            "remaining layers verifies all of them. The heads are LoRA adapters on the target's own head."
        )

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

        Once per target, so that later calls do not wait for it.
        """
        if self._paired is not None and self._paired() is model:
            return
        config = self.config
        check_shapes(
            self,
            model,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_layers=config.num_target_layers,
        )
        name, target_name = name_of(self), name_of(model)
        shared = config.vocab_size
        if config.draft_vocab_size < config.vocab_size:  # else tokens that the target lacks are cut off
            shared = min(shared, model.get_input_embeddings().num_embeddings)
        check_draft_to_target(self.d2t, shared, name)
        lm_head = model.get_output_embeddings()
        if config.target_head_sample is not None and has_plain_weight(lm_head):
            found = sample_of(lm_head.weight, config.vocab_size)
            recorded = torch.tensor(config.target_head_sample[: len(found)])
            likeness = nn.functional.cosine_similarity(found, recorded, dim=0).item()
            if not likeness >= LEAST_LIKENESS:
                raise ValueError(
                    f"Drafter {name!r} holds adapters trained for another target: values of the head of "
                    f"{target_name!r} have a cosine similarity of {likeness:.2f} with those recorded at training "
                    f"(at least {LEAST_LIKENESS} is required). {way_out(self)}"
                )
        check_slices(model)
        self._paired = weakref.ref(model)
