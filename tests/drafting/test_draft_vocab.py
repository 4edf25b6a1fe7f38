"""FR-Spec on drafters that exist: heads keep the rows of one's own frequent tokens, and the output stays exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_specdec import load_drafter
from hf_specdec.drafting.vocabulary import frequent_token_ids
from tests.method_table import METHODS, make_causal_lm, make_dspark, make_eagle3, make_medusa, make_mtp
from tests.targets import make_target, one_prompt, tiny_tokenizer
from tests.watched import Watched

KEPT = list(range(0, 64, 3))
METHODS_WITH_HEADS = [
    "dflash", "ddtree", "dspark", "dspark_chain", "eagle3", "peagle", "mtp", "causal_lm_tree", "causal_lm_chain",
]  # fmt: skip


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("method", METHODS_WITH_HEADS)
def test_only_chosen_tokens_are_drafted_and_the_output_is_the_targets(method: str, do_sample: bool) -> None:
    target, prompt = make_target("llama", "sdpa", torch.float64), one_prompt()
    drafter = METHODS[method](target)
    drafter.restrict_vocabulary(KEPT)
    watched = Watched(drafter)
    torch.manual_seed(0)
    text = target.generate(**prompt, max_new_tokens=16, do_sample=do_sample, assistant_model=watched)
    if not do_sample:
        assert torch.equal(text, target.generate(**prompt, max_new_tokens=16, do_sample=False))
    drafted = {int(token) for each in watched.rounds for token in each.tree.token_ids[0, 1:][each.tree.valid[0, 1:]]}
    assert drafted
    assert drafted <= set(KEPT)


CHAINS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dspark_chain": {},
    "causal_lm_chain": {},
    "eagle3": {"depth": 4, "top_k": 1, "tree_budget": 4},
    "mtp": {"depth": 3, "top_k": 1, "tree_budget": 3},
    "peagle": {"method": "dflash"},
}


@pytest.mark.parametrize("method", CHAINS)
def test_the_likeliest_token_stays_the_likeliest_if_it_is_in_the_vocabulary(method: str) -> None:
    # Trees may change: they rank paths by probabilities, which are those within the vocabulary.
    target, prompt = make_target("llama", "sdpa", torch.float64), one_prompt()
    rounds: list[Any] = []
    for restricted in (False, True):
        drafter = METHODS[method](target, **CHAINS[method])
        if restricted:
            drafted = {int(token) for each in rounds[0] for token in each.tree.token_ids.flatten()}
            assert len(drafted) < 60
            drafter.restrict_vocabulary(sorted(drafted))
        watched = Watched(drafter)
        target.generate(**prompt, max_new_tokens=12, do_sample=False, assistant_model=watched)
        rounds.append(watched.rounds)
    for whole, less in zip(*rounds, strict=True):
        assert whole.tree.token_ids.tolist() == less.tree.token_ids.tolist()


def test_heads_get_smaller() -> None:
    target = make_target("llama", "sdpa", torch.float64)
    eagle, markov, layer = make_eagle3(target), make_dspark(target), make_mtp(target)
    for drafter in (eagle, markov, layer):
        drafter.restrict_vocabulary(KEPT)
    assert eagle.lm_head.weight.shape[0] == eagle.config.draft_vocab_size == len([i for i in KEPT if i < 32])
    assert markov.head(target.lm_head).weight.shape[0] == markov.markov_head.markov_w2.weight.shape[0] == len(KEPT)
    assert layer.head.weight.shape[0] == len(KEPT)
    model = make_causal_lm(target)
    model.restrict_vocabulary(KEPT)
    less, ids = model._with_draft_rows()
    assert less(torch.tensor([[5, 6]])).logits.shape[-1] == len(KEPT)
    assert ids.tolist() == KEPT
    assert model.model(torch.tensor([[5, 6]])).logits.shape[-1] == 64  # the model itself is not changed


def test_a_restricted_drafter_is_saved_and_loaded(tmp_path: Path) -> None:
    target, prompt = make_target("llama", "sdpa", torch.float64), one_prompt()
    make_eagle3(target, draft_vocab_size=64).save_pretrained(tmp_path / "whole")
    drafter = load_drafter(tmp_path / "whole", target, draft_vocab=torch.tensor(KEPT))
    drafter.save_pretrained(tmp_path / "less")
    trees = []
    for each in (drafter, load_drafter(tmp_path / "less", target)):
        watched = Watched(each)
        target.generate(**prompt, max_new_tokens=8, do_sample=False, assistant_model=watched)
        trees.append([each.tree.token_ids.tolist() for each in watched.rounds])
    assert trees[0] == trees[1]


def test_it_may_be_restricted_again() -> None:
    target = make_target("llama", "sdpa", torch.float64)
    for drafter in (make_eagle3(target, draft_vocab_size=64), make_mtp(target), make_dspark(target)):
        for kept in (KEPT, KEPT[:5]):
            drafter.restrict_vocabulary(kept)
        assert drafter.config.draft_vocab_size == 5


def test_frequent_tokens_of_ones_own_texts() -> None:
    tokenizer = tiny_tokenizer()
    texts = ["hello hello there", "hello"]
    counts: dict[int, int] = {}
    for text in texts:
        for token in tokenizer(text)["input_ids"]:
            counts[token] = counts.get(token, 0) + 1
    absent = set(tokenizer.all_special_ids) - counts.keys()
    ids = frequent_token_ids(texts, tokenizer, 3 + len(absent)).tolist()
    most = sorted(counts, key=lambda token: (-counts[token], token))[:3]
    assert ids == sorted({*most, *absent})


def test_what_cannot_be_restricted_raises() -> None:
    target = make_target("llama", "sdpa", torch.float64)
    with pytest.raises(ValueError, match="draft_vocab has ids from 5 to 64, but drafter .* vocabulary of 64"):
        make_eagle3(target).restrict_vocabulary([5, 64])
    with pytest.raises(ValueError, match="draft_vocab has ids none at all"):
        make_mtp(target).restrict_vocabulary([])
    with pytest.raises(ValueError, match="draft_vocab has none of the 32 tokens"):
        make_eagle3(target).restrict_vocabulary([41, 51])
    with pytest.raises(ValueError, match="MedusaDrafter, which cannot be restricted to a smaller vocabulary"):
        make_medusa(target).restrict_vocabulary(KEPT)
    with pytest.raises(ValueError, match="whose selector compares tokens of the whole vocabulary"):
        METHODS["dflash2"](target).restrict_vocabulary(KEPT)
    with pytest.raises(ValueError, match="NGramDrafter, which cannot be restricted"):
        load_drafter("ngram", draft_vocab=KEPT)
