"""Serve the assistant with its exported drafters in vLLM, and compare with this library (`make test-serving`).

    python examples/serving/measure.py --engine .venv-serving/bin/vllm --record docs/serving-record.md

On held-out prompts, greedy, in float32: vLLM's tokens with a drafter must equal its own without one, unless the first
two logits are equal within rounding; the mean acceptance length must be within 5% of ours, drafting a chain of the same
length from the same drafter, and the acceptance of each position within 0.03. The OpenAI-compatible server, started by
`hf-specdec serve --run`, must give the same tokens and leave no process behind. Exits with 1 if a condition fails; the
record names it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import load_drafter
from hf_specdec.benchmark.prompts import load_prompts, render
from hf_specdec.benchmark.run import device_name
from hf_specdec.serving import Engine, find_engine, plan_serving

HERE = Path(__file__).parent
ASSISTANT = HERE.parent / "smollm2-135m"
TOKENS_PER_ROUND = 5
# Of each drafter the options with which it drafts one chain of that many tokens.
CHAINS: dict[str, dict[str, Any]] = {
    "eagle3": {"depth": TOKENS_PER_ROUND, "top_k": 1, "tree_budget": TOKENS_PER_ROUND},
    "dflash": {"method": "dflash", "tree_budget": TOKENS_PER_ROUND},
    "draft-lm": {"method": "causal_lm_chain", "depth": TOKENS_PER_ROUND, "tree_budget": TOKENS_PER_ROUND},
}
MOST_DIFFERENCE, MOST_RATE_DIFFERENCE, ROUNDING = 0.05, 0.03, 1e-3
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "enable_prefix_caching": False, "seed": 0}


@dataclass
class Counts:
    """What was drafted and accepted in all rounds.

    Attributes:
        rounds: that drafted.
        accepted: [position] rounds in which at least so many drafts were accepted.
    """

    rounds: int
    accepted: list[int]

    @property
    def length(self) -> float:
        """Mean acceptance length, the bonus token included."""
        return 1 + sum(self.accepted) / max(1, self.rounds)

    @property
    def rates(self) -> list[float]:
        """Acceptance of each position."""
        return [count / max(1, self.rounds) for count in self.accepted]


@dataclass
class Result:
    """One drafter, or look-up, in vLLM and here.

    Attributes:
        ours: None where there is nothing of the same kind here.
        num_equal: prompts with the tokens that vLLM writes without a drafter.
        differences: in tokens, within rounding.
        failures: what does not hold.
    """

    name: str
    seconds: float
    theirs: Counts
    ours: Counts | None
    num_equal: int = 0
    differences: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Comparison:
    """The target, its prompts and what was found.

    Args:
        target: folder.
        engine: that serves.
        num_prompts: of the held-out ones.
        new_tokens: of each.
    """

    def __init__(self, target: str, engine: Engine, num_prompts: int, new_tokens: int) -> None:
        self.target, self.engine, self.new_tokens = target, engine, new_tokens
        self.model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(target)
        prompts = load_prompts(str(ASSISTANT / "held_out.jsonl"), num_prompts)
        texts = [render(prompt, tokenizer, chat=True, thinking="default") for prompt in prompts]
        self.prompts: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
        self.folder = Path(tempfile.mkdtemp(prefix="serving-"))
        self.plain, _, self.plain_seconds = self.offline(None)

    def offline(self, speculative: dict[str, Any] | None) -> tuple[list[list[int]], Counts, float]:
        """Tokens, counts and seconds of vLLM's offline engine.

        Raises:
            RuntimeError: it ended with an error; holds the last one that it printed.
        """
        settings = {"model": self.target, **ENGINE} | ({"speculative_config": speculative} if speculative else {})
        request, answer = self.folder / "request.json", self.folder / "answer.json"
        answer.unlink(missing_ok=True)
        request.write_text(json.dumps({"engine": settings, "prompts": self.prompts, "max_tokens": self.new_tokens}))
        done = subprocess.run(
            [*self.engine.python, str(HERE / "offline.py"), str(request), str(answer)], capture_output=True, text=True
        )
        if not answer.is_file():
            raise RuntimeError((done.stdout + done.stderr).strip().splitlines()[-1])
        found = json.loads(answer.read_text())
        counts = found["counts"]
        theirs = Counts(int(counts.get("num_drafts", 0)), counts.get("num_accepted_tokens_per_pos") or [])
        return found["tokens"], theirs, found["seconds"]

    def ours(self, name: str) -> Counts:
        """The same drafter here, drafting chains."""
        drafter = load_drafter(ASSISTANT / name, self.model, dtype=torch.float32, **CHAINS[name])
        counts = Counts(0, [0] * TOKENS_PER_ROUND)
        for prompt in self.prompts:
            self.model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=self.new_tokens, assistant_model=drafter
            )
            assert drafter.stats is not None
            for accepted in drafter.stats.per_step_accepted[0]:
                counts.rounds += 1
                for position in range(accepted):
                    counts.accepted[position] += 1
        return counts

    def compare(self, name: str, speculative: dict[str, Any]) -> Result:
        """A drafter of the assistant, or "ngram"."""
        tokens, theirs, seconds = self.offline(speculative)
        result = Result(name, seconds, theirs, self.ours(name) if name in CHAINS else None)
        self.check_tokens(tokens, result)
        if theirs.rounds == 0:
            result.failures.append("it drafted nothing")
        if result.ours is not None:
            if abs(theirs.length / result.ours.length - 1) > MOST_DIFFERENCE:
                result.failures.append(f"acceptance length {theirs.length:.3f}, ours {result.ours.length:.3f}")
            for position, (rate, own) in enumerate(zip(theirs.rates, result.ours.rates, strict=True)):
                if abs(rate - own) > MOST_RATE_DIFFERENCE:
                    result.failures.append(f"position {position + 1} is accepted with {rate:.3f}, ours {own:.3f}")
        return result

    def check_tokens(self, tokens: list[list[int]], result: Result) -> None:
        """Compares with vLLM's own tokens without a drafter."""
        for row, (found, plain) in enumerate(zip(tokens, self.plain, strict=True)):
            if found == plain:
                result.num_equal += 1
                continue
            place = next(
                (index for index, pair in enumerate(zip(found, plain, strict=False)) if pair[0] != pair[1]),
                min(len(found), len(plain)),
            )
            with torch.no_grad():
                logits = self.model(torch.tensor([self.prompts[row] + plain[:place]])).logits[0, -1]
            first, second = logits.topk(2).values.tolist()
            text = f"prompt {row}, token {place}: the two likeliest logits are {first - second:.2e} apart"
            (result.differences if first - second < ROUNDING else result.failures).append(text)

    def serve(self, name: str) -> Result:
        """The server on the loopback address, started by the command and stopped again."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [
            *(sys.executable, "-m", "hf_specdec.cli", "serve", self.target, str(ASSISTANT / name), "--run"),
            *("--engine", str(Path(self.engine.python[0]).parent / "vllm"), "--port", str(port)),
            *("--output", str(self.folder / "served"), "--num-speculative-tokens", str(TOKENS_PER_ROUND)),
            *("--", "--enforce-eager", "--max-model-len", "2048", "--no-enable-prefix-caching"),
        ]
        with open(self.folder / "server.log", "w") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log)
        address = f"http://127.0.0.1:{port}"
        start = time.perf_counter()
        try:
            while not answers(f"{address}/health"):
                if server.poll() is not None or time.perf_counter() - start > 600:
                    raise RuntimeError((self.folder / "server.log").read_text().strip().splitlines()[-1])
                time.sleep(1)
            start = time.perf_counter()
            tokens = [complete(address, self.target, prompt, self.new_tokens) for prompt in self.prompts]
            seconds = time.perf_counter() - start
            counts = read_metrics(address)
        finally:
            children = processes_below(server.pid)
            server.send_signal(signal.SIGTERM)
            server.wait(60)
        result = Result(f"{name}, server", seconds, counts, self.ours(name))
        self.check_tokens(tokens, result)
        if left := [child for child in children if os.path.exists(f"/proc/{child}")]:
            result.failures.append(f"{len(left)} processes are left after it was stopped")
        return result


def answers(address: str) -> bool:
    """Whether a server says that it is ready."""
    try:
        with urllib.request.urlopen(address, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def complete(address: str, target: str, prompt: list[int], new_tokens: int) -> list[int]:
    """The tokens that a server writes after a prompt."""
    body = {"model": target, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        tokens: list[int] = json.load(response)["choices"][0]["token_ids"]
        return tokens


def read_metrics(address: str) -> Counts:
    """The counts of speculation that a server publishes."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as response:
        lines = [line.split() for line in response.read().decode().splitlines() if line.startswith("vllm:spec_decode")]
    drafts = sum(float(value) for name, value in lines if name.startswith("vllm:spec_decode_num_drafts_total"))
    by_position = {
        int(name.partition('position="')[2].partition('"')[0]): int(float(value))
        for name, value in lines
        if name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    }
    return Counts(int(drafts), [by_position[position] for position in sorted(by_position)])


def processes_below(process: int) -> list[int]:
    """Ids of the processes that a process started, and those that they started (Linux)."""
    found: list[int] = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *processes_below(int(child))]
    return found


def write_record(file: Path, comparison: Comparison, results: list[Result], refused: dict[str, str]) -> None:
    """The record as a page of the documents."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    lines = [
        "# Record: served in vLLM",
        "",
        f"`make test-serving`, {date.today()}: vLLM {comparison.engine.version} (CPU build); this library on torch "
        f"{versions['torch']} and transformers {versions['transformers']}; {device_name(torch.device('cpu'))}, "
        f"{platform.system()}. SmolLM2-135M-Instruct in float32, eager, {len(comparison.prompts)} held-out prompts, "
        f"{comparison.new_tokens} new tokens each, temperature 0, {TOKENS_PER_ROUND} drafted tokens a round; one run. "
        "The offline engine takes all prompts at once, the server one after the other.",
        "",
        "| drafter | tokens as without it | rounds: vLLM | here | acceptance length: vLLM | here | accepted drafts by "
        "position, %: vLLM | here | seconds in vLLM |",
        "|---|---|---|---|---|---|---|---|---|",
        f"| none | | | | | | | | {comparison.plain_seconds:.1f} |",
    ]
    for result in results:
        own = result.ours
        lines.append(
            f"| {result.name} | {result.num_equal} of {len(comparison.prompts)} | {result.theirs.rounds} | "
            f"{own.rounds if own else ''} | {result.theirs.length:.3f} | {f'{own.length:.3f}' if own else ''} | "
            f"{rates(result.theirs)} | {rates(own) if own else ''} | {result.seconds:.1f} |"
        )
    for title, notes in (
        ("Differences within rounding", [f"{each.name}: {note}" for each in results for note in each.differences]),
        ("What does not hold", [f"{each.name}: {note}" for each in results for note in each.failures]),
        ("What this build does not run", [f"{name}: {why}" for name, why in refused.items()]),
    ):
        if notes:
            lines += ["", f"## {title}", "", *(f"- {note}" for note in notes)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def rates(counts: Counts) -> str:
    """Acceptance of each position, in percent."""
    return " ".join(f"{100 * rate:.1f}" for rate in counts.rates)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison; 0 where all of it holds, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True, help="the command vllm")
    parser.add_argument("--prompts", type=int, default=24, help="default: 24")
    parser.add_argument("--new-tokens", type=int, default=64, help="default: 64")
    parser.add_argument("--record", type=Path, default=Path("build/serving-record.md"), help="page to write")
    arguments = parser.parse_args(argv)
    console = Console()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default vLLM takes nearly all memory
    target = str(runpy.run_path(str(HERE.parent / "smollm2.py"))["model_folder"]())
    console.print("Plain decoding in vLLM ...")
    comparison = Comparison(target, find_engine(arguments.engine), arguments.prompts, arguments.new_tokens)
    results, refused = [], {}
    for name in (*CHAINS, "ngram"):
        plan = plan_serving(
            target,
            str(ASSISTANT / name) if name in CHAINS else name,
            export_folder=comparison.folder / f"{name}-vllm",
            num_speculative_tokens=TOKENS_PER_ROUND,
            dtype="float32",
        )
        console.print(f"{name} in vLLM ...")
        try:
            results.append(comparison.compare(name, plan.speculative))
        except RuntimeError as error:
            refused[name] = str(error)
    console.print("eagle3 in vLLM's server ...")
    try:
        results.append(comparison.serve("eagle3"))
    except RuntimeError as error:
        refused["eagle3, server"] = str(error)
    write_record(arguments.record, comparison, results, refused)
    console.print(f"Wrote {arguments.record}.")
    failures = [f"{result.name}: {failure}" for result in results for failure in result.failures]
    failures += [f"{name} does not run: {why}" for name, why in refused.items()]
    for failure in failures:
        console.print(failure, style="red")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
