"""The variants of decoding to compare: plain generate twice, transformers' assisted generation, drafters with settings.

This module has no names of methods: it finds bundled checkpoints in a folder, their methods in the drafter, and
drafters without weights in the registry, so a new method needs no change here.
"""

from __future__ import annotations

import ast
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from transformers import CompileConfig, PreTrainedModel

import hf_specdec
from hf_specdec.decoding.speed.packed import PackedLinears, can_pack
from hf_specdec.decoding.targets.modules import num_tokens
from hf_specdec.drafting.draft_model import with_whole_vocabulary
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.drafting.registry import method_of, named_alone
from hf_specdec.drafting.targets import whole_target
from hf_specdec.hub.loading import load_drafter

BUNDLED = Path(hf_specdec.__file__).parents[1] / "examples" / "tiny-code"
PLAIN = "plain, eager"
PACKED = "plain, packed"
COMPILED = "plain, compiled"
ASSISTED = "stock assisted"


@dataclass(frozen=True)
class Variant:
    """One row of the report.

    Attributes:
        name: unique.
        kind: "plain", "packed" and "assisted" are transformers' own; "packed" with packed weights.
        arguments: for `generate`.
        drafter: passed to `generate` as assistant.
        settings: drafting options, set before each call, because variants may share a drafter.
        swept_from: name of the variant that differs from this one only in the budget; None if it is not swept.
        leads: whether its method is the drafter's default; only such variants are swept.
        batches: whether it supports more than one row.
    """

    name: str
    kind: Literal["plain", "packed", "assisted", "drafter"]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    drafter: Drafter | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    swept_from: str | None = None
    leads: bool = True
    batches: bool = True

    def begin(self) -> None:
        """Before each call: sets the drafter's options, and clears what it has stored of earlier texts."""
        if self.drafter is not None:
            self.drafter.set_options(**self.settings)
            self.drafter.forget()

    def products(self, model: PreTrainedModel) -> AbstractContextManager[object]:
        """A context for its calls: with packed weights, or none."""
        if self.kind != "packed":
            return nullcontext()
        packed = PackedLinears([model])
        packed.pack_all()
        return packed


def baselines(target: PreTrainedModel, backend: str = "inductor") -> list[Variant]:
    """Plain `generate`, on a CPU also with packed weights, and compiled with a static cache.

    Args:
        target: the model.
        backend: of `torch.compile`.
    """
    packed = [Variant(PACKED, "packed")] if can_pack(target) else []
    everywhere = CompileConfig(backend=backend)
    # By default generate compiles only on accelerators; the second baseline is compiled on every device.
    everywhere._compile_all_devices = True
    return [
        Variant(PLAIN, "plain"),
        *packed,
        Variant(COMPILED, "plain", {"cache_implementation": "static", "compile_config": everywhere}),
    ]


def stock_assisted(name: str, target: PreTrainedModel) -> Variant:
    """Transformers' own assisted generation with a draft model (Hub id or folder); only for batches of one."""
    vocab_size = num_tokens(target)
    model = with_whole_vocabulary(whole_target(name, dtype=target.dtype).to(target.device).eval(), vocab_size)
    return Variant(ASSISTED, "assisted", {"assistant_model": model}, batches=False)


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Splits `path-or-id:option=value,option=value` into location and options; values are Python literals or text.

    Raises:
        ValueError: an option has no value.

    Examples:
        >>> parse("examples/tiny-code/dflash:tree_budget=31,method=ddtree")
        ('examples/tiny-code/dflash', {'tree_budget': 31, 'method': 'ddtree'})
        >>> parse("me/drafter:branching=[2, 4, 6, 4]")
        ('me/drafter', {'branching': [2, 4, 6, 4]})
    """
    # The colon of a drive letter, as in C:\drafter, does not begin options: these contain an equals sign.
    split = re.match(r"(?P<path>.+?):(?P<options>\w+=.*)", spec, flags=re.DOTALL)
    if split is None:
        if re.search(r":\w*$", spec):
            raise ValueError(f"--drafter {spec!r}: options must follow the colon, as in {spec}tree_budget=31.")
        return spec, {}
    options: dict[str, Any] = {}
    for part in re.split(r",(?=\w+=)", split["options"]):
        name, text = part.split("=", 1)
        try:
            options[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):  # a name, such as a method's
            options[name] = text
    return split["path"], options


def load(spec: str | Drafter, target: PreTrainedModel) -> list[Variant]:
    """The variant that a `--drafter` names, or one per method if it sets none and the drafter has several.

    A loaded drafter is one variant, with its own options.

    Drafters whose names are joined by "+" are merged; the options are then those of the merged drafter.
    """
    if isinstance(spec, Drafter):
        spec.check_target(target)
        name = f"{_label(spec, spec.method)}\0{Path(getattr(spec, 'name_or_path', '')).name}"
        return [Variant(name, "drafter", drafter=spec, settings=asdict(spec.options))]
    path, options = parse(spec)
    parts = path.split("+") if "+" in path and not Path(path).exists() else path
    drafter = load_drafter(parts, target=target, **options)
    methods = (drafter.method,) if "method" in options else drafter.methods
    given = {name: value for name, value in options.items() if name != "method"}
    variants = []
    for method in methods:
        settings = asdict(drafter.options)
        if "method" in settings:
            settings["method"] = method
        label = _label(drafter, method)
        label = " ".join([label, *(f"{name}={value}" for name, value in given.items())])
        leads = method == drafter.method
        name = f"{label}\0{Path(path).name}"
        variants.append(Variant(name, "drafter", drafter=drafter, settings=settings, leads=leads))
    return variants


def _label(drafter: Any, method: str) -> str:
    """The method's name; for a drafter made of others, their names."""
    registered = method_of(drafter)
    return "+".join(drafter.names) if registered is not None and registered.origin == "drafters" else method


def discover(folder: Path, target: PreTrainedModel) -> tuple[list[Variant], dict[str, str]]:
    """A variant per method of every drafter in the subfolders of `folder`, and of drafters without weights.

    Returns:
        The variants, and for subfolders that could not be loaded the reason, by name.
    """
    variants: list[Variant] = []
    passed_over: dict[str, str] = {}
    own = Path(target.name_or_path).resolve()
    for path in sorted(each for each in folder.iterdir() if (each / "config.json").is_file()):
        if path.resolve() == own:
            continue
        try:
            variants += load(os.path.relpath(path), target)
        except (ValueError, OSError) as error:
            passed_over[path.name] = str(error)
    for name in named_alone():
        variants += load(name, target)
    return variants, passed_over


def distinct(variants: Iterable[Variant]) -> list[Variant]:
    """The variants with unique names: the checkpoint's name is kept only if labels are equal without it."""
    variants = list(variants)
    short = Counter(variant.name.split("\0")[0] for variant in variants)
    named = []
    for variant in variants:
        label, _, checkpoint = variant.name.partition("\0")
        named.append(replace(variant, name=f"{label} ({checkpoint})" if short[label] > 1 else label))
    repeated = [name for name, count in Counter(variant.name for variant in named).items() if count > 1]
    if repeated:
        raise ValueError(f"--drafter: {repeated[0]!r} is given twice; give the two different settings.")
    return named


def sweep(variants: Iterable[Variant], budgets: Iterable[int]) -> list[Variant]:
    """For every drafter with a `tree_budget`, a variant at each of the budgets."""
    swept = []
    budgets = list(budgets)
    for variant in variants:
        # A drafter's other methods are chains, which ignore the budget.
        if variant.drafter is None or not variant.leads or not hasattr(variant.drafter.options, "tree_budget"):
            continue
        for budget in budgets:
            settings = {**variant.settings, "tree_budget": budget}
            swept.append(
                replace(variant, name=f"{variant.name} @ {budget}", settings=settings, swept_from=variant.name)
            )
    return swept
