from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.trace import Trace
from hf_specdec.drafting.drafter import Drafter
from tests.method_table import METHODS, STEADY
from tests.scripted import right_for
from tests.targets import PROMPTS, make_target, one_prompt

NEW = 14


def traced(drafter: Drafter, prompts: dict[str, Any], **settings: Any) -> tuple[Trace, torch.Tensor]:
    drafter.trace = Trace()
    output = make_target("llama", "sdpa").generate(
        **prompts, assistant_model=drafter, **{"max_new_tokens": NEW, "do_sample": False, **settings}
    )
    return drafter.trace, output


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("method", METHODS)
def test_trace_records_the_output_and_which_tokens_were_drafted(method: str, prompts: str) -> None:
    inputs = PROMPTS[prompts]()
    drafter = METHODS[method](make_target("llama", "sdpa"))
    trace, output = traced(drafter, inputs)
    assert drafter.stats is not None
    for row, ids in enumerate(output.tolist()):
        # Rows that are ahead may have written more than the output holds.
        written = trace.output(row)
        assert [token for token, _ in written][:NEW] == ids[-NEW:]
        assert trace.prompt_ids[row] == ids[:-NEW]
        own = [traced for traced in trace.rounds if traced.row == row]
        assert [len(traced.path) for traced in own] == drafter.stats.per_step_accepted[row]
        for traced_round in own:
            assert traced_round.position >= len(trace.prompt_ids[row])
            path = [traced_round.token_ids[node] for node in traced_round.path]
            assert [traced_round.parents[node] for node in traced_round.path] == [0, *traced_round.path][: len(path)]
            assert all(parent < node for node, parent in enumerate(traced_round.parents))


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", STEADY)
def test_probabilities_and_forwards_in_a_trace_are_possible_ones(method: str, do_sample: bool) -> None:
    trace, _ = traced(METHODS[method](make_target("llama", "sdpa")), one_prompt(), do_sample=do_sample)
    assert trace.rounds
    for traced_round in trace.rounds:
        nodes = range(1, len(traced_round.token_ids))
        if traced_round.probs is not None:
            assert all(0 < prob <= 1 for prob in traced_round.probs)
            forwards = traced_round.forwards or [1] * len(traced_round.parents)
            sums: dict[tuple[int, int], float] = {}
            for node in nodes:
                family = traced_round.parents[node], forwards[node]
                sums[family] = sums.get(family, 0.0) + traced_round.probs[node]
            assert all(total <= 1 + 1e-4 for total in sums.values()), "siblings of one forward share a distribution"
        if traced_round.forwards is not None:
            assert traced_round.forwards[0] == 0
            for node in nodes:
                assert traced_round.forwards[node] >= max(1, traced_round.forwards[traced_round.parents[node]])


def test_round_cut_by_a_limit_keeps_the_tokens_before_it() -> None:
    prompts = one_prompt()
    script = make_target("llama", "sdpa").generate(**prompts, max_new_tokens=NEW, do_sample=False)
    never = next(token for token in range(3, 64) if token not in script[0, -NEW:])
    # The prefill writes 1 token, each round 4: the last of three writes only the 1 that is missing.
    trace, output = traced(right_for(3, script), prompts, max_new_tokens=10, eos_token_id=never)
    assert [traced_round.num_kept for traced_round in trace.rounds] == [4, 4, 1]
    assert [len(traced_round.tokens) for traced_round in trace.rounds] == [4, 4, 1]
    assert trace.rounds[-1].tokens[0][1], "what was kept of the last round was drafted"
    assert [token for token, _ in trace.output()] == output[0, -10:].tolist()


def test_a_second_call_replaces_the_trace_of_the_first() -> None:
    drafter = METHODS["ngram"](make_target("llama", "sdpa"))
    trace, _ = traced(drafter, one_prompt())
    first = list(trace.rounds)
    make_target("llama", "sdpa").generate(**one_prompt(), assistant_model=drafter, max_new_tokens=NEW, do_sample=False)
    assert trace.rounds == first


def test_without_a_trace_describe_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(self: TreeCandidateGenerator, tree: Any) -> None:
        raise AssertionError("describe() was called without a trace")

    monkeypatch.setattr(TreeCandidateGenerator, "describe", asked)
    target = make_target("llama", "sdpa")
    drafter = METHODS["ngram"](target)
    target.generate(**one_prompt(), assistant_model=drafter, max_new_tokens=NEW, do_sample=False)
    drafter.trace = Trace()
    with pytest.raises(AssertionError, match="without a trace"):
        target.generate(**one_prompt(), assistant_model=drafter, max_new_tokens=NEW, do_sample=False)
