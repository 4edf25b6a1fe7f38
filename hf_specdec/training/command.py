"""The training command: from a target and text to a drafter in the layout in which such drafters are published.

`hf-specdec train` runs it; `main(argv)` is the same as a Python call. It has three stages. The results of the first
two are kept in --work-dir and reused by later runs; --resume continues the third:

1. the target writes: it answers the conversations of --data in its chat template, or continues prompts cut from --text,
   and rows of the plain text are added. A drafter has to predict what its target writes;
2. the frozen target's hidden states of all rows are computed once; with --online each step computes those of its rows;
3. the drafter trains on them for several epochs, each with new random choices (anchors, cuts, positions).

Target, tokenizer, text and options are checked before the first stage, which takes minutes to hours. Training takes
--minutes, from its first step to the end of its last evaluation.

Several processes (`torchrun`, `accelerate launch`) write and train together, with --batch-size rows each; the first one
saves. What a method adds is its `Recipe`, at the foot of its module.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import hashlib
import json
import platform
import shlex
import shutil
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    PreTrainedModel,
    ProgressCallback,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import hf_specdec
from hf_specdec.drafting.fingerprint import tokenizer_fingerprint
from hf_specdec.drafting.targets import target_tokenizer
from hf_specdec.hub.card import TRAINING_FILE, read_record
from hf_specdec.hub.saving import check_free, check_writable, going_on, writing_errors
from hf_specdec.training.answer_files import RECIPE_FILE
from hf_specdec.training.conversations import ConversationSource
from hf_specdec.training.data import datasets_package
from hf_specdec.training.features import CachedStates, cache_states, fingerprint, settings_of
from hf_specdec.training.number_type import chosen_bfloat16
from hf_specdec.training.optimizer import MuonWithAdamW
from hf_specdec.training.options import TrainOptions, parse
from hf_specdec.training.recipe import RECIPES, Recipe, ShapeOptions, recipe_of
from hf_specdec.training.schedule import UNBOUNDED, Schedule, StepsProgress
from hf_specdec.training.source import RowSource, load_target
from hf_specdec.training.start_from import initialize_from
from hf_specdec.training.step import TrainingStep
from hf_specdec.training.text import Corpus, TextSource
from hf_specdec.training.trainer import DrafterTrainer
from hf_specdec.training.validation import ValidationRounds, validation_prompts

SHARED_SETTINGS = ("batch_size", "loss", "optimizer", "learning_rate", "schedule", "clip", "bf16", "seed")
INPUTS_FILE = "inputs.json"


def main(argv: Sequence[str], *, program: str = "hf-specdec train", corpus: Corpus | None = None) -> None:
    """Trains and saves one drafter.

    Args:
        argv: the options; `--method NAME --help` lists them.
        program: the command without the options, for the drafter's record.
        corpus: default of --text; None makes --text or --data required.

    Raises:
        ImportError: a package that training needs is not installed.
        ValueError: the method is unknown, the text is too short, there is nothing to resume, the run to resume had
            other text or another target, or options do not fit each other or the target.
    """
    recipe = recipe_of(_method(argv))
    description = f"{__doc__}\nMethods: {', '.join(sorted(RECIPES))}."
    options: TrainOptions = parse(recipe.options, argv, program, description, required=corpus is None)
    datasets_package()
    checkpoints = _checkpoints(options)
    last = _last_checkpoint(checkpoints) if options.resume else None
    if options.resume and last is None:
        raise ValueError(
            f"--resume, but {str(options.work_dir)!r} holds no checkpoint of a run with these options. Give the "
            "options of the run to continue, see its checkpoints-*/options.json, or leave --resume out to start a new "
            "run."
        )
    check_not_sharded()
    given = _options(options)
    set_seed(options.seed)
    started = time.time()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Before the target is loaded, because it sets each process's GPU. The others wait while the first process writes.
    processes = PartialState(cpu=device == "cpu", timeout=timedelta(days=1))
    command = f"{program} {shlex.join(argv)}"
    if processes.is_main_process:
        _check_output(options, command)
    earlier_inputs = _earlier_inputs(checkpoints)
    if options.bf16 is None and last is not None:
        options.bf16 = earlier_inputs.get("bf16")
    if options.bf16 is None:
        # On a GPU nothing is tried, and answers are in bfloat16 whatever the drafter is trained in.
        recipes = sorted(options.work_dir.glob(f"*/{RECIPE_FILE}")) if device == "cpu" else ()
        options.bf16 = chosen_bfloat16(processes, recipes)
    training_arguments = _training_arguments(options, recipe, checkpoints, device)

    tokenizer = target_tokenizer(options.target)
    # Its cached states are in bfloat16 in both cases.
    target_dtype = torch.bfloat16 if options.bf16 or device == "cuda" else torch.float32
    source: RowSource
    if options.data is not None:
        source = ConversationSource(options, tokenizer)
    else:
        source = TextSource(options, corpus, tokenizer, target_dtype)
    prompts = None if options.validate is None else validation_prompts(options.validate, tokenizer)
    target = load_target(options.target, target_dtype)
    inputs = _inputs(target, source) | {"bf16": options.bf16}
    if last is not None:
        _check_resumed(options, checkpoints, source, earlier_inputs, inputs)

    # All checks come before the target writes, which takes minutes to hours.
    source.check(target)
    model, step = recipe.prepare(options, target, source)
    drafter: Any = model if recipe.as_drafter is None else recipe.as_drafter(model)
    earlier = None if options.start_from is None else initialize_from(drafter, options.start_from, target)
    step.reader.read(torch.tensor([[0, 1]], device=target.device))  # raises if the losses cannot use this target
    if drafter is model:
        model.config.target_name_or_path = options.target_id or options.target
        model.config.target_tokenizer_sha256 = tokenizer_fingerprint(tokenizer)
    processes.print(
        f"drafter: {model.num_parameters() / 1e6:.2f}M parameters, reads layers {step.reader.layers}", flush=True
    )

    kept_text = f"what the target has written is kept in {options.work_dir}, and the same command goes on from there"
    with going_on(lambda: kept_text):
        written = source.write(target, processes)
    written_minutes = (time.time() - started) / 60
    processes.print(written.summary(written_minutes), flush=True)
    if recipe.read_rows is not None and earlier is None:
        recipe.read_rows(options, model, target, written.rows)
    worker = (processes.process_index, processes.num_processes)
    kept = step.reader.only([]) if options.online else step.reader
    with going_on(lambda: kept_text):
        train_rows, held_out_rows = (
            cache_states(kept, rows, options.work_dir, worker=worker) for rows in (written.rows, written.held_out)
        )
    processes.wait_for_everyone()

    if processes.is_main_process:
        _save_inputs(checkpoints, given, inputs, new_run=earlier_inputs != inputs)
    rounds = None if prompts is None else ValidationRounds(prompts, target, recipe.as_drafter)
    trainer, schedule = _trainer(options, training_arguments, model, step, train_rows, held_out_rows, last, rounds)
    training_started = time.time()
    with going_on(lambda: _how_to_resume(checkpoints)), writing_errors(checkpoints):
        trainer.train(resume_from_checkpoint=last)
    losses = _losses(trainer)
    training_minutes = (time.time() - training_started) / 60
    state = trainer.state
    processes.wait_for_everyone()
    # A process whose group's threads still run when Python ends can abort: they free tensors, which takes the GIL. The
    # threads end with the last reference to the group, and the trainer, a reference cycle, holds one.
    del trainer
    gc.collect()
    processes.destroy_process_group()
    if not processes.is_main_process:
        return
    if recipe.finish is not None:
        recipe.finish(model, target, written.held_out)

    record = {
        "data": {
            source.option: source.description,
            **written.record,
            "rows_trained_on": schedule.num_steps * options.batch_size * processes.num_processes,
        },
        "hardware": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        "time": {"minutes_writing": round(written_minutes, 1), "minutes_training": round(training_minutes, 1)},
        "losses": losses,
        "command": command,
        "settings": {name: getattr(options, name) for name in ("method", *_own(recipe), *SHARED_SETTINGS)}
        | {"steps": schedule.num_steps},
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__, "hf_specdec": hf_specdec.__version__},
        **written.mode,
    }  # fmt: skip
    if rounds is not None:
        record["validation"] = {
            "conversations": f"{len(rounds.prompts)} of {options.validate}",
            "by_step": {
                str(entry["step"]): {
                    "mean_acceptance_length": round(length, 3),
                    "accuracy_1": entry.get("eval_accuracy_1", entry.get("eval_accuracy")),
                }
                for entry in state.log_history
                if (length := entry.get("eval_mean_acceptance_length")) is not None
            },
            "kept": f"step {state.best_global_step}",
            "command": record["command"],
        }
    if earlier is not None:
        record["started_from"] = earlier
    if written.datasets:
        record["datasets"] = list(written.datasets)
    if options.license:
        record["license"] = options.license
    model.to(torch.bfloat16)
    drafter.training_record = record
    with going_on(lambda: _how_to_resume(checkpoints)):
        if drafter is not model:  # its config has no fields for target and tokenizer
            record["target"] = options.target_id or options.target
            tokenizer.save_pretrained(options.output)
        drafter.save_pretrained(options.output)
    print(json.dumps(record, indent=2))


def _check_output(options: TrainOptions, command: str) -> None:
    """Raises ValueError or OSError if the drafter cannot be saved, or would replace one that this run did not make."""
    made = (read_record(options.output, TRAINING_FILE) or {}).get("command", "")
    own = options.resume and _without_resume(made) == _without_resume(command)
    if not (options.overwrite or own):
        check_free(options.output, "give another --output, or --overwrite.")
    for folder in (options.output, options.work_dir):
        check_writable(folder)


def _without_resume(command: str) -> list[str]:
    return [word for word in shlex.split(command) if word != "--resume"]


def _last_checkpoint(checkpoints: Path) -> str | None:
    """The folder of the last checkpoint that was written to its end, where the Trainer writes its own state."""
    found = {
        int(file.parent.name.rpartition("-")[2]): str(file.parent)
        for file in checkpoints.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")
        if file.read_text().endswith("}\n")
    }
    return found[max(found)] if found else None


def _how_to_resume(checkpoints: Path) -> str:
    """What to do after a stop."""
    last = _last_checkpoint(checkpoints)
    if last is None:
        return "there is no checkpoint yet; the same command uses what the target has written, and trains anew"
    step = last.rpartition("-")[2]
    return (
        f"the weights of step {step} are in {last}; the same command with --resume goes on from there, or saves them "
        "if it was the last step, also to another --output"
    )


def _check_resumed(
    options: TrainOptions,
    checkpoints: Path,
    source: RowSource,
    earlier_inputs: dict[str, Any],
    inputs: dict[str, Any],
) -> None:
    """Raises ValueError if the run to resume had other inputs."""
    if earlier_inputs == inputs:
        return
    named = {source.option: f"--{source.option} {source.description!r}", "target": f"--target {options.target!r}"}
    changed = " and ".join(words for name, words in named.items() if earlier_inputs.get(name) != inputs[name])
    reason = f"{changed} changed since" if earlier_inputs else f"it has no {INPUTS_FILE}, so its inputs are unknown"
    raise ValueError(
        f"--resume cannot continue the run in {str(checkpoints)!r}: {reason}, and its weights may belong to another "
        "drafter. Restore the inputs of that run, or leave --resume out to start a new one."
    )


def _save_inputs(checkpoints: Path, options: str, inputs: dict[str, Any], *, new_run: bool) -> None:
    """Writes options and inputs next to the checkpoints; deletes the checkpoints of a run on other inputs."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    if new_run:
        # Otherwise a later --resume would continue the earlier run.
        for stale in checkpoints.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
            shutil.rmtree(stale)
    (checkpoints / "options.json").write_text(options)
    (checkpoints / INPUTS_FILE).write_text(json.dumps(inputs, indent=2) + "\n")


def _trainer(
    options: TrainOptions,
    training_arguments: TrainingArguments,
    model: PreTrainedModel,
    step: TrainingStep,
    train_rows: CachedStates,
    held_out_rows: CachedStates,
    last: str | None,
    rounds: ValidationRounds | None,
) -> tuple[DrafterTrainer, Schedule]:
    """The trainer and the schedule of a run; `last` is the checkpoint to resume from."""
    num_steps = options.steps
    if last is not None:  # a resumed run keeps the last estimate of its steps
        num_steps = TrainerState.load_from_json(f"{last}/trainer_state.json").max_steps
    schedule = Schedule(
        options.schedule,
        options.warmup,
        evaluation_steps=-(-len(held_out_rows) // (options.batch_size * training_arguments.world_size)),
        num_steps=num_steps,
        minutes=options.minutes,
        saves_what_it_evaluates=rounds is not None,
    )
    training_arguments.max_steps = UNBOUNDED if schedule.timed else schedule.num_steps
    for name, interval in schedule.intervals.items():
        setattr(training_arguments, name, interval)
    optimizer = _optimizer(options, model)
    trainer = DrafterTrainer(
        model,
        step,
        training_arguments,
        rounds=rounds,
        train_dataset=train_rows,
        eval_dataset=held_out_rows,
        optimizers=(optimizer, LambdaLR(optimizer, schedule.learning_rate_factor)),
        callbacks=[schedule],
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(StepsProgress)
    return trainer, schedule


def _losses(trainer: DrafterTrainer) -> dict[str, float]:
    """Losses and accuracies of the held-out rows with the weights that are kept."""
    history, state = trainer.state.log_history, trainer.state
    kept = state.global_step if state.best_model_checkpoint is None else state.best_global_step
    final = [entry for entry in history if "eval_loss" in entry and entry["step"] == kept]
    evaluation = final[-1] if final else trainer.evaluate()
    return {
        name.removeprefix("eval_"): round(value, 4)
        for name, value in evaluation.items()
        if name.startswith(("eval_loss", "eval_acc", "eval_mean"))
    }


def _options(options: TrainOptions) -> str:
    """JSON of the options that the drafter's weights depend on."""
    ignored = ("output", "overwrite", "work_dir", "resume", "license", "target_id", "online")
    kept = {name: value for name, value in dataclasses.asdict(options).items() if name not in ignored}
    return json.dumps(kept, indent=2, sort_keys=True, default=str) + "\n"


def _own(recipe: Recipe[Any]) -> list[str]:
    """Names of the options that only this method has."""
    shared = {field.name for field in dataclasses.fields(ShapeOptions)}
    return [field.name for field in dataclasses.fields(recipe.options) if field.name not in shared]


def _training_arguments(
    options: TrainOptions, recipe: Recipe[Any], checkpoints: Path, device: str
) -> TrainingArguments:
    """Without the number of steps. Raises ValueError for what the device does not support."""
    return TrainingArguments(
        output_dir=str(checkpoints),
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=recipe.eval_batch_size or options.batch_size,
        learning_rate=options.learning_rate,
        max_grad_norm=options.clip,
        bf16=options.bf16,
        use_cpu=device == "cpu",
        eval_strategy="steps",
        save_total_limit=1,  # and the best one
        load_best_model_at_end=options.validate is not None,
        metric_for_best_model=None if options.validate is None else "mean_acceptance_length",
        report_to="none",
        seed=options.seed,
    )


def _optimizer(options: TrainOptions, drafter: PreTrainedModel) -> torch.optim.Optimizer:
    if options.optimizer == "muon":
        return MuonWithAdamW(drafter, options.learning_rate, dtype=torch.bfloat16 if options.bf16 else torch.float32)
    return torch.optim.AdamW(drafter.parameters(), lr=options.learning_rate, weight_decay=0.0)


def _checkpoints(options: TrainOptions) -> Path:
    """The folder for the checkpoints of runs with these options."""
    name = hashlib.sha256(_options(options).encode()).hexdigest()[:12]
    return options.work_dir / f"checkpoints-{name}"


def _inputs(target: PreTrainedModel, source: RowSource) -> dict[str, Any]:
    """Fingerprints of what a run reads, because the contents of a path may change."""
    return {
        source.option: source.identity,
        "target": {"weights": fingerprint(target), "generation_config": settings_of(target.generation_config)},
    }


def _earlier_inputs(checkpoints: Path) -> dict[str, Any]:
    """`_inputs` and `bf16` of the run with these checkpoints; empty if they were not saved."""
    file = checkpoints / INPUTS_FILE
    return json.loads(file.read_text()) if file.exists() else {}


def check_not_sharded() -> None:
    """Raises ValueError if the launcher enables FSDP, which this training does not support."""
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise ValueError(
            "FSDP is enabled (ACCELERATE_USE_FSDP, set by accelerate's --use_fsdp), but each process trains the whole "
            "drafter: FSDP is untested here on accelerators, and accelerate ignores it on a CPU. Launch with "
            "--multi_gpu, without --use_fsdp."
        )


def _method(argv: Sequence[str]) -> str:
    # Parsed first, because the other options depend on it.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--method", default="dflash")
    return first.parse_known_args(argv)[0].method
