"""SpecBlock's own: folders in the published layout, options, forwards per round, and what its trees look like."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec import load_drafter
from hf_specdec.decoding import devices
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.config import eagle3_layer_ids
from hf_specdec.methods.specblock import SpecBlockConfig, SpecBlockDrafter
from hf_specdec.methods.specblock.drafting import HeadOutput, Nodes, Shape, SpecBlockGenerator, Starts, attach, cut
from hf_specdec.methods.specblock.network import rank_features
from tests.method_table import make_specblock
from tests.targets import PROMPTS, make_target
from tests.watched import Watched

GREEDY = {"max_new_tokens": 20, "do_sample": False}
# What the published files leave out or say in their own way.
PUBLISHED = {
    "architectures": ["LlamaForCausalLMSpecBlockShift"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # of the target; the published code does not look at it
    "vocab_size": 64,
    "draft_vocab_size": 48,
    "diffspec_draft_token_num": 3,
    "rank_classes": 4,
    "rope_theta": 1000000,
}


@pytest.fixture
def target() -> PreTrainedModel:
    return make_target("llama", "sdpa")


@pytest.fixture
def published(tmp_path: Path, target: PreTrainedModel) -> tuple[Path, SpecBlockDrafter]:
    """A folder as published, and the drafter whose weights it holds. The map among the weights is a wrong one."""
    drafter = make_specblock(target, rope_theta=1000000)
    folder = tmp_path / "published"
    folder.mkdir()
    weights = drafter.state_dict()
    maps = {name: weights[name].clone() for name in ("d2t", "t2d")}
    weights |= {"d2t": torch.zeros_like(maps["d2t"])}
    weights["input_layer.embed_tokens.weight"] = torch.zeros(64, 32)
    save_file(weights, folder / "model.safetensors")
    torch.save(maps, folder / "vocab_mapping.pt")
    (folder / "config.json").write_text(json.dumps(PUBLISHED))
    return folder, drafter


def drafts_of(
    drafter: SpecBlockDrafter,
    target: PreTrainedModel,
    batch: str = "batch of one",
    make: type[SpecBlockGenerator] = SpecBlockGenerator,
) -> list[DraftTree]:
    """The trees of a call."""
    watched = Watched(drafter, make)
    target.generate(**PROMPTS[batch](), **GREEDY, assistant_model=watched)
    return watched.trees


def forwards_of(drafter: SpecBlockDrafter) -> list[tuple[Tensor, bool]]:
    """Of every forward from now on the conditions [batch, starts, ...], and whether they are the target's features."""
    forwards: list[tuple[Tensor, bool]] = []

    def note(layer: Any, inputs: tuple[Tensor, Tensor], named: dict[str, bool]) -> None:
        forwards.append((inputs[0], named["from_target"]))

    drafter.input_layer.register_forward_pre_hook(note, with_kwargs=True)
    return forwards


def paths_of(tree: DraftTree, row: int = 0) -> set[tuple[int, ...]]:
    """Drafted paths of the valid nodes of a row."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, tree.num_nodes):
        paths.append((*paths[int(tree.parents[row, node])], int(tree.token_ids[row, node])))
    return {path for path, valid in zip(paths, tree.valid[row].tolist(), strict=True) if valid and path}


def test_a_published_folder_loads_and_drafts_what_its_drafter_drafts(
    published: tuple[Path, SpecBlockDrafter], target: PreTrainedModel
) -> None:
    folder, drafter = published
    loaded = load_drafter(folder, target, dtype=torch.float32, tree_budget=9, beam_width=4)
    assert type(loaded) is SpecBlockDrafter
    assert loaded.config.head_dim == 8
    assert loaded.to_target_ids(torch.arange(48)).tolist() == drafter.to_target_ids(torch.arange(48)).tolist()
    for ours, theirs in zip(drafts_of(loaded, target), drafts_of(drafter, target), strict=True):
        assert paths_of(ours) == paths_of(theirs)


def test_saved_and_loaded_again_it_drafts_the_same(tmp_path: Path, target: PreTrainedModel) -> None:
    drafter = make_specblock(target, qk_norm=True, draft_head_dim=16, rank_features_top=None, block_positions="path")
    drafter.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "llama"
    assert written["architectures"] == ["LlamaForCausalLMSpecBlock"]
    assert written["rope_theta"] == 10000.0
    loaded = load_drafter(tmp_path, target, dtype=torch.float32, tree_budget=9, beam_width=4)
    assert json.loads(loaded.config.to_json_string()) | {"dtype": None} == written | {"dtype": None}
    for ours, theirs in zip(drafts_of(loaded, target), drafts_of(drafter, target), strict=True):
        assert paths_of(ours) == paths_of(theirs)


def test_saving_over_a_vocabulary_file_replaces_it(tmp_path: Path, target: PreTrainedModel) -> None:
    drafter = make_specblock(target)
    drafter.save_pretrained(tmp_path)
    assert not (tmp_path / "vocab_mapping.pt").exists()
    torch.save({"d2t": torch.zeros(48, dtype=torch.int64), "t2d": torch.arange(64) < 48}, tmp_path / "vocab_mapping.pt")
    drafter.save_pretrained(tmp_path)
    assert torch.equal(load_drafter(tmp_path).d2t, drafter.d2t)


def rewrite(folder: Path, **fields: Any) -> None:
    (folder / "config.json").write_text(json.dumps(PUBLISHED | fields))


def spoil_map(folder: Path, change: Callable[[torch.Tensor], object]) -> None:
    maps = torch.load(folder / "vocab_mapping.pt", weights_only=True)
    change(maps["d2t"])
    torch.save(maps, folder / "vocab_mapping.pt")


BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "K that the weights do not have": (
        lambda folder: rewrite(folder, diffspec_draft_token_num=4),
        r"position_queries.weight is \[3, 32\] in model.safetensors, but config.json makes it \[4, 32\]",
    ),
    "rank classes that the weights do not have": (
        lambda folder: rewrite(folder, rank_classes=3),
        r"rank_head.2.weight is \[4, 256\] in model.safetensors, but config.json makes it \[3, 256\]",
    ),
    "K of nothing": (
        lambda folder: rewrite(folder, diffspec_draft_token_num=0), "diffspec_draft_token_num is 0.*at least 1"
    ),
    "draft vocabulary beyond the target's": (
        lambda folder: rewrite(folder, draft_vocab_size=65), "draft_vocab_size is 65; it must be an integer from"
    ),
    "map that repeats a token": (
        lambda folder: spoil_map(folder, lambda d2t: d2t.__setitem__(5, -3)),
        "gives target id 2 to 2 draft ids, but each draft id must have its own target id",
    ),
    "map that does not increase": (
        lambda folder: spoil_map(folder, lambda d2t: d2t.add_(torch.arange(48)).copy_(d2t.flip(0) - torch.arange(48))),
        r"\(d2t\) is not increasing: draft id \d+ is target id \d+, draft id \d+ is \d+",
    ),
    "map past the vocabulary": (
        lambda folder: spoil_map(folder, lambda d2t: d2t.__setitem__(47, 40)),
        "gives target ids from 0 to 87, but the target has ids 0 to 63",
    ),
    "maps that disagree": (
        lambda folder: spoil_map(folder, lambda d2t: d2t.add_(1)), "d2t and t2d of .*published.* have different"
    ),
    "map of other tensors": (
        lambda folder: torch.save({"d2t": torch.zeros(48)}, folder / "vocab_mapping.pt"), "must be a dict of the tens"
    ),
    "map with code": (
        lambda folder: torch.save({"d2t": Path}, folder / "vocab_mapping.pt"), "contains code, which is never run"
    ),
    "unknown choice": (lambda folder: rewrite(folder, rank_state="raw"), "rank_state is 'raw'; it must be one of"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_folder_that_does_not_fit_together_raises(published: tuple[Path, SpecBlockDrafter], case: str) -> None:
    spoil, message = BAD_FOLDERS[case]
    spoil(published[0])
    with pytest.raises(ValueError, match=message):
        load_drafter(published[0])


def test_a_lost_map_warns(published: tuple[Path, SpecBlockDrafter]) -> None:
    (published[0] / "vocab_mapping.pt").unlink()
    with pytest.warns(UserWarning, match="first 48 of 64 target ids"):
        load_drafter(published[0])


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no block": ({"num_blocks": 0}, "num_blocks=0 must be an integer from 1"),
    "bucket map of the wrong length": ({"branching": [2, 4, 10]}, r"branching=\[2, 4, 10\] must have 4 numbers"),
    "negative width": ({"branching": [2, -1, 3, 0]}, "integers of at least 0"),
    "empty tree": ({"tree_budget": 0}, "tree_budget=0 must be an integer from 1"),
    "no beam": ({"beam_width": 0}, "beam_width=0 must be an integer of at least 1"),
    "other method": ({"method": "specblok"}, "has only the method 'specblock': leave method out"),
    "unknown option": ({"num_block": 2}, "Did you mean 'num_blocks'"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_an_option_out_of_range_raises(target: PreTrainedModel, case: str) -> None:
    options, message = BAD_OPTIONS[case]
    with pytest.raises(ValueError, match=message):
        make_specblock(target).set_options(**options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_hidden_size": 48}, "reads target hidden states of size 48, but target .* has hidden_size 32"),
        ({"hidden_size": 64, "target_hidden_size": 32}, "shares token embeddings of size 64"),
        ({"target_layer_ids": [0, 4]}, r"reads target layers \[0, 4\], but \[4\] are not among the layers 0 to 3"),
        ({"vocab_size": 80}, "a vocabulary of 80, but target .* has 64 embeddings"),
    ],
)
def test_a_target_that_does_not_fit_raises(target: PreTrainedModel, settings: dict[str, Any], message: str) -> None:
    drafter = SpecBlockDrafter(
        SpecBlockConfig(**{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
                           "num_attention_heads": 2, "num_key_value_heads": 1} | settings)
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        target.generate(**PROMPTS["batch of one"](), assistant_model=drafter)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5])
@pytest.mark.parametrize("budget", [3, 60])
def test_a_round_takes_one_forward_per_block_whatever_the_tree(
    target: PreTrainedModel, num_blocks: int, budget: int
) -> None:
    drafter = make_specblock(target, num_blocks=num_blocks, tree_budget=budget)
    forwards = forwards_of(drafter)
    trees = drafts_of(drafter, target, "ragged batch of three")
    assert len(forwards) == num_blocks * len(trees)
    assert max(int(tree.depths.max()) for tree in trees) <= 3 * num_blocks
    assert all(tree.num_nodes <= 1 + budget for tree in trees)


def merged_by_hand(tokens: list[int], parents: list[int], scores: list[float], budget: int) -> list[tuple[int, ...]]:
    """Paths to the nodes that are left, likeliest first: of nodes with one path only the first counts.

    Only the first `2 * budget` nodes, root not counted, are looked at.
    """
    order = sorted(range(1, len(tokens)), key=lambda node: -scores[node])[: 2 * budget]
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in order:
        if scores[node] > -torch.inf:
            paths[node] = (*paths[parents[node]], tokens[node])
    return list(dict.fromkeys(paths.values()))[1 : 1 + budget]


@pytest.mark.parametrize("budget", [3, 8, 40])
def test_a_path_that_two_blocks_draft_is_kept_once(budget: int) -> None:
    # Three blocks of two slots with two candidates each, over three tokens: many paths are there twice.
    shape = Shape(torch.tensor([2]), 2, 2, None, None, budget, torch.arange(100))
    numbers = torch.Generator().manual_seed(budget)
    repeated = 0
    for _ in range(20):
        starts, batch = (1, 3, 3), 2
        states = 2 * sum(starts)
        token_ids = torch.randint(3, (batch, 1 + 2 * states), generator=numbers)
        token_ids[:, 2::2] = (token_ids[:, 1::2] + 1) % 3  # candidates of a state differ
        above = torch.stack([torch.randint(1 + 2 * state, (batch,), generator=numbers) for state in range(states)], 1)
        scores = torch.zeros(batch, 1 + 2 * states)
        for node in range(1, 1 + 2 * states):
            step = torch.randint(1, 9, (batch,), generator=numbers) * -0.25
            scores[:, node] = scores.gather(1, above[:, (node - 1) // 2, None])[:, 0] + step
        scores[1, -5:] = -torch.inf
        finite = torch.ones(batch, dtype=torch.bool)
        tree, kept = cut(Nodes(token_ids, scores, above, starts, shape), budget, 2 * states, merge=True, finite=finite)
        assert torch.equal(token_ids.gather(1, kept).where(tree.valid, -1), tree.token_ids.where(tree.valid, -1))
        for row in range(batch):
            parents = [-1, *above[row].repeat_interleave(2).tolist()]
            expected = merged_by_hand(token_ids[row].tolist(), parents, scores[row].tolist(), budget)
            repeated += len(expected) < budget
            paths: list[tuple[int, ...]] = [()]
            for node in range(1, int(tree.valid[row].sum())):
                assert tree.valid[row, node]
                paths.append((*paths[int(tree.parents[row, node])], int(tree.token_ids[row, node])))
            assert paths[1:] == expected
    assert budget < 40 or repeated > 0, "a test without repeated paths shows little"


@pytest.mark.usefixtures("whole_batch")
@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 3, "tree_budget": 20, "branching": [2, 4, 6, 4]},
        {"num_blocks": 3, "branching": [1, 2, 3, 0], "merge_duplicates": False},
        {"num_blocks": 1},
    ],
)
def test_in_host_memory_only_what_no_row_uses_is_left_out(
    target: PreTrainedModel, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, batch = make_specblock(target, **options), "ragged batch of three"
    short = drafts_of(drafter, target, batch)
    monkeypatch.setitem(devices.RULES, "cpu", lambda device: devices.Abilities())
    for ours, whole in zip(short, drafts_of(drafter, target, batch), strict=True):
        assert ours.valid[:, -1].any(), "the last node is used by a row"
        for row in range(3):
            assert paths_of(ours, row) == paths_of(whole, row)


@pytest.mark.parametrize("num_blocks", [1, 2, 4])
def test_slots_per_round_grow_with_blocks_and_starts_not_with_the_depth_reached(
    target: PreTrainedModel, num_blocks: int
) -> None:
    drafter = make_specblock(target, num_blocks=num_blocks, max_starts=2, beam_width=None)
    forwards = forwards_of(drafter)
    rounds = len(drafts_of(drafter, target))
    later = [conditions.shape[1] for conditions, from_target in forwards if not from_target]
    assert len(later) == (num_blocks - 1) * rounds
    assert all(width <= 2 for width in later)


def test_a_feature_enters_at_the_position_of_the_token_after_it(target: PreTrainedModel) -> None:
    drafter = make_specblock(target, num_blocks=1)
    entered: list[Tensor] = []
    drafter.rotary_emb.register_forward_pre_hook(lambda rotary, inputs: entered.append(inputs[1]))
    drafts_of(drafter, target)
    first_slots = entered[0][0, :: drafter.config.block_size]
    assert first_slots.tolist() == list(range(1, 10))  # the prompt has 9 tokens; the root is the next


def test_fixed_top_k_gives_every_place_k_children(target: PreTrainedModel) -> None:
    # K = 1 block of 3 slots, k = 3: the chain and two alternatives at each of its places.
    drafter = make_specblock(target, num_blocks=1, branching=[3] * 4, beam_width=None, tree_budget=60)
    for tree in drafts_of(drafter, target):
        assert int(tree.valid.sum()) == 1 + 3 * 3
        assert tree.depths[0, 1:].bincount(minlength=4).tolist() == [0, 3, 3, 3]


def test_a_bucket_that_gives_up_leaves_the_chain(target: PreTrainedModel) -> None:
    drafter = make_specblock(target, num_blocks=2, branching=[0] * 4, beam_width=None)
    for tree in drafts_of(drafter, target):
        assert tree.depths[0].tolist() == [0, 1, 2, 3]


def test_a_larger_budget_keeps_what_a_smaller_one_has(target: PreTrainedModel) -> None:
    smaller, larger = (
        drafts_of(make_specblock(target, tree_budget=budget, num_blocks=3, beam_width=None, max_starts=8), target)[0]
        for budget in (6, 60)
    )
    assert paths_of(smaller) <= paths_of(larger)


def test_merged_paths_are_distinct_and_no_fewer(target: PreTrainedModel) -> None:
    options = {"tree_budget": 20, "num_blocks": 3, "branching": [2, 4, 6, 4]}
    for merged, both in zip(
        drafts_of(make_specblock(target, **options), target),
        drafts_of(make_specblock(target, merge_duplicates=False, **options), target),
        strict=False,
    ):
        assert merged.valid.all()
        assert len(paths_of(merged)) >= len(paths_of(both))
        assert paths_of(merged) >= paths_of(both)


def test_a_long_prompt_in_parts_drafts_the_same(target: PreTrainedModel) -> None:
    class InParts(SpecBlockGenerator):
        prompt_chunk = 4

    for batch in PROMPTS:
        drafter = make_specblock(target).to(torch.float64)
        whole, parts = drafts_of(drafter, target, batch), drafts_of(drafter, target, batch, InParts)
        for ours, theirs in zip(parts, whole, strict=True):
            assert [paths_of(ours, row) for row in range(len(ours.token_ids))] == [
                paths_of(theirs, row) for row in range(len(theirs.token_ids))
            ]


@pytest.mark.parametrize("batch", PROMPTS)
def test_drafts_of_a_round_do_not_depend_on_how_positions_arrived(target: PreTrainedModel, batch: str) -> None:
    # The cache after several rounds drafts what a fresh call on the same tokens drafts.
    drafter = make_specblock(target, num_blocks=3).to(torch.float64)
    prompts = PROMPTS[batch]()
    length = prompts["input_ids"].shape[1]
    watched = Watched(drafter)
    alone = target.generate(**prompts, **GREEDY, assistant_model=watched)
    kept = watched.stats.per_step_accepted
    for row in range(len(alone)):
        after = 0  # tokens committed beyond the first new one
        for step, tree in enumerate(watched.trees[:4]):
            prefix = alone[row : row + 1, : length + after]
            mask = torch.cat([prompts["attention_mask"][row : row + 1], prefix.new_ones(1, after)], 1)
            fresh = Watched(drafter)
            target.generate(prefix[mask.bool()][None], **{**GREEDY, "max_new_tokens": 3}, assistant_model=fresh)
            assert paths_of(fresh.trees[0]) == paths_of(tree, row), (row, step)
            if step + 1 > len(kept[row]):
                break
            after += kept[row][step] + 1


def test_a_drafter_without_broadcast_or_shift_still_drafts(target: PreTrainedModel) -> None:
    full = drafts_of(make_specblock(target), target)[0]
    for ablation in ("prefix_broadcast", "layer_wise_shift"):
        drafter = make_specblock(target, **{ablation: False})
        assert len(drafter.shift_proj) == (ablation == "prefix_broadcast")
        assert paths_of(drafts_of(drafter, target)[0]) != paths_of(full)


@pytest.mark.parametrize(
    ("field", "value"),
    [("draft_condition", "normed"), ("draft_condition_norm", False), ("block_positions", "path"),
     ("rank_state", "pre_norm"), ("rank_features_top", 2), ("rank_features_top", None)],
)  # fmt: skip
def test_every_published_choice_changes_numbers(target: PreTrainedModel, field: str, value: Any) -> None:
    seen = []
    for settings in ({}, {field: value}):
        drafter = make_specblock(target, **settings)
        outputs: list[torch.Tensor] = []
        drafter.rank_head.register_forward_hook(lambda module, args, output, outputs=outputs: outputs.append(output))
        trees = drafts_of(drafter, target)
        seen.append(outputs[len(outputs) // len(trees) - 1])
    assert seen[0].shape != seen[1].shape or not torch.allclose(seen[0], seen[1])


def test_rank_features_follow_their_definition() -> None:
    logits = torch.randn(5, 30) * 3
    probs = logits.softmax(-1).sort(descending=True).values
    features = rank_features(logits, None)
    torch.testing.assert_close(features[:, :10], probs[:, :10].log())
    torch.testing.assert_close(features[:, 13], probs[:, 0])
    torch.testing.assert_close(features[:, 14], -(probs * probs.log()).sum(-1))
    ranked = logits.sort(descending=True).values
    torch.testing.assert_close(features[:, 10:13], ranked[:, :1] - ranked[:, [1, 2, 4]])
    # Over the largest only, the same numbers from the largest alone.
    torch.testing.assert_close(rank_features(logits, 12), rank_features(ranked[:, :12], None))
    assert rank_features(torch.randn(2, 3), 20).shape == (2, 15)


def test_default_layers_are_those_of_the_published_code() -> None:
    assert eagle3_layer_ids(36) == [1, 17, 32]
    for depth in itertools.chain(range(1, 8), (32, 64)):
        assert all(0 <= layer < depth for layer in eagle3_layer_ids(depth))


def test_card_names_method_and_vocabulary(target: PreTrainedModel) -> None:
    card = make_specblock(target).model_card("owner/drafter").content
    assert re.search(r"Draft vocabulary \| 48 of 64 tokens", card)
    assert "SpecBlock" in card


def test_saved_weights_have_the_published_names(tmp_path: Path, target: PreTrainedModel) -> None:
    make_specblock(target).save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"d2t", "t2d", "lm_head.weight", "norm.weight", "rank_head.0.weight", "rank_head.2.weight"} <= names
    assert {f"input_layer.{name}.weight" for name in (
        "condition_proj", "condition_norm", "token_norm", "query_norm", "position_queries", "fuse"
    )} <= names  # fmt: skip
    assert "shift_proj.0.weight" in names
    assert not [name for name in names if "embed_tokens" in name or "rotary" in name]


def test_a_slot_that_gives_up_ends_the_branching_of_its_block_and_not_the_chain() -> None:
    shape = Shape(
        branching=torch.tensor([3, 0]), width=3, slots=3, beam_width=None, max_starts=None, tree_budget=20,
        index=torch.arange(100),
    )  # fmt: skip
    output = HeadOutput(
        token_ids=torch.arange(1, 10).view(1, 1, 3, 3),
        logprobs=torch.tensor([0.5, 0.3, 0.1]).log().expand(1, 1, 3, 3),
        classes=torch.tensor([[[0, 1, 0]]]),  # the second slot gives up
        finite=torch.tensor([True]),
    )
    root_ids = torch.tensor([0])
    nodes, _ = attach(Nodes.root(root_ids, shape), Starts.root(1, root_ids.device), output)
    tree, _ = cut(nodes, 20, 3, merge=True, finite=output.finite)
    tree = tree.first_nodes(int(tree.valid.sum()) - 1)
    assert sorted(zip(tree.depths[0].tolist(), tree.token_ids[0].tolist(), strict=True)) == [
        (0, 0), (1, 1), (1, 2), (1, 3), (2, 4), (3, 7),
    ]  # fmt: skip
