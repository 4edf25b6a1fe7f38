"""hf-specdec: the library from the command line. Every subcommand is one Python call, named in its help.

    hf-specdec inspect <repo or folder>                 inspect_drafter(name)
    hf-specdec convert <drafter> <folder>               load_drafter(name).save_pretrained(folder)
    hf-specdec export <drafter> --to vllm or source     export_drafter(load_drafter(name), folder, to="vllm")
    hf-specdec serve <target> <drafter>                 plan_serving(target, drafter), and with --run runs it
    hf-specdec verify <target> <drafter>                verify_lossless(model, load_drafter(name, target=model))
    hf-specdec generate <target> <drafter> --prompt ... model.generate(..., assistant_model=drafter)
    hf-specdec chat <target> <drafter>                  the same, with messages in the target's chat template
    hf-specdec write ...                                from hf_specdec.training.write import main; main([...])
    hf-specdec train ...                                from hf_specdec.training.command import main; main([...])
    hf-specdec bench ...                                from hf_specdec.benchmark.__main__ import main; main([...])

Each subcommand imports only what it needs.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import runpy
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_specdec.chat import Conversation
    from hf_specdec.drafters.base import Drafter

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
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # escapes what a locale such as C cannot print
    try:
        status = _run(arguments) or 0
        sys.stdout.flush()  # an error at the interpreter's exit could not be reported
        return status
    except BrokenPipeError:  # as in `hf-specdec inspect ... | head -1`
        # The interpreter flushes once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (OSError, ValueError, ImportError) as error:  # the user can fix these: one line, no traceback
        print(f"hf-specdec: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nhf-specdec: stopped", file=sys.stderr)
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
    status = chosen.run(chosen)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-specdec", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(metavar="command", required=True)

    def command(name: str, run: Any, text: str, call: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}. In Python: {call}", allow_abbrev=False
        )
        added.set_defaults(run=run)
        return added

    inspect = command(
        "inspect", _inspect, "describe a drafter and its problems, without loading it", "inspect_drafter(name)"
    )
    inspect.add_argument("drafter", help="Hub id or folder")
    inspect.add_argument("--json", action="store_true", help="print the result as JSON")
    _where(inspect)

    convert = command(
        "convert",
        _convert,
        "load a drafter of any supported format and save it in the format of this library, as safetensors",
        "load_drafter(name).save_pretrained(folder)",
    )
    convert.add_argument("drafter", help="Hub id or folder")
    convert.add_argument("folder", type=Path, help="folder to write")
    convert.add_argument("--dtype", help="such as bfloat16; default: the checkpoint's")
    _where(convert)

    export = command(
        "export",
        _export,
        "write a drafter in the layout that vLLM serves, or in the layout that it was published in",
        "export_drafter(load_drafter(name), folder, to=layout)",
    )
    export.add_argument("drafter", help="Hub id or folder")
    export.add_argument("--to", default="vllm", choices=["vllm", "source"], help="the layout; default: %(default)s")
    export.add_argument("--output", type=Path, help="folder to write; default: the drafter's name and the layout's")
    export.add_argument(
        "--target-id", help="for vllm: Hub id or folder of the target; default: the one that the drafter names"
    )
    export.add_argument("--target-architecture", help="for vllm: class of the target, such as LlamaForCausalLM")
    export.add_argument("--num-target-layers", type=int, help="for vllm: layers of the target")
    _where(export)

    serve = command(
        "serve",
        _serve,
        "print or run the command that serves a target with a drafter in vLLM; exports the drafter if needed",
        "plan_serving(target, drafter)",
    )
    serve.add_argument("target", help="Hub id or folder")
    serve.add_argument("drafter", help="Hub id or folder, or ngram, suffix or mtp")
    serve.epilog = "Options after -- are passed to vLLM: hf-specdec serve <target> <drafter> -- --max-model-len 4096"
    serve.add_argument("--run", action="store_true", dest="start", help="run the command")
    serve.add_argument(
        "--engine", type=Path, help="the command vllm; default: the one next to this Python, or on the PATH"
    )
    serve.add_argument("--host", default="127.0.0.1", help="default: %(default)s, local clients only")
    serve.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    serve.add_argument("--output", type=Path, help="folder of an export; default: the drafter's name and -vllm")
    serve.add_argument(
        "--num-speculative-tokens",
        type=_number(int, 1),
        help="tokens drafted per round; default: the best number in the measurements of the drafter",
    )
    serve.add_argument(
        "--dtype", help="of target and drafter; default: the checkpoint's, or float32 without an accelerator"
    )
    _where(serve)

    verify = command(
        "verify",
        _verify,
        "check that a drafter does not change a target's output, greedy and sampled, in about a minute",
        "verify_lossless(model, drafter)",
    )
    _pair(verify)
    verify.add_argument("--prompt", action="append", dest="prompts", help="text; may be repeated")
    verify.add_argument("--max-new-tokens", type=_number(int, 1), default=48, help="default: %(default)s")
    verify.add_argument(
        "--max-time", type=_number(float, 0), default=60.0, metavar="SECONDS", help="default: %(default)s"
    )
    _where(verify)

    generate = command(
        "generate",
        _generate,
        "continue a text with a target and a drafter, or answer it in the target's chat template, and print "
        "statistics of the drafts",
        "model.generate(**inputs, assistant_model=drafter)",
    )
    _pair(generate)
    generate.add_argument(
        "--prompt",
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
    _writing(generate, max_new_tokens=128)

    chat = command(
        "chat",
        _chat,
        "chat with a target in the terminal, or answer the lines of stdin; drafted tokens are green",
        "model.generate(**tokenizer.apply_chat_template(messages, ...), assistant_model=drafter)",
    )
    _pair(chat, default=f" (default: {ASSISTANT} with the drafter of a checkout)")
    _writing(chat, max_new_tokens=512)

    for name, text in (
        ("write", "generate a target's answers to conversations, as training text"),
        ("train", "train a drafter for a target"),
        ("bench", "measure decoding methods"),
    ):
        commands.add_parser(name, help=f"{text}; `hf-specdec {name} --help` lists its options", add_help=False)
    return parser


def _number(kind: type[int] | type[float], least: int, most: float = sys.float_info.max) -> Callable[[str], Any]:
    """A `type` of argparse: finite numbers between two limits."""

    def convert(text: str) -> int | float:
        value = kind(text)
        if not least <= value <= most:
            limit = f" and at most {most}" if most < sys.float_info.max else ""
            raise argparse.ArgumentTypeError(f"{text} must be a finite number of at least {least}{limit}")
        return value

    convert.__name__ = kind.__name__  # argparse: "invalid int value"
    return convert


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


def _writing(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    parser.add_argument("--system", help="system message of the chat template")
    parser.add_argument("--thinking", choices=["default", "on", "off"], default="default", help="of the chat template")
    parser.add_argument("--max-new-tokens", type=_number(int, 1), default=max_new_tokens, help="default: %(default)s")
    parser.add_argument("--temperature", type=_number(float, 0), default=0.0, help="default: 0, greedy")
    parser.add_argument("--seed", type=_number(int, 0, 2**64 - 1), default=0, help="default: %(default)s")
    _where(parser)


def _inspect(arguments: argparse.Namespace) -> int:
    from hf_specdec.hub.inspection import inspect_drafter

    found = inspect_drafter(arguments.drafter, revision=arguments.revision, local_files_only=arguments.local_files_only)
    print(json.dumps(asdict(found), indent=2) if arguments.json else found)
    return 1 if found.problems else 0


def _convert(arguments: argparse.Namespace) -> None:
    from hf_specdec.drafters.registry import is_weightless

    if is_weightless(arguments.drafter):
        raise ValueError(f"{arguments.drafter!r} has no weights to convert.")
    drafter: Any = _load(arguments, dtype=arguments.dtype)
    drafter.save_pretrained(arguments.folder)
    print(f"Wrote {arguments.folder}")


def _export(arguments: argparse.Namespace) -> None:
    from hf_specdec.hub.export import export_drafter

    folder = export_drafter(
        _load(arguments),
        arguments.output or Path(f"{Path(arguments.drafter).resolve().name}-{arguments.to}"),
        to=arguments.to,
        target_id=arguments.target_id,
        target_architecture=arguments.target_architecture,
        num_target_layers=arguments.num_target_layers,
    )
    serving = f" `hf-specdec serve <target> {folder}` prints the command that serves it."
    print(f"Wrote {folder}.{serving if arguments.to == 'vllm' else ''}")


def _serve(arguments: argparse.Namespace) -> None:
    from hf_specdec.hub.loading import usable_device
    from hf_specdec.serving.engine import check_port, find_engine, run
    from hf_specdec.serving.plan import plan_serving

    engine = None
    if arguments.start:  # checked before the export
        check_port(arguments.host, arguments.port)
        engine = find_engine(arguments.engine)
    plan = plan_serving(
        arguments.target,
        arguments.drafter,
        export_folder=arguments.output,
        num_speculative_tokens=arguments.num_speculative_tokens,
        dtype=arguments.dtype or ("float32" if usable_device(None).type == "cpu" else "auto"),
        revision=arguments.revision,
        local_files_only=arguments.local_files_only,
    )
    notes = plan.notes + ([] if engine is None else engine.check(plan))
    command = ["vllm", "serve", plan.target] if engine is None else engine.server(plan.target)
    command += [*plan.options, "--host", arguments.host, "--port", str(arguments.port), *arguments.engine_options]
    for note in notes:
        print(note, file=sys.stderr)
    print(shlex.join(command), flush=True)
    if engine is not None:
        run(command)


def _verify(arguments: argparse.Namespace) -> int:
    from hf_specdec.verification import verify_lossless

    _check_names(arguments)
    model = _load_target(arguments)
    drafter = _load(arguments, model)
    report = verify_lossless(
        model, drafter, arguments.prompts, max_new_tokens=arguments.max_new_tokens, max_time_s=arguments.max_time
    )
    return 0 if report else 1


def _generate(arguments: argparse.Namespace) -> None:
    import torch
    from transformers import TextStreamer

    from hf_specdec.chat_template import uses_template

    prompts = [_stdin() if prompt == "-" else prompt for prompt in arguments.prompts]
    tokenizer = _load_tokenizer(arguments)
    if uses_template(tokenizer, arguments.target, chat=arguments.chat, thinking=arguments.thinking):
        _answer(arguments, tokenizer, prompts)
        return
    reason = "--chat is off" if tokenizer.chat_template else f"the tokenizer of {arguments.target!r} has none"
    if arguments.system is not None:
        raise ValueError(f"--system {arguments.system!r} needs a chat template, but {reason}: leave it out.")
    if len(prompts) > 1:
        raise ValueError(
            f"{len(prompts)} prompts are turns of a conversation, which needs a chat template, but {reason}: give one "
            "--prompt."
        )
    inputs = tokenizer(prompts[0], return_tensors="pt")
    if not inputs["input_ids"].numel():
        raise ValueError(f"--prompt {prompts[0]!r} has no tokens: give a text.")
    model = _load_target(arguments)
    drafter = _load(arguments, model)
    torch.manual_seed(arguments.seed)
    model.generate(
        **inputs.to(model.device),
        **_sampling(arguments),
        assistant_model=drafter,
        max_new_tokens=arguments.max_new_tokens,
        streamer=TextStreamer(tokenizer),
    )
    print(drafter.stats, file=sys.stderr)


def _answer(arguments: argparse.Namespace, tokenizer: Any, prompts: list[str]) -> None:
    """The turns of a conversation: answers on stdout, statistics on stderr."""
    conversation = _conversation(arguments, tokenizer)

    def write(piece: str, *figures: Any) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    for prompt in prompts:
        if len(prompts) > 1:
            print(f"> {prompt}", flush=True)
        answer = conversation.ask(prompt, write)
        print(flush=True)
        print(conversation.drafter.stats, file=sys.stderr)
        if answer.interrupted:
            raise KeyboardInterrupt


def _chat(arguments: argparse.Namespace) -> None:
    from hf_specdec.chat import converse
    from hf_specdec.chat_template import uses_template

    if arguments.target is None:
        arguments.target, arguments.drafter = _assistant()
    elif arguments.drafter is None:
        raise ValueError(f"Target {arguments.target!r} needs a drafter: name one that was trained for it, or ngram.")
    tokenizer = _load_tokenizer(arguments)
    if not uses_template(tokenizer, arguments.target, chat="auto", thinking=arguments.thinking):
        raise ValueError(
            f"The tokenizer of {arguments.target!r} has no chat template: choose a target with one, or continue texts "
            "with `hf-specdec generate`."
        )
    converse(_conversation(arguments, tokenizer))


def _assistant() -> tuple[str, str]:
    """The default target, downloaded once, and its drafter, which is in the repository."""
    examples = Path(__file__).parents[1] / "examples"
    drafter = examples / "smollm2-135m/dflash"
    if not drafter.is_dir():
        raise ValueError(
            f"The default target is {ASSISTANT}; its drafter is in a checkout of the repository, but not in the "
            "installed package: name a target and a drafter."
        )
    folder = runpy.run_path(str(examples / "smollm2.py"))["model_folder"]()
    return str(folder), os.path.relpath(drafter)


def _conversation(arguments: argparse.Namespace, tokenizer: Any) -> Conversation:
    import torch

    from hf_specdec.chat import Conversation

    model = _load_target(arguments)
    drafter = _load(arguments, model)
    torch.manual_seed(arguments.seed)
    return Conversation(
        model,
        tokenizer,
        drafter,
        system=arguments.system,
        thinking=arguments.thinking,
        max_new_tokens=arguments.max_new_tokens,
        **_sampling(arguments),
    )


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Sampling arguments of `generate`."""
    if arguments.temperature:
        return {"do_sample": True, "temperature": arguments.temperature}
    return {"do_sample": False}


def _stdin() -> str:
    """The text of stdin, decoded as UTF-8 in every locale; some locales would keep invalid bytes."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--prompt - reads UTF-8 from stdin, but byte {error.start + 1}, 0x{error.object[error.start]:02x}, is not "
            "valid: convert the text first, for example with iconv."
        ) from error


def _load(arguments: argparse.Namespace, target: Any = None, **settings: Any) -> Drafter:
    from hf_specdec.hub.loading import load_drafter

    options = dict(map(_option, getattr(arguments, "option", ())))
    if taken := sorted(options.keys() & signature(load_drafter).parameters.keys()):
        raise ValueError(f"--option {taken[0]}=... is not a drafting option; --help lists the other settings.")
    return load_drafter(
        arguments.drafter,
        target,
        revision=arguments.revision,
        local_files_only=arguments.local_files_only,
        **settings,
        **options,
    )


def _option(text: str) -> tuple[str, Any]:
    """A drafting option: `tree_budget=16`, `method=dflash`, `branching=[2,4,6,4]`."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--option {text!r} must have the form NAME=VALUE, such as tree_budget=16.")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value  # a string without quotes


def _check_names(arguments: argparse.Namespace) -> None:
    """Raises ValueError for a wrong target, drafter or option; called before the slow loading of weights."""
    from hf_specdec.drafters.registry import check_has_checkpoint, named_method
    from hf_specdec.hub.checkpoint import check_is_target
    from hf_specdec.hub.files import CONFIG_FILE, Source

    for text in arguments.option:
        _option(text)
    check_has_checkpoint(arguments.target)
    check_is_target(arguments.target, arguments.drafter)
    if named_method(arguments.drafter) is None:
        source = Source(arguments.drafter, arguments.revision, local_files_only=arguments.local_files_only)
        source.locate([CONFIG_FILE])


def _load_tokenizer(arguments: argparse.Namespace) -> Any:
    """The target's; loaded before its weights, so that options of the chat template are checked first."""
    from transformers import AutoTokenizer

    _check_names(arguments)
    try:
        return AutoTokenizer.from_pretrained(arguments.target)
    except (ValueError, RecursionError) as error:  # may have many lines; does not name the target
        raise ValueError(
            f"The tokenizer of target {arguments.target!r} cannot be loaded: its files are missing or damaged. "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def _load_target(arguments: argparse.Namespace) -> Any:
    from hf_specdec.drafters.targets import whole_target
    from hf_specdec.hub.loading import floating_dtype, usable_device

    device = usable_device(arguments.device)
    if device.type == "meta":
        raise ValueError("device='meta' has no weights: use 'cpu', or leave it out.")
    dtype = arguments.dtype or ("float32" if device.type == "cpu" else "auto")
    if dtype != "auto":
        floating_dtype(dtype)  # raises ValueError with the supported ones
    return whole_target(arguments.target, dtype=dtype).to(device).eval()


if __name__ == "__main__":
    sys.exit(main())
