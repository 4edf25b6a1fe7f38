"""MTPDrafter: the multi-token-prediction layer of the target's own checkpoint, applied again for each further token.

    z_i = projection [norm_e(E[x_(i+1)]); norm_h(h_i)],   a_i = Layer(z_1 .. z_i),   logits of x_(i+2) = head(norm(a_i))

with h_i the target's state behind its final norm, and for drafted tokens the layer's own. These are EAGLE's pairs, so
that trees grow as EAGLE's do (`eagle3/candidates.py`). Layer, norms and rotary positions are of the target's own
classes; embedding and head are the target's. Source: shared facts on formats of 2026, section 7.4; DeepSeek-V3, arXiv
2412.19437, Section 2.2.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.taps import decoder_layers
from hf_specdec.decoding.target import TargetModel
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.eagle3 import Eagle3Options
from hf_specdec.drafters.mtp.layouts import Layout


@dataclass(slots=True, kw_only=True)
class MTPOptions(Eagle3Options):
    """How a multi-token-prediction layer drafts; it was trained for one token, so that trees are shallow.

    Attributes:
        depth: see `Eagle3Options`, as the others.
        top_k: see there.
        tree_budget: see there.
    """

    method = "mtp"
    depth: int = 4
    top_k: int = 4
    tree_budget: int | Literal["auto"] = 16


class MTPDrafter(Drafter, nn.Module):
    """The multi-token-prediction layer of a target, made by `load_drafter("mtp", target)`.

    It fits that target alone and is not saved: it lies in the target's checkpoint already.

    Args:
        target: the model; embedding, head and rotary positions stay its own.
        layout: how its checkpoint names the tensors.
        tensors: of the layer, by their names in the checkpoint.
        drafting_options: of `MTPOptions`.

    Raises:
        ValueError: the tensors are not those of such a layer of this target.
    """

    options_class = MTPOptions
    options: MTPOptions

    def __init__(
        self, target: PreTrainedModel, layout: Layout, tensors: Mapping[str, Tensor], **drafting_options: Any
    ) -> None:
        nn.Module.__init__(self)
        self.options = self.options_class()
        self.set_options(**drafting_options)
        self.layout, self.name_or_path = layout, target.name_or_path
        base: Any = target.get_decoder()
        missing = [name for name in ("norm", "rotary_emb") if getattr(base, name, None) is None]
        if missing:
            raise ValueError(
                f"{type(base).__name__} of target {target.name_or_path!r} has no {' and no '.join(missing)}, which its "
                "multi-token-prediction layer would need a copy of: this kind of target is not known here."
            )
        table = target.get_input_embeddings().weight
        self.num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        # What `Eagle3Generator` asks for.
        self.config = SimpleNamespace(own_embeddings=False, maps_vocabulary=False, draft_vocab_size=len(table))
        self._borrowed = (target.get_output_embeddings(), base.rotary_emb)  # not submodules: they stay the target's
        own, rest = {}, {}
        for name, tensor in tensors.items():
            if any(name.startswith(f"{each}.") for each in layout.own()):
                own[name] = tensor
            elif name.startswith(layout.layer):
                rest[name.removeprefix(layout.layer)] = tensor
        self.embedding_norm = _filled(base.norm, layout.embedding_norm, own)
        self.state_norm = _filled(base.norm, layout.state_norm, own)
        self.final_norm = None if layout.final_norm is None else _filled(base.norm, layout.final_norm, own)
        hidden = table.shape[1]
        projection = nn.Linear(2 * hidden, hidden, bias=f"{layout.projection}.bias" in own).to(table)
        self.projection = _filled(projection, layout.projection, own)
        self.layer = _decoder_layer(target, rest)
        self.eval().requires_grad_(False)
        self.entry_shape = self._probe()

    @property
    def device(self) -> torch.device:
        """Of its weights."""
        return self.projection.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return self.projection.weight.dtype

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        return (self.num_layers,)  # what leaves the decoder, behind its final norm

    def check_target(self, model: PreTrainedModel) -> None:
        if model.name_or_path != self.name_or_path or model.get_output_embeddings() is not self._borrowed[0]:
            raise ValueError(
                f"This drafter is the multi-token-prediction layer of target {self.name_or_path!r} as it was loaded. "
                f"It does not draft for {model.name_or_path!r}: load_drafter('mtp', target) makes one for that."
            )

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        from hf_specdec.drafters.eagle3.candidates import Eagle3Generator

        return Eagle3Generator(self, target)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's states as they are: [batch, seq, hidden]."""
        return features

    def recurrent(self, outputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden], the state that goes into the next draft step."""
        return self._normed(outputs) if self.layout.recurs_normed else outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab] float32."""
        return self._borrowed[0](self._normed(outputs)).float()

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """The ids are the target's."""
        return draft_ids

    def _normed(self, outputs: Tensor) -> Tensor:
        return outputs if self.final_norm is None else self.final_norm(outputs)

    def forward(
        self,
        embeddings: Tensor,
        states: Tensor,
        position_ids: Tensor,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        cache: TreeCache | DynamicCache | None = None,
    ) -> Tensor:
        """One forward over pairs of a token and the state before it; arguments as for `Eagle3Drafter.forward`.

        Returns:
            [batch, seq, hidden], before the final norm.
        """
        if self.layout.zero_first:
            embeddings = embeddings.masked_fill((position_ids == 0).unsqueeze(-1), 0)
        joined = self.projection(torch.cat([self.embedding_norm(embeddings), self.state_norm(states)], dim=-1))
        output = self.layer(
            joined,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=cache is not None,
            position_embeddings=self._borrowed[1](joined, position_ids),
        )
        return output[0] if isinstance(output, tuple) else output

    @torch.no_grad()
    def _probe(self) -> tuple[int, int, int, int]:
        """Layers, heads, and widths of keys and values, as the layer keeps them."""
        nothing = torch.zeros(1, 1, self.projection.out_features, device=self.device, dtype=self.dtype)
        cache = DynamicCache()
        self(nothing, nothing, torch.zeros(1, 1, dtype=torch.int64, device=self.device), cache=cache)
        held: Any = cache.layers[0]
        return 1, held.keys.shape[1], held.keys.shape[-1], held.values.shape[-1]


def _filled(template: nn.Module, name: str, tensors: Mapping[str, Tensor]) -> Any:
    """A copy of a module with the weights of this name."""
    module = copy.deepcopy(template)
    given = {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
    _load(module, given, name)
    return module


def _load(module: nn.Module, tensors: Mapping[str, Tensor], name: str) -> None:
    wanted = module.state_dict()
    shapes = {key: tuple(value.shape) for key, value in wanted.items()}
    given = {key: tuple(value.shape) for key, value in tensors.items()}
    if shapes != given:
        differ = sorted(key for key in shapes.keys() | given.keys() if shapes.get(key) != given.get(key))
        parts = [f"{key} {given.get(key, 'missing')}, where {shapes.get(key, 'nothing')} belongs" for key in differ]
        more = f", and {len(parts) - 4} more" if len(parts) > 4 else ""
        raise ValueError(
            f"The multi-token-prediction tensors {name!r} of the checkpoint are not of this target's kind: "
            f"{', '.join(parts[:4])}{more}. This layout is not read yet; use another drafter."
        )
    module.load_state_dict({key: tensor.to(wanted[key]) for key, tensor in tensors.items()})


def _decoder_layer(target: PreTrainedModel, tensors: dict[str, Tensor]) -> nn.Module:
    """A decoder layer of the target's kind with these weights, in a cache of its own."""
    layers: Any = list(decoder_layers(target))
    # The latest of the kind that has such tensors: a dense layer, one with experts, one without states.
    names = {_EXPERT.sub(_joined_name, name) for name in tensors}
    fitting = [layer for layer in layers if layer.state_dict().keys() in (names, tensors.keys())]
    layer = copy.deepcopy((fitting or layers)[-1])
    for module in layer.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = 0
        if hasattr(module, "config"):  # a copy: the loop may run the target with another attention function
            module.config._attn_implementation = "eager" if target.config._attn_implementation == "eager" else "sdpa"
    _load(layer, tensors if layer.state_dict().keys() == tensors.keys() else _joined(tensors), "decoder layer")
    return layer


_EXPERT = re.compile(r"experts\.(\d+)\.(gate|up|down)_proj\.weight$")


def _joined_name(expert: re.Match[str]) -> str:
    return "experts.down_proj" if expert[2] == "down" else "experts.gate_up_proj"


def _joined(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as the host's layers want them: experts that are stored one by one are joined."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        if (one := _EXPERT.search(name)) is None:
            found[name] = tensor
        else:
            experts.setdefault(name[: one.start()], {}).setdefault(int(one[1]), {})[one[2]] = tensor
    for prefix, parts in experts.items():
        each = [parts[number] for number in sorted(parts)]
        found[f"{prefix}experts.gate_up_proj"] = torch.stack([torch.cat([part["gate"], part["up"]]) for part in each])
        found[f"{prefix}experts.down_proj"] = torch.stack([part["down"] for part in each])
    return found
