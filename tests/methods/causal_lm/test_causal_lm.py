"""Draft models: what they draft against a plain run of the same model, their cache, when they stop, and bad pairs."""

from __future__ import annotations

import itertools
import json
import logging
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec import load_drafter
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.decoding.upstream import CACHE
from hf_specdec.methods.causal_lm.drafting import acceptance_bound
from hf_specdec.methods.causal_lm.network import CausalLMDrafter
from tests.method_table import make_causal_lm, make_causal_lm_chain
from tests.targets import FAMILIES, PROMPTS, fresh_target, make_target, tiny_tokenizer
from tests.watched import Watched

GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}


def log_probs_after(model: PreTrainedModel, text: list[int], padding: int) -> Tensor:
    """[vocab] float64: what the draft model alone says after a text, its left padding left out."""
    with torch.no_grad():
        return model(torch.tensor([text[padding:]])).logits[0, -1].float().log_softmax(-1).double()


def paths_of(tree: DraftTree, row: int) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, int(tree.valid[row].sum())):
        paths.append((*paths[int(tree.parents[row, node])], int(tree.token_ids[row, node])))
    return set(paths[1:])


def padding_of(prompts: dict[str, Tensor]) -> list[int]:
    return (prompts["attention_mask"] == 0).sum(1).tolist()


@pytest.mark.usefixtures("whole_batch")
@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("family", ["llama", "qwen3-mixed", "gpt2", "mistral-sliding", "gemma3"])
def test_chains_are_the_draft_models_greedy_continuation_in_every_round(family: str, batch: str) -> None:
    target, prompts = make_target(family, "sdpa"), PROMPTS[batch]()
    drafter = make_causal_lm_chain(target)
    watched = Watched(drafter)
    target.generate(**prompts, **GREEDY, assistant_model=watched)
    assert sum(map(sum, watched.stats.per_step_accepted)) > 0
    for drafted in watched.rounds[:6]:
        for row, padding in enumerate(padding_of(prompts)):
            text = drafted.text(row)
            for token in drafted.tree.token_ids[row, 1:].tolist():
                assert token == int(log_probs_after(drafter.model, text, padding).argmax())
                text.append(token)


def best_tree(model: PreTrainedModel, text: list[int], padding: int, budget: int, depth: int) -> set[tuple[int, ...]]:
    """The likeliest `budget` paths of at most `depth` tokens, by following the likeliest `budget` of every level."""
    level, scored = {(): 0.0}, {}
    for _ in range(depth):
        following = {}
        for path, score in level.items():
            for token, log_prob in enumerate(log_probs_after(model, [*text, *path], padding).tolist()):
                following[(*path, token)] = score + log_prob
        level = dict(sorted(following.items(), key=lambda item: -item[1])[:budget])
        scored |= level
    return set(sorted(scored, key=lambda path: -scored[path])[:budget])


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("family", ["llama", "qwen3-mixed", "gpt2", "mistral-sliding"])
def test_wide_trees_hold_the_likeliest_paths_there_are(family: str, batch: str) -> None:
    target, prompts = make_target(family, "sdpa"), PROMPTS[batch]()
    drafter = make_causal_lm(target, tree_budget=6, top_k=6, depth=3)
    watched = Watched(drafter)
    target.generate(**prompts, **GREEDY, assistant_model=watched)
    assert sum(map(sum, watched.stats.per_step_accepted)) > 0
    for drafted in watched.rounds[:4]:
        for row, padding in enumerate(padding_of(prompts)):
            if drafted.context.active[row]:
                text = drafted.text(row)
                assert paths_of(drafted.tree, row) == best_tree(drafter.model, text, padding, 6, 3)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"tree_budget": 1}, {"top_k": 2, "tree_budget": 30}, {"depth": 1}])
@pytest.mark.usefixtures("whole_batch")
def test_narrow_trees_keep_to_their_width_budget_and_depth(options: dict[str, int]) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    drafter = make_causal_lm(target, **options)
    watched = Watched(drafter)
    alone = target.generate(**prompts, **GREEDY)
    assert target.generate(**prompts, **GREEDY, assistant_model=watched).tolist() == alone.tolist()
    for tree in watched.trees:
        assert tree.num_nodes <= 1 + drafter.options.tree_budget
        assert int(tree.depths.max()) <= drafter.options.depth
        for row in range(3):
            children = [path[:-1] for path in paths_of(tree, row)]
            for depth in range(drafter.options.depth):
                expanded = {path for path in children if len(path) == depth}
                assert len(expanded) <= drafter.options.top_k
                assert all(children.count(path) <= drafter.options.top_k for path in expanded)


@pytest.mark.parametrize("method", ["causal_lm_chain", "causal_lm_tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_draft(family: str, method: str) -> None:
    target, prompts = make_target(family, FAMILIES[family][2][-1]), PROMPTS["batch of one"]()
    drafter = make_causal_lm(target, noise=0.0, method=method, top_k=6, tree_budget=40)
    alone = target.generate(**prompts, **GREEDY)
    assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
    # The draft model is the target: its greedy chain is accepted whole, and is mostly among the likeliest paths.
    assert drafter.stats.mean_acceptance_length >= (4 if method == "causal_lm_chain" else 2.5)


@pytest.mark.parametrize("method", ["causal_lm_chain", "causal_lm_tree"])
def test_a_round_costs_one_forward_per_level(method: str) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = make_causal_lm(target, method=method, depth=4, top_k=9, tree_budget=64)
    widths: list[int] = []

    def count(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        widths.append(kwargs["input_ids"].shape[1])

    drafter.model.register_forward_pre_hook(count, with_kwargs=True)
    target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert len(widths) == 1 + 4 * drafter.stats.num_target_forwards
    # The root, and before it a leaf that was accepted without having been run.
    assert set(widths[1::4]) <= {1, 2}


def test_sampled_chains_carry_the_law_they_were_drawn_from() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    drafter = make_causal_lm_chain(target)
    watched = Watched(drafter)
    target.generate(
        **prompts,
        max_new_tokens=8,
        do_sample=True,
        temperature=0.7,
        top_k=9,
        repetition_penalty=1.3,
        assistant_model=watched,
    )
    for drafted in watched.rounds:
        assert drafted.tree.draft_probs is not None
        for row, padding in enumerate(padding_of(prompts)):
            text = drafted.text(row)
            for law, token in zip(drafted.tree.draft_probs[row], drafted.tree.token_ids[row, 1:].tolist(), strict=True):
                logits = log_probs_after(drafter.model, text, padding) / 0.7
                logits[logits < logits.topk(9).values[-1]] = -torch.inf
                torch.testing.assert_close(law.double(), logits.softmax(-1), rtol=1e-4, atol=1e-6)
                text.append(token)
    drafter.set_options(sample_drafts=False)
    target.generate(**prompts, max_new_tokens=8, do_sample=True, assistant_model=watched)
    assert watched.trees[-1].draft_probs is None


# When drafting stops.


@pytest.mark.parametrize("method", ["causal_lm_chain", "causal_lm_tree"])
@pytest.mark.parametrize("options", [{"min_confidence": 0.3}, {"min_acceptance": 0.6}, {"min_confidence": 1.0}])
def test_no_node_hangs_below_one_that_should_have_ended_the_path(options: dict[str, float], method: str) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    drafter = make_causal_lm(target, method=method, **options)
    watched = Watched(drafter)
    alone = target.generate(**prompts, **GREEDY)
    assert target.generate(**prompts, **GREEDY, assistant_model=watched).tolist() == alone.tolist()
    sizes = set()
    for drafted in watched.rounds[:5]:
        for row, padding in enumerate(padding_of(prompts)):
            if not drafted.context.active[row]:
                continue
            text = drafted.text(row)
            paths = paths_of(drafted.tree, row)
            sizes.add(max(map(len, paths)))
            for path in paths:
                laws = [log_probs_after(drafter.model, [*text, *path[:depth]], padding) for depth in range(len(path))]
                for depth in range(1, len(path)):
                    confidence = math.exp(
                        sum(float(law[token]) for law, token in zip(laws[:depth], path, strict=False))
                    )
                    assert confidence >= options.get("min_confidence", 0.0) - 1e-6
                    bound = float(acceptance_bound(laws[depth - 1], 0.2))
                    assert bound >= options.get("min_acceptance", -math.inf) - 1e-6
    assert 1 in sizes, "no path ended early, so nothing was tested"


def test_sampled_drafts_that_stop_early_follow_the_target() -> None:
    from tests.decoding.test_sampling import PROMPT, assert_follows, count, draw, enumerate_law, sampled_target

    target = sampled_target()
    drafter = make_causal_lm_chain(target, noise=0.1, min_confidence=0.2, min_acceptance=0.45)
    drawn = draw(target, torch.tensor([PROMPT]), "temperature", drafter)
    assert_follows(count(drawn), enumerate_law(target, PROMPT, "temperature"))
    lengths = drafter.stats.num_draft_tokens / drafter.stats.num_spec_steps
    assert 1 < lengths < 3, "no path ended early, or all did"


# Drafts that are worth nothing, and texts that the draft model cannot follow.


@pytest.mark.filterwarnings("ignore:.* rounds fell back to plain decoding")
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("method", ["causal_lm_chain", "causal_lm_tree"])
def test_a_draft_model_that_says_nan_changes_nothing(method: str, do_sample: bool) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    drafter = make_causal_lm(target, method=method)
    drafter.model.lm_head.weight.data.fill_(float("nan"))
    output = target.generate(**prompts, max_new_tokens=6, do_sample=do_sample, assistant_model=drafter)
    assert drafter.stats.num_draft_tokens == 0
    assert drafter.stats.num_plain_steps == drafter.stats.num_spec_steps
    if not do_sample:
        assert output.tolist() == target.generate(**prompts, max_new_tokens=6, do_sample=False).tolist()


def test_text_beyond_the_draft_models_positions_is_decoded_plainly(caplog: pytest.LogCaptureFixture) -> None:
    target = make_target("gpt2", "sdpa")
    drafter = CausalLMDrafter(fresh_target("gpt2", "sdpa", max_position_embeddings=16))
    prompts = PROMPTS["batch of one"]()
    alone = target.generate(**prompts, **GREEDY)
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        assisted = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert assisted.tolist() == alone.tolist()
    assert drafter.stats.num_draft_tokens > 0
    assert [record.getMessage() for record in caplog.records] == [
        "The draft model has 16 positions and the text is longer: the rest is decoded without drafts."
    ]


def test_a_prompt_given_as_embeddings_is_decoded_all_the_same() -> None:
    target = make_target("llama", "sdpa")
    arguments = {"inputs_embeds": target.get_input_embeddings()(torch.tensor([[5, 6, 7, 8]])), **GREEDY}
    alone = target.generate(**arguments)
    for method in ("causal_lm_chain", "causal_lm_tree"):
        drafter = make_causal_lm(target, method=method)
        assert target.generate(**arguments, assistant_model=drafter).tolist() == alone.tolist()


def test_a_cache_to_continue_and_other_dtypes() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    for method, dtype in itertools.product(("causal_lm_chain", "causal_lm_tree"), (torch.float32, torch.bfloat16)):
        drafter = make_causal_lm(target, method=method).to(dtype)
        first = target.generate(**prompts, **GREEDY, return_dict_in_generate=True, assistant_model=drafter)
        mask = torch.cat([prompts["attention_mask"], torch.ones(3, 16, dtype=torch.int64)], 1)
        more = {"attention_mask": mask, **GREEDY}
        continued = target.generate(first.sequences, **{CACHE: first[CACHE]}, assistant_model=drafter, **more)
        assert continued.tolist() == target.generate(first.sequences, **more).tolist()
        assert drafter.dtype == dtype


# Pairs and options that do not fit.


def test_another_vocabulary_raises_with_both_sizes() -> None:
    target = make_target("llama", "sdpa")
    drafter = CausalLMDrafter(fresh_target("llama", "sdpa", vocab_size=80))
    message = r"Draft model 'LlamaForCausalLM' has a vocabulary of 80, but target 'LlamaForCausalLM' has one of 64"
    with pytest.raises(ValueError, match=message):
        target.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=drafter)


def test_a_larger_draft_model_warns_once_and_drafts() -> None:
    target = make_target("llama", "sdpa", num_hidden_layers=2)
    drafter = CausalLMDrafter(make_target("llama", "sdpa"), tree_budget=8)
    with pytest.warns(
        UserWarning, match=r"has [\d,]+ parameters, more than the [\d,]+ of target .*Check that the two are not swapped"
    ):
        target.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=drafter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=drafter)
    assert drafter.stats.num_draft_tokens > 0


def test_sizes_are_not_compared_with_a_target_whose_weights_are_no_parameters() -> None:
    class Buffered(torch.nn.Module):
        def __init__(self, linear: torch.nn.Linear) -> None:
            super().__init__()
            self.in_features, self.out_features = linear.in_features, linear.out_features
            self.register_buffer("weight", linear.weight.detach())

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(rows, self.weight)

    target = fresh_target("llama", "sdpa")
    drafter = CausalLMDrafter(fresh_target("llama", "sdpa"))
    for layer in target.model.layers:
        for name in ("up_proj", "down_proj", "gate_proj"):
            setattr(layer.mlp, name, Buffered(getattr(layer.mlp, name)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=drafter)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "tree"}, "Unknown method 'tree'.*Known: 'causal_lm_chain', 'causal_lm_tree'"),
        ({"depth": 0}, "depth=0 must be an integer from 1 to 256"),
        ({"top_k": 1.5}, "top_k=1.5 must be an integer"),
        ({"min_confidence": 0.0}, "min_confidence=0.0 must be above 0 and at most 1, or None"),
        ({"min_acceptance": 2}, "min_acceptance=2 must be above 0 and at most 1, or None"),
        ({"entropy_weight": -1}, "entropy_weight=-1 must be a positive number"),
        ({"sample_drafts": 1}, "sample_drafts=1 must be True or False"),
        ({"budget": 4}, "Unknown drafting option 'budget'"),
    ],
)
def test_bad_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_causal_lm(make_target("llama", "sdpa"), **options)


# Folders.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fresh_target("llama", "sdpa", torch.float32, num_hidden_layers=2).save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


def test_folder_of_a_plain_language_model_gives_a_drafter(folder: Path) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    drafter = load_drafter(folder, target, method="causal_lm_chain", depth=2)
    assert isinstance(drafter, CausalLMDrafter)
    assert (drafter.method, drafter.options.depth, drafter.dtype) == ("causal_lm_chain", 2, torch.float64)
    assert drafter.name_or_path == str(folder)
    assert not drafter.model.training
    stored = load_file(folder / "model.safetensors")
    for name, tensor in drafter.model.state_dict().items():
        torch.testing.assert_close(tensor, stored[name].double(), rtol=0, atol=0)
    alone = target.generate(**prompts, **GREEDY)
    assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
    assert drafter.stats.num_draft_tokens > 0
    assert load_drafter(folder).dtype == torch.float32


def test_saved_draft_model_loads_and_drafts_the_same(tmp_path: Path) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = make_causal_lm(target)
    drafter.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path, target, depth=3, tree_budget=9, top_k=3)
    for each in (drafter, loaded):
        target.generate(**prompts, **GREEDY, assistant_model=each)
    assert loaded.stats.per_step_accepted == drafter.stats.per_step_accepted


def test_bad_folders_and_pairs_raise_before_weights_are_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "elsewhere")
    with pytest.raises(ValueError, match=r"has a vocabulary of 64, but target .* has one of 80"):
        load_drafter(folder, fresh_target("llama", "sdpa", vocab_size=80))
    with pytest.raises(ValueError, match="depth=0 must be"):
        load_drafter(folder, depth=0)
    with pytest.raises(FileNotFoundError, match=r"has neither model.safetensors nor"):
        load_drafter(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": "four"}))
    with pytest.raises(ValueError, match=r"config.json of '.*draft' does not describe a causal_lm drafter"):
        load_drafter(folder)


@pytest.mark.parametrize("change", ["missing", "unexpected", "of another shape"])
def test_weights_that_are_not_the_models_raise(folder: Path, change: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    if change == "missing":
        tensors.pop("model.layers.1.mlp.up_proj.weight")
    elif change == "of another shape":
        tensors["model.norm.weight"] = torch.zeros(16)
    else:
        tensors["fc.weight"] = torch.zeros(32, 64)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    names = r"(model.layers.1|fc.weight|model.norm.weight \[16\] in the files and \[32\] by the config)"
    with pytest.raises(ValueError, match=rf"those of the LlamaForCausalLM .*: {change}: {names}"):
        load_drafter(folder)


def test_tokenizers_that_differ_raise_with_the_first_differing_token(folder: Path, tmp_path: Path) -> None:
    fresh_target("llama", "sdpa", torch.float32).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    target = type(make_target("llama")).from_pretrained(tmp_path / "target")
    load_drafter(folder, target)  # without a tokenizer of its own there is nothing to compare
    tiny_tokenizer().save_pretrained(folder)
    load_drafter(folder, target)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    names = {index: token for token, index in vocabulary.items()}
    vocabulary[names[30]], vocabulary[names[40]] = 40, 30
    file.write_text(json.dumps(content))
    message = rf"different tokenizers: id 30 is '{names[40]}' in the draft model's and '{names[30]}' in the target's"
    with pytest.raises(ValueError, match=message):
        load_drafter(folder, target)
