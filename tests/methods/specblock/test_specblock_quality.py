"""The quality of a rank head, against the training step's own labels and against hand-made counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_specdec.methods.specblock.quality import RankHeadQuality, rank_head_quality
from hf_specdec.methods.specblock.training import SpecBlockStep
from tests.method_table import make_specblock
from tests.targets import make_target

TARGET = ("llama", "sdpa", torch.float64)


def test_positions_and_true_buckets_are_those_that_training_counts() -> None:
    target = make_target(*TARGET)
    drafter = make_specblock(target, rank_features_top=None).to(torch.float64)
    ids = torch.randint(3, 64, (3, 30), generator=torch.Generator().manual_seed(2))
    quality = rank_head_quality(drafter, target, [(row, 5) for row in ids])

    step = SpecBlockStep(drafter, target, num_blocks=1)
    outputs: list[Any] = []
    handle = drafter.register_forward_hook(lambda module, args, output: outputs.append(output))
    states = step.reader.read(ids)
    best_ids, probs = step.target_labels(states.last_hidden)
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        sayable = drafter.t2d[best_ids]
        (losses,) = step.chain(drafter, states.features, ids, probs, everywhere, sayable, training=False)
    handle.remove()
    part = slice(4, 30 - 3)
    rank_logits = outputs[0].rank_logits.view(*losses.rank_classes.shape, 4)  # every position is a start
    truth, said = losses.rank_classes[:, part], rank_logits[:, part].argmax(-1)
    expected = (truth * 4 + said)[truth >= 0].bincount(minlength=16).view(4, 4)
    # A position's true token is the target's likeliest one; training looks for it among those that can be said.
    assert quality.counts.tolist() == expected.tolist()
    assert quality.num_positions > 60


def test_the_table_has_precision_recall_and_f1() -> None:
    counts = torch.tensor([[6, 2, 0, 0], [1, 3, 0, 0], [0, 0, 0, 0], [0, 1, 0, 3]])
    quality = RankHeadQuality(counts)
    best, second, third, last = quality.rows()
    assert best["bucket"] == "rank 1"
    assert best["frequency"] == pytest.approx(8 / 16)
    assert best["precision"] == pytest.approx(6 / 7)
    assert best["recall"] == pytest.approx(6 / 8)
    assert best["f1"] == pytest.approx(2 * (6 / 7) * (6 / 8) / (6 / 7 + 6 / 8))
    assert second["precision"] == pytest.approx(3 / 6)
    assert third == {"bucket": "rank 5-10", "frequency": 0.0, "precision": 0.0, "recall": 0.0, "f1": 0.0}
    assert last["recall"] == pytest.approx(3 / 4)
    printed = str(quality).splitlines()
    assert printed[0] == "rank head on 16 held-out positions"
    assert printed[2].split() == ["rank", "1", "0.500", "0.857", "0.750", "0.800"]
    assert quality.record()["rank > 10"] == "frequency 0.250, precision 1.000, recall 0.750, f1 0.857"


def test_what_cannot_be_classified_says_so() -> None:
    target = make_target(*TARGET)
    with pytest.raises(ValueError, match="has 3 classes, but there are 4 true buckets"):
        rank_head_quality(make_specblock(target, rank_classes=3).to(torch.float64), target, [])
    drafter = make_specblock(target).to(torch.float64)
    with pytest.raises(ValueError, match="No text is long enough: a block needs 4 tokens"):
        rank_head_quality(drafter, target, [(torch.arange(6), 4)])


def test_a_benchmark_report_has_the_table_over_what_the_target_writes_after_its_prompts() -> None:
    target = make_target(*TARGET)
    drafter = make_specblock(target).to(torch.float64)
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0  # a ragged pair: padding is in front
    ((title, columns, rows),) = drafter.report_tables(target, [{"input_ids": ids, "attention_mask": mask}])

    settings = {"max_new_tokens": 64, "do_sample": False}
    texts = [(target.generate(prompt[None], **settings)[0], len(prompt)) for prompt in (ids[0], ids[1, 3:])]
    quality = rank_head_quality(drafter, target, texts)
    assert title == f"rank head on {quality.num_positions} positions that the target wrote"
    assert columns == ["bucket", "frequency", "precision", "recall", "f1"]
    assert [row[0] for row in rows] == ["rank 1", "rank 2-4", "rank 5-10", "rank > 10"]
    assert [row[1] for row in rows] == [f"{row['frequency']:.3f}" for row in quality.rows()]


def test_a_benchmark_report_leaves_out_a_rank_head_of_other_buckets_and_texts_without_a_block() -> None:
    target = make_target(*TARGET)
    prompt = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}
    other = make_specblock(target, rank_classes=3).to(torch.float64)
    assert list(other.report_tables(target, [prompt])) == []
    assert list(make_specblock(target).to(torch.float64).report_tables(target, [])) == []
