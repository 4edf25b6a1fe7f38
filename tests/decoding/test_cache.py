"""TreeCache by itself: commits and rollbacks against a cache that only ever saw the kept tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from hf_specdec.decoding.cache import GROWTH, TreeCache
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.decoding.upstream import CACHE
from hf_specdec.methods.lookup import NGramDrafter
from tests.targets import PROMPTS, fresh_target, make_target

LAYERS, HEADS, DIM = 3, 2, 4


def filled(batch: int, length: int, capacity: int) -> TreeCache:
    """A cache after a prefill of random entries."""
    cache = TreeCache(LAYERS)
    generator = torch.Generator().manual_seed(1)
    for layer in range(LAYERS):
        states = torch.randn(2, batch, HEADS, length, DIM, generator=generator)
        cache.update(states[0], states[1], layer)
    cache.begin_rounds(capacity)
    return cache


def write(cache: TreeCache, nodes: int, *, seed: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Writes a round of random nodes; returns what was written, per layer."""
    generator = torch.Generator().manual_seed(seed)
    cache.reserve(nodes)
    written = []
    for layer in range(LAYERS):
        keys, values = torch.randn(2, cache.batch, HEADS, nodes, DIM, generator=generator)
        seen_keys, seen_values = cache.update(keys, values, layer)
        assert seen_keys.shape[2] == seen_values.shape[2] == cache.longest + nodes
        assert torch.equal(seen_keys[:, :, cache.longest :], keys)
        written.append((keys, values))
    return written


def entries(cache: TreeCache, layer: int, row: int) -> tuple[Tensor, Tensor]:
    """The committed keys and values of a row."""
    length = cache.row_lengths[row]
    return cache.layers[layer].keys[row, :, :length], cache.layers[layer].values[row, :, :length]


def test_commit_keeps_the_chosen_nodes_of_each_row_and_nothing_else() -> None:
    cache = filled(batch=3, length=5, capacity=40)
    before = [[copy.deepcopy(entries(cache, layer, row)) for row in range(3)] for layer in range(LAYERS)]
    paths, kept = [[0, 2, 5, 6], [0, 3, 0, 0], [1, 2, 3, 4]], [[], [], []]
    for seed, counts in enumerate(([4, 2, 0], [1, 0, 3], [2, 2, 2])):
        written = write(cache, 7, seed=seed)
        cache.commit(torch.tensor(paths), Counts.of(counts))
        for row, count in enumerate(counts):
            kept[row] += [(seed, written, node) for node in paths[row][:count]]
        assert cache.row_lengths == [5 + len(nodes) for nodes in kept]
        assert cache.lengths.tolist() == cache.row_lengths
        assert cache.longest == cache.get_seq_length() == max(cache.row_lengths)
        for layer in range(LAYERS):
            for row in range(3):
                for kind in (0, 1):
                    expected = [before[layer][row][kind]]
                    expected += [states[layer][kind][row, :, node : node + 1] for _, states, node in kept[row]]
                    assert torch.equal(entries(cache, layer, row)[kind], torch.cat(expected, dim=1))


def test_commit_of_the_first_nodes_equals_commit_of_their_indices() -> None:
    for counts in ([3, 3], [2, 4], [0, 1]):
        caches = [filled(batch=2, length=4, capacity=30) for _ in range(2)]
        for cache in caches:
            write(cache, 2)
            cache.commit(torch.tensor([[0, 1], [0, 0]]), Counts.of([2, 1]))  # rows differ in length from here
            write(cache, 5)
        caches[0].commit(torch.arange(5).expand(2, -1), Counts.of(counts))
        caches[1].commit_first(Counts.of(counts))
        assert caches[0].row_lengths == caches[1].row_lengths
        for layer in range(LAYERS):
            for row in range(2):
                for ours, theirs in zip(entries(caches[0], layer, row), entries(caches[1], layer, row), strict=True):
                    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("apart", [False, True], ids=["behind the longest row", "at a fixed place"])
@pytest.mark.parametrize("lead", [0, 2])
def test_round_continues_after_its_first_nodes_are_committed(lead: int, apart: bool) -> None:
    cache = filled(batch=2, length=4, capacity=40)
    write(cache, 2)
    cache.commit(torch.tensor([[0, 1], [0, 0]]), Counts.of([2, 1]))  # rows differ in length from here
    before = [[entries(cache, layer, row)[0] for row in range(2)] for layer in range(LAYERS)]
    if apart:
        cache.place_nodes(16 - lead)
    generator = torch.Generator().manual_seed(5)
    written = torch.randn(LAYERS, 2, HEADS, lead + 3, DIM, generator=generator)
    for layer in range(LAYERS):
        cache.update(written[layer, :, :, : lead + 1], written[layer, :, :, : lead + 1], layer)
    cache.commit_and_continue(lead)
    cache.continue_round(1)
    assert cache.row_lengths == cache.lengths.tolist() == [6 + lead, 5 + lead]
    assert cache.node_start == (16 if apart else 6 + lead)
    for layer in range(LAYERS):
        cache.update(written[layer, :, :, lead + 1 :], written[layer, :, :, lead + 1 :], layer)
    cache.commit(torch.tensor([[0, 2], [0, 1]]), Counts.of([2, 1]))  # nodes count from the one after the lead
    for layer in range(LAYERS):
        for row, nodes in enumerate(([lead, lead + 2], [lead])):
            kept = [before[layer][row], written[layer, row, :, :lead], written[layer, row][:, nodes]]
            assert torch.equal(entries(cache, layer, row)[0], torch.cat(kept, dim=1))


def test_counts_that_the_host_reads_later_bound_the_rows_until_then() -> None:
    cache, counts = filled(batch=2, length=4, capacity=40), Counts(torch.tensor([3, 2]), most=3)
    write(cache, 3)
    cache.commit(torch.tensor([[0, 1, 2], [0, 2, 0]]), counts)
    assert cache.lengths.tolist() == [7, 6]
    assert cache.longest == 7
    write(cache, 2)  # what follows is written behind what may be kept
    cache.rollback()
    with pytest.raises(AssertionError, match="the host has not read yet"):
        _ = cache.row_lengths
    counts.known = [3, 2]
    assert cache.row_lengths == [7, 6]
    assert cache.longest == 7


def test_rollback_drops_nodes_and_the_next_round_overwrites_them() -> None:
    cache = filled(batch=2, length=6, capacity=30)
    kept = copy.deepcopy([entries(cache, layer, 0) for layer in range(LAYERS)])
    write(cache, 4)
    cache.commit(torch.tensor([[0, 1, 2, 3]] * 2), Counts.of([4, 4]))
    cache.rollback([6, 8])
    assert cache.row_lengths == [6, 8]
    write(cache, 3, seed=9)
    for layer in range(LAYERS):
        assert torch.equal(cache.layers[layer].keys[0, :, :6], kept[layer][0])


def test_buffers_grow_and_keep_their_entries() -> None:
    cache = filled(batch=2, length=6, capacity=8)
    kept = copy.deepcopy([entries(cache, layer, 1) for layer in range(LAYERS)])
    assert cache.capacity == 8
    write(cache, 10)
    assert cache.capacity == 6 + 10 + GROWTH
    for layer in range(LAYERS):
        for ours, theirs in zip(entries(cache, layer, 1), kept[layer], strict=True):
            assert torch.equal(ours, theirs)


def test_fresh_buffers_are_zero() -> None:
    # A masked NaN would still poison a softmax.
    cache = filled(batch=2, length=3, capacity=50)
    for layer in cache.layers:
        assert (layer.keys[:, :, 3:] == 0).all()
        assert (layer.values[:, :, 3:] == 0).all()
    empty = TreeCache.empty(2, 1, HEADS, DIM, dtype=torch.float32, device=torch.device("cpu"))
    assert empty.row_lengths == [0]
    assert all((layer.keys == 0).all() for layer in empty.layers)


@pytest.mark.parametrize("family", ["llama", "qwen3-mixed", "mistral-sliding"])
def test_rows_never_read_entries_after_their_end(family: str) -> None:
    target, prompts = make_target(family, "sdpa"), PROMPTS["ragged batch of three"]()
    logits = []
    for garbage in (0.0, 1e4):
        model = prefilled(target, prompts)
        verify(model, DraftTree.chain(torch.tensor([[5, 6, 7, 8]] * 3)))
        model.cache.commit(torch.arange(4).expand(3, -1), Counts.of([1, 4, 2]))
        for layer in model.cache.layers:
            for row, length in enumerate(model.cache.row_lengths):
                layer.keys[row, :, length:] = layer.values[row, :, length:] = garbage
        logits.append(verify(model, DraftTree.chain(torch.tensor([[9, 8, 7]] * 3))))
    assert torch.equal(logits[0], logits[1])


def prefilled(target: PreTrainedModel, prompts: dict[str, Tensor]) -> TargetModel:
    model = TargetModel(target)
    mask = prompts["attention_mask"]
    config = copy.deepcopy(target.generation_config)
    config.update(max_length=60)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model.prefill(
            prompts["input_ids"],
            config,
            {"attention_mask": mask, "position_ids": positions, CACHE: DynamicCache(), "use_cache": True},
        )
    model.begin_rounds(60)
    return model


def verify(model: TargetModel, tree: DraftTree) -> Tensor:
    with torch.no_grad():
        return model.verify(tree, model.root_positions()).logits


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("family", ["llama", "qwen3-mixed", "mistral-sliding", "gemma3", "gpt2", "smollm3"])
def test_a_tree_gives_the_logits_of_its_paths_run_one_by_one(family: str, batch: str) -> None:
    target, prompts = make_target(family, "sdpa"), PROMPTS[batch]()
    rows = len(prompts["input_ids"])
    parents = [-1, 0, 0, 1, 1, 3, 5, 6, 2]
    tokens = torch.randint(3, 60, (rows, len(parents)), generator=torch.Generator().manual_seed(4))
    tree = DraftTree.from_parents(tokens, torch.tensor([parents] * rows), 5)
    logits = verify(prefilled(target, prompts), tree)
    for node in range(len(parents)):
        path, at = [], node
        while at >= 0:
            path.insert(0, at)
            at = parents[at]
        alone = verify(prefilled(target, prompts), DraftTree.chain(tokens[:, path]))
        torch.testing.assert_close(logits[:, node], alone[:, -1])


@pytest.mark.parametrize("family", ["llama", "qwen3-mixed", "gemma3"])
def test_after_commits_a_cache_equals_one_without_the_rejected_nodes(family: str) -> None:
    target, prompts = make_target(family, "sdpa"), PROMPTS["ragged batch of three"]()
    drafted, plain = prefilled(target, prompts), prefilled(target, prompts)
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10]] * 3)
    parents = torch.tensor([[-1, 0, 0, 2, 2, 4]] * 3)
    verify(drafted, DraftTree.from_parents(tokens, parents, 3))
    drafted.cache.commit(torch.tensor([[0, 2, 4, 5]] * 3), Counts.of([4, 2, 1]))
    verify(plain, DraftTree.chain(torch.tensor([[5, 7, 9, 10]] * 3)))
    plain.cache.commit_first(Counts.of([4, 2, 1]))
    for ours, theirs in zip(drafted.cache.layers, plain.cache.layers, strict=True):
        for row, length in enumerate(plain.cache.row_lengths):
            torch.testing.assert_close(ours.keys[row, :, :length], theirs.keys[row, :, :length])
            torch.testing.assert_close(ours.values[row, :, :length], theirs.values[row, :, :length])
    following = DraftTree.chain(torch.tensor([[11, 12]] * 3))
    torch.testing.assert_close(verify(drafted, following), verify(plain, following))


def test_static_cache_cannot_be_continued() -> None:
    target = make_target("llama", "sdpa")
    with pytest.raises(ValueError, match=rf"StaticCache.*Pass a DynamicCache, or leave {CACHE} out"):
        TreeCache.continuing(StaticCache(config=target.config, max_cache_len=32), 4)


def test_dropped_entries_of_sliding_layers_become_zeros() -> None:
    target, prompts = make_target("qwen3-mixed", "sdpa"), PROMPTS["batch of one"]()
    stock = DynamicCache(config=target.config)
    with torch.no_grad():
        target(prompts["input_ids"], **{CACHE: stock})
    own = TreeCache.continuing(stock, 4)
    for layer, source in zip(own.layers, stock.layers, strict=True):
        held = source.keys.shape[2]
        assert layer.keys.shape[2] == 9
        assert torch.equal(layer.keys[:, :, 9 - held :], source.keys)
        assert (layer.keys[:, :, : 9 - held] == 0).all()


@pytest.mark.parametrize("passed", [True, False])
def test_returned_cache_uses_little_more_memory_than_its_entries(passed: bool) -> None:
    target = fresh_target("llama", "sdpa", max_position_embeddings=8192)
    settings = {"max_new_tokens": 4000, "do_sample": False, "eos_token_id": list(range(32))}
    settings |= {CACHE: DynamicCache()} if passed else {}
    output = target.generate(
        **PROMPTS["batch of one"](), **settings, return_dict_in_generate=True, assistant_model=NGramDrafter()
    )
    parts = [part for layer in output[CACHE].layers for part in (layer.keys, layer.values)]
    assert output[CACHE].get_seq_length() == output.sequences.shape[1] - 1 < 200
    held = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    assert sum(held.values()) == sum(part.nbytes for part in parts)
