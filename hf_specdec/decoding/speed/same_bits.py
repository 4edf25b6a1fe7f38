"""Verification with the bits of plain decoding, for targets and machines where that is possible.

In low precision, logits depend on how they are computed: a matrix product of several rows may add in another order than
one of a single row, and attention under a mask in another order than attention without. Where the linear layers give a
row the same bits whatever the number of rows, only attention is left. Then each node attends alone
(`attention.attend_alone`): one query, over the entries of its own path, by the function and with the arguments of plain
decoding.

Whether that holds is found by a trial, once per model: products of every shape of weight with different numbers of
rows, and a tree beside plain decoding. What the trial cannot find out is required: layers of known kinds, attention
over the whole text, and widths that vector instructions divide. A reason says what is missing.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specdec.decoding.once import once_per_model, products_of
from hf_specdec.decoding.targets import attention, standins
from hf_specdec.decoding.targets.masks import ranges_of
from hf_specdec.decoding.targets.modules import is_quantised

ROW_COUNTS = (2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64)  # that are tried
WIDTH = 64  # that widths of layers must be multiples of: two vectors of 32 numbers with AVX-512
GRAIN = 32_768  # elements of which torch gives one thread at least as many; several threads divide rows anywhere


def most_rows(model: PreTrainedModel) -> int:
    """Most rows of a forward that give the bits of forwards of one row.

    To be called after `why_not` has found no reason.
    """
    widest = max(max(layer.in_features, layer.out_features) for layer in _inner_linears(model))
    threads = torch.get_num_threads()
    even = threads == 1 or (threads == 2 and widest % (2 * WIDTH) == 0)
    return _alike_rows(model) if even else min(_alike_rows(model), max(1, GRAIN // widest))


def why_not(model: PreTrainedModel) -> str | None:
    """Why trees of a target cannot be verified with the bits of plain decoding, before any trial; None if they may."""
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    if model.device.type != "cpu":
        return f"target {name} is on {model.device}, where no kernels are known whose rows do not depend on each other"
    if is_quantised(model):
        return f"target {name} has quantised layers"
    if not attention.usable(model) or standins.counts_entries(model):
        return f"the attention of target {name} (implementation {config._attn_implementation!r}) is not torch's sdpa"
    if not all(limits.is_whole for limits in ranges_of(model).values()):
        return f"layers of target {name} attend to a part of the text only"
    for label, module in model.named_modules():
        if type(module) not in (nn.Linear, nn.Embedding) and any(
            weight.dim() > 1 for weight in module.parameters(recurse=False)
        ):
            return f"layer {label} of target {name} ({type(module).__name__}) is of an unknown kind"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    widths = {head_dim} | {
        width for layer in _inner_linears(model) for width in (layer.in_features, layer.out_features)
    }
    uneven = sorted(width for width in widths if width % WIDTH)
    if uneven:
        return f"target {name} has layers or heads of width {uneven[0]}, and widths must be multiples of {WIDTH}"
    if _alike_rows(model) < 2:
        return (
            f"on this processor, the rows of a product in {model.dtype} depend on how many there are. In bfloat16 they "
            "often do not"
        )
    return None


def _inner_linears(model: PreTrainedModel) -> list[nn.Linear]:
    """All linear layers but the head, whose outputs enter no other layer."""
    head = model.get_output_embeddings()
    return [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not head]


@functools.partial(once_per_model, state=products_of)
def _alike_rows(model: PreTrainedModel) -> int:
    """The largest number of rows with which products with all of the model's weights give a row the bits of one."""
    shapes = {
        (layer.weight.shape, layer.weight.dtype, layer.bias is None): layer
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    }
    return min(map(_alike_rows_of, shapes.values()))


@torch.no_grad()
def _alike_rows_of(layer: nn.Linear) -> int:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(1, ROW_COUNTS[-1], layer.in_features, generator=draw, device="cpu").to(layer.weight.dtype)
    # Many rows are compared for each number: on some processors only one of 20 gets other bits.
    alone = torch.cat([layer(row) for row in rows.split(1, dim=1)], dim=1)
    alike = 1
    for count in ROW_COUNTS:
        if not torch.equal(torch.cat([layer(part) for part in rows.split(count, dim=1)], dim=1), alone):
            break
        alike = count
    return alike
