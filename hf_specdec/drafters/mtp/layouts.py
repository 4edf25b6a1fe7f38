"""How checkpoints name the tensors of their multi-token-prediction layers, and how each layer is run.

A layer pairs the embedding of a token with the target's state before it, joins the two by one projection, and runs a
decoder layer of the target's kind. Where readers differ, the table follows vLLM, which serves these files. Only the
first of several layers is used. Source: shared facts on formats of 2026, sections 7.1 and 7.4. Neither torch nor
transformers is needed here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Layout:
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

    def below(self, prefix: str, known: Collection[str]) -> Layout:
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
_ROWS: tuple[tuple[str, str | None, Layout], ...] = (
    (  # step3p5, step3p7
        r"(.*\blayers\.N\.)eh_proj",
        "transformer.shared_head.norm",
        Layout(
            "enorm", "hnorm", "eh_proj", "transformer.shared_head.norm", ("",), head="transformer.shared_head.output",
            others=("embed_tokens", "transformer.embed_tokens"), renamed=(("transformer.", ""),),
            state_normed=False, recurs_normed=False,
        ),
    ),
    (  # hy_v3, bailing_hybrid, bailing_moe
        r"(.*\blayers\.N\.)eh_proj",
        "final_layernorm",
        Layout(
            "enorm", "hnorm", "eh_proj", "final_layernorm", ("",), others=("embed_tokens", "shared_head"),
            zero_first=True,
        ),
    ),
    (  # deepseek_v3, deepseek_v32, glm4_moe, glm4_moe_lite, glm_moe_dsa, glm_ocr
        r"(.*\blayers\.N\.)eh_proj",
        None,
        Layout(
            "enorm", "hnorm", "eh_proj", "shared_head.norm", ("",), others=("embed_tokens", "shared_head.head"),
            zero_first=True,
        ),
    ),
    (  # longcat_flash
        r"((?:.*\.)?mtp\.)layers\.0\.eh_proj",
        "layers.0.enorm.m",
        Layout(
            "layers.0.enorm.m", "layers.0.hnorm.m", "layers.0.eh_proj", "norm", ("layers.0.",),
            needs="a decoder layer of one attention and one dense MLP, where the target's have two of each and experts",
        ),
    ),
    (  # nemotron_h
        r"((?:.*\.)?mtp\.)layers\.0\.eh_proj",
        "layers.0.norm",
        Layout(
            "layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj", "layers.*.final_layernorm", ("layers.*.",),
        ),
    ),
    (  # mimo_v2_flash
        r"((?:.*\.)?mtp\.layers\.0\.)eh_proj",
        None,
        Layout(
            "enorm", "hnorm", "eh_proj", "final_layernorm", ("",),
            renamed=(("pre_mlp_layernorm.", "post_attention_layernorm."),), layer_type="sliding_attention",
        ),
    ),
    (  # mimo
        r"((?:.*\.)?mtp_layers\.0\.)input_proj",
        None,
        Layout(
            "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", ("",),
            state_first=True, state_normed=False, zero_first=True,
        ),
    ),
    (  # inkling
        r"((?:.*\.)?mtp\.layers\.0\.)input_proj",
        None,
        Layout(
            "embed_norm", "hidden_norm", "input_proj", None, ("transformer_block.",), state_first=True,
            needs="a decoder layer with short convolutions, whose states a draft tree would have to keep per node",
        ),
    ),
    (  # qwen3_next, qwen3_5, qwen3_5_moe, exaone_moe, mellum, olmo_hybrid
        r"((?:.*\.)?mtp\.)fc",
        None,
        Layout("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", ("layers.0.",)),
    ),
    (  # ernie4_5_moe
        r"((?:.*\.)?)mtp_linear_proj\.0",
        None,
        Layout(
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


def find_layout(names: Iterable[str], num_layers: int, model_type: str) -> Layout | None:
    """The layout of the first multi-token-prediction layer among a checkpoint's tensors; None where there is none.

    Args:
        names: of all tensors.
        num_layers: of the target's decoder; the layer may be numbered behind them.
        model_type: of the target's text config.

    Example:
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
