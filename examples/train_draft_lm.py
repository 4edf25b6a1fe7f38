"""Train the small causal LM that the quickstart shows in transformers' own assisted generation, for comparison.

    python examples/train_draft_lm.py --target examples/tiny-code/target --output examples/tiny-code/draft-lm

Two decoder layers under the target's own embedding, trained on what the target writes: on the continuations that
`train_drafter.py` left in its --work-dir.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from datasets import Dataset, concatenate_datasets, load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from hf_specdec.training.optimizer import MuonWithAdamW


def written_rows(work_dir: Path) -> Dataset:
    """Everything the target wrote for training, padding left out of the loss."""
    parts = sorted(work_dir.glob("continuations-*/part-*"))
    if not parts:
        raise SystemExit(f"No continuations in {work_dir}: run train_drafter.py first, or name its --work-dir.")
    rows = concatenate_datasets([load_from_disk(part) for part in parts])
    width = max(rows["length"])  # rows of several recipes differ in their padding

    def pad(row: dict) -> dict:
        ids, missing = row["input_ids"][: row["length"]], width - row["length"]
        return {"input_ids": ids + [0] * missing, "labels": ids + [-100] * missing}

    return rows.map(pad, remove_columns=rows.column_names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or Hub id of a Llama-style model")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--work-dir", type=Path, default=Path("build/drafter"), help="of train_drafter.py")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    arguments = parser.parse_args()
    set_seed(0)

    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32)
    config = type(target.config).from_dict(target.config.to_dict() | {"num_hidden_layers": arguments.layers})
    model = LlamaForCausalLM(config)
    model.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    model.model.norm.load_state_dict(target.model.norm.state_dict())
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(arguments.work_dir / "draft-lm"),
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch_size,
            lr_scheduler_type="linear",
            warmup_steps=arguments.steps // 25,
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            logging_steps=50,
            report_to="none",
        ),
        train_dataset=written_rows(arguments.work_dir),
        optimizers=(MuonWithAdamW(model, arguments.learning_rate), None),
    )
    started = time.time()
    loss = trainer.train().training_loss
    model.config.use_cache = model.generation_config.use_cache = True  # the trainer turns it off
    model.to(torch.bfloat16).save_pretrained(arguments.output)
    AutoTokenizer.from_pretrained(arguments.target).save_pretrained(arguments.output)
    record = {
        "target": arguments.target,
        "steps": arguments.steps,
        "rows_per_step": arguments.batch_size,
        "training_loss": round(loss, 4),
        "minutes": round((time.time() - started) / 60, 1),
        "torch": torch.__version__,
    }
    (arguments.output / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(record)


if __name__ == "__main__":
    main()
