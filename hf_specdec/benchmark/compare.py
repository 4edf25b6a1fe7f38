"""`benchmark(target, drafter)`: compares drafters with plain decoding, and writes the records and the report.

`hf-specdec bench` is the same from the command line; its options are those of the function.
"""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.benchmark import records, variants
from hf_specdec.benchmark.calls import keep_faster_number_type
from hf_specdec.benchmark.floor import copy_bandwidth, weight_bytes
from hf_specdec.benchmark.prompts import NAMED_SETS, Prompt, load_prompts, render
from hf_specdec.benchmark.records import Environment, Note, Record
from hf_specdec.benchmark.report import markdown
from hf_specdec.benchmark.run import Settings, device_name, run, tables, tokenise
from hf_specdec.benchmark.variants import BUNDLED, Variant
from hf_specdec.chat_template import Chat, Thinking, uses_template
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.drafting.targets import target_tokenizer
from hf_specdec.hub.checkpoint import check_is_target
from hf_specdec.hub.loading import placed_target
from hf_specdec.hub.saving import check_writable, going_on
from hf_specdec.progress import Progress

PART = "report.part.jsonl"  # of a run that is in progress or was stopped


def benchmark(
    target: str | PreTrainedModel | None = None,
    drafter: str | Drafter | Sequence[str | Drafter] | None = None,
    *,
    tokenizer: Any = None,
    draft_model: str | None = None,
    prompts: str | Sequence[str] | None = None,
    num_prompts: int | None = None,
    quick: bool = False,
    temperature: Sequence[float] | None = None,
    batch_size: Sequence[int] | None = None,
    new_tokens: int | None = None,
    repeats: int | None = None,
    budgets: Sequence[int] | None = None,
    sweep_prompts: int | None = None,
    chat: Chat = "auto",
    thinking: Thinking = "default",
    compile_backend: str = "inductor",
    compiled: bool = True,
    device: str | None = None,
    dtype: str | None = None,
    attention: str | None = None,
    output: str | Path = "benchmark",
    command: str = "hf_specdec.benchmark.benchmark(...)",
) -> list[Record]:
    """Measures plain decoding and drafters on the same prompts; writes `report.jsonl` and `report.md`.

    Args:
        target: the model, or its Hub id or folder; None for the bundled one.
        drafter: one or several, each loaded, or as `--drafter` names it; None for the bundled ones of that target.
        tokenizer: of a loaded target; None for the one in the folder or repository that it was loaded from.
        draft_model: small causal LM for transformers' own assisted generation, by name.
        prompts: a JSONL file, the name of a set, or the texts themselves; None for the bundled ones of that target.
        num_prompts: most, from all groups in turn; None for 32, or 8 if quick.
        quick: few prompts and repeats; other arguments override it.
        temperature: 0 is greedy; None for 0 and 1.
        batch_size: rows per call; None for 1.
        new_tokens: most per row; None for 128, or 48 if quick.
        repeats: of every call; None for 3, or 2 if quick.
        budgets: of `tree_budget`, to sweep over; None for 4 to 64, or 4 to 36 if quick.
        sweep_prompts: prompts of the sweep; None for 8, or 3 if quick.
        chat: "auto", "on" or "off", whether to use the target's chat template.
        thinking: of the chat template.
        compile_backend: of `torch.compile`, for the compiled baseline.
        compiled: whether that baseline is measured.
        device: of a target given by its name.
        dtype: of a target given by its name; None for the checkpoint's own, or float32 where plain decoding is faster
            so on this CPU.
        attention: implementation of the attention of a target given by its name.
        output: folder of the reports.
        command: for the report, how the run was started.

    Returns:
        The records: `report.markdown` makes the report of them, `figures.cells` the figures of their calls.

    Raises:
        ValueError: an argument does not fit, a drafter does not fit the target, or a target's drafters or prompts are
            not known.
        OSError: a file, or a model, cannot be read.
    """
    if target is None and not (BUNDLED / "target").is_dir():
        raise FileNotFoundError(
            f"No --target was given, and the bundled model is not at {BUNDLED}: it is part of a checkout of the "
            "repository, not of the installed package. Name a target and drafters."
        )
    if target is None:
        target = os.path.relpath(BUNDLED / "target")
    name = target if isinstance(target, str) else target.name_or_path
    bundled = Path(name).resolve() == (BUNDLED / "target").resolve()
    if drafter is None and not bundled:
        raise ValueError(f"No --drafter was given for target {name!r}; name at least one: 'ngram' needs no weights.")
    folder = Path(output)
    check_writable(folder)
    texts, source = _prompts(prompts, num_prompts or (8 if quick else 32), name, bundled)
    drafters = [drafter] if isinstance(drafter, str | Drafter) else drafter
    if isinstance(target, str):
        model = _load_target(target, device, dtype, attention, drafters)
    elif given := [each for each in (device, dtype, attention) if each is not None]:
        raise ValueError(f"{given[0]!r} is for a target given by its name, but {name!r} is loaded: leave it out.")
    else:
        model = target
    tokenizer = tokenizer or target_tokenizer(name)
    settings = Settings(
        temperatures=tuple(temperature or (0.0, 1.0)),
        batch_sizes=tuple(batch_size or (1,)),
        new_tokens=new_tokens or (48 if quick else 128),
        repeats=repeats or (2 if quick else 3),
        sweep_prompts=sweep_prompts or (3 if quick else 8),
        chat=uses_template(tokenizer, name, chat=chat, thinking=thinking),
    )
    rendered = [(render(prompt, tokenizer, chat=settings.chat, thinking=thinking), prompt) for prompt in texts]

    notes: list[Record] = []
    if isinstance(target, str) and dtype is None:
        choice = keep_faster_number_type(model, tokenise(tokenizer, [rendered[0][0]], chat=settings.chat))
        notes += [] if choice is None else [Note(choice)]
    compared = variants.baselines(model, compile_backend)
    if not compiled:
        compared.pop()
        notes.append(Note(f"{variants.COMPILED} was omitted because of --no-compiled."))
    if draft_model is None and bundled and (BUNDLED / "draft-lm").is_dir():
        draft_model = os.path.relpath(BUNDLED / "draft-lm")
    if draft_model is not None:
        compared.append(variants.stock_assisted(draft_model, model))
    if drafters is None:
        drafting, not_loaded = variants.discover(BUNDLED, model)
        notes += [Note(f"{name} was skipped: {problem}") for name, problem in not_loaded.items()]
    else:
        drafting = [variant for each in drafters for variant in variants.load(each, model)]
    drafting = variants.distinct(drafting)
    if budgets is None:
        budgets = [4, 12, 36] if quick else [4, 8, 16, 32, 64]
    compared += [*drafting, *variants.sweep(drafting, budgets)]

    environment = Environment(
        target=name,
        device=device_name(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        attention=str(model.config._attn_implementation),
        threads=torch.get_num_threads(),
        versions={
            "hf_specdec": hf_specdec.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        date=date.today().isoformat(),
        command=command,
        prompts=f"{len(texts)} of {source}",
        settings={
            "new tokens": settings.new_tokens,
            "repeats": settings.repeats,
            "temperatures": list(settings.temperatures),
            "batch sizes": list(settings.batch_sizes),
            "chat template": "yes" if settings.chat else "no",
            "thinking": thinking,
        },
        copy_bytes_per_s=copy_bandwidth(model.device),
        weight_bytes=weight_bytes(model),
        variants={
            variant.name: {key: _plain(value) for key, value in variant.settings.items()} for variant in compared
        },
    )
    measured = _measured(model, tokenizer, compared, rendered, settings)
    part = folder / PART
    with going_on(
        lambda: f"what was measured is in {part}; hf-specdec bench --from-records {part} makes a report of it"
    ):
        made = _saved(itertools.chain([environment, *notes], measured), part)
        write_reports(made, folder)
    part.unlink()
    return made


def write_reports(made: Sequence[Record], folder: Path) -> None:
    """Writes `report.jsonl` and `report.md` to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    records.write(made, folder / "report.jsonl")
    (folder / "report.md").write_text(markdown(made), encoding="utf-8")


def _saved(made: Iterable[Record], path: Path) -> list[Record]:
    """All records of a run. Each is also written to a file immediately, which remains if the run is stopped."""
    saved: list[Record] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    for record in made:
        with path.open("a" if saved else "w", encoding="utf-8") as file:
            file.write(records.line(record) + "\n")
        saved.append(record)
    return saved


def _measured(
    model: PreTrainedModel,
    tokenizer: Any,
    compared: Sequence[Variant],
    rendered: Sequence[tuple[str, Prompt]],
    settings: Settings,
) -> Iterator[Record]:
    """The records of all calls, and the drafters' own tables."""
    # generate repeats warnings about its settings in every call; here there are thousands of calls.
    transformers.logging.set_verbosity_error()
    with Progress("bench", _num_calls(settings, compared, len(rendered)), unit="calls") as progress:
        yield from run(model, tokenizer, compared, rendered, settings, progress)
        progress.set_description("bench, tables of the drafters")
        inputs = [tokenise(tokenizer, [text], chat=settings.chat).to(model.device) for text, _ in rendered]
        yield from tables([variant for variant in compared if variant.swept_from is None], model, inputs)


def _prompts(prompts: str | Sequence[str] | None, limit: int, target: str, bundled: bool) -> tuple[list[Prompt], str]:
    """The prompts and the name of their set."""
    if prompts is not None and not isinstance(prompts, str):
        return [Prompt(text, "given") for text in prompts][:limit], f"{len(prompts)} given texts"
    if prompts is None:
        if not bundled:
            raise ValueError(
                f"No --prompts were given for target {target!r}. Give a JSONL file, or one of: "
                f"{', '.join(sorted(NAMED_SETS))}."
            )
        prompts = os.path.relpath(BUNDLED / "prompts.jsonl")
    return load_prompts(prompts, limit), prompts


def _load_target(
    name: str, device: str | None, dtype: str | None, attention: str | None, drafters: Sequence[Any] | None
) -> PreTrainedModel:
    implementation = {} if attention is None else {"attn_implementation": attention}
    check_is_target(name, ", ".join(map(str, drafters or ["none"])))
    return placed_target(name, device, dtype or "auto", **implementation)


def _num_calls(settings: Settings, compared: Sequence[Variant], num_prompts: int) -> int:
    """One call of each variant before the measurement, too."""
    own = sum(variant.swept_from is None for variant in compared)
    swept = len(compared) - own
    calls = 0
    for size in settings.batch_sizes:
        batches = num_prompts // size
        in_sweep = min(batches, -(-settings.sweep_prompts // size))
        calls += len(compared) + settings.repeats * (batches * own * len(settings.temperatures) + in_sweep * swept)
    return calls


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | list | type(None)) else str(value)
