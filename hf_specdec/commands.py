"""The subcommands of `hf-specdec`, each by its name; `cli.py` parses their arguments."""

from __future__ import annotations

import argparse
import io
import json
import os
import runpy
import shlex
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from hf_specdec import progress
from hf_specdec.chat import Conversation, converse
from hf_specdec.chat_template import uses_template
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.drafting.registry import check_has_checkpoint, check_spelling, is_weightless, named_method
from hf_specdec.drafting.targets import target_tokenizer
from hf_specdec.hub.checkpoint import check_is_target
from hf_specdec.hub.export import export_drafter
from hf_specdec.hub.files import CONFIG_FILE, Source
from hf_specdec.hub.inspection import inspect_drafter
from hf_specdec.hub.loading import load_drafter, placed_target, usable_device
from hf_specdec.hub.saving import check_free, check_writable
from hf_specdec.serving.engine import check_port, find_engine, run
from hf_specdec.serving.plan import plan_serving
from hf_specdec.serving.transformers_server import serve_with_transformers
from hf_specdec.verification import verify_lossless

# Instruct models repeat themselves when they are decoded greedily.
CHAT_SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
_SAMPLING_SETTINGS = ("temperature", "top_k", "top_p", "min_p")


def inspect(arguments: argparse.Namespace) -> int:
    """Describes a checkpoint; the status is 1 if it has problems."""
    found = inspect_drafter(arguments.drafter, revision=arguments.revision, local_files_only=arguments.local_files_only)
    print(json.dumps(asdict(found), indent=2) if arguments.json else found)
    return 1 if found.problems else 0


def convert(arguments: argparse.Namespace) -> None:
    """Saves a drafter in the layout of this library."""
    if is_weightless(arguments.drafter):
        raise ValueError(f"{arguments.drafter!r} has no weights to convert.")
    if Path(arguments.drafter).resolve() == arguments.folder.resolve():
        raise ValueError(f"{arguments.drafter!r} is to be converted into itself: give another folder.")
    if not arguments.overwrite:
        check_free(arguments.folder, "give another folder, or --overwrite.")
    check_writable(arguments.folder)
    drafter: Any = _load(arguments, dtype=arguments.dtype)
    drafter.save_pretrained(arguments.folder)
    print(f"Wrote {arguments.folder}")


def export(arguments: argparse.Namespace) -> None:
    """Writes a drafter in the layout of vLLM or of its source."""
    folder = arguments.folder or Path(f"{Path(arguments.drafter).resolve().name}-{arguments.to}")
    check_writable(folder)
    export_drafter(
        _load(arguments),
        folder,
        to=arguments.to,
        target_id=arguments.target_id,
        target_architecture=arguments.target_architecture,
        num_target_layers=arguments.num_target_layers,
        overwrite=arguments.overwrite,
    )
    serving = f" `hf-specdec serve <target> {folder}` prints the command that serves it."
    print(f"Wrote {folder}.{serving if arguments.to == 'vllm' else ''}")


def serve(arguments: argparse.Namespace) -> None:
    """Prints vLLM's command for a pair, and with --run runs it; or serves the pair with transformers."""
    dtype = arguments.dtype or ("float32" if usable_device(None).type == "cpu" else "auto")
    where = {"revision": arguments.revision, "local_files_only": arguments.local_files_only}
    if arguments.engine == "transformers":
        vllms = {"--output": arguments.output, "--num-speculative-tokens": arguments.num_speculative_tokens}
        for name, value in (vllms | {"--": arguments.engine_options or None}).items():
            if value is not None:
                raise ValueError(f"{name} {value} is for vLLM, but --engine is transformers: leave it out.")
        serve_with_transformers(
            arguments.target,
            arguments.drafter,
            host=arguments.host,
            port=arguments.port,
            dtype=dtype,
            name=arguments.served_model_name,
            **where,
        )
        return
    engine = None
    if arguments.start:  # checked before the export
        check_port(arguments.host, arguments.port)
        engine = find_engine(arguments.engine)
    plan = plan_serving(
        arguments.target,
        arguments.drafter,
        export_folder=arguments.output,
        num_speculative_tokens=arguments.num_speculative_tokens,
        dtype=dtype,
        **where,
    )
    notes = plan.notes + ([] if engine is None else engine.check(plan))
    command = ["vllm", "serve", plan.target] if engine is None else engine.server(plan.target)
    command += [*plan.options, "--host", arguments.host, "--port", str(arguments.port)]
    if arguments.served_model_name is not None:
        command += ["--served-model-name", arguments.served_model_name]
    command += arguments.engine_options
    for note in notes:
        print(note, file=sys.stderr)
    print(shlex.join(command), flush=True)
    if engine is not None:
        run(command)


def verify(arguments: argparse.Namespace) -> int:
    """Checks a pair; the status is 1 for a verdict other than lossless."""
    _check_names(arguments)
    model = _load_target(arguments)
    drafter = _load(arguments, model)
    with redirect_stdout(sys.stderr if arguments.json else sys.stdout):
        report = verify_lossless(
            model,
            drafter,
            arguments.prompts,
            max_new_tokens=arguments.max_new_tokens,
            max_time_s=arguments.max_time,
        )
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2))
    return 0 if report else 1


def generate(arguments: argparse.Namespace) -> None:
    """Continues a text, or answers the turns of a conversation."""
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
    output = model.generate(
        **inputs.to(model.device),
        **_sampling(arguments),
        assistant_model=drafter,
        max_new_tokens=arguments.max_new_tokens,
        streamer=None if arguments.json else TextStreamer(tokenizer),
    )
    if arguments.json:
        new = output[0, inputs["input_ids"].shape[1] :].tolist()
        _print_json([_result(prompts[0], tokenizer.decode(new), len(new), drafter)])
        return
    _print_statistics(output.shape[1] - inputs["input_ids"].shape[1], drafter)


def _print_statistics(num_tokens: int, drafter: Drafter) -> None:
    """Those of the last call, and its speed in a line; the first call of a process is slower than later ones."""
    if progress.quiet:
        return
    stats = drafter.stats
    assert stats is not None, "a call leaves its statistics"
    rate = num_tokens / stats.total_time_s if stats.total_time_s else 0.0
    speed = f"{num_tokens} tokens in {stats.total_time_s:.2f} s, {rate:.1f} tokens/s"
    print(f"{stats}\n{speed}, mean acceptance length {stats.mean_acceptance_length:.2f}", file=sys.stderr)


def _result(prompt: str, text: str, num_tokens: int, drafter: Drafter) -> dict[str, Any]:
    assert drafter.stats is not None, "a call leaves its statistics"
    return {"prompt": prompt, "text": text, "num_tokens": num_tokens, "stats": drafter.stats.to_dict()}


def _print_json(results: list[dict[str, Any]]) -> None:
    print(json.dumps(results, indent=2))


def _answer(arguments: argparse.Namespace, tokenizer: Any, prompts: list[str]) -> None:
    """The turns of a conversation: answers on stdout, statistics on stderr."""
    conversation = _conversation(arguments, tokenizer)

    def write(piece: str, drafted: bool) -> None:
        if not arguments.json:
            print(piece, end="", flush=True)

    results = []
    for prompt in prompts:
        if len(prompts) > 1 and not arguments.json:
            print(f"> {prompt}", flush=True)
        answer = conversation.ask(prompt, write)
        drafter = conversation.drafter
        if arguments.json:
            results.append(_result(prompt, answer.text, answer.num_tokens, drafter))
        else:
            print(flush=True)
            _print_statistics(answer.num_tokens, drafter)
        if answer.interrupted:
            raise KeyboardInterrupt
    if arguments.json:
        _print_json(results)


def chat(arguments: argparse.Namespace) -> None:
    """Chats in the terminal."""
    if arguments.target is None:
        arguments.target, arguments.drafter = _assistant(arguments.assistant)
    elif arguments.drafter is None:
        raise ValueError(f"Target {arguments.target!r} needs a drafter: name one that was trained for it, or ngram.")
    tokenizer = _load_tokenizer(arguments)
    if not uses_template(tokenizer, arguments.target, chat="auto", thinking=arguments.thinking):
        raise ValueError(
            f"The tokenizer of {arguments.target!r} has no chat template: choose a target with one, or continue texts "
            "with `hf-specdec generate`."
        )
    converse(_conversation(arguments, tokenizer))


def _assistant(name: str) -> tuple[str, str]:
    """The default target, downloaded once, and its drafter, which is in the repository."""
    examples = Path(__file__).parents[1] / "examples"
    drafter = examples / "smollm2-135m/dflash"
    if not drafter.is_dir():
        raise ValueError(
            f"The default target is {name}; its drafter is in a checkout of the repository, but not in the "
            "installed package: name a target and a drafter."
        )
    folder = runpy.run_path(str(examples / "smollm2.py"))["model_folder"]()
    return str(folder), os.path.relpath(drafter)


def _conversation(arguments: argparse.Namespace, tokenizer: Any) -> Conversation:
    model = _load_target(arguments)
    drafter = _load(arguments, model)
    settings = _sampling(arguments)
    if arguments.command == "chat" and arguments.temperature is None and not _says_how_to_sample(model):
        settings = CHAT_SAMPLING
    torch.manual_seed(arguments.seed)
    return Conversation(
        model,
        tokenizer,
        drafter,
        system=arguments.system,
        thinking=arguments.thinking,
        max_new_tokens=arguments.max_new_tokens,
        **settings,
    )


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Sampling arguments of `generate`; what they leave out is as the target's generation config says."""
    if arguments.temperature is None:
        return {}
    if arguments.temperature:
        return {"do_sample": True, "temperature": arguments.temperature}
    # None, because transformers warns about sampling settings of the target that greedy decoding ignores.
    return {"do_sample": False} | dict.fromkeys(_SAMPLING_SETTINGS)


def _says_how_to_sample(model: Any) -> bool:
    """Whether a model's own generation config says how it is to be decoded."""
    return any(getattr(model.generation_config, name) is not None for name in ("do_sample", *_SAMPLING_SETTINGS))


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
    for text in arguments.option:
        _option(text)
    check_has_checkpoint(arguments.target)
    check_is_target(arguments.target, arguments.drafter)
    if named_method(arguments.drafter) is None:
        check_spelling(arguments.drafter)
        source = Source(arguments.drafter, arguments.revision, local_files_only=arguments.local_files_only)
        source.locate([CONFIG_FILE])


def _load_tokenizer(arguments: argparse.Namespace) -> Any:
    """The target's; loaded before its weights, so that options of the chat template are checked first."""
    _check_names(arguments)
    return target_tokenizer(arguments.target, trust_remote_code=arguments.trust_remote_code)


def _load_target(arguments: argparse.Namespace) -> Any:
    dtype = arguments.dtype or ("float32" if usable_device(arguments.device).type == "cpu" else "auto")
    return placed_target(arguments.target, arguments.device, dtype, trust_remote_code=arguments.trust_remote_code)
