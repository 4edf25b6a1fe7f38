"""The options of the training commands, as dataclasses that `transformers.HfArgumentParser` reads.

`TrainOptions` has the options of every method; a method adds its own in a subclass next to its recipe. A dataclass
checks the ranges of its options when it is made, so that bad values are refused before anything is loaded.
"""

from __future__ import annotations

import math
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from transformers import HfArgumentParser
from transformers.hf_argparser import HfArg

from hf_specdec.training.losses import LossName

ScheduleName = Literal["linear", "cosine"]


@dataclass(frozen=True)
class Rule:
    """A range of numbers, in the annotation of an option: its wording, and whether it holds a number."""

    wording: str
    holds: Callable[[float], bool]


Count = Annotated[int, Rule("at least 1", lambda value: value >= 1)]
Seed = Annotated[int, Rule(f"between 0 and {2**32 - 1}", lambda value: 0 <= value < 2**32)]  # of `set_seed`
Positive = Annotated[float, Rule("a finite number above 0", lambda value: 0 < value < math.inf)]
NotNegative = Annotated[float, Rule("a finite number of at least 0", lambda value: 0 <= value < math.inf)]
Share = Annotated[float, Rule("between 0 and 1", lambda value: 0 <= value <= 1)]
ShareBelow1 = Annotated[float, Rule("at least 0 and less than 1", lambda value: 0 <= value < 1)]

TEXT_ONLY = ("rows", "write_minutes", "prompt_tokens", "plain_share")
DATA_ONLY = ("temperature", "max_length", "exclude", "mix")


def _rules(annotation: Any) -> Iterator[Rule]:
    for part in get_args(annotation):
        if isinstance(part, Rule):
            yield part
        else:
            yield from _rules(part)


@dataclass(kw_only=True)
class CommandOptions:
    """Options of every training command; raises ValueError if a number is not in the range of its annotation."""

    sources = ("text", "data")  # not a field: two options of which one is given
    target: str = HfArg(help="folder or Hub id of the model to draft for")
    output: Path = HfArg(help="folder to write")
    seed: Seed = HfArg(default=0, help="of all random choices")

    def __post_init__(self) -> None:
        for name, annotation in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            for rule in _rules(annotation):
                for each in value if isinstance(value, list) else [value]:
                    if each is not None and not rule.holds(each):
                        raise ValueError(f"argument --{name.replace('_', '-')}: {each} must be {rule.wording}")


@dataclass(kw_only=True)
class AnswerOptions(CommandOptions):
    """Options of commands in which the target answers conversations."""

    temperature: list[NotNegative] = HfArg(
        default_factory=lambda: [0.0],
        help="of the answers to --data; 0 is greedy; conversations take several values in turn, so that `0 0 0.7` "
        "writes two thirds of the answers greedily",
    )
    max_length: Count = HfArg(default=768, help="most tokens of a conversation of --data with its answer")
    # nargs and const: HfArgumentParser would require a value of an option that is None by default.
    bf16: bool | None = HfArg(
        default=None,
        help="compute in bfloat16, or with --no-bf16 in float32; default: the faster one in a trial on this device",
        metadata={"nargs": "?", "const": True},
    )


@dataclass(kw_only=True)
class TrainOptions(AnswerOptions):
    """Options of `hf-specdec train` for every method."""

    method: str = HfArg(default="dflash", help="what to train; the methods are listed above")
    work_dir: Path = HfArg(default=Path("build/drafter"), help="of caches and checkpoints, shared by all machines")
    overwrite: bool = HfArg(default=False, help="replace a drafter that the folder --output holds")
    resume: bool = HfArg(default=False, help="continue from the last checkpoint with these options")
    target_id: str | None = HfArg(default=None, help="Hub id of the target, for the drafter's card; default: --target")
    license: str | None = HfArg(default=None, help="Hub licence id, for the drafter's card")

    text: Path | None = HfArg(default=None, help=".jsonl (field text) or .txt that the target continues")
    data: list[str] | None = HfArg(
        default=None,
        help='instead of --text: conversations for the target to answer, as JSONL files with "messages", Hub ids of '
        "such datasets, or folders of answers from `hf-specdec write`",
    )
    exclude: str | None = HfArg(
        default=None,
        help="conversations that --data must not contain, such as those a drafter is measured on: rows that share 13 "
        "tokens in sequence with one are left out",
    )
    mix: list[Positive] | None = HfArg(
        default=None,
        help="share of each source of --data in the rows that are trained on, in the same order; for a drafter that is "
        "trained again: `--data old new --mix 0.7 0.3`; default: all rows",
    )
    new_tokens: Count | None = HfArg(
        default=None, help="most tokens of a continuation or answer; default: 192, with --data 384"
    )
    rows: Count = HfArg(default=6144, help="with --text: number of continuations that the target writes")
    write_minutes: NotNegative = HfArg(default=12.0, help="with --text: stop writing after this time")
    prompt_tokens: list[Count] = HfArg(
        default_factory=lambda: [32, 128],
        help="with --text: length of the prompts",
        metadata={"metavar": ("MIN", "MAX")},
    )
    plain_share: ShareBelow1 = HfArg(default=0.1, help="with --text: share of rows that are plain text")

    validate: str | None = HfArg(
        default=None,
        help="conversations as for --data, best of another origin: at each evaluation the target answers them with the "
        "drafter, and the state with the largest mean acceptance length is kept",
    )
    minutes: Positive = HfArg(
        default=12.0, help="training time with evaluation and checkpoints; --write-minutes limits the stage before"
    )
    steps: Count | None = HfArg(default=None, help="number of steps, instead of --minutes")
    start_from: Path | None = HfArg(default=None, help="folder of a drafter of the same shape to train further")
    online: bool = HfArg(default=False, help="compute the target's states in each step and keep none on disk")
    batch_size: Count = HfArg(default=8, help="rows per step and process")
    loss: LossName = HfArg(
        default="kl",
        help="of each drafted position, with the target's probabilities; ce: with its most probable token; tv, and lk "
        "between kl and tv: the probability that a draft is accepted",
    )
    optimizer: Literal["muon", "adamw"] = HfArg(default="muon", help="of the drafter's weights")
    learning_rate: Positive = HfArg(default=3e-3, help="the highest of the schedule")
    schedule: ScheduleName = HfArg(default="linear", help="how the learning rate falls to 0")
    warmup: Share = HfArg(default=0.04, help="share of the steps in which the learning rate rises")
    clip: NotNegative = HfArg(default=1.0, help="largest gradient norm; 0: no clipping")

    def __post_init__(self) -> None:
        super().__post_init__()
        # HfArgumentParser gives a list any number of values.
        if len(self.prompt_tokens) != 2 or not self.prompt_tokens[0] <= self.prompt_tokens[1]:
            raise ValueError(f"argument --prompt-tokens: {self.prompt_tokens} must be MIN MAX with MIN <= MAX")
        if self.mix is not None and len(self.mix) != len(self.data or ()):
            raise ValueError(
                f"argument --mix: {self.mix} has {len(self.mix)} shares for {len(self.data or ())} sources of --data: "
                "give one for each"
            )
        own, other, unused = ("text", "data", DATA_ONLY) if self.data is None else ("data", "text", TEXT_ONLY)
        for field in fields(self):
            default = field.default if field.default_factory is MISSING else field.default_factory()
            if field.name in unused and getattr(self, field.name) != default:
                option = field.name.replace("_", "-")
                raise ValueError(f"argument --{option}: has no effect with --{own}, only with --{other}: leave it out")


Options = TypeVar("Options", bound=CommandOptions)


def parse(
    kind: type[Options], argv: Sequence[str], program: str, description: str | None, *, required: bool = True
) -> Options:
    """The options of a command line. Ends the process with a usage line and status 2 if they are not valid.

    Args:
        kind: their dataclass.
        argv: the command line, without the program.
        program: the command without the options, for messages.
        description: of the command, for `--help`.
        required: whether one of `kind.sources` must be given.

    Raises:
        ValueError: --output cannot be a folder.
    """
    parser = HfArgumentParser(
        kind, prog=program, description=description, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False
    )
    if issubclass(kind, AnswerOptions):
        # HfArgumentParser adds this only to options that are True by default.
        parser.add_argument("--no-bf16", dest="bf16", action="store_false", default=None, help="compute in float32")
    try:
        options, unknown = parser.parse_args_into_dataclasses(
            argv, return_remaining_strings=True, look_for_args_file=False
        )
        first, second = kind.sources
        given = [getattr(options, name) is not None for name in kind.sources]
        if all(given):
            raise ValueError(f"argument --{second}: not allowed with argument --{first}")
        if required and not any(given):
            raise ValueError(f"one of the arguments --{first} --{second} is required")
        if unknown:
            raise ValueError(f"unrecognized arguments: {' '.join(unknown)}")
    except ValueError as error:
        parser.error(str(error))
    output = options.output
    nearest = next(place for place in (output, *output.parents) if place.exists())
    if not nearest.is_dir():
        raise ValueError(f"--output {str(output)!r} cannot be a folder: {str(nearest)!r} is a file. Give another name.")
    return options
