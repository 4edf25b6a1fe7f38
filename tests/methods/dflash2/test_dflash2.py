"""DFlash 2: convolutions over the block, and trees of the selector's laws. Its drafts' values are in test_golden.py."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_specdec.drafting.growth import conditional_tree
from hf_specdec.methods.dflash.network import DFlashConfig, DFlashDrafter
from hf_specdec.methods.dflash2 import DFlash2Config, DFlash2Drafter
from tests.method_table import dflash_config, make_dflash2
from tests.targets import make_target

VOCAB, HIDDEN, SLOTS, TOP_K = 7, 8, 3, 4
ADDED = {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 3, "selector_top_k": TOP_K}


def small_drafter() -> DFlash2Drafter:
    block = {"mask_token_id": 0, "target_layer_ids": [0], "sample_from_anchor": True, **ADDED}
    torch.manual_seed(0)
    drafter = DFlash2Drafter(
        DFlash2Config(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=4, block_size=SLOTS, dflash_config=block, initializer_range=1.0,
        )
    )  # fmt: skip
    return drafter.eval()


def test_a_new_drafter_computes_what_dflash_computes() -> None:
    target = make_target("llama", "sdpa", torch.float64)
    config = dflash_config(target, DFlash2Config, dflash_config={**ADDED})
    torch.manual_seed(0)
    new: Any = DFlash2Drafter(config).double().eval()
    plain: Any = DFlashDrafter(dflash_config(target, DFlashConfig)).double().eval()
    plain.load_state_dict(new.state_dict(), strict=False)
    ids, features = torch.randint(0, 64, (2, 5)), torch.randn(2, 4, 2 * target.config.hidden_size).double()
    positions = torch.arange(9).expand(2, -1)
    with torch.no_grad():
        outputs = [each(ids, features, positions, embed_tokens=target.get_input_embeddings()) for each in (new, plain)]
    torch.testing.assert_close(*outputs)


@torch.no_grad()
def test_a_convolution_reads_no_later_slot_and_its_kernel_follows_the_slot() -> None:
    convolution = small_drafter().layers[0].attention_conv
    for parameter in convolution.parameters():
        parameter.copy_(torch.randn_like(parameter))
    driver, block = torch.randn(1, 6, HIDDEN), torch.randn(1, 6, HIDDEN)
    for side, kernel in enumerate(convolution.kernels(driver)):
        expected = torch.zeros_like(block)
        groups = HIDDEN // ADDED["conv_group_size"]
        dynamic = convolution.kernel_projection(driver).view(6, 2, ADDED["conv_kernel_size"], groups)
        for slot, back, channel in itertools.product(range(6), range(3), range(HIDDEN)):
            if slot >= back:
                weight = convolution.base_kernel[side, back, channel]
                weight = weight + dynamic[slot, side, back, channel // ADDED["conv_group_size"]]
                expected[0, slot, channel] += weight * block[0, slot - back, channel]
        torch.testing.assert_close(convolution(block, kernel), expected)


def path_logprob(drafter: DFlash2Drafter, states: Tensor, logits: Tensor, root: int, path: tuple[int, ...]) -> float:
    """Of a path, from the equation of the selector."""
    selector, total, before = drafter.candidate_selector, 0.0, root
    for slot, token in enumerate(path):
        code = selector.predecessor_codebook[before] * selector.hidden_projection(states[slot])
        scores = torch.full((VOCAB,), -torch.inf)
        for candidate in logits[slot].topk(TOP_K).indices.tolist():
            scores[candidate] = logits[slot, candidate] + code @ selector.successor_codebook[candidate]
        total += float(scores.log_softmax(-1)[token])
        before = token
    return total


@pytest.mark.parametrize("budget", [1, 5, 14, 60])
@torch.no_grad()
def test_the_tree_is_the_likeliest_paths_of_a_full_enumeration(budget: int) -> None:
    drafter = small_drafter()
    torch.manual_seed(budget)
    states, roots = torch.randn(2, SLOTS, HIDDEN), torch.tensor([2, 5])
    every_logit = torch.randn(2, SLOTS, VOCAB)
    likeliest = every_logit.topk(TOP_K)
    logits = torch.full_like(every_logit, -torch.inf).scatter(-1, likeliest.indices, likeliest.values)
    tree = conditional_tree(roots, drafter.slots(states, logits, roots), torch.arange(VOCAB), budget)
    assert tree.path_logprobs is not None
    every = [path for length in range(1, SLOTS + 1) for path in itertools.product(range(VOCAB), repeat=length)]
    for row, root in enumerate(roots.tolist()):
        scores = {path: path_logprob(drafter, states[row], every_logit[row], root, path) for path in every}
        possible = sorted((score for score in scores.values() if score > -torch.inf), reverse=True)
        stated = tree.path_logprobs[row, 1:][tree.valid[row, 1:]].tolist()
        assert stated == pytest.approx(possible[:budget], abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_kernel_size": None}, "conv_kernel_size is None in this DFlash 2 config; it must be an integer"),
        ({"selector_rank": 0}, "selector_rank is 0 in this DFlash 2 config"),
        ({"conv_group_size": 5}, "conv_group_size is 5 .* which does not divide hidden_size 32"),
        ({"selector_top_k": 65}, "selector_top_k 65 in this DFlash 2 config: its selector chooses from the target's"),
        ({"draft_vocab_size": 32}, "draft_vocab_size 32 and selector_top_k 7"),
    ],
)
def test_sizes_that_make_no_sense_raise(changes: dict[str, Any], message: str) -> None:
    target = make_target("llama", "sdpa", torch.float32)
    with pytest.raises(ValueError, match=message):
        make_dflash2(target, dflash_config=changes)


def test_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="Unknown method 'ddtree'.*'dflash2', 'dflash2_chain'"):
        make_dflash2(make_target("llama", "sdpa", torch.float32), method="ddtree")
