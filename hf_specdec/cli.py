"""hf-specdec: the library from the command line. Every subcommand is one Python call, named in its help.

    hf-specdec inspect <repo or folder>                 inspect_drafter(name)
    hf-specdec convert <drafter> <folder>               load_drafter(name).save_pretrained(folder)
    hf-specdec export <drafter> <folder>                export_drafter(load_drafter(name), folder, to="vllm")
    hf-specdec serve <target> <drafter>                 plan_serving(target, drafter), and with --run runs it
    hf-specdec serve ... --engine transformers          attach(model, drafter) in transformers' own server
    hf-specdec verify <target> <drafter>                verify_lossless(model, load_drafter(name, target=model))
    hf-specdec generate <target> <drafter> --prompt ... model.generate(..., assistant_model=drafter)
    hf-specdec chat <target> <drafter>                  the same, with messages in the target's chat template
    hf-specdec write ...                                from hf_specdec.training.write import main; main([...])
    hf-specdec train ...                                from hf_specdec.training.command import main; main([...])
    hf-specdec bench ...                                from hf_specdec.benchmark import benchmark; benchmark(...)

`commands.py` and the modules of the last three run them, and are imported when they are needed: `--help` does not wait
for torch.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.utils.tqdm import disable_progress_bars

from hf_specdec import progress
from hf_specdec.version import __version__

ASSISTANT = "SmolLM2-135M-Instruct"
OWN_PARSERS = {
    "write": "hf_specdec.training.write",
    "train": "hf_specdec.training.command",
    "bench": "hf_specdec.benchmark.__main__",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: without the program's name; None for those of the process.

    Returns:
        The exit status: 0; 1 for an error (printed on stderr), for problems of a checkpoint, or for a verdict other
        than lossless (`bench` returns 2); 130 after Ctrl-C; 141 if the reader of the output has closed it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    progress.quiet, verbose = "--quiet" in own, "--verbose" in own
    arguments = [each for each in own if each not in ("--quiet", "--verbose")] + arguments[len(own) :]
    if progress.quiet or not sys.stderr.isatty():  # before transformers is imported, which asks huggingface_hub
        disable_progress_bars()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # escapes what a locale such as C cannot print
    try:
        if verbose:
            importlib.import_module("transformers").logging.set_verbosity_info()
        status = _run(arguments) or 0
        sys.stdout.flush()  # an error at the interpreter's exit could not be reported
        return status
    except BrokenPipeError:  # as in `hf-specdec inspect ... | head -1`
        # The interpreter flushes once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (OSError, ValueError, ImportError) as error:  # the user can fix these: one line, no traceback
        if verbose:
            traceback.print_exc()
        print(f"hf-specdec: {error}", file=sys.stderr)
        return 1
    except (RuntimeError, MemoryError) as error:
        if not _is_lack_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        print(
            f"hf-specdec: memory ran out ({reason}). Give a smaller --dtype such as bfloat16, a smaller batch, fewer "
            "new tokens, another --device, or a smaller model.",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt as stop:
        print(f"\nhf-specdec: stopped{''.join(f': {each}' for each in stop.args)}", file=sys.stderr)
        return 130


def _run(arguments: list[str]) -> int | None:
    if arguments and arguments[0] in OWN_PARSERS:
        status: int | None = importlib.import_module(OWN_PARSERS[arguments[0]]).main(arguments[1:])
        return status
    engine_options: list[str] = []
    if arguments[:1] == ["serve"] and "--" in arguments:
        at = arguments.index("--")
        arguments, engine_options = arguments[:at], arguments[at + 1 :]
    chosen = _parser().parse_args(arguments, argparse.Namespace(engine_options=engine_options))
    status = getattr(importlib.import_module("hf_specdec.commands"), chosen.command)(chosen)
    return status


def _is_lack_of_memory(error: Exception) -> bool:
    """Whether memory of the host or of a device ran out; torch has a type for the latter only."""
    return isinstance(error, MemoryError) or any(
        words in f"{type(error).__name__} {error}"
        for words in ("OutOfMemory", "out of memory", "can't allocate memory")
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-specdec", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"hf-specdec {__version__}")
    # For `--help`: `main` takes them out, wherever they stand.
    parser.add_argument("--quiet", action="store_true", help="no progress, and no statistics of a call")
    parser.add_argument("--verbose", action="store_true", help="transformers' messages, and the traceback of an error")
    commands = parser.add_subparsers(metavar="command", required=True)

    def command(name: str, text: str, call: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}. In Python: {call}", allow_abbrev=False
        )
        added.set_defaults(command=name)
        return added

    inspect = command("inspect", "describe a drafter and its problems, without loading it", "inspect_drafter(name)")
    inspect.add_argument("drafter", help="Hub id or folder")
    _json(inspect, "the result")
    _where(inspect)

    convert = command(
        "convert",
        "load a drafter of any supported format and save it in the format of this library, as safetensors",
        "load_drafter(name).save_pretrained(folder)",
    )
    convert.add_argument("drafter", help="Hub id or folder")
    convert.add_argument("folder", type=Path, help="folder to write")
    convert.add_argument("--dtype", help="such as bfloat16; default: the checkpoint's")
    _overwriting(convert)
    _where(convert)

    export = command(
        "export",
        "write a drafter in the layout that vLLM serves, or in the layout that it was published in",
        "export_drafter(load_drafter(name), folder, to=layout)",
    )
    export.add_argument("drafter", help="Hub id or folder")
    export.add_argument(
        "folder", type=Path, nargs="?", help="folder to write; default: the drafter's name and the layout's"
    )
    export.add_argument("--to", default="vllm", choices=["vllm", "source"], help="the layout; default: %(default)s")
    export.add_argument(
        "--target-id", help="for vllm: Hub id or folder of the target; default: the one that the drafter names"
    )
    export.add_argument("--target-architecture", help="for vllm: class of the target, such as LlamaForCausalLM")
    export.add_argument("--num-target-layers", type=int, help="for vllm: layers of the target")
    _overwriting(export)
    _where(export)

    serve = command(
        "serve",
        "print or run the command that serves a target with a drafter in vLLM (exports the drafter if needed), or "
        "serve them in this process with transformers' own server (--engine transformers)",
        "plan_serving(target, drafter)",
    )
    serve.add_argument("target", help="Hub id or folder")
    serve.add_argument("drafter", help="Hub id or folder, or ngram, suffix or mtp")
    serve.epilog = "Options after -- are passed to vLLM: hf-specdec serve <target> <drafter> -- --max-model-len 4096"
    serve.add_argument("--run", action="store_true", dest="start", help="run the command")
    serve.add_argument(
        "--engine",
        help="transformers, or the command vllm; default: the one next to this Python, or on the PATH",
    )
    serve.add_argument("--host", default="127.0.0.1", help="default: %(default)s, local clients only")
    serve.add_argument("--port", type=number(int, 0, 65535), default=8000, help="default: %(default)s")
    serve.add_argument("--served-model-name", help="by which clients name the target; default: as it is given here")
    serve.add_argument("--output", type=Path, help="folder of an export; default: the drafter's name and -vllm")
    serve.add_argument(
        "--num-speculative-tokens",
        type=number(int, 1),
        help="tokens drafted per round; default: the best number in the measurements of the drafter",
    )
    serve.add_argument(
        "--dtype", help="of target and drafter; default: the checkpoint's, or float32 without an accelerator"
    )
    _where(serve)

    verify = command(
        "verify",
        "check that a drafter does not change a target's output, greedy and sampled",
        "verify_lossless(model, drafter)",
    )
    _pair(verify)
    verify.add_argument("--prompt", type=_text, action="append", dest="prompts", help="text; may be repeated")
    verify.add_argument("--max-new-tokens", type=number(int, 1), default=48, help="default: %(default)s")
    verify.add_argument(
        "--max-time",
        type=number(float, 0),
        default=60.0,
        metavar="SECONDS",
        help="no step begins after it; default: %(default)s",
    )
    _json(verify, "the report")
    _where(verify)

    generate = command(
        "generate",
        "continue a text with a target and a drafter, or answer it in the target's chat template, and print "
        "statistics of the drafts",
        "model.generate(**inputs, assistant_model=drafter)",
    )
    _pair(generate)
    generate.add_argument(
        "--prompt",
        type=_text,
        required=True,
        action="append",
        dest="prompts",
        help="text; - reads it from stdin. With a chat template, repeat it for the turns of a conversation",
    )
    generate.add_argument(
        "--chat",
        choices=["auto", "on", "off"],
        default="auto",
        help="use the target's chat template; auto (default): if its tokenizer has one",
    )
    _json(generate, "texts and statistics, when all are there,")
    _writing(generate, max_new_tokens=128, default_sampling="generation config says")

    chat = command(
        "chat",
        "chat with a target in the terminal, or answer the lines of stdin; drafted tokens are green",
        "model.generate(**tokenizer.apply_chat_template(messages, ...), assistant_model=drafter)",
    )
    _pair(chat, default=f" (default: {ASSISTANT} with the drafter of a checkout)")
    _writing(
        chat, max_new_tokens=512, default_sampling="generation config says, or 0.7 with top-p 0.9 if it says nothing"
    )
    chat.set_defaults(assistant=ASSISTANT)

    for name, text in (
        ("write", "generate a target's answers to conversations, as training text"),
        ("train", "train a drafter for a target"),
        ("bench", "measure decoding methods"),
    ):
        commands.add_parser(name, help=f"{text}; `hf-specdec {name} --help` lists its options", add_help=False)
    return parser


def number(kind: type[int] | type[float], least: int, most: float = sys.float_info.max) -> Callable[[str], Any]:
    """A `type` of argparse: finite numbers between two limits."""

    def convert(text: str) -> int | float:
        value = kind(text)
        if not least <= value <= most:
            limit = f" and at most {most}" if most < sys.float_info.max else ""
            raise argparse.ArgumentTypeError(f"{text} must be a finite number of at least {least}{limit}")
        return value

    convert.__name__ = kind.__name__  # argparse: "invalid int value"
    return convert


def _text(value: str) -> str:
    """A `type` of argparse: Python keeps bytes of the command line that are not UTF-8 as half characters."""
    if value != value.encode(errors="replace").decode():
        raise argparse.ArgumentTypeError(f"{value!r} is not UTF-8: convert it first, for example with iconv")
    return value


def _overwriting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace a drafter that the folder holds")


def _json(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON")


def _where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--revision", help="of the drafter: branch, tag or commit on the Hub")
    parser.add_argument("--local-files-only", action="store_true", help="use only files in the Hub cache")


def _pair(parser: argparse.ArgumentParser, default: str = "") -> None:
    """Target and drafter; both are required unless `default` describes those used without them."""
    given: dict[str, Any] = {"nargs": "?"} if default else {}
    parser.add_argument("target", help=f"Hub id or folder{default}", **given)
    parser.add_argument("drafter", help="Hub id or folder, or ngram or suffix", **given)
    parser.add_argument("--dtype", help="of the target; default: float32 on a CPU, otherwise the checkpoint's")
    parser.add_argument("--device", help="default: the accelerator that torch finds (cuda, mps, xpu), or cpu")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="drafting option; may be repeated"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python code in the target's repository: read it first"
    )


def _writing(parser: argparse.ArgumentParser, max_new_tokens: int, default_sampling: str) -> None:
    parser.add_argument("--system", type=_text, help="system message of the chat template")
    parser.add_argument("--thinking", choices=["default", "on", "off"], default="default", help="of the chat template")
    parser.add_argument("--max-new-tokens", type=number(int, 1), default=max_new_tokens, help="default: %(default)s")
    parser.add_argument(
        "--temperature", type=number(float, 0), help=f"0 is greedy; default: what the target's {default_sampling}"
    )
    parser.add_argument("--seed", type=number(int, 0, 2**64 - 1), default=0, help="default: %(default)s")
    _where(parser)


if __name__ == "__main__":
    sys.exit(main())
