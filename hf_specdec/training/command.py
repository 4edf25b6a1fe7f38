"""The training command: from a target and text to a drafter in the layout in which such drafters are published.

`hf-specdec train` runs it; `main(argv)` is the same as a Python call. Three stages; what the first two give is kept in
--work-dir, where a second run finds it, and --resume goes on with the third:

1. the target writes: it answers the conversations of --data in its chat template, or continues prompts cut from --text,
   where rows of the plain text itself are mixed in. What a drafter must foresee is what its target writes;
2. the frozen target's hidden states for all rows are computed once;
3. the drafter trains on them, pass after pass, with new random choices (anchors, cuts, positions) in each.

What target, tokenizer, text and options tell is checked before the first stage, which takes minutes to hours. Training
takes --minutes, from its first step to the end of its last evaluation.

Started as several processes (`torchrun`, `accelerate launch`), all answer and train together, --batch-size rows each;
the first one saves. What differs from method to method is its `Recipe`, at the foot of its module.
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
    PreTrainedTokenizerBase,
    ProgressCallback,
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
from hf_specdec.training.start_from import go_on_from
from hf_specdec.training.step import TrainingStep
from hf_specdec.training.text import Corpus, TextSource

SHARED_SETTINGS = ("batch_size", "optimizer", "learning_rate", "schedule", "clip", "bf16", "seed")
INPUTS_FILE = "inputs.json"


def main(argv: Sequence[str], *, program: str = "hf-specdec train", corpus: Corpus | None = None) -> None:
    """Trains and saves one drafter.

    Args:
        argv: the options; `--help` lists them, those of a method with `--method NAME --help`.
        program: what the user typed before them; part of the drafter's record.
        corpus: text to use without --text; None makes --text required.

    Raises:
        ImportError: a package that training needs is not installed.
        ValueError: no such method, text that is too short, nothing to resume or a run on another text or target, or
            options that do not fit each other or the target.
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
            f"--resume, but {str(arguments.work_dir)!r} holds no checkpoint of a run with these options. Give those of "
            "the run to go on with, which are in its checkpoints-*/options.json, or leave --resume out to begin anew."
        )
    check_not_sharded()
    given = _options(arguments)
    set_seed(arguments.seed)
    started = time.time()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Before the target is loaded: each of several processes has its own GPU. They wait long while the first one writes.
    processes = PartialState(cpu=device == "cpu", timeout=timedelta(days=1))
    begun_with = _begun_with(checkpoints)
    if arguments.bf16 is None:
        if last is not None and "bf16" in begun_with:
            arguments.bf16 = begun_with["bf16"]
        else:
            arguments.bf16 = chosen_bfloat16(processes)
    host_settings = _host_settings(arguments, recipe, checkpoints, device)

    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    target_dtype = target_number_type(device, arguments.bf16)
    source = _source_of(arguments, corpus, tokenizer, target_dtype)
    target = load_target(arguments.target, target_dtype)
    inputs = _inputs(target, source) | {"bf16": arguments.bf16}
    if last is not None:
        _check_resumed(arguments, checkpoints, source, begun_with, inputs)

    # Whatever can be known before the target writes is found out here: writing takes minutes to hours.
    source.check(target)
    model, step = recipe.prepare(arguments, target, tokenizer, source.documents)
    drafter: Any = model if recipe.as_drafter is None else recipe.as_drafter(model)
    earlier = None if arguments.start_from is None else go_on_from(drafter, arguments.start_from, target)
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
        _note_inputs(checkpoints, given, inputs, anew=begun_with != inputs)
    trainer, schedule = _trainer(arguments, host_settings, model, step, train_rows, held_out_rows, last)
    training_started = time.time()
    trainer.train(resume_from_checkpoint=last)
    losses = _losses(trainer)
    training_minutes = (time.time() - training_started) / 60
    processes.wait_for_everyone()
    processes.destroy_process_group()  # a process that ends with threads of it still running is aborted now and then
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
    if drafter is not model:  # its config has no place for them
        record["target"] = arguments.target_id or arguments.target
        tokenizer.save_pretrained(arguments.output)
    drafter.training_record = record
    drafter.save_pretrained(arguments.output)
    print(json.dumps(record, indent=2))


def _check_resumed(
    arguments: argparse.Namespace,
    checkpoints: Path,
    source: Source,
    begun_with: dict[str, Any],
    inputs: dict[str, Any],
) -> None:
    """Raises ValueError if a run that goes on was begun with other inputs."""
    if begun_with == inputs:
        return
    named = {source.option: f"{source.option} {source.description!r}", "target": f"target {arguments.target!r}"}
    changed = " or the ".join(words for name, words in named.items() if begun_with.get(name) != inputs[name])
    raise ValueError(
        f"--resume, but {str(checkpoints)!r} was begun with "
        + (f"something else in place of the {changed}" if begun_with else f"no {INPUTS_FILE} to tell by")
        + ": its weights might not be those of a drafter for what is there now. Put back what was there, or leave "
        "--resume out to begin anew."
    )


def _note_inputs(checkpoints: Path, options: str, inputs: dict[str, Any], *, anew: bool) -> None:
    """Writes beside the checkpoints what they depend on; those of a run on other inputs go."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    if anew:
        # A later --resume would take them for this run's.
        for stale in checkpoints.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
            shutil.rmtree(stale)
    (checkpoints / "options.json").write_text(options)
    (checkpoints / INPUTS_FILE).write_text(json.dumps(inputs, indent=2) + "\n")


def _trainer(
    arguments: argparse.Namespace,
    host_settings: TrainingArguments,
    model: PreTrainedModel,
    step: TrainingStep,
    train_rows: CachedStates,
    held_out_rows: CachedStates,
    last: str | None,
) -> tuple[DrafterTrainer, Schedule]:
    """The trainer of a run, and how long it goes on; `last` is the checkpoint that it goes on from."""
    schedule = Schedule(
        arguments.schedule,
        arguments.warmup,
        evaluation_steps=-(-len(held_out_rows) // (arguments.batch_size * host_settings.world_size)),
        # A run that goes on takes the steps that were estimated before it was stopped.
        num_steps=arguments.steps if last is None else _steps_of(last),
        minutes=arguments.minutes,
    )
    host_settings.max_steps = UNBOUNDED if schedule.timed else schedule.num_steps
    for name, interval in schedule.intervals.items():
        setattr(host_settings, name, interval)
    optimizer = _optimizer(arguments, model)
    trainer = DrafterTrainer(
        model,
        step,
        host_settings,
        train_dataset=train_rows,
        eval_dataset=held_out_rows,
        optimizers=(optimizer, LambdaLR(optimizer, schedule.learning_rate_factor)),
        callbacks=[schedule],
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(StepsProgress)
    return trainer, schedule


def _losses(trainer: DrafterTrainer) -> dict[str, float]:
    """Of the held-out rows at the end of the run."""
    history, last_step = trainer.state.log_history, trainer.state.global_step
    at_the_end = [entry for entry in history if "eval_loss" in entry and entry["step"] == last_step]
    evaluation = at_the_end[-1] if at_the_end else trainer.evaluate()
    return {
        name.removeprefix("eval_"): round(value, 4)
        for name, value in evaluation.items()
        if name.startswith(("eval_loss", "eval_acc"))
    }


def _options(arguments: argparse.Namespace) -> str:
    """JSON of what the drafter's weights depend on."""
    beside = ("output", "work_dir", "resume", "license", "target_id", "writers")
    options = {name: value for name, value in vars(arguments).items() if name not in beside}
    return json.dumps(options, indent=2, sort_keys=True, default=str) + "\n"


def _host_settings(arguments: argparse.Namespace, recipe: Recipe, checkpoints: Path, device: str) -> TrainingArguments:
    """The host's arguments, but for the number of steps; it refuses what the device cannot do."""
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


def _steps_of(checkpoint: str) -> int:
    steps: int = json.loads((Path(checkpoint) / "trainer_state.json").read_text())["max_steps"]
    return steps


def _checkpoints(arguments: argparse.Namespace) -> Path:
    """Where a run with these options keeps its checkpoints; one with others has another folder."""
    name = hashlib.sha256(_options(arguments).encode()).hexdigest()[:12]
    folder: Path = arguments.work_dir / f"checkpoints-{name}"
    return folder


def _inputs(target: PreTrainedModel, source: Source) -> dict[str, Any]:
    """Fingerprints of what a run reads: at the same path there may be something else the next time."""
    return {
        source.option: source.identity,
        "target": {"weights": fingerprint(target), "generation_config": settings_of(target.generation_config)},
    }


def _begun_with(checkpoints: Path) -> dict[str, Any]:
    """What the run whose checkpoints these are began with: `_inputs` and its `bf16`; nothing where none was kept."""
    file = checkpoints / INPUTS_FILE
    return json.loads(file.read_text()) if file.exists() else {}


def check_output(folder: Path) -> None:
    """Raises ValueError if nothing can be saved in `folder`, since it or what it should lie in is a file."""
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    if not nearest.is_dir():
        raise ValueError(f"--output {str(folder)!r} cannot be a folder: {str(nearest)!r} is a file. Give another name.")


def check_not_sharded() -> None:
    """Raises ValueError if the launcher was told to shard what is trained, which nothing here would do."""
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise ValueError(
            "FSDP was asked for (ACCELERATE_USE_FSDP, which accelerate's --use_fsdp sets), but drafters are trained "
            "whole in each process: on a CPU accelerate does not shard and would not say so, and on accelerators it "
            "was never tried. Launch with --multi_gpu, without --use_fsdp."
        )


def _method(argv: Sequence[str]) -> str:
    # Before the others: which options there are depends on it.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--method", default="dflash")
    return first.parse_known_args(argv)[0].method


def _add_source_arguments(parser: argparse.ArgumentParser, corpus: Corpus | None) -> None:
    """The options of both sources; those that belong to one are refused with the other by `_check_source`."""
    source = parser.add_argument_group("what to train on")
    one = source.add_mutually_exclusive_group(required=corpus is None)
    default = f"; default: {corpus.description}" if corpus else ""
    one.add_argument("--text", type=Path, help=f".jsonl (field text) or .txt that the target continues{default}")
    one.add_argument(
        "--data",
        nargs="+",
        help='conversations that the target answers: JSONL with "messages", ids of such datasets on the Hub; or '
        "folders of answers that `hf-specdec write` wrote",
    )
    source.add_argument("--new-tokens", type=positive_int, help="of a continuation or answer; default: 192 or 384")
    text = parser.add_argument_group("with --text")
    text.add_argument("--rows", type=int, default=6144, help="continuations that the target writes")
    text.add_argument("--write-minutes", type=not_negative_float, default=12.0, help="stop writing after this time")
    text.add_argument(
        "--writers",
        type=positive_int,
        default=None,
        help="processes; default: as many as torch has threads, one with a GPU",
    )
    text.add_argument("--prompt-tokens", type=int, nargs=2, default=(32, 128), metavar=("MIN", "MAX"))
    text.add_argument("--plain-share", type=float, default=0.1, help="share of rows that are plain text")
    chats = parser.add_argument_group("with --data")
    chats.add_argument("--temperature", type=not_negative_float, default=0.0, help="of the answers; 0 is greedy")
    chats.add_argument(
        "--max-length", type=positive_int, default=768, help="of a conversation with its answer, in tokens"
    )


def _check_source(arguments: argparse.Namespace, defaults: Callable[[str], Any]) -> None:
    """Refuses options of the other source, and wishes that no text can meet; sets --new-tokens.

    Args:
        arguments: as parsed.
        defaults: of an option, by its name.

    Raises:
        ValueError: names the option.
    """
    chats = arguments.data is not None
    others = ("rows", "write_minutes", "writers", "prompt_tokens", "plain_share") if chats else (
        "temperature", "max_length"
    )  # fmt: skip
    for name in others:
        if getattr(arguments, name) != defaults(name):
            raise ValueError(
                f"--{name.replace('_', '-')} is for --{'text' if chats else 'data'} and does nothing with "
                f"--{'data' if chats else 'text'}: leave it out."
            )
    if arguments.new_tokens is None:
        arguments.new_tokens = 384 if chats else 192
    if not chats:
        check_wanted(arguments.rows, tuple(arguments.prompt_tokens))
        check_plain_share(arguments.plain_share)


def _source_of(
    arguments: argparse.Namespace, corpus: Corpus | None, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype
) -> Source:
    """Reads what the options name.

    Args:
        arguments: of the command.
        corpus: text to use where they name nothing.
        tokenizer: the target's.
        dtype: that the target is loaded in.

    Raises:
        OSError: it cannot be read.
        ValueError: it is of no use; says where and why.
    """
    if arguments.data is not None:
        return ConversationSource(arguments, tokenizer)
    return TextSource(arguments, corpus, tokenizer, dtype)


def _parser(recipe: Recipe, program: str, corpus: Corpus | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--method", choices=sorted(RECIPES), default="dflash")
    parser.add_argument("--target", required=True, help="folder or Hub id of the model to draft for")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=Path("build/drafter"),
        help="caches and checkpoints; where several machines train, a folder that all of them see",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint of these options")
    parser.add_argument("--target-id", help="Hub id of the target, for the drafter's card; default: what --target says")
    parser.add_argument("--license", help="Hub licence id for the drafter's card")
    parser.add_argument("--seed", type=seed_number, default=0)
    _add_source_arguments(parser, corpus)
    training = parser.add_argument_group("training")
    training.add_argument(
        "--minutes",
        type=positive_float,
        default=12.0,
        help="training time, evaluation and checkpoints included; what comes before is bounded by --write-minutes",
    )
    training.add_argument("--steps", type=positive_int, help="instead of --minutes")
    training.add_argument("--start-from", type=Path, help="folder of a drafter of this shape to train further")
    training.add_argument("--batch-size", type=positive_int, default=8)
    training.add_argument("--optimizer", choices=["muon", "adamw"], default="muon")
    training.add_argument("--learning-rate", type=positive_float, default=3e-3)
    training.add_argument("--schedule", choices=["linear", "cosine"], default="linear")
    training.add_argument("--warmup", type=share_of_all, default=0.04, help="share of the steps")
    training.add_argument("--clip", type=not_negative_float, default=1.0, help="largest norm of the gradient")
    training.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compute in bfloat16; default: where a trial of this device finds it faster than float32",
    )
    recipe.add_arguments(parser.add_argument_group(recipe.name))
    return parser


def target_number_type(device: str, bf16: bool) -> torch.dtype:
    """What the frozen target computes in; its states are kept in bfloat16 in any case."""
    return torch.bfloat16 if bf16 or device == "cuda" else torch.float32
