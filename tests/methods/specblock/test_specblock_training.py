"""The SpecBlock training step: golden losses and masks, agreement with drafting, options, and a run that learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, TrainingArguments

from hf_specdec.decoding.exchange import Committed, DraftContext
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.target import TargetModel
from hf_specdec.drafting.drafter import always_drafting
from hf_specdec.methods.specblock.drafting import SpecBlockGenerator, Starts
from hf_specdec.methods.specblock.quality import rank_classes
from hf_specdec.methods.specblock.training import (
    BlockLosses,
    SpecBlockStep,
    block_losses,
    new_drafter,
    smoothed_classes,
)
from hf_specdec.training.passes import block_masks
from hf_specdec.training.trainer import DrafterTrainer
from hf_specdec.training.vocabulary import frequent_tokens
from tests.method_table import make_specblock
from tests.methods.specblock.test_specblock_golden import RANKS, load_golden
from tests.targets import fresh_target, make_target
from tests.test_golden import golden, metadata, part_of

FORWARD = "specblock_forward_*.safetensors"


@pytest.mark.parametrize("file", golden(FORWARD))
def test_rank_labels_equal_the_reference(file: Path) -> None:
    given = part_of(load_file(file), "rank_labels.")
    assert torch.equal(rank_classes(given["logits"], given["target_tokens"]), given["expected"])
    torch.testing.assert_close(smoothed_classes(4), given["ordinal_smoothing_4"], **RANKS)


def log_of(probs: Tensor) -> Tensor:
    return probs.clamp(min=1e-37).log()


def loss_cases() -> list[Any]:
    parameters = []
    for entry in golden(FORWARD):
        (file,) = entry.values
        # Losses over the most probable tokens alone are an option of the published code that this one lacks.
        cases = [case for case in json.loads(metadata(file)["loss_cases"]) if case["draft_loss_topk"] <= 0]
        parameters += [pytest.param(file, case, id=f"{file.stem}-{case['name']}") for case in cases]
    return parameters


def entropies(losses: BlockLosses, probs: Tensor, position_mask: Tensor, offset: int) -> Tensor:
    """Of the target, mean over the positions of each slot: what cross entropy is above the divergence."""
    positions, means = losses.correct.shape[1], []
    entropy = torch.special.entr(probs).sum(-1)
    for slot in range(losses.correct.shape[2]):
        inside = torch.arange(positions) < positions - slot
        room = min(positions, entropy.shape[1] - offset - slot)
        rows = slice(offset + slot, offset + slot + room)
        counted = (losses.valid[..., slot] & inside)[:, :room] & position_mask[:, rows]
        means.append((entropy[:, rows] * counted).sum() / counted.sum().clamp(min=1))
    return torch.stack(means)


@pytest.mark.parametrize(("file", "case"), loss_cases())
def test_losses_equal_the_reference(file: Path, case: dict[str, Any]) -> None:
    tensors = load_file(file)
    if case["name"].startswith("block"):
        block = part_of(tensors, f"{case['name'].split('_')[0]}.expected.")
        logits, rank_logits = block["logits"], block["rank_logits"]
        target = part_of(tensors, "loss.expected.")
        probs, position_mask = target["target_p"], target["position_mask"]
        start_mask = tensors["loss.input.loss_mask"]
    else:
        given = part_of(tensors, "losssyn.input.")
        suffix = "_offset2" if "offset2" in case["name"] else ""
        logits, rank_logits = given[f"logits{suffix}"], given[f"rank_logits{suffix}"]
        probs, position_mask = given["target_p_padded"], given["position_mask_padded"]
        start_mask = given["loss_mask"]
    starts = start_mask[..., 0] > 0
    losses = block_losses(
        logits[starts], rank_logits[starts], log_of(probs), position_mask[..., 0] > 0, starts,
        offset=case["target_offset"],
        rank_loss="published",
        rank_budget=case["budget_per_class"] or None,
    )  # fmt: skip
    expected = part_of(tensors, f"loss.{case['name']}.")
    entropy = entropies(losses, probs, position_mask[..., 0] > 0, case["target_offset"])
    torch.testing.assert_close(losses.draft + entropy, expected["draft_losses"], **RANKS)
    torch.testing.assert_close(losses.rank, expected["rank_loss"], **RANKS)
    counts = losses.rank_classes[losses.rank_classes >= 0].bincount(minlength=4)
    assert counts.tolist() == expected["rank_count_per_class"].long().tolist()
    slot = case["chain_snapshot_slot"]
    if slot >= 0:
        assert torch.equal(losses.valid[..., slot + 1], expected["chain_snapshot"] > 0)


@pytest.mark.parametrize("file", golden(FORWARD))
def test_masks_of_chained_blocks_equal_the_reference(file: Path) -> None:
    tensors = load_file(file)
    cuts = json.loads(metadata(file)["M"])
    positions = tensors["block1.input.input_ids"].shape[1]
    slots = tensors["block1.expected.logits"].shape[2]
    masks = block_masks(positions, slots, cuts, cross_position=True)
    entries = positions * slots
    order = torch.arange(entries)
    assert masks[0] is None
    assert torch.equal(tensors["block1.attention_mask"], order[:, None] >= order)
    for block, mask in enumerate(masks[1:], start=2):
        expected = tensors[f"block{block}.attention_mask"]
        # The reference holds block 1 twice: its earlier positions, then what the same position may see.
        once = torch.cat([expected[:, :entries] | expected[:, entries : 2 * entries], expected[:, 2 * entries :]], 1)
        assert torch.equal(mask[0, 0], once), block


class GivenLaw:
    """Stands in for the target of a golden run: its embedding, and nothing else is asked."""

    def __init__(self, embedding: Tensor) -> None:
        self.embed_tokens = torch.nn.Embedding.from_pretrained(embedding)


@pytest.mark.parametrize("file", golden(FORWARD))
def test_loss_of_a_whole_chain_equals_the_reference(file: Path) -> None:
    drafter, embedding, tensors = load_golden(file)
    settings = json.loads(metadata(file)["online"])
    step = SpecBlockStep.__new__(SpecBlockStep)
    step.drafter, step.embed_tokens = drafter, GivenLaw(embedding).embed_tokens
    step.num_blocks, step.cross_position = settings["num_ttt_blocks"], True
    step.options = {"valid_prefix": True, "rank_loss": "published",
                    "rank_budget": settings["budget_per_class"]}  # fmt: skip
    ids = tensors["block1.input.input_ids"]
    # The reference's ids are shifted left, ours are the row's own.
    row = torch.cat([torch.zeros_like(ids[:, :1]), ids], 1)
    mask = tensors["loss.input.loss_mask"][..., 0] > 0
    position_mask = tensors["loss.expected.position_mask"][..., 0] > 0
    probs = tensors["loss.expected.target_p"]
    with torch.no_grad():
        losses = step.chain(
            drafter, tensors["block1.input.hidden_states"], row, log_of(probs), mask,
            position_mask, training=True, cuts=settings["M"],
        )  # fmt: skip
    offsets = [sum(settings["M"][:block]) for block in range(len(losses))]
    entropy = [
        entropies(part, probs, position_mask, offset) for part, offset in zip(losses, offsets, strict=True)
    ]  # fmt: skip
    drafts = sum(part.draft + own for part, own in zip(losses, entropy, strict=True))
    found = torch.cat([drafts, sum(part.rank for part in losses)[None]])
    torch.testing.assert_close(found, tensors["loss.online.plosses"], **RANKS)


@pytest.fixture
def target() -> PreTrainedModel:
    return fresh_target("llama", "sdpa", torch.float32)


def rows_of(target: PreTrainedModel, count: int = 6, length: int = 24) -> dict[str, Tensor]:
    prompts = torch.randint(3, 64, (count, 5), generator=torch.Generator().manual_seed(5))
    ids = target.generate(prompts, max_new_tokens=length - 5, do_sample=False)
    lengths = torch.tensor([length, length - 4] * (count // 2))
    ids = ids.masked_fill(torch.arange(length) >= lengths[:, None], 0)
    return {"input_ids": ids, "first_anchor": torch.full((count,), 5), "length": lengths}


@pytest.mark.parametrize("positions", ["start", "path"])
def test_a_chained_block_is_trained_as_it_is_drafted(target: PreTrainedModel, positions: str) -> None:
    drafter = make_specblock(target, block_positions=positions, rank_features_top=None)
    step = SpecBlockStep(drafter, target, num_blocks=3)
    batch = rows_of(target, count=2)
    ids = batch["input_ids"][:1]
    states = step.reader.read(ids)
    outputs: list[Any] = []
    drafter.register_forward_hook(lambda module, args, output: outputs.append(output))
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    _, probs = step.target_labels(states.last_hidden)
    cuts = [2, 3]
    with torch.no_grad():
        step.chain(drafter, states.features, ids, probs, everywhere, everywhere, training=True, cuts=cuts)

    root = 11  # drafted from position 10
    generator = SpecBlockGenerator(drafter, TargetModel(target, drafter.feature_layers(target)))
    generator.observe(
        Committed(
            ids[:, :root], states.features[:, :root], torch.arange(root)[None], None, Counts.of([root]), states.features
        )
    )
    with torch.no_grad():
        generator.read_committed(ids[:, root])
        hidden, at = generator.last
        torch.testing.assert_close(hidden[:, 0], outputs[0].hidden[:, root - 1], rtol=1e-4, atol=1e-5)
        depth, zero = 0, torch.zeros(1, 1, dtype=torch.int64)
        held = torch.empty(1, 1, 0, dtype=torch.bool)
        for block, cut in enumerate(cuts, start=1):
            depth += cut
            seen = torch.tensor([[cuts[0]]])
            if block > 1:
                held = torch.cat([held, (torch.arange(3) < cut)[None, None]], -1)
            starts = Starts(zero, zero.float(), zero + depth, seen, held, zero + cut - 1)
            hidden = drafter.block_hidden(
                drafter.condition_of(hidden[:, :, cut - 1]),
                generator.embed(ids[:, root + depth : root + depth + 1]),
                at + depth if positions == "path" else at,
                from_target=False,
                mask=generator.path_mask(starts, generator.cache.longest, generator.cache.lengths),
                cache=generator.cache,
            )
            generator.cache.continue_round(3)
            torch.testing.assert_close(hidden[:, 0], outputs[block].hidden[:, root - 1], rtol=1e-4, atol=1e-5)


def test_first_slot_is_scored_for_the_token_that_drafting_asks_for(target: PreTrainedModel) -> None:
    # A context is drafted from by hand; the step's idea of right and wrong at that position is the same.
    drafter = make_specblock(target)
    step = SpecBlockStep(drafter, target, num_blocks=1)
    batch = rows_of(target, count=2)
    output = step(drafter, batch, training=False)
    ids = batch["input_ids"]
    model = TargetModel(target, drafter.feature_layers(target))
    features = step.reader.read(ids).features
    for root in range(6, 20):
        generator = SpecBlockGenerator(drafter, model)
        generator.observe(
            Committed(ids[:, :root], features[:, :root], torch.arange(root).expand(2, -1), None, Counts.of([root] * 2),
                      features)
        )  # fmt: skip
        with torch.no_grad():
            generator.draft(DraftContext(ids[:, root], torch.tensor([root] * 2), ids, [root + 1] * 2, [True] * 2))
        nodes = generator.tree[1]
        # The row is the target's greedy text, so the token it chose after each place stands there.
        drafted = nodes.token_ids[:, 1 :: nodes.shape.width][:, :3]  # the chain
        hits = drafted == ids[:, root + 1 : root + 4]
        known = output.labelled[:, root - 1]
        assert torch.equal(output.correct[:, root - 1] & known, hits & known)


def test_padding_and_prompt_count_for_nothing(target: PreTrainedModel) -> None:
    drafter = make_specblock(target)
    step = SpecBlockStep(drafter, target)
    batch = rows_of(target)
    output = step(drafter, batch, training=False)
    assert not output.labelled[:, :4].any()
    rows = torch.arange(24)
    assert not output.labelled[1][rows + 1 >= 20].any()
    changed = dict(batch, input_ids=batch["input_ids"].masked_fill(rows >= batch["length"][:, None], 7))
    torch.testing.assert_close(step(drafter, changed, training=False).loss, output.loss)


def test_heads_are_computed_where_starts_count_alone(target: PreTrainedModel) -> None:
    drafter, batch, computed = make_specblock(target), rows_of(target), list[torch.Size]()
    drafter.lm_head.register_forward_hook(lambda module, args, output: computed.append(output.shape[:-1]))
    step = SpecBlockStep(drafter, target, num_blocks=3)
    output = step(drafter, batch, training=False)
    num_starts = int(output.labelled[..., 0].sum())
    assert 0 < num_starts < batch["input_ids"].numel()
    assert [shape.numel() for shape in computed] == [num_starts * drafter.config.block_size] * 3


def test_rank_loss_waits_for_its_step_and_leaves_the_trunk_alone(target: PreTrainedModel) -> None:
    drafter = make_specblock(target)
    step = SpecBlockStep(drafter, target, rank_start=0.3, num_blocks=1)
    step.num_steps = 10
    batch = rows_of(target)
    gradients = []
    for step.num_updates in (2, 3):
        drafter.zero_grad()
        step(drafter, batch, training=True).loss.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in drafter.named_parameters()})
    before, after = gradients
    for name in before:
        if name.startswith("rank_head"):
            assert not before[name].any()
            assert after[name].any()
        else:
            assert torch.equal(before[name], after[name]), name


def test_a_prefix_is_valid_where_it_predicts_the_rows_own_tokens(target: PreTrainedModel) -> None:
    # As in a row that was written at a temperature, the text is not what the target likes most. Labels of later slots
    # are conditioned on the text, so a prefix that predicts the text is valid, and any other one is not.
    drafter = make_specblock(target, draft_vocab_size=64)
    ids = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": ids, "first_anchor": torch.tensor([1, 4]), "length": torch.tensor([20, 20])}
    outputs: list[Any] = []
    drafter.register_forward_hook(lambda module, args, output: outputs.append(output))
    step = SpecBlockStep(drafter, target, num_blocks=1)
    everywhere = batch | {"first_anchor": torch.tensor([1, 1])}
    for position in range(18):  # the text becomes what the first slot of each position predicts
        step(drafter, everywhere, training=False)
        first_slots = outputs.pop().logits[:, 0].view(2, 18, -1)
        ids[:, position + 2] = drafter.to_target_ids(first_slots[:, position].argmax(-1))
    best, _ = step.target_labels(step.reader.read(ids).last_hidden)
    assert (best[:, :18] != ids[:, 2:]).float().mean() > 0.5

    losses: list[BlockLosses] = []

    class Recording(SpecBlockStep):
        def chain(self, *args: Any, **settings: Any) -> list[BlockLosses]:
            losses.extend(super().chain(*args, **settings))
            return losses

    Recording(drafter, target, num_blocks=1)(drafter, batch, training=False)
    starts = losses[0].valid[..., 0]
    assert starts.sum() == 18 + 15
    assert torch.equal(losses[0].valid[:, :18, 1], starts[:, :18])
    assert not losses[0].valid[:, :17, 2].all()


def test_without_the_mask_every_slot_counts(target: PreTrainedModel) -> None:
    drafter = make_specblock(target)
    batch = rows_of(target)
    logits = torch.randn(12, 3, 8)
    mask = torch.ones(2, 6, dtype=torch.bool)
    probs = torch.randn(2, 6, 8).softmax(-1)
    masked, free = (
        block_losses(logits, torch.randn(12, 3, 4), probs, mask, mask, valid_prefix=flag) for flag in (True, False)
    )
    assert free.valid.all()
    assert not masked.valid[..., -1].any()
    torch.testing.assert_close(masked.draft[0], free.draft[0])
    assert SpecBlockStep(drafter, target, valid_prefix=False)(drafter, batch, training=False).loss.isfinite()


def test_by_count_a_late_slot_weighs_as_much_as_it_has_positions() -> None:
    logits, rank_logits = torch.randn(12, 3, 8), torch.randn(12, 3, 4)
    mask = torch.ones(2, 6, dtype=torch.bool)
    probs = torch.randn(2, 6, 8).softmax(-1)
    alike, by_count = (
        block_losses(logits, rank_logits, probs, mask, mask, slot_weights=weights) for weights in ("alike", "by_count")
    )
    room = torch.arange(6) < 6 - torch.arange(3)[:, None]
    counts = torch.stack([(alike.valid[..., slot] & room[slot]).sum() for slot in range(3)])
    assert counts[0] == 12 > counts[1] > 0
    torch.testing.assert_close(by_count.draft, alike.draft * counts / counts[0])


def test_a_window_trains_on_a_part_of_the_rows_and_draws_from_its_own_generator(target: PreTrainedModel) -> None:
    drafter = make_specblock(target, num_hidden_layers=1)
    batch = rows_of(target)
    step = SpecBlockStep(drafter, target, num_blocks=1, window=12)
    output = step(drafter, batch, training=False)
    # Without training it begins at the shortest prompt: the part alone gives the same.
    states = step.reader.read(batch["input_ids"])
    part = {
        "input_ids": batch["input_ids"][:, 4:16], "first_anchor": batch["first_anchor"] - 4,
        "length": (batch["length"] - 4).clamp(max=12), "features": states.features[:, 4:16],
        "last_hidden": states.last_hidden[:, 4:16],
    }  # fmt: skip
    alone = SpecBlockStep(drafter, target, num_blocks=1)(drafter, part, training=False)
    torch.testing.assert_close(output.loss, alone.loss)
    assert output.correct.shape == (6, 12, 3)

    before, seen = torch.get_rng_state(), set()
    for seed in range(8):
        step.generator = torch.Generator().manual_seed(seed)
        seen.add(round(step(drafter, batch, training=True).loss.item(), 4))
    assert len(seen) > 2
    assert torch.equal(torch.get_rng_state(), before)


def test_a_warm_start_begins_with_the_targets_head(target: PreTrainedModel) -> None:
    vocabulary = torch.arange(0, 64, 2)
    drafter = new_drafter(target, vocabulary, warm_start=True)
    assert torch.equal(drafter.lm_head.weight, target.get_output_embeddings().weight[vocabulary])
    assert torch.equal(drafter.norm.weight, target.get_decoder().norm.weight)
    conditions = torch.randn(1, 5, 3 * 32)
    passed = drafter.input_layer.condition_proj(conditions).detach()
    mean = conditions.view(1, 5, 3, 32).mean(2)
    assert torch.corrcoef(torch.stack([passed.flatten(), mean.flatten()]))[0, 1] > 0.9


def test_learning_while_serving_counts_the_positions_that_training_counts(target: PreTrainedModel) -> None:
    drafter = make_specblock(target)
    step = SpecBlockStep(drafter, target)
    batch = rows_of(target)
    assert step(drafter, batch, training=False).logits is None
    step.keep_logits = True
    output = step(drafter, batch, training=False)
    starts = int(output.labelled[..., 0].sum())
    assert output.logits.shape == (2 * starts * 3, 48)  # two blocks of three slots per start
    assert step.draft_ids(drafter.to_target_ids(torch.arange(48))).tolist() == list(range(48))
    assert int((step.draft_ids(torch.arange(64)) >= 0).sum()) == 48


@pytest.mark.slow
def test_a_short_run_learns_what_is_then_drafted(target: PreTrainedModel, tmp_path: Path) -> None:
    batch = rows_of(target, count=2)
    rows = [{key: value[index] for key, value in batch.items()} for index in range(2)]
    vocabulary, coverage = frequent_tokens([row | {"first_anchor": 0} for row in rows], 48, 64)
    assert coverage == 1
    drafter = new_drafter(target, vocabulary, block_size=3)
    step = SpecBlockStep(drafter, target, rank_start=5.1 / 60)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=60, per_device_train_batch_size=2, learning_rate=1e-2, report_to="none",
        use_cpu=True, lr_scheduler_type="cosine", max_grad_norm=1.0, save_strategy="no", logging_steps=20,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = DrafterTrainer(drafter, step, arguments, train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert step.num_updates >= 59
    assert after["eval_accuracy_1"] > before["eval_accuracy_1"] + 0.3
    assert after["eval_accepted_length"] > before["eval_accepted_length"] + 0.3
    assert {f"eval_accuracy_{slot}" for slot in range(1, 7)} <= set(after)
    alone = target.generate(batch["input_ids"][:1, :5], max_new_tokens=18, do_sample=False)
    settings: Any = {"max_new_tokens": 18, "do_sample": False, "assistant_model": drafter}
    with always_drafting():
        assisted = target.generate(batch["input_ids"][:1, :5], **settings)
    assert assisted.tolist() == alone.tolist()
    assert drafter.stats.mean_acceptance_length > 1.5


def test_new_drafter_takes_the_shape_of_its_target() -> None:
    qwen = make_target("qwen3", "sdpa")
    drafter = new_drafter(qwen, torch.arange(0, 64, 2))
    assert drafter.config.qk_norm
    assert drafter.config.head_dim == 8
    assert drafter.to_target_ids(torch.arange(4)).tolist() == [0, 2, 4, 6]
    assert drafter.t2d.nonzero().flatten().tolist() == list(range(0, 64, 2))
    assert not new_drafter(make_target("llama", "sdpa"), torch.arange(64)).config.qk_norm


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 0}, "num_blocks=0 must be at least 1"),
        ({"rank_start": -0.1}, "rank_start=-0.1 must be a share of the steps"),
        ({"rank_start": 1.0}, "rank_start=1.0 must be a share of the steps"),
        ({"rank_loss": "focal"}, "rank_loss='focal' is not known"),
        ({"slot_weights": "none"}, "slot_weights='none' is not known"),
        ({"rank_budget": 0}, "rank_budget=0 must be at least 1"),
        ({"window": 4}, "window=4 must be at least 5"),
    ],
)
def test_an_option_out_of_range_raises(target: PreTrainedModel, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpecBlockStep(make_specblock(target), target, **settings)


def test_a_rank_head_of_other_classes_cannot_be_trained(target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="rank head has 3 classes, but the labels have 4"):
        SpecBlockStep(make_specblock(target, rank_classes=3), target)


def test_vocabulary_of_no_size_raises() -> None:
    with pytest.raises(ValueError, match="A draft vocabulary of 0 tokens cannot be chosen from 9"):
        frequent_tokens([], 0, 9)


def test_rows_that_may_be_drafted_from_their_first_token_on_have_windows_too(target: PreTrainedModel) -> None:
    drafter = new_drafter(target, torch.arange(64), block_size=4)
    step = SpecBlockStep(drafter, target, num_blocks=1, window=12)
    ids = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(0))
    # Token 0 has nothing before it, so that nobody drafts from it.
    zero, one = (
        {"input_ids": ids, "first_anchor": torch.full((2,), first), "length": torch.tensor([20, 20])}
        for first in (0, 1)
    )
    with torch.no_grad():
        torch.testing.assert_close(step(drafter, zero, training=False).loss, step(drafter, one, training=False).loss)
        assert step(drafter, zero, training=True).labelled.any()
