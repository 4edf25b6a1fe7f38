"""Rows for training: packing, mixing, the target's own continuations, and its states cached to disk."""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_specdec.training import progress
from hf_specdec.training.data import collate, mix, pack_text, training_folders, write_continuations
from hf_specdec.training.features import TargetReader, cache_states, fingerprint
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


def write(target, documents, folder, **changes):
    settings = {"num_rows": 12, "prompt_lengths": (4, 7), "new_tokens": 6, "temperatures": (0.0, 0.8), "batch_size": 4}
    return write_continuations(target, documents, folder, **{**settings, **changes})


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
    with pytest.raises(ValueError, match=r"rows have 4 tokens and rows of plain text 5"):
        mix(own, pack_text([list(range(100))], 5), 0.25)
    with pytest.raises(ValueError, match=r"plain_share=1 must be at least 0 and less than 1"):
        mix(own, plain, 1)


def test_greedy_rows_are_the_targets_own_continuations(target, documents, tmp_path):
    rows = write(target, documents, tmp_path, temperatures=(0.0,))
    assert len(rows) == 12
    for row in rows:
        prompt_length, length = row["first_anchor"], row["length"]
        assert 4 <= prompt_length <= 7
        assert length == prompt_length + 6
        assert len(row["input_ids"]) == 7 + 6
        prompt = torch.tensor([row["input_ids"][:prompt_length]])
        assert any(document[:prompt_length] == prompt[0].tolist() for document in documents)
        alone = target.generate(prompt, max_new_tokens=6, do_sample=False)
        assert row["input_ids"][:length] == alone[0].tolist()


def test_progress_is_told_in_tokens_while_a_batch_is_under_way(target, documents, tmp_path, capsys, monkeypatch):
    bar = progress.tqdm
    monkeypatch.setattr(progress, "tqdm", lambda **settings: bar(**settings | {"mininterval": 0, "miniters": 1}))
    line = r"target {}: .* {}/{} \[.*\]"

    def expect(work, first, total, run):
        result = run()
        lines = [each.strip() for each in re.split(r"[\r\n]", capsys.readouterr().err) if each.strip()]
        assert re.fullmatch(line.format(work, first, total), lines[1]), lines
        assert re.fullmatch(line.format(work, total, total), lines[-1]), lines
        run()
        assert not capsys.readouterr().err, "nothing is left to do"
        return result

    rows = expect("writes", 4, 12 * 6, lambda: write(target, documents, tmp_path))
    reader = TargetReader(target, [1])
    lengths = sorted(rows["length"])  # rows are read in this order, without their padding
    expect("states", sum(lengths[:3]), sum(lengths), lambda: cache_states(reader, rows, tmp_path, batch_size=3))


def test_sampled_batches_follow_their_own_seed_and_leave_the_callers_generator_alone(target, documents, tmp_path):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    one = write(target, documents, tmp_path / "one")
    assert torch.equal(torch.rand(3), expected)
    other = write(target, documents, tmp_path / "other")
    assert one["input_ids"][:] == other["input_ids"][:]
    third = write(target, documents, tmp_path / "third", seed=1)
    assert one["input_ids"][:] != third["input_ids"][:]


def test_rows_end_with_the_end_of_text(target, documents, tmp_path):
    greedy = write(target, documents, tmp_path, temperatures=(0.0,))
    # Whatever the target writes second for some prompt is its end of text from now on.
    end = greedy[0]["input_ids"][greedy[0]["first_anchor"] + 1]
    target.generation_config.eos_token_id = [EOS, end]
    rows = write(target, documents, tmp_path / "ending", temperatures=(0.0,), finished_share=1.0)
    ended = 0
    for row, unended in zip(rows, greedy, strict=True):
        start, length = row["first_anchor"], row["length"]
        written = row["input_ids"][start:length]
        assert written == unended["input_ids"][start:length]
        assert not {EOS, end} & set(written[:-1])
        assert written[-1] in (EOS, end) or len(written) == 6
        ended += len(written) < 6
    assert ended > 0


def test_batch_stops_once_most_rows_have_ended(target, documents, tmp_path):
    greedy = write(target, documents, tmp_path, temperatures=(0.0,), num_rows=4)
    end = greedy[0]["input_ids"][greedy[0]["first_anchor"]]
    target.generation_config.eos_token_id = end
    rows = write(target, documents, tmp_path / "stopping", temperatures=(0.0,), num_rows=4, finished_share=0.25)
    assert max(row["length"] - row["first_anchor"] for row in rows) == 1


def test_interrupted_writing_goes_on_and_workers_share_the_work(target, documents, tmp_path):
    whole = write(target, documents, tmp_path / "whole")
    folder = tmp_path / "parts"
    begun = []  # of each batch, its prompt lengths
    target.register_forward_pre_hook(
        lambda model, inputs, named: begun.append(named["input_ids"].shape[1]), with_kwargs=True
    )

    def written(**changes):
        begun.clear()
        rows = write(target, documents, folder, **changes)
        parts = sorted(int(part.name.removeprefix("part-")) for part in folder.glob("*/part-*"))
        return rows, sum(length > 1 for length in begun), parts

    assert written(worker=(1, 2))[1:] == (1, [1])
    rows, batches, parts = written()
    assert (batches, parts) == (2, [0, 1, 2]), "a part that is there is not written again"
    assert rows["input_ids"][:] == whole["input_ids"][:]
    more, batches, parts = written(num_rows=13)
    assert (len(more), batches, parts) == (16, 1, [0, 1, 2, 3]), "more rows add parts"
    (recipe,) = folder.glob("*/recipe.json")
    assert json.loads(recipe.read_text())["temperatures"] == [0.0, 0.8]


def test_another_target_or_text_gets_a_folder_of_its_own(target, documents, tmp_path):
    write(target, documents, tmp_path, num_rows=4)
    write(target, documents[1:], tmp_path, num_rows=4)
    write(fresh_target(dtype=torch.float32, seed=4), documents, tmp_path, num_rows=4)
    assert len(list(tmp_path.glob("continuations-*"))) == 3
    target.generation_config.repetition_penalty = 5.0
    write(target, documents, tmp_path, num_rows=4)
    assert len(list(tmp_path.glob("continuations-*"))) == 4


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


def test_held_out_rows_are_told_from_those_to_train_on(target, documents, tmp_path):
    write(target, documents, tmp_path, num_rows=4)
    (own,) = tmp_path.iterdir()
    write(target, documents, tmp_path, num_rows=4, held_out=True)
    (tmp_path / "continuations-of-unknown-kind").mkdir()
    (tmp_path / "continuations-of-unknown-kind" / "recipe.json").write_text("{}")
    assert training_folders(tmp_path) == [own]


def test_states_at_minus_one_enter_the_first_layer_and_those_past_the_last_leave_the_decoder(target):
    ids = torch.randint(3, VOCAB, (2, 8))
    hidden = target(ids, output_hidden_states=True).hidden_states
    for layer, expected in ((-1, hidden[0]), (0, hidden[1]), (target.config.num_hidden_layers, hidden[-1])):
        torch.testing.assert_close(TargetReader(target, [layer]).read(ids).features, expected)


def test_writing_stops_when_its_time_is_over(target, documents, tmp_path):
    with pytest.raises(ValueError, match=r"max_minutes=0 was too short to write a batch of 4 rows"):
        write(target, documents, tmp_path, max_minutes=0)
    with pytest.raises(ValueError, match=r"None of 20 documents has more than 40 tokens"):
        write(target, documents, tmp_path, prompt_lengths=(40, 50))


def test_a_worker_more_than_there_are_batches_has_nothing_to_do(target, documents, tmp_path):
    assert len(write(target, documents, tmp_path, num_rows=4, max_minutes=5, worker=(0, 2))) == 4
    assert len(write(target, documents, tmp_path, num_rows=4, max_minutes=5, worker=(1, 2))) == 0


def test_wishes_that_no_text_can_meet_are_refused(target, documents, tmp_path):
    with pytest.raises(ValueError, match=r"^The number of rows to write is 0, but must be at least 1"):
        write(target, documents, tmp_path, num_rows=0)
    with pytest.raises(ValueError, match=r"Prompts of 7 to 4 tokens are not possible: the shortest must have"):
        write(target, documents, tmp_path, prompt_lengths=(7, 4))
    assert not list(tmp_path.iterdir())


def test_missing_datasets_package_is_named_with_its_extra(lacking):
    lacking("datasets")
    with pytest.raises(ImportError, match=r"pip install 'hf_specdec\[train\]'"):
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
