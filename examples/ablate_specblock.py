"""What each part of SpecBlock is worth on the bundled target: the base ablations of the paper's Table 2.

    python examples/train_drafter.py --method specblock ...      # writes the rows that are trained on here
    python examples/ablate_specblock.py --work-dir build/specblock

Every variant is trained from the same random numbers on the same rows for the same number of steps, far fewer than
the bundled drafter's, and then drafts for the same held-out prompts with the same budget. Rank-guided branching is no
matter of training: its variant is the reference drafter with a fixed number of candidates at every place.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments, set_seed

from hf_specdec import load_drafter
from hf_specdec.benchmark.prompts import read_jsonl
from hf_specdec.training import DrafterTrainer
from hf_specdec.training.data import training_folders
from hf_specdec.training.features import cache_states
from hf_specdec.training.optimizer import MuonWithAdamW
from hf_specdec.training.specblock import SpecBlockStep, new_drafter
from hf_specdec.training.vocabulary import frequent_tokens

BUNDLED = Path(os.path.relpath(Path(__file__).parent / "tiny-code"))
FIXED = "without rank-guided branching"
# Per variant what its drafter and its step are told.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all parts": ({}, {}),
    "without prefix broadcast": ({"prefix_broadcast": False}, {}),
    "without layer-wise shift": ({"layer_wise_shift": False}, {}),
    "without valid-prefix mask": ({}, {"valid_prefix": False}),
}


def mean_acceptance_length(model: Any, drafter: Any, prompts: list[torch.Tensor], new_tokens: int) -> float:
    rounds = accepted = 0
    for prompt in prompts:
        model.generate(prompt, assistant_model=drafter, max_new_tokens=new_tokens, do_sample=False)
        rounds += drafter.stats.num_spec_steps
        accepted += drafter.stats.num_accepted_draft_tokens
    return round(1 + accepted / rounds, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(BUNDLED / "target"))
    parser.add_argument("--work-dir", type=Path, default=Path("build/specblock"), help="of train_drafter.py")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=6e-3)
    parser.add_argument("--draft-vocab-size", type=int, default=3072)
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--tree-budget", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--record", action="store_true", help="write the figures into the bundled drafter's card")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    texts = [prompt.text for prompt in read_jsonl(BUNDLED / "prompts.jsonl")[: arguments.num_prompts]]
    prompts = [tokenizer(text, return_tensors="pt")["input_ids"].to(device) for text in texts]
    folders = [sorted(folder.glob("part-*")) for folder in training_folders(arguments.work_dir)]
    if not folders:
        raise SystemExit(
            f"{arguments.work_dir} holds no continuations to train on: run train_drafter.py with this --work-dir first."
        )
    written = datasets.concatenate_datasets([datasets.load_from_disk(str(part)) for part in max(folders, key=len)])
    rows = written.shuffle(seed=0).select(range(arguments.rows))
    vocab_size = model.get_input_embeddings().num_embeddings
    vocabulary, _ = frequent_tokens(rows, arguments.draft_vocab_size, vocab_size)

    lengths: dict[str, float] = {}
    for name, (drafter_options, step_options) in VARIANTS.items():
        started = time.perf_counter()
        set_seed(0)
        drafter = new_drafter(model, vocabulary, warm_start=True, **drafter_options)
        step = SpecBlockStep(
            drafter, model, rank_start_step=arguments.steps // 2, slot_weights="by_count", window=128, **step_options
        )
        DrafterTrainer(
            drafter,
            step,
            TrainingArguments(
                output_dir=str(arguments.work_dir / "ablations"),
                max_steps=arguments.steps,
                per_device_train_batch_size=arguments.batch_size,
                lr_scheduler_type="linear",
                warmup_steps=arguments.steps // 25,
                bf16=True,
                use_cpu=device == "cpu",
                save_strategy="no",
                logging_steps=arguments.steps,
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=cache_states(step.reader, rows, arguments.work_dir),
            optimizers=(MuonWithAdamW(drafter, arguments.learning_rate), None),
        ).train()
        drafter.eval()
        drafter.set_options(tree_budget=arguments.tree_budget)
        lengths[name] = mean_acceptance_length(model, drafter, prompts, arguments.new_tokens)
        print(f"{name}: mean acceptance length {lengths[name]:.3f}, {time.perf_counter() - started:.0f} s", flush=True)
        if name == "all parts":
            for width in (2, 4):
                drafter.set_options(branching=[width] * 4, beam_width=width)
                fixed = mean_acceptance_length(model, drafter, prompts, arguments.new_tokens)
                lengths[f"{FIXED}, {width} everywhere"] = fixed
                print(f"{FIXED}, {width} everywhere: mean acceptance length {fixed:.3f}", flush=True)

    record = {
        "mean_acceptance_length": lengths,
        "training": f"{arguments.steps} steps of {arguments.batch_size} rows each",
        "prompts": f"{len(prompts)} held-out prompts, {arguments.new_tokens} new tokens, greedy",
        "tree_budget": arguments.tree_budget,
        "command": shlex.join(["python", *sys.argv]),
        "hardware": f"{device}, {platform.machine()}, {torch.get_num_threads()} threads",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "date": date.today().isoformat(),
    }
    print(json.dumps(record, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    if arguments.record:
        bundled = load_drafter(BUNDLED / "specblock")
        bundled.training_record = (bundled.training_record or {}) | {"ablations": record}
        bundled.write_records(BUNDLED / "specblock")


if __name__ == "__main__":
    main()
