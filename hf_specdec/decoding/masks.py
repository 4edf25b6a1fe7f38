"""The one builder of attention masks: which entries each node of a round may look at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_specdec.decoding.host import cache_layers

SLIDING, CHUNKED = ("sliding_attention", "hybrid_sliding"), "chunked_attention"


@dataclass(frozen=True)
class Sight:
    """How far the layers of one type look, see `node_mask`.

    Attributes:
        window: entries that a node sees at most; None for all.
        chunk: tokens of a part of the text that a node sees alone; None for all of it.
    """

    window: int | None = None
    chunk: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether a node sees all of its past."""
        return self.window is None and self.chunk is None


def sights_of(model: PreTrainedModel) -> dict[str, Sight]:
    """The masks a target wants: by layer type where it takes a dict, else under the key "all".

    None at all where no layer attends.
    """
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or ()
    window = Sight(window=getattr(config, "sliding_window", None))
    if set(types) == {"linear_attention"}:
        return {}
    if not {*SLIDING, CHUNKED}.intersection(types):
        # Without layer types a window holds for all layers (Mistral); with all layers full it is not in use (Qwen2).
        return {"all": Sight() if types else window}
    kept = zip(types, cache_layers(model), strict=False)
    attending = {kind for kind, layer in kept if isinstance(layer, DynamicLayer)}
    limited = {CHUNKED: Sight(chunk=getattr(config, "attention_chunk_size", None)), **dict.fromkeys(SLIDING, window)}
    return {kind: limited.get(kind, Sight()) for kind in ("full_attention", *sorted(attending))}


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """[batch, nodes, entries] bool -> [batch, 1, nodes, entries]: 0 where a node may look, the lowest number elsewhere.

    Always additive: eager attention would add a bool mask as 0 and 1 without complaint.

    Example:
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
    """Each node sees the committed entries of its row and its own ancestors only. DDTree, Section 4.4.

    Args:
        sees: [batch, nodes, all] bool: of all nodes of the round those that each node of the forward may see; the nodes
            of the forward are the last of all.
        depths: [batch, all] int64.
        lengths: [batch] int64, committed entries of each row.
        prefix: entries in front of the round's nodes.
        dtype: of the mask.
        window: entries that a node sees at most, its own included; None for all.
        chunk: a node sees entries of its own chunk of the text only, of this many tokens, padding not counted; None for
            all.
        starts: [batch] int64, where each row's prompt begins; None where it begins with the first entry.
        prompt_mask: [batch, prompt] bool, which of the first entries may be seen; None for all.

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
        place = (lengths.view(-1, 1, 1) + depths.unsqueeze(1) - hidden) // chunk
        own = place[..., -nodes:].mT
        seen = seen & ((entries - hidden) // chunk == own)
        sees = sees & (place == own)
    return additive(torch.cat([seen, sees], dim=-1), dtype)


def whole_prefix_mask(sees: Tensor, prefix: int, dtype: torch.dtype) -> Tensor:
    """`node_mask` where every entry of the prefix is seen: rows of one length without padding, and no window."""
    # `functional.pad` would call this, after 25 us of questions on a CPU.
    return torch.constant_pad_nd(additive(sees, dtype), (prefix, 0))
