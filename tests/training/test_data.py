"""Rows for training: packing, mixing, the target's own continuations, and its states cached to disk."""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_specdec.training import features
from hf_specdec.training.answer_files import AnswerSettings, read_answers
from hf_specdec.training.data import collate, mix, pack_text
from hf_specdec.training.features import TargetReader, cache_states, fingerprint
from hf_specdec.training.text import write_continuations
from tests.targets import EOS, VOCAB, fresh_target

datasets = pytest.importorskip("datasets")


@pytest.fixture(scope="module", autouse=True)
def quiet():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def target():
    return fresh_target(dtype=torch.float32)


@pytest.fixture
def documents():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in range(5, 25)]


def write(target, documents, folder, *, temperatures=(0.0,), seed=0, **changes):
    """Files of eight texts; returns the folder."""
    settings = AnswerSettings(temperatures, max_new_tokens=6, batch_size=1, seed=seed)
    return write_continuations(
        target, documents, folder, settings, **{"count": 20, "prompt_lengths": (4, 7), **changes}
    )


def written(*args, **changes):
    return read_answers(write(*args, **changes))


def test_pack_joins_documents_behind_separators_and_drops_the_rest():
    rows = pack_text([[5, 6, 7], [8, 9], [4, 4]], 4, separator_id=2)
    assert rows["input_ids"][:] == [[2, 5, 6, 7], [2, 8, 9, 2]]
    assert rows["length"][:] == [4, 4]
    with pytest.raises(ValueError, match=r"documents have 3 tokens, less than one row of 4"):
        pack_text([[5, 6, 7]], 4)


def test_mix_has_the_share_asked_for_and_every_written_row():
    own = pack_text([list(range(36))], 4)
    plain = pack_text([list(range(100, 140))], 4)
    rows = mix(own, plain, 0.25)
    assert len(rows) == 12
    assert sorted(row[0] for row in rows["input_ids"] if row[0] < 100) == list(range(0, 36, 4))
    with pytest.raises(ValueError, match=r"plain_share=0.9 .* needs 81 rows of plain text, but there are 10"):
        mix(own, plain, 0.9)
    with pytest.raises(ValueError, match=r"plain_share=1 must be at least 0 and less than 1"):
        mix(own, plain, 1)


def test_greedy_texts_are_the_targets_own_continuations(target, documents, tmp_path):
    texts = written(target, documents, tmp_path)
    assert len(texts) == 20
    for number, text in enumerate(texts):
        prompt = text["prompt_ids"]
        assert 4 <= len(prompt) <= 7
        assert len(prompt) == len(texts[number // 8 * 8]["prompt_ids"]), "nothing is padded in a file"
        assert len(text["answer_ids"]) == 6
        assert any(document[: len(prompt)] == prompt for document in documents)
        alone = target.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        assert prompt + text["answer_ids"] == alone[0].tolist()
    assert len({tuple(text["prompt_ids"]) for text in texts}) > 10


def test_progress_is_told_in_tokens_while_states_are_computed(target, tmp_path, capsys, monkeypatch):
    class Telling(features.Progress):
        """Tells of each batch, without waiting for ten seconds."""

        def update(self, n=1):
            super().update(n)
            self.refresh()

    monkeypatch.setattr(features, "Progress", Telling)
    rows, reader = ragged_rows(), TargetReader(target, [1])
    lengths = sorted(row["length"] for row in rows)  # rows are read in this order, without their padding
    cache_states(reader, rows, tmp_path, batch_size=3)
    lines = capsys.readouterr().err.splitlines()
    for line, done in ((lines[1], sum(lengths[:3])), (lines[-1], sum(lengths))):
        assert re.fullmatch(rf"target states: .* {done}/{sum(lengths)} \[.*\]", line), lines
    cache_states(reader, rows, tmp_path, batch_size=3)
    assert not capsys.readouterr().err, "nothing is left to do"


def test_sampled_texts_follow_their_seed_and_leave_the_callers_generator_alone(target, documents, tmp_path):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    texts = {
        name: written(target, documents, tmp_path / name, temperatures=(0.0, 0.8), seed=seed)
        for name, seed in (("one", 0), ("other", 0), ("third", 1))
    }
    assert torch.equal(torch.rand(3), expected)
    assert texts["one"] == texts["other"]
    assert texts["one"] != texts["third"]


def test_texts_end_with_the_end_of_text(target, documents, tmp_path):
    greedy = written(target, documents, tmp_path)
    assert not any(text["ended"] for text in greedy)
    # Whatever the target writes second for some prompt is its end of text from now on.
    end = greedy[0]["answer_ids"][1]
    target.generation_config.eos_token_id = [EOS, end]
    texts = written(target, documents, tmp_path / "ending")
    for text, unended in zip(texts, greedy, strict=True):
        answer = text["answer_ids"]
        assert answer == unended["answer_ids"][: len(answer)]
        assert not {EOS, end} & set(answer[:-1])
        assert text["ended"] == (answer[-1] in (EOS, end))
        assert text["ended"] or len(answer) == 6
    assert 0 < sum(text["ended"] for text in texts) < len(texts)


def test_interrupted_writing_goes_on_and_workers_share_the_work(target, documents, tmp_path):
    whole = written(target, documents, tmp_path / "whole", temperatures=(0.0, 0.8))
    folder = tmp_path / "parts"
    begun = []  # of each file, its number of texts
    target.register_forward_pre_hook(lambda model, inputs, named: begun.append(len(inputs[0])), with_kwargs=True)

    def went_on(**changes):
        begun.clear()
        own = write(target, documents, folder, temperatures=(0.0, 0.8), **changes)
        return bool(begun), [int(file.stem.removeprefix("answers-")) for file in sorted(own.glob("answers-*.jsonl"))]

    assert went_on(worker=(1, 2)) == (True, [1])
    assert went_on(worker=(3, 4)) == (False, [1]), "a worker more than there are files"
    assert went_on() == (True, [0, 1, 2])
    assert written(target, documents, folder, temperatures=(0.0, 0.8)) == whole
    assert went_on() == (False, [0, 1, 2]), "what is there is not written again"
    assert went_on(count=30) == (True, [0, 1, 2, 3]), "more texts add files"
    (recipe,) = folder.glob("*/recipe.json")
    assert json.loads(recipe.read_text())["temperatures"] == [0.0, 0.8]


def test_another_target_or_text_and_held_out_texts_get_a_folder_of_their_own(target, documents, tmp_path):
    folders = {
        write(target, documents, tmp_path, count=4),
        write(target, documents[1:], tmp_path, count=4),
        write(fresh_target(dtype=torch.float32, seed=4), documents, tmp_path, count=4),
        write(target, documents, tmp_path, count=4, held_out=True),
    }
    assert len(folders) == 4
    assert folders == set(tmp_path.iterdir())
    assert sum(json.loads((each / "recipe.json").read_text())["held_out"] for each in folders) == 1


def test_a_target_is_known_by_its_weights_and_settings_and_not_by_its_folder(target, tmp_path):
    known = fingerprint(target)
    for each in (
        fresh_target(dtype=torch.float32, seed=4),
        fresh_target(dtype=torch.bfloat16),
        # The same weights, other positions.
        fresh_target(dtype=torch.float32, rope_parameters={"rope_type": "default", "rope_theta": 50.0}),
    ):
        assert fingerprint(each) != known
    target.save_pretrained(tmp_path)
    assert fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path)) == known


def test_states_at_minus_one_enter_the_first_layer_and_those_past_the_last_leave_the_decoder(target):
    ids = torch.randint(3, VOCAB, (2, 8))
    hidden = target(ids, output_hidden_states=True).hidden_states
    for layer, expected in ((-1, hidden[0]), (0, hidden[1]), (target.config.num_hidden_layers, hidden[-1])):
        torch.testing.assert_close(TargetReader(target, [layer]).read(ids).features, expected)


def test_writing_stops_when_its_time_is_over(target, documents, tmp_path):
    assert not list(write(target, documents, tmp_path, max_minutes=0).glob("answers-*"))
    written(target, documents, tmp_path)
    assert len(written(target, documents, tmp_path, count=100, max_minutes=0)) == 20
    with pytest.raises(ValueError, match=r"None of 20 documents has more than 40 tokens"):
        write(target, documents, tmp_path, prompt_lengths=(40, 50))


def test_missing_datasets_package_is_named_with_its_extra(lacking):
    lacking("datasets")
    with pytest.raises(ImportError, match=r"pip install '\.\[train\]' in a checkout of hf_specdec"):
        pack_text([[1, 2, 3]], 2)


def ragged_rows():
    """Twelve rows of one to twelve tokens, each padded to thirteen."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (12, 13), generator=generator)
    lengths = [5, 12, 1, 7, 3, 9, 11, 2, 10, 4, 8, 6]
    return [
        {"input_ids": row.tolist(), "first_anchor": 0, "length": length}
        for row, length in zip(ids, lengths, strict=True)
    ]


def test_cached_states_are_those_of_each_row_alone_and_are_computed_once(tmp_path):
    # In float64, since batches round otherwise than single rows.
    target = fresh_target(attention="sdpa", dtype=torch.float64)
    rows = ragged_rows()
    reader = TargetReader(target, [2, 0], last_hidden=True)
    cached = cache_states(reader, rows, tmp_path, batch_size=2, rows_per_file=5, dtype=torch.float64)
    assert len(cached) == len(rows)
    for index, row in enumerate(rows):
        ids = torch.tensor([row["input_ids"][: row["length"]]])
        alone = reader.read(ids)
        assert cached[index]["input_ids"] == ids[0].tolist()
        torch.testing.assert_close(cached[index]["features"], alone.features[0])
        torch.testing.assert_close(cached[index]["last_hidden"], alone.last_hidden[0])
        torch.testing.assert_close(target.lm_head(cached[index]["last_hidden"]), target(ids).logits[0])
    batch = collate([cached[index] for index in (2, 3)])
    assert batch["features"].shape[:2] == batch["input_ids"].shape == (2, 7)
    assert not batch["features"][0, 1:].any()

    reads = []  # rows of each forward
    target.get_decoder().register_forward_pre_hook(
        lambda decoder, inputs, named: reads.append(len(named["input_ids"])), with_kwargs=True
    )
    settings = {"batch_size": 2, "rows_per_file": 5, "dtype": torch.float64}
    cache_states(reader, rows, tmp_path, **settings)
    assert reads == []
    files = sorted(tmp_path.glob("states-*/layer-0-*"))
    assert len(files) == 3
    files[0].unlink()
    again = cache_states(reader, rows, tmp_path, **settings)
    assert sum(reads) in (2, 5), "only the file that was missing"
    for index in range(12):
        torch.testing.assert_close(again[index]["features"], cached[index]["features"])
    reads.clear()
    other = cache_states(TargetReader(target, [0, 1]), rows, tmp_path, **settings)
    assert sum(reads) == 12, "the layer that nobody has read yet; the other one is shared"
    torch.testing.assert_close(other[1]["features"][:, :32], cached[1]["features"][:, 32:])
    reads.clear()
    more = cache_states(reader, [*rows, rows[0]], tmp_path, **settings)
    assert sum(reads) == 3, "the rows of the last file, to which one was added"
    torch.testing.assert_close(more[12]["features"], cached[0]["features"])
    shares = [cache_states(reader, rows, tmp_path / "shared", worker=(rank, 2), **settings) for rank in (1, 0)]
    assert len(list(tmp_path.glob("shared/states-*/last-hidden-*"))) == 3
    torch.testing.assert_close(shares[0][11]["features"], cached[11]["features"])
    cache_states(TargetReader(fresh_target(dtype=torch.float64, seed=4), [0]), rows, tmp_path, **settings)
    assert len(list(tmp_path.glob("states-*"))) == 2, "another target"


def test_labels_of_many_positions_take_few_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    target, ids = fresh_target(dtype=torch.float64), torch.arange(0, VOCAB, 2)
    reader, hidden = TargetReader(target, []), torch.randn(3, 5, target.config.hidden_size).double()
    expected = target.lm_head(hidden)
    best = expected.argmax(-1)
    monkeypatch.setattr(features, "MAX_CHUNK_ELEMENTS", 4 * VOCAB)
    seen: list[int] = []
    hook = target.lm_head.register_forward_hook(lambda layer, inputs, output: seen.append(output.numel()))
    best_ids, logits = reader.labels(hidden, ids)
    hook.remove()
    assert torch.equal(best_ids, best)
    torch.testing.assert_close(logits, expected[..., ids], check_dtype=False)
    assert max(seen) <= 4 * VOCAB
    _, drafted = reader.draft_labels(hidden, ids, whole=True)
    assert torch.equal(drafted, torch.where(best % 2 == 0, best // 2, -1))
