"""A drafter meets text that it was not trained for, and learns while it serves.

    python examples/adapt_drafter.py

The bundled drafter was trained on Python functions; here it serves a stream of C++ headers, those that come with torch.
The same stream is served several times, each time from the same weights: without learning, with the cost-aware bandit
of SpecBlock, and with an update every eight queries whatever it costs. The output is the target's own each time. One
torch thread serves, so that an update finds a core of its own where there is one.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import load_drafter
from hf_specdec.adaptation import AdaptiveDrafter, AlwaysUpdate, CostAwareBandit, FailSafe

BUNDLED = Path(os.path.relpath(Path(__file__).parent / "tiny-code"))
POLICIES = {"frozen": None, "cost-aware bandit": CostAwareBandit, "always update": AlwaysUpdate}


@dataclass
class Pass:
    """The stream, served once."""

    tokens: list[list[int]]
    rounds: list[int]
    accepted: list[int]
    seconds: float
    adaptation: str = ""
    update_seconds: float = 0.0

    def acceptance_length(self, part: slice) -> float:
        return 1 + sum(self.accepted[part]) / max(1, sum(self.rounds[part]))

    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def header_prompts(tokenizer: Any, count: int, length: int) -> list[torch.Tensor]:
    """Beginnings of passages of torch's C++ headers, the same ones on every run of one torch version."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    files = sorted((Path(spec.origin).parent / "include").rglob("*.h"))
    prompts: list[torch.Tensor] = []
    for index in torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist():
        ids = tokenizer(files[index].read_text(encoding="utf-8", errors="ignore"))["input_ids"]
        if len(ids) > 6 * length:
            prompts.append(torch.tensor([ids[4 * length : 5 * length]]))  # past the licence and the includes
        if len(prompts) == count:
            break
    return prompts


def serve(name: str, model: Any, prompts: list[torch.Tensor], arguments: argparse.Namespace, console: Console) -> Pass:
    drafter = load_drafter(arguments.drafter, target=model)
    policy, adaptive = POLICIES[name], None
    if policy is not None:
        adaptive = AdaptiveDrafter(
            drafter, model, policy=policy(), learning_rate=arguments.learning_rate,
            fail_safe=FailSafe(window_queries=arguments.window_queries), steps_per_update=arguments.steps_per_update,
        )  # fmt: skip
    assistant = drafter if adaptive is None else adaptive
    settings = {"max_new_tokens": arguments.new_tokens, "do_sample": False}
    model.generate(prompts[0], assistant_model=drafter, **settings)  # warms up
    served = Pass([], [], [], 0.0)
    started = time.perf_counter()
    for prompt in track(prompts, description=name, console=console, transient=True):
        output = model.generate(prompt.to(model.device), assistant_model=assistant, **settings)
        served.tokens.append(output[0, prompt.shape[1] :].tolist())
        served.rounds.append(assistant.stats.num_spec_steps)
        served.accepted.append(assistant.stats.num_accepted_draft_tokens)
    if adaptive is not None:
        adaptive.close()  # the last update counts as well
        served.adaptation = f"{adaptive.adaptation}; values {getattr(adaptive.policy, 'values', '-')}"
        served.update_seconds = adaptive.adaptation.update_seconds
    served.seconds = time.perf_counter() - started
    if arguments.save and name == "cost-aware bandit":
        assistant.save_pretrained(arguments.save)
    return served


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(BUNDLED / "target"))
    parser.add_argument("--drafter", default=str(BUNDLED / "specblock"))
    parser.add_argument("--queries", type=int, default=240)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--steps-per-update", type=int, default=2)
    parser.add_argument("--window-queries", type=int, default=20, help="of the fail-safe: chance moves shorter windows")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--save", type=Path, help="write the drafter that the bandit adapted here")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--record", action="store_true", help="write the figures into the drafter's folder and card")
    arguments = parser.parse_args()

    console = Console()
    console.width = max(console.width, 100)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).to(device).eval()
    prompts = header_prompts(tokenizer, arguments.queries, arguments.prompt_tokens)
    console.print(f"{len(prompts)} passages of C++ headers, {arguments.new_tokens} new tokens each, {device}")

    passes = {name: serve(name, model, prompts, arguments, console) for name in arguments.policies}
    quarter = max(1, len(prompts) // 4)
    table = Table(title="one stream, one start, several policies")
    for heading in ("policy", "tokens/s", "length, first quarter", "length, last quarter", "updating", "same output"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    figures = {}
    for name, served in passes.items():
        figures[name] = row = {
            "tokens_per_s": round(served.tokens_per_s(), 1),
            "acceptance_length_first_quarter": round(served.acceptance_length(slice(0, quarter)), 3),
            "acceptance_length_last_quarter": round(served.acceptance_length(slice(-quarter, None)), 3),
            "update_seconds": round(served.update_seconds, 1),
            "output_sha256": hashlib.sha256(json.dumps(served.tokens).encode()).hexdigest()[:16],
            "adaptation": served.adaptation,
        }
        table.add_row(
            name,
            f"{row['tokens_per_s']:.1f}",
            f"{row['acceptance_length_first_quarter']:.2f}",
            f"{row['acceptance_length_last_quarter']:.2f}",
            f"{row['update_seconds']:.1f} s",
            "yes" if row["output_sha256"] == figures[arguments.policies[0]]["output_sha256"] else "NO",
        )
    console.print(table)
    for name, served in passes.items():
        if served.adaptation:
            console.print(f"{name}: {served.adaptation}")
    record = {
        "stream": f"{len(prompts)} passages of C++ headers, {arguments.new_tokens} new tokens each, greedy",
        "policies": figures,
        "command": shlex.join(["python", *sys.argv]),
        "hardware": f"{device}, {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "date": date.today().isoformat(),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    if arguments.record:
        drafter = load_drafter(arguments.drafter)
        known = drafter.training_record or {}
        earlier = known.get("adaptation", {})
        if earlier.get("stream") == record["stream"] and earlier.get("versions") == record["versions"]:
            record["policies"] = earlier["policies"] | figures  # passes over one stream may be served by several runs
        drafter.training_record = known | {"adaptation": record}
        drafter.write_records(arguments.drafter)


if __name__ == "__main__":
    main()
