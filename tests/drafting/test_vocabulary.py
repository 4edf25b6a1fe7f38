"""Drafters and targets of one tokenizer whose tables differ in size: by padding, by tokens that were added to one."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import load_drafter
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.drafting.fingerprint import tokenizer_fingerprint
from hf_specdec.drafting.vocabulary import HeadRows
from hf_specdec.methods.merged import MergedDrafter
from hf_specdec.methods.specblock import SpecBlockDrafter
from hf_specdec.methods.ssd import SSDDrafter
from tests.laws import assert_follows
from tests.method_table import (
    FREE,
    METHODS,
    make_causal_lm,
    make_dflash,
    make_dspark,
    make_eagle3,
    make_medusa,
    make_peagle,
    make_specblock,
    make_specbound,
)
from tests.targets import PROMPTS, fresh_target, make_target, tiny_tokenizer
from tests.watched import Watched

ASSUMED_PADDING = "ignore:.*assumed to be padding or added tokens:UserWarning"
LARGER = "ignore:.*Check that the two are not swapped:UserWarning"
SMALL, LARGE = 64, 72
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}


def saying(token_ids: range, drafter: SpecBlockDrafter) -> SpecBlockDrafter:
    drafter.set_vocabulary(torch.tensor(token_ids))
    return drafter


def cut(model: PreTrainedModel, rows: int) -> PreTrainedModel:
    """A copy with the first rows of its tables."""
    smaller = copy.deepcopy(model)
    smaller.resize_token_embeddings(rows)
    return smaller


@pytest.fixture(scope="module")
def models() -> dict[int, PreTrainedModel]:
    """The same model with tables of either size; the larger one says its last tokens often."""
    large = fresh_target("llama", "sdpa", vocab_size=LARGE)
    large.get_output_embeddings().weight.data[SMALL:] *= 2
    return {LARGE: large, SMALL: cut(large, SMALL)}


def whole_vocabulary(**fields: Any) -> dict[str, Any]:
    return {"dflash_config": {"own_embeddings": True, "own_head": True, **fields}}


# Beside METHODS: heads and embeddings of the drafter's own, in the sizes that the drafter was made for.
OTHERS: dict[str, Callable[[PreTrainedModel], Drafter]] = {
    "dflash, own tables": lambda target: make_dflash(target, **whole_vocabulary()).to(target.dtype),
    "ddtree, own tables and map": lambda target: make_dflash(
        target, method="ddtree", **whole_vocabulary(draft_vocab_size=40)
    ).to(target.dtype),
    "ddtree, rows of the target's head": lambda target: make_dflash(
        target, method="ddtree", dflash_config={"draft_vocab_size": 40}
    ).to(target.dtype),
    "eagle3, own tables": lambda target: make_eagle3(
        target, own_embeddings=True, draft_vocab_size=target.config.vocab_size
    ).to(target.dtype),
    "eagle3, whole vocabulary": lambda target: make_eagle3(target, draft_vocab_size=target.config.vocab_size),
    "medusa, the target's head": lambda target: make_medusa(target, own_head=False),
    "specbound, own heads": lambda target: make_specbound(target, head="full"),
    "specbound, any layer": lambda target: make_specbound(target, d_max=4),
}
KINDS: dict[str, Callable[..., Drafter]] = {**{name: METHODS[name] for name in FREE}, **OTHERS}
# Their own vocabularies reach beyond the smaller table.
KINDS["eagle3"] = lambda target: make_eagle3(target, draft_vocab_size=30)
KINDS["eagle3_ssd"] = lambda target: SSDDrafter(KINDS["eagle3"](target), tree_budget=8, trial=False)
KINDS["peagle"] = lambda target: make_peagle(target, draft_vocab_size=30)
KINDS["merged_three"] = lambda target: MergedDrafter(
    make_causal_lm(target), make_dspark(target), KINDS["eagle3"](target)
)
KINDS["specblock"] = lambda target: saying(range(0, SMALL, 2), make_specblock(target, draft_vocab_size=SMALL // 2))


@pytest.mark.filterwarnings(ASSUMED_PADDING, LARGER)
@pytest.mark.parametrize("own", [SMALL, LARGE])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_the_targets_whatever_the_size_of_the_drafters_tables(
    kind: str, own: int, models: dict[int, PreTrainedModel]
) -> None:
    target = models[SMALL + LARGE - own]
    watched = Watched(KINDS[kind](models[own]))
    inputs = PROMPTS["ragged batch of three"](vocab=target.config.vocab_size)
    alone = target.generate(**inputs, **GREEDY)
    if own == SMALL:
        assert (alone[:, inputs["input_ids"].shape[1] :] >= SMALL).any(), "no token that the drafter lacks was chosen"
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=watched), alone)
    assert watched.stats is not None
    assert watched.stats.num_plain_steps == 0
    assert watched.stats.num_draft_tokens > 0 or kind in ("ngram", "suffix")
    for tree in watched.trees:
        assert (tree.token_ids[tree.valid] < target.config.vocab_size).all(), (
            "a token that the target lacks was drafted"
        )


# Drafts that are drawn must carry probabilities over the target's tokens.
DRAWN: dict[str, Callable[[PreTrainedModel], Drafter]] = {
    "causal_lm_chain": lambda target: make_causal_lm(target, method="causal_lm_chain", noise=0.1),
    "specbranch": lambda target: METHODS["specbranch"](target, candidates="drawn", noise=0.1),
    "specbound": lambda target: make_specbound(target, d_max=3),
    "specbound, own heads": lambda target: make_specbound(target, d_max=3, head="full"),
}
ROWS, DEPTH = 2_000, 2
CASES = [
    *(("causal_lm_chain", own) for own in (8, 9)),
    ("specbranch", 8),
    ("specbound", 8),
    ("specbound, own heads", 9),
]


@pytest.mark.filterwarnings(ASSUMED_PADDING, LARGER)
@pytest.mark.parametrize(("kind", "own"), CASES)
def test_sampled_tokens_follow_the_target_whatever_the_size_of_the_drafters_tables(kind: str, own: int) -> None:
    # 6,000 draws (1,500 where rows are drafted one by one); bound and chance of a false alarm as in `tests/laws.py`.
    rows = ROWS // 4 if kind == "specbranch" else ROWS
    shape = {"num_hidden_layers": 3, "hidden_size": 16, "initializer_range": 0.2}
    large = make_target("llama", "sdpa", torch.float32, vocab_size=9, **shape)
    sizes = {9: large, 8: cut(large, 8)}
    target, drafter = sizes[17 - own], DRAWN[kind](sizes[own])
    prompt = torch.tensor([[3, 5, 4, 1, 5]])
    settings: dict[str, Any] = {"do_sample": True, "top_k": 6, "temperature": 1.2, "max_new_tokens": DEPTH}
    law: dict[Any, float] = {(): 1.0}
    for _ in range(DEPTH):
        prefixes = torch.tensor([[*prompt[0].tolist(), *tokens] for tokens in law])
        output = target.generate(
            prefixes,
            attention_mask=torch.ones_like(prefixes),
            **settings | {"max_new_tokens": 1},
            return_dict_in_generate=True,
            output_scores=True,
        )
        probs = output.scores[0].double().softmax(-1).tolist()
        law = {
            (*tokens, token): weight * prob
            for row, (tokens, weight) in enumerate(law.items())
            for token, prob in enumerate(probs[row])
            if prob > 0
        }
    torch.manual_seed(0)
    drawn: Counter[Any] = Counter()
    for _ in range(3):
        output = target.generate(prompt, **settings, num_return_sequences=rows, assistant_model=drafter)
        drawn.update(map(tuple, output[:, prompt.shape[1] :].tolist()))
    assert_follows(drawn, law)
    assert drafter.stats is not None
    assert drafter.stats.num_accepted_draft_tokens > rows / 20


# Whether two vocabularies are the same one.


def save(model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedModel:
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return type(model).from_pretrained(folder)


def with_added_token() -> PreTrainedTokenizerBase:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


@pytest.mark.parametrize("added", [False, True], ids=["padding", "added token"])
def test_a_draft_model_with_the_targets_tokenizer_drafts_for_tables_of_any_size(tmp_path: Path, added: bool) -> None:
    save(fresh_target("llama", "sdpa", torch.float32), tmp_path / "draft", tiny_tokenizer())
    tokenizer = with_added_token() if added else tiny_tokenizer()
    target = save(fresh_target("llama", "sdpa", torch.float32, vocab_size=100), tmp_path / "target", tokenizer)
    drafter = load_drafter(tmp_path / "draft", target)
    target.generate(**PROMPTS["batch of one"](vocab=100), **GREEDY, assistant_model=drafter)
    assert drafter.stats is not None
    assert drafter.stats.num_draft_tokens > 0


def test_sizes_that_differ_are_told_where_no_tokenizers_can_be_compared(models: dict[int, PreTrainedModel]) -> None:
    message = "has a vocabulary of 64, and target 'LlamaForCausalLM' one of 72. The difference is assumed to be padding"
    drafters: list[Drafter] = [make_causal_lm(models[SMALL]), make_dflash(models[SMALL]).to(torch.float64)]
    for drafter in drafters:
        with pytest.warns(UserWarning, match=message):
            models[LARGE].generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=drafter)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once
            models[LARGE].generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=drafter)


def test_a_trained_drafter_knows_its_targets_tokenizer_after_tokens_were_added(tmp_path: Path) -> None:
    plain = fresh_target("llama", "sdpa", torch.float32)
    drafter = make_dflash(plain)
    drafter.config.target_tokenizer_sha256 = tokenizer_fingerprint(tiny_tokenizer())
    plain.resize_token_embeddings(65)
    target = save(plain, tmp_path, with_added_token())
    target.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=drafter)
    drafter.config.target_tokenizer_sha256 = tokenizer_fingerprint(tiny_tokenizer(63))
    with pytest.raises(ValueError, match="trained with the tokenizer of .* has another one .* 65 tokens"):
        target.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=copy.deepcopy(drafter))


@pytest.mark.filterwarnings(ASSUMED_PADDING)
@pytest.mark.parametrize(
    "make",
    [
        lambda target: saying(range(24, LARGE), make_specblock(target, draft_vocab_size=48)),
        lambda target: make_eagle3(target, draft_vocab_size=LARGE // 2),
        lambda target: make_specbound(target, draft_vocab_size=LARGE // 2),
    ],
    ids=["specblock", "eagle3", "specbound"],
)
def test_a_draft_vocabulary_with_tokens_that_the_target_lacks_is_refused(
    make: Callable[[PreTrainedModel], Any], models: dict[int, PreTrainedModel]
) -> None:
    drafter = make(models[LARGE])
    if drafter.method == "specbound":
        drafter.set_vocabulary(torch.arange(LARGE // 2, LARGE))
    with pytest.raises(ValueError, match=r"gives target ids from \d+ to 7\d, but the target has ids 0 to 63"):
        models[SMALL].generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=drafter)


@pytest.mark.filterwarnings(ASSUMED_PADDING)
def test_learning_from_a_target_of_another_size_is_refused(models: dict[int, PreTrainedModel]) -> None:
    pytest.importorskip("datasets", reason="training needs the extra hf_specdec[train]")
    from hf_specdec.methods.specblock.training import SpecBlockStep
    from hf_specdec.methods.specbound.training import SpecBoundStep

    for step, drafter in ((SpecBlockStep, make_specblock), (SpecBoundStep, make_specbound)):
        with pytest.raises(ValueError, match="vocabulary of 64, but target .* has 72 embeddings.*training compares"):
            step(drafter(models[SMALL]), models[LARGE])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("wrapped", [False, True], ids=["linear", "of another class"])
def test_rows_of_a_head_say_what_the_whole_head_says_of_them(bias: bool, wrapped: bool) -> None:
    head = torch.nn.Linear(8, 20, bias=bias)
    ids, hidden = torch.tensor([1, 4, 19]), torch.randn(2, 3, 8)
    rows = HeadRows(torch.nn.Sequential(head) if wrapped else head, ids)
    torch.testing.assert_close(rows(hidden), head(hidden)[..., ids])


def test_rows_of_a_targets_head_are_taken_anew_once_head_or_vocabulary_change(
    models: dict[int, PreTrainedModel],
) -> None:
    drafter = make_dflash(models[LARGE], dflash_config={"draft_vocab_size": 3})
    drafter.set_vocabulary(torch.tensor([2, 5, 9]))
    head, hidden = torch.nn.Linear(8, LARGE), torch.randn(1, 8)
    assert drafter.head(head) is drafter.head(head), "kept from call to call"
    for change in (
        lambda: torch.nn.init.ones_(head.weight),
        lambda: drafter.set_vocabulary(torch.tensor([3, 4, 8])),
        lambda: setattr(head, "weight", torch.nn.Parameter(torch.randn(LARGE, 8))),
    ):
        change()
        torch.testing.assert_close(drafter.head(head)(hidden), head(hidden)[:, drafter.target_ids])
