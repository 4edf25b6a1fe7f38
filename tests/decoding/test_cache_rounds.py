"""Rounds of several forwards on one TreeCache: `hold` keeps what the round has written so far."""

from __future__ import annotations

import torch

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.state import Counts


def test_nodes_of_several_forwards_are_committed_as_of_one() -> None:
    written = torch.randn(2, 1, 9, 3)
    caches = []
    for parts in ((5,), (2, 1, 2)):
        cache = TreeCache.empty(1, 2, 1, 3, dtype=torch.float32, device=torch.device("cpu"), capacity=16)
        cache.layers[0].update(written[:, :, :4], written[:, :, :4])
        cache.commit_first(Counts.of([4, 2]))  # rows of different lengths
        start = 4
        for part in parts:
            new = written[:, :, start : start + part]
            keys, values = cache.layers[0].update(new, new)
            assert keys.shape[2] == values.shape[2] == start + part
            start += part
            cache.continue_round(part)
        assert cache.get_seq_length() == 4 + sum(parts)
        cache.commit(torch.tensor([[0, 2, 4], [1, 3, 0]]), Counts.of([3, 2]))
        assert cache.get_seq_length() == cache.longest == 7
        caches.append([cache.layers[0].keys[row, :, :length] for row, length in enumerate(cache.row_lengths)])
    for one, several in zip(*caches, strict=True):
        torch.testing.assert_close(one, several, rtol=0, atol=0)


def test_rollback_ends_a_round() -> None:
    cache = TreeCache.empty(1, 1, 1, 3, dtype=torch.float32, device=torch.device("cpu"), capacity=16)
    node = torch.ones(1, 1, 1, 3)
    cache.layers[0].update(node, node)
    cache.continue_round(1)
    cache.rollback([0])
    keys, _ = cache.layers[0].update(2 * node, 2 * node)
    assert keys.tolist() == (2 * node).tolist()
