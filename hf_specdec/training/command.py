"""The training command: from a target and text to a drafter in the layout in which such drafters are published.

`hf-specdec train` and `examples/train_drafter.py` run it; `main(argv)` is the same as a Python call. Four stages; what
the first and the third give is kept in --work-dir, where a second run finds it, and --resume goes on with the fourth:

1. the target continues prompts cut from text: what a drafter must foresee is what its target writes;
2. rows of the plain text itself are mixed in;
3. the frozen target's hidden states for all rows are computed once;
4. the drafter trains on them, pass after pass, with new random choices (anchors, cuts, positions) in each.

What target, tokenizer, text and options tell is checked before the first stage, which takes minutes to hours. Training
takes --minutes, from its first step to the end of its last evaluation; --write-minutes bounds the first stage, to the
end of a batch.

Started as several processes (`torchrun`, `accelerate launch`), the first one writes and saves, and all train together,
--batch-size rows each. What differs from method to method is its `Recipe`, at the foot of its module.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import reprlib
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
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
from hf_specdec.drafters.card import TRAINING_FILE, read_record
from hf_specdec.drafters.causal_lm.loading import whole_target
from hf_specdec.drafters.fingerprint import tokenizer_fingerprint
from hf_specdec.drafters.pairing import text_mode
from hf_specdec.drafters.pretrained import PretrainedDrafter
from hf_specdec.training import DrafterTrainer  # the package: it registers all recipes
from hf_specdec.training.data import (
    check_documents,
    check_plain_share,
    check_wanted,
    datasets_package,
    documents_hash,
    mix,
    pack_text,
    plain_rows,
    write_continuations,
)
from hf_specdec.training.features import cache_states, fingerprint, settings_of
from hf_specdec.training.number_type import chosen_bfloat16
from hf_specdec.training.optimizer import MuonWithAdamW
from hf_specdec.training.option_types import not_negative_float, positive_float, positive_int, seed_number, share_of_all
from hf_specdec.training.recipe import RECIPES, Recipe, recipe_of
from hf_specdec.training.schedule import UNBOUNDED, Schedule, StepsProgress

SHARED_SETTINGS = ("batch_size", "optimizer", "learning_rate", "schedule", "clip", "bf16", "seed")
INPUTS_FILE = "inputs.json"
DOCUMENT_LENGTH = 2000  # characters of a .txt file
ROWS_PER_BATCH = 128  # that the target writes


@dataclass(frozen=True)
class Corpus:
    """Text to train on where no --text is given.

    Attributes:
        description: for the drafter's record.
        read: gives training and held-out documents.
    """

    description: str
    read: Callable[[], tuple[list[str], list[str]]]


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
    arguments = _parser(recipe, program, corpus).parse_args(argv)
    datasets_package()
    check_wanted(arguments.rows, tuple(arguments.prompt_tokens))
    check_plain_share(arguments.plain_share)
    check_output(arguments.output)
    checkpoints = _checkpoints(arguments)
    last = get_last_checkpoint(checkpoints) if arguments.resume and checkpoints.exists() else None
    if arguments.resume and last is None:
        raise ValueError(
            f"--resume, but {str(arguments.work_dir)!r} holds no checkpoint of a run with these options. Give those of "
            "the run to go on with, which are in its checkpoints-*/options.json, or leave --resume out to begin anew."
        )
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

    train_texts, held_out_texts = corpus.read() if corpus and arguments.text is None else read_text(arguments.text)
    target_dtype = target_number_type(device, arguments.bf16)
    target = load_target(arguments.target, target_dtype)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    train_ids, held_out_ids = tokenizer(train_texts)["input_ids"], tokenizer(held_out_texts)["input_ids"]
    text = str(arguments.text) if arguments.text is not None or corpus is None else corpus.description
    inputs = _inputs(target, train_ids, held_out_ids) | {"bf16": arguments.bf16}
    if last is not None and begun_with != inputs:
        named = {"text": f"text {text!r}", "target": f"target {arguments.target!r}"}
        changed = " or the ".join(words for name, words in named.items() if begun_with.get(name) != inputs[name])
        raise ValueError(
            f"--resume, but {str(checkpoints)!r} was begun with "
            + (f"something else in place of the {changed}" if begun_with else f"no {INPUTS_FILE} to tell by")
            + ": its weights might not be those of a drafter for what is there now. Put back what was there, or leave "
            "--resume out to begin anew."
        )

    # Whatever can be known before the target writes is found out here: writing takes minutes to hours.
    width = arguments.prompt_tokens[1] + arguments.new_tokens
    check_width(width, target)
    for documents in (train_ids, held_out_ids):
        check_documents(documents, arguments.prompt_tokens[0])
    plain = None
    if arguments.plain_share:
        plain = pack_text(train_ids, width, separator_id=tokenizer.eos_token_id)
        # As many as are written, in whole batches, if the time suffices.
        plain_rows(-(-arguments.rows // ROWS_PER_BATCH) * ROWS_PER_BATCH, len(plain), arguments.plain_share)
    drafter, step = recipe.prepare(arguments, target, tokenizer, train_ids + held_out_ids)
    earlier = None if arguments.start_from is None else go_on_from(drafter, arguments.start_from, target)
    step.reader.read(torch.tensor([[0, 1]], device=target.device))  # raises if the losses cannot use this target
    drafter.config.target_name_or_path = arguments.target
    drafter.config.target_tokenizer_sha256 = tokenizer_fingerprint(tokenizer)
    processes.print(
        f"drafter: {drafter.num_parameters() / 1e6:.2f}M parameters, reads layers {step.reader.layers}", flush=True
    )

    workers = arguments.writers or (1 if device == "cuda" else torch.get_num_threads())
    workers = min(workers, -(-arguments.rows // ROWS_PER_BATCH))
    settings = {
        "folder": arguments.work_dir,
        "prompt_lengths": tuple(arguments.prompt_tokens),
        "new_tokens": arguments.new_tokens,
        "batch_size": ROWS_PER_BATCH,
        "cache_implementation": "static" if device == "cpu" else None,
    }
    wanted = {"num_rows": arguments.rows, "max_minutes": arguments.write_minutes, "seed": arguments.seed}
    with processes.main_process_first():
        if not processes.is_main_process:
            workers, wanted["max_minutes"] = 1, 0.0  # read what is there
        own = _continuations(target, (arguments.target, target_dtype), train_ids, workers, settings | wanted)
        held_out = write_continuations(
            target, held_out_ids, num_rows=ROWS_PER_BATCH, temperatures=(0.0,), held_out=True, **settings
        )
    rows = own if plain is None else mix(own, plain, arguments.plain_share)
    written_minutes = (time.time() - started) / 60
    written_tokens = sum(own["length"]) - sum(own["first_anchor"])
    ended = sum(row["input_ids"][row["length"] - 1] == tokenizer.eos_token_id for row in own)
    processes.print(
        f"{len(own)} rows with {written_tokens / 1e3:.0f}k tokens written by the target in {written_minutes:.1f} min; "
        f"{ended / len(own):.0%} of them reached the end of text",
        flush=True,
    )
    if ended == 0:
        processes.print(
            "A target that never ends a text loops, and a drafter trained on loops is good at nothing else."
        )
    if recipe.read_rows is not None and earlier is None:
        recipe.read_rows(arguments, drafter, target, rows)
    with processes.main_process_first():
        train_rows = cache_states(step.reader, rows, arguments.work_dir)
        held_out_rows = cache_states(step.reader, held_out, arguments.work_dir)

    if processes.is_main_process:
        checkpoints.mkdir(parents=True, exist_ok=True)
        if begun_with != inputs:
            # A later --resume would take them for this run's.
            for stale in checkpoints.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
                shutil.rmtree(stale)
        (checkpoints / "options.json").write_text(given)
        (checkpoints / INPUTS_FILE).write_text(json.dumps(inputs, indent=2) + "\n")
    schedule = Schedule(
        arguments.schedule,
        arguments.warmup,
        evaluation_steps=-(-len(held_out_rows) // (arguments.batch_size * processes.num_processes)),
        # A run that goes on takes the steps that were estimated before it was stopped.
        num_steps=arguments.steps if last is None else _steps_of(last),
        minutes=arguments.minutes,
    )
    host_settings.max_steps = UNBOUNDED if schedule.timed else schedule.num_steps
    for name, interval in schedule.intervals.items():
        setattr(host_settings, name, interval)
    optimizer = _optimizer(arguments, drafter)
    trainer = DrafterTrainer(
        drafter,
        step,
        host_settings,
        train_dataset=train_rows,
        eval_dataset=held_out_rows,
        optimizers=(optimizer, LambdaLR(optimizer, schedule.learning_rate_factor)),
        callbacks=[schedule],
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(StepsProgress)
    training_started = time.time()
    trainer.train(resume_from_checkpoint=last)
    history, last_step = trainer.state.log_history, trainer.state.global_step
    at_the_end = [entry for entry in history if "eval_loss" in entry and entry["step"] == last_step]
    evaluation = at_the_end[-1] if at_the_end else trainer.evaluate()
    training_minutes = (time.time() - training_started) / 60
    if not trainer.is_world_process_zero():
        return
    if recipe.finish is not None:
        recipe.finish(drafter, target, held_out)

    drafter.training_record = {
        "data": {
            "text": text,
            "rows_written_by_target": len(own),
            "tokens_written_by_target": written_tokens,
            "share_of_rows_that_end": round(ended / len(own), 3),
            "rows_of_plain_text": len(rows) - len(own),
            "rows_trained_on": schedule.num_steps * arguments.batch_size * processes.num_processes,
        },
        "hardware": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        "time": {"minutes_writing": round(written_minutes, 1), "minutes_training": round(training_minutes, 1)},
        "losses": {name.removeprefix("eval_"): round(value, 4) for name, value in evaluation.items()
                   if name.startswith(("eval_loss", "eval_acc"))},
        "command": f"{program} {shlex.join(argv)}",
        "settings": {name: getattr(arguments, name) for name in ("method", *recipe.recorded, *SHARED_SETTINGS)}
        | {"steps": schedule.num_steps},
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__, "hf_specdec": hf_specdec.__version__},
    }  # fmt: skip
    drafter.training_record |= trained_mode(tokenizer, train_texts)
    if earlier is not None:
        drafter.training_record["started_from"] = earlier
    if arguments.license:
        drafter.training_record["license"] = arguments.license
    drafter.to(torch.bfloat16).save_pretrained(arguments.output)
    print(json.dumps(drafter.training_record, indent=2))


def _options(arguments: argparse.Namespace) -> str:
    """JSON of what the drafter's weights depend on."""
    beside = ("output", "work_dir", "resume", "license", "writers")
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


def _inputs(target: PreTrainedModel, *documents: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Fingerprints of what a run reads: at the same path there may be something else the next time."""
    return {
        "text": [documents_hash(each) for each in documents],
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


def _method(argv: Sequence[str]) -> str:
    # Before the others: which options there are depends on it.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--method", default="dflash")
    return first.parse_known_args(argv)[0].method


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
    parser.add_argument("--license", help="Hub licence id for the drafter's card")
    parser.add_argument("--seed", type=seed_number, default=0)
    text = parser.add_argument_group("text")
    default = f"; default: {corpus.description}" if corpus else ""
    text.add_argument("--text", type=Path, required=corpus is None, help=f".jsonl (field text) or .txt{default}")
    text.add_argument("--rows", type=int, default=6144, help="continuations that the target writes")
    text.add_argument("--write-minutes", type=not_negative_float, default=12.0, help="stop writing after this time")
    text.add_argument(
        "--writers",
        type=positive_int,
        default=None,
        help="processes; default: as many as torch has threads, one with a GPU",
    )
    text.add_argument("--prompt-tokens", type=int, nargs=2, default=(32, 128), metavar=("MIN", "MAX"))
    text.add_argument("--new-tokens", type=positive_int, default=192)
    text.add_argument("--plain-share", type=float, default=0.1, help="share of rows that are plain text")
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


def read_text(file: Path) -> tuple[list[str], list[str]]:
    """Training and held-out documents of a .jsonl file with a field "text", or of a .txt file; every 50th held out.

    Raises:
        ValueError: the file is not UTF-8, a line is no JSON object with a text, or there is but one document, or none.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"Line {line} of {str(file)!r} is not UTF-8: byte 0x{error.object[error.start]:02x}. Convert the file "
            "first, for example with iconv."
        ) from error
    if file.suffix == ".jsonl":
        # Not splitlines(): JSON may hold what else that takes for the end of a line.
        lines = enumerate(text.split("\n"), 1)
        documents = [_document(line, f"Line {number} of {str(file)!r}") for number, line in lines if line.strip()]
    else:
        documents = [text[start : start + DOCUMENT_LENGTH] for start in range(0, len(text), DOCUMENT_LENGTH)]
    if len(documents) < 2:
        raise ValueError(
            f"{str(file)!r} holds {len(documents)} documents (lines of .jsonl, {DOCUMENT_LENGTH} characters of .txt), "
            "and the first is held out, so that nothing is left to train on: give more text."
        )
    held_out = documents[::50]
    return [document for index, document in enumerate(documents) if index % 50], held_out


def _document(line: str, place: str) -> str:
    """The text of a line of JSON; `place` is for errors."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON: {error.msg}, column {error.colno}.") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        raise ValueError(f'{place} must be a JSON object with a string "text", not {reprlib.repr(entry)}.')
    text: str = entry["text"]
    return text


def trained_mode(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str]) -> dict[str, bool]:
    """What the record says of the kind of text, for the warning that a prompt of another kind gets.

    Args:
        tokenizer: the target's.
        documents: the training text, as it is tokenized.

    Returns:
        `chat_template`: whether most documents are in the target's chat template. With it, where most of them tell,
        `thinking`: whether the target answers them with thinking. Nothing where the template cannot be asked.
    """
    modes = [text_mode(tokenizer, document) for document in documents]
    asked = [mode for mode in modes if mode is not None]
    if not asked:
        return {}
    record = {"chat_template": 2 * sum(is_chat for is_chat, _ in asked) > len(asked)}
    thinking = [thinks for _, thinks in asked if thinks is not None]
    if record["chat_template"] and 2 * len(thinking) > len(asked):
        record["thinking"] = 2 * sum(thinking) > len(thinking)
    return record


def check_width(width: int, model: PreTrainedModel) -> None:
    """Raises ValueError if texts of `width` tokens, prompt included, have more than the model has positions for."""
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and width > most:
        raise ValueError(
            f"Texts have up to {width} tokens, --prompt-tokens and --new-tokens together, but {model.name_or_path!r} "
            f"has max_position_embeddings {most}. Lower one of the two."
        )


def target_number_type(device: str, bf16: bool) -> torch.dtype | str:
    """What the frozen target computes in: as it was saved on a CPU that is fast in bfloat16."""
    if device == "cuda":
        return torch.bfloat16
    return "auto" if bf16 else torch.float32


def load_target(path: str, dtype: torch.dtype | str) -> PreTrainedModel:
    """The frozen target, on the GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return whole_target(path, dtype=dtype).to(device).eval()


def _write_share(
    rank: int, workers: int, target: tuple[str, torch.dtype | str], documents: Path, settings: dict[str, Any]
) -> None:
    """One of several processes that write continuations: on CPUs two with one thread beat one with two."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it is not inherited from `_ctrl_c_ignored`
    signal.signal(signal.SIGTERM, lambda *ended: sys.exit(1))  # in order: what the progress bar holds is given back
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:  # a writer whose main process was killed must not go on for minutes
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    ids = json.loads(documents.read_text())
    write_continuations(load_target(*target), ids, worker=(rank, workers), **settings)


@contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """Ctrl-C does nothing to processes started here: it reaches their parent too, which ends them.

    From their first instruction on: while they import, they could not yet say so themselves.
    """
    if threading.current_thread() is not threading.main_thread():  # no other may set handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _continuations(
    target: PreTrainedModel,
    source: tuple[str, torch.dtype | str],
    documents: list[list[int]],
    workers: int,
    settings: dict[str, Any],
) -> Any:
    """The target's continuations of the documents' beginnings, written by `workers` processes.

    `source` is the path and the number type that each of several processes loads the target from.
    """
    if workers > 1:
        context = multiprocessing.get_context("spawn")
        # Through a file: a pipe that nobody reads would block this process should a writer fail to start.
        file = settings["folder"] / "documents.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(documents))
        shares = [
            context.Process(target=_write_share, args=(rank, workers, source, file, settings), daemon=True)
            for rank in range(workers)
        ]
        try:
            with _ctrl_c_ignored():
                for share in shares:
                    share.start()
            for share in shares:
                share.join()
        finally:  # stopped from the keyboard, some still write
            for share in shares:
                if share.is_alive():
                    share.terminate()
                    share.join()
        if any(share.exitcode for share in shares):
            raise SystemExit("A process that wrote continuations failed; its error is above.")
        settings = settings | {"max_minutes": 0.0}  # read what is there
    return write_continuations(target, documents, **settings)


def go_on_from(drafter: PretrainedDrafter, folder: Path, target: PreTrainedModel) -> dict[str, Any]:
    """Gives a new drafter the weights of an earlier one, whose training goes on; returns what is recorded of that one.

    The earlier one's vocabulary comes with its weights, and so do the drafting options that suit it.

    Raises:
        OSError: there is no such folder.
        ValueError: it is of another method, its tensors are others than the new one's, of other shapes, or made for
            other inputs.
    """
    earlier = hf_specdec.load_drafter(folder)  # which knows all layouts, and files beside the weights
    if type(earlier) is not type(drafter):
        raise ValueError(
            f"The folder {str(folder)!r} holds a {type(earlier).__name__}, but a {type(drafter).__name__} is to be "
            "trained: give its --method, or start from a drafter of the one to be trained."
        )
    own, given = (_shape(each, target) for each in (drafter, earlier))
    unlike = [name for name in sorted(own.keys() | given.keys()) if own.get(name) != given.get(name)]
    if unlike:
        name = unlike[0]
        raise ValueError(
            f"The drafter in {str(folder)!r} has another shape than the one to be trained: {name} is "
            f"{given.get(name, 'missing')} there and {own.get(name, 'missing')} here ({len(unlike)} such differences). "
            "Give the options that it was trained with, see its training.json."
        )
    drafter.load_state_dict(earlier.state_dict())
    drafter.options = earlier.options
    record = read_record(folder, TRAINING_FILE) or {}
    names = ("command", "settings", "data", "losses", "started_from")  # all that led to these weights
    return {"drafter": str(folder)} | {name: record[name] for name in names if name in record}


def _shape(drafter: PretrainedDrafter, target: PreTrainedModel) -> dict[str, Any]:
    """Shapes of the tensors, by name, and what of the config tells what goes into them."""
    shape: dict[str, Any] = {name: list(tensor.shape) for name, tensor in drafter.state_dict().items()}
    for name in ("block_size", "mask_token_id"):
        shape[name] = getattr(drafter.config, name, None)  # not every method has them
    return shape | {"target_layer_ids": list(drafter.feature_layers(target))}
