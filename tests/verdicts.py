"""The verdicts of `verify_lossless` where rounding differs: instruction sets, threads, mkldnn, dtypes, seeds.

    python -m tests.verdicts                                # all: tiny and bundled pairs, all faults, all settings
    python -m tests.verdicts --capability avx2 --threads 1 --mkldnn on --pairs tiny
    python -m tests.verdicts --capability avx2 --threads 1 --mkldnn on --pairs tiny --dtype bfloat16 --seeds 20

Every setting is a process of its own. Prints a line per setting, and every wrong verdict; fails if there is one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

BUNDLED = Path(__file__).parent.parent / "examples" / "tiny-code"
CAPABILITIES = ("default", "avx2", "avx512")


def verdicts(pairs: list[str], dtypes: list[str], seeds: int) -> Iterator[tuple[str, bool, str]]:
    """Per run its name, whether its verdict is the right one, and the report."""
    import torch
    from transformers import AutoModelForCausalLM

    from hf_specdec import load_drafter, verify_lossless
    from tests.faults import FAULTS
    from tests.method_table import METHODS
    from tests.targets import make_target, one_prompt

    prompt = one_prompt()["input_ids"]
    for name, seed in product(dtypes, range(seeds)):
        dtype = getattr(torch, name)
        tiny: dict[str, Any] = {"max_new_tokens": 16, "seed": seed, "verbose": False}
        if "tiny" in pairs:
            target = make_target("llama", "sdpa", dtype, seed, initializer_range=0.15)
            for method, make in METHODS.items():
                drafter = make(target)
                if isinstance(drafter, torch.nn.Module):
                    drafter.to(dtype)
                report = verify_lossless(target, drafter, [prompt], **tiny)
                yield f"{method}, {name}, seed {seed}", report.lossless and not report.left_out, str(report)
        if "faults" in pairs:
            target = make_target("llama", "sdpa", dtype, seed, initializer_range=0.15)
            for fault, (make_wrong, during, verdict) in FAULTS.items():
                with during():
                    report = verify_lossless(target, make_wrong(target), [prompt], **tiny)
                caught = not report.lossless and not getattr(report, verdict)
                yield f"{fault}, {name}, seed {seed}", caught, str(report)
        if "bundled" in pairs and not seed:
            target = AutoModelForCausalLM.from_pretrained(BUNDLED / "target", dtype=dtype).eval()
            for folder in sorted(path.parent for path in BUNDLED.glob("*/config.json")):
                if folder.name != "target":
                    drafter = load_drafter(folder, target=target)
                    report = verify_lossless(target, drafter, max_new_tokens=24, max_time_s=600.0, verbose=False)
                    yield f"{folder.name}, {name}", report.lossless and not report.left_out, str(report)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", nargs="+", choices=CAPABILITIES, default=list(CAPABILITIES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--mkldnn", nargs="+", choices=("on", "off"), default=["on", "off"])
    parser.add_argument(
        "--pairs", nargs="+", choices=("tiny", "bundled", "faults"), default=["tiny", "bundled", "faults"]
    )
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in a process of one setting
    arguments = parser.parse_args()
    if not arguments.here:
        failed = 0
        for capability, threads, mkldnn in product(arguments.capability, arguments.threads, arguments.mkldnn):
            own = ["--capability", capability, "--threads", str(threads), "--mkldnn", mkldnn, "--here"]
            environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "HF_HUB_OFFLINE": "1"}
            command = [sys.executable, "-m", "tests.verdicts", *sys.argv[1:], *own]
            failed += subprocess.run(command, env=environment, check=False).returncode != 0
        return failed
    import torch

    torch.set_num_threads(arguments.threads[0])
    torch.backends.mkldnn.set_flags(arguments.mkldnn[0] == "on")
    began, right, wrong = time.process_time(), 0, 0
    for name, as_it_should, report in verdicts(arguments.pairs, arguments.dtype, arguments.seeds):
        right, wrong = right + as_it_should, wrong + (not as_it_should)
        if not as_it_should:
            print(f"WRONG VERDICT: {name}\n{report}", flush=True)
    setting = (
        f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, mkldnn {arguments.mkldnn[0]}"
    )
    print(f"{setting}: {right} verdicts right, {wrong} wrong, {time.process_time() - began:.0f} s of CPU", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
