"""The same prompt in the browser, decoded plainly and speculatively side by side.

`pip install ".[gradio]"`, then `python examples/gradio_demo.py`: a small assistant (`bundle.py`). The two take
turns on the machine, and the one with less time goes next, so that neither slows the other down. Each clock counts only
its own turns: the time of whole calls up to the token shown.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from bundle import bundle_of, inputs_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from hf_specdec import load_drafter
from hf_specdec.benchmark.prompts import Prompt, load_prompts
from hf_specdec.decoding.trace import Trace
from hf_specdec.visualize.page import pictures
from hf_specdec.visualize.style import COLOURS, PICTURES

REFRESH_S = 0.05


@dataclass
class Side:
    """One of the two: what it has written, and how long it took in its own turns."""

    name: str
    token_ids: list[int] = field(default_factory=list)
    seconds: float = 0.0
    done: bool = False
    error: BaseException | None = None
    drafter: Any = None

    def caption(self) -> str:
        """Its figures in one line."""
        rate = len(self.token_ids) / self.seconds if self.seconds else 0.0
        text = f"{self.name}: {len(self.token_ids)} tokens, {self.seconds:.2f} s, {rate:.0f} tokens/s"
        if self.drafter is not None and self.drafter.stats is not None:
            text += f", mean acceptance length {self.drafter.stats.mean_acceptance_length:.2f}"
        return text + (", done" if self.done else "")


class Turns:
    """Lets one side run at a time: the one that has used less time, as long as both have something to do."""

    def __init__(self, sides: list[Side]) -> None:
        self.sides = sides
        self.changed = threading.Condition()
        self.stopped = False

    def take(self, side: Side) -> None:
        """Waits until it is the side's turn.

        Raises:
            InterruptedError: the race was stopped.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or self._is_next(side))
            if self.stopped:
                raise InterruptedError("The race was stopped.")

    def _is_next(self, side: Side) -> bool:
        going = [each for each in self.sides if not each.done]
        return side is min(going, key=lambda each: each.seconds)  # of equals the first

    def hand_over(self, side: Side, seconds: float) -> None:
        """Counts a turn that is over."""
        with self.changed:
            side.seconds += seconds
            self.changed.notify_all()

    def finish(self, side: Side) -> None:
        """The side has nothing more to do."""
        with self.changed:
            side.done = True
            self.changed.notify_all()

    def stop(self) -> None:
        """Ends the race early: both sides stop at their next token."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()


class Lane(BaseStreamer):
    """A side's streamer: takes its tokens, and waits for its turn after each."""

    def __init__(self, turns: Turns, side: Side) -> None:
        self.turns = turns
        self.side = side
        self.prompt_seen = False
        self.began = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        seconds = time.perf_counter() - self.began
        if self.prompt_seen:
            self.side.token_ids += value.flatten().tolist()
        self.prompt_seen = True  # generate puts the prompt first
        self.turns.hand_over(self.side, seconds)
        self.turns.take(self.side)
        self.began = time.perf_counter()

    def end(self) -> None:
        """What is left of the call counts when it returns."""


def race(
    model: Any, tokenizer: Any, drafter: Any, prompt: str, new_tokens: int, temperature: float
) -> Iterator[tuple[Side, Side]]:
    """Runs both sides on a prompt.

    Args:
        model: the target.
        tokenizer: its.
        drafter: for the second side.
        prompt: text.
        new_tokens: most.
        temperature: 0 is greedy.

    Yields:
        plain and speculative, every now and then and at the end.
    """
    inputs = inputs_of(tokenizer, Prompt(prompt, "")).to(model.device)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    sides = Side("plain"), Side("speculative", drafter=drafter)
    turns = Turns(list(sides))

    def run(side: Side) -> None:
        try:
            turns.take(side)
            lane = Lane(turns, side)
            assistant = {} if side.drafter is None else {"assistant_model": side.drafter}
            model.generate(**inputs, **sampling, **assistant, max_new_tokens=new_tokens, streamer=lane)
            turns.hand_over(side, time.perf_counter() - lane.began)
        except BaseException as error:  # told in the thread that asked
            side.error = error
        finally:
            turns.finish(side)

    threads = [threading.Thread(target=run, args=(side,), daemon=True) for side in sides]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads):
            time.sleep(REFRESH_S)
            yield sides
        for side in sides:
            if side.error is not None:
                raise side.error
        yield sides
    finally:
        turns.stop()
        for thread in threads:
            thread.join()


def draw(model: Any, tokenizer: Any, drafter: Any, prompt: str, new_tokens: int) -> str:
    """The greedy continuation with accepted tokens shaded and the trees of its first rounds, as HTML."""
    drafter.trace = trace = Trace()
    try:
        inputs = inputs_of(tokenizer, Prompt(prompt, "")).to(model.device)
        model.generate(**inputs, assistant_model=drafter, max_new_tokens=new_tokens, do_sample=False)
    finally:
        drafter.trace = None
    return f"<style>{COLOURS}{PICTURES}</style><div>{pictures(trace, tokenizer, range(3))}</div>"


def gradio_module() -> Any:
    """Gradio itself.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import gradio
    except ImportError as error:
        raise ImportError(
            f"The page is built with gradio ({error}): pip install '.[gradio]'. Without it, `python "
            "examples/quickstart.py` compares ways of decoding in the terminal, and `hf-specdec bench` draws them."
        ) from error
    return gradio


def page(model: Any, tokenizer: Any, drafter: Any, prompts: list[str]) -> Any:
    """The Gradio app."""
    gradio = gradio_module()

    def show(prompt: str, new_tokens: float, temperature: float) -> Iterator[tuple[str, str, str, str]]:
        for plain, speculative in race(model, tokenizer, drafter, prompt, int(new_tokens), temperature):
            own, other = plain, speculative
            shown = f"{prompt}\n\n" if tokenizer.chat_template else prompt
            yield (
                own.caption(),
                shown + tokenizer.decode(own.token_ids),
                other.caption(),
                shown + tokenizer.decode(other.token_ids),
            )

    with gradio.Blocks(title="Speculative decoding, side by side") as app:
        gradio.Markdown(__doc__)
        prompt = gradio.Textbox(prompts[0], label="Prompt", lines=6)
        gradio.Examples([[text] for text in prompts], [prompt])
        with gradio.Row():
            new_tokens = gradio.Slider(8, 512, 128, step=8, label="new tokens")
            temperature = gradio.Slider(0, 1.5, 0, step=0.1, label="temperature (0 is greedy)")
        with gradio.Row():
            start = gradio.Button("Race", variant="primary")
            drawing = gradio.Button("Draw what the drafter did (greedy)")
        with gradio.Row():
            outputs = []
            for name in ("plain", "speculative"):
                with gradio.Column():
                    caption = gradio.Textbox(label="figures", show_label=False, value=name)
                    outputs += [caption, gradio.Textbox(label=name, lines=18)]
        picture = gradio.HTML()
        # One race at a time: a second one would slow the first.
        start.click(show, [prompt, new_tokens, temperature], outputs, concurrency_limit=1, concurrency_id="machine")
        drawing.click(
            lambda text, tokens: draw(model, tokenizer, drafter, text, int(tokens)),
            [prompt, new_tokens],
            picture,
            concurrency_limit=1,
            concurrency_id="machine",
        )
    return app


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="target: Hub id or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", help="drafter: Hub id or folder; default: the bundled one of the target")
    parser.add_argument("--tree-budget", type=int, default=15)
    parser.add_argument("--prompts", help='lines of {"prompt": ...} or {"messages": ...}; default: of the target')
    parser.add_argument("--port", type=int, help="of the page; default: a free one")
    arguments = parser.parse_args(argv)
    try:
        gradio_module()  # before the models: they may take minutes
    except ImportError as error:
        parser.error(str(error))

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    bundle = bundle_of(arguments.model, print)
    if bundle is None and None in (arguments.drafter, arguments.prompts):
        parser.error(f"--model {arguments.model} needs a drafter that was made for it (--drafter), and --prompts.")
    name = arguments.model if bundle is None else bundle.target
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
    drafter_folder = arguments.drafter or str(bundle.folder / "dflash")
    drafter = load_drafter(drafter_folder, target=model, tree_budget=arguments.tree_budget)
    asked = load_prompts(arguments.prompts or str(bundle.prompts))
    prompts = [prompt.text for prompt in asked if not prompt.before][:8]
    for _ in race(model, tokenizer, drafter, prompts[0], 8, 0.0):  # warms up
        pass
    page(model, tokenizer, drafter, prompts).launch(server_port=arguments.port)


if __name__ == "__main__":
    main()
