"""Layers that keep states: trees give what one token at a time gives, and so do the states that a commit leaves.

Hosts compute states in float32 whatever the model is in; `Raised` has them computed in float64, where another function
and rounding are many orders of magnitude apart.
"""

from __future__ import annotations

import copy
import inspect
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.stepped import STEPPED
from hf_specdec.decoding.targets.taps import decoder_layers
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.decoding.upstream import CACHE, cache_name
from hf_specdec.drafting.drafter import always_drafting
from hf_specdec.methods.causal_lm.network import CausalLMDrafter
from hf_specdec.methods.specbranch import SpecBranchDrafter
from hf_specdec.verification.precision import Raised
from tests.method_table import METHODS
from tests.scripted import right_for
from tests.targets import HYBRIDS, PROMPTS, STATEFUL, VOCAB, fresh_target, make_target, one_prompt, ragged_prompts

BOUND = 1e-9
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}


def random_tree(batch: int, nodes: int, seed: int) -> DraftTree:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCAB, (batch, nodes), generator=draw)
    above = [[-1, *(int(torch.randint(0, node, (1,), generator=draw)) for node in range(1, nodes))]] * batch
    return DraftTree.from_lists(tokens.tolist(), above)


def prefilled(target: PreTrainedModel, prompts: dict[str, Tensor], longest: int = 200) -> TargetModel:
    model = TargetModel(target)
    model.prefill_alone(prompts["input_ids"], longest, prompts["attention_mask"])
    model.begin_rounds(longest)
    return model


class OneByOne:
    """A row decoded alone and unpadded, one token a forward."""

    def __init__(self, target: PreTrainedModel, prompts: dict[str, Tensor], row: int) -> None:
        self.target = target
        ids = prompts["input_ids"][row][prompts["attention_mask"][row].bool()]
        self.cache, self.length, self.name = DynamicCache(config=target.config), len(ids), cache_name(target)
        self.takes_positions = "position_ids" in inspect.signature(target.forward).parameters
        target(ids.unsqueeze(0), use_cache=True, **{self.name: self.cache})

    def step(self, *tokens: int) -> Tensor:
        """Logits [texts, vocab] after the next token of each text in the cache."""
        given: dict[str, Any] = {self.name: self.cache}
        if self.takes_positions:
            given["position_ids"] = torch.full((len(tokens), 1), self.length)
        self.length += 1
        return self.target(torch.tensor(tokens)[:, None], use_cache=True, **given).logits[:, -1]

    def tree(self, tree: DraftTree, row: int) -> Tensor:
        """Logits [nodes, vocab] of all nodes: those of a level are texts of one length, each behind its parent's."""
        texts = copy.copy(self)
        texts.cache = copy.deepcopy(self.cache)
        level, logits = [0], {0: texts.step(int(tree.token_ids[row, 0]))[0]}
        for depth in range(1, int(tree.depths[row].max()) + 1):
            nodes = (tree.depths[row] == depth).nonzero().flatten().tolist()
            texts.cache.reorder_cache(torch.tensor([level.index(int(tree.parents[row, node])) for node in nodes]))
            logits |= zip(nodes, texts.step(*tree.token_ids[row, nodes].tolist()), strict=True)
            level = nodes
        return torch.stack([logits[node] for node in range(tree.num_nodes)])


def states_of(cache: Any, row: int) -> list[Tensor]:
    return [
        held[row].double()
        for layer in cache.layers
        for kind in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {}))
        for held in kind.values()
        if held is not None
    ]


@pytest.mark.combinations(20)
@pytest.mark.parametrize("family", [name for name in HYBRIDS if name != "zamba"])
def test_nodes_and_states_are_those_of_one_token_at_a_time(family: str) -> None:
    compare_rounds(family, fresh_target(family, HYBRIDS[family][2][-1], torch.float64))


@pytest.mark.parametrize("family", ["zamba", *STATEFUL])
def test_nodes_and_states_are_those_of_one_token_at_a_time_level_by_level(family: str) -> None:
    target = fresh_target(family, HYBRIDS[family][2][-1], torch.float64)
    STEPPED.add(target)
    compare_rounds(family, target)


def compare_rounds(family: str, target: PreTrainedModel) -> None:
    prompts = ragged_prompts()
    if family in ("bart", "llama4"):  # padding is counted among the tokens: a row alone is not what it is in a batch
        prompts["attention_mask"].fill_(1)
    with torch.no_grad(), Raised(torch.float64):
        model = prefilled(target, prompts)
        rows = [OneByOne(target, prompts, row) for row in range(3)]
        for number, nodes in enumerate((16, 1, 9)):
            tree = random_tree(3, nodes, number)
            output = model.verify(tree, model.root_positions())
            # One row keeps the root alone, one the path to some node, one the path to the last one.
            ends = [0, nodes // 2, nodes - 1]
            paths = [[n for n in range(nodes) if tree.ancestor_mask[row, end, n]] for row, end in enumerate(ends)]
            for row, single in enumerate(rows):
                expected = single.tree(tree, row)
                error = (output.logits[row] - expected).abs().max()
                assert error < BOUND * expected.abs().max(), f"round {number}, row {row}: {error:.1e}"
                for node in paths[row]:
                    single.step(int(tree.token_ids[row, node]))
            steps = max(map(len, paths))
            path = torch.tensor([each + [0] * (steps - len(each)) for each in paths])
            model.cache.commit(path, Counts.of([len(each) for each in paths]))
            model.cache.recurrent.apply_commit()
            for row, single in enumerate(rows):
                for own, expected in zip(states_of(model.cache, row), states_of(single.cache, 0), strict=True):
                    assert (own - expected).abs().max() < BOUND * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("family", STATEFUL)
def test_a_row_that_keeps_nothing_keeps_its_states(family: str, steps: bool) -> None:
    target = fresh_target(family, HYBRIDS[family][2][-1], torch.float64)
    if steps:
        STEPPED.add(target)
    with torch.no_grad():
        model = prefilled(target, ragged_prompts())
        before = [states_of(model.cache, row) for row in range(3)]
        model.verify(random_tree(3, 6, 0), model.root_positions())
        model.cache.commit(torch.tensor([[0, 1], [0, 0], [0, 0]]), Counts.of([2, 1, 0]))
        model.cache.recurrent.apply_commit()
    assert all(own.equal(other) for own, other in zip(states_of(model.cache, 2), before[2], strict=True))
    assert not all(own.equal(other) for own, other in zip(states_of(model.cache, 1), before[1], strict=True))


def test_nan_of_rejected_nodes_does_not_reach_the_states() -> None:
    target = make_target("qwen3.5", "sdpa", torch.float64)
    with torch.no_grad():
        model = prefilled(target, one_prompt())
        model.verify(random_tree(1, 6, 0), model.root_positions())
        for layer in model.cache.recurrent.layers:
            layer.tape.parts = tuple(part.index_fill(1, torch.tensor([5]), torch.nan) for part in layer.tape.parts)
        model.cache.commit(torch.tensor([[0, 5, 5]]), Counts.of([1]))
        model.cache.recurrent.apply_commit()
    assert all(state.isfinite().all() for state in states_of(model.cache, 0))


@pytest.mark.combinations(39)
@pytest.mark.parametrize("family", STATEFUL)
@pytest.mark.parametrize("method", ["causal_lm_tree", "causal_lm_chain", "specbranch"])
def test_a_draft_model_with_states_drafts_what_it_would_write(family: str, method: str) -> None:
    # The draft model is the target: where its states are kept right, every draft is accepted.
    target = fresh_target(family, HYBRIDS[family][2][-1], torch.float64)
    draft_model = copy.deepcopy(target)
    prompts = PROMPTS["batch of one"]()
    alone = target.generate(**prompts, **GREEDY)
    if method == "specbranch":
        drafter: Any = SpecBranchDrafter.from_models(draft_model, target)
    else:
        drafter = CausalLMDrafter(draft_model)
        drafter.set_options(method=method)
    with always_drafting():
        assisted = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert assisted.tolist() == alone.tolist()
    stats = drafter.stats
    assert sum(stats.per_step_accepted[0][:-1]) > 0
    if method == "causal_lm_chain":
        whole = stats.per_step_accepted[0][0]
        assert whole > 1
        assert all(accepted == whole for accepted in stats.per_step_accepted[0][:-1])


@pytest.mark.parametrize("family", ["qwen3-next", "granite-hybrid", "jamba", "lfm2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_do_not_drift_over_many_rounds(family: str, dtype: torch.dtype) -> None:
    target = fresh_target(family, "sdpa", dtype, max_position_embeddings=4096)
    prompts = one_prompt()
    with torch.no_grad():
        model, draw, kept = prefilled(target, prompts, 4000), torch.Generator().manual_seed(0), []
        for number in range(200):
            tree = random_tree(1, 6, number)
            model.verify(tree, model.root_positions())
            end = int(torch.randint(0, 6, (1,), generator=draw))
            path = [node for node in range(6) if tree.ancestor_mask[0, end, node]]
            kept += tree.token_ids[0, path].tolist()
            model.cache.commit(torch.tensor([path]), Counts.of([len(path)]))
        model.cache.recurrent.apply_commit()
        afresh = OneByOne(target, prompts, 0)
        for token in kept:
            afresh.step(token)
        text = torch.cat([prompts["input_ids"], torch.tensor([kept])], dim=1)
        at_once = target(text, use_cache=True)[cache_name(target)]
    # How far rounding alone leads: in bfloat16 some processors round a mixture of experts to another expert.
    share = 1e-3 if dtype == torch.float32 else 0.15
    for own, expected, other in zip(
        *(states_of(held, 0) for held in (model.cache, afresh.cache, at_once)), strict=True
    ):
        assert (own - expected).norm() < share * expected.norm() + 1.5 * (other - expected).norm()


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("family", ["qwen3.5", "granite-hybrid", "lfm2", "gemma4", "mamba2"])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "specbound"])  # which knows its families
def test_every_method_drafts_for_these_targets(method: str, family: str, batch: str) -> None:
    target, prompts = make_target(family, HYBRIDS[family][2][-1]), PROMPTS[batch]()
    alone = target.generate(**prompts, **GREEDY)
    drafter = METHODS[method](target)
    assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
    assert drafter.stats.num_draft_tokens > 0 or method in ("ngram", "suffix")


def test_states_returned_for_rows_stopped_by_custom_criteria_are_those_of_their_end() -> None:
    # Without a pad token a row that has stopped goes on as long as others do, past the end of the output even.
    target, prompts = fresh_target("qwen3.5", "sdpa", torch.float64), ragged_prompts()
    target.generation_config.pad_token_id = None
    width = prompts["input_ids"].shape[1]

    class StopsByRow(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            new = input_ids.shape[1] - width
            return torch.tensor([new >= 5, new >= 9, new >= 14])

    def arguments() -> dict[str, Any]:
        rules = StoppingCriteriaList([StopsByRow()])
        return {**GREEDY, "stopping_criteria": rules, "return_dict_in_generate": True}

    alone = target.generate(**prompts, **arguments())
    longer = target.generate(**prompts, max_new_tokens=30, do_sample=False)
    assisted = target.generate(**prompts, **arguments(), assistant_model=right_for([4, 7, 2], longer))
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    for row in range(3):
        ours, theirs = (states_of(each[CACHE], row) for each in (assisted, alone))
        for own, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)


def test_states_returned_for_rows_that_ended_earlier_are_those_of_their_end() -> None:
    # Without an end of text no row is padded: drafts that are right carry one past the end while others still write.
    target, prompts = fresh_target("qwen3.5", "sdpa", torch.float64), ragged_prompts()
    settings = {**GREEDY, "return_dict_in_generate": True}
    alone = target.generate(**prompts, **settings)
    script = target.generate(**prompts, max_new_tokens=30, do_sample=False)
    script[1:] = 1  # only the first row's drafts are right
    assisted = target.generate(**prompts, **settings, assistant_model=right_for(6, script))
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    for row in range(3):
        ours, theirs = (states_of(each[CACHE], row) for each in (assisted, alone))
        for own, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)


def test_forwards_of_other_threads_run_transformers_own_functions() -> None:
    target, prompts = fresh_target("qwen3.5", "sdpa", torch.float64), one_prompt()
    script = target.generate(**prompts, **GREEDY)
    expected, found, caller = target(**prompts).logits, [], threading.get_ident()

    def plain() -> None:
        with torch.no_grad():
            found.append(bool(target(**prompts).logits.equal(expected)))

    def meanwhile(*_: Any) -> None:
        if threading.get_ident() == caller:
            other = threading.Thread(target=plain)
            other.start()
            other.join()

    decoder_layers(target)[1].register_forward_pre_hook(meanwhile)
    assert target.generate(**prompts, **GREEDY, assistant_model=right_for(3, script)).equal(script)
    assert len(found) > 2
    assert all(found)


@pytest.mark.parametrize(
    ("family", "steps"), [("qwen3.5", False), ("qwen3.5", True), ("llama4", False), ("bart", False)]
)
def test_rounds_of_two_threads_that_overlap_are_as_if_alone(family: str, steps: bool) -> None:
    target, prompts = fresh_target(family, "sdpa", torch.float64), one_prompt()
    if steps:
        STEPPED.add(target)
    script = target.generate(**prompts, **GREEDY)
    assert target.generate(**prompts, **GREEDY, assistant_model=right_for(3, script)).equal(script)
    barrier, outputs = threading.Barrier(2, timeout=60), []

    def run() -> None:
        outputs.append(target.generate(**prompts, **GREEDY, assistant_model=right_for(3, script)))

    def together(*_: Any) -> None:
        barrier.wait()

    for layer in decoder_layers(target):
        layer.register_forward_pre_hook(together)
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [output.tolist() for output in outputs] == [script.tolist()] * 2
