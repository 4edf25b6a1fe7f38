"""The numbers of the reference implementations; `tests/data/golden/README.md` says where they come from.

Tolerances are those of the sets' own README: rtol 1e-4 and atol 2e-5 for hidden states, logits, keys and values;
everything of integer or bool type exact.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from hf_specdec import load_drafter
from hf_specdec.decoding.accept import follow
from hf_specdec.decoding.exchange import Committed, DraftContext
from hf_specdec.decoding.state import Counts
from hf_specdec.drafting.drafter import always_drafting
from hf_specdec.methods.ddtree import level_tree
from hf_specdec.methods.dflash.drafting import DFlashMarginals
from hf_specdec.methods.dflash.network import DFlashConfig, DFlashDrafter
from tests.trees import heap_tree
from tests.watched import Watched

TESTS = Path(__file__).parent
FOLDERS = (TESTS / "data" / "golden", TESTS / "data")
TOLERANCES = {"rtol": 1e-4, "atol": 2e-5}
BUILDERS = {"Algorithm 1 of the tests": heap_tree, "level by level": level_tree}


def golden(pattern: str) -> list[Any]:
    """Parameters: all files that match."""
    files = [file for folder in FOLDERS for file in sorted(folder.glob(pattern))]
    assert files, f"no {pattern} in {FOLDERS}"
    return [pytest.param(file, id=file.stem) for file in files]


def metadata(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as tensors:
        return tensors.metadata()


def part_of(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class StandInTarget:
    """What DFlash borrows of a target: embeddings (the golden block's) and a head (whose output is not looked at)."""

    def __init__(self, config: DFlashConfig) -> None:
        self.model = self
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.fixture(autouse=True)
def every_round_drafts() -> Iterator[None]:
    """What references draft is compared, whether drafting pays on this machine or not."""
    with always_drafting():
        yield


@pytest.mark.parametrize("file", golden("dflash_forward_*.safetensors"))
def test_dflash_draft_equals_the_reference_round_by_round(file: Path) -> None:
    tensors = load_file(file)
    config = DFlashConfig(**json.loads(metadata(file)["config"]))
    drafter = DFlashDrafter(config).eval()
    drafter.load_state_dict(part_of(tensors, "weights."))
    outputs: list[Tensor] = []
    drafter.norm.register_forward_hook(lambda module, args, output: outputs.append(output))
    rounds = len({name.split(".")[0] for name in tensors if name.startswith("round")})
    assert rounds > 0

    start = 0
    target = StandInTarget(config)
    marginals = DFlashMarginals(drafter, target)
    for index in range(rounds):
        features = tensors[f"round{index}.target_hidden"]
        new = features.shape[1]
        projected = drafter.hidden_norm(drafter.fc(features))
        torch.testing.assert_close(projected, tensors[f"round{index}.context_projected"], **TOLERANCES)
        marginals.observe(
            Committed(
                token_ids=torch.zeros(1, new, dtype=torch.int64),
                features=features,
                position_ids=torch.arange(start, start + new)[None],
                valid=torch.ones(1, new, dtype=torch.bool),
                counts=Counts.of([new]),
                target_logits=features,
            )
        )
        start += new
        block = tensors[f"round{index}.noise_embedding"]
        target.embeddings.weight.data[0] = block[0, 0]
        target.embeddings.weight.data[config.mask_token_id] = block[0, 1]
        with torch.no_grad():
            marginals.marginals(
                DraftContext(
                    root_ids=torch.tensor([0]),
                    root_positions=torch.tensor([start]),
                    sequences=torch.zeros(1, start + 1, dtype=torch.int64),
                    lengths=[start + 1],
                    active=[True],
                )
            )
        torch.testing.assert_close(outputs[index], tensors[f"round{index}.expected_output"], **TOLERANCES)
        for name, expected in part_of(tensors, f"round{index}.cache_after_crop.").items():
            layer, kind = name.removeprefix("layer").split(".")
            held = getattr(marginals.cache.layers[int(layer)], {"key": "keys", "value": "values"}[kind])
            torch.testing.assert_close(held[:, :, :start], expected, **TOLERANCES)


def tree_cases() -> list[Any]:
    parameters = []
    for entry in golden("ddtree_build_*.safetensors"):
        (file,) = entry.values
        for case in json.loads(metadata(file)["cases"]):
            key = f"{case['case']}.budget{case['budget']}"
            parameters.append(pytest.param(file, case, id=f"{file.stem}-{key}"))
    return parameters


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize(("file", "case"), tree_cases())
def test_tree_and_walk_equal_the_reference_node_for_node(file: Path, case: dict[str, Any], builder: str) -> None:
    tensors = load_file(file)
    expected = part_of(tensors, f"{case['case']}.budget{case['budget']}.")
    tree = BUILDERS[builder](torch.tensor([0]), tensors[f"{case['case']}.logits"][None], case["budget"])

    assert tree.valid.all()
    assert tree.token_ids[0, 1:].tolist() == expected["node_token_ids"].tolist()
    assert tree.depths[0, 1:].tolist() == expected["node_depths"].tolist()
    assert tree.parents[0].tolist() == expected["parents"].tolist()
    if "visibility" in expected:  # not for the largest tree
        torch.testing.assert_close(tree.ancestor_mask[0], expected["visibility"], rtol=0, atol=0)

    path, num_accepted, bonus_ids = follow(tree, expected["walk_posterior"][None])
    accepted = expected["walk_accepted_indices"].tolist()
    assert path[0, : int(num_accepted) + 1].tolist() == accepted
    assert int(bonus_ids) == int(expected["walk_next_token"])


def load_pair(file: Path, attention: str) -> tuple[PreTrainedModel, DFlashDrafter, dict[str, Any], dict[str, Tensor]]:
    facts, tensors = json.loads(file.read_text()), load_file(file.with_suffix(".safetensors"))
    config = CONFIG_MAPPING[facts["target_config"]["model_type"]](**facts["target_config"])
    config._attn_implementation = attention
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    target.load_state_dict(part_of(tensors, "target."))
    target.generation_config.update(eos_token_id=None, pad_token_id=0)
    drafter = DFlashDrafter(DFlashConfig(**facts["draft_config"])).eval()
    drafter.load_state_dict(part_of(tensors, "draft."))
    return target, drafter, facts, tensors


def runs(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The recorded runs and the drafting options that repeat them."""
    trees = {f"ddtree_budget{budget}": {"method": "ddtree", "tree_budget": budget} for budget in facts["budgets"]}
    return {"dflash": {"method": "dflash"}, **trees}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("file", golden("ddtree_generate_*.json"))
def test_generated_ids_and_acceptance_lengths_equal_the_reference(file: Path, attention: str) -> None:
    target, drafter, facts, tensors = load_pair(file, attention)
    new = facts["max_new_tokens"]
    if "prompt0.prefill_logits" in tensors:
        with torch.no_grad():
            logits = target(torch.tensor([facts["prompts"][0]["prompt_ids"]])).logits
        torch.testing.assert_close(logits, tensors["prompt0.prefill_logits"], **TOLERANCES)
    for prompt in facts["prompts"]:
        ids = torch.tensor([prompt["prompt_ids"]])
        assert target.generate(ids, max_new_tokens=new, do_sample=False)[0].tolist() == prompt["greedy_ids"]
        for name, options in runs(facts).items():
            drafter.set_options(**options)
            output = target.generate(ids, assistant_model=drafter, max_new_tokens=new, do_sample=False)
            assert output[0].tolist() == prompt[name]["output_ids"], name

            expected = prompt[name]["acceptance_lengths"]
            lengths = [1 + accepted for accepted in drafter.stats.per_step_accepted[0]]
            assert lengths == expected[: len(lengths)], name
            # The reference runs one more round when it lands exactly on the limit; nothing else may be missing.
            missing = expected[len(lengths) :]
            assert len(missing) <= 1, name
            if missing:
                assert 1 + sum(lengths) == new, name


@pytest.mark.parametrize("file", golden("ddtree_generate_*.json"))
def test_runs_with_a_stop_token_end_where_the_reference_ends(file: Path) -> None:
    target, drafter, facts, _ = load_pair(file, "sdpa")
    for prompt in facts["prompts"]:
        stop = prompt["stop"]
        for name, options in runs(facts).items():
            expected = stop.get(f"{name}_output_ids")
            if expected is None:
                continue
            drafter.set_options(**options)
            output = target.generate(
                torch.tensor([prompt["prompt_ids"]]),
                assistant_model=drafter,
                max_new_tokens=facts["max_new_tokens"],
                do_sample=False,
                eos_token_id=stop["stop_token_ids"],
            )
            assert output[0].tolist() == expected, name


@pytest.mark.parametrize("file", golden("ddtree_generate_*.json"))
def test_features_marginals_and_trees_of_every_round_equal_the_reference(file: Path) -> None:
    target, drafter, facts, tensors = load_pair(file, "eager")
    budget = facts["budgets"][0]
    prompt, prefix = facts["prompts"][0], f"prompt0.budget{budget}."
    forwards: list[tuple[Tensor, Tensor, Tensor]] = []
    drafter.register_forward_hook(lambda module, inputs, logits: forwards.append((inputs[1], inputs[2], logits)))
    drafter.set_options(method="ddtree", tree_budget=budget)
    watched = Watched(drafter)
    target.generate(
        torch.tensor([prompt["prompt_ids"]]),
        assistant_model=watched,
        max_new_tokens=facts["max_new_tokens"],
        do_sample=False,
    )
    mask_id = facts["mask_token_id"]
    for index, (features, position_ids, logits) in enumerate(forwards):
        expected = tensors[f"{prefix}draft_logits"][index]
        compared = torch.arange(expected.shape[-1]) != mask_id  # the mask token is ours to leave out
        torch.testing.assert_close(logits[0][:, compared], expected[:, compared], **TOLERANCES)
        if f"{prefix}round{index}.target_hidden" in tensors:
            torch.testing.assert_close(features, tensors[f"{prefix}round{index}.target_hidden"], **TOLERANCES)
            torch.testing.assert_close(position_ids, tensors[f"{prefix}round{index}.position_ids"], rtol=0, atol=0)
    recorded = prompt[f"ddtree_budget{budget}"]["rounds"]
    assert len(watched.trees) >= len(recorded)
    for tree, expected_round in zip(watched.trees, recorded, strict=False):
        assert tree.token_ids[0, 1:].tolist() == expected_round["tree"]["node_token_ids"]
        assert tree.depths[0, 1:].tolist() == expected_round["tree"]["node_depths"]
        assert tree.parents[0].tolist() == expected_round["tree"]["parents"]


def unpacked(file: Path, folder: Path, case: str = "") -> tuple[dict[str, Tensor], PreTrainedModel]:
    """The tensors of a set that `speculators` made, and its target; the checkpoint in it is written to a folder.

    Args:
        file: of the set.
        folder: for the checkpoint.
        case: what stands in front of the names of one checkpoint, where the set has several.
    """
    tensors, described = load_file(file), metadata(file)
    config = CONFIG_MAPPING["llama"].from_dict(json.loads(described["target_config"]))
    target: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    target.load_state_dict(part_of(tensors, "target."))
    (folder / "config.json").write_text(described[f"{case}config"])
    save_file(part_of(tensors, f"{case}checkpoint."), folder / "model.safetensors")
    return tensors | part_of(tensors, case), target


def speculators_cases(kind: str) -> list[Any]:
    """Parameters: all checkpoints of the set of several."""
    parameters = []
    for entry in golden(f"{kind}_speculators.safetensors"):
        (file,) = entry.values
        parameters += [
            pytest.param(file, f"{case}.", id=f"speculators-{kind}-{case}")
            for case in json.loads(metadata(file)["cases"])
        ]
    return parameters


@pytest.mark.parametrize("file", golden("dspark_*.safetensors"))
def test_dspark_drafts_what_speculators_drafts(file: Path, tmp_path: Path) -> None:
    """A checkpoint that `speculators` wrote, at 40 places of a text: the drafted tokens, and how likely they are."""
    tensors, target = unpacked(file, tmp_path)
    watched = Watched(load_drafter(tmp_path, target, method="dspark_chain"))
    tree_of_one = Watched(load_drafter(tmp_path, target, tree_budget=1))
    first, count = int(tensors["first_place"]), len(tensors["tokens"])
    assert count >= 32
    for index in range(count):
        place = first + index
        target.generate(tensors["text"][:, :place], max_new_tokens=3, do_sample=False, assistant_model=watched)
        tree = watched.rounds[0].tree
        assert tree.token_ids[0].tolist() == [int(tensors["text"][0, place]), *tensors["tokens"][index].tolist()]
        expected = torch.nn.functional.logsigmoid(tensors["confidence"][index]).cumsum(0)
        assert tree.path_logprobs is not None
        torch.testing.assert_close(tree.path_logprobs[0, 1:], expected, rtol=1e-5, atol=1e-5)
        target.generate(tensors["text"][:, :place], max_new_tokens=3, do_sample=False, assistant_model=tree_of_one)
        likeliest = tree_of_one.rounds[0].tree.path_logprobs
        assert likeliest is not None
        expected = tensors["logits"][index, 0].log_softmax(-1).amax()
        torch.testing.assert_close(likeliest[0, 1], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("file", golden("dflash2_*.safetensors"))
def test_dflash2_drafts_what_the_reference_packages_draft(file: Path, tmp_path: Path) -> None:
    """Checkpoints of `dflash` and of `speculators`, at 40 places of a text: drafted tokens, and how likely they are."""
    tensors, target = unpacked(file, tmp_path)
    drafter = load_drafter(tmp_path, target, method="dflash2_chain")
    watched = Watched(drafter)
    first, count = int(tensors["first_place"]), len(tensors["tokens"])
    assert count >= 32
    for index in range(count):
        place = first + index
        target.generate(tensors["text"][:, :place], max_new_tokens=3, do_sample=False, assistant_model=watched)
        tree = watched.rounds[0].tree
        assert tree.token_ids[0].tolist() == [int(tensors["text"][0, place]), *tensors["tokens"][index].tolist()]
        logits = tensors["logits"][index].clone()
        logits[:, drafter.config.mask_token_id] = -torch.inf  # is never drafted here
        assert tree.path_logprobs is not None
        expected = logits.log_softmax(-1).amax(-1).cumsum(0)
        torch.testing.assert_close(tree.path_logprobs[0, 1:], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("file", golden("peagle.safetensors"))
def test_peagle_drafts_what_speculators_drafts(file: Path, tmp_path: Path) -> None:
    """The same for P-EAGLE: the logits of all depths, and the drafted tokens."""
    tensors, target = unpacked(file, tmp_path)
    drafter: Any = load_drafter(tmp_path, target, method="dflash")
    watched = Watched(drafter)
    text, expected, first = tensors["text"], tensors["logits"], int(tensors["first_place"])
    assert drafter.config.num_draft_tokens == expected.shape[1]
    new = text.shape[1] - first
    output = target.generate(text[:, :first], max_new_tokens=new, do_sample=False, assistant_model=watched)
    assert output.tolist() == text.tolist()
    ids = drafter.to_target_ids(torch.arange(expected.shape[-1]))
    assert len(watched.rounds) >= 32
    for each in watched.rounds:
        rows = expected[len(each.text(0)) - 1]
        known = rows.isfinite().all(-1)  # near the end the reference has no place for all depths
        assert each.logits is not None
        torch.testing.assert_close(each.logits[0, known][:, ids], rows[known], rtol=1e-5, atol=1e-5)
        drafted, likeliest = each.tree.token_ids[0, 1:], ids[rows.argmax(-1)]
        known = known[: len(drafted)]
        assert drafted[known].tolist() == likeliest[: len(drafted)][known].tolist()


@pytest.mark.parametrize(("file", "case"), speculators_cases("eagle3"))
def test_eagle3_drafts_what_speculators_drafts(file: Path, case: str, tmp_path: Path) -> None:
    """The same for EAGLE-3: a chain, the logits of each of its tokens, and how likely they are."""
    tensors, target = unpacked(file, tmp_path, case)
    text, expected, first = tensors["text"], tensors["logits"], int(tensors["first_place"])
    count, depth, _ = expected.shape
    drafter: Any = load_drafter(tmp_path, target, depth=depth, top_k=1, tree_budget=depth)
    logits: list[Tensor] = []
    drafter.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output.flatten()))
    watched = Watched(drafter)
    new = text.shape[1] - first
    output = target.generate(text[:, :first], max_new_tokens=new, do_sample=False, assistant_model=watched)
    assert output.tolist() == text.tolist()
    assert len(logits) == depth * len(watched.rounds)
    compared = 0
    for index, each in enumerate(watched.rounds):
        place = len(each.text(0)) - 1 - first
        if place >= count:
            continue
        compared += 1
        found = torch.stack(logits[depth * index : depth * (index + 1)])
        torch.testing.assert_close(found, expected[place], rtol=1e-5, atol=1e-5)
        drafted = each.tree.token_ids[0, 1:].tolist()
        assert drafted == tensors["tokens"][place, : len(drafted)].tolist()
        assert each.tree.path_logprobs is not None
        likely = expected[place].log_softmax(-1).amax(-1).cumsum(0)[: len(drafted)]
        torch.testing.assert_close(each.tree.path_logprobs[0, 1:], likely, rtol=1e-5, atol=1e-5)
    assert compared >= 32


@pytest.mark.parametrize(("file", "case"), speculators_cases("dflash"))
def test_dflash_drafts_what_speculators_drafts(file: Path, case: str, tmp_path: Path) -> None:
    """The same for DFlash: the logits of all slots, and the drafted tokens."""
    tensors, target = unpacked(file, tmp_path, case)
    text, expected, first = tensors["text"], tensors["logits"], int(tensors["first_place"])
    count, slots, _ = expected.shape
    drafter: Any = load_drafter(tmp_path, target, method="dflash")
    ids = drafter.target_ids
    drafts = ids != drafter.config.mask_token_id  # which is never drafted here
    watched = Watched(drafter)
    new = text.shape[1] - first
    output = target.generate(text[:, :first], max_new_tokens=new, do_sample=False, assistant_model=watched)
    assert output.tolist() == text.tolist()
    compared = 0
    for each in watched.rounds:
        place = len(each.text(0)) - 1 - first
        if place >= count:
            continue
        compared += 1
        assert each.logits is not None
        assert each.logits.shape[1] == slots
        found = each.logits[0][:, ids]
        torch.testing.assert_close(found[:, drafts], expected[place][:, drafts], rtol=1e-5, atol=1e-5)
        drafted = each.tree.token_ids[0, 1:].tolist()
        assert drafted == tensors["tokens"][place, : len(drafted)].tolist()
    assert compared >= 32
