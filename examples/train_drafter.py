"""Train a drafter for a target and save it in the layout in which such drafters are published.

    python examples/train_drafter.py --target examples/tiny-code/target --output examples/tiny-code/drafter-dflash

Four stages, each kept in --work-dir, so that a second run goes on where the first was stopped:

1. the target continues prompts cut from text: what a drafter must foresee is what its target writes;
2. rows of the plain text itself are mixed in;
3. the frozen target's hidden states for all rows are computed once;
4. the drafter trains on them, many passes, with fresh blocks every time.

The defaults are for the bundled target on two CPU cores. Its text is rebuilt by `train_tiny_code.py`; any other target
needs --text: a .jsonl file with a field "text" per line, or a .txt file.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import platform
import shlex
import sys
import threading
import time
from pathlib import Path

import torch
import transformers
from train_tiny_code import MuonWithAdamW, build_corpus
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

import hf_specdec
from hf_specdec.drafters.fingerprint import tokenizer_fingerprint
from hf_specdec.training import DFlashStep, DrafterTrainer, specblock
from hf_specdec.training.data import collate, mix, pack_text, write_continuations
from hf_specdec.training.dflash import new_drafter
from hf_specdec.training.features import cache_states
from hf_specdec.training.losses import LOSS_NAMES
from hf_specdec.training.step import TrainingStep

# What a method's record says beyond the settings that all have.
OPTIONS_OF = {
    "dflash": ("anchors", "loss", "gamma"),
    "specblock": ("blocks", "valid_prefix", "prefix_broadcast", "layer_wise_shift", "rank_start_step", "rank_loss"),
}


def read_text(file: Path | None) -> tuple[list[str], list[str]]:
    """Training and held-out documents: of the bundled corpus, or of a file, every 50th document held out."""
    if file is None:
        train, held_out, _ = build_corpus()
        return train, held_out
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        documents = [json.loads(line)["text"] for line in text.splitlines() if line.strip()]
    else:
        documents = [text[start : start + 2000] for start in range(0, len(text), 2000)]
    held_out = documents[::50]
    return [document for index, document in enumerate(documents) if index % 50], held_out


def mask_token(tokenizer: PreTrainedTokenizerBase, target: PreTrainedModel, chosen: int | None) -> int:
    """The id to write into the slots to be filled: chosen, the tokenizer's mask token, or an unused embedding row."""
    if chosen is not None:
        return chosen
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id
    if len(tokenizer) < target.get_input_embeddings().num_embeddings:
        return len(tokenizer)
    raise SystemExit(
        "The tokenizer has no mask token and the target no unused embedding row: name an id that text hardly ever "
        "contains with --mask-token-id."
    )


def load_target(path: str) -> PreTrainedModel:
    dtype = torch.bfloat16 if torch.cuda.is_available() else "auto"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()


def write_share(rank: int, workers: int, target_path: str, documents: Path, settings: dict) -> None:
    """One of several processes that write continuations: on CPUs two with one thread beat one with two."""
    # A writer whose main process was killed must not go on for minutes.
    watch = threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True)
    watch.start()
    torch.set_num_threads(1)
    ids = json.loads(documents.read_text())
    write_continuations(load_target(target_path), ids, worker=(rank, workers), **settings)


def continuations(target: PreTrainedModel, target_path: str, documents: list[list[int]], workers: int, settings: dict):
    """The target's continuations of the documents' beginnings, written by `workers` processes."""
    if workers > 1:
        context = multiprocessing.get_context("spawn")
        # Through a file: a pipe that nobody reads would block this process should a writer fail to start.
        file = settings["folder"] / "documents.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(documents))
        shares = [
            context.Process(target=write_share, args=(rank, workers, target_path, file, settings), daemon=True)
            for rank in range(workers)
        ]
        for share in shares:
            share.start()
        for share in shares:
            share.join()
        if any(share.exitcode for share in shares):
            raise SystemExit("A process that wrote continuations failed; its error is above.")
        settings = settings | {"max_minutes": 0.0}  # read what is there
    return write_continuations(target, documents, **settings)


def specblock_parts(
    arguments: argparse.Namespace, target: PreTrainedModel, rows
) -> tuple[PreTrainedModel, TrainingStep]:
    """A SpecBlock drafter whose vocabulary is the most frequent tokens of the rows, and its step."""
    vocab_size = target.get_input_embeddings().num_embeddings
    size = min(arguments.draft_vocab, vocab_size)
    vocabulary, coverage = specblock.frequent_tokens(rows, size, vocab_size)
    print(f"draft vocabulary: {size} of {vocab_size} tokens, {coverage:.2%} of the training text")
    drafter = specblock.new_drafter(
        target,
        vocabulary,
        num_layers=arguments.layers,
        block_size=arguments.block_size or 4,
        target_layer_ids=arguments.taps,
        intermediate_size=arguments.intermediate_size,
        prefix_broadcast=arguments.prefix_broadcast,
        layer_wise_shift=arguments.layer_wise_shift,
    )
    step = specblock.SpecBlockStep(
        drafter,
        target,
        num_blocks=arguments.blocks,
        rank_start_step=arguments.rank_start_step,
        valid_prefix=arguments.valid_prefix,
        rank_loss=arguments.rank_loss,
        rank_budget=arguments.rank_budget,
    )
    return drafter, step


def seconds_per_step(
    drafter: PreTrainedModel, step: TrainingStep, rows, batch_size: int, bf16: bool, device: str
) -> float:
    """Measured on a copy of the drafter, to turn --minutes into a number of steps for the schedule."""
    trial = copy.deepcopy(drafter).to(device).train()
    optimizer = torch.optim.AdamW(trial.parameters())
    times = []
    for number in range(8):
        started = time.perf_counter()
        batch = collate([rows[(number * batch_size + place) % len(rows)] for place in range(batch_size)])
        batch = {key: value.to(device) for key, value in batch.items()}
        with torch.autocast(device, dtype=torch.bfloat16, enabled=bf16):
            loss = step(trial, batch, training=True).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=["dflash", "specblock"], default="dflash")
    parser.add_argument("--target", required=True, help="folder or Hub id of the model to draft for")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--work-dir", type=Path, default=Path("build/drafter"), help="caches and checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --work-dir")
    parser.add_argument("--license", help="Hub licence id for the drafter's card")
    parser.add_argument("--seed", type=int, default=0)
    text = parser.add_argument_group("text")
    text.add_argument("--text", type=Path, help=".jsonl or .txt; default: the corpus of train_tiny_code.py")
    text.add_argument("--rows", type=int, default=6144, help="continuations that the target writes")
    text.add_argument("--write-minutes", type=float, default=12.0, help="stop writing after this time")
    text.add_argument("--writers", type=int, default=None, help="processes; default: one per CPU core, one with a GPU")
    text.add_argument("--prompt-tokens", type=int, nargs=2, default=(32, 128), metavar=("MIN", "MAX"))
    text.add_argument("--new-tokens", type=int, default=192)
    text.add_argument("--plain-share", type=float, default=0.1, help="share of rows that are plain text")
    shape = parser.add_argument_group("drafter")
    shape.add_argument("--layers", type=int, default=2)
    shape.add_argument(
        "--block-size", type=int, help="default: 8, the root's slot included; specblock: 4 drafted tokens"
    )
    shape.add_argument("--taps", type=int, nargs="+", help="target layers to read; default: 4, evenly spaced")
    shape.add_argument("--intermediate-size", type=int, help="default: the target's")
    shape.add_argument("--mask-token-id", type=int)
    shape.add_argument("--draft-vocab", type=int, default=32000, help="specblock: tokens that the drafter can say")
    shape.add_argument("--prefix-broadcast", action=argparse.BooleanOptionalAction, default=True, help="specblock")
    shape.add_argument("--layer-wise-shift", action=argparse.BooleanOptionalAction, default=True, help="specblock")
    training = parser.add_argument_group("training")
    training.add_argument("--minutes", type=float, default=12.0, help="training time, turned into steps by a trial")
    training.add_argument("--steps", type=int, help="instead of --minutes")
    training.add_argument("--batch-size", type=int, default=8)
    training.add_argument("--anchors", type=int, default=32, help="blocks per row and step")
    training.add_argument("--loss", choices=LOSS_NAMES, default="ce")
    training.add_argument("--gamma", type=float, default=4.0, help="position weights exp(-(k-1)/gamma)")
    training.add_argument("--optimizer", choices=["muon", "adamw"], default="muon")
    training.add_argument("--learning-rate", type=float, default=3e-3)
    training.add_argument("--schedule", choices=["linear", "cosine"], default="linear")
    training.add_argument("--warmup", type=float, default=0.04, help="share of the steps")
    training.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    training.add_argument("--blocks", type=int, default=2, help="specblock: chained blocks of a start")
    training.add_argument("--rank-start-step", type=int, default=2000, help="specblock: first step of the rank loss")
    training.add_argument("--rank-loss", choices=["paper", "published"], default="paper", help="specblock")
    training.add_argument("--rank-budget", type=int, help="specblock: most examples of a rank class per slot and batch")
    training.add_argument("--valid-prefix", action=argparse.BooleanOptionalAction, default=True, help="specblock")
    training.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    set_seed(arguments.seed)
    started = time.time()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = load_target(arguments.target)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    train_texts, held_out_texts = read_text(arguments.text)
    train_ids, held_out_ids = tokenizer(train_texts)["input_ids"], tokenizer(held_out_texts)["input_ids"]

    workers = arguments.writers or (1 if device == "cuda" else torch.get_num_threads())
    settings = {
        "folder": arguments.work_dir,
        "prompt_lengths": tuple(arguments.prompt_tokens),
        "new_tokens": arguments.new_tokens,
        "cache_implementation": "static" if device == "cpu" else None,
    }
    wanted = {"num_rows": arguments.rows, "max_minutes": arguments.write_minutes, "seed": arguments.seed}
    own = continuations(target, arguments.target, train_ids, workers, settings | wanted)
    held_out = write_continuations(target, held_out_ids, num_rows=128, temperatures=(0.0,), **settings)
    width = len(own[0]["input_ids"])
    rows = own
    if arguments.plain_share:
        rows = mix(own, pack_text(train_ids, width, separator_id=tokenizer.eos_token_id), arguments.plain_share)
    written_minutes = (time.time() - started) / 60
    written_tokens = sum(own["length"]) - sum(own["first_anchor"])
    ended = sum(row["input_ids"][row["length"] - 1] == tokenizer.eos_token_id for row in own)
    print(
        f"{len(own)} rows with {written_tokens / 1e3:.0f}k tokens written by the target in {written_minutes:.1f} min; "
        f"{ended / len(own):.0%} of them reached the end of text",
        flush=True,
    )
    if ended == 0:
        print("A target that never ends a text loops, and a drafter trained on loops is good at nothing else.")

    if arguments.method == "specblock":
        drafter, step = specblock_parts(arguments, target, rows)
    else:
        drafter = new_drafter(
            target,
            mask_token_id=mask_token(tokenizer, target, arguments.mask_token_id),
            num_layers=arguments.layers,
            block_size=arguments.block_size or 8,
            target_layer_ids=arguments.taps,
            intermediate_size=arguments.intermediate_size,
        )
        step = DFlashStep(
            drafter, target, num_anchors=arguments.anchors, loss=arguments.loss, gamma=arguments.gamma or None
        )
    drafter.config.target_name_or_path = arguments.target
    drafter.config.target_tokenizer_sha256 = tokenizer_fingerprint(tokenizer)
    print(f"drafter: {drafter.num_parameters() / 1e6:.2f}M parameters, reads layers {step.reader.layers}", flush=True)
    train_rows = cache_states(step.reader, rows, arguments.work_dir)
    held_out_rows = cache_states(step.reader, held_out, arguments.work_dir)

    checkpoints = arguments.work_dir / "checkpoints"
    last = get_last_checkpoint(checkpoints) if arguments.resume and checkpoints.exists() else None
    if last is not None:
        steps = json.loads((Path(last) / "trainer_state.json").read_text())["max_steps"]
    elif arguments.steps is not None:
        steps = arguments.steps
    else:
        each = seconds_per_step(drafter, step, train_rows, arguments.batch_size, arguments.bf16, device)
        steps = max(20, int(60 * arguments.minutes / each))
        print(f"{each:.3f} s per step: {steps} steps in {arguments.minutes:g} minutes")
    trainer = DrafterTrainer(
        drafter,
        step,
        TrainingArguments(
            output_dir=str(checkpoints),
            max_steps=steps,
            per_device_train_batch_size=arguments.batch_size,
            per_device_eval_batch_size=32 if arguments.method == "dflash" else arguments.batch_size,
            learning_rate=arguments.learning_rate,
            lr_scheduler_type=arguments.schedule,
            warmup_steps=int(steps * arguments.warmup),
            max_grad_norm=arguments.clip,
            bf16=arguments.bf16,
            use_cpu=device == "cpu",
            eval_strategy="steps",
            eval_steps=max(1, steps // 10),
            save_steps=max(1, steps // 10),
            save_total_limit=1,
            logging_steps=max(1, min(50, steps // 10)),
            report_to="none",
            seed=arguments.seed,
        ),
        train_dataset=train_rows,
        eval_dataset=held_out_rows,
        optimizers=(MuonWithAdamW(drafter, arguments.learning_rate) if arguments.optimizer == "muon" else None, None),
    )
    training_started = time.time()
    trainer.train(resume_from_checkpoint=last)
    training_minutes = (time.time() - training_started) / 60
    evaluation = trainer.evaluate()

    drafter.training_record = {
        "data": {
            "text": str(arguments.text) if arguments.text else "the training functions of train_tiny_code.py",
            "rows_written_by_target": len(own),
            "tokens_written_by_target": written_tokens,
            "share_of_rows_that_end": round(ended / len(own), 3),
            "rows_of_plain_text": len(rows) - len(own),
            "rows_trained_on": steps * arguments.batch_size,
        },
        "hardware": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        "time": {"minutes_writing": round(written_minutes, 1), "minutes_training": round(training_minutes, 1)},
        "losses": {name.removeprefix("eval_"): round(value, 4) for name, value in evaluation.items()
                   if name.startswith(("eval_loss", "eval_acc"))},
        "command": shlex.join(["python", *sys.argv]),
        "settings": {name: getattr(arguments, name) for name in
                     ("method", *OPTIONS_OF[arguments.method], "batch_size", "optimizer", "learning_rate", "schedule",
                      "clip", "bf16", "seed")} | {"steps": steps},
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__, "hf_specdec": hf_specdec.__version__},
    }  # fmt: skip
    if arguments.license:
        drafter.training_record["license"] = arguments.license
    drafter.to(torch.bfloat16).save_pretrained(arguments.output)
    print(json.dumps(drafter.training_record, indent=2))


if __name__ == "__main__":
    main()
