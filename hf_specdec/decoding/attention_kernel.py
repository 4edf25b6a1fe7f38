"""`merged_attention` in Triton: splits of the prefix and the tree part side by side, then one merge. Needs a GPU.

One program takes one key-value head, some of its queries (all heads of the group and nodes counted through) and one
split of the prefix, or the tree's nodes. A split that lies behind the row's end, which only the device knows, costs
nothing: so the same launch serves every length up to the buffer's, as a captured graph needs it. Checked in Triton's
interpreter against the formula; its speed is not measured.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from hf_specdec.decoding.attention import Spans
from hf_specdec.decoding.tiles import power_of_2, tile_of

SPLIT = 256  # prefix entries of one program: at 8 key-value heads, 1,000 entries occupy some 130 processors


# What changes from round to round or from tree to tree: specialised to, it would have dozens of variants compiled.
@triton.jit(do_not_specialize=["mask_batch", "mask_node", "nodes", "tree_nodes", "prefix"])
def _attend_split(  # type: ignore[no-untyped-def]
    query, key, value, mask, first, stop, partial, sums,
    query_batch, query_head, query_node, key_batch, key_head, key_entry, value_batch, value_head, value_entry,
    mask_batch, mask_node, heads, kv_heads, nodes, tree_nodes, prefix, scale,
    groups: tl.constexpr, head_dim: tl.constexpr, dim: tl.constexpr, split_size: tl.constexpr,
    block_queries: tl.constexpr, block_keys: tl.constexpr,
):  # fmt: skip
    """Attention over one split; the last split is the tree. Writes the weighted values and (largest score, sum)."""
    row, kv_head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    split, num_splits = tl.program_id(2), tl.num_programs(2)
    index = tl.program_id(1) * block_queries + tl.arange(0, block_queries)
    there = index < groups * nodes
    head, node = kv_head * groups + index // nodes, index % nodes
    dims = tl.arange(0, dim)
    has_dim = dims < head_dim
    at_query = row.to(tl.int64) * query_batch + head[:, None] * query_head + node[:, None] * query_node + dims[None, :]
    queries = tl.load(query + at_query, mask=there[:, None] & has_dim[None, :], other=0.0)
    earliest = tl.load(first + row * nodes + node, mask=there, other=0)

    is_tree = split == num_splits - 1
    begin = tl.where(is_tree, prefix, split * split_size)
    end = tl.where(is_tree, prefix + tree_nodes, tl.minimum((split + 1) * split_size, tl.load(stop + row)))
    largest = tl.full([block_queries], float("-inf"), tl.float32)
    total = tl.zeros([block_queries], tl.float32)
    gathered = tl.zeros([block_queries, dim], tl.float32)
    for start in range(begin, end, block_keys):
        entry = start + tl.arange(0, block_keys)
        inside = entry < end
        at_key = row.to(tl.int64) * key_batch + kv_head * key_head + entry[None, :].to(tl.int64) * key_entry
        keys = tl.load(key + at_key + dims[:, None], mask=inside[None, :] & has_dim[:, None], other=0.0)
        scores = tl.dot(queries, keys, input_precision="ieee") * scale
        seen = inside[None, :] & there[:, None]
        if is_tree:
            at_mask = row.to(tl.int64) * mask_batch + node[:, None] * mask_node + entry[None, :]
            scores += tl.load(mask + at_mask, mask=seen, other=0.0).to(tl.float32)
        else:
            seen = seen & (entry[None, :] >= earliest[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen so far
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(largest - base)
        at_value = row.to(tl.int64) * value_batch + kv_head * value_head + entry[:, None].to(tl.int64) * value_entry
        values = tl.load(value + at_value + dims[None, :], mask=inside[:, None] & has_dim[None, :], other=0.0)
        gathered = gathered * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        largest = higher

    place = ((row * heads + head) * nodes + node).to(tl.int64) * num_splits + split
    tl.store(partial + place[:, None] * head_dim + dims[None, :], gathered, mask=there[:, None] & has_dim[None, :])
    tl.store(sums + place * 2, largest, mask=there)
    tl.store(sums + place * 2 + 1, total, mask=there)


@triton.jit(do_not_specialize=["nodes", "num_splits"])
def _merge(  # type: ignore[no-untyped-def]
    partial, sums, out, heads, nodes, num_splits,
    head_dim: tl.constexpr, dim: tl.constexpr, max_splits: tl.constexpr,
):  # fmt: skip
    """All splits of one query, weighted by their sums; `out` is [batch, nodes, heads, head_dim]."""
    query = tl.program_id(0).to(tl.int64)  # (row * heads + head) * nodes + node
    splits, dims = tl.arange(0, max_splits), tl.arange(0, dim)
    there, has_dim = splits < num_splits, dims < head_dim
    at = query * num_splits + splits
    largest = tl.load(sums + at * 2, mask=there, other=float("-inf"))
    share = tl.exp(largest - tl.max(largest, 0))
    total = tl.sum(share * tl.load(sums + at * 2 + 1, mask=there, other=0.0), 0)
    values = tl.load(
        partial + at[:, None] * head_dim + dims[None, :], mask=there[:, None] & has_dim[None, :], other=0.0
    )
    merged = tl.sum(values * share[:, None], 0) / total
    node, head, row = query % nodes, query // nodes % heads, query // nodes // heads
    place = ((row * nodes + node) * heads + head) * head_dim
    tl.store(out + place + dims, merged.to(out.dtype.element_ty), mask=has_dim)


def merged_attention_kernel(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, spans: Spans, scale: float
) -> Tensor:
    """See `merged_attention`; for what `kernel_serves`. Keys and values have their last dimension in one piece."""
    batch, heads, nodes, head_dim = query.shape
    kv_heads, entries = key.shape[1], key.shape[2]
    groups, prefix = heads // kv_heads, entries - spans.nodes
    num_splits = triton.cdiv(prefix, SPLIT) + 1
    tile, dim = tile_of(query, key), power_of_2(head_dim)
    assert tile is not None
    partial = torch.empty(batch, heads, nodes, num_splits, head_dim, dtype=torch.float32, device=query.device)
    sums = torch.empty(batch, heads, nodes, num_splits, 2, dtype=torch.float32, device=query.device)
    out = torch.empty(batch, nodes, heads, head_dim, dtype=query.dtype, device=query.device)
    kernel: Any = _attend_split
    merge: Any = _merge
    with torch.cuda.device_of(query):  # of layers that are spread over devices; Triton launches on the current one
        kernel[batch * kv_heads, triton.cdiv(groups * nodes, tile.queries), num_splits](
            query, key, value, attention_mask, spans.first, spans.stop, partial, sums,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            attention_mask.stride(0), attention_mask.stride(2),
            heads, kv_heads, nodes, spans.nodes, prefix, scale,
            groups=groups, head_dim=head_dim, dim=dim, split_size=SPLIT,
            block_queries=tile.queries, block_keys=tile.keys, num_stages=tile.stages,
        )  # fmt: skip
        merge[(batch * heads * nodes,)](
            partial, sums, out, heads, nodes, num_splits,
            head_dim=head_dim, dim=dim, max_splits=triton.next_power_of_2(num_splits),
        )  # fmt: skip
    return out
