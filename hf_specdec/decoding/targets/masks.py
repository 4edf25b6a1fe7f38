"""Attention masks: which entries each node of a round may attend to. All masks of rounds are built here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_specdec.decoding.upstream import cache_layers

SLIDING, CHUNKED = ("sliding_attention", "hybrid_sliding"), "chunked_attention"


@dataclass(frozen=True)
class AttentionRange:
    """The attention range of the layers of one type, see `node_mask`.

    Attributes:
        window: size of the sliding window in entries; None for no window.
        chunk: size of the attention chunks in tokens; None for no chunks.
    """

    window: int | None = None
    chunk: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether a node attends to its whole past."""
        return self.window is None and self.chunk is None


def ranges_of(model: PreTrainedModel) -> dict[str, AttentionRange]:
    """The masks that a target needs: by layer type if it takes a dict of masks, else under the key "all".

    Empty if the target has no attention layer.
    """
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or ()
    window = AttentionRange(window=getattr(config, "sliding_window", None))
    if set(types) == {"linear_attention"}:
        return {}
    if not {*SLIDING, CHUNKED}.intersection(types):
        # Without layer types the window applies to all layers (Mistral); if all layers are full, it is unused (Qwen2).
        return {"all": AttentionRange() if types else window}
    kept = zip(types, cache_layers(model), strict=False)
    attending = {kind for kind, layer in kept if isinstance(layer, DynamicLayer)}
    limited = {
        CHUNKED: AttentionRange(chunk=getattr(config, "attention_chunk_size", None)),
        **dict.fromkeys(SLIDING, window),
    }
    return {kind: limited.get(kind, AttentionRange()) for kind in ("full_attention", *sorted(attending))}


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """[batch, nodes, entries] bool -> [batch, 1, nodes, entries]: 0 where True, the least number of `dtype` elsewhere.

    Never a bool mask: eager attention would add it as 0 and 1 without an error.

    Examples:
        >>> additive(torch.tensor([[[True, False]]]), torch.float16).tolist()
        [[[[0.0, -65504.0]]]]
    """
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min).unsqueeze(1)


def node_mask(
    sees: Tensor,
    depths: Tensor,
    lengths: Tensor,
    prefix: int,
    dtype: torch.dtype,
    *,
    window: int | None = None,
    chunk: int | None = None,
    starts: Tensor | None = None,
    prompt_mask: Tensor | None = None,
) -> Tensor:
    """Each node attends to the committed entries of its row, its ancestors and itself. DDTree, Section 4.4.

    Args:
        sees: [batch, nodes, all] bool: which of all nodes of the round each node of the forward may attend to. The
            nodes of the forward are the last ones of all.
        depths: [batch, all] int64.
        lengths: [batch] int64, committed entries of each row.
        prefix: entries before the round's nodes.
        dtype: of the mask.
        window: a node attends to at most this many entries, its own included; None for no limit.
        chunk: a node attends only to entries of its own chunk of the text; a chunk has this many tokens, padding not
            counted; None for no chunks.
        starts: [batch] int64, the first entry of each row's prompt; None if that is entry 0.
        prompt_mask: [batch, prompt] bool, which of the first entries may be attended to; None for all.

    Returns:
        Additive [batch, 1, nodes, prefix + all].
    """
    nodes = sees.shape[1]
    entries = torch.arange(prefix, device=lengths.device)
    seen = entries < lengths.unsqueeze(1)
    if starts is not None:
        seen &= entries >= starts.unsqueeze(1)
    if prompt_mask is not None:
        seen[:, : prompt_mask.shape[1]] &= prompt_mask
    seen = seen.unsqueeze(1).expand(-1, nodes, -1)
    sees = sees.to(seen.device)
    if window is not None:
        own = depths[:, -nodes:].unsqueeze(-1)
        seen = seen & (lengths[:, None, None] + own - entries < window)
        sees = sees & (own - depths.unsqueeze(1) < window)
    if chunk is not None:
        hidden = 0 if prompt_mask is None else (~prompt_mask).sum(1).view(-1, 1, 1)
        chunk_of_node = (lengths.view(-1, 1, 1) + depths.unsqueeze(1) - hidden) // chunk
        own = chunk_of_node[..., -nodes:].mT
        seen = seen & ((entries - hidden) // chunk == own)
        sees = sees & (chunk_of_node == own)
    return additive(torch.cat([seen, sees], dim=-1), dtype)


def whole_prefix_mask(sees: Tensor, prefix: int, dtype: torch.dtype) -> Tensor:
    """`node_mask` if all entries of the prefix may be attended to: rows of one length, no padding, no window."""
    # `functional.pad` calls this too, after 25 us of checks on a CPU.
    return torch.constant_pad_nd(additive(sees, dtype), (prefix, 0))
