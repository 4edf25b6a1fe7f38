"""Ways of decoding to compare: plain generate twice, stock assisted generation, and any drafters with settings.

Nothing here knows a method. Bundled checkpoints are found by looking into a folder, their methods by asking the
drafter, and drafters without weights by the registry, so a new method is measured without a change here.
"""

from __future__ import annotations

import ast
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from transformers import CompileConfig, PreTrainedModel

import hf_specdec
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.causal_lm.draft_model import with_whole_vocabulary
from hf_specdec.drafters.causal_lm.loading import whole_target
from hf_specdec.drafters.merged import MergedDrafter
from hf_specdec.drafters.registry import WEIGHTLESS
from hf_specdec.hub.loading import load_drafter

BUNDLED = Path(hf_specdec.__file__).parents[1] / "examples" / "tiny-code"
PLAIN = "plain, eager"
COMPILED = "plain, compiled"
ASSISTED = "stock assisted"


@dataclass(frozen=True)
class Way:
    """One row of the report.

    Attributes:
        name: unique.
        kind: "plain" and "assisted" are transformers' own.
        arguments: for `generate`.
        drafter: also given to `generate`, as its assistant.
        settings: drafting options, set before each call: ways may share a drafter.
        swept_from: for a way that differs from another in its budget alone, that one's name.
        leads: whether its method is the one that the drafter uses unasked; only such ways are swept.
        batches: whether it takes more than one row.
    """

    name: str
    kind: Literal["plain", "assisted", "drafter"]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    drafter: Drafter | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    swept_from: str | None = None
    leads: bool = True
    batches: bool = True

    def begin(self) -> None:
        """Before each call: sets the drafter's options, and has it forget the texts of earlier calls."""
        if self.drafter is not None:
            self.drafter.set_options(**self.settings)
            self.drafter.forget()


def baselines(backend: str = "inductor") -> list[Way]:
    """Plain `generate` as it comes, and compiled with a static cache by this backend of `torch.compile`."""
    everywhere = CompileConfig(backend=backend)
    # Left alone, generate compiles on accelerators only; the second baseline is a compiled one on every device.
    everywhere._compile_all_devices = True
    return [
        Way(PLAIN, "plain"),
        Way(COMPILED, "plain", {"cache_implementation": "static", "compile_config": everywhere}),
    ]


def stock_assisted(name: str, target: PreTrainedModel) -> Way:
    """Transformers' own assisted generation with a draft model (Hub id or folder); batches of one only."""
    vocab_size = target.get_input_embeddings().num_embeddings
    model = with_whole_vocabulary(whole_target(name, dtype=target.dtype).to(target.device).eval(), vocab_size)
    return Way(ASSISTED, "assisted", {"assistant_model": model}, batches=False)


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """`path-or-id:option=value,option=value` as where to load from, and options; values are Python literals or text.

    Raises:
        ValueError: an option has no value.

    Example:
        >>> parse("examples/tiny-code/dflash:tree_budget=31,method=ddtree")
        ('examples/tiny-code/dflash', {'tree_budget': 31, 'method': 'ddtree'})
        >>> parse("me/drafter:branching=[2, 4, 6, 4]")
        ('me/drafter', {'branching': [2, 4, 6, 4]})
    """
    # A drive letter, as in C:\drafter, is no beginning of options: those have an equals sign.
    split = re.match(r"(?P<path>.+?):(?P<options>\w+=.*)", spec, flags=re.DOTALL)
    if split is None:
        if re.search(r":\w*$", spec):
            raise ValueError(f"--drafter {spec!r}: after the colon options are expected, as in {spec}tree_budget=31.")
        return spec, {}
    options: dict[str, Any] = {}
    for part in re.split(r",(?=\w+=)", split["options"]):
        name, text = part.split("=", 1)
        try:
            options[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):  # a name, such as a method's
            options[name] = text
    return split["path"], options


def load(spec: str, target: PreTrainedModel) -> list[Way]:
    """The way that a `--drafter` names, or one per method where it leaves the method open and there are several.

    Drafters whose names are joined by "+" are merged; options are then those of the merged drafter.
    """
    path, options = parse(spec)
    parts = path.split("+") if "+" in path and not Path(path).exists() else path
    drafter = load_drafter(parts, target=target, **options)
    methods = (drafter.method,) if "method" in options else drafter.methods
    given = {name: value for name, value in options.items() if name != "method"}
    ways = []
    for method in methods:
        settings = asdict(drafter.options)
        if "method" in settings:
            settings["method"] = method
        label = "+".join(drafter.names) if isinstance(drafter, MergedDrafter) else method
        label = " ".join([label, *(f"{name}={value}" for name, value in given.items())])
        leads = method == drafter.method
        name = f"{label}\0{Path(path).name}"
        ways.append(Way(name, "drafter", drafter=drafter, settings=settings, leads=leads))
    return ways


def discover(folder: Path, target: PreTrainedModel) -> tuple[list[Way], dict[str, str]]:
    """A way per method of every drafter in the folders of `folder`, and of those that need no weights.

    Returns:
        the ways, and for folders that are none: why, by name.
    """
    ways: list[Way] = []
    passed_over: dict[str, str] = {}
    own = Path(target.name_or_path).resolve()
    for path in sorted(each for each in folder.iterdir() if (each / "config.json").is_file()):
        if path.resolve() == own:
            continue
        try:
            ways += load(os.path.relpath(path), target)
        except (ValueError, OSError) as error:
            passed_over[path.name] = str(error)
    for name in sorted(WEIGHTLESS):
        ways += load(name, target)
    return ways, passed_over


def distinct(ways: Iterable[Way]) -> list[Way]:
    """The same ways with names that tell them apart: the checkpoint is named only where it is needed for that."""
    ways = list(ways)
    short = Counter(way.name.split("\0")[0] for way in ways)
    named = []
    for way in ways:
        label, _, checkpoint = way.name.partition("\0")
        named.append(replace(way, name=f"{label} ({checkpoint})" if short[label] > 1 else label))
    repeated = [name for name, count in Counter(way.name for way in named).items() if count > 1]
    if repeated:
        raise ValueError(f"--drafter: {repeated[0]!r} is asked for twice; give the two different settings.")
    return named


def sweep(ways: Iterable[Way], budgets: Iterable[int]) -> list[Way]:
    """For every drafter that has a `tree_budget`, the same at each of the budgets."""
    swept = []
    budgets = list(budgets)
    for way in ways:
        # A drafter's other methods are its chains, which ignore the budget.
        if way.drafter is None or not way.leads or not hasattr(way.drafter.options, "tree_budget"):
            continue
        for budget in budgets:
            settings = {**way.settings, "tree_budget": budget}
            swept.append(replace(way, name=f"{way.name} @ {budget}", settings=settings, swept_from=way.name))
    return swept
