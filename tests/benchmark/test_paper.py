from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Qwen3Config

from examples.speed import paper
from examples.speed.paper import PARTS, Cost, Counter, round_on_paper, target_on_paper
from hf_specdec.benchmark.floor import weight_bytes

CONTEXT, NODES = 1000, 16
TINY = Qwen3Config(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=8192, tie_word_embeddings=False,
)  # fmt: skip


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_operators_are_counted_by_what_they_read_and_write(mode: type) -> None:
    with torch.device("meta"):
        layer, table = nn.Linear(40, 30, bias=False), nn.Embedding(1000, 8)
        inputs, ids, slab = torch.ones(2, 5, 40), torch.zeros(7, dtype=torch.int64), torch.ones(100, 8)
    with mode(), Counter() as counter:
        layer(inputs)
    assert counter.cost == Cost(1, 1, 4 * (2 * 5 * 40 + 40 * 30 + 2 * 5 * 30), 2 * 10 * 40 * 30)
    with mode(), Counter() as counter:
        rows = table(ids)  # reads seven rows, not the table
        slab[:7].copy_(rows)
        slab.view(50, 16).transpose(0, 1)  # a view is free
    assert counter.cost == Cost(2, 2, (2 * 7 * 8 * 4 + 7 * 8) + 2 * 7 * 8 * 4)


def test_parts_of_a_round_add_up_to_more_than_the_floor_and_multiply_what_the_shape_says() -> None:
    model = target_on_paper(TINY)
    costs = round_on_paper(model, CONTEXT, NODES, "none")
    assert tuple(costs) == PARTS
    assert costs["verify"].num_bytes > weight_bytes(model)
    matrices = sum(part.numel() for part in model.parameters() if part.dim() == 2) - 512 * 64  # but the embedding
    attention = 3 * 2 * 2 * 8 * 16 * (1 + NODES) * (CONTEXT + 1 + NODES)
    rotary = 2 * (1 + NODES) * 8  # older versions multiply positions and frequencies as matrices
    assert costs["verify"].flops - (2 * (1 + NODES) * matrices + attention) in (0, rotary)
    assert costs["accept"].flops == costs["commit"].flops == 0


def test_one_node_per_level_moves_fewer_bytes_than_all_nodes_in_many_more_launches() -> None:
    whole, one = paper.acceptance_on_paper(1000, 65, 15), paper.acceptance_on_paper(1000, 1, 0)
    assert 16 * one.num_bytes < whole.num_bytes
    assert 16 * one.launches > 10 * whole.launches
    assert whole.num_bytes > 2 * paper.SORT_PASSES * 65 * 1000 * (4 + 8)


def test_a_captured_part_is_a_few_launches_of_the_same_operators() -> None:
    model = target_on_paper(TINY)
    eager, captured = (
        round_on_paper(model, CONTEXT, NODES, "none"),
        round_on_paper(model, CONTEXT, NODES, "reduce-overhead"),
    )
    for part in ("draft", "verify"):
        assert captured[part].launches < eager[part].launches / 5
        assert captured[part].operators > eager[part].operators
        assert eager[part].launches == eager[part].operators
    assert captured["verify"].flops > eager["verify"].flops  # the prefix is padded to 1,024 entries


def test_transformers_copies_of_keys_and_values_are_what_folded_heads_save() -> None:
    model = target_on_paper(TINY)
    copied, folded = (
        round_on_paper(model, CONTEXT, NODES, "none", folds_heads=folds)["verify"] for folds in (False, True)
    )
    stored = 3 * 2 * 2 * 16 * 2 * (CONTEXT + 1 + NODES)  # bytes of keys and values
    # The host reads them, writes four copies, and reads these; the folded mask costs a part of it.
    assert 0.75 * 8 * stored < copied.num_bytes - folded.num_bytes < 8 * stored
    assert copied.flops == folded.flops


@pytest.mark.slow
def test_the_command_prints_a_table_per_number_of_nodes_and_one_of_contexts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert paper.main(["--shape", "tiny", "--contexts", "512", "1024", "--nodes", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    named = [line.split("|")[1].strip() for line in lines if line.startswith("|") and "---" not in line]
    of_acceptance = ["acceptance", "all nodes at once", "one node per level"]
    assert named == ["part", *PARTS, "round", "floor", "context", "512", "1,024", *of_acceptance]
