"""H-RAD's training: what it learns from, balance, and that it learns what can be learnt."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from hf_specdec import load_drafter
from hf_specdec.decoding.upstream import CACHE
from hf_specdec.methods.specbranch import HRAD, SpecBranchConfig
from hf_specdec.training.answer_files import AnswerSettings
from hf_specdec.training.conversation_answers import read_conversations, write_answers
from hf_specdec.training.hrad import (
    Examples,
    Settings,
    _read_examples,
    _write_examples,
    asked_prompts,
    balance,
    collect,
    confusion,
    cut_prompts,
    fit,
    main,
)
from tests.method_table import make_causal_lm
from tests.targets import fresh_target, make_target, tiny_tokenizer
from tests.training.test_conversation_answers import TEMPLATE, talk
from tests.watched import unseen

ROOT = Path(__file__).parents[2]
CONFIG = SpecBranchConfig(target_hidden_size=8, num_target_layers=4)


def blobs(counts: tuple[int, int, int], seed: int) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(3, 40, generator=torch.Generator().manual_seed(9)) * torch.linspace(1, 100, 40)
    classes = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    noise = torch.randn(len(classes), 40, generator=generator) * torch.linspace(1, 100, 40)
    return Examples(centres[classes] + 0.5 * noise, classes)


def test_examples_are_the_last_layers_the_new_token_and_what_became_of_the_draft() -> None:
    target = make_target("llama", "sdpa", torch.float32)
    model = make_causal_lm(target, noise=0.01).model
    prompt = [5, 9, 14, 3, 22, 8]
    examples = collect(target, model, [prompt], draft_length=3, new_tokens=60)
    assert set(examples.classes.tolist()) == {0, 1, 2}
    with torch.no_grad():
        states = target(torch.tensor([prompt]), output_hidden_states=True)
        token = states.logits[0, -1].argmax()
        taps = []
        handles = [
            layer.register_forward_hook(
                lambda _, __, out: taps.append((out[0] if isinstance(out, tuple) else out)[0, -1])
            )
            for layer in target.model.layers
        ]
        target(torch.tensor([prompt]))
    for handle in handles:
        handle.remove()
    expected = torch.cat([*taps, target.get_input_embeddings()(token)])
    torch.testing.assert_close(examples.inputs[0], expected, rtol=1e-4, atol=1e-4)


def test_prompts_that_run_together_give_the_examples_they_give_alone() -> None:
    target = make_target("llama", "sdpa")
    model = make_causal_lm(target, noise=0.01).model
    prompts = [[5, 9, 14, 3, 22, 8], [7, 3, 11, 30], [12, 40, 6, 19, 21, 33]]
    both = [collect(target, model, prompts, draft_length=3, new_tokens=20, batch_size=size) for size in (1, 3)]
    alone, together = (sorted(zip(found.inputs.tolist(), found.classes.tolist(), strict=True)) for found in both)
    assert [kind for _, kind in alone] == [kind for _, kind in together]
    torch.testing.assert_close(torch.tensor([x for x, _ in alone]), torch.tensor([x for x, _ in together]))


@pytest.mark.slow
def test_caches_of_a_call_do_not_outlive_it() -> None:
    target = fresh_target("llama", "sdpa")
    model = make_causal_lm(target, noise=0.01).model
    alive: list[int] = []  # at the first forward with each cache, of those before it
    caches: weakref.WeakSet[Any] = weakref.WeakSet()

    def count(module: Any, inputs: Any, named: dict[str, Any]) -> None:
        if named[CACHE] not in caches:
            gc.collect()
            alive.append(len(caches))
            caches.add(named[CACHE])

    for each in (target, model):
        each.register_forward_pre_hook(unseen(count), with_kwargs=True)
    collect(target, model, [[5, 6, 7]] * 4, draft_length=3, new_tokens=10, batch_size=1)
    assert len(alive) == 2 * 4
    assert max(alive) <= 3, "its own, and of the call before, which its drafter may still hold"


def test_rare_classes_are_filled_up_between_their_own_examples() -> None:
    examples = blobs((30, 10, 3), 0)
    full = balance(examples, 5, 0)
    assert torch.bincount(full.classes).tolist() == [30, 30, 30]
    own, added = examples.inputs[examples.classes == 2], full.inputs[full.classes == 2]
    assert bool((added >= own.min(0).values - 1e-2).all())
    assert bool((added <= own.max(0).values + 1e-2).all())


def test_what_can_be_learnt_is_learnt_and_the_best_weights_are_kept() -> None:
    torch.manual_seed(0)
    h_rad = HRAD(CONFIG)
    examples, held_out = blobs((200, 80, 30), 1), blobs((40, 40, 40), 2)
    losses = fit(h_rad, examples, held_out, Settings(epochs=12, learning_rate=2e-3))
    matrix = confusion(h_rad, held_out)
    assert int(matrix.diagonal().sum()) > 0.9 * len(held_out.classes)
    assert losses[0] > min(losses)


def test_examples_can_be_kept_in_a_folder_yet_to_be_made(tmp_path: Path) -> None:
    held_out, examples = blobs((2, 1, 1), 1), blobs((3, 2, 2), 2)
    _write_examples(tmp_path / "new" / "examples.safetensors", held_out, examples)
    for read, kept in zip(_read_examples(tmp_path / "new" / "examples.safetensors"), (held_out, examples), strict=True):
        assert read.inputs.equal(kept.inputs)
        assert read.classes.equal(kept.classes)


def test_training_stops_when_nothing_gets_better() -> None:
    torch.manual_seed(0)
    noise = Examples(torch.randn(90, 40), torch.arange(90) % 3)
    losses = fit(HRAD(CONFIG), noise, Examples(torch.randn(30, 40), torch.arange(30) % 3), Settings(50, 3, 8, 1e-2))
    assert len(losses) < 50


def test_prompts_are_cut_from_documents_that_are_long_enough() -> None:
    documents = [list(range(20)), [1, 2], list(range(100, 140))]
    prompts = cut_prompts(documents, 8, 10, 0)
    assert sorted(len(prompt) for prompt in prompts) == [8, 8]
    assert len(cut_prompts(documents, 8, 1, 0)) == 1


def run_command(folder: Path, *options: str) -> PreTrainedModel:
    """Runs the command on a tiny pair, which it saves in `folder` before; returns the target."""
    target = make_target("llama", "sdpa", torch.float32, initializer_range=0.15)
    for name, model in (("target", target), ("draft", make_causal_lm(target).model)):
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    texts = [chr(97 + index) * 12 for index in range(20)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    main(
        ["--target", str(folder / "target"), "--draft-model", str(folder / "draft"), "--refer-to", "../draft",
         "--text", str(folder / "text.jsonl"), "--output", str(folder / "drafter"), "--license", "mit",
         "--prompt-tokens", "4", "--new-tokens", "12", "--num-prompts", "12", "--draft-length", "3", "--epochs", "2",
         *options],
    )  # fmt: skip
    return target


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt-tokens", "13"], "19 documents gave 0 prompts of --prompt-tokens 13 tokens"),
        (["--num-prompts", "1"], r"gave 1 prompts .* \(--num-prompts 1\), but 2 are needed"),
        (
            ["--new-tokens", "5000"],
            r"Texts have up to 5004 tokens \(.* together\), but .* has max_position_embeddings ",
        ),
        (["--examples", "examples.safetensors"], "have 40 features each, but the H-RAD of this pair reads "),
    ],
)
def test_what_does_not_fit_is_refused_before_the_pair_runs(
    tmp_path: Path,
    chdir: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    chdir(tmp_path)
    _write_examples(Path("examples.safetensors"), blobs((2, 1, 1), 1), blobs((3, 2, 2), 2))
    with pytest.raises(ValueError, match=message):
        run_command(tmp_path, *options)
    assert "the pair writes" not in capsys.readouterr().err


def test_command_trains_a_checkpoint_that_names_its_draft_model_and_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = run_command(tmp_path)
    assert re.search(r"the pair writes: 100%.* (\d+)/\1 \[", capsys.readouterr().err)
    drafter = load_drafter(tmp_path / "drafter", target, parallel=False, lengths="fixed")
    assert drafter.config.draft_model == "../draft"
    assert drafter.training_record["epochs"] == 2
    assert list(drafter.training_record["f1_of_held_out"]) == list(drafter.training_record["classes"])
    assert "\nlicense: mit\n" in (tmp_path / "drafter" / "README.md").read_text()
    prompt = torch.tensor([[5, 6, 7]])
    settings = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(
        target.generate(prompt, assistant_model=drafter, **settings), target.generate(prompt, **settings)
    )
    assert drafter.stats.num_draft_tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epochs", "0"], "argument --epochs: 0 must be at least 1"),
        (["--min-confidence", "2"], "argument --min-confidence: 2.0 must be between 0 and 1"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused_with_their_option(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--target", "no", "--draft-model", "no", "--output", "no", "--text", "no.txt", *options])
    assert message in capsys.readouterr().err


def test_prompts_are_what_an_assistant_is_asked(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/tiny-code/target")
    tokenizer.chat_template = TEMPLATE
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(talk(f"x = {n}", "why")) + "\n" for n in range(5)))
    asked = asked_prompts([str(tmp_path / "talks.jsonl")], tokenizer, 9, 0)
    first = [tokenizer.apply_chat_template(talk(f"x = {n}")["messages"], add_generation_prompt=True) for n in range(5)]
    assert sorted(asked) == sorted(list(each["input_ids"]) for each in first)

    target = fresh_target(dtype=torch.float32, attention="sdpa", vocab_size=len(tokenizer))
    data = read_conversations(str(tmp_path / "talks.jsonl"))
    write_answers(target, tokenizer, data, tmp_path / "answers", AnswerSettings(max_new_tokens=4))
    turns = asked_prompts([str(tmp_path / "answers")], tokenizer, 100, 0)
    assert len(turns) == 10, "every turn, with what was answered before"
    assert all(each in turns for each in asked)
    assert len(asked_prompts([str(tmp_path / "answers")], tokenizer, 3, 0)) == 3

    for name, model in (("target", target), ("draft", make_causal_lm(target).model)):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    main(
        ["--target", str(tmp_path / "target"), "--draft-model", str(tmp_path / "draft"), "--refer-to", "../draft",
         "--data", str(tmp_path / "answers"), "--output", str(tmp_path / "drafter"), "--new-tokens", "12",
         "--draft-length", "3", "--epochs", "1"],
    )  # fmt: skip
    assert load_drafter(tmp_path / "drafter", target).training_record["epochs"] == 1
    (tmp_path / "talks.jsonl").write_text(json.dumps(talk("x")) + "\n")
    with pytest.raises(ValueError, match=r"talks.jsonl holds 1 conversation, but 2 are needed"):
        main(["--target", str(tmp_path / "target"), "--draft-model", str(tmp_path / "draft"), "--output", "no",
              "--data", str(tmp_path / "talks.jsonl")])  # fmt: skip
