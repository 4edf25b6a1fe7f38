"""What is particular to DFlash: its masks against a forward without a cache, its config rules, its options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.decoding.exchange import Committed, DraftContext
from hf_specdec.decoding.state import Counts
from hf_specdec.methods.dflash.drafting import DFlashMarginals
from hf_specdec.methods.dflash.network import DFlashConfig, DFlashDrafter, dflash_layer_ids
from tests.method_table import make_ddtree, make_dflash
from tests.targets import PROMPTS, make_target
from tests.watched import Watched

GREEDY = {"max_new_tokens": 16, "do_sample": False}
# name: settings of the drafter; windows shorter than the prompt
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"dflash_config": {"causal": True}},
    "sliding": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
        "use_sliding_window": True,
    },
    "sliding, not causal": {
        "layer_types": ["sliding_attention", "sliding_attention"],
        "sliding_window": 3,  # shorter than the block
        "use_sliding_window": True,
        "is_causal": False,
    },
    "window for all": {"dflash_config": {"use_swa": True, "swa_window_size": 5}},
    "soft cap": {"final_logit_softcapping": 2.0},
}


@pytest.fixture
def target() -> PreTrainedModel:
    return make_target("llama", "sdpa")


def reference_logits(drafter: DFlashDrafter, target: PreTrainedModel, ids: Tensor) -> Tensor:
    """[depth, vocab]: what the drafter says after `ids` [length], root last, by the rules written out and no cache."""
    config, length = drafter.config, len(ids)
    features = torch.cat(
        [
            target(ids[None, :-1], output_hidden_states=True).hidden_states[layer + 1]
            for layer in config.target_layer_ids
        ],
        dim=-1,
    )
    block = torch.full((config.block_size,), config.mask_token_id)
    block[0] = ids[-1]
    positions = torch.cat([torch.arange(length - 1), torch.arange(length - 1, length - 1 + config.block_size)])
    masks = []
    for layer in range(config.num_hidden_layers):
        window, causal = config.window(layer), config.block_is_causal(layer)
        mask = torch.zeros(config.block_size, len(positions), dtype=drafter.dtype)
        for slot in range(config.block_size):
            for entry in range(len(positions)):
                ahead = entry - (length - 1) > slot
                too_far = window is not None and abs(length - 1 + slot - int(positions[entry])) >= window
                if (causal and ahead) or too_far:
                    mask[slot, entry] = -1e9
        masks.append(mask[None, None])
    return drafter(
        block[None],
        features.to(drafter.dtype),
        positions[None],
        embed_tokens=target.get_input_embeddings(),
        masks=masks,
        lm_head=target.get_output_embeddings(),
    )[0]


@pytest.mark.combinations(12)
@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("kind", KINDS)
def test_marginals_of_every_round_equal_a_forward_without_cache(target: PreTrainedModel, kind: str, batch: str) -> None:
    settings = {name: dict(value) if isinstance(value, dict) else value for name, value in KINDS[kind].items()}
    drafter = make_dflash(target, **settings).to(torch.float64)
    prompts = PROMPTS[batch]()
    watched = Watched(drafter)
    target.generate(**prompts, **GREEDY, assistant_model=watched)
    assert len(watched.rounds) > 3
    with torch.no_grad():
        for drafted in watched.rounds:
            for row, active in enumerate(drafted.context.active):
                if active:
                    padding = int((prompts["attention_mask"][row] == 0).sum())
                    expected = reference_logits(drafter, target, torch.tensor(drafted.text(row)[padding:]))
                    torch.testing.assert_close(drafted.logits[row], expected, rtol=1e-5, atol=1e-6)


def test_marginals_stay_right_when_rows_commit_different_numbers(target: PreTrainedModel) -> None:
    # The greedy runs above accept next to nothing; here the test says what each row kept.
    drafter = make_dflash(target, **KINDS["sliding"]).to(torch.float64)

    class Stub:
        model = target

    marginals = DFlashMarginals(drafter, Stub())
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(3, 60, (30,), generator=generator) for _ in range(2)]
    hidden = [target(text[None], output_hidden_states=True).hidden_states for text in texts]
    features = [torch.cat([states[layer + 1][0] for layer in drafter.config.target_layer_ids], -1) for states in hidden]
    done = [0, 0]
    for step, counts in enumerate(([6, 6], [1, 4], [3, 1], [5, 2], [0, 3], [2, 2])):
        width = max(counts)
        columns = torch.arange(width)
        index = [(start + columns).clamp(max=29) for start in done]
        valid = torch.stack([columns < count for count in counts])
        outcome = Committed(
            token_ids=torch.stack([text[at] for text, at in zip(texts, index, strict=True)]),
            features=torch.stack([states[at] for states, at in zip(features, index, strict=True)]).detach(),
            position_ids=torch.stack(index),
            valid=None if min(counts) == width else valid,
            counts=Counts.of(counts),
            target_logits=features[0],
            tree=None if step == 0 else object(),
        )
        marginals.observe(outcome)
        done = [start + count for start, count in zip(done, counts, strict=True)]
        context = DraftContext(
            root_ids=torch.stack([text[at] for text, at in zip(texts, done, strict=True)]),
            root_positions=torch.tensor(done),
            sequences=torch.stack(texts),
            lengths=[at + 1 for at in done],
            active=[True, True],
        )
        logits = marginals.marginals(context)
        for row in range(2):
            with torch.no_grad():
                expected = reference_logits(drafter, target, texts[row][: done[row] + 1])
            torch.testing.assert_close(logits[row].clone(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["dflash", "ddtree"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_drafter_changes_no_token(target: PreTrainedModel, kind: str, method: str) -> None:
    settings = {name: dict(value) if isinstance(value, dict) else value for name, value in KINDS[kind].items()}
    drafter = make_dflash(target, method=method, **settings)
    for make in PROMPTS.values():
        prompts = make()
        alone = target.generate(**prompts, **GREEDY)
        assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()


def test_chain_drafts_the_likeliest_token_of_every_position(target: PreTrainedModel) -> None:
    drafter = make_dflash(target).to(torch.float64)
    watched = Watched(drafter)
    target.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=watched)
    tree = watched.trees[0]
    with torch.no_grad():
        expected = reference_logits(drafter, target, torch.tensor(watched.rounds[0].text(0)))
    assert tree.token_ids[0, 1:].tolist() == expected.argmax(-1).tolist()
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3]]


def test_a_shorter_block_drafts_less(target: PreTrainedModel) -> None:
    prompts = PROMPTS["batch of one"]()
    for method, drafted in (("dflash", 2), ("ddtree", 9)):
        drafter = make_dflash(target, method=method, tree_budget=9)
        drafter.set_options(block_size=3)
        alone = target.generate(**prompts, **GREEDY)
        assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
        assert drafter.stats.num_draft_tokens == drafted * drafter.stats.num_spec_steps


def test_the_mask_token_is_never_drafted(target: PreTrainedModel) -> None:
    drafter = make_ddtree(target, tree_budget=60)
    mask_id = drafter.config.mask_token_id
    likeliest = 100 * target.get_output_embeddings().weight[mask_id]
    drafter.norm.register_forward_hook(lambda module, inputs, output: likeliest.expand_as(output))
    watched = Watched(drafter)
    target.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=watched)
    assert watched.trees
    for tree in watched.trees:
        assert tree.num_nodes > 1
        assert mask_id not in tree.token_ids[:, 1:].tolist()[0]


@pytest.mark.parametrize(
    ("taps", "layers", "expected"),
    [(1, 36, [18]), (2, 36, [1, 33]), (3, 8, [1, 3, 5]), (5, 36, [1, 9, 17, 25, 33])],
)
def test_target_layers_are_evenly_spaced_where_a_checkpoint_names_none(
    taps: int, layers: int, expected: list[int]
) -> None:
    assert dflash_layer_ids(taps, layers) == expected
    config = DFlashConfig(
        num_hidden_layers=taps, num_target_layers=layers, block_size=4, dflash_config={"mask_token_id": 1}
    )
    assert config.target_layer_ids == expected


@pytest.mark.parametrize(
    ("settings", "window", "causal"),
    [
        ({}, [None, None], [False, False]),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}, [8, None], [True, False]),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "dflash_config": {"causal": False}},
            [8, 8],
            [False, False],
        ),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 5}}, [5, 5], [False, False]),
        ({"is_causal": True}, [None, None], [True, True]),
    ],
    ids=str,
)
def test_windows_and_causality_follow_the_published_rules(
    settings: dict[str, Any], window: list[int | None], causal: list[bool]
) -> None:
    config = DFlashConfig(**{"num_hidden_layers": 2, "block_size": 4, **settings})
    assert [config.window(layer) for layer in range(2)] == window
    assert [config.block_is_causal(layer) for layer in range(2)] == causal


def test_block_size_is_read_from_either_place() -> None:
    assert DFlashConfig(block_size=7).block_size == 7
    assert DFlashConfig(dflash_config={"block_size": 9}).block_size == 9
    assert DFlashConfig(block_size=7, dflash_config={"block_size": 9}).block_size == 9


@pytest.mark.parametrize("method", ["dflash", "ddtree"])
def test_a_drafter_that_was_saved_and_loaded_drafts_the_same(
    target: PreTrainedModel, method: str, tmp_path: Any
) -> None:
    drafter = make_dflash(target, **KINDS["sliding"])
    drafter.save_pretrained(tmp_path)
    again = DFlashDrafter.from_pretrained(tmp_path).eval()
    again.set_options(method=method)
    drafter.set_options(method=method)
    prompts, said = PROMPTS["ragged batch of three"](), []
    for one in (drafter, again):
        target.generate(**prompts, **GREEDY, assistant_model=one)
        said.append(one.stats.per_step_accepted)
    assert said[0] == said[1]
    assert again.config.window(0) == drafter.config.window(0) == 4
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
