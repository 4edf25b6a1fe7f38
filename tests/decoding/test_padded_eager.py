"""Left padding with eager attention in float64, where transformers computes NaN: queries of padding see nothing.

Its masks are the lowest float64 number, and its softmax runs in float32, where that is -inf.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from hf_specdec.drafting.drafter import Drafter
from tests.method_table import METHODS, make_causal_lm, make_causal_lm_chain, make_specbranch
from tests.scripted import right_for
from tests.targets import PROMPTS, make_target

NEW = 20
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
PADDED = (1, 2)  # rows of the ragged batch


@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.3}], ids=str)
def test_rows_with_nan_logits_do_not_slow_down_other_rows(processors: dict[str, float]) -> None:
    target, prompts = make_target("llama", "eager", torch.float64), PROMPTS["ragged batch of three"]()
    alone = target.generate(**prompts, **GREEDY, **processors)
    drafter = right_for([2, 0, 3], alone)
    with pytest.warns(UserWarning, match=r"of \d+ rounds .* the target itself gives NaN .* with 'sdpa'") as caught:
        assisted = target.generate(**prompts, **GREEDY, **processors, assistant_model=drafter)
    assert assisted.tolist() == alone.tolist()
    assert len(caught) == 1, "said once per call"
    stats = drafter.stats
    assert stats is not None
    of_padded = sum(len(stats.per_step_accepted[row]) for row in PADDED)
    assert stats.num_plain_steps <= of_padded + 1, "the row without padding loses its drafts once at most"
    assert sum(stats.per_step_accepted[0]) > NEW / 3
    assert stats.num_target_forwards <= NEW, "no more than plain decoding, and one for finding out"


def test_rows_that_recover_from_nan_get_drafts_again() -> None:
    # Every layer slides: transformers' cache drops its padding, and with it what was NaN.
    target, prompts = make_target("mistral-sliding", "eager", torch.float64), PROMPTS["ragged batch of three"]()
    settings = GREEDY | {"max_new_tokens": 80}
    alone = target.generate(**prompts, **settings)
    drafter = right_for(3, alone)
    assert target.generate(**prompts, **settings, assistant_model=drafter).tolist() == alone.tolist()
    assert drafter.stats is not None
    for row in PADDED:
        assert max(drafter.stats.per_step_accepted[row]) == 3


@pytest.mark.filterwarnings("ignore:.* rounds fell back to plain decoding")
@pytest.mark.parametrize("method", ["ngram", "specblock"])
def test_rows_recover_from_nan_in_rounds_that_have_no_drafts(method: str) -> None:
    # The look-up finds nothing, and the drafter has read NaN: until the rows recover, all rounds are roots alone.
    target = make_target("mistral-sliding", "eager", torch.float64, seed=11)
    prompts = {name: rows[list(PADDED)] for name, rows in PROMPTS["ragged batch of three"]().items()}
    alone = target.generate(**prompts, **GREEDY)
    assert torch.count_nonzero(alone[:, -5:]), "the target says something again"
    drafter = METHODS[method](target)
    assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()


@pytest.mark.parametrize("make", [make_causal_lm, make_causal_lm_chain, make_specbranch])
def test_a_draft_model_with_eager_attention_drafts_as_with_sdpa(make: Callable[[PreTrainedModel], Drafter]) -> None:
    target, prompts = make_target("llama", "sdpa", torch.float64), PROMPTS["ragged batch of three"]()
    alone = target.generate(**prompts, **GREEDY)
    accepted = []
    for attention in ("sdpa", "eager"):
        drafter = make(make_target("llama", attention, torch.float64))
        assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
        assert drafter.stats is not None
        assert drafter.stats.num_plain_steps == 0
        accepted.append(drafter.stats.per_step_accepted)
    assert accepted[0] == accepted[1]


@pytest.mark.filterwarnings("ignore:.* rounds fell back to plain decoding")
@pytest.mark.parametrize("method", METHODS)
def test_methods_draft_with_rows_with_nan_logits(method: str) -> None:
    target, prompts = make_target("llama", "eager", torch.float64), PROMPTS["ragged batch of three"]()
    alone = target.generate(**prompts, **GREEDY)
    drafter = METHODS[method](target)
    assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
    assert drafter.stats is not None
    assert drafter.stats.num_target_forwards <= NEW
