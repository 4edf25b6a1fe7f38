"""EAGLE-3 against the numbers of the reference implementation: forward, cache, and the trees of two rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LogitsProcessorList

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.exchange import ChoiceRule, Committed, DraftContext
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.hub.tensors import describe
from hf_specdec.methods.eagle3.drafting import Eagle3Generator
from hf_specdec.methods.eagle3.layouts import SAFEAILAB
from hf_specdec.methods.eagle3.network import Eagle3Config, Eagle3Drafter
from tests.test_golden import TOLERANCES, golden, metadata, part_of

FILES = golden("eagle3_forward_*.safetensors")


def load(file: Path) -> tuple[Eagle3Drafter, dict[str, Tensor]]:
    tensors = load_file(file)
    weights = part_of(tensors, "weights.")
    # By the reader of the published layout: another set may name a rotary base, biases or the whole vocabulary.
    reading = SAFEAILAB.read(
        json.loads(metadata(file)["config"]), {name: describe(weight, file) for name, weight in weights.items()}
    )
    assert reading is not None
    drafter = Eagle3Drafter(Eagle3Config.from_dict(reading.fields)).eval()
    drafter.load_state_dict({ours: weights[theirs] for theirs, ours in reading.names.items()})
    return drafter, tensors


@pytest.mark.parametrize("file", FILES)
@torch.no_grad()
def test_forward_equals_the_reference_step_by_step(file: Path) -> None:
    drafter, tensors = load(file)
    config = drafter.config
    cache = TreeCache.empty(
        1, 1, config.num_key_value_heads, config.head_dim, dtype=torch.float32, device=torch.device("cpu")
    )

    def equals(found: Tensor, name: str) -> None:
        torch.testing.assert_close(found, tensors[name], **TOLERANCES)

    def check(outputs: Tensor, expected: str) -> None:
        equals(outputs, f"{expected}.expected.hidden")
        equals(drafter.logits(outputs), f"{expected}.expected.logits")

    features = tensors["prefill.input.hidden_states"]
    fused = drafter.fuse(features)
    equals(fused, "prefill.expected.fc")
    length = features.shape[1]
    ids = tensors["prefill.input.input_ids"]
    outputs = drafter(drafter.embed_tokens(ids), fused, torch.arange(length)[None], is_causal=True, cache=cache)
    check(outputs, "prefill")
    cache.commit_first(Counts.of([length]))
    equals(cache.layers[0].keys[:, :, :length], "prefill.expected.key")
    equals(cache.layers[0].values[:, :, :length], "prefill.expected.value")

    draft_id = drafter.logits(outputs[:, -1:]).argmax(-1)
    assert draft_id.flatten().tolist() == tensors["step1.input.draft_token"].tolist()
    for step, position in (("step1", length), ("step2", length + 1)):
        ids = drafter.to_target_ids(draft_id)
        assert ids.tolist() == tensors[f"{step}.input.input_ids"].tolist()
        states = drafter.recurrent(outputs[:, -1:])
        outputs = drafter(drafter.embed_tokens(ids), states, torch.tensor([[position]]), cache=cache)
        cache.continue_round(1)
        check(outputs, step)
        draft_id = drafter.logits(outputs).argmax(-1)

    cache.rollback([length])
    features = tensors["round2.input.hidden_states"]
    new = features.shape[1]
    positions = torch.arange(length, length + new)[None]
    ids = tensors["round2.tokens"][:, length + 1 :]
    mask = torch.full((1, 1, new, length + new), -torch.inf).triu(length + 1)
    outputs = drafter(drafter.embed_tokens(ids), drafter.fuse(features), positions, mask=mask, cache=cache)
    check(outputs, "round2")


def draft(generator: Eagle3Generator, tokens: Tensor, start: int, features: Tensor) -> DraftTree:
    """Reports the tokens from `start` on as committed, all but the last, and drafts below that one."""
    new = tokens.shape[1] - 1 - start
    assert features.shape[1] == new
    generator.observe(
        Committed(
            token_ids=tokens[:, start:-1],
            features=features,
            position_ids=torch.arange(start, start + new)[None],
            valid=None,
            counts=Counts.of([new]),
            target_logits=features,
        )
    )
    length = tokens.shape[1]
    return generator.draft(
        DraftContext(
            root_ids=tokens[:, -1],
            root_positions=torch.tensor([length - 1]),
            sequences=tokens,
            lengths=[length],
            active=[True],
            choice=ChoiceRule(do_sample=False, warpers=LogitsProcessorList()),
        )
    )


def node_paths(token_ids: Tensor, mask: Tensor, depths: Tensor) -> list[tuple[int, ...]]:
    """The tokens from the root to every node, sorted: the reference lists nodes by level, we by probability."""
    paths = []
    for sees in mask.bool():
        nodes = sees.nonzero().squeeze(1)
        paths.append(tuple(token_ids[nodes[depths[nodes].argsort()]].tolist()))
    return sorted(paths)


@pytest.mark.parametrize("file", FILES)
def test_trees_of_two_rounds_equal_the_reference_node_for_node(file: Path) -> None:
    drafter, tensors = load(file)
    settings: dict[str, Any] = json.loads(metadata(file)["tree"])
    # The reference counts the root in its budget, and in its depth not the level that comes with the root's forward.
    drafter.set_options(depth=settings["depth"] + 1, top_k=settings["top_k"], tree_budget=settings["total_tokens"] - 1)
    generator = Eagle3Generator(drafter, None)  # type: ignore[arg-type]  # embeddings are its own
    start = 0
    for index, tokens in ((1, tensors["tokens"]), (2, tensors["round2.tokens"])):
        features = tensors["prefill.input.hidden_states" if index == 1 else "round2.input.hidden_states"]
        tree = draft(generator, tokens, start, features)
        expected = part_of(tensors, f"tree_round{index}.expected.")
        assert tree.valid.all()
        reference = (expected["draft_tokens"][0], expected["tree_mask"][0, 0], expected["tree_position_ids"])
        own = (tree.token_ids[0], tree.ancestor_mask[0], tree.depths[0])
        assert node_paths(*own) == node_paths(*reference)
        start = tokens.shape[1] - 1
