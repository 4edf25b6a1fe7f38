"""How checkpoints name the tensors of their multi-token-prediction layers, and what the engines do with them.

A layer pairs the embedding of a token with the target's state before it, joins the two by one projection, and runs one
decoder layer of the target's kind. Of several layers the first one is read, and applied again for further tokens.
Source: shared facts on formats of 2026, sections 7.1 and 7.4. Neither torch nor transformers is needed here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# Of the readers' choices, those of vLLM, which serves these files. The state that goes on is normed but in these:
RECURS_UNNORMED = frozenset(("ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "glm_ocr"))
# A text's first pair has zeros in place of the embedding but in these, and where the layer is named "mtp":
KEEPS_FIRST_EMBEDDING = frozenset(("glm4_moe_lite", "glm_ocr"))


@dataclass(frozen=True)
class Layout:
    """Where the tensors of one layer are.

    Attributes:
        embedding_norm: of the token's embedding; names without ".weight".
        state_norm: of the target's state.
        projection: of both, the embedding first.
        final_norm: before the head; None for none.
        layer: prefix of the decoder layer's own tensors.
        others: of those behind the prefix that belong to no decoder layer: copies of the target's tables.
        recurs_normed: whether the state that goes into the next step is the one behind `final_norm`.
        zero_first: whether a text's first pair has zeros in place of the embedding.
    """

    embedding_norm: str
    state_norm: str
    projection: str
    final_norm: str | None
    layer: str
    others: tuple[str, ...] = ()
    recurs_normed: bool = True
    zero_first: bool = True

    def own(self) -> set[str]:
        """Names that are not the decoder layer's."""
        names = {self.embedding_norm, self.state_norm, self.projection, self.final_norm, *self.others}
        return {name for name in names if name is not None}


def find_layout(names: Iterable[str], num_layers: int, model_type: str) -> Layout | None:
    """The layout of the first multi-token-prediction layer among a checkpoint's tensors; None where there is none.

    Args:
        names: of all tensors.
        num_layers: of the target's decoder; the layer may be numbered behind them.
        model_type: of the target's text config.

    Example:
        >>> names = ["mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.up_proj.weight"]
        >>> find_layout(names, 4, "qwen3_next").layer
        'mtp.layers.0.'
    """
    normed, zeroed = model_type not in RECURS_UNNORMED, model_type not in KEEPS_FIRST_EMBEDDING
    known = set(names)
    for name in sorted(known):
        if found := re.fullmatch(rf"(.*\blayers\.{num_layers}\.)eh_proj\.weight", name):
            prefix = found[1]
            norms = [each for each in ("shared_head.norm", "final_layernorm") if f"{prefix}{each}.weight" in known]
            return Layout(
                f"{prefix}enorm", f"{prefix}hnorm", f"{prefix}eh_proj",
                f"{prefix}{norms[0]}" if norms else None, prefix,
                (f"{prefix}embed_tokens", f"{prefix}shared_head.head"), normed, zeroed,
            )  # fmt: skip
        if found := re.fullmatch(r"((?:.*\.)?mtp\.)fc\.weight", name):
            prefix = found[1]
            return Layout(
                f"{prefix}pre_fc_norm_embedding", f"{prefix}pre_fc_norm_hidden", f"{prefix}fc", f"{prefix}norm",
                f"{prefix}layers.0.", (), normed, False,
            )  # fmt: skip
        if found := re.fullmatch(r"((?:.*\.)?)mtp_linear_proj\.0\.weight", name):
            prefix = found[1]
            return Layout(
                f"{prefix}mtp_emb_norm.0", f"{prefix}mtp_hidden_norm.0", f"{prefix}mtp_linear_proj.0", None,
                f"{prefix}mtp_block.0.", (), normed, zeroed,
            )  # fmt: skip
    return None
