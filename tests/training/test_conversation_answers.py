"""Conversations as training text: what is read, and that the answers are the target's own."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from pathlib import Path
from random import Random

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoTokenizer, LlamaForCausalLM

from hf_specdec.decoding.upstream import CACHE
from hf_specdec.training.answer_files import AnswerSettings, read_answers
from hf_specdec.training.continuation import Prompt, buffered_cache, continued
from hf_specdec.training.conversation_answers import REQUESTS, read_conversations, write_answers, write_invented
from hf_specdec.training.filters import before_loop
from hf_specdec.training.write import main
from tests.hub.test_saving import small_disk
from tests.targets import EOS, HYBRIDS, VOCAB, fresh_target, make_target

datasets = pytest.importorskip("datasets")

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
TALK = {"messages": [{"role": "user", "content": "a = 1"}], "group": "code"}


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained("examples/tiny-code/target")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def target(tokenizer):
    return fresh_target(dtype=torch.float64, attention="sdpa", vocab_size=len(tokenizer))


def conversations(tmp_path, *talks):
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    return read_conversations(str(file))


def answered(target, prompts, room, temperatures, seed=0, at_once=None):
    ends = target.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}

    def task(*prompt):
        return (yield Prompt(*prompt, ends))

    tasks = [task(*each) for each in zip(prompts, room, temperatures, strict=True)]
    draws = [Random(f"{seed} {number}") for number in range(len(tasks))]
    return continued(target, tasks, draws, at_once or len(prompts))


def written_rows(files):
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def talk(*texts, system=None):
    first = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": first + [{"role": "user", "content": text} for text in texts]}


def test_answers_of_a_ragged_batch_are_those_of_plain_generate():
    """Longer than a step by which buffers grow; a prompt is wider than the batch it joins; some rows are sampled."""
    target = fresh_target(dtype=torch.float64, attention="sdpa")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (3, 9, 5, 60, 4)]
    room, temperatures = [10, 10, 4, 150, 7], [0, 0, 0, 0, 0.9]
    greedy = answered(target, prompts[:1], [10], [0])
    # What the first row says third ends texts from now on, so that rows leave the batch at different times.
    target.generation_config.eos_token_id = [EOS, greedy[0][2]]
    written = answered(target, prompts, room, temperatures)
    for prompt, answer, most in zip(prompts[:4], written, room, strict=False):
        alone = target.generate(torch.tensor([prompt]), max_new_tokens=most, do_sample=False)
        assert answer == alone[0, len(prompt) :].tolist()
    assert len({len(answer) for answer in written}) > 2
    for at_once in (1, 2, 3):  # the others wait, and join rows that have begun
        assert answered(target, prompts, room, temperatures, at_once=at_once) == written, "each row has its own draws"
    assert written == answered(target, prompts, room, temperatures), "the seed decides"


@pytest.mark.parametrize("family", sorted(HYBRIDS))
def test_every_kind_of_target_writes_its_own_answers(family):
    """Rows of different lengths, of which one leaves before the others; the rest waits."""
    target = make_target(family, HYBRIDS[family][2][-1], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (3, 9, 5, 6)]
    room = [4, 9, 6, 12]
    written = answered(target, prompts, room, [0] * 4, at_once=3)
    for prompt, answer, most in zip(prompts, written, room, strict=True):
        # One more, since some targets force the end of text upon the last token.
        alone = target.generate(torch.tensor([prompt]), max_new_tokens=most + 1, do_sample=False)
        assert answer == alone[0, len(prompt) : len(prompt) + len(answer)].tolist()
        assert len(answer) == most or EOS in answer


def test_a_beginning_that_prompts_share_is_read_once():
    target = fresh_target(dtype=torch.float64, attention="sdpa")
    beginning, ends = list(range(3, 33)), {VOCAB}
    lengths, read = [2, 5, 1, 3, 2], []
    prompts = [beginning + list(range(40, 40 + length)) for length in lengths]

    def task(prompt):
        first = yield Prompt(prompt, 4, 0.0, ends)
        return first, (yield Prompt(first, 3, 0.0, ends))  # without that beginning

    hook = target.register_forward_pre_hook(lambda _, args, kwargs: read.append(args[0].numel()), with_kwargs=True)
    written = continued(target, [task(prompt) for prompt in prompts], [Random()] * 5, 2)
    hook.remove()
    assert sum(read) < 2 * len(beginning) + sum(lengths) + 5 * (4 + 4 + 3) + 10
    for prompt, (first, second) in zip(prompts, written, strict=True):
        for given, answer in ((prompt, first), (first, second)):
            alone = target.generate(torch.tensor([given]), max_new_tokens=len(answer), do_sample=False)
            assert answer == alone[0, len(given) :].tolist()


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_prompt_that_goes_on_from_a_row_keeps_it(at_once):
    """Short additions are read without the conversation before them; after long ones and changes all of it is read."""
    target = fresh_target(dtype=torch.float64, attention="sdpa")
    talks = [[list(range(3, 33)), [7, 9], [5]], [[6, 4], [3] * 40, []], [[8] * 20, [11, 2, 4], [9] * 16]]
    ends, prompts, answers, read = {VOCAB}, [], [], []

    def task(turns):
        ids = []
        for number, turn in enumerate(turns):
            ids = [*ids, *turn]
            answers.append((yield Prompt(tuple(ids), 3 + number, 0.0, ends)))
            prompts.append(ids)
            ids = [*ids, *answers[-1]]
        edited = [12, *ids[1:]]  # of the same length
        answers.append((yield Prompt(edited, 4, 0.0, ends)))
        prompts.append(edited)

    hook = target.register_forward_pre_hook(lambda _, args, kwargs: read.append(args[0].numel()), with_kwargs=True)
    continued(target, [task(turns) for turns in talks], [Random()] * 3, at_once)
    hook.remove()
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        alone = target.generate(
            ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=len(answer), do_sample=False
        )
        assert answer == alone[0, len(prompt) :].tolist()
    if at_once == 1:
        written = sum(map(len, answers))
        edited = sum(len(prompt) for prompt in prompts if prompt[0] == 12)
        first, long = sum(len(turns[0]) for turns in talks), len(talks[1][0]) + 3 + len(talks[1][1])
        assert sum(read) <= first + long + edited + written + (2 + 1 + 0 + 3 + 16), "nothing is read twice"


def test_an_answer_that_loops_ends_early():
    target = fresh_target(dtype=torch.float64, attention="sdpa")
    for layer in target.model.layers:  # a token depends on the one before it alone, so every text repeats itself
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    target.generation_config.eos_token_id = None
    whole = target.generate(torch.tensor([[5, 9, 2]]), max_new_tokens=400, do_sample=False)[0, 3:].tolist()
    target.generation_config.eos_token_id = [VOCAB]
    (written,) = answered(target, [[5, 9, 2]], [400], [0])
    assert len(written) < 400
    assert written == whole[: len(written)]
    assert len(written) - 8 < len(before_loop(written)) < len(written)


def test_a_step_does_not_copy_what_the_cache_holds():
    target = fresh_target(dtype=torch.float64, attention="sdpa")
    cache = buffered_cache(target)
    with torch.inference_mode():  # as answers are written
        places = set()
        for token in (5, 9, 2, 7):
            target(torch.tensor([[token]]), **{CACHE: cache}, use_cache=True)
            places.add(cache.layers[0].keys.data_ptr())
        assert len(places) == 1
        cache.reorder_cache(torch.tensor([0]))
        place = cache.layers[0].keys.data_ptr()
        target(torch.tensor([[4]]), **{CACHE: cache}, use_cache=True)
        assert cache.layers[0].keys.data_ptr() == place, "rows leave with one copy"
    assert cache.get_seq_length() == 5


def test_sampled_answers_follow_the_target():
    """Half of the rows at another temperature."""
    target = fresh_target(dtype=torch.float64, attention="sdpa")
    prompt, draws = [5, 9, 2, 7], 8_000
    logits = target(torch.tensor([prompt])).logits[0, -1]
    written = answered(target, [prompt] * 2 * draws, [1] * 2 * draws, [0.7, 1.0] * draws, seed=3)
    for start, temperature in enumerate((0.7, 1.0)):
        probs = (logits / temperature).softmax(-1)
        tokens = torch.tensor([answer[0] for answer in written[start::2]])
        counts = torch.bincount(tokens, minlength=len(probs))
        # Five sigma for each token: a false alarm in about one run of 10,000 (two temperatures).
        assert ((counts - draws * probs).abs() <= 5 * (draws * probs * (1 - probs)).sqrt() + 1).all()


def test_each_user_message_gets_an_answer_and_later_turns_see_the_earlier_answers(target, tokenizer, tmp_path):
    data = conversations(tmp_path, talk("x = 1", "why", system="Say it short."), talk("y"))
    rows = written_rows(write_answers(target, tokenizer, data, tmp_path, AnswerSettings(max_new_tokens=5)))
    assert [(row["turn"], len(row["messages"])) for row in rows] == [(0, 3), (1, 5), (0, 2)]
    for row in rows:
        prompt = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, return_dict=False)
        assert row["prompt_ids"] == list(prompt)
        alone = target.generate(torch.tensor([row["prompt_ids"]]), max_new_tokens=5, do_sample=False)
        assert row["answer_ids"] == alone[0, len(prompt) :].tolist()
        assert row["messages"][-1]["content"] == tokenizer.decode(row["answer_ids"], skip_special_tokens=True)
    assert rows[1]["messages"][2] == rows[0]["messages"][2]


def test_answers_of_the_data_are_not_used(tmp_path):
    given = [*TALK["messages"], {"role": "assistant", "content": "no"}, {"role": "user", "content": "b"}]
    (read,) = conversations(tmp_path, {"messages": given})
    assert [message["content"] for message in read.messages] == ["a = 1", "b"]
    assert read.group == "talks", "the file's name where no group is given"


def test_interrupted_writing_goes_on_and_workers_share_the_work(target, tokenizer, tmp_path):
    data = conversations(tmp_path, *[talk(f"x = {number}") for number in range(20)])
    settings = AnswerSettings(temperatures=(0.9, 0.5), max_new_tokens=4, batch_size=1)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    whole = written_rows(write_answers(target, tokenizer, data, tmp_path / "whole", settings))
    assert torch.equal(torch.rand(3), expected), "the caller's generator is left alone"
    (second,) = write_answers(target, tokenizer, data, tmp_path / "parts", settings, worker=(1, 2))
    assert written_rows([second]) == whole[8:16]
    written = second.stat().st_mtime_ns
    assert written_rows(write_answers(target, tokenizer, data, tmp_path / "parts", settings)) == whole
    assert second.stat().st_mtime_ns == written, "what is there is not written again"
    with pytest.raises(ValueError, match=r"other settings: temperatures \[0.9, 0.5\], now \[0.0\]. To continue,"):
        write_answers(target, tokenizer, data, tmp_path / "parts", AnswerSettings(max_new_tokens=4, batch_size=1))


@pytest.mark.parametrize("follow_ups", [0.0, 0.7])
def test_a_stopped_call_keeps_finished_texts_and_goes_on_to_the_same_file(chatty, asking, tmp_path, follow_ups):
    """Stopped by a forward, at several places; the last line of the part is torn as by a full disk."""
    settings = AnswerSettings((0.0, 0.9), follow_ups, max_new_tokens=12, batch_size=3)
    forwards, stops = 0, []

    def stop(*_):
        nonlocal forwards
        forwards += 1
        if forwards in stops:
            raise KeyboardInterrupt

    def write(folder):
        nonlocal forwards
        forwards = 0
        return write_invented(chatty, asking, 24, folder, settings)

    hook = chatty.register_forward_pre_hook(stop)
    whole = [file.read_text() for file in write(tmp_path / "whole")]
    assert len(whole) == 1
    stops, kept = [forwards // 3, forwards // 2], []
    folder = tmp_path / "stopped"
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            write(folder)
        (part,) = folder.glob("answers-*")
        kept.append(len(read_answers(folder)))
        assert part.read_text().splitlines(keepends=True)[0] in whole[0]
        part.write_text(part.read_text()[:-20])
        assert len(read_answers(folder)) == kept[-1] - 1, "a torn line is not read"
        stops = stops[:1]
    assert 0 < kept[0] < kept[1] < whole[0].count("\n")
    stops = []
    (file,) = write(folder)
    hook.remove()
    assert file.read_text() == whole[0], "no row is lost, and none written twice"
    assert [each.name for each in folder.iterdir() if each.suffix == ".jsonl"] == ["answers-000000.jsonl"]


@contextlib.contextmanager
def forward(number, act):
    """Acts in a forward of any causal language model."""
    forwards = []

    def count(module, *_):
        forwards.extend([1] * isinstance(module, LlamaForCausalLM))
        if len(forwards) == number:
            forwards.append(1)
            act()

    hook = register_module_forward_pre_hook(count)
    try:
        yield
    finally:
        hook.remove()


def interrupt():
    raise KeyboardInterrupt


def test_a_stopped_command_says_how_many_answers_are_kept(target, tokenizer, tmp_path):
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    conversations(tmp_path, *[talk(f"x = {number}") for number in range(20)])
    arguments = ["--target", str(tmp_path / "target"), "--output", str(tmp_path / "out"), "--no-bf16",
                 "--max-new-tokens", "4", "--batch-size", "1", "--data", str(tmp_path / "talks.jsonl")]  # fmt: skip
    with small_disk(1000), pytest.raises(OSError, match="Nothing can be written to '.*out': File too large"):
        main(arguments)
    assert not (tmp_path / "out").exists()
    kept = (
        "out: [1-9][0-9]* answers of [0-9]+ tokens; [0-9]+% are complete, and are kept; the same command writes the oth"
    )
    with forward(30, interrupt), pytest.raises(KeyboardInterrupt, match=kept):
        main(arguments)
    with contextlib.ExitStack() as disk:
        full = forward(10, lambda: disk.enter_context(small_disk(800)))
        with full, pytest.raises(OSError, match=f"File too large; .*{kept}"):
            main(arguments)
    main(arguments)
    assert len(read_answers(tmp_path / "out")) == 20


def test_a_recipe_that_was_written_in_part_is_never_seen(target, tokenizer, tmp_path, monkeypatch):
    # Stopped here as by Ctrl-C; another process that starts at this moment sees the same folder.
    data, settings = conversations(tmp_path, talk("x = 1")), AnswerSettings(max_new_tokens=4)
    write_text = Path.write_text

    def stopped(file, text, **kwargs):
        write_text(file, text[: len(text) // 2], **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", stopped)
        with pytest.raises(KeyboardInterrupt):
            write_answers(target, tokenizer, data, tmp_path / "answers", settings)
    assert len(written_rows(write_answers(target, tokenizer, data, tmp_path / "answers", settings))) == 1


def test_an_answer_ends_where_the_row_is_full_and_no_turn_follows(target, tokenizer, tmp_path):
    data = conversations(tmp_path, talk("x = 1", "why"))
    prompt = tokenizer.apply_chat_template(list(data[0].messages[:1]), add_generation_prompt=True, return_dict=False)
    settings = AnswerSettings(max_new_tokens=50, max_length=len(prompt) + 3)
    (row,) = written_rows(write_answers(target, tokenizer, data, tmp_path, settings))
    assert len(row["answer_ids"]) == 3
    assert not row["ended"]


def test_the_command_writes_answers_and_says_how_many(target, tokenizer, tmp_path, capsys):
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "talks.jsonl").write_text(json.dumps(talk("x = 1", "why")) + "\n")
    arguments = ["--target", str(tmp_path / "target"), "--output", str(tmp_path / "out"), "--max-new-tokens", "4"]
    main([*arguments, "--data", str(tmp_path / "talks.jsonl"), "--no-bf16"])
    assert re.search(r"out: 2 answers of \d tokens; \d+% are complete", capsys.readouterr().out)
    recipe = json.loads((tmp_path / "out" / "recipe.json").read_text())
    assert (recipe["dtype"], recipe["temperatures"]) == ("float32", [0.0])
    main([*arguments, "--data", str(tmp_path / "talks.jsonl"), "--pack", "--json"])
    found, answers = json.loads(capsys.readouterr().out), read_answers(tmp_path / "out")
    assert found == {
        "folder": str(tmp_path / "out"),
        "answers": 2,
        "tokens": sum(len(row["answer_ids"]) for row in answers),
        "complete": sum(row["ended"] for row in answers) / 2,
        "packed": str(tmp_path / "out" / "packed"),
    }
    with pytest.raises(FileNotFoundError, match=r"no file '.*none.jsonl'. Give a JSONL file, or the id of a dataset"):
        main([*arguments, "--data", str(tmp_path / "none.jsonl")])


def test_a_folder_keeps_the_number_type_that_it_was_begun_with(target, tokenizer, tmp_path, monkeypatch, capsys):
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    out = tmp_path / "out"
    arguments = ["--target", str(tmp_path / "target"), "--output", str(out), "--max-new-tokens", "4",
                 "--batch-size", "1", "--data", str(tmp_path / "talks.jsonl")]  # fmt: skip
    found = iter([True, False, True])
    where = "hf_specdec.training.number_type.computes_bfloat16"
    monkeypatch.setattr(where, lambda device: (next(found), "of a trial"))
    conversations(tmp_path, *[talk(f"x = {number}") for number in range(20)])
    main(arguments)
    assert "dtype: bfloat16, because of a trial" in capsys.readouterr().out
    (out / "answers-000001.jsonl").unlink()
    main(arguments)
    assert f"dtype: bfloat16, because the answers in {out} were begun in it; --no-bf16" in capsys.readouterr().out
    assert len(read_answers(out)) == 20
    with pytest.raises(ValueError, match="other settings: .*dtype 'bfloat16', now 'float32'"):
        main([*arguments, "--no-bf16"])


ASKING = (
    "{% for m in messages %}{{ ('[q]' if m['role'] == 'user' else '[a]') + m['content'] + '[/q]' }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.fixture(scope="module")
def asking(tokenizer):
    asking = copy.deepcopy(tokenizer)
    asking.chat_template = ASKING
    return asking


@pytest.fixture(scope="module")
def chatty(asking):
    """Random text: what ends a message is a token that the target says often."""
    target = fresh_target(dtype=torch.float32, attention="sdpa", vocab_size=len(asking))
    target.generation_config.eos_token_id = list(range(0, len(asking), 9))
    return target


def test_a_target_invents_user_messages_and_answers_them(chatty, asking, tmp_path):
    chatty.save_pretrained(tmp_path / "target")
    asking.save_pretrained(tmp_path / "target")
    arguments = ["--target", str(tmp_path / "target"), "--output", str(tmp_path / "out"), "--batch-size", "4",
                 "--max-new-tokens", "4", "--no-bf16", "--temperature", "0", "1"]  # fmt: skip
    main([*arguments, "--questions", "40"])
    files = sorted((tmp_path / "out").glob("*.jsonl"))
    assert [file.name for file in files] == ["answers-000000.jsonl", "answers-000001.jsonl"]
    rows = written_rows(files)
    assert 32 < len({row["messages"][0]["content"] for row in rows}) <= 40
    assert {row["temperature"] for row in rows} == {0, 1}

    whole = [file.read_bytes() for file in files]
    files[0].unlink()
    main([*arguments, "--questions", "90"])
    assert [file.read_bytes() for file in files] == whole, "a file depends on its number and the seed alone"
    assert len(list((tmp_path / "out").glob("*.jsonl"))) == 3


def test_a_share_of_conversations_goes_on_with_an_invented_message(chatty, asking, tmp_path):
    settings = AnswerSettings(follow_ups=0.5, max_new_tokens=30, batch_size=64)
    rows = written_rows(write_invented(chatty, asking, 64, tmp_path, settings))
    later = [row for row in rows if row["turn"] == 1]
    able = [row for row in rows if row["turn"] == 0 and row["ended"]]
    assert 0.2 < len(later) / len(able) < 0.8, "a conversation goes on where its answer has an end"
    assert all([message["role"] for message in row["messages"]] == ["user", "assistant"] * 2 for row in later)
    assert max(row["turn"] for row in rows) == 1


def test_invented_requests_are_about_the_texts(chatty, asking, tmp_path):
    texts = [f"text number {number}" for number in range(20)]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    chatty.save_pretrained(tmp_path / "target")
    asking.save_pretrained(tmp_path / "target")
    arguments = ["--target", str(tmp_path / "target"), "--output", str(tmp_path / "out"), "--max-new-tokens", "4"]
    main([*arguments, "--no-bf16", "--questions", "500", "--texts", str(file)])
    rows = written_rows((tmp_path / "out").glob("*.jsonl"))
    asked = [row["messages"][0]["content"].rsplit("\n\n", 1) for row in rows]
    about = [text for _, text in asked]
    assert len(about) == len(set(about)) > 10
    assert set(about) <= set(texts)
    assert all(request.startswith(REQUESTS) for request, _ in asked)
    with pytest.raises(SystemExit):
        main([*arguments, "--data", str(file), "--texts", str(file)])


def test_invented_messages_follow_the_target(chatty, asking, tmp_path):
    """The first token of a message against the target's own distribution, at temperature 1."""
    probs = chatty(torch.tensor([asking("[q]", add_special_tokens=False)["input_ids"]])).logits[0, -1].softmax(-1)
    draws, opening = 10_000, asking("[q]", add_special_tokens=False)["input_ids"]
    drawn = answered(chatty, [opening] * draws, [1] * draws, [1.0] * draws)
    counts = torch.bincount(torch.tensor([ids[0] for ids in drawn]), minlength=len(probs))
    assert ((counts - draws * probs).abs() <= 5 * (draws * probs * (1 - probs)).sqrt() + 1).all()


@pytest.mark.parametrize(
    ("template", "lacks"),
    [("{{ messages[0]['content'] }}[/q]", "before"), ("[q]{{ messages[0]['content'] }}", "after")],
)
def test_a_template_without_marks_around_a_question_is_refused(target, tokenizer, tmp_path, template, lacks):
    asking = copy.deepcopy(tokenizer)
    asking.chat_template = template
    with pytest.raises(ValueError, match=f"has no tokens {lacks} a question"):
        write_invented(target, asking, 4, tmp_path / "out", AnswerSettings())
    assert not (tmp_path / "out").exists()


def test_a_target_without_a_chat_template_is_refused(target, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained("examples/tiny-code/target")
    with pytest.raises(ValueError, match=r"tiny-code/target' has no chat template"):
        write_answers(target, tokenizer, conversations(tmp_path, TALK), tmp_path / "out", AnswerSettings())
    assert not (tmp_path / "out").exists()


def test_conversations_come_from_a_dataset_too(tmp_path):
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_list([TALK, talk("b")]).to_parquet(tmp_path / "set" / "train-00000-of-00001.parquet")
    read = read_conversations(str(tmp_path / "set"))
    assert [each.messages[0]["content"] for each in read] == ["a = 1", "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"talks.jsonl, line 2 is not JSON"),
        ('{"text": "x"}', r'line 2 has no list "messages"'),
        ('{"messages": [{"role": "robot", "content": "x"}]}', r"line 2, message 0: role 'robot' is unknown"),
        ('{"messages": [{"role": "user", "content": 3}]}', r"line 2, message 0: content must be text, not 3"),
        ('{"messages": [{"role": "system", "content": "x"}]}', r"line 2 has no user message"),
        (
            '{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]}',
            r"line 2, message 1: a system message may only be the first one",
        ),
    ],
)
def test_lines_that_cannot_be_used_are_named(tmp_path, line, message):
    file = tmp_path / "talks.jsonl"
    file.write_text(json.dumps(TALK) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_conversations(str(file))


def test_conversations_that_are_not_utf8_name_file_and_line(tmp_path):
    file = tmp_path / "talks.jsonl"
    file.write_bytes(json.dumps(TALK).encode() + b'\n{"messages": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"Line 2 of '.*talks\.jsonl' is not UTF-8: byte 0xe9"):
        read_conversations(str(file))
