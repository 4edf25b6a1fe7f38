"""REST: drafts come from the datastore and from nowhere else, and it is a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_specdec import load_drafter
from hf_specdec.methods.datastore import RestDrafter, build_datastore
from hf_specdec.methods.lookup import SuffixIndex
from tests.targets import make_target, one_prompt, tiny_tokenizer


def test_a_datastore_that_has_the_output_drafts_all_of_it(tmp_path: Path) -> None:
    target, prompt = make_target("llama", "sdpa", torch.float64), one_prompt()
    alone = target.generate(**prompt, max_new_tokens=24, do_sample=False)
    index = SuffixIndex()
    index.add(alone[0].tolist())
    index.save(tmp_path / "store.safetensors")
    drafter = load_drafter("rest", datastore=tmp_path / "store.safetensors", depth=6, tree_budget=16)
    assert torch.equal(target.generate(**prompt, max_new_tokens=24, do_sample=False, assistant_model=drafter), alone)
    assert drafter.stats.mean_acceptance_length > 4
    assert len(drafter.index) == alone.numel()  # nothing is added


def test_nothing_is_drafted_from_the_text_itself() -> None:
    target = make_target("llama", "sdpa", torch.float64)
    drafter = load_drafter("rest", datastore=SuffixIndex())
    repeating = torch.tensor([[3, 5, 4, 3, 5, 4, 3, 5, 4, 3, 5, 4]])
    target.generate(repeating, max_new_tokens=8, do_sample=False, assistant_model=drafter)
    assert drafter.stats.num_draft_tokens == 0
    drafter.forget()


def test_a_datastore_is_built_from_texts(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    index = build_datastore(["hello there", "more"], tokenizer, tmp_path / "store.safetensors")
    words = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("hello there", "more")]
    assert index.continuation(0) == words[0]
    loaded = RestDrafter(tmp_path / "store.safetensors").index
    assert loaded.continuation(0) == words[0]
    assert loaded.continuation(len(words[0]) + 1) == words[1]


def test_without_a_datastore_or_with_a_wrong_one_it_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs datastore=\.\.\., a file written by build_datastore"):
        load_drafter("rest")
    (tmp_path / "store").write_text("text")
    with pytest.raises(ValueError, match="was not written by SuffixIndex.save"):
        load_drafter("rest", datastore=tmp_path / "store")
    index = SuffixIndex()
    index.add([5, 6, 700])
    target = make_target("llama", "sdpa", torch.float64)
    with pytest.raises(ValueError, match="has token ids up to 700, but target .* has 64 embeddings"):
        target.generate(**one_prompt(), max_new_tokens=2, assistant_model=load_drafter("rest", datastore=index))
