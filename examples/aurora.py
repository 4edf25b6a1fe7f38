"""Serve a text whose topic shifts, while another process trains the drafter on what is served (Aurora).

    python examples/aurora.py --minutes 10 --output build/aurora

Two processes share a folder. This one serves passages of Python code, then of C++ headers, then of Python again, each
for a third of the time; every passage also with the frozen drafter, for comparison. The other process trains on what
was recorded and publishes weights, which come to serve if they are not worse on recent rounds. The output is always the
target's own, which is checked. `--output` gets `accepted.svg`, the accepted length over time of both, and
`figures.json`.

The passages are those that come with torch. With --drafter and --target another pair serves them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from curves import curves_svg
from harness import about, load_target, table_of, wide_console

from hf_specdec import load_drafter
from hf_specdec.adaptation import AuroraDrafter
from hf_specdec.drafting.drafter import always_drafting

BUNDLED = Path(os.path.relpath(Path(__file__).parent / "tiny-code"))
TOPICS = {"Python": "*.py", "C++": "*.h", "Python again": "*.py"}


def passages(tokenizer: Any, pattern: str, count: int, length: int, seed: int) -> list[torch.Tensor]:
    """Parts of torch's files of this pattern, the same ones on every run of one version."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    files = sorted(Path(spec.origin).parent.rglob(pattern))
    found: list[torch.Tensor] = []
    for index in torch.randperm(len(files), generator=torch.Generator().manual_seed(seed)).tolist():
        ids = tokenizer(files[index].read_text(encoding="utf-8", errors="ignore")[: 40 * length])["input_ids"]
        if len(ids) > 5 * length:
            found.append(torch.tensor([ids[4 * length : 5 * length]]))  # past the licence and the includes
        if len(found) == count:
            break
    return found


def smoothed(calls: list[tuple[float, int, int]], window: int) -> list[tuple[float, float]]:
    """Minutes and mean accepted length of windows of calls, from (seconds, rounds, accepted drafts) of each."""
    points = []
    for start in range(0, max(1, len(calls) - window // 2), window):
        part = calls[start : start + window]
        rounds = sum(each[1] for each in part)
        points.append((part[-1][0] / 60, 1 + sum(each[2] for each in part) / max(1, rounds)))
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(BUNDLED / "target"))
    parser.add_argument("--drafter", default=str(BUNDLED / "specblock"))
    parser.add_argument("--dtype", help="of the target; default: float32, on CUDA bfloat16")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--fresh", type=int, default=8, help="new texts between publications")
    parser.add_argument("--window", type=int, default=20, help="calls per point of the picture")
    parser.add_argument("--output", type=Path, default=Path("build/aurora"))
    arguments = parser.parse_args()

    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    model, tokenizer = load_target(arguments.target, arguments.dtype)
    prompts = {
        topic: passages(tokenizer, pattern, 400, arguments.prompt_tokens, seed)
        for seed, (topic, pattern) in enumerate(TOPICS.items())
    }
    frozen = load_drafter(arguments.drafter, target=model)
    folder = arguments.output / "rounds"
    for old in folder.glob("*"):
        old.unlink()
    served = AuroraDrafter(model, load_drafter(arguments.drafter, target=model), folder)
    trainer = subprocess.Popen(
        [
            sys.executable, "-m", "hf_specdec.adaptation.aurora_trainer", str(folder), "--target", arguments.target,
            "--drafter", arguments.drafter, "--learning-rate", str(arguments.learning_rate),
            "--fresh", str(arguments.fresh), "--minutes", str(arguments.minutes + 1),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    calls: dict[str, list[tuple[float, int, int]]] = {"frozen": [], "Aurora": []}
    topics: list[str] = []
    differences, starts = 0, {}
    began = time.monotonic()
    try:
        while (elapsed := time.monotonic() - began) < 60 * arguments.minutes:
            topic = list(TOPICS)[min(len(TOPICS) - 1, int(elapsed / (20 * arguments.minutes)))]
            starts.setdefault(topic, elapsed / 60)
            prompt = prompts[topic][len(topics) % len(prompts[topic])].to(model.device)
            outputs = []
            for name, drafter in (("frozen", frozen), ("Aurora", served)):
                with always_drafting():
                    outputs.append(
                        model.generate(
                            prompt, assistant_model=drafter, max_new_tokens=arguments.new_tokens, do_sample=False
                        )
                    )
                stats = drafter.stats
                calls[name].append((elapsed, stats.num_spec_steps, stats.num_accepted_draft_tokens))
            topics.append(topic)
            differences += not torch.equal(*outputs)
    finally:
        trainer.terminate()
        trainer.wait()

    console = wide_console()
    rows, figures = [], {}
    for topic in starts:
        own = [index for index, each in enumerate(topics) if each == topic]
        late = own[len(own) // 2 :]  # the first half is the shift
        lengths = {
            name: 1 + sum(each[index][2] for index in late) / max(1, sum(each[index][1] for index in late))
            for name, each in calls.items()
        }
        figures[topic] = {name: round(length, 3) for name, length in lengths.items()} | {"calls": len(own)}
        rows.append([topic, str(len(own)), *(f"{length:.2f}" for length in lengths.values())])
    console.print(table_of("accepted length, second half of each topic", ["topic", "calls", *calls], rows))
    console.print(
        f"{len(topics)} calls, {differences} with another output; {served.learned}; "
        f"lengths replayed: {[(round(swap.length, 2), round(swap.new_length, 2)) for swap in served.swaps]}"
    )
    title = "Accepted length a round, on a text whose topic shifts"
    curves = {name: smoothed(each, arguments.window) for name, each in calls.items()}
    picture = curves_svg(title, curves, across="minutes", marks=starts)
    (arguments.output / "accepted.svg").write_text(picture, encoding="utf-8")
    record = {"topics": figures, "different_outputs": differences, "learned": served.learned, **about()}
    (arguments.output / "figures.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
