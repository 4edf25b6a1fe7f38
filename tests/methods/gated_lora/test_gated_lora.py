"""Gated LoRA: the target's columns keep their bits, masks see what they should, and PEFT reads the updates."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec import load_drafter
from hf_specdec.decoding.exchange import Committed
from hf_specdec.decoding.speed import cuda_graphs
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.methods.gated_lora import Behind, GatedLoraDrafter, GatedLoraGenerator, likeliest_ends, with_masks
from hf_specdec.methods.lookup import SuffixDrafter
from hf_specdec.methods.merged import MergedDrafter
from tests.decoding.test_cuda_graphs import Replaying, capture_on_cpu
from tests.method_table import make_gated_lora
from tests.targets import FAMILIES, PROMPTS, fresh_target, make_target, one_prompt

CASES = [(family, attention) for family, (_, _, attentions) in FAMILIES.items() for attention in attentions]
MIXTURES = ("qwen3-moe", "mixtral-sliding", "gpt-oss")
GREEDY = {"max_new_tokens": 16, "do_sample": False}


def prefilled(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None) -> TargetModel:
    target = TargetModel(model)
    target.prefill_alone(ids, max_length=60, mask=mask)
    target.begin_rounds(60)
    return target


def some_tree(rows: int) -> DraftTree:
    return DraftTree.from_lists([[7, 9, 11, 4]] * rows, [[-1, 0, 0, 1]] * rows)


@torch.no_grad()
def masks_behind(drafter: GatedLoraDrafter, model: PreTrainedModel, ids: Tensor) -> Tensor:
    """[batch, masks, vocab], the logits of masks behind the last token of rows."""
    target = prefilled(model, ids[:, :-1])
    tree = with_masks(DraftTree.root_only(ids[:, -1]), torch.zeros_like(ids[:, :1]), drafter.config.num_masks)
    return GatedLoraGenerator(drafter, target)._run(tree, target.root_positions(), 1).logits[:, 1:]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "attention"), CASES)
@torch.no_grad()
def test_the_targets_positions_keep_their_bits(family: str, attention: str, dtype: torch.dtype) -> None:
    model = make_target(family, attention, dtype)
    drafter = make_gated_lora(model)
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(3))
    padded = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
    batches = [(1, None), (2, None), (2, padded)]
    if (attention, dtype) == ("eager", torch.float64):
        batches.pop()  # its own attention gives NaN at padding
    for rows, mask in batches:
        tree = with_masks(some_tree(rows), torch.tensor([[3, 0]] * rows), 3)
        outputs = []
        for run in ("without", "with"):
            target = prefilled(model, ids[:rows], mask)
            positions = target.root_positions()
            if run == "without":
                outputs.append(target.verify(tree, positions).logits)
            else:
                outputs.append(GatedLoraGenerator(drafter, target)._run(tree, positions, 4).logits)
        if family in MIXTURES:  # which experts the masks choose decides how many rows a product has
            torch.testing.assert_close(outputs[0][:, :4], outputs[1][:, :4])
        else:
            assert torch.equal(outputs[0][:, :4], outputs[1][:, :4])
        assert not torch.equal(outputs[0][:, 4:], outputs[1][:, 4:])


@pytest.mark.parametrize("family", ["llama", "qwen3-mixed", "gpt2"])
@torch.no_grad()
def test_masks_behind_a_node_draft_what_masks_behind_the_root_draft_once_it_is_committed(family: str) -> None:
    model = make_target(family, "sdpa", torch.float64)
    drafter = make_gated_lora(model).double()
    target = prefilled(model, one_prompt()["input_ids"])
    generator, positions = GatedLoraGenerator(drafter, target), target.root_positions()
    behind = generator._run(with_masks(some_tree(1), torch.tensor([[3, 0, 2]]), 3), positions, 4).logits[:, 4:]
    for nodes, found in zip(([7, 9, 4], [7], [7, 11]), behind.split(3, dim=1), strict=True):
        text = torch.cat([one_prompt()["input_ids"], torch.tensor([nodes])], 1)
        torch.testing.assert_close(found, masks_behind(drafter, model, text))


def test_a_call_leaves_no_hook_and_no_entry_behind() -> None:
    model = fresh_target(dtype=torch.float32)
    before = [len(module._forward_hooks) for module in model.modules()]
    prompt = one_prompt()
    expected = model.generate(**prompt, **GREEDY, return_dict_in_generate=True)
    found = model.generate(**prompt, **GREEDY, return_dict_in_generate=True, assistant_model=make_gated_lora(model))
    assert [len(module._forward_hooks) for module in model.modules()] == before
    assert torch.equal(found.sequences, expected.sequences)
    for own, other in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close(own.keys, other.keys)


@pytest.mark.parametrize(("masked_nodes", "forwards_per_round"), [(0, 2), (10, 1)])
def test_a_round_takes_one_forward_with_masks_behind_its_nodes_and_two_without(
    masked_nodes: int, forwards_per_round: int
) -> None:
    model = fresh_target(dtype=torch.float32)
    drafter = make_gated_lora(model, masked_nodes=masked_nodes)
    expected = model.generate(**one_prompt(), **GREEDY)
    assert torch.equal(model.generate(**one_prompt(), **GREEDY, assistant_model=drafter), expected)
    stats = drafter.stats
    assert stats is not None
    assert (0 in stats.per_step_accepted[0]) == (masked_nodes > 0), "masks draft after rounds that accept nothing too"
    forwards = stats.num_target_forwards * forwards_per_round + (forwards_per_round == 1)  # the first draft's own
    assert stats.num_layers_run == forwards * model.config.num_hidden_layers


def test_the_first_draft_of_a_forward_behind_the_root_is_the_targets_own_choice() -> None:
    model = fresh_target(dtype=torch.float32)
    drafter = make_gated_lora(model, masked_nodes=0)
    model.generate(**one_prompt(), **GREEDY, assistant_model=drafter)
    assert drafter.stats is not None
    assert min(drafter.stats.per_step_accepted[0][:-1]) >= 1


@pytest.mark.parametrize("masked_nodes", [0, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3-mixed"])
def test_beside_captured_rounds_masks_run_without_a_graph(
    family: str, masked_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_on_cpu(monkeypatch)
    monkeypatch.setattr(cuda_graphs, "FIRST_PREFIX", 16)
    Replaying.replays = 0
    model, prompts = make_target(family, "sdpa"), PROMPTS["ragged batch of three"]()
    drafter = make_gated_lora(model, masked_nodes=masked_nodes).double()
    settings = {**GREEDY, "max_new_tokens": 32, "return_dict_in_generate": True}
    plain = model.generate(**prompts, **settings)
    model.generate(**prompts, **settings, assistant_model=drafter)
    assert drafter.stats is not None
    drafts = drafter.stats.per_step_accepted
    drafter.set_options(compile_mode="reduce-overhead")
    for _ in range(2):
        captured = model.generate(**prompts, **settings, assistant_model=drafter)
        assert torch.equal(captured.sequences, plain.sequences)
        assert drafter.stats.per_step_accepted == drafts
        for own, other in zip(captured.past_key_values.layers, plain.past_key_values.layers, strict=True):
            torch.testing.assert_close(own.keys, other.keys)
    assert (Replaying.replays > 0) == (masked_nodes == 0)


def test_the_likeliest_ends_are_nodes_whose_children_are_unlikely() -> None:
    logprobs = torch.tensor([[1.0, 0.6, 0.3, 0.5]]).log().tolist()
    tree = DraftTree.from_lists([[7, 1, 2, 3]], [[-1, 0, 0, 1]], path_logprobs=logprobs)
    assert likeliest_ends(tree, 4).tolist() == [[3, 2, 1, 0]]  # 0.5, 0.3, 0.1, 0.1
    assert likeliest_ends(DraftTree.chain(torch.tensor([[7, 1, 2]])), 2).tolist() == [[0, 1]]


def test_merged_with_a_look_up_it_drafts_and_the_output_is_the_targets() -> None:
    model = fresh_target(dtype=torch.float32)
    merged = MergedDrafter(make_gated_lora(model), SuffixDrafter(), tree_budget=9)
    expected = model.generate(**one_prompt(), **GREEDY)
    assert torch.equal(model.generate(**one_prompt(), **GREEDY, assistant_model=merged), expected)
    assert merged.stats is not None
    assert merged.stats.by_source["gated_lora"].num_accepted_tokens > 0


@torch.no_grad()
def test_a_row_that_commits_nothing_needs_no_masks() -> None:
    model = make_target("llama", "sdpa", torch.float32)
    target = prefilled(model, one_prompt()["input_ids"].expand(2, -1))
    generator = GatedLoraGenerator(make_gated_lora(model), target)
    logits = torch.arange(2 * 2 * 3 * 4.0).view(2, 2, 3, 4)
    for counts, found in (([0, 2], True), ([1, 2], True), ([2, 2], False)):
        generator.behind = Behind(torch.tensor([[3, 0], [3, 2]]), logits)
        path = torch.tensor([[0, 2], [0, 2]])
        ids = torch.zeros_like(path)
        counted = Counts.of(counts, torch.device("cpu"))
        generator.observe(Committed(ids, None, ids, None, counted, logits, some_tree(2), path))
        assert (generator.ready is not None) == found
        if generator.ready is not None:
            assert torch.equal(generator.ready[1], logits[1, 1])


# PEFT.


def test_peft_reads_the_updates_and_applies_them_to_all_positions(tmp_path: Path) -> None:
    model = fresh_target(dtype=torch.float64)
    drafter = make_gated_lora(model).double()
    drafter.save_pretrained(tmp_path)
    ids = torch.tensor([[5, 9, 12]])
    with torch.no_grad():
        embedded = model.get_input_embeddings()(ids)
        drafter.masks.copy_(embedded)  # so that the masks are these tokens
        expected = drafter(model, lambda: model(ids).logits, torch.arange(3)[None])
        adapted = peft.PeftModel.from_pretrained(model, str(tmp_path))
        torch.testing.assert_close(adapted(ids).logits, expected, rtol=1e-6, atol=1e-6)  # float32 on disk or not


def test_an_adapter_with_a_scale_of_its_own_is_read_with_it(tmp_path: Path) -> None:
    model = fresh_target(dtype=torch.float32)
    drafter = make_gated_lora(model)
    drafter.save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | {"lora_alpha": 3 * fields["r"]}))
    key = "model/layers/1/mlp/up_proj"
    loaded = load_drafter(tmp_path, model)
    torch.testing.assert_close(loaded.updates[key].lora_B, 3 * drafter.updates[key].lora_B)
    torch.testing.assert_close(loaded.updates[key].lora_A, drafter.updates[key].lora_A)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora is set, which is not read"),
        ({"bias": "all"}, "bias is set, which is not read"),
        ({"rank_pattern": {"q_proj": 3}}, "rank_pattern is set, which is not read"),
        ({"r": 0}, "cannot be read as a PEFT LoRA adapter"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    model = fresh_target(dtype=torch.float32)
    make_gated_lora(model).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path, model)


def test_an_adapter_without_a_tensor_is_refused(tmp_path: Path) -> None:
    model = fresh_target(dtype=torch.float32)
    make_gated_lora(model).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight")
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"updates\.model/layers/0/self_attn/q_proj\.lora_A"):
        load_drafter(tmp_path, model)
    file.unlink()
    with pytest.raises(ValueError, match="updates"):
        load_drafter(tmp_path, model)


def test_a_lora_of_the_users_acts_on_all_positions_and_ours_on_masks() -> None:
    base = fresh_target(dtype=torch.float64)
    drafter = make_gated_lora(base).double()
    without = masks_behind(drafter, base, one_prompt()["input_ids"])
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, settings).double()
    expected = adapted.generate(**one_prompt(), **GREEDY)
    assert torch.equal(adapted.generate(**one_prompt(), **GREEDY, assistant_model=drafter), expected)
    assert drafter.stats is not None
    assert drafter.stats.num_draft_tokens > 0
    assert not torch.allclose(masks_behind(drafter, base, one_prompt()["input_ids"]), without)
    with adapted.disable_adapter():
        torch.testing.assert_close(masks_behind(drafter, base, one_prompt()["input_ids"]), without)
    new = make_gated_lora(base)
    assert list(new.config.shapes()) == list(drafter.config.shapes()), "the user's matrices are not updated"


def test_targets_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = make_target("llama", "sdpa", torch.float32)
    drafter = make_gated_lora(model)
    with pytest.raises(ValueError, match="has recurrent layers, whose states would contain the masks"):
        drafter.check_target(make_target("qwen3.5", "sdpa", torch.float32))
    with pytest.raises(ValueError, match=r"updates model\.layers\.0\.self_attn\.q_proj .* has no such module"):
        drafter.check_target(make_target("gpt2", "sdpa", torch.float32))
    wide = make_target("llama", "sdpa", torch.float32, intermediate_size=64)
    with pytest.raises(ValueError, match=r"mlp\.gate_proj with \[32, 48\] inputs and outputs, but .* has \[32, 64\]"):
        drafter.check_target(wide)
