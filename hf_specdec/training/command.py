"""The training command: from a target and text to a drafter in the layout in which such drafters are published.

`hf-specdec train` runs it; `main(argv)` is the same as a Python call. It has three stages. The results of the first
two are kept in --work-dir and reused by later runs; --resume continues the third:

1. the target writes: it answers the conversations of --data in its chat template, or continues prompts cut from --text,
   and rows of the plain text are added. A drafter has to predict what its target writes;
2. the frozen target's hidden states of all rows are computed once;
3. the drafter trains on them for several epochs, each with new random choices (anchors, cuts, positions).

Target, tokenizer, text and options are checked before the first stage, which takes minutes to hours. Training takes
--minutes, from its first step to the end of its last evaluation.

Several processes (`torchrun`, `accelerate launch`) write and train together, with --batch-size rows each; the first one
saves. What a method adds is its `Recipe`, at the foot of its module.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    ProgressCallback,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

import hf_specdec
from hf_specdec.drafters.fingerprint import tokenizer_fingerprint
from hf_specdec.training import DrafterTrainer  # the package: it registers all recipes
from hf_specdec.training.conversations import ConversationSource
from hf_specdec.training.data import check_plain_share, check_wanted, datasets_package
from hf_specdec.training.features import CachedStates, cache_states, fingerprint, settings_of
from hf_specdec.training.number_type import chosen_bfloat16
from hf_specdec.training.optimizer import MuonWithAdamW
from hf_specdec.training.option_types import not_negative_float, positive_float, positive_int, seed_number, share_of_all
from hf_specdec.training.recipe import RECIPES, Recipe, recipe_of
from hf_specdec.training.schedule import UNBOUNDED, Schedule, StepsProgress
from hf_specdec.training.source import Source, load_target
from hf_specdec.training.start_from import initialize_from
from hf_specdec.training.step import TrainingStep
from hf_specdec.training.text import Corpus, TextSource

SHARED_SETTINGS = ("batch_size", "optimizer", "learning_rate", "schedule", "clip", "bf16", "seed")
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
    parser = _parser(recipe, program, corpus)
    arguments = parser.parse_args(argv)
    datasets_package()
    _check_source(arguments, parser.get_default)
    check_output(arguments.output)
    checkpoints = _checkpoints(arguments)
    last = get_last_checkpoint(checkpoints) if arguments.resume and checkpoints.exists() else None
    if arguments.resume and last is None:
        raise ValueError(
            f"--resume, but {str(arguments.work_dir)!r} holds no checkpoint of a run with these options. Give the "
            "options of the run to continue, see its checkpoints-*/options.json, or leave --resume out to start a new "
            "run."
        )
    check_not_sharded()
    given = _options(arguments)
    set_seed(arguments.seed)
    started = time.time()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Before the target is loaded, because it sets each process's GPU. The others wait while the first process writes.
    processes = PartialState(cpu=device == "cpu", timeout=timedelta(days=1))
    earlier_inputs = _earlier_inputs(checkpoints)
    if arguments.bf16 is None:
        if last is not None and "bf16" in earlier_inputs:
            arguments.bf16 = earlier_inputs["bf16"]
        else:
            arguments.bf16 = chosen_bfloat16(processes)
    training_arguments = _training_arguments(arguments, recipe, checkpoints, device)

    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    # Its cached states are in bfloat16 in both cases.
    target_dtype = torch.bfloat16 if arguments.bf16 or device == "cuda" else torch.float32
    source: Source
    if arguments.data is not None:
        source = ConversationSource(arguments, tokenizer)
    else:
        source = TextSource(arguments, corpus, tokenizer, target_dtype)
    target = load_target(arguments.target, target_dtype)
    inputs = _inputs(target, source) | {"bf16": arguments.bf16}
    if last is not None:
        _check_resumed(arguments, checkpoints, source, earlier_inputs, inputs)

    # All checks come before the target writes, which takes minutes to hours.
    source.check(target)
    model, step = recipe.prepare(arguments, target, source)
    drafter: Any = model if recipe.as_drafter is None else recipe.as_drafter(model)
    earlier = None if arguments.start_from is None else initialize_from(drafter, arguments.start_from, target)
    step.reader.read(torch.tensor([[0, 1]], device=target.device))  # raises if the losses cannot use this target
    if drafter is model:
        model.config.target_name_or_path = arguments.target_id or arguments.target
        model.config.target_tokenizer_sha256 = tokenizer_fingerprint(tokenizer)
    processes.print(
        f"drafter: {model.num_parameters() / 1e6:.2f}M parameters, reads layers {step.reader.layers}", flush=True
    )

    written = source.write(target, processes)
    written_minutes = (time.time() - started) / 60
    processes.print(written.summary(written_minutes), flush=True)
    if recipe.read_rows is not None and earlier is None:
        recipe.read_rows(arguments, model, target, written.rows)
    worker = (processes.process_index, processes.num_processes)
    train_rows, held_out_rows = (
        cache_states(step.reader, rows, arguments.work_dir, worker=worker) for rows in (written.rows, written.held_out)
    )
    processes.wait_for_everyone()

    if processes.is_main_process:
        _save_inputs(checkpoints, given, inputs, new_run=earlier_inputs != inputs)
    trainer, schedule = _trainer(arguments, training_arguments, model, step, train_rows, held_out_rows, last)
    training_started = time.time()
    trainer.train(resume_from_checkpoint=last)
    losses = _losses(trainer)
    training_minutes = (time.time() - training_started) / 60
    processes.wait_for_everyone()
    processes.destroy_process_group()  # a process whose group threads still run at exit sometimes aborts
    if not trainer.is_world_process_zero():
        return
    if recipe.finish is not None:
        recipe.finish(model, target, written.held_out)

    record = {
        "data": {
            source.option: source.description,
            **written.record,
            "rows_trained_on": schedule.num_steps * arguments.batch_size * processes.num_processes,
        },
        "hardware": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        "time": {"minutes_writing": round(written_minutes, 1), "minutes_training": round(training_minutes, 1)},
        "losses": losses,
        "command": f"{program} {shlex.join(argv)}",
        "settings": {name: getattr(arguments, name) for name in ("method", *recipe.recorded, *SHARED_SETTINGS)}
        | {"steps": schedule.num_steps},
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__, "hf_specdec": hf_specdec.__version__},
        **written.mode,
    }  # fmt: skip
    if earlier is not None:
        record["started_from"] = earlier
    if written.datasets:
        record["datasets"] = list(written.datasets)
    if arguments.license:
        record["license"] = arguments.license
    model.to(torch.bfloat16)
    if drafter is not model:  # its config has no fields for target and tokenizer
        record["target"] = arguments.target_id or arguments.target
        tokenizer.save_pretrained(arguments.output)
    drafter.training_record = record
    drafter.save_pretrained(arguments.output)
    print(json.dumps(record, indent=2))


def _check_resumed(
    arguments: argparse.Namespace,
    checkpoints: Path,
    source: Source,
    earlier_inputs: dict[str, Any],
    inputs: dict[str, Any],
) -> None:
    """Raises ValueError if the run to resume had other inputs."""
    if earlier_inputs == inputs:
        return
    named = {source.option: f"--{source.option} {source.description!r}", "target": f"--target {arguments.target!r}"}
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
    arguments: argparse.Namespace,
    training_arguments: TrainingArguments,
    model: PreTrainedModel,
    step: TrainingStep,
    train_rows: CachedStates,
    held_out_rows: CachedStates,
    last: str | None,
) -> tuple[DrafterTrainer, Schedule]:
    """The trainer and the schedule of a run; `last` is the checkpoint to resume from."""
    num_steps = arguments.steps
    if last is not None:  # a resumed run keeps the last estimate of its steps
        num_steps = TrainerState.load_from_json(f"{last}/trainer_state.json").max_steps
    schedule = Schedule(
        arguments.schedule,
        arguments.warmup,
        evaluation_steps=-(-len(held_out_rows) // (arguments.batch_size * training_arguments.world_size)),
        num_steps=num_steps,
        minutes=arguments.minutes,
    )
    training_arguments.max_steps = UNBOUNDED if schedule.timed else schedule.num_steps
    for name, interval in schedule.intervals.items():
        setattr(training_arguments, name, interval)
    optimizer = _optimizer(arguments, model)
    trainer = DrafterTrainer(
        model,
        step,
        training_arguments,
        train_dataset=train_rows,
        eval_dataset=held_out_rows,
        optimizers=(optimizer, LambdaLR(optimizer, schedule.learning_rate_factor)),
        callbacks=[schedule],
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(StepsProgress)
    return trainer, schedule


def _losses(trainer: DrafterTrainer) -> dict[str, float]:
    """Losses and accuracies of the held-out rows at the end of the run."""
    history, last_step = trainer.state.log_history, trainer.state.global_step
    final = [entry for entry in history if "eval_loss" in entry and entry["step"] == last_step]
    evaluation = final[-1] if final else trainer.evaluate()
    return {
        name.removeprefix("eval_"): round(value, 4)
        for name, value in evaluation.items()
        if name.startswith(("eval_loss", "eval_acc"))
    }


def _options(arguments: argparse.Namespace) -> str:
    """JSON of the options that the drafter's weights depend on."""
    ignored = ("output", "work_dir", "resume", "license", "target_id", "writers")
    options = {name: value for name, value in vars(arguments).items() if name not in ignored}
    return json.dumps(options, indent=2, sort_keys=True, default=str) + "\n"


def _training_arguments(
    arguments: argparse.Namespace, recipe: Recipe, checkpoints: Path, device: str
) -> TrainingArguments:
    """Without the number of steps. Raises ValueError for what the device does not support."""
    return TrainingArguments(
        output_dir=str(checkpoints),
        per_device_train_batch_size=arguments.batch_size,
        per_device_eval_batch_size=recipe.eval_batch_size or arguments.batch_size,
        learning_rate=arguments.learning_rate,
        max_grad_norm=arguments.clip,
        bf16=arguments.bf16,
        use_cpu=device == "cpu",
        eval_strategy="steps",
        save_total_limit=1,
        report_to="none",
        seed=arguments.seed,
    )


def _optimizer(arguments: argparse.Namespace, drafter: PreTrainedModel) -> torch.optim.Optimizer:
    if arguments.optimizer == "muon":
        dtype = torch.bfloat16 if arguments.bf16 else torch.float32
        return MuonWithAdamW(drafter, arguments.learning_rate, dtype=dtype)
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=arguments.learning_rate, weight_decay=0.0)


def _checkpoints(arguments: argparse.Namespace) -> Path:
    """The folder for the checkpoints of runs with these options."""
    name = hashlib.sha256(_options(arguments).encode()).hexdigest()[:12]
    folder: Path = arguments.work_dir / f"checkpoints-{name}"
    return folder


def _inputs(target: PreTrainedModel, source: Source) -> dict[str, Any]:
    """Fingerprints of what a run reads, because the contents of a path may change."""
    return {
        source.option: source.identity,
        "target": {"weights": fingerprint(target), "generation_config": settings_of(target.generation_config)},
    }


def _earlier_inputs(checkpoints: Path) -> dict[str, Any]:
    """`_inputs` and `bf16` of the run with these checkpoints; empty if they were not saved."""
    file = checkpoints / INPUTS_FILE
    return json.loads(file.read_text()) if file.exists() else {}


def check_output(folder: Path) -> None:
    """Raises ValueError if `folder` or one of its parents is a file."""
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    if not nearest.is_dir():
        raise ValueError(f"--output {str(folder)!r} cannot be a folder: {str(nearest)!r} is a file. Give another name.")


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


def _add_source_arguments(parser: argparse.ArgumentParser, corpus: Corpus | None) -> None:
    """The options of both sources; `_check_source` refuses those of the other source."""
    source = parser.add_argument_group("what to train on")
    one = source.add_mutually_exclusive_group(required=corpus is None)
    default = f"; default: {corpus.description}" if corpus else ""
    one.add_argument("--text", type=Path, help=f".jsonl (field text) or .txt that the target continues{default}")
    one.add_argument(
        "--data",
        nargs="+",
        help='conversations for the target to answer: JSONL files with "messages", Hub ids of such datasets, or '
        "folders of answers from `hf-specdec write`",
    )
    source.add_argument(
        "--new-tokens", type=positive_int, help="most tokens of a continuation or answer; default: 192 or 384"
    )
    text = parser.add_argument_group("with --text")
    text.add_argument("--rows", type=int, default=6144, help="number of continuations that the target writes")
    text.add_argument("--write-minutes", type=not_negative_float, default=12.0, help="stop writing after this time")
    text.add_argument(
        "--writers", type=positive_int, help="processes that write; default: one per torch thread, one with a GPU"
    )
    text.add_argument(
        "--prompt-tokens", type=int, nargs=2, default=(32, 128), metavar=("MIN", "MAX"), help="length of the prompts"
    )
    text.add_argument("--plain-share", type=float, default=0.1, help="share of rows that are plain text")
    chats = parser.add_argument_group("with --data")
    chats.add_argument("--temperature", type=not_negative_float, default=0.0, help="of the answers; 0 is greedy")
    chats.add_argument(
        "--max-length", type=positive_int, default=768, help="most tokens of a conversation with its answer"
    )


def _check_source(arguments: argparse.Namespace, defaults: Callable[[str], Any]) -> None:
    """Checks the options of the source, and sets the default of --new-tokens.

    Args:
        arguments: as parsed.
        defaults: option name -> default.

    Raises:
        ValueError: an option of the other source is given, or no text can meet the options.
    """
    chats = arguments.data is not None
    others = ("rows", "write_minutes", "writers", "prompt_tokens", "plain_share") if chats else (
        "temperature", "max_length"
    )  # fmt: skip
    for name in others:
        if getattr(arguments, name) != defaults(name):
            raise ValueError(
                f"--{name.replace('_', '-')} is for --{'text' if chats else 'data'} and has no effect with "
                f"--{'data' if chats else 'text'}: leave it out."
            )
    if arguments.new_tokens is None:
        arguments.new_tokens = 384 if chats else 192
    if not chats:
        check_wanted(arguments.rows, tuple(arguments.prompt_tokens))
        check_plain_share(arguments.plain_share)


def _parser(recipe: Recipe, program: str, corpus: Corpus | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--method", choices=sorted(RECIPES), default="dflash")
    parser.add_argument("--target", required=True, help="folder or Hub id of the model to draft for")
    parser.add_argument("--output", type=Path, required=True, help="folder for the drafter")
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=Path("build/drafter"),
        help="folder for caches and checkpoints; several machines need a shared one",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint with these options")
    parser.add_argument("--target-id", help="Hub id of the target, for the drafter's card; default: --target")
    parser.add_argument("--license", help="Hub licence id, for the drafter's card")
    parser.add_argument("--seed", type=seed_number, default=0)
    _add_source_arguments(parser, corpus)
    training = parser.add_argument_group("training")
    training.add_argument(
        "--minutes",
        type=positive_float,
        default=12.0,
        help="training time with evaluation and checkpoints; --write-minutes limits the stage before",
    )
    training.add_argument("--steps", type=positive_int, help="number of steps, instead of --minutes")
    training.add_argument("--start-from", type=Path, help="folder of a drafter of the same shape to train further")
    training.add_argument("--batch-size", type=positive_int, default=8)
    training.add_argument("--optimizer", choices=["muon", "adamw"], default="muon")
    training.add_argument("--learning-rate", type=positive_float, default=3e-3)
    training.add_argument("--schedule", choices=["linear", "cosine"], default="linear")
    training.add_argument(
        "--warmup", type=share_of_all, default=0.04, help="share of the steps in which the learning rate rises"
    )
    training.add_argument("--clip", type=not_negative_float, default=1.0, help="largest gradient norm; 0: no clipping")
    training.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compute in bfloat16; default: if a trial on this device finds it faster than float32",
    )
    recipe.add_arguments(parser.add_argument_group(recipe.name))
    return parser
