"""hf-specdec generate and chat with a target that has a chat template: what is asked, answered, coloured and kept."""

from __future__ import annotations

import contextlib
import copy
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from hf_specdec.chat import Answer, Conversation, converse
from hf_specdec.cli import main
from hf_specdec.decoding.trace import Trace
from hf_specdec.methods.lookup import NGramDrafter
from tests.method_table import METHODS, make_ddtree
from tests.targets import make_target, tiny_tokenizer

# The tiny tokenizer knows letters only: s...x, u...x, a...x are messages, and an answer begins after q.
TEMPLATE = "{% for each in messages %}{{ each.role[0] }}{{ each.content }}x{% endfor %}q"
NEW = 12


def chat_tokenizer() -> Any:
    tokenizer = tiny_tokenizer().__class__(tokenizer_object=tiny_tokenizer()._tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("llama", dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("chat") / "target"
    target.save_pretrained(path)
    chat_tokenizer().save_pretrained(path)
    return str(path)


def plain(target: PreTrainedModel, text: str) -> str:
    """What the target alone writes after a text."""
    inputs = tiny_tokenizer()(text, return_tensors="pt")
    output = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    return str(tiny_tokenizer().decode(output[0, inputs["input_ids"].shape[1] :]))


def conversation(target: PreTrainedModel, method: str = "ngram", **settings: Any) -> Conversation:
    drafter = METHODS[method](target)
    return Conversation(target, chat_tokenizer(), drafter, **{"max_new_tokens": NEW, "do_sample": False, **settings})


class Interrupts(LogitsProcessor):
    """Ctrl-C before the first token of an answer."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        raise KeyboardInterrupt


def silent(piece: str, drafted: bool) -> None:
    """Shows nothing."""


def test_an_answer_follows_all_messages_before_it(target: PreTrainedModel) -> None:
    talk = conversation(target, system="be")
    first = talk.ask("hello", silent)
    assert first.text == plain(target, "sbexuhelloxq")
    second = talk.ask("more", silent)
    assert second.text == plain(target, f"sbexuhelloxa{first.text}xumorexq")
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant", "user", "assistant"]
    talk.reset()
    assert talk.ask("hello", silent).text == first.text


@pytest.mark.parametrize("method", ["ddtree", "causal_lm_tree"])
def test_each_piece_has_a_flag_whether_it_was_drafted(target: PreTrainedModel, method: str) -> None:
    talk = conversation(target, method, max_new_tokens=30)
    heard: list[tuple[str, bool]] = []
    answer = talk.ask("abcabc", lambda piece, drafted: heard.append((piece, drafted)))
    talk.reset()
    talk.drafter.trace = Trace()
    talk.ask("abcabc", silent)
    written = talk.drafter.trace.output()
    assert heard == [(tiny_tokenizer().decode([token]), drafted) for token, drafted in written]
    assert answer.num_tokens == len(written) == 30
    assert answer.num_drafted == sum(drafted for _, drafted in written) > 0
    assert talk.drafter.stats is not None
    assert answer.mean_acceptance_length == talk.drafter.stats.mean_acceptance_length
    assert answer.text == "".join(piece for piece, _ in heard)


def test_ctrl_c_ends_an_answer_and_keeps_its_text(target: PreTrainedModel) -> None:
    talk = conversation(target)
    heard: list[str] = []

    def interrupted(piece: str, drafted: bool) -> None:
        heard.append(piece)
        if len(heard) == 5:
            raise KeyboardInterrupt

    answer = talk.ask("hello", interrupted)
    assert answer.interrupted
    assert str(answer).endswith("interrupted")
    assert answer.text == "".join(heard)
    assert plain(target, "uhelloxq").startswith(answer.text)
    assert talk.ask("more", silent).text == plain(target, f"uhelloxa{answer.text}xumorexq")


def test_a_question_without_any_answer_is_removed(target: PreTrainedModel) -> None:
    talk = conversation(target, logits_processor=[Interrupts()])
    assert talk.ask("hello", silent).interrupted
    assert talk.messages == []


def test_a_conversation_longer_than_the_targets_context_is_refused(target: PreTrainedModel) -> None:
    talk = conversation(target)
    assert target.config.max_position_embeddings == 128
    assert talk.ask("a" * 120, silent).num_tokens == 5, "an answer ends where the target's positions do"
    with pytest.raises(ValueError, match="has 1[0-9]+ tokens, but the target .* reads at most 128 .*begin a new one"):
        talk.ask("more", silent)
    with pytest.raises(ValueError, match="The question is empty"):
        talk.ask(" ", silent)


def test_generate_answers_in_the_chat_template_if_there_is_one(
    target: PreTrainedModel, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", folder, "ngram", "--device", "cpu", "--max-new-tokens", str(NEW)]
    assert main([*arguments, "--prompt", "hello", "--system", "be"]) == 0
    printed = capsys.readouterr()
    assert printed.out == plain(target, "sbexuhelloxq") + "\n"
    assert "mean acceptance length" in printed.err
    assert main([*arguments, "--prompt", "hello", "--chat", "off"]) == 0
    assert capsys.readouterr().out == f"hello{plain(target, 'hello')}\n"


def test_generate_answers_several_prompts_in_turn(
    target: PreTrainedModel, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", folder, "ngram", "--device", "cpu", "--max-new-tokens", str(NEW)]
    assert main([*arguments, "--prompt", "hello", "--prompt", "more"]) == 0
    first = plain(target, "uhelloxq")
    second = plain(target, f"uhelloxa{first}xumorexq")
    assert capsys.readouterr().out == f"> hello\n{first}\n> more\n{second}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--prompt", "a", "--chat", "on"], "--chat on: the tokenizer of 'PLAIN' has no chat template"),
        (["generate", "--prompt", "a", "--system", "b"], "--system 'b' needs a chat template, but the tok"),
        (["generate", "--prompt", "a", "--prompt", "b"], "2 prompts are turns .* 'PLAIN' has none: give one --prompt"),
        (["chat"], "The tokenizer of 'PLAIN' has no chat template: choose a target"),
    ],
)
def test_what_needs_a_template_is_refused_without_one(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)  # no weights: they are not asked for
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    command, *others = arguments
    assert main([command, str(tmp_path), "ngram", *others]) == 1
    assert re.search(message.replace("PLAIN", str(tmp_path)), capsys.readouterr().err.splitlines()[-1])


class Screen(io.StringIO):
    """A terminal to write to."""

    def isatty(self) -> bool:
        return True


class Keyboard(Screen):
    """A terminal to read from: lines, and in their place Ctrl-C (KeyboardInterrupt); then Ctrl-D."""

    def __init__(self, *typed: str | type[KeyboardInterrupt]) -> None:
        super().__init__()
        self.typed = iter(typed)

    def readline(self, *_: Any) -> str:
        line = next(self.typed, "")
        if isinstance(line, str):
            return line and f"{line}\n"
        raise line


@pytest.fixture
def say(type_in: Callable[[TextIO], None], folder: str) -> Callable[..., int]:
    """Runs the chat on lines of a pipe."""

    def run(text: bytes, *options: str, target: str = folder) -> int:
        type_in(io.TextIOWrapper(io.BytesIO(text), encoding="ascii"))
        return main(["chat", target, "ngram", "--device", "cpu", "--max-new-tokens", str(NEW), *options])

    return run


def test_chat_answers_the_lines_of_a_pipe(
    target: PreTrainedModel, say: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert say(b"hello\n\nmore\n/reset\n/rest\nhello\n/exit\nunread\n", "--temperature", "0") == 0
    first = plain(target, "uhelloxq")
    second = plain(target, f"uhelloxa{first}xumorexq")
    printed = capsys.readouterr()
    assert printed.out == f"{first}\n\n{second}\n\n{first}\n\n"
    assert len(re.findall(r"^12 tokens in .* tokens/s, mean acceptance length \d", printed.err, re.MULTILINE)) == 3
    assert "Unknown command /rest; the commands are /reset and /exit." in printed.err


def test_chat_samples_if_the_generation_config_says_nothing(
    target: PreTrainedModel, say: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert say(b"hello\n", "--seed", "5") == 0
    written = capsys.readouterr().out.strip()
    talk = Conversation(
        target, chat_tokenizer(), NGramDrafter(), max_new_tokens=NEW, do_sample=True, temperature=0.7, top_p=0.9
    )
    torch.manual_seed(5)
    assert written == talk.ask("hello", silent).text
    assert written != plain(target, "uhelloxq")


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_answers_are_decoded_as_the_generation_config_says(
    command: str,
    target: PreTrainedModel,
    say: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = copy.deepcopy(target)
    own.generation_config.update(do_sample=True, top_k=1, temperature=0.5, repetition_penalty=1.9)
    own.save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    inputs = tiny_tokenizer()("uhelloxq", return_tensors="pt")
    wanted = {}
    for temperature, settings in {None: {}, "0": {"do_sample": False, "temperature": None, "top_k": None}}.items():
        output = own.generate(**inputs, **settings, max_new_tokens=NEW)
        wanted[temperature] = tiny_tokenizer().decode(output[0, 8:])
    assert wanted[None] != plain(target, "uhelloxq")
    for temperature, text in wanted.items():
        options = [] if temperature is None else ["--temperature", temperature]
        if command == "chat":
            assert say(b"hello\n", *options, target=str(tmp_path)) == 0
        else:
            arguments = [str(tmp_path), "ngram", "--device", "cpu", "--max-new-tokens", str(NEW), "--prompt", "hello"]
            assert main(["generate", *arguments, *options]) == 0
        assert capsys.readouterr().out.strip() == text


def test_chat_refuses_a_pipe_that_is_not_utf8(say: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert say("caf\u00e9\n".encode()) == 0
    assert say("caf\u00e9\n".encode("latin1")) == 1
    assert "hf-specdec: stdin must be UTF-8, but byte 0xe9 is not valid" in capsys.readouterr().err


def test_ctrl_c_ends_a_chat_whose_questions_come_from_a_pipe(
    target: PreTrainedModel, type_in: Callable[[TextIO], None]
) -> None:
    type_in(io.StringIO("hello\nmore\n"))
    with pytest.raises(KeyboardInterrupt):
        converse(conversation(target, logits_processor=[Interrupts()]))


def test_chat_in_a_terminal_colours_drafted_tokens_and_continues_after_ctrl_c(
    target: PreTrainedModel,
    folder: str,
    tmp_path: Path,
    type_in: Callable[[TextIO], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_ddtree(target).save_pretrained(tmp_path)
    screen = Screen()
    type_in(Keyboard(KeyboardInterrupt, "hello", "a" * 130, "/reset", "hello"))
    with contextlib.redirect_stdout(screen):
        options = ["--device", "cpu", "--max-new-tokens", str(NEW), "--temperature", "0"]
        assert main(["chat", folder, str(tmp_path), *options]) == 0
    answer = plain(target, "uhelloxq")
    shown = screen.getvalue()
    assert "\x1b[32m" in shown
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown).replace("> ", "").split() == [answer, answer]
    told = capsys.readouterr().err
    assert "Green text was drafted" in told
    assert "reads at most 128" in told
    assert told.count("tokens/s, mean acceptance length") == 2


def test_ctrl_c_beside_an_answer_does_not_end_a_conversation_in_a_terminal(
    target: PreTrainedModel, type_in: Callable[[TextIO], None]
) -> None:
    class InterruptedBeside(Conversation):
        def ask(self, question: str, write: Any) -> Answer:
            raise KeyboardInterrupt

    keyboard = Keyboard("hello", "/exit", "unread")
    type_in(keyboard)
    converse(InterruptedBeside(target, chat_tokenizer(), NGramDrafter(), max_new_tokens=NEW))
    assert list(keyboard.typed) == ["unread"]


def test_control_characters_are_not_written_to_a_terminal(
    target: PreTrainedModel, type_in: Callable[[TextIO], None]
) -> None:
    class Steering(Conversation):
        def ask(self, question: str, write: Any) -> Answer:
            write("a\x1b]2;title\x07b\tc\n\u00a0d\x9b", False)
            return Answer()

    type_in(io.StringIO("hello\n"))
    with contextlib.redirect_stdout(Screen()) as screen:
        converse(Steering(target, chat_tokenizer(), NGramDrafter(), max_new_tokens=NEW))
    assert (
        "a\N{REPLACEMENT CHARACTER}]2;title\N{REPLACEMENT CHARACTER}b\tc\n\u00a0d\N{REPLACEMENT CHARACTER}"
        in screen.getvalue()
    )
