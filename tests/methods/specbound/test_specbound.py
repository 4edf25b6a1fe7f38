"""What is peculiar to SpecBound: exits, bounds on work and memory, adapters, calibration, and what it refuses."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    GemmaConfig,
    GemmaForCausalLM,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_specdec import load_drafter
from hf_specdec.decoding.exchange import Committed
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.decoding.upstream import CACHE
from hf_specdec.drafting.draft_logits import AnnealedConfidenceLogitsProcessor
from hf_specdec.methods.specbound import SpecBoundConfig, SpecBoundDrafter
from hf_specdec.methods.specbound import calibration as calibrating
from hf_specdec.methods.specbound.drafting import LAYOUTS, EarlyExitGenerator, LayerSlices, PendingChain, StepLayout
from tests.decoding import test_sampling
from tests.laws import assert_follows
from tests.method_table import METHODS, make_specbound
from tests.targets import PROMPTS, fresh_target, make_target, one_prompt
from tests.verdicts import BUNDLED
from tests.watched import Watched, unseen

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("llama", "sdpa", num_hidden_layers=6)


@contextmanager
def layer_calls(target: PreTrainedModel) -> Iterator[list[int]]:
    """Notes every call of a decoder layer, by the number of the layer."""
    calls: list[int] = []
    handles = [
        layer.register_forward_pre_hook(unseen(lambda *_, index=index: calls.append(index)))
        for index, layer in enumerate(LayerSlices(target).layers)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def test_target_on_which_trees_are_refused_is_refused_with_the_way_out() -> None:
    target = fresh_target("llama", "sdpa")
    drafter = make_specbound(target)
    AttentionInterface.register("no_trees", sdpa_attention_forward)
    AttentionMaskInterface.register("no_trees", sdpa_mask)
    target.config._attn_implementation = "no_trees"
    with pytest.raises(ValueError, match=r"no_trees.*sdpa.*SpecBound runs the target's own layers.*another method"):
        target.generate(torch.tensor([[3, 4, 5]]), **GREEDY, assistant_model=drafter)


# The rule.


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1.0])
def test_annealing_is_the_papers_formula(alpha: float) -> None:
    logits = torch.tensor([[1.5, -0.3, 0.2]])
    for layer in (1, 7, 20):
        rule = AnnealedConfidenceLogitsProcessor(layer, 20, alpha=alpha, threshold=0.5)
        temperature = 1 + alpha * (1 - layer / 20)
        assert torch.equal(rule(None, logits), logits / temperature)
        weights = [math.exp(value / temperature) for value in (1.5, -0.3, 0.2)]
        confidence, token = rule.confidence(logits)
        assert confidence.item() == pytest.approx(weights[0] / sum(weights))
        assert token.item() == 0


@pytest.mark.parametrize("learn_refusals", [False, True])
@pytest.mark.parametrize("batch", PROMPTS)
def test_a_token_is_drafted_at_the_first_exit_that_is_confident(
    target: PreTrainedModel, batch: str, learn_refusals: bool
) -> None:
    # Replayed without slices: hidden states of whole forwards over the same text, the same heads, the same rule.
    drafter = make_specbound(target, threshold=0.3, use_exit_layers=[1, 3, 4], d_max=4, learn_refusals=learn_refusals)
    repeats = 0
    prompts = PROMPTS[batch]()
    target.generate(**prompts, **GREEDY, assistant_model=drafter)
    output = target.generate(**prompts, **GREEDY)
    slices = LayerSlices(target)
    for row, (ids, mask) in enumerate(zip(output, prompts["attention_mask"], strict=True)):
        ids = ids[int((mask == 0).sum()) :][None]
        place = int(mask.sum())  # of the root: the first new token
        refused: set[tuple[int, int]] = set()
        for accepted in drafter.stats.per_step_accepted[row][:-1]:
            for step in range(accepted + 1):
                states = target(ids[:, : place + step + 1], output_hidden_states=True).hidden_states
                drafted = None
                for layer, rule in drafter.exit_rules().items():
                    confidence, token = rule.confidence(drafter.exit_logits(layer, states[layer][:, -1], slices))
                    if confidence >= 0.3:
                        drafted = int(token)
                        break
                last, following = ids[0, place + step : place + step + 2].tolist()
                pair = (last, drafted)
                known = learn_refusals and pair in refused
                right = step < drafter.options.w_max - 1 and drafted == following and not known
                assert right == (step < accepted)
                if drafted is None or known or step == drafter.options.w_max - 1:
                    repeats += known
                    continue
                (refused.discard if right else refused.add)(pair)
            place += accepted + 1
    if learn_refusals and batch != "batch of one":
        assert repeats  # the rule has had something to say


def test_of_a_chain_only_the_draft_that_was_refused_is_remembered(target: PreTrainedModel) -> None:
    # Those behind it were drafted for a text that is not there.
    drafter = make_specbound(target, learn_refusals=True)
    generator = EarlyExitGenerator(drafter, TargetModel(target, drafter.feature_layers(target)))
    generator.refused, generator.chains = [{(5, 1)}, set()], [[5, 1, 2, 3, 4], [7, 8]]
    generator.observe(
        Committed(
            token_ids=torch.tensor([[5, 1], [7, 8]]),
            features=None,
            position_ids=torch.tensor([[0, 1], [0, 1]]),
            valid=None,
            counts=Counts.of([2, 2]),
            target_logits=torch.zeros(2, 5, 64),
            tree=DraftTree.chain(torch.tensor([[5, 1, 2, 3, 4], [7, 8, 0, 0, 0]])),
        )
    )
    assert generator.refused == [{(1, 2)}, set()]


# The bounds.


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize(("w_max", "d_max"), [(1, 3), (2, 5), (4, 2), (6, 5)])
def test_layer_work_is_counted_and_bounded(target: PreTrainedModel, w_max: int, d_max: int, batch: str) -> None:
    drafter = make_specbound(target, w_max=w_max, d_max=d_max, threshold=0.2)
    drafter.check_target(target)  # runs a few layers, once in the life of a target
    watched = Watched(drafter)
    with layer_calls(target) as calls:
        target.generate(**PROMPTS[batch](), **GREEDY, use_cache=True, assistant_model=watched)
    stats, depth = watched.stats, 6
    in_rounds = len(calls) - depth  # the prefill runs every layer once
    assert stats.num_layers_run == in_rounds
    widths = [tree.num_nodes for tree in watched.trees]
    assert len(widths) == stats.num_target_forwards
    assert max(widths) <= w_max
    # Cut the calls into rounds: each ends with the last layer.
    rounds, start = [], depth
    for index, layer in enumerate(calls):
        if index >= depth and layer == depth - 1:
            rounds.append(calls[start : index + 1])
            start = index + 1
    for run, width in zip(rounds, widths, strict=True):
        assert len(run) <= width * d_max + (depth - d_max)
        assert all(run.count(layer) == 1 for layer in range(d_max, depth))  # deep layers once, for all tokens together
    assert stats.layers_per_token == pytest.approx(in_rounds / stats.num_target_forwards / stats.mean_acceptance_length)


def test_plain_rounds_of_other_methods_count_all_layers(target: PreTrainedModel) -> None:
    from tests.method_table import make_ngram

    drafter = make_ngram(target)
    target.generate(**one_prompt(), **GREEDY, assistant_model=drafter)
    assert drafter.stats.num_layers_run == 6 * drafter.stats.num_target_forwards


def test_hidden_states_kept_are_bounded_and_do_not_grow_with_the_prompt(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = []
    advance = PendingChain.advance

    def watched(self: PendingChain, layer: int) -> Tensor:
        state = advance(self, layer)
        num_nodes = sum(states.shape[1] for _, states in self._segments)
        most[-1] = max(most[-1], num_nodes)
        assert sum(states.numel() for _, states in self._segments) == num_nodes * 32
        return state

    monkeypatch.setattr(PendingChain, "advance", watched)
    for length in (4, 60):
        most.append(0)
        drafter = make_specbound(target, w_max=4, threshold=0.05)
        target.generate(**one_prompt(length=length), **GREEDY, assistant_model=drafter)
    assert most == [4, 4]


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.95])
def test_cache_after_generation_is_plain_decodings(target: PreTrainedModel, threshold: float, batch: str) -> None:
    prompts = PROMPTS[batch]()
    arguments = GREEDY | {"return_dict_in_generate": True}
    alone = target.generate(**prompts, **arguments, **{CACHE: DynamicCache()})
    drafter = make_specbound(target, threshold=threshold)
    assisted = target.generate(**prompts, **arguments, **{CACHE: DynamicCache()}, assistant_model=drafter)
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    seen = prompts["attention_mask"].bool()
    for own, theirs in zip(assisted[CACHE].layers, alone[CACHE].layers, strict=True):
        assert own.keys.shape == theirs.keys.shape
        tokens = torch.cat([seen, seen.new_ones(len(seen), own.keys.shape[2] - seen.shape[1])], 1)
        for part in ("keys", "values"):
            found, expected = (getattr(layer, part).transpose(1, 2)[tokens] for layer in (own, theirs))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_hidden_states_and_attentions_can_be_asked_for(target: PreTrainedModel) -> None:
    # Then a tree is verified by a whole forward, which nothing but the speed tells.
    arguments = GREEDY | {"return_dict_in_generate": True, "output_hidden_states": True}
    alone = target.generate(**one_prompt(), **arguments)
    assisted = target.generate(**one_prompt(), **arguments, assistant_model=make_specbound(target))
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    for own, theirs in zip(assisted.hidden_states, alone.hidden_states, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.* rounds fell back to plain decoding")
@pytest.mark.parametrize("batch", PROMPTS)
def test_heads_of_nan_change_no_token_and_are_counted(target: PreTrainedModel, batch: str) -> None:
    drafter = make_specbound(target)
    for head in drafter.heads.values():
        head.lora_A.data.fill_(float("nan"))
    prompts = PROMPTS[batch]()
    assisted = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert assisted.tolist() == target.generate(**prompts, **GREEDY).tolist()
    assert drafter.stats.num_plain_steps == drafter.stats.num_spec_steps
    assert drafter.stats.num_draft_tokens == 0
    # Difficult tokens cost what plain decoding costs.
    assert drafter.stats.layers_per_token == 6


@pytest.mark.parametrize(
    "settings", [{"head": "full"}, {"draft_vocab_size": 20}, {"head": "full", "draft_vocab_size": 20}]
)
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 3}])
def test_full_heads_and_reduced_vocabularies_draft_what_they_can_say(
    target: PreTrainedModel, settings: dict[str, Any], sampling: dict[str, Any]
) -> None:
    drafter = make_specbound(target, **settings, threshold=0.02)
    known = torch.arange(64)
    if "draft_vocab_size" in settings:
        known = torch.arange(3, 63, 3)
        drafter.set_vocabulary(known)
    prompts = PROMPTS["ragged batch of three"]()
    watched = Watched(drafter)
    assisted = target.generate(**prompts, **(GREEDY | sampling), assistant_model=watched)
    drawn = [tree.token_ids[:, 1:][tree.valid[:, 1:]] for tree in watched.trees if tree.num_nodes > 1]
    if not sampling:
        assert assisted.tolist() == target.generate(**prompts, **GREEDY).tolist()
    assert torch.isin(torch.cat(drawn), known).all()


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("draft_vocab_size", [64, 20])
def test_without_a_depth_bound_difficult_tokens_do_not_end_a_draft(
    target: PreTrainedModel, draft_vocab_size: int, batch: str
) -> None:
    drafter = make_specbound(target, threshold=0.999, d_max=6, w_max=4, draft_vocab_size=draft_vocab_size)
    if draft_vocab_size < 64:
        drafter.set_vocabulary(torch.arange(0, 60, 3))
    prompts = PROMPTS[batch]()
    assisted = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert assisted.tolist() == target.generate(**prompts, **GREEDY).tolist()
    # Every draft is the target's own choice, so every round is full and right.
    assert {kept for row in drafter.stats.per_step_accepted for kept in row} == {3}
    target.generate(**prompts, max_new_tokens=24, do_sample=True, top_k=5, assistant_model=drafter)
    assert drafter.stats.draft_acceptance_rate > 0.99


def test_merged_heads_follow_their_parameters(target: PreTrainedModel) -> None:
    drafter = make_specbound(target, draft_vocab_size=20)
    drafter.set_vocabulary(torch.arange(0, 60, 3))
    slices, states = LayerSlices(target), torch.randn(2, 32, dtype=target.dtype)
    for _ in range(2):
        torch.testing.assert_close(drafter.exit_logits(3, states, slices), drafter(3, states, slices).float())
        with torch.no_grad():
            drafter.heads["3"].lora_B.add_(0.1)


@pytest.mark.parametrize("settings", [{}, {"head": "full"}, {"draft_vocab_size": 20}], ids=str)
@pytest.mark.parametrize(("its_dtype", "targets"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_heads_may_have_another_dtype_than_the_target(its_dtype: str, targets: str, settings: dict[str, Any]) -> None:
    target = fresh_target("llama", "sdpa", getattr(torch, targets))
    drafter = make_specbound(target, **settings).to(getattr(torch, its_dtype))
    if "draft_vocab_size" in settings:
        drafter.set_vocabulary(torch.arange(0, 60, 3))
    target.generate(**one_prompt(), **GREEDY, assistant_model=drafter)
    assert drafter.stats.num_draft_tokens > 0


# On disk.


@pytest.mark.parametrize("settings", [{}, {"head": "full"}, {"draft_vocab_size": 20}])
def test_saved_and_loaded_it_drafts_the_same(target: PreTrainedModel, settings: dict[str, Any], tmp_path: Path) -> None:
    drafter = make_specbound(target, **settings, threshold=0.123, w_max=4)
    if "draft_vocab_size" in settings:
        drafter.set_vocabulary(torch.arange(0, 60, 3))
    runs = []
    drafter.save_pretrained(tmp_path)
    for each in (drafter, load_drafter(tmp_path, target)):
        target.generate(**one_prompt(), **GREEDY, assistant_model=each)
        runs.append((each.stats.per_step_accepted, each.stats.num_layers_run, each.options))
    assert runs[0] == runs[1]


def test_adapters_open_with_peft_and_give_the_exit_heads(tmp_path: Path) -> None:
    target = fresh_target("llama", "sdpa", torch.float32)
    drafter = make_specbound(target, target_name_or_path="owner/target")
    drafter.save_pretrained(tmp_path)
    assert sorted(folder.name for folder in tmp_path.glob("exit-layer-*")) == [f"exit-layer-0{n}" for n in (1, 2, 3)]
    assert json.loads((tmp_path / "exit-layer-02" / "adapter_config.json").read_text())["target_modules"] == ["lm_head"]
    states, slices = torch.randn(3, 32), LayerSlices(target)
    expected = drafter(2, states, slices)
    adapted = PeftModel.from_pretrained(target, tmp_path, subfolder="exit-layer-02")
    head = adapted.get_base_model().lm_head
    torch.testing.assert_close(head(slices.norm(states)), expected)


def test_saving_again_removes_adapters_of_layers_without_a_head(target: PreTrainedModel, tmp_path: Path) -> None:
    make_specbound(target).save_pretrained(tmp_path)
    make_specbound(target, exit_layers=[2], d_max=2).save_pretrained(tmp_path)
    assert [folder.name for folder in tmp_path.glob("exit-layer-*")] == ["exit-layer-02"]
    assert load_drafter(tmp_path).config.exit_layers == [2]


def test_full_heads_saved_over_adapters_are_loaded(target: PreTrainedModel, tmp_path: Path) -> None:
    make_specbound(target).save_pretrained(tmp_path)
    drafter = make_specbound(target, head="full")
    drafter.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("exit-layer-*"))
    loaded: Any = load_drafter(tmp_path, target)
    assert torch.equal(loaded.heads["2"].weight, drafter.heads["2"].weight)


def test_weights_of_the_callers_choice_saved_over_adapters_are_loaded(target: PreTrainedModel, tmp_path: Path) -> None:
    make_specbound(target, seed=1).save_pretrained(tmp_path)
    drafter = make_specbound(target, seed=2)
    drafter.save_pretrained(tmp_path, state_dict=drafter.state_dict())
    loaded = load_drafter(str(tmp_path))
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(loaded.dtype)), name


def test_scaled_adapters_are_read_as_peft_would_apply_them(target: PreTrainedModel, tmp_path: Path) -> None:
    drafter = make_specbound(target)
    drafter.save_pretrained(tmp_path)
    file = tmp_path / "exit-layer-02" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 6}))  # twice the rank
    loaded = load_drafter(tmp_path)
    torch.testing.assert_close(loaded.heads["2"].lora_B, 2 * drafter.heads["2"].lora_B)


# ExitCalibration.


def test_calibration_picks_what_the_speedup_model_prefers_and_keeps_it(tmp_path: Path) -> None:
    target = fresh_target("llama", "sdpa", torch.float32, num_hidden_layers=6)
    drafter = make_specbound(target, threshold=0.9)
    prompts = [one_prompt(length=length)["input_ids"][0] for length in (5, 8, 11)]
    result = drafter.calibrate(prompts, target, new_tokens=12, widths=(2, 4))
    assert (drafter.options.threshold, drafter.options.w_max) == (result.chosen["threshold"], result.chosen["w_max"])
    assert drafter.exits == result.chosen["use_exit_layers"]
    assert "predicted speedup" in str(result)
    drafter.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path, target)
    assert loaded.exits == drafter.exits
    assert loaded.config.calibration == json.loads(json.dumps(result.to_record()))
    assert result.summary in (tmp_path / "README.md").read_text()
    alone = target.generate(**one_prompt(), **GREEDY)
    assert target.generate(**one_prompt(), **GREEDY, assistant_model=loaded).tolist() == alone.tolist()


def test_calibration_remembers_the_target_it_was_paired_with(target: PreTrainedModel) -> None:
    drafter = make_specbound(target)
    with pytest.raises(ValueError, match=r"calibrate\(\) needs a target: pass target=, or call generate"):
        drafter.calibrate([[5, 6, 7]])
    target.generate(**one_prompt(), **GREEDY, assistant_model=drafter)
    drafter.calibrate([[5, 6, 7]], new_tokens=6, widths=(3,))
    assert drafter.options.w_max == 3


def test_calibration_without_prompts_or_tokenizer_says_so(target: PreTrainedModel) -> None:
    drafter = make_specbound(target)
    with pytest.raises(ValueError, match="got no prompts"):
        drafter.calibrate([], target)
    with pytest.raises(ValueError, match="got text, but the tokenizer of"):
        drafter.calibrate(["text"], target)


def test_predicted_speedup_is_eq_5_where_its_assumptions_hold() -> None:
    # Layers that cost the same for any number of tokens, heads and all else nothing, every exit at d, always right.
    import numpy as np

    depth, width, layers, positions = 5, 4, 20, 4000
    times = calibrating.Times({1: 1.0, 16: 1.0}, {depth: 0.0}, 0.0)
    ones = np.ones(positions, dtype=bool)
    predicted = calibrating.predicted_speedup(
        depth * ones, ones, {depth: ones}, [positions], width, times, layers, float(layers)
    )
    # Our last position runs straight on, so that (w - 1) d + L layers give w tokens: Eq. 5 for alpha -> 1.
    assert predicted == pytest.approx(layers * width / (width * depth + layers - depth), rel=1e-3)


# What is refused.

CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "order": ({"exit_layers": [3, 1]}, r"exit layers \[3, 1\] must ascend without repetition: \[1, 3\]"),
    "twice": ({"exit_layers": [1, 1]}, r"exit layers \[1, 1\] must ascend"),
    "beyond": ({"exit_layers": [2, 6]}, r"exit layers \[2, 6\] must be from 1 to 5.*target has 6"),
    "below": ({"exit_layers": [0, 2]}, r"exit layers \[0, 2\] must be from 1 to 5"),
    "none": ({"exit_layers": []}, r"exit layers \[\] must be a list of at least one integer"),
    "head": ({"head": "tiny"}, r"head is 'tiny'; it must be one of \['lora', 'full'\]"),
    "vocabulary": ({"draft_vocab_size": 65}, "draft_vocab_size is 65, but the target's vocabulary has 64"),
    "threshold": ({"threshold": 1.0}, r"threshold=1.0 must be between 0 and 1, both excluded"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_config_that_makes_no_drafter_is_refused(case: str) -> None:
    fields, message = CONFIGS[case]
    shape = {"num_target_layers": 6, "hidden_size": 32, "vocab_size": 64, "exit_layers": [1, 3], "lora_rank": 2}
    with pytest.raises(ValueError, match=message):
        SpecBoundDrafter(SpecBoundConfig(**shape | fields))


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "zero threshold": ({"threshold": 0.0}, "threshold=0.0 must be between 0 and 1"),
    "high threshold": ({"threshold": 1.5}, "threshold=1.5 must be between 0 and 1"),
    "alpha": ({"alpha": -0.1}, r"alpha=-0.1 must be 0 \(no annealing\) or more"),
    "width": ({"w_max": 0}, "w_max=0 must be an integer from 1 to 1024"),
    "depth": ({"d_max": 7}, "d_max=7 must be an integer from 1 to 6, the layers of the target"),
    "no head": ({"use_exit_layers": [1, 2]}, r"has \[1\], but there are heads only for \[2, 4\]"),
    "no exit": ({"d_max": 1}, "No exit is left: d_max=1, but the first exit layer in use is 2"),
    "method": ({"method": "specbond"}, "has only the method 'specbound': leave method out"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_option_out_of_range_is_refused(target: PreTrainedModel, case: str) -> None:
    options, message = OPTIONS[case]
    with pytest.raises(ValueError, match=message):
        make_specbound(target, exit_layers=[2, 4]).set_options(**options)


def gemma() -> PreTrainedModel:
    """Of a family without a layout."""
    config = GemmaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(3)
    return GemmaForCausalLM._from_config(config, dtype=torch.float64).eval()


def test_unknown_family_is_named_with_how_to_add_it() -> None:
    target = gemma()
    with pytest.raises(ValueError, match=r"decoder family 'gemma', whose layers are not\s+known to be exact.*LAYOUTS"):
        target.generate(**one_prompt(), **GREEDY, assistant_model=make_specbound(target))


def test_family_whose_layout_is_wrong_is_found_out() -> None:
    target = gemma()
    LAYOUTS["gemma"] = StepLayout(logits=lambda model, logits: logits / 2)
    try:
        with pytest.raises(ValueError, match="run in slices give logits that differ by .* 'gemma' in LAYOUTS"):
            make_specbound(target).check_target(target)
    finally:
        del LAYOUTS["gemma"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_hidden_layers": 7}, "trained for a target of 6 layers, but target 'LlamaForCausalLM' has 7"),
        (
            {"hidden_size": 16},
            "reads target hidden states of size 32, but .* has hidden_size 16",
        ),
        ({"vocab_size": 80}, "trained for a vocabulary of 64, but target 'LlamaForCausalLM' has 80"),
        ({"seed": 9}, "holds adapters trained for another target: values of the head of 'LlamaForCausalLM'"),
    ],
)
def test_adapters_trained_for_another_target_are_refused(
    target: PreTrainedModel, settings: dict[str, Any], message: str
) -> None:
    pytest.importorskip("datasets", reason="training needs the extra hf_specdec[train]")
    from hf_specdec.methods.specbound.training import new_drafter

    drafter = new_drafter(target, exit_layers=[1, 3], lora_rank=2)
    other = make_target("llama", "sdpa", **{"num_hidden_layers": 6, **settings})
    with pytest.raises(ValueError, match=message):
        other.generate(**one_prompt(), **GREEDY, assistant_model=drafter)
    drafter.check_target(copy.deepcopy(target).half())  # the same weights in another dtype are the same target


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "exit-layer-02 of .* cannot be read as a PEFT LoRA"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x"), "cannot be read as a PEFT LoRA"),
        (lambda folder: folder.rename(folder.parent / "exit-layer-two"), "does not end in a layer number"),
        (lambda folder: folder.rename(folder.parent / "exit-layer-05"), "missing: heads.2.lora_A.*heads.2.lora_B"),
    ],
)
def test_damaged_adapters_are_refused(damage: Any, message: str, target: PreTrainedModel, tmp_path: Path) -> None:
    make_specbound(target, exit_layers=[2, 4]).save_pretrained(tmp_path)
    damage(tmp_path / "exit-layer-02")
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path, target)


def test_vocabulary_that_does_not_fit_is_refused(target: PreTrainedModel) -> None:
    drafter = make_specbound(target, draft_vocab_size=20)
    with pytest.raises(ValueError, match=r"must be 20 ascending ids, but got \[3\] of them, ascending"):
        drafter.set_vocabulary(torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r"gives target ids from 50 to 69"):
        drafter.set_vocabulary(torch.arange(50, 70))


# Table 2 of the paper.


@pytest.mark.parametrize("sampling", ["low temperature and top-p", "temperature 1 and top-p"])
def test_sampled_tokens_follow_the_target_at_the_papers_settings(sampling: str) -> None:
    target = test_sampling.sampled_target()
    drawn = test_sampling.draw(target, torch.tensor([test_sampling.PROMPT]), sampling, METHODS["specbound"](target))
    assert_follows(test_sampling.count(drawn), test_sampling.enumerate_law(target, test_sampling.PROMPT, sampling))


# Targets whose layers do something else in slices, and only seem to.


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.* is deprecated")
def test_a_target_in_training_with_checkpointing_is_tried_once_its_layers_use_the_cache() -> None:
    target = fresh_target("llama", "sdpa")
    drafter = make_specbound(target)
    target.gradient_checkpointing_enable()
    target.train()
    drafter.check_target(target)
    with pytest.raises(ValueError, match="training mode with gradient checkpointing"):
        target.generate(**one_prompt(), **GREEDY, assistant_model=drafter)
    target.eval()
    alone = target.generate(**one_prompt(), **GREEDY)
    assert target.generate(**one_prompt(), **GREEDY, assistant_model=drafter).tolist() == alone.tolist()


def test_activations_that_are_quantised_are_no_fault_of_the_layout() -> None:
    quantisation = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    target: Any = AutoModelForCausalLM.from_pretrained(BUNDLED / "target", dtype="float32")
    quantisation.quantize_(target, quantisation.Int8DynamicActivationInt8WeightConfig())
    load_drafter(BUNDLED / "specbound", target=target)


def test_functions_that_slices_do_not_run_are_named() -> None:
    target = fresh_target("llama", "sdpa")
    drafter = make_specbound(target)
    drafter.check_target(target)
    with target.model.embed_tokens.register_forward_hook(lambda module, args, rows: -rows):  # type: ignore[union-attr]
        drafter.check_target(target)  # slices run this module too

    def negated(module: torch.nn.Module, args: Any, output: Any) -> None:
        output.last_hidden_state = -output.last_hidden_state

    found = pytest.raises(ValueError, match=r"run in slices.*negated' of model may change what lies between them")
    with target.model.register_forward_hook(negated), found:
        drafter.check_target(target)
