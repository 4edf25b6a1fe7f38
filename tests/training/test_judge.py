"""Training a judge: labels by the target's own agreement, and a head that learns them."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers.utils.logging

from hf_specdec.decoding.targets.taps import decoder_states
from hf_specdec.training.judge import JudgedTokens, judged_tokens, rejoins, train_judge
from tests.targets import make_target


def test_the_head_learns_labels_that_depend_on_the_states() -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(400, 12, generator=generator) * 3 + 5
    direction = torch.randn(12, generator=generator)
    scores = (states - 5) @ direction
    agreed = scores > 2  # a minority
    judge = train_judge(JudgedTokens(states[:300], agreed[:300]), "owner/target")
    accepted = judge.probs(states[300:]) > judge.threshold
    assert (accepted == agreed[300:]).float().mean() > 0.9
    assert judge.target == "owner/target"
    strict = train_judge(JudgedTokens(states[:300], agreed[:300]), refusal_weight=20.0)
    assert (strict.probs(states) > 0.5).sum() < (judge.probs(states) > 0.5).sum()


def test_states_are_those_at_the_tried_token_and_labels_are_the_targets_agreement() -> None:
    target = make_target("llama", "sdpa", torch.float32, vocab_size=16, initializer_range=0.08)
    prompt = torch.tensor([[3, 5, 4, 1, 5]])
    settings = {"new_tokens": 24, "places": 6, "horizon": 6, "least": 3, "ranks": 2}
    tokens = judged_tokens(target, [prompt], **settings)
    text = target.generate(prompt, max_new_tokens=24, do_sample=False)
    second = target(text).logits[0].topk(2).indices[:, 1]
    found = 0
    for place in range(5, text.shape[1] - 6):
        tried = torch.cat([text[:, :place], second[place - 1].view(1, 1)], 1)
        state = decoder_states(target, tried)[0, -1]
        same = (tokens.states - state).abs().amax(1) < 1e-5
        if same.any():
            found += 1
            other = target.generate(tried, max_new_tokens=6, do_sample=False)[0, place + 1 :].tolist()
            own = text[0, place:].tolist()
            expected = any(own[at : at + 3] == other[-3:] for at in range(len(own)))
            assert bool(tokens.agreed[same][0]) == expected
    assert found == 6


def test_transformers_has_nothing_to_warn_of_while_the_target_writes(caplog: pytest.LogCaptureFixture) -> None:
    transformers.utils.logging.warning_once.cache_clear()  # otherwise only the first warning of a process is seen
    logger = logging.getLogger("transformers")  # which does not propagate
    logger.addHandler(caplog.handler)
    try:
        target = make_target("llama", "sdpa", torch.float32, vocab_size=16)
        judged_tokens(target, [torch.tensor([[3, 5, 4, 1, 5]])], new_tokens=8, places=1, horizon=3, least=2)
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.messages == []


def test_a_short_continuation_never_rejoins() -> None:
    assert not rejoins([1, 2, 3], [2], 2)
    assert not rejoins([1], [1, 2], 2)


def test_what_cannot_be_trained_on_raises() -> None:
    with pytest.raises(ValueError, match="The target agreed with 3 of 3 tokens: a judge needs both"):
        train_judge(JudgedTokens(torch.randn(3, 4), torch.ones(3, dtype=torch.bool)))
    target = make_target("llama", "sdpa", torch.float32)
    with pytest.raises(ValueError, match="least=9, horizon=8 and new_tokens=20 must satisfy"):
        judged_tokens(target, [], least=9, horizon=8, new_tokens=20)
    with pytest.raises(ValueError, match="None of 0 texts of the target is longer"):
        judged_tokens(target, [])
