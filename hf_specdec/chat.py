"""A conversation with a target and its drafter: questions, streamed answers, and statistics of the drafts.

`Conversation` does not use a terminal; `converse` is `hf-specdec chat`, in a terminal or between pipes. The options are
in `cli.py`, chat templates in `chat_template.py`.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from hf_specdec.chat_template import Message, Thinking, render
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.visualize.text import TextPieces


@dataclass
class Answer:
    """The target's answer to a question, filled while it is generated.

    Attributes:
        text: without special tokens.
        num_tokens: special tokens included.
        num_drafted: those of them that were drafted.
        seconds: since the question, prefill included.
        mean_acceptance_length: see `SpeculationStats`; 0 before the first round.
        interrupted: whether Ctrl-C ended it.
    """

    text: str = ""
    num_tokens: int = 0
    num_drafted: int = 0
    seconds: float = 0.0
    mean_acceptance_length: float = 0.0
    interrupted: bool = False

    def __str__(self) -> str:
        rate = self.num_tokens / self.seconds if self.seconds else 0.0
        return (
            f"{self.num_tokens} tokens in {self.seconds:.1f} s, {rate:.1f} tokens/s, mean acceptance length "
            f"{self.mean_acceptance_length:.2f}, {self.num_drafted} tokens drafted"
            f"{', interrupted' if self.interrupted else ''}"
        )


Write: TypeAlias = Callable[[str, bool], None]  # a piece of text, and whether it was drafted


class Conversation:
    """Questions and answers in the target's chat template; each answer is generated from all messages before it.

    Args:
        model: the target.
        tokenizer: its tokenizer, with a chat template.
        drafter: for the target.
        system: the system message; None for the template's default.
        thinking: see `render`.
        max_new_tokens: limit of each answer.
        settings: of `generate`, such as `do_sample`.

    Attributes:
        messages: so far.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        drafter: Drafter,
        *,
        system: str | None = None,
        thinking: Thinking = "default",
        max_new_tokens: int,
        **settings: Any,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.thinking: Thinking = thinking
        self.max_new_tokens = max_new_tokens
        self.settings = settings
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        """Removes all messages except the system message."""
        self.messages = list(self._opening)

    def ask(self, question: str, write: Write) -> Answer:
        """Adds a question and the target's answer.

        Ctrl-C ends the answer; its text so far is kept. A question without any answer is removed.

        Args:
            question: the user's message.
            write: receives the answer piece by piece.

        Raises:
            ValueError: the question is empty, the chat template refuses it, or the conversation is too long for the
                target.
        """
        if not question.strip():
            raise ValueError("The question is empty: give a text.")
        messages = [*self.messages, {"role": "user", "content": question}]
        text = render(messages, self.tokenizer, thinking=self.thinking)
        # The template adds the special tokens.
        inputs = self.tokenizer(text, return_tensors="pt", add_special_tokens=False, return_token_type_ids=False)
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)  # not every config has it
        num_read = inputs["input_ids"].shape[1]
        if most is not None and num_read >= most:
            raise ValueError(
                f"The conversation has {num_read} tokens, but the target {self.model.name_or_path!r} reads at most "
                f"{most} (max_position_embeddings): begin a new one."
            )
        answer = Answer()
        streamer = _AnswerStreamer(self.drafter, self.tokenizer, write, answer)
        try:
            self.model.generate(
                **inputs.to(self.model.device),
                **self.settings,
                max_new_tokens=self.max_new_tokens if most is None else min(self.max_new_tokens, most - num_read),
                assistant_model=self.drafter,
                streamer=streamer,
            )
        except KeyboardInterrupt:
            answer.interrupted = True
            streamer.end()
        if answer.num_tokens:
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer


class _AnswerStreamer(BaseStreamer):
    """Converts tokens into pieces of text, each with a flag whether it was drafted."""

    def __init__(self, drafter: Drafter, tokenizer: Any, write: Write, answer: Answer) -> None:
        self.drafter, self.write, self.answer = drafter, write, answer
        self.pieces = TextPieces(lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
        self.began = time.perf_counter()
        self.has_prompt = False
        self.num_rounds = 0
        self.accepted_left = 0  # accepted tokens of this round that have not arrived yet
        self.drafted = False

    def put(self, value: Tensor) -> None:
        if not self.has_prompt:
            self.has_prompt = True
            return
        stats, answer = self.drafter.stats, self.answer
        assert stats is not None
        (rounds,) = stats.per_step_accepted
        if len(rounds) > self.num_rounds:
            self.num_rounds, self.accepted_left = len(rounds), rounds[-1]
        self.drafted = self.accepted_left > 0
        self.accepted_left -= 1
        answer.num_tokens += 1
        answer.num_drafted += self.drafted
        self._write_piece(self.pieces.add(int(value)))

    def end(self) -> None:
        self._write_piece(self.pieces.rest())
        self.answer.seconds = time.perf_counter() - self.began
        if self.answer.num_tokens:
            assert self.drafter.stats is not None
            self.answer.mean_acceptance_length = self.drafter.stats.mean_acceptance_length

    def _write_piece(self, piece: str) -> None:
        if piece:
            self.answer.text += piece
            self.write(piece, self.drafted)


_DRAFTED, _FAINT, _END = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_COMMANDS = {"/reset": "begins a new conversation", "/exit": "ends"}


def converse(conversation: Conversation) -> None:
    """Answers the lines of stdin, one by one, until it ends or a line is /exit.

    On a terminal, drafted tokens are green. Statistics of each answer are written to stderr.

    Raises:
        ValueError: stdin is not a terminal, and a line cannot be answered or is not UTF-8.
        KeyboardInterrupt: Ctrl-C, if stdin is not a terminal.
    """
    interactive = sys.stdin.isatty()
    on_terminal = sys.stdout.isatty()
    if interactive:
        commands = ", ".join(f"{name} {what}" for name, what in _COMMANDS.items())
        green = " Green text was drafted." if on_terminal else ""
        print(f"{commands} (or Ctrl-D), Ctrl-C ends an answer.{green}", file=sys.stderr)
    for line in _typed() if interactive else _piped():
        question = line.strip()
        if question == "/exit":
            return
        if question == "/reset":
            conversation.reset()
        elif re.fullmatch(r"/\w+", question):
            print(f"Unknown command {question}; the commands are {' and '.join(_COMMANDS)}.", file=sys.stderr)
        elif question:
            try:
                if _answer(conversation, question, on_terminal).interrupted and not interactive:
                    raise KeyboardInterrupt
            except ValueError as error:
                if not interactive:
                    raise
                print(f"hf-specdec: {error}", file=sys.stderr)
            except KeyboardInterrupt:  # raised above, or just before or after an answer
                if not interactive:
                    raise
                print()


def _answer(conversation: Conversation, question: str, on_terminal: bool) -> Answer:
    """Writes an answer to stdout and its statistics to stderr."""

    def write(piece: str, drafted: bool) -> None:
        if on_terminal:
            # A target may generate control characters, which a terminal would obey.
            piece = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", piece)
            piece = f"{_DRAFTED}{piece}{_END}" if drafted else piece
        print(piece, end="", flush=True)

    answer = conversation.ask(question, write)
    print("\n", flush=True)
    print(f"{_FAINT}{answer}{_END}" if sys.stderr.isatty() and on_terminal else answer, file=sys.stderr)
    return answer


def _typed() -> Iterator[str]:
    """Lines from a terminal. Ctrl-C empties the line, Ctrl-D ends."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() line editing and a history; absent on Windows
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def _piped() -> Iterator[str]:
    """Lines of stdin as UTF-8, whatever the locale."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise ValueError(
            f"stdin must be UTF-8, but byte 0x{error.object[error.start]:02x} is not valid: convert the text first, "
            "for example with iconv."
        ) from error
