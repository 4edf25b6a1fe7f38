"""Training a draft model: what it begins as, what it learns from, and its draft vocabulary in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_specdec import load_drafter
from hf_specdec.decoding.targets.taps import decoder_layers
from hf_specdec.drafting.draft_model import with_whole_vocabulary
from hf_specdec.methods.causal_lm.network import CausalLMDrafter
from hf_specdec.methods.causal_lm.training import DistillationStep, new_draft_model, take_vocabulary
from hf_specdec.methods.specbranch import SpecBranchDrafter
from tests.decoding.test_sampling import PROMPT, count, draw, enumerate_law, sampled_target
from tests.laws import assert_follows
from tests.targets import PROMPTS, VOCAB, fresh_target, make_target
from tests.training.test_losses import plain

GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
SAYABLE = torch.arange(0, VOCAB, 2)  # every second token: the target says others all the time


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "gpt-neox"])
def test_a_model_of_all_layers_says_what_the_target_says(family: str) -> None:
    target = make_target(family, "eager")
    ids = PROMPTS["batch of one"]()["input_ids"]
    model = new_draft_model(target, target.config.num_hidden_layers).double().eval()
    torch.testing.assert_close(model(ids).logits, target(ids).logits, rtol=1e-4, atol=1e-4)  # it was in float32


def test_layers_are_spread_evenly_with_the_first_and_the_last() -> None:
    target = fresh_target(num_hidden_layers=7)
    model = new_draft_model(target, 3)
    for layer, index in zip(decoder_layers(model), (0, 3, 6), strict=True):
        theirs = decoder_layers(target)[index].state_dict()
        assert all(torch.equal(part, theirs[name].float()) for name, part in layer.state_dict().items())


@pytest.fixture(scope="module")
def cut() -> CausalLMDrafter:
    """A draft model of all the target's layers that can say half of its tokens."""
    target = make_target("llama", "sdpa")
    model = new_draft_model(target, target.config.num_hidden_layers, draft_vocab_size=len(SAYABLE))
    take_vocabulary(model, target, SAYABLE)
    return CausalLMDrafter(model.double().eval())


def test_rows_of_a_draft_vocabulary_are_those_of_its_tokens(cut: CausalLMDrafter) -> None:
    target = make_target("llama", "sdpa")
    ids = SAYABLE[torch.randint(0, len(SAYABLE), (2, 9), generator=torch.Generator().manual_seed(0))]
    rows = torch.searchsorted(SAYABLE, ids)
    theirs = target(ids).logits[..., SAYABLE]
    torch.testing.assert_close(cut.model(rows).logits, theirs, rtol=1e-4, atol=1e-4)  # it was in float32


@pytest.mark.parametrize("method", ["causal_lm_tree", "causal_lm_chain"])
@pytest.mark.parametrize("prompt", ["batch of one", "ragged batch of three"])
def test_output_is_the_targets_with_a_draft_vocabulary(cut: CausalLMDrafter, method: str, prompt: str) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS[prompt]()
    cut.set_options(method=method)
    drafted = target.generate(**prompts, **GREEDY, assistant_model=cut)
    assert drafted.tolist() == target.generate(**prompts, **GREEDY).tolist()
    assert cut.stats.num_draft_tokens > 0


def test_sampled_output_follows_the_target_with_a_draft_vocabulary(draws: int) -> None:
    """Drafts are drawn from a law that lacks half of the tokens."""
    target = sampled_target()
    sayable = torch.arange(0, target.config.vocab_size, 2)
    model = new_draft_model(target, 1, draft_vocab_size=len(sayable))
    take_vocabulary(model, target, sayable)
    drafter = CausalLMDrafter(model.eval(), method="causal_lm_chain", depth=2)
    drawn = draw(target, torch.tensor([PROMPT]), "plain", drafter, draws)
    assert_follows(count(drawn), enumerate_law(target, PROMPT, "plain"))
    assert drafter.stats.num_accepted_draft_tokens > 0


def test_specbranch_drafts_with_a_draft_vocabulary(cut: CausalLMDrafter) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = SpecBranchDrafter.from_models(cut.model, target, speed_ratio=4.0, h_rad=False)
    drafted = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert drafted.tolist() == target.generate(**prompts, **GREEDY).tolist()
    assert drafter.stats.num_draft_tokens > 0


def test_a_draft_vocabulary_is_saved_and_loaded(cut: CausalLMDrafter, tmp_path: Path) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    cut.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path)
    assert loaded.target_ids.tolist() == SAYABLE.tolist()
    for drafter in (cut, loaded):
        drafter.set_options(method="causal_lm_chain")
        target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert loaded.stats.per_step_accepted == cut.stats.per_step_accepted
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == len(SAYABLE)


@pytest.mark.parametrize("tied", [False, True])
def test_with_all_rows_again_it_says_the_same_of_its_tokens_and_assists_in_transformers(tied: bool) -> None:
    target = fresh_target(dtype=torch.float64, attention="sdpa", tie_word_embeddings=tied)
    model = new_draft_model(target, 2, draft_vocab_size=len(SAYABLE)).double().eval()
    take_vocabulary(model, target, SAYABLE)
    with torch.no_grad():  # as if it had been trained
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    whole = with_whole_vocabulary(model, VOCAB)
    ids = torch.randint(0, VOCAB, (1, 24), generator=torch.Generator().manual_seed(0))
    logits = whole(ids).logits
    rows = torch.searchsorted(SAYABLE, ids).clamp(max=len(SAYABLE) - 1)
    rows = rows.where(SAYABLE[rows] == ids, len(SAYABLE) - 1)  # what has no row is read as the last
    torch.testing.assert_close(logits[..., SAYABLE], model(rows).logits)
    assert logits.ne(0).sum() == 24 * len(SAYABLE), "all others are 0"
    assert torch.equal(target.generate(ids, **GREEDY, assistant_model=whole), target.generate(ids, **GREEDY))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (list(range(31)), "must be 32 ascending ids of target .*; they are 31, from 0 to 30, ascending"),
        ([*range(31), 64], "from 0 to 63; they are 32, from 0 to 64, ascending"),
        ([1, 0, *range(2, 32)], "they are 32, from 0 to 31, not ascending"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused(ids: list[int], message: str) -> None:
    target = make_target("llama", "sdpa")
    drafter = CausalLMDrafter(new_draft_model(target, 2, draft_vocab_size=32))
    drafter.set_vocabulary(torch.tensor(ids))
    with pytest.raises(ValueError, match=message):
        target.generate(torch.tensor([[3, 4]]), max_new_tokens=2, assistant_model=drafter)


@pytest.mark.parametrize("loss", ["kl", "tv", "lk", "ce"])
def test_only_answers_teach_and_what_cannot_be_said_is_no_hit(loss: Any) -> None:
    target = fresh_target(dtype=torch.float64, attention="sdpa")
    model = new_draft_model(target, target.config.num_hidden_layers, draft_vocab_size=len(SAYABLE)).double()
    take_vocabulary(model, target, SAYABLE)
    step = DistillationStep(model, target, loss=loss)
    ids = torch.randint(3, VOCAB, (1, 12), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": ids, "first_anchor": torch.tensor([5]), "length": torch.tensor([10])}
    output = step(model, batch, training=False)
    assert output.labelled[0, :, 0].tolist() == [4 <= place < 9 for place in range(12)]
    rows = torch.searchsorted(SAYABLE, ids).clamp(max=len(SAYABLE) - 1).where(ids % 2 == 0, len(SAYABLE) - 1)
    logits, laws = model(rows).logits[0, 4:9], target(ids).logits[0, 4:9]
    expected = plain(loss, logits, laws[:, SAYABLE], laws[:, SAYABLE].argmax(-1)).mean()
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert output.correct[0, 4:9, 0].tolist() == (SAYABLE[logits.argmax(-1)] == laws.argmax(-1)).tolist()
