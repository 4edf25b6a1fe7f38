"""Serve text to a drafter that was not trained on it, with and without learning while serving.

    python examples/adapt_drafter.py --num-blocks 3 --tree-budget 15
    python examples/adapt_drafter.py --num-blocks 3 --tree-budget 15 --poison --policies "cost-aware bandit"

The bundled drafter was trained on Python functions; here it serves a stream of C++ headers, those that come with torch.
Every policy starts from the same weights: no learning, the cost-aware bandit of SpecBlock, an update every eight
queries regardless of its cost (OSD), and ATLAS: the bandit's drafter merged with a static one. The policies take turns,
`--turn` queries each, so that other load on the machine slows all of them alike; a turn ends when its updates have
ended, so that none runs during another's turn. The output is always the target's own. One torch thread serves, so that
updates can use another core.

Passages differ in how well they can be drafted, so "before" and "after" are the frozen and the adapted drafter on the
same text: the last quarter of the stream, and passages that were not in it, served at the end without learning, and
without the static drafter of ATLAS.

With `--poison` the feedback is wrong from a third of the stream on: whatever is drafted, the learner gets one and the
same token as the target's. This ends when the fail-safe has restored good weights; then the feedback is correct again.
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
from collections.abc import Sequence
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
from hf_specdec.adaptation import AdaptiveDrafter, AlwaysUpdate, CostAwareBandit
from hf_specdec.drafting.drafter import always_drafting
from hf_specdec.methods.merged import MergedDrafter

BUNDLED = Path(os.path.relpath(Path(__file__).parent / "tiny-code"))
ATLAS = "ATLAS"
POLICIES = {"frozen": None, "cost-aware bandit": CostAwareBandit, "always update": AlwaysUpdate, ATLAS: CostAwareBandit}

RECORDS = {False: "adaptation", True: "poisoned adaptation"}  # where the figures are in a drafter's training record


class Poisoned(AdaptiveDrafter):
    """Is told the same target state everywhere from one query on, until the fail-safe has acted."""

    first_poisoned: int
    told: torch.Tensor | None = None

    def finish_query(self, query: Any) -> None:
        if len(self.adaptation.queries) >= self.first_poisoned and not self.adaptation.reverts:
            if self.told is None:
                self.told = query.target_hidden[-1]
            query.target_hidden = self.told.expand_as(query.target_hidden)
            for row in query.rows:
                row["last_hidden"] = self.told.expand_as(row["last_hidden"])
        super().finish_query(query)


class Pass:
    """The stream, served by one policy."""

    def __init__(self, name: str, model: Any, arguments: argparse.Namespace) -> None:
        self.model, self.settings = model, {"max_new_tokens": arguments.new_tokens, "do_sample": False}
        options = {"num_blocks": arguments.num_blocks, "tree_budget": arguments.tree_budget}
        options = {option: value for option, value in options.items() if value is not None}
        self.drafter = load_drafter(arguments.drafter, target=model, **options)
        self.adaptive: AdaptiveDrafter | None = None
        self.assistant: Any = self.drafter
        policy = POLICIES[name]
        if policy is not None:
            kind = Poisoned if arguments.poison else AdaptiveDrafter
            self.adaptive = kind(model, self.drafter, policy=policy())
            if isinstance(self.adaptive, Poisoned):
                self.adaptive.first_poisoned = arguments.queries // 3
            self.assistant = self.adaptive
            if name == ATLAS:
                static = load_drafter(arguments.drafter, target=model, **options)
                self.assistant = MergedDrafter(static, self.adaptive, tree_budget=options.get("tree_budget", "auto"))
        self.tokens: list[list[int]] = []
        self.rounds: list[int] = []
        self.accepted: list[int] = []
        self.seconds = 0.0

    def serve(self, prompt: torch.Tensor, assistant: Any) -> tuple[list[int], int, int]:
        """Tokens written, rounds, and drafted tokens accepted."""
        with always_drafting():
            output = self.model.generate(prompt.to(self.model.device), assistant_model=assistant, **self.settings)
        stats = assistant.stats
        return output[0, prompt.shape[1] :].tolist(), stats.num_spec_steps, stats.num_accepted_draft_tokens

    def turn(self, prompts: list[torch.Tensor]) -> None:
        started = time.perf_counter()
        for prompt in prompts:
            tokens, rounds, accepted = self.serve(prompt, self.assistant)
            self.tokens.append(tokens)
            self.rounds.append(rounds)
            self.accepted.append(accepted)
        if self.adaptive is not None:
            self.adaptive.wait()  # counted: the update was made for these queries
        self.seconds += time.perf_counter() - started

    def length(self, first: int, last: int | None = None) -> float:
        """Mean acceptance length over some queries."""
        return 1 + sum(self.accepted[first:last]) / max(1, sum(self.rounds[first:last]))

    def length_without_learning(self, prompts: list[torch.Tensor]) -> float:
        served = [self.serve(prompt, self.drafter) for prompt in prompts]
        return 1 + sum(accepted for *_, accepted in served) / max(1, sum(rounds for _, rounds, _ in served))


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


def figures_of(served: Pass, frozen: Pass | None, held_out: list[torch.Tensor]) -> dict[str, Any]:
    quarter = max(1, len(served.tokens) // 4)
    tokens_per_s = sum(map(len, served.tokens)) / served.seconds
    row: dict[str, Any] = {
        "tokens_per_s": round(tokens_per_s, 1),
        "acceptance_length": round(served.length(0), 3),
        "acceptance_length_first_quarter": round(served.length(0, quarter), 3),
        "acceptance_length_last_quarter": round(served.length(-quarter), 3),
    }
    if held_out:
        row["acceptance_length_held_out"] = round(served.length_without_learning(held_out), 3)
    if frozen is not None and frozen is not served:
        row["tokens_per_s_of_frozen"] = round(sum(map(len, frozen.tokens)) / frozen.seconds, 1)
        row["speed_over_frozen"] = round(frozen.seconds / served.seconds, 3)
        row["last_quarter_over_frozen"] = round(served.length(-quarter) / frozen.length(-quarter), 3)
    row["output_sha256"] = hashlib.sha256(json.dumps(served.tokens).encode()).hexdigest()[:16]
    if served.adaptive is not None:
        row["update_seconds"] = round(served.adaptive.adaptation.update_seconds, 1)
        row["adaptation"] = str(served.adaptive.adaptation)
        if isinstance(served.adaptive.policy, CostAwareBandit):
            row["values"] = {action: round(value, 3) for action, value in served.adaptive.policy.values.items()}
    return row


def comparison(policies: Sequence[str]) -> dict[str, str]:
    """What a record says was compared; nothing without a frozen pass beside another one."""
    if "frozen" not in policies or len(set(policies)) < 2:
        return {}
    return {"compared": "the same passages, served by the frozen and by the learning drafter in turns of one run"}


def write_record(folder: str, key: str, record: dict[str, Any]) -> None:
    """Writes figures into the drafter's folder and card, beside those of earlier passes over the same stream."""
    drafter = load_drafter(folder)
    known = drafter.training_record or {}
    earlier = known.get(key, {})
    if all(earlier.get(name) == record.get(name) for name in ("stream", "compared", "versions")):
        # Passes over one stream may be served by several runs, and all of them are told of.
        told = earlier["policies"]
        policies = told | {name: told.get(name, {}) | row for name, row in record["policies"].items()}
        command = "; ".join(dict.fromkeys([*earlier["command"].split("; "), record["command"]]))
        record = record | {"policies": policies, "command": command}
    drafter.training_record = known | {key: record}
    drafter.write_records(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(BUNDLED / "target"))
    parser.add_argument("--drafter", default=str(BUNDLED / "specblock"))
    parser.add_argument("--dtype", default="float32", help="of the target")
    parser.add_argument("--num-blocks", type=int, help="blocks of a round; default: the drafter's own")
    parser.add_argument("--tree-budget", type=int, help="default: the drafter's own")
    parser.add_argument("--queries", type=int, default=240)
    parser.add_argument("--held-out", type=int, default=32, help="further passages, served at the end")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--turn", type=int, default=10, help="queries of a policy before the next one's turn")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--poison", action="store_true", help="break the feedback from a third of the stream on")
    parser.add_argument("--save", type=Path, help="write the drafter that the bandit adapted here")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--record", action="store_true", help="write the figures into the drafter's folder and card")
    arguments = parser.parse_args()
    if arguments.save and "cost-aware bandit" not in arguments.policies:
        parser.error("--save writes what the cost-aware bandit made: name it among --policies.")

    console = Console()
    console.width = max(console.width, 110)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=arguments.dtype).to(device).eval()
    prompts = header_prompts(tokenizer, arguments.queries + arguments.held_out, arguments.prompt_tokens)
    stream, held_out = prompts[: arguments.queries], prompts[arguments.queries :]

    passes = {name: Pass(name, model, arguments) for name in arguments.policies}
    drafter = next(iter(passes.values())).drafter
    described = (
        f"{len(stream)} passages of C++ headers, {arguments.new_tokens} new tokens each, greedy; "
        f"{drafter.options.num_blocks} blocks a round, tree budget {drafter.options.tree_budget}"
    )
    console.print(f"{described}; {device}")
    for served in passes.values():
        served.serve(stream[0], served.drafter)  # warms up
    for first in track(range(0, len(stream), arguments.turn), "serving", console=console, transient=True):
        for served in passes.values():
            served.turn(stream[first : first + arguments.turn])
    for served in passes.values():
        if served.adaptive is not None:
            served.adaptive.close()

    frozen = passes.get("frozen")
    figures = {name: figures_of(served, frozen, held_out) for name, served in passes.items()}
    table = Table(title="one stream, one start, several policies")
    table.add_column("policy")
    for heading in ("tokens/s", "over frozen", "first quarter", "last quarter", "over frozen", "held out", "updating"):
        table.add_column(heading, justify="right")
    table.add_column("same output")
    for name, row in figures.items():
        table.add_row(
            name,
            f"{row['tokens_per_s']:.1f}",
            f"{row['speed_over_frozen']:.3f}x" if "speed_over_frozen" in row else "",
            f"{row['acceptance_length_first_quarter']:.2f}",
            f"{row['acceptance_length_last_quarter']:.2f}",
            f"{row['last_quarter_over_frozen'] - 1:+.1%}" if "last_quarter_over_frozen" in row else "",
            f"{row['acceptance_length_held_out']:.2f}" if held_out else "",
            f"{row['update_seconds']:.1f} s" if "update_seconds" in row else "",
            "yes" if row["output_sha256"] == figures[arguments.policies[0]]["output_sha256"] else "NO",
        )
    console.print(table)
    for name, served in passes.items():
        if served.adaptive is not None:
            console.print(f"{name}: {figures[name]['adaptation']}", figures[name].get("values", ""))
            if arguments.poison:
                window = served.adaptive.fail_safe.window_queries
                windows = [round(served.length(at, at + window), 2) for at in range(0, len(stream), window)]
                figures[name] |= {
                    "poisoned_from": arguments.queries // 3,
                    "reverted_after": served.adaptive.adaptation.reverts,
                    f"acceptance_length_by_{window}_queries": windows,
                }
                console.print(
                    f"poisoned from query {arguments.queries // 3} on, until the fail-safe acted; reverts after "
                    f"{served.adaptive.adaptation.reverts} queries; length by {window} queries: {windows}"
                )
    if arguments.save:
        adaptive = passes["cost-aware bandit"].adaptive
        assert adaptive is not None
        # Figures of the weights from before are no figures of these.
        known = adaptive.drafter.training_record or {}
        adaptive.drafter.training_record = {key: known[key] for key in known if key not in RECORDS.values()}
        adaptive.save_pretrained(arguments.save)

    record = {
        "stream": described,
        **comparison(arguments.policies),
        "policies": figures,
        "command": shlex.join(["python", *sys.argv]),
        "hardware": f"{device}, {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "date": date.today().isoformat(),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    if arguments.record:
        write_record(arguments.drafter, RECORDS[arguments.poison], record)


if __name__ == "__main__":
    main()
