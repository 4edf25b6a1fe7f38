"""Train the small causal LM that drafts for the bundled target: alone, in SpecBranch, and in assisted generation.

    python examples/train_draft_lm.py --target examples/tiny-code/target --output examples/tiny-code/draft-lm

A few of the target's own decoder layers under its own embedding, distilled on what the target writes: on the
continuations that `train_drafter.py` left in its --work-dir, those of held-out texts excluded. The target's likeliest
tokens at every place are worked out once and kept there, so that a step costs no forward of the target.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import load_from_disk
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import Dataset as Rows
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from hf_specdec.training.command import check_output
from hf_specdec.training.data import training_folders
from hf_specdec.training.features import fingerprint
from hf_specdec.training.number_type import computes_bfloat16
from hf_specdec.training.optimizer import MuonWithAdamW
from hf_specdec.training.option_types import positive_float, positive_int
from hf_specdec.training.progress import TokenProgress

NOT_A_TOKEN = -100


class TaughtRows(Rows):
    """Rows the target wrote, with its likeliest tokens after every one of theirs.

    Args:
        token_ids: [rows, seq] int64; padding behind the text is `NOT_A_TOKEN`.
        likeliest: [rows, seq, k] int32 ids.
        log_probs: [rows, seq, k] float16, nats.
    """

    def __init__(self, token_ids: Tensor, likeliest: Tensor, log_probs: Tensor) -> None:
        self.token_ids, self.likeliest, self.log_probs = token_ids, likeliest, log_probs

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": self.token_ids[index].clamp(min=0),
            "written": self.token_ids[index] != NOT_A_TOKEN,
            "likeliest": self.likeliest[index],
            "log_probs": self.log_probs[index],
        }


class DistillingTrainer(Trainer):
    """Brings the model's law of the next token close to the target's.

    Cross entropy over the target's likeliest tokens and, as one more outcome, all others together.
    """

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, **kwargs: Any) -> Any:
        log_law = model(input_ids=inputs["input_ids"], use_cache=False).logits.float().log_softmax(-1)
        theirs = inputs["log_probs"].float().exp()
        ours = log_law.gather(-1, inputs["likeliest"].long())
        rest = torch.log1p(-ours.exp().sum(-1).clamp(max=1 - 1e-6))
        loss = -(theirs * ours).sum(-1) - (1 - theirs.sum(-1)).clamp(min=0) * rest
        loss = loss[inputs["written"]].mean()
        return (loss, {}) if return_outputs else loss


def written_rows(part: Path) -> Tensor:
    """[rows, seq] int64: a part of what the target wrote for training, prompts included."""
    rows = load_from_disk(part)
    token_ids = torch.full((len(rows), max(rows["length"])), NOT_A_TOKEN)
    for index, row in enumerate(rows):
        token_ids[index, : row["length"]] = torch.tensor(row["input_ids"][: row["length"]])
    return token_ids


@torch.no_grad()
def read_again(
    target: LlamaForCausalLM, token_ids: Tensor, most: int, *, bf16: bool, progress: TokenProgress
) -> dict[str, Tensor]:
    """The rows and the target's `most` likeliest tokens after every one of theirs, as `TaughtRows` takes them."""
    likeliest, log_probs = [], []
    for batch in token_ids.split(16):
        with torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=bf16):
            logits = target(input_ids=batch.clamp(min=0).to(target.device), use_cache=False).logits
        top = logits.float().log_softmax(-1).topk(most, dim=-1)
        likeliest.append(top.indices.int().cpu())
        log_probs.append(top.values.half().cpu())
        progress.add(batch.numel())
    return {"token_ids": token_ids, "likeliest": torch.cat(likeliest), "log_probs": torch.cat(log_probs)}


def taught_rows(target: LlamaForCausalLM, work_dir: Path, most: int, *, bf16: bool) -> TaughtRows:
    """All rows that were written to train on, each part read once and kept in `work_dir`; in bfloat16 if `bf16`."""
    parts = [part for folder in training_folders(work_dir) for part in sorted(folder.glob("part-*"))]
    if not parts:
        raise SystemExit(
            f"No continuations to train on in {work_dir}: run train_drafter.py first, or name its --work-dir."
        )
    likeliest = work_dir / f"likeliest-{most}-{fingerprint(target)}"
    likeliest.mkdir(exist_ok=True)
    kept = {part: likeliest / f"{part.parent.name}-{part.name}.safetensors" for part in parts}
    missing = {part: written_rows(part) for part, file in kept.items() if not file.exists()}
    with TokenProgress("target reads", sum(token_ids.numel() for token_ids in missing.values())) as progress:
        for part, token_ids in missing.items():
            unfinished = kept[part].with_suffix(f".{os.getpid()}.tmp")
            save_file(read_again(target, token_ids, most, bf16=bf16, progress=progress), unfinished)
            unfinished.replace(kept[part])
    read = [load_file(file) for file in kept.values()]
    width = max(rows["token_ids"].shape[1] for rows in read)
    return TaughtRows(**{name: torch.cat([_wider(rows[name], width) for rows in read]) for name in read[0]})


def _wider(rows: Tensor, width: int) -> Tensor:
    """Pads rows at the end with what says that nothing is learned there."""
    padding = [0] * (2 * (rows.ndim - 2)) + [0, width - rows.shape[1]]
    return torch.nn.functional.pad(rows, padding, value=NOT_A_TOKEN if rows.dtype == torch.int64 else 0)


def from_layers(target: LlamaForCausalLM, count: int) -> LlamaForCausalLM:
    """A model of `count` of the target's decoder layers, first and last among them, in float32.

    Raises:
        ValueError: the target is no Llama model, or has fewer layers.
    """
    total = target.config.num_hidden_layers
    if not isinstance(target, LlamaForCausalLM) or count > total:
        raise ValueError(
            f"--layers {count} are to be taken from target {target.name_or_path!r}, a {type(target).__name__} with "
            f"{total}: choose a LlamaForCausalLM with at least as many."
        )
    config = type(target.config).from_dict(target.config.to_dict() | {"num_hidden_layers": count})
    model = LlamaForCausalLM(config)
    model.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    model.model.norm.load_state_dict(target.model.norm.state_dict())
    for index, layer in enumerate(model.model.layers):
        taken = round(index * (total - 1) / max(1, count - 1))
        layer.load_state_dict(target.model.layers[taken].state_dict())
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or Hub id of a Llama-style model")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--work-dir", type=Path, default=Path("build/drafter"), help="of train_drafter.py")
    parser.add_argument("--layers", type=positive_int, default=2)
    parser.add_argument("--start-from", help="an earlier output; the target's own layers where left out")
    parser.add_argument("--steps", type=positive_int, default=1800)
    parser.add_argument("--batch-size", type=positive_int, default=8)
    parser.add_argument("--learning-rate", type=positive_float, default=3e-3)
    parser.add_argument("--likeliest", type=positive_int, default=16, help="tokens of the target that teach")
    parser.add_argument("--license", help="Hub licence id for its card")
    arguments = parser.parse_args()
    check_output(arguments.output)
    set_seed(0)

    bf16, reason = computes_bfloat16("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if bf16 else torch.float32
    print(f"number type: {str(dtype).removeprefix('torch.')}, since {reason}")
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).eval()
    started = time.monotonic()
    if arguments.start_from:
        model = AutoModelForCausalLM.from_pretrained(arguments.start_from, dtype=torch.float32)
        if model.config.vocab_size != target.config.vocab_size:
            raise ValueError(
                f"--start-from {arguments.start_from!r} has vocab_size {model.config.vocab_size}, but target "
                f"{arguments.target!r} has {target.config.vocab_size}: start from a model of the target's tokens."
            )
    else:
        model = from_layers(target, arguments.layers)
    rows = taught_rows(target, arguments.work_dir, arguments.likeliest, bf16=bf16)
    read = time.monotonic()
    trainer = DistillingTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(arguments.work_dir / "draft-lm"),
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch_size,
            lr_scheduler_type="linear",
            warmup_steps=arguments.steps // 25,
            bf16=bf16,
            use_cpu=not torch.cuda.is_available(),
            remove_unused_columns=False,
            save_strategy="no",
            logging_steps=min(50, arguments.steps),
            report_to="none",
        ),
        train_dataset=rows,
        optimizers=(MuonWithAdamW(model, arguments.learning_rate, dtype=dtype), None),
    )
    trainer.train()
    done = time.monotonic()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    model.config.use_cache = model.generation_config.use_cache = True  # the trainer turns it off
    model.to(torch.bfloat16).save_pretrained(arguments.output)
    AutoTokenizer.from_pretrained(arguments.target).save_pretrained(arguments.output)
    record = {
        "target": arguments.target,
        "rows": len(rows),
        "steps": arguments.steps,
        "rows_per_step": arguments.batch_size,
        "bf16": bf16,
        "loss_at_the_end": losses[-1],
        "minutes": round((done - read) / 60, 1),
        "minutes_reading_rows": round((read - started) / 60, 1),
        "command": shlex.join(["python", *sys.argv]),
        "hardware": f"{model.device.type}, {torch.get_num_threads()} threads, shared with other work",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "date": date.today().isoformat(),
    }
    if arguments.start_from:
        earlier = Path(arguments.start_from, "training.json")
        known = json.loads(earlier.read_text()) if earlier.exists() else None
        record["started_from"] = {"model": arguments.start_from, "training": known}
    if arguments.license:
        record["license"] = arguments.license
    (arguments.output / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(record)


if __name__ == "__main__":
    main()
