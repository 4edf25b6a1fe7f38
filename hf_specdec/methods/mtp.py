"""Multi-token prediction: the layer of the target's own checkpoint, applied again for each further token.

    z_i = projection [norm_e(E[x_(i+1)]); norm_h(h_i)],   a_i = Layer(z_1 .. z_i),   logits of x_(i+2) = head(norm(a_i))

with h_i the target's state, and for drafted tokens the layer's own. These are EAGLE's pairs, so that trees grow as
EAGLE's do (`growth.py`). Layer, norms and rotary positions are of the target's own classes; embedding and
head are the target's, but for families with a head in the layer. The table of `MTPLayout`s says how checkpoints name
the tensors and what differs between families; where readers differ, it follows vLLM, which serves these files. Only the
first of several layers is used. The tensors are read from the target's own files, since transformers
leaves them out.
Source: shared facts on formats of 2026, sections 7.1 and 7.4; DeepSeek-V3, arXiv 2412.19437, Section 2.2.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.masks import SLIDING, additive
from hf_specdec.decoding.targets.modules import apply_head, core_of, is_quantised
from hf_specdec.decoding.targets.taps import decoder_layers
from hf_specdec.decoding.upstream import CACHE, load_part
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.drafting.registry import Serving, register
from hf_specdec.drafting.vocabulary import HeadRows, draftable_rows
from hf_specdec.hub.files import Source
from hf_specdec.hub.formats.base import Unsupported, architecture
from hf_specdec.hub.formats.speculators import is_kind
from hf_specdec.hub.target_files import dequantised, locate_target
from hf_specdec.methods.eagle3.drafting import Eagle3Generator
from hf_specdec.methods.eagle3.network import Eagle3Options
from hf_specdec.unsafe_keys import listed

_META = torch.device("meta")


@dataclass(frozen=True)
class MTPLayout:
    """Where the tensors of one layer are, names without ".weight", and how the layer is run.

    Attributes:
        embedding_norm: norm of the token's embedding.
        state_norm: norm of the target's state.
        projection: of both.
        final_norm: before the head; None for none.
        layers: prefixes of the decoder layers that run one after the other; all but Nemotron-H have one.
        head: output head of the layer; None for the target's.
        others: names behind a prefix that belong to no decoder layer: copies of the target's tables.
        renamed: parts of names in a decoder layer, and what the target's layers call them.
        layer_type: the entry in the config's `layer_types` that describes the attention, unless the config has
            `mtp_layer_types`.
        state_first: the projection takes [state; embedding], not [embedding; state].
        state_normed: the target's state is taken behind its final norm, not before.
        recurs_normed: the state for the next draft step is taken behind `final_norm`, not before.
        zero_first: the embedding of a text's first pair is replaced by zeros.
        needs: what the layer needs that is not implemented; None for layers that can be loaded.
    """

    embedding_norm: str
    state_norm: str
    projection: str
    final_norm: str | None
    layers: tuple[str, ...]
    head: str | None = None
    others: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    layer_type: str = "full_attention"
    state_first: bool = False
    state_normed: bool = True
    recurs_normed: bool = True
    zero_first: bool = False
    needs: str | None = None

    def part_of(self, name: str) -> str | None:
        """The norm, projection, head or prefix of a decoder layer that a tensor belongs to; None: to none of them."""
        single = (self.embedding_norm, self.state_norm, self.projection, self.final_norm, self.head)
        for part in single:
            if part is not None and name.startswith(f"{part}."):
                return part
        if any(name.startswith(f"{other}.") for other in self.others):
            return None
        return next((prefix for prefix in self.layers if name.startswith(prefix)), None)

    def below(self, prefix: str, known: Collection[str]) -> MTPLayout:
        """The layout with a prefix in front of all names.

        "*" in `final_norm` stands for the first number for which a checkpoint has that norm; in `layers` for all up to
        it.
        """
        last = 0
        if self.final_norm is not None and "*" in self.final_norm:
            pattern = f"{prefix}{self.final_norm}.weight"
            last = next((each for each in range(64) if pattern.replace("*", str(each)) in known), 0)
        layers = itertools.chain.from_iterable(
            [name.replace("*", str(each)) for each in range(last + 1)] if "*" in name else [name]
            for name in self.layers
        )
        return replace(
            self,
            embedding_norm=f"{prefix}{self.embedding_norm}",
            state_norm=f"{prefix}{self.state_norm}",
            projection=f"{prefix}{self.projection}",
            final_norm=None if self.final_norm is None else f"{prefix}{self.final_norm}".replace("*", str(last)),
            head=None if self.head is None else f"{prefix}{self.head}",
            layers=tuple(f"{prefix}{name}" for name in layers),
            others=tuple(f"{prefix}{name}" for name in self.others),
        )


# The tensor of the projection, its prefix in group 1, N for the number of the target's layers; a further name behind
# the prefix that tells this row from the next ones; the names behind the prefix.
_ROWS: tuple[tuple[str, str | None, MTPLayout], ...] = (
    (  # step3p5, step3p7
        r"(.*\blayers\.N\.)eh_proj",
        "transformer.shared_head.norm",
        MTPLayout(
            "enorm", "hnorm", "eh_proj", "transformer.shared_head.norm", ("",), head="transformer.shared_head.output",
            others=("embed_tokens", "transformer.embed_tokens"), renamed=(("transformer.", ""),),
            state_normed=False, recurs_normed=False,
        ),
    ),
    (  # hy_v3, bailing_hybrid, bailing_moe
        r"(.*\blayers\.N\.)eh_proj",
        "final_layernorm",
        MTPLayout(
            "enorm", "hnorm", "eh_proj", "final_layernorm", ("",), others=("embed_tokens", "shared_head"),
            zero_first=True,
        ),
    ),
    (  # deepseek_v3, deepseek_v32, glm4_moe, glm4_moe_lite, glm_moe_dsa, glm_ocr
        r"(.*\blayers\.N\.)eh_proj",
        None,
        MTPLayout(
            "enorm", "hnorm", "eh_proj", "shared_head.norm", ("",), others=("embed_tokens", "shared_head.head"),
            zero_first=True,
        ),
    ),
    (  # longcat_flash
        r"((?:.*\.)?mtp\.)layers\.0\.eh_proj",
        "layers.0.enorm.m",
        MTPLayout(
            "layers.0.enorm.m", "layers.0.hnorm.m", "layers.0.eh_proj", "norm", ("layers.0.",),
            needs="a decoder layer of one attention and one dense MLP, where the target's have two of each and experts",
        ),
    ),
    (  # nemotron_h
        r"((?:.*\.)?mtp\.)layers\.0\.eh_proj",
        "layers.0.norm",
        MTPLayout(
            "layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj", "layers.*.final_layernorm", ("layers.*.",),
        ),
    ),
    (  # mimo_v2_flash
        r"((?:.*\.)?mtp\.layers\.0\.)eh_proj",
        None,
        MTPLayout(
            "enorm", "hnorm", "eh_proj", "final_layernorm", ("",),
            renamed=(("pre_mlp_layernorm.", "post_attention_layernorm."),), layer_type="sliding_attention",
        ),
    ),
    (  # mimo
        r"((?:.*\.)?mtp_layers\.0\.)input_proj",
        None,
        MTPLayout(
            "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", ("",),
            state_first=True, state_normed=False, zero_first=True,
        ),
    ),
    (  # inkling
        r"((?:.*\.)?mtp\.layers\.0\.)input_proj",
        None,
        MTPLayout(
            "embed_norm", "hidden_norm", "input_proj", None, ("transformer_block.",), state_first=True,
            needs="a decoder layer with short convolutions, whose states a draft tree would have to keep per node",
        ),
    ),
    (  # qwen3_next, qwen3_5, qwen3_5_moe, exaone_moe, mellum, olmo_hybrid
        r"((?:.*\.)?mtp\.)fc",
        None,
        MTPLayout("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", ("layers.0.",)),
    ),
    (  # ernie4_5_moe
        r"((?:.*\.)?)mtp_linear_proj\.0",
        None,
        MTPLayout(
            "mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0", None, ("mtp_block.0.",), zero_first=True,
        ),
    ),
)  # fmt: skip
LOOKED_FOR = ("eh_proj", "input_proj", "mtp.fc", "mtp_linear_proj")
# Model types that differ from their row.
_FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe": {"recurs_normed": False},
    "glm4_moe_lite": {"recurs_normed": False, "zero_first": False},
    "glm_ocr": {"recurs_normed": False, "zero_first": False},
    "mellum": {"layer_type": "sliding_attention"},
    "qwen4_exp": {"needs": "the several residual streams of this family's decoder layers"},
    "qwen4_exp_text": {"needs": "the several residual streams of this family's decoder layers"},
}


def find_layout(names: Iterable[str], num_layers: int, model_type: str) -> MTPLayout | None:
    """The layout of the first multi-token-prediction layer among a checkpoint's tensors; None where there is none.

    Args:
        names: of all tensors.
        num_layers: of the target's decoder; the layer may be numbered behind them.
        model_type: of the target's text config.

    Examples:
        >>> names = ["mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.up_proj.weight"]
        >>> find_layout(names, 4, "qwen3_next").layers
        ('mtp.layers.0.',)
    """
    known = set(names)
    for pattern, beside, layout in _ROWS:
        projection = re.compile(rf"{pattern.replace('N', re.escape(str(num_layers)))}\.weight")
        for prefix in (found[1] or "" for found in map(projection.fullmatch, sorted(known)) if found):
            if beside is None or f"{prefix}{beside}.weight" in known:
                return replace(layout.below(prefix, known), **_FAMILIES.get(model_type, {}))
    return None


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


def check_supported(target: PreTrainedModel, layout: MTPLayout) -> None:
    """Raises ValueError if a target's layer cannot be built, which is known before its tensors are read."""
    kind = f"The multi-token-prediction layer of {_kind(target)}"
    if layout.needs is not None:
        raise ValueError(f"{kind} needs {layout.needs}. That is not supported: use another drafter.")
    copies = f"{kind} is built from copies of the target's modules"
    if any(parameter.is_meta for parameter in target.parameters()):
        raise ValueError(
            f"{copies}, but weights of the target are offloaded: load it without offloading, or use another drafter."
        )
    if is_quantised(target):
        raise ValueError(
            f"{copies}, but weights of the target are quantised: load it in bfloat16, with quantization_config="
            "FineGrainedFP8Config(dequantize=True) if it is stored in blocks of 8 bits, or use another drafter."
        )
    if _final_norm(target) is None:
        raise ValueError(
            f"{copies}, but its {type(target.get_decoder()).__name__} has no final norm under a name that is known "
            "here: use another drafter."
        )


def _kind(target: PreTrainedModel) -> str:
    return f"target {target.name_or_path!r} ({type(target).__name__})"


def _final_norm(target: PreTrainedModel) -> Any:
    base = target.get_decoder()
    return getattr(base, "norm", getattr(base, "norm_f", None))


class MTPDrafter(Drafter, nn.Module):
    """The multi-token-prediction layer of a target, made by `load_drafter("mtp", target)`.

    It fits that target alone and is not saved: it lies in the target's checkpoint already.

    Of several such layers the first is applied again for each further token, as vLLM does for checkpoints with one. In
    training, layer k reads the output of layer k - 1 at the same positions, with the tokens shifted once more
    (DeepSeek-V3, Section 2.2): its keys and values at the last k committed positions depend on the drafted tokens, so
    that each branch of a tree would need its own entries for them.

    Args:
        target: the model; embedding, head and rotary positions stay its own.
        layout: how its checkpoint names the tensors.
        tensors: of the layer, by their names in the checkpoint, in any floating-point type.
        drafting_options: of `MTPOptions`.

    Raises:
        ValueError: the tensors are not those of such a layer of this target. `check_supported` comes first.
    """

    options_class = MTPOptions
    options: MTPOptions

    def __init__(
        self, target: PreTrainedModel, layout: MTPLayout, tensors: Mapping[str, Tensor], **drafting_options: Any
    ) -> None:
        nn.Module.__init__(self)
        self.options = self.options_class()
        self.set_options(**drafting_options)
        self.layout, self.name_or_path = layout, target.name_or_path
        kind = _kind(target)
        base: Any = target.get_decoder()
        norm = _final_norm(target)
        table = target.get_input_embeddings().weight
        self.num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        # What `Eagle3Generator` asks for.
        self.config = SimpleNamespace(own_embeddings=False, maps_vocabulary=False, draft_vocab_size=len(table))
        # Not submodules: they stay the target's.
        self._borrowed = (target.get_output_embeddings(), getattr(base, "rotary_emb", None))
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if (part := layout.part_of(name)) is not None:
                parts.setdefault(part, {})[name.removeprefix(part).removeprefix(".")] = tensor
        self.num_rows = len(table)
        self.target_ids: Tensor | None = None  # of a restricted vocabulary, of which the whole head is kept besides
        self.whole_head: tuple[Any] | None = None
        self.embedding_norm = _filled(norm, layout.embedding_norm, parts, kind)
        self.state_norm = _filled(norm, layout.state_norm, parts, kind)
        self.final_norm = None if layout.final_norm is None else _filled(norm, layout.final_norm, parts, kind)
        vocab, hidden = table.shape
        projection = nn.Linear(2 * hidden, hidden, bias="bias" in parts.get(layout.projection, {})).to(table)
        self.projection = _filled(projection, layout.projection, parts, kind)
        self.head = None
        if layout.head is not None:
            self.head = _filled(nn.Linear(hidden, vocab, bias=False).to(table), layout.head, parts, kind)
        blocks: list[_Block] = []
        for number, prefix in enumerate(layout.layers):
            index = sum(block.attends for block in blocks)
            blocks.append(_Block(target, layout, number, parts.get(prefix, {}), index))
        self.blocks = nn.ModuleList(blocks)
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
        return (self.num_layers if self.layout.state_normed else self.num_layers - 1,)

    def check_target(self, model: PreTrainedModel) -> None:
        head = core_of(model.get_output_embeddings())
        if model.name_or_path != self.name_or_path or head is not core_of(self._borrowed[0]):
            raise ValueError(
                f"This drafter is the multi-token-prediction layer of target {self.name_or_path!r} as it was loaded. "
                f"It does not draft for {model.name_or_path!r}: load_drafter('mtp', target) makes one for that."
            )

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return Eagle3Generator(self, target)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's states as they are: [batch, seq, hidden]."""
        return features

    def recurrent(self, outputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden], the state that goes into the next draft step."""
        return self._normed(outputs) if self.layout.recurs_normed else outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab] float32."""
        head = self._borrowed[0] if self.head is None else self.head
        return apply_head(head, self._normed(outputs))

    def restrict_vocabulary(self, draft_vocab: Tensor | Sequence[int]) -> None:
        own = torch.arange(self.num_rows, device="cpu") if self.target_ids is None else self.target_ids
        rows = draftable_rows(own, draft_vocab, self.num_rows, str(self.name_or_path))
        if len(rows) < len(own):
            self.whole_head = self.whole_head or (self._borrowed[0] if self.head is None else self.head,)
            self.target_ids = own[rows]
            self.head = HeadRows(self.whole_head[0], self.target_ids)
            self.config.maps_vocabulary, self.config.draft_vocab_size = True, len(rows)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's ids of ids of the draft vocabulary."""
        return draft_ids if self.target_ids is None else self.target_ids.to(draft_ids.device)[draft_ids]

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
        joined = [self.embedding_norm(embeddings), self.state_norm(states)]
        hidden = self.projection(torch.cat(joined[::-1] if self.layout.state_first else joined, dim=-1))
        if mask is None and any(block.needs_mask for block in self.blocks):
            mask = additive(position_ids.unsqueeze(1) <= position_ids.unsqueeze(2), self.dtype)
        for block in self.blocks:
            hidden = block(hidden, position_ids, mask, cache, self._borrowed[1])
        return hidden

    @torch.no_grad()
    def _probe(self) -> tuple[int, int, int, int, int | None]:
        """Layers, heads, and widths of keys, of values and of an indexer's keys, as the layer keeps them."""
        nothing = torch.zeros(1, 1, self.projection.out_features, device=self.device, dtype=self.dtype)
        count = sum(bool(block.attends) for block in self.blocks)
        cache = TreeCache(count, [DynamicIndexedLayer()] * count)
        self(nothing, nothing, torch.zeros(1, 1, dtype=torch.int64, device=self.device), cache=cache)
        held: Any = cache.layers[0]
        index_dim = None if held.index is None else held.index.shape[-1]
        return count, held.keys.shape[1], held.keys.shape[-1], held.values.shape[-1], index_dim


class _Block(nn.Module):
    """A decoder layer of the target's kind, with weights of its own.

    Its attention is that of a layer of the wanted type, its MLP that of any layer: a checkpoint may combine them as no
    layer of the target does (MiMo-V2-Flash: sliding attention with a dense MLP).

    Args:
        target: the model.
        layout: of the checkpoint.
        number: of this layer among those that run one after the other.
        tensors: by their names in the checkpoint, without the layer's prefix.
        index: of its entries in the cache.
    """

    def __init__(
        self, target: PreTrainedModel, layout: MTPLayout, number: int, tensors: dict[str, Tensor], index: int
    ) -> None:
        super().__init__()
        config: Any = target.config.get_text_config(decoder=True)
        own = getattr(config, "mtp_layer_types", None) or getattr(config, "mtp_layers_block_type", None) or ()
        wanted = own[number] if number < len(own) else layout.layer_type
        layers = list(decoder_layers(target))
        types = getattr(config, "layer_types", None) or [None] * len(layers)
        for theirs, ours in layout.renamed:
            tensors = {name.replace(theirs, ours): tensor for name, tensor in tensors.items()}
        self.layer, place = _loaded(target, layers, [each == wanted for each in types], tensors, layout.layers[number])
        kind = types[place]
        if kind == "linear_attention":
            raise ValueError(
                f"The multi-token-prediction layer of {_kind(target)} is one of {kind}, whose "
                "states a draft tree would have to keep per node. That is not supported: use another drafter."
            )
        self.attends = kind not in ("moe", "mlp")  # layers of Nemotron-H are either
        eager = target.config._attn_implementation == "eager"
        module: Any
        for module in self.layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
            if hasattr(module, "config"):  # a copy: the loop may run the target with another attention function
                module.config._attn_implementation = "eager" if eager else "sdpa"
        rotary = getattr(target.get_decoder(), "rotary_emb", None)
        typed = rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters
        self.rotary_type = [kind] if typed else []
        slides = kind in SLIDING if any(types) else True  # without types, a window is that of all layers
        self.window: int | None = getattr(config, "sliding_window", None) if slides else None
        indexed = any(name.endswith("indexer") for name, _ in self.layer.named_modules())
        self.needs_mask = eager or indexed or self.window is not None  # else torch's causal attention is used

    def forward(
        self, hidden: Tensor, position_ids: Tensor, mask: Tensor | None, cache: Any, rotary: nn.Module | None
    ) -> Tensor:
        """[batch, seq, hidden] -> the same; the mask is additive, [batch, 1, seq, entries], or None for causal."""
        if self.window is not None and mask is not None:
            # Entries of committed tokens are in the order of their positions, from 0 or the end of a cache that was
            # passed in. Drafted tokens are stored at or after the entry of their position, so none is hidden.
            seen = (mask[:, 0, 0] == 0).sum(-1, keepdim=True)  # by the first token, itself included
            positions = position_ids[:, :1] + 1 - seen + torch.arange(mask.shape[-1], device=mask.device)
            past = positions.unsqueeze(1) <= position_ids.unsqueeze(2) - self.window
            mask = mask.masked_fill(past.unsqueeze(1), torch.finfo(mask.dtype).min)
        arguments: dict[str, Any] = {CACHE: cache}
        if rotary is not None:
            # Of text, height and width, where the family has all three; transformers 5.17 does not expand them itself.
            axes = position_ids.expand(3, -1, -1) if hasattr(rotary, "mrope_section") else position_ids
            arguments["position_embeddings"] = rotary(hidden, axes, *self.rotary_type)
        output = self.layer(
            hidden, attention_mask=mask, position_ids=position_ids, use_cache=cache is not None, **arguments
        )
        return output[0] if isinstance(output, tuple) else output


def _filled(template: nn.Module, name: str, parts: Mapping[str, Mapping[str, Tensor]], kind: str) -> Any:
    """A copy of a module with the weights of this name."""
    module = copy.deepcopy(template)
    try:
        module.load_state_dict(parts.get(name, {}))
    except RuntimeError as error:
        raise _misfit(kind, [f"{name}: {error}"]) from error
    return module


def _loaded(
    target: PreTrainedModel, layers: list[nn.Module], fitting: list[bool], tensors: dict[str, Tensor], prefix: str
) -> tuple[nn.Module, int]:
    """A copy of a decoder layer with these weights, and the number of the layer that its attention is of.

    Args:
        target: the model.
        layers: of its decoder.
        fitting: which have the wanted type of attention; all are tried if none has.
        tensors: by their names in the checkpoint, without `prefix`.
        prefix: in the checkpoint, for the message.
    """
    path = next(name for name, module in target.named_modules() if layers[0] in module.children())
    shapes = [{name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()} for layer in layers]
    numbers = range(len(layers) - 1, -1, -1)  # the latest first
    tried: dict[frozenset[Any], list[str]] = {}
    described = {name: tensor.to(_META) for name, tensor in tensors.items()}
    for number in (each for each in numbers if fitting[each] or not any(fitting)):
        rest = {name: shape for name, shape in shapes[number].items() if not name.startswith("mlp.")}
        for donor in numbers if hasattr(layers[number], "mlp") else (number,):
            mlp = {name: shape for name, shape in shapes[donor].items() if name.startswith("mlp.")}
            combined = shapes[number] if donor == number else rest | mlp
            key = frozenset(combined.items())
            if key in tried:
                continue
            layer: Any = _emptied(layers[number])
            if donor != number:
                layer.mlp = _emptied(layers[donor].mlp)  # type: ignore[arg-type]
            tried[key] = load_part(target, f"{path}.{number}", layer, described, _META)
            if not tried[key]:
                device = next(layers[number].parameters()).device
                load_part(target, f"{path}.{number}", layer, tensors, device)
                return layer, number
    fewest = min(tried.values(), key=len)
    raise _misfit(_kind(target), [f"{prefix}{each}" for each in fewest])


def _emptied(module: nn.Module) -> nn.Module:
    """A copy without the weights, whose parameters are on the meta device."""
    empty = {id(each): nn.Parameter(each.to(_META), requires_grad=False) for each in module.parameters()}
    return copy.deepcopy(module, empty)


def _misfit(kind: str, differences: list[str]) -> ValueError:
    more = f", and {len(differences) - 4} more" if len(differences) > 4 else ""
    return ValueError(
        f"The multi-token-prediction tensors in the checkpoint of {kind} are not those of a layer of this target: "
        f"{', '.join(differences[:4])}{more}. The file is damaged or of a layout that is not supported: download it "
        "again, or use another drafter."
    )


# Layers that were published by themselves; they are read from the target's files only.
_NEEDED = "the target's own layers of which it is a part: load the target with them"
NOT_READ = (
    Unsupported("speculators mtp", _NEEDED, is_kind("mtp"), rank=0),
    Unsupported("multi-token prediction", _NEEDED, architecture("MTP", "MtpModel")),
)
MTP = "mtp"
# Keys of a target's config that count its layers for this.
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")


def load_mtp(target: PreTrainedModel | None, source: Source, **drafting_options: Any) -> MTPDrafter | None:
    """Makes the drafter that lies in the target's checkpoint, where "mtp", or the target's own name, asks for it.

    Args:
        target: the loaded target.
        source: what was asked for, with the settings of downloads.
        drafting_options: of `MTPOptions`.

    Returns:
        None where something else is meant: another name, or a target as its own draft model, without such a layer.

    Raises:
        ValueError: there is no target; its checkpoint has no such layer, or one that is damaged or not supported.
        OSError: its files cannot be read or downloaded.
    """
    asked = source.name == MTP and not Path(MTP).is_dir()
    if not asked and (target is None or not source.name or source.name != target.name_or_path):
        return None
    if target is None:
        raise ValueError(
            "The drafter 'mtp' is the multi-token-prediction layer in a target's own checkpoint: pass the loaded "
            "model, load_drafter('mtp', target)."
        )
    if not target.name_or_path:
        raise ValueError(
            "The target has no name_or_path, so the checkpoint with its multi-token-prediction layer is unknown: load "
            "it with from_pretrained."
        )
    files = locate_target(replace(source, name=target.name_or_path), getattr(target.config, "_commit_hash", None))
    config = target.config.get_text_config(decoder=True)
    layout = find_layout(files.shards, config.num_hidden_layers, config.model_type)
    if layout is None:
        if not asked:
            return None
        raise ValueError(_nothing_found(target, files.shards))
    check_supported(target, layout)
    wanted = [name for name in files.shards if layout.part_of(name) is not None]
    tensors = dequantised(files.load(wanted), files.config, target.dtype, target.name_or_path)
    if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise ValueError(
            f"The multi-token-prediction layer of {target.name_or_path!r} has NaN or infinite numbers in "
            f"{listed(broken)}: the checkpoint is damaged. Download it again, or use another drafter."
        )
    return MTPDrafter(target, layout, tensors, **drafting_options)


def layer_note(names: Collection[str], fields: dict[str, Any]) -> str | None:
    """What `inspect_drafter` says about the layer in a checkpoint with these tensors and this config; None if none."""
    how = f"load_drafter({MTP!r}, target)"
    nested = fields.get("text_config")
    text = fields | (nested if isinstance(nested, dict) else {})
    layout = find_layout(names, text.get("num_hidden_layers", 0), str(text.get("model_type")))
    if layout is None:
        return None
    place = f"It holds a multi-token-prediction layer at {layout.projection}"
    if layout.needs is not None:
        return f"{place}, which {how} does not support: the layer needs {layout.needs}."
    return f"{place}: as a target it drafts for itself, with {how}."


def _nothing_found(target: PreTrainedModel, names: Any) -> str:
    config = target.config.get_text_config(decoder=True)
    said = {key: getattr(config, key) for key in COUNTS if getattr(config, key, None)}
    near = [name for name in names if "mtp" in name]
    hint = f" Its config says {said}." if said else ""
    if near:
        hint += f" {near[0]} and {len(near) - 1} more are of a layout that is not supported."
    return (
        f"The checkpoint of target {target.name_or_path!r} has no multi-token-prediction layer that is known here: "
        f"looked for {', '.join(LOOKED_FOR)} among its {len(names)} tensors.{hint} Use another drafter for it."
    )


register(
    "mtp",
    MTPDrafter,
    origin="target",
    of_target=load_mtp,
    in_target=layer_note,
    not_read=NOT_READ,
    serving=Serving(
        "mtp",
        "vLLM reads the layer in the target's own checkpoint (method mtp in --speculative-config)",
        default_tokens=1,
        note="vLLM reads the multi-token-prediction layer of the targets for which it has a class.",
    ),
)
