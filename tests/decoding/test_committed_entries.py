"""TargetModel.committed_entries: keys and values of committed tokens are those of a plain forward over the text."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.decoding.upstream import CACHE
from tests.targets import WINDOW, make_target, ragged_prompts


@pytest.mark.parametrize("window", [None, 1, WINDOW, 100])
@pytest.mark.parametrize("family", ["llama", "qwen3-mixed", "gemma4"])
@torch.no_grad()
def test_entries_of_rows_that_have_grown_apart(family: str, window: int | None) -> None:
    model = make_target(family, "sdpa")
    prompts, drafted = ragged_prompts(), torch.tensor([[7, 8, 9, 10], [11, 12, 13, 14], [15, 16, 17, 18]])
    target = TargetModel(model)
    target.prefill_alone(prompts["input_ids"], 40, prompts["attention_mask"])
    target.begin_rounds(40)
    kept = [4, 1, 2]
    target.verify(DraftTree.chain(drafted), target.root_positions())
    target.cache.commit_first(Counts.of(kept, target.cache.device))
    for rows in ([0, 1, 2], [2, 1]):
        if len(rows) < target.cache.batch:
            target.keep_rows(rows)
        for layer in (0, 1):
            entries = target.committed_entries(layer, window)
            assert entries.keys.shape[2] == entries.values.shape[2] == entries.mask.shape[1]
            for place, row in enumerate(rows):
                prompt = prompts["input_ids"][row, prompts["attention_mask"][row].bool()]
                text = torch.cat([prompt, drafted[row, : kept[row]]])
                cache = DynamicCache()  # without a config it keeps what is behind windows too
                model(text.unsqueeze(0), **{CACHE: cache}, use_cache=True)
                plain = cache.layers[layer]
                for found, expected in ((entries.keys, plain.keys), (entries.values, plain.values)):
                    seen = found[place][:, entries.mask[place]]
                    torch.testing.assert_close(seen, expected[0, :, -(window or 100) :], rtol=1e-9, atol=1e-9)
