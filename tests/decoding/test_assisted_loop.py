"""Chains in transformers' own loop: an oracle for ours, and the way for targets that trees cannot be verified on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    GPTNeoConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import CandidateGenerator
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_specdec import TargetModel, load_drafter
from hf_specdec.decoding.chains import best_path
from hf_specdec.decoding.targets import standins
from hf_specdec.decoding.targets.stepped import STEPPED
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.decoding.upstream import CACHE
from hf_specdec.drafting.drafter import always_drafting
from hf_specdec.methods.specbranch import SpecBranchDrafter
from tests.chains import assisted_loop
from tests.decoding.test_sampling import DEPTH, PROMPT, arguments_of, count, enumerate_law, sampled_target
from tests.laws import assert_follows
from tests.method_table import METHODS, make_causal_lm_chain
from tests.scripted import fixed_tree, right_for
from tests.support_table import tiny_model
from tests.targets import IN_OLDEST, PROMPTS, fresh_target, make_target

GREEDY: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False}
CHAINS = ["dflash", "causal_lm_chain", "specbound", "specbranch"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*transformers' own loop verifies"),
    pytest.mark.filterwarnings("ignore:.*needs the ids of all tokens"),
    pytest.mark.filterwarnings("ignore:.*(records its past|inputs_embeds).*nothing is drafted:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*(records its past|inputs_embeds).*Nothing is drafted:UserWarning"),
]


def drafter_of(method: str, target: PreTrainedModel) -> Any:
    drafter: Any = METHODS[method](target)
    return drafter.to(target.dtype) if isinstance(drafter, torch.nn.Module) else drafter


def gpt_neo() -> PreTrainedModel:
    """Local layers, whose window counts entries of the cache."""
    config = GPTNeoConfig(
        vocab_size=64, hidden_size=32, num_layers=4, num_heads=4, window_size=6,
        attention_types=[[["global", "local"], 2]], max_position_embeddings=128,
    )  # fmt: skip
    return _tiny(transformers.GPTNeoForCausalLM(config))


def opt() -> PreTrainedModel:
    """Learned positions behind an offset."""
    return make_target("opt", "sdpa", ffn_dim=256)  # larger than the draft model


def _tiny(model: PreTrainedModel) -> PreTrainedModel:
    for parameter in model.parameters():
        parameter.data = 0.2 * torch.randn_like(parameter) + (parameter.dim() == 1)
    model.generation_config.update(pad_token_id=0, eos_token_id=None, bos_token_id=None)
    return model.double().eval()


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
@pytest.mark.parametrize("method", METHODS)
def test_both_loops_give_the_tokens_of_plain_decoding(method: str, padded: bool) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    if padded:
        prompts = {name: torch.nn.functional.pad(part, (3, 0)) for name, part in prompts.items()}
    drafter, alone = drafter_of(method, target), target.generate(**prompts, **GREEDY)
    assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
    ours = drafter.stats.per_step_accepted
    with assisted_loop():
        assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
    if method in CHAINS:
        # At the end of a text transformers' loop drafts no more than it has room for.
        assert drafter.stats.per_step_accepted[0][:-1] == ours[0][: len(drafter.stats.per_step_accepted[0]) - 1]
    assert drafter.stats.num_draft_tokens > 0


@pytest.mark.parametrize("make", [gpt_neo, opt])
@pytest.mark.parametrize("method", METHODS)
def test_gpt_neo_and_opt_give_the_tokens_of_plain_decoding_in_the_assisted_loop(method: str, make: Any) -> None:
    target, prompts = make(), PROMPTS["batch of one"]()
    if method == "merged_three":
        pytest.skip("it has a draft model in it, which is run on trees in any loop; merged has not")
    reads_cache = {
        "specbound": "not known to be exact when run in slices",
        "gemma4_assistant": "whose window counts entries of the cache.*transformers' loop cannot stand in for ours",
        "gated_lora": "whose window counts entries of the cache.*transformers' loop cannot stand in for ours",
    }
    if method in reads_cache and make is gpt_neo:
        with pytest.raises(ValueError, match=reads_cache[method]):
            drafter_of(method, target).check_target(target)
        return
    if method.startswith("causal_lm"):  # a draft model is run on trees in any loop
        drafter = drafter_of(method, make_target("llama", "sdpa"))
    elif method == "specbranch":
        draft_model = make_causal_lm_chain(make_target("llama", "sdpa")).model
        drafter = SpecBranchDrafter.from_models(draft_model, target, speed_ratio=4.0, h_rad=False)
    else:
        drafter = drafter_of(method, target)
    alone = target.generate(**prompts, **GREEDY)
    with assisted_loop():
        assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
    assert drafter.stats.num_draft_tokens > 0


def test_generators_are_transformers_candidate_generators() -> None:
    target = make_target("llama", "sdpa")
    for method in METHODS:
        generator = drafter_of(method, target).candidate_generator(TargetModel(target))
        assert isinstance(generator, CandidateGenerator)
        with pytest.raises(RuntimeError, match=r"only in calls of model\.generate\(assistant_model=drafter\)"):
            generator.get_candidates(torch.tensor([[1, 2]]))
        generator.close()


def test_accepted_lengths_are_those_of_the_script() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    alone = target.generate(**prompts, **GREEDY)
    per_round = [3, 0, 5, 1, 2]
    with assisted_loop():
        drafter = right_for(per_round, alone, siblings=0)
        assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
    accepted = drafter.stats.per_step_accepted[0]
    assert accepted[:-1] == [per_round[index % 5] for index in range(len(accepted) - 1)]


@pytest.mark.parametrize("drawn", [False, True])
def test_sampled_tokens_follow_the_target(drawn: bool) -> None:
    target = sampled_target()
    drafter = make_causal_lm_chain(target, seed=1) if drawn else fixed_tree([3, 4, 5], [0, 1, 2])
    with assisted_loop():
        settings = {"max_new_tokens": DEPTH, "assistant_model": drafter, **arguments_of("plain")}
        rows = [target.generate(torch.tensor([PROMPT]), **settings)[:, len(PROMPT) :] for _ in range(300)]
    assert_follows(count(torch.cat(rows)), enumerate_law(target, PROMPT, "plain"))


def test_attention_without_tree_masks_runs_chains_and_warns() -> None:
    AttentionInterface.register("no_trees", sdpa_attention_forward)
    AttentionMaskInterface.register("no_trees", sdpa_mask)
    target, prompts = fresh_target("llama", "sdpa"), PROMPTS["batch of one"]()
    target.config._attn_implementation = "no_trees"
    alone = target.generate(**prompts, **GREEDY)
    drafter = right_for(2, alone)
    with pytest.warns(
        UserWarning, match=r"attn_implementation='no_trees'.*'stub' drafts chains.*transformers' own loop"
    ):
        assisted = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert assisted.tolist() == alone.tolist()
    assert drafter.stats.num_accepted_draft_tokens == 0, "of siblings the likeliest comes first"
    prompts = PROMPTS["ragged batch of three"]()
    alone = target.generate(**prompts, **GREEDY)
    with pytest.warns(UserWarning, match=r"no_trees.*verified for one row, and this batch has 3.*Nothing is drafted"):
        assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
    assert drafter.stats.num_draft_tokens == 0


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("make", [gpt_neo, opt])
def test_texts_end_where_plain_decoding_ends(make: Any, eos: bool) -> None:
    target, prompts = make(), PROMPTS["batch of one"]()
    script = target.generate(**prompts, **GREEDY)
    for new in range(1, 12):
        settings = {"max_new_tokens": new, "do_sample": False}
        if eos:
            settings = GREEDY | {"eos_token_id": int(script[0, prompts["input_ids"].shape[1] + new])}
        alone = target.generate(**prompts, **settings)
        for right in (1, 4):
            drafter = right_for(right, script, siblings=0)
            with assisted_loop():
                assert target.generate(**prompts, **settings, assistant_model=drafter).tolist() == alone.tolist()


def test_nothing_is_drafted_behind_the_last_learned_position() -> None:
    # The host would run these drafts, and cut them from the text afterwards.
    target, prompts = gpt_neo(), PROMPTS["batch of one"]()
    script = target.generate(**prompts, **GREEDY)
    positions = target.transformer.wpe
    positions.weight.data = positions.weight.data[: script.shape[1] - 1]  # the last token is not run
    drafter = right_for(5, script, siblings=0)
    with assisted_loop():
        assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == script.tolist()
    assert drafter.stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("padding", [0, 3])
def test_drafters_are_told_the_positions_of_the_text(padding: int) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    prompts = {name: torch.nn.functional.pad(part, (padding, 0)) for name, part in prompts.items()}
    script = target.generate(**prompts, **GREEDY)
    drafter = right_for([2, 0, 5, 1], script, siblings=0)
    with assisted_loop():
        target.generate(**prompts, **GREEDY, assistant_model=drafter)
    told = [
        (token, position)
        for outcome in drafter.outcomes
        for token, position in zip(outcome.token_ids[0].tolist(), outcome.position_ids[0].tolist(), strict=True)
        if position >= 0
    ]
    assert len(drafter.outcomes) > 4
    assert told == [(token, place) for place, token in enumerate(script[0, padding:].tolist())][: len(told)]


def test_cache_of_the_caller_is_continued_and_returned() -> None:
    target, prompts = gpt_neo(), PROMPTS["batch of one"]()
    caches = []
    for drafter in (None, right_for(2, target.generate(**prompts, **GREEDY), siblings=0)):
        cache = DynamicCache()
        first = target.generate(**prompts, **GREEDY, **{CACHE: cache}, assistant_model=drafter)
        second = target.generate(first, max_new_tokens=8, do_sample=False, **{CACHE: cache})
        caches.append((second.tolist(), cache.get_seq_length()))
    assert caches[0] == caches[1]


class Stops(StoppingCriteria):
    """After so many tokens."""

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 14)


def test_nothing_is_drafted_with_criteria_that_the_host_calls_late() -> None:
    target, prompts = gpt_neo(), PROMPTS["batch of one"]()
    settings = GREEDY | {"stopping_criteria": StoppingCriteriaList([Stops()])}
    alone = target.generate(**prompts, **settings)
    drafter = right_for(5, target.generate(**prompts, **GREEDY), siblings=0)
    with pytest.warns(UserWarning, match="nothing is drafted, because that loop calls these stopping criteria"):
        assert target.generate(**prompts, **settings, assistant_model=drafter).tolist() == alone.tolist()


def test_targets_with_their_own_cache_decode_plainly_and_warn() -> None:
    # transformers' loop cannot cut back what they store.
    config = transformers.RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
    target, prompts = _tiny(transformers.RwkvForCausalLM(config)), PROMPTS["batch of one"]()
    alone = target.generate(**prompts, **GREEDY)
    drafter = right_for(2, alone)
    with pytest.warns(UserWarning, match=r"Rwkv.* stores its keys, values or states.*Nothing is drafted"):
        assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
    assert drafter.stats.num_draft_tokens == 0


def wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a family had functions of a known name that do something else."""
    rule = standins.OF_STATES["torch_chunk_gated_delta_rule"]

    def wrong(nodes: Any, layer: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        outputs, state = rule(nodes, layer, query, *args, **kwargs)
        return outputs.roll(1, 1), state

    monkeypatch.setitem(standins.OF_STATES, "torch_chunk_gated_delta_rule", wrong)


def test_layers_with_a_wrong_rule_run_level_by_level(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_rule(monkeypatch)
    target, prompts = fresh_target("qwen3.5", "sdpa"), PROMPTS["ragged batch of three"]()
    alone = target.generate(**prompts, **GREEDY)
    drafter = right_for(2, alone)
    assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
    assert drafter.stats.num_accepted_draft_tokens > 0
    assert target in STEPPED


def test_layers_that_fail_level_by_level_are_named_and_chains_are_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_rule(monkeypatch)
    monkeypatch.setattr("hf_specdec.decoding.targets.stepped.state_modules", lambda model: [])
    target, prompts = fresh_target("qwen3.5", "sdpa"), PROMPTS["batch of one"]()
    alone = target.generate(**prompts, **GREEDY)
    drafter = right_for(2, alone, siblings=0)
    with pytest.warns(UserWarning, match=r"differ by .*Qwen3_5GatedDeltaNet.*is not supported.*own loop verifies"):
        assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
    assert drafter.stats.num_accepted_draft_tokens > 0
    assert target not in STEPPED


# Caches of their own that cannot be cut back, states beside windows of keys, and keys that are chosen among all.
REPLAYED = ["deepseek_v4", "doge", "inkling_text", "minimax"]


@pytest.mark.parametrize("family", REPLAYED)
@pytest.mark.parametrize("right", [0, 3, [2, 0, 5, 1]], ids=str)
def test_caches_that_cannot_be_cropped_are_restored_and_replayed(right: Any, family: str) -> None:
    target, prompts = tiny_model(family), PROMPTS["batch of one"]()
    settings = {**GREEDY, "return_dict_in_generate": True, "output_scores": True}
    alone = target.generate(**prompts, **settings)
    drafter = right_for(right, alone.sequences, siblings=0)
    assisted = target.generate(**prompts, **settings, assistant_model=drafter)
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    assert (drafter.stats.num_accepted_draft_tokens > 0) == (right != 0)
    torch.testing.assert_close(torch.stack(assisted.scores), torch.stack(alone.scores).float(), rtol=1e-4, atol=1e-4)
    if family == "minimax":  # plain decoding hands no cache back, which it makes itself
        return
    # The cache that is handed back goes on as the other one does.
    longer = torch.cat([alone.sequences, prompts["input_ids"][:, :3]], 1)
    then = [target.generate(longer, **GREEDY, **{CACHE: each[CACHE]}) for each in (assisted, alone)]
    assert then[0].tolist() == then[1].tolist()


@pytest.mark.parametrize("family", ["doge", "inkling_text"])
def test_prompt_given_as_embeddings_does_not_run_again(family: str) -> None:
    target, ids = tiny_model(family), PROMPTS["batch of one"]()["input_ids"]
    settings = {**GREEDY, "inputs_embeds": target.get_input_embeddings()(ids)}
    alone = target.generate(**settings)
    drafter = right_for([2, 0, 5, 1], alone, siblings=0)
    with pytest.warns(UserWarning, match="own loop verifies"):
        assert target.generate(**settings, assistant_model=drafter).tolist() == alone.tolist()
    assert drafter.stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("family", REPLAYED)
@pytest.mark.parametrize("method", ["dflash", "eagle3", "medusa", "ngram"])
def test_drafters_draft_chains_for_caches_that_cannot_be_cropped(method: str, family: str) -> None:
    target, prompts = tiny_model(family), PROMPTS["batch of one"]()
    alone, drafter = target.generate(**prompts, **GREEDY), drafter_of(method, target)
    if family == "deepseek_v4" and method in ("dflash", "eagle3"):
        with pytest.raises(ValueError, match=r"layer 0 of target DeepseekV4ForCausalLM, .* \(1, 9, 4, 32\)"):
            target.generate(**prompts, **GREEDY, assistant_model=drafter)
        return
    assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
    assert drafter.stats.num_draft_tokens > 0


def test_nothing_is_drafted_where_keys_would_replace_others() -> None:
    target, prompts = tiny_model("doge"), PROMPTS["batch of one"]()
    longest = prompts["input_ids"].shape[1] + GREEDY["max_new_tokens"]
    for kept, drafts in ((longest, True), (longest - 1, False)):
        for layer in target.model.layers:
            layer.self_attn.keep_window_size = kept
        target.config.keep_window_size = kept
        alone = target.generate(**prompts, **GREEDY)
        drafter = right_for(2, alone)
        with pytest.warns(UserWarning, match=f"keeps {kept} of all keys"):
            assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
        assert (drafter.stats.num_draft_tokens > 0) == drafts


def test_the_best_path_of_a_tree_is_its_likeliest() -> None:
    tree = DraftTree.from_lists([[7, 1, 2, 3, 4]], [[-1, 0, 0, 1, 2]])
    assert best_path(tree) == [0, 1, 3]
    assert best_path(DraftTree.root_only(torch.tensor([7]))) == [0]


BUNDLED = Path(__file__).parents[2] / "examples" / "tiny-code"


@pytest.mark.parametrize(
    ("folder", "options"),
    [
        ("dflash", {}),
        ("dflash", {"method": "dflash"}),
        ("dspark", {}),
        ("specblock", {}),
        ("specbound", {}),
        ("specbranch", {"speed_ratio": 4.0}),
        ("draft-lm", {}),
    ],
    ids=str,
)
def test_the_bundled_pairs_give_the_tokens_of_plain_decoding_in_both_loops(
    folder: str, options: dict[str, Any]
) -> None:
    target = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED / "target", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUNDLED / "target")
    drafter = load_drafter(str(BUNDLED / folder), **options)
    # Without the line break, which is one token with the indentation that follows, and alone ends a text.
    prompt = tokenizer("def insert(items, value):", return_tensors="pt")
    alone = target.generate(**prompt, **GREEDY)
    with always_drafting():
        assert target.generate(**prompt, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
        with assisted_loop():
            assert target.generate(**prompt, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
    assert drafter.stats.num_accepted_draft_tokens > 0


def no_trees(family: str = "llama", **settings: Any) -> PreTrainedModel:
    """A target whose attention cannot take the masks of trees."""
    AttentionInterface.register("no_trees", sdpa_attention_forward)
    AttentionMaskInterface.register("no_trees", sdpa_mask)
    target = fresh_target(family, "sdpa", **settings)
    target.config._attn_implementation = "no_trees"
    return target


def contents(cache: Any) -> list[Any]:
    """All tensors of a cache, and what it knows of its past."""
    layers = [vars(layer) for layer in cache.layers]
    tensors = [
        value for each in layers for _, value in sorted(each.items()) if isinstance(value, Tensor) and value.dim() > 1
    ]
    length = int(cache.get_seq_length())  # in 5.17 its own crop makes it a tensor
    return [*tensors, [each.get("record_past") for each in layers], length]


def in_turns(target: PreTrainedModel, drafter_of_turn: Any, **settings: Any) -> list[Any]:
    """The tokens and the cache after each of three turns on one cache; the user says something in between."""
    said, cache, found = PROMPTS["batch of one"]()["input_ids"], DynamicCache(config=target.config), []
    text = said
    for turn in range(3):
        text = target.generate(
            text,
            attention_mask=torch.ones_like(text),
            **{CACHE: cache},
            assistant_model=drafter_of_turn(turn, found),
            max_new_tokens=10,
            do_sample=False,
            **settings,
        )
        found += [text.tolist(), *contents(cache)]
        text = torch.cat([text, said[:, turn : turn + 3]], 1)
    return found


CONTINUED = {
    "gpt_neo": gpt_neo,
    "no_trees": no_trees,
    "no_trees_sliding": lambda: no_trees("mistral-sliding"),
    "deepseek_v4": lambda: tiny_model("deepseek_v4"),
    "doge": lambda: tiny_model("doge"),
    "inkling_text": lambda: tiny_model("inkling_text"),
    "roformer": lambda: tiny_model("roformer"),
}


@pytest.mark.parametrize("right", [0, 3, [2, 0, 5, 1]], ids=str)
@pytest.mark.parametrize("family", CONTINUED)
def test_turns_on_one_cache_equal_plain_decoding(family: str, right: Any) -> None:
    if family == "roformer" and IN_OLDEST:
        pytest.skip("RoFormer of this transformers cannot run several tokens after cached ones")
    target = CONTINUED[family]()
    alone = in_turns(target, lambda turn, found: None)
    texts = [each for each in alone if isinstance(each, list) and isinstance(each[0], list)]
    drafters = [right_for(right, torch.tensor(text), siblings=0) for text in texts]
    assisted = in_turns(target, lambda turn, found: drafters[turn])
    torch.testing.assert_close(assisted, alone, rtol=1e-4, atol=1e-5)  # some compute in float32
    accepted = [drafter.stats.num_accepted_draft_tokens > 0 for drafter in drafters]
    assert accepted == [right != 0] * 3


@pytest.mark.parametrize("method", ["dflash", "eagle3", "ngram", "specbound"])
def test_turns_on_one_cache_equal_plain_decoding_for_drafters_with_features(method: str) -> None:
    target = make_target("llama", "sdpa")
    alone, drafter = in_turns(target, lambda turn, found: None), drafter_of(method, target)
    with assisted_loop():
        torch.testing.assert_close(in_turns(target, lambda turn, found: drafter), alone)
    assert drafter.stats.num_draft_tokens > 0


def test_new_ids_alone_on_a_continued_cache_are_decoded_plainly() -> None:
    target, prompts = no_trees(), PROMPTS["batch of one"]()
    outputs = []
    for drafter in (None, right_for(2, torch.zeros(1, 0))):
        cache = DynamicCache(config=target.config)
        target.generate(**prompts, **GREEDY, **{CACHE: cache})
        mask = torch.ones(1, cache.get_seq_length() + 4, dtype=torch.int64)
        outputs.append(
            target.generate(
                prompts["input_ids"][:, :4],
                attention_mask=mask,
                **{CACHE: cache},
                assistant_model=drafter,
                **GREEDY,
            ).tolist()
        )
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("method", ["dflash", "eagle3", "medusa", "causal_lm_chain", "ngram", "specbound"])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.filterwarnings("ignore:.*nothing is drafted, because 'specbound' needs the ids of the prompt")
def test_prompts_given_as_embeddings_equal_plain_decoding(method: str, padding: int) -> None:
    target, ids = make_target("llama", "sdpa"), PROMPTS["batch of one"]()["input_ids"]
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0
    settings = {**GREEDY, "inputs_embeds": target.get_input_embeddings()(ids), "attention_mask": mask}
    alone, drafter = target.generate(**settings), drafter_of(method, target)
    with assisted_loop():
        assert target.generate(**settings, assistant_model=drafter).tolist() == alone.tolist()
    assert (drafter.stats.num_draft_tokens > 0) == (padding == 0 and method != "specbound")


@pytest.mark.skipif(IN_OLDEST, reason="plain decoding of this transformers fails with such a cache")
def test_a_cache_that_records_its_past_is_left_as_plain_decoding_leaves_it() -> None:
    found = []
    for make in (lambda: no_trees("mistral-sliding"), lambda: make_target("mistral-sliding", "sdpa")):
        target, prompts = make(), PROMPTS["batch of one"]()
        script = target.generate(**prompts, **GREEDY)
        for drafter in (None, right_for(2, script, siblings=0)):
            cache = DynamicCache(config=target.config)
            cache.activate_past_recording()
            first = target.generate(**prompts, **GREEDY, **{CACHE: cache}, assistant_model=drafter)
            found.append([first.tolist(), *contents(cache)])
            cache.crop(-15)
            again = target.generate(first[:, :-8], **GREEDY, **{CACHE: cache}, assistant_model=drafter)
            found[-1] += [again.tolist(), *contents(cache)]
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])
