"""SpecBlock against the numbers of the reference implementation, for every golden set beside the repository.

Tolerances are those of the sets' own README: rtol 1e-4 with atol 2e-5 for hidden states, logits, keys and values and
atol 5e-5 for rank logits, rank features and losses; cumulative log-probabilities atol 1e-4; integers exact.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.exchange import Committed, DraftContext
from hf_specdec.decoding.state import Counts
from hf_specdec.methods.specblock import SpecBlockConfig, SpecBlockDrafter
from hf_specdec.methods.specblock.drafting import Nodes, SpecBlockGenerator, cut
from hf_specdec.methods.specblock.network import rank_features
from tests.test_golden import golden, metadata, part_of

STATES = {"rtol": 1e-4, "atol": 2e-5}
RANKS = {"rtol": 1e-4, "atol": 5e-5}
EMBEDDING = "input_layer.embed_tokens.weight"


class Stored:
    """Keys and values of earlier forwards, simply joined: what training uses in place of a cache."""

    def __init__(self, num_layers: int) -> None:
        self.layers = [StoredLayer() for _ in range(num_layers)]


class StoredLayer:
    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.kept.append((keys, values))
        return torch.cat([k for k, _ in self.kept], 2), torch.cat([v for _, v in self.kept], 2)


def load_golden(file: Path) -> tuple[SpecBlockDrafter, Tensor, dict[str, Tensor]]:
    """The drafter, the embedding it borrows, and all tensors of a set."""
    tensors = load_file(file)
    drafter = SpecBlockDrafter(SpecBlockConfig(**json.loads(metadata(file)["config"]))).eval()
    weights = part_of(tensors, "weights.")
    if (other := metadata(file).get("other_weights")) is not None:
        weights = part_of(load_file(file.with_name(other)), "weights.") | weights
    embedding = weights.pop(EMBEDDING)
    drafter.load_state_dict(weights)
    drafter.check_vocabulary()
    return drafter, embedding, tensors


def blocks_in(tensors: dict[str, Tensor]) -> list[int]:
    return sorted({int(name[5:].split(".")[0]) for name in tensors if name.startswith("block")})


@pytest.mark.parametrize("file", golden("specblock_forward_*.safetensors"))
@torch.no_grad()
def test_parallel_forward_of_chained_blocks_equals_the_reference(file: Path) -> None:
    drafter, embedding, tensors = load_golden(file)
    assert blocks_in(tensors)[:2] == [1, 2]
    stored = Stored(drafter.config.num_hidden_layers)
    output = None
    for block in blocks_in(tensors):
        given, expected = part_of(tensors, f"block{block}.input."), part_of(tensors, f"block{block}.expected.")
        mask = tensors[f"block{block}.attention_mask"]
        entries = mask.shape[0]
        if block > 1:
            # The reference's keys hold block 1 twice: its earlier positions, then what the same position may see.
            mask = torch.cat([mask[:, :entries] | mask[:, entries : 2 * entries], mask[:, 2 * entries :]], dim=1)
            condition = drafter.condition_of(output.hidden[:, :, int(given["M"]) - 1])
            torch.testing.assert_close(condition, given["hidden_states"], **STATES)
        batch, positions, _ = given["hidden_states"].shape
        output = drafter(
            given["hidden_states"],
            embedding[given["input_ids"]],
            torch.arange(1, positions + 1).expand(batch, -1),
            from_target=block == 1,
            mask=mask[None, None],
            cache=stored,
        )
        torch.testing.assert_close(output.hidden, expected["draft_hidden"], **STATES)
        torch.testing.assert_close(output.logits, expected["logits"], **STATES)
        torch.testing.assert_close(output.rank_logits, expected["rank_logits"], **RANKS)
        for name, tensor in part_of(expected, "kv.").items():
            layer, kind = name.removeprefix("layer").split(".")
            torch.testing.assert_close(stored.layers[int(layer)].kept[0][kind == "value"], tensor, **STATES)
        if "rank_features" in expected:
            features = rank_features(output.logits, drafter.config.rank_features_top)
            torch.testing.assert_close(features, expected["rank_features"], **RANKS)
        if block == 1:  # consecutive positions and nothing stored: plain causal order, no mask needed
            causal = drafter(
                given["hidden_states"],
                embedding[given["input_ids"]],
                torch.arange(1, positions + 1).expand(batch, -1),
                from_target=True,
            )
            torch.testing.assert_close(causal.hidden, expected["draft_hidden"], **STATES)


def new_cache(drafter: SpecBlockDrafter) -> TreeCache:
    config = drafter.config
    return TreeCache.empty(
        config.num_hidden_layers, 1, config.num_key_value_heads, config.head_dim, dtype=torch.float32,
        device=torch.device("cpu"), capacity=512,
    )  # fmt: skip


def enter(drafter: SpecBlockDrafter, embedding: Tensor, cache: TreeCache, features: Tensor, ids: Tensor) -> Tensor:
    """Runs positions behind those in the cache and keeps them; [1, positions, K, hidden]."""
    slots, stored, new = drafter.config.block_size, cache.longest, ids.shape[1]
    cache.reserve(new * slots)
    order = torch.arange(new * slots)
    seen = torch.cat([torch.ones(new * slots, stored, dtype=torch.bool), order[:, None] >= order], dim=1)
    first = stored // slots + 1
    hidden = drafter.block_hidden(
        features, embedding[ids], torch.arange(first, first + new)[None], from_target=True, mask=seen[None, None],
        cache=cache,
    )  # fmt: skip
    cache.commit_first(Counts.of([new * slots]))
    return hidden


@pytest.mark.parametrize("file", golden("specblock_infer_*.safetensors"))
@torch.no_grad()
def test_cached_forwards_of_a_round_equal_the_reference(file: Path) -> None:
    drafter, embedding, tensors = load_golden(file)
    slots = drafter.config.block_size
    features, ids = tensors["input.hidden_states"], tensors["input.input_ids"]
    cache = new_cache(drafter)
    enter(drafter, embedding, cache, features[:, :-1], ids[:, :-1])
    start = torch.tensor([[ids.shape[1]]])
    hidden = {1: enter(drafter, embedding, cache, features[:, -1:], ids[:, -1:])[0]}
    visible, seen_by = torch.empty(1, 1, 0, dtype=torch.bool), {}
    for block in blocks_in(tensors):
        given, expected = part_of(tensors, f"block{block}.input."), part_of(tensors, f"block{block}.expected.")
        if block > 1:
            parents = given.get("parent_leaf", torch.zeros_like(given["source_slot"]))
            source = given["source_slot"]
            above = hidden[block - 1]
            leaves = len(source)
            on_path = (torch.arange(len(above))[:, None] == parents[:, None, None]) & (
                torch.arange(slots) <= source[:, None, None]
            )
            seen_by[block] = torch.cat([visible[0][parents], on_path.flatten(1)], dim=1)
            visible = seen_by[block][None]
            own = (torch.arange(leaves)[:, None, None, None] == torch.arange(leaves)[:, None]) & (
                torch.arange(slots)[:, None, None] >= torch.arange(slots)
            )
            prefix = torch.ones(leaves * slots, cache.longest - slots, dtype=torch.bool)
            # The drafting position's entries are the cache's last; a held block lies behind them.
            mask = torch.cat([prefix, seen_by[block].repeat_interleave(slots, 0), own.flatten(2).flatten(0, 1)], dim=1)
            cache.reserve(256)
            condition = drafter.condition_of(above[parents, source])
            if "condition" in given:
                torch.testing.assert_close(condition, given["condition"], **STATES)
            hidden[block] = drafter.block_hidden(
                condition[None], embedding[given["token_ids"]][None], start.expand(1, leaves), from_target=False,
                mask=mask[None, None], cache=cache,
            )[0]  # fmt: skip
            cache.continue_round(leaves * slots)
        logits, _ = drafter.heads(hidden[block])
        torch.testing.assert_close(hidden[block], expected["draft_hidden"], **STATES)
        torch.testing.assert_close(logits, expected["logits"], **STATES)
        for top in (10, 20):
            drafter.config.rank_features_top = top
            torch.testing.assert_close(drafter.heads(hidden[block])[1], expected[f"rank_logits_top{top}"], **RANKS)
        for name, tensor in part_of(expected, "ttt_kv.").items():
            layer, kind = name.removeprefix("layer").split(".")
            held = getattr(cache.layers[int(layer)], {"key": "keys", "value": "values"}[kind])
            torch.testing.assert_close(held[:, :, cache.longest - slots : cache.longest], tensor, **STATES)

    cache.rollback([ids.shape[1] * slots])
    drafter.config.rank_features_top = 20
    given, expected = part_of(tensors, "round2.input."), part_of(tensors, "round2.expected.")
    last = enter(drafter, embedding, cache, given["hidden_states"], given["input_ids"])[:, -1]
    logits, rank_logits = drafter.heads(last)
    torch.testing.assert_close(last, expected["draft_hidden"], **STATES)
    torch.testing.assert_close(logits, expected["logits"], **STATES)
    torch.testing.assert_close(rank_logits, expected["rank_logits_top20"], **RANKS)

    # The reference's own first round enters the last position twice.
    cache = new_cache(drafter)
    enter(drafter, embedding, cache, features, ids)
    twice = enter(drafter, embedding, cache, features[:, -1:], ids[:, -1:])[:, 0]
    torch.testing.assert_close(twice, part_of(tensors, "official_prefill.expected.")["draft_hidden"], **STATES)


class StandInTarget:
    """What SpecBlock borrows of a target: its embedding."""

    def __init__(self, embedding: Tensor) -> None:
        self.model = self
        self.embeddings = nn.Embedding.from_pretrained(embedding)

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings


def outcome_of(features: Tensor, ids: Tensor, start: int = 0) -> Committed:
    """Positions from `start` whose features are `features` and whose next tokens are `ids`; the last is the root."""
    new = ids.shape[1]
    return Committed(
        token_ids=torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], 1),
        features=features,
        position_ids=torch.arange(start, start + new)[None],
        valid=None,
        counts=Counts.of([new]),
        target_logits=features,
    )


def context_at(root: Tensor, length: int) -> DraftContext:
    return DraftContext(
        root, torch.tensor([length]), torch.zeros(1, length + 1, dtype=torch.int64), [length + 1], [True]
    )


def tree_cases() -> list[Any]:
    parameters = []
    for entry in golden("specblock_tree_*.safetensors"):
        (file,) = entry.values
        parameters += [
            pytest.param(file, case, id=f"{file.stem}-{case['case']}") for case in json.loads(metadata(file)["cases"])
        ]
    return parameters


def place_of(nodes: Nodes, node: int) -> tuple[int, int]:
    """The block that drafted a node other than the root, and the slot there, counted over all its starts."""
    state = (node - 1) // nodes.shape.width
    for block, starts in enumerate(nodes.starts):
        if state < starts * nodes.shape.slots:
            return block, state
        state -= starts * nodes.shape.slots
    raise IndexError(node)


def described(tokens: Tensor, parents: Tensor, *columns: Tensor) -> list[tuple[Any, ...]]:
    """Per node its path and what else is said of it, in an order that does not depend on node numbers."""
    paths: list[tuple[Any, ...]] = []
    for node, parent in enumerate(parents.tolist()):
        own = (int(tokens[node]), *(int(column[node]) for column in columns))
        paths.append((*(paths[parent] if parent >= 0 else ()), own))
    return sorted(paths)


@pytest.mark.parametrize(("file", "case"), tree_cases())
@torch.no_grad()
def test_trees_equal_those_of_the_published_builder(file: Path, case: dict[str, Any]) -> None:
    drafter, embedding, tensors = load_golden(file)
    expected = part_of(tensors, f"{case['case']}.")
    used = case["n_positions"]
    drafter.set_options(
        tree_budget=case["total_tokens"],
        beam_width=case["beam_width"],
        num_blocks=case["max_blocks"],
        branching=case["rank_slot_topk"],
        merge_duplicates=False,
    )
    generator = SpecBlockGenerator(drafter, StandInTarget(embedding))
    classes: list[Tensor] = []
    drafter.rank_head.register_forward_hook(lambda module, args, output: classes.append(output.argmax(-1).flatten()))
    generator.observe(outcome_of(tensors["input.hidden_states"][:, :used], tensors["input.input_ids"][:, :used]))
    drafted = generator.draft(context_at(tensors["input.input_ids"][:, used - 1], used))
    nodes, finite = generator.tree[1], drafted.finite
    assert finite.all()
    depth = case["max_blocks"] * drafter.config.block_size
    tree, kept = cut(nodes, case["total_tokens"], depth, merge=False, finite=finite)

    assert (tree.path_logprobs[0] > -torch.inf).tolist() == [node <= case["nodes"] for node in range(tree.num_nodes)]
    tree, kept = tree.first_nodes(case["nodes"]), kept[0, 1 : 1 + case["nodes"]].tolist()
    blocks, places = (torch.tensor(column) for column in zip(*(place_of(nodes, node) for node in kept), strict=True))
    slots = places % drafter.config.block_size
    buckets = torch.stack([classes[block][place] for block, place in zip(blocks, places, strict=True)])
    found = described(tree.token_ids[0, 1:], tree.parents[0, 1:] - 1, blocks, slots, buckets)
    names = ("block_index", "slot_index", "rank_class")
    assert found == described(expected["tokens"], expected["parents"], *(expected[name] for name in names))
    scores = expected["cum_logprob"].float()
    torch.testing.assert_close(nodes.scores[0, kept], scores.sort(descending=True).values, rtol=0, atol=1e-4)
    # Paths that two blocks draft are kept twice here, and half of them can never be accepted; merged, all can.
    paths = {tuple(token for token, *_ in path) for path in found}
    merged, _ = cut(nodes, case["total_tokens"], depth, merge=True, finite=finite)
    merged = merged.first_nodes(int(merged.valid.sum()) - 1)
    assert merged.valid.all()
    assert paths <= {
        tuple(token for (token,) in path[1:]) for path in described(merged.token_ids[0], merged.parents[0])
    }


@pytest.mark.parametrize("file", golden("specblock_infer_*.safetensors"))
@torch.no_grad()
def test_a_generate_call_drafts_what_the_reference_drafts(file: Path) -> None:
    drafter, embedding, tensors = load_golden(file)
    drafter.set_options(num_blocks=1)
    generator = SpecBlockGenerator(drafter, StandInTarget(embedding))
    hidden: list[Tensor] = []
    drafter.norm.register_forward_hook(lambda module, args, output: hidden.append(args[0]))
    features, ids = tensors["input.hidden_states"], tensors["input.input_ids"]
    length = ids.shape[1]
    generator.observe(outcome_of(features, ids))
    generator.draft(context_at(ids[:, -1], length))
    torch.testing.assert_close(hidden[-1][0], tensors["block1.expected.draft_hidden"], **STATES)

    given = part_of(tensors, "round2.input.")
    generator.observe(outcome_of(given["hidden_states"], given["input_ids"], length))
    tree = generator.draft(context_at(given["input_ids"][:, -1], length + given["input_ids"].shape[1]))
    torch.testing.assert_close(hidden[-1][0], tensors["round2.expected.draft_hidden"], **STATES)
    assert tree.token_ids[0, 0] == given["input_ids"][0, -1]
    best = drafter.to_target_ids(tensors["round2.expected.logits"][0].argmax(-1)).tolist()
    paths = described(tree.token_ids[0], tree.parents[0])
    assert tuple((token,) for token in [int(tree.token_ids[0, 0]), *best]) in paths
