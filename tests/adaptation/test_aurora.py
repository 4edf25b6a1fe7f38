"""Aurora: what is recorded of the rounds, what is trained on it, and which weights come to serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.adaptation import AuroraDrafter
from hf_specdec.adaptation.aurora import RoundsFolder
from hf_specdec.adaptation.aurora_trainer import AuroraTrainer
from hf_specdec.adaptation.learner import new_optimizer
from hf_specdec.training.features import TargetReader
from tests.adaptation.test_adaptive_drafter import GREEDY, prompts, weights_of
from tests.decoding.test_sampling import PROMPT, count, draw, enumerate_law, sampled_target
from tests.laws import assert_follows
from tests.method_table import METHODS
from tests.targets import PROMPTS, fresh_target
from tests.watched import Watched

FAMILIES = ("specblock", "eagle3", "dflash")


@pytest.fixture
def target() -> PreTrainedModel:
    return fresh_target("llama", "sdpa", torch.float64)


def drafter_of(family: str, target: PreTrainedModel, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return METHODS[family](target).to(torch.float64)


def texts_of(folder: Path) -> list[dict[str, Any]]:
    rounds = RoundsFolder(folder)
    return [rounds.read_text(file) for file in rounds.files("text")]


def serve(target: PreTrainedModel, served: AuroraDrafter, stream: list[Tensor]) -> list[list[int]]:
    return [target.generate(prompt, assistant_model=served, **GREEDY)[0].tolist() for prompt in stream]


@pytest.mark.parametrize("family", FAMILIES)
def test_output_stays_the_targets_own_while_weights_are_swapped(
    target: PreTrainedModel, family: str, tmp_path: Path
) -> None:
    drafter, stream = drafter_of(family, target), prompts(4) * 3
    before = weights_of(drafter)
    alone = [target.generate(prompt, **GREEDY)[0].tolist() for prompt in stream]
    served = AuroraDrafter(target, drafter, tmp_path)
    trainer = AuroraTrainer(
        target, drafter_of(family, target), tmp_path, learning_rate=0.01, steps=8, batch_size=4, fresh=2
    )
    for first in range(0, len(stream), 4):
        assert serve(target, served, stream[first : first + 4]) == alone[first : first + 4]
        assert trainer.publish() is not None
    served.swap()
    assert any(swap.swapped for swap in served.swaps)
    assert not all(torch.equal(before[name], tensor) for name, tensor in weights_of(drafter).items())
    batch = PROMPTS["ragged batch of three"]()
    expected = target.generate(**batch, **GREEDY)
    assert torch.equal(target.generate(**batch, assistant_model=served, **GREEDY), expected)


@pytest.mark.slow
def test_sampled_tokens_follow_the_target_while_weights_are_swapped(draws: int, tmp_path: Path) -> None:
    """The draws of weights that were swapped in; the calls before are those that they were trained on."""
    target = sampled_target()
    served = AuroraDrafter(target, METHODS["eagle3"](target).to(target.dtype), tmp_path, replay_every=2)
    trainer = AuroraTrainer(target, METHODS["eagle3"](target), tmp_path, learning_rate=0.01, steps=8, fresh=1)
    for _ in range(4):
        target.generate(torch.tensor([PROMPT]), assistant_model=served, max_new_tokens=8, do_sample=True)
    assert trainer.publish() is not None
    served.replay_every = 10**6
    drawn = draw(target, torch.tensor([PROMPT]), "plain", served, draws)
    assert served.swaps[0].swapped
    assert served.stats.num_accepted_draft_tokens > 0
    assert_follows(count(drawn), enumerate_law(target, PROMPT, "plain"))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_training_on_recorded_rounds_makes_the_same_stream_accepted_more(
    target: PreTrainedModel, family: str, tmp_path: Path
) -> None:
    stream = prompts(3)
    served = AuroraDrafter(target, drafter_of(family, target), tmp_path, replay_every=2)
    trainer = AuroraTrainer(
        target, drafter_of(family, target), tmp_path, learning_rate=0.01, steps=25, batch_size=4, fresh=1
    )

    def length() -> float:
        accepted, rounds = 0, 0
        for prompt in stream:
            target.generate(prompt, assistant_model=served, **GREEDY)
            accepted += served.stats.num_accepted_draft_tokens
            rounds += served.stats.num_spec_steps
        return 1 + accepted / rounds

    before = length()
    for _ in range(3):
        trainer.publish()
        after = length()
    assert after > 1.1 * before
    last = served.swaps[-1]
    assert last.new_length > served.swaps[0].length


@pytest.mark.parametrize("batch", ["batch of one", "ragged batch of three"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_is_recorded_with_the_targets_states_and_the_drafts_it_refused(
    target: PreTrainedModel, family: str, batch: str, tmp_path: Path
) -> None:
    served = AuroraDrafter(target, drafter_of(family, target), tmp_path, replay_every=100)
    served.num_texts = 1  # the next text is not kept for replays
    inputs = PROMPTS[batch]()
    watched = Watched(served)
    target.generate(**inputs, assistant_model=watched, **GREEDY)
    reader = TargetReader(target, served.drafter.feature_layers(target), last_hidden=True)
    texts = texts_of(tmp_path)
    assert len(texts) == len(inputs["input_ids"])
    for index, (row, mask) in enumerate(zip(texts, inputs["attention_mask"], strict=True)):
        states = reader.read(row["input_ids"][None])
        torch.testing.assert_close(row["features"], states.features[0])
        torch.testing.assert_close(row["last_hidden"], states.last_hidden[0])
        assert row["first_anchor"] == int(mask.sum())
        found = {
            (place, token) for place, refused in enumerate(row["refused"].tolist()) for token in refused if token >= 0
        }
        assert found
        assert found <= refusals(watched, index, row["input_ids"].tolist(), int((mask == 0).sum()))


def refusals(watched: Watched, index: int, text: list[int], padding: int) -> set[tuple[int, int]]:
    """Every drafted token of the rounds that continues the text and is not its next one, by its place in the text."""
    found = set()
    for each in watched.rounds:
        start = len(each.text(index)) - padding
        tree = each.tree
        parents, tokens = tree.parents[index].tolist(), tree.token_ids[index].tolist()
        paths: dict[int, list[int]] = {0: []}
        for node in range(1, tree.num_nodes):
            paths[node] = [*paths[parents[node]], tokens[node]]
            place = start + len(paths[node]) - 1
            if text[start:place] == paths[node][:-1] and place < len(text) and text[place] != tokens[node]:
                found.add((place, tokens[node]))
    return found


def test_worse_weights_are_refused_and_training_goes_back(target: PreTrainedModel, tmp_path: Path) -> None:
    drafter = drafter_of("eagle3", target)
    served = AuroraDrafter(target, drafter, tmp_path, replay_every=2)
    trainer = AuroraTrainer(
        target, drafter_of("eagle3", target), tmp_path, learning_rate=0.01, steps=25, batch_size=4, fresh=1
    )
    stream = prompts(3)
    for _ in range(2):
        serve(target, served, stream)
        trainer.publish()
    serve(target, served, stream)
    good = weights_of(drafter)
    assert served.swaps[-1].swapped
    with torch.no_grad():
        for parameter in trainer.drafter.parameters():
            parameter.mul_(torch.where(torch.rand_like(parameter) < 0.5, -1.0, 1.0))
    bad = trainer.folder.add_weights(trainer.drafter)
    trainer.published[bad] = [each.detach().clone() for each in trainer.drafter.parameters()]
    assert serve(target, served, stream[:1]) == [target.generate(stream[0], **GREEDY)[0].tolist()]
    assert served.swaps[-1].number == bad
    assert not served.swaps[-1].swapped
    assert all(torch.equal(good[name], tensor) for name, tensor in weights_of(drafter).items())
    serve(target, served, stream)
    trainer.steps, trainer.learning_rate = 1, 1e-9
    trainer.optimizer = new_optimizer(trainer.drafter, trainer.learning_rate)
    assert trainer.publish() is not None
    for name, parameter in trainer.drafter.named_parameters():
        torch.testing.assert_close(parameter.double(), good[name], atol=1e-5, rtol=1e-5)


def test_the_folder_is_bounded_and_the_trainer_forgets_what_left_it(target: PreTrainedModel, tmp_path: Path) -> None:
    served = AuroraDrafter(target, drafter_of("dflash", target), tmp_path, replay_every=1000)
    trainer = AuroraTrainer(target, drafter_of("dflash", target), tmp_path, steps=1, batch_size=2, fresh=1)
    serve(target, served, prompts(3))
    bound = served.folder.max_bytes = 3 * served.folder.files("text")[0].stat().st_size
    assert trainer.publish().texts == 2  # the first text is kept for replays
    serve(target, served, prompts(6))
    files = served.folder.files("text")
    assert len(files) < 6
    assert sum(file.stat().st_size for file in files) <= bound
    assert files[-1].name == "text-00000008.safetensors"
    assert trainer.publish().texts == len(files)


def test_negatives_lower_the_probability_of_what_was_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    """Of two runs on one text, the one that knows the refused drafts gives them less."""
    served = AuroraDrafter(target, drafter_of("eagle3", target), tmp_path)
    for prompt in prompts(2):
        target.generate(prompt, assistant_model=served, **GREEDY)
    (row,) = texts_of(tmp_path)
    assert (row["refused"] >= 0).any()
    probs = []
    for named in (True, False):
        drafter = drafter_of("eagle3", target)
        own = row if named else {name: value for name, value in row.items() if name != "refused"}
        folder = tmp_path / str(named)
        RoundsFolder(folder).add_text(own)
        trainer = AuroraTrainer(target, drafter, folder, learning_rate=3e-3, steps=10, batch_size=2, fresh=1)
        trainer.publish()
        probs.append(refused_probability(trainer.drafter, target, row))
    assert probs[0] < 0.9 * probs[1]


@torch.no_grad()
def refused_probability(drafter: Any, target: PreTrainedModel, row: dict[str, Any]) -> float:
    ids, embed = row["input_ids"][None], target.get_input_embeddings()
    states = drafter.fuse(row["features"][None, :-1].float())
    output = drafter(embed(ids[:, 1:]).float(), states, torch.arange(ids.shape[1] - 1)[None], is_causal=True)
    probs = drafter.logits(output)[0].softmax(-1)  # row i: of the token i + 2
    total = 0.0
    vocabulary = drafter.to_target_ids(torch.arange(probs.shape[-1])).tolist()
    for place, refused in enumerate(row["refused"].tolist()):
        for token in refused:
            if token in vocabulary and place >= 2:
                total += float(probs[place - 2, vocabulary.index(token)])
    return total


def test_what_cannot_be_trained_raises(target: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="MedusaDrafter does not support adaptation; methods that do: dflash, dspark"):
        AuroraDrafter(target, drafter_of("medusa", target), tmp_path)
    with pytest.raises(ValueError, match="replay_every=0 must be at least 1"):
        AuroraDrafter(target, drafter_of("dflash", target), tmp_path, replay_every=0)
    with pytest.raises(ValueError, match=r"learning_rate=0\.0 must be a finite number above 0"):
        AuroraTrainer(target, drafter_of("dflash", target), tmp_path, learning_rate=0.0)
    served = AuroraDrafter(target, drafter_of("dflash", target), tmp_path)
    with pytest.raises(ValueError, match="learns from target .* passed to another one"):
        fresh_target("llama", "sdpa", torch.float64).generate(prompts(1)[0], assistant_model=served, **GREEDY)
