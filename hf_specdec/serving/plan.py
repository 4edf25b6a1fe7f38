"""plan_serving: vLLM's arguments for a target with a drafter, and the differences from decoding with this library."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_specdec.drafting.drafter import Drafter
from hf_specdec.drafting.registry import Serving, check_has_checkpoint, named_method, serving_of
from hf_specdec.hub.checkpoint import check_is_target
from hf_specdec.hub.export import export_drafter
from hf_specdec.hub.files import CONFIG_FILE, Source, read_json
from hf_specdec.hub.loading import load_drafter
from hf_specdec.hub.target_files import locate_config, locate_target

# Drafting and verifying a token costs more than it gains if it is accepted less often than this.
LEAST_ACCEPTANCE = 0.1
# Of drafters that draft token by token.
MOST_TOKENS = 64


@dataclass(frozen=True)
class Plan:
    """vLLM's arguments.

    Attributes:
        target: absolute folder, or Hub id.
        architectures: classes in the target's config.
        dtype: of the target and the drafter; "auto" for the dtype in the target's config.
        speculative: content of `--speculative-config`.
        notes: sentences on what vLLM does, and which features of the drafter it lacks.
        since: the first version of vLLM that runs this drafter correctly, and what earlier ones do, as a clause.
    """

    target: str
    architectures: list[str]
    dtype: str
    speculative: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    since: tuple[tuple[int, ...], str] | None = None

    @property
    def options(self) -> list[str]:
        """The arguments of `vllm serve <target>`."""
        return ["--dtype", self.dtype, "--speculative-config", json.dumps(self.speculative)]


def plan_serving(
    target: str,
    drafter: str,
    *,
    export_folder: str | os.PathLike[str] | None = None,
    num_speculative_tokens: int | None = None,
    dtype: str = "auto",
    revision: str | None = None,
    local_files_only: bool = False,
) -> Plan:
    """Determines how vLLM serves a target with a drafter, and exports the drafter if vLLM cannot read its format.

    Args:
        target: Hub id or folder of the target.
        drafter: Hub id or folder, or "ngram", "suffix" or "mtp".
        export_folder: for the export; None for the drafter's name and "-vllm" in the current folder.
        num_speculative_tokens: tokens drafted per round; None for `tokens_worth_drafting`, or the drafter's default if
            it was not measured.
        dtype: of target and drafter.
        revision: of the drafter on the Hub.
        local_files_only: whether the Hub must not be used.

    Raises:
        ValueError: vLLM cannot run such a drafter (the message names one that it can run for this target), the two are
            swapped, or they do not fit.
        OSError: one of them cannot be loaded.
    """
    check_has_checkpoint(target)
    check_is_target(target, drafter)
    config = locate_config(Source(target, local_files_only=local_files_only))
    location = str(Path(target).resolve()) if Path(target).is_dir() else target
    architectures: list[str] = config.get("architectures") or []
    if (named := named_method(drafter)) is not None:
        if named.origin == "target":
            files = locate_target(Source(target, local_files_only=local_files_only))
            if named.in_target(files.shards, files.config) is None:
                raise ValueError(
                    f"The checkpoint of target {target!r} has no {drafter} layer of a known layout: name another "
                    "drafter, such as ngram."
                )
        serving = _checked(named.serving or Serving(not_exported="vLLM has no such method"), drafter, target)
        number = num_speculative_tokens or serving.default_tokens
        own = {"method": serving.method, "num_speculative_tokens": number}
        if named.origin == "name":
            own |= serving.settings(named.drafter())
        return Plan(location, architectures, dtype, own, [serving.note])
    source = Source(drafter, revision, local_files_only=local_files_only)
    loaded: Drafter = load_drafter(drafter, revision=revision, local_files_only=local_files_only)
    serving = serving_of(loaded)
    notes: list[str] = []
    if serving.instead is not None:
        drafter, note = serving.instead(loaded)
        notes.append(note)
        source = Source(drafter, local_files_only=local_files_only)
        loaded = load_drafter(drafter, local_files_only=local_files_only)
        serving = serving_of(loaded)
    _checked(serving, drafter, target)
    tokens = num_speculative_tokens
    if tokens is None:
        tokens, why = _default_tokens(loaded, serving, getattr(loaded, "measurements", None))
        notes.append(f"It drafts {tokens} token{'s' if tokens > 1 else ''} per round: {why}.")
    model = str(Path(drafter).resolve()) if Path(drafter).is_dir() else drafter
    if serving.needs_export(loaded, read_json(source.locate([CONFIG_FILE]) / CONFIG_FILE, source.name)):
        folder = Path(export_folder or f"{Path(drafter).resolve().name}-vllm")
        with warnings.catch_warnings():  # a local target name is fine here: the target is served on this machine
            warnings.filterwarnings("ignore", message="The export names its target by the folder")
            model = str(export_drafter(loaded, folder, target_id=target).resolve())
        notes.append(f"The drafter was exported to {model}.")
    notes.append(
        "vLLM verifies one chain of drafts per round, and no trees, so it accepts fewer tokens per round than "
        "hf_specdec does with trees of this drafter."
    )
    speculative = {"model": model, "method": serving.method, "num_speculative_tokens": tokens}
    return Plan(location, architectures, dtype, speculative | serving.settings(loaded), notes, serving.since)


def tokens_worth_drafting(mean_acceptance_length: float, most: int) -> int:
    """The longest chain whose last token is accepted in at least one round of ten, at least 1 and at most `most`.

    Args:
        mean_acceptance_length: tokens per round, bonus token included, as in vLLM's metrics.
        most: tokens that the drafter can draft.

    Examples:
        >>> [tokens_worth_drafting(length, 7) for length in (1.0, 1.6, 2.0, 3.0, 6.0)]
        [1, 2, 3, 5, 7]
    """
    # If each token is accepted with the same rate given the one before, a round has 1 / (1 - rate) tokens.
    rate = 1 - 1 / mean_acceptance_length
    tokens = 1
    while tokens < most and rate ** (tokens + 1) >= LEAST_ACCEPTANCE:
        tokens += 1
    return tokens


def _checked(serving: Serving, name: str, target: str) -> Serving:
    """Raises ValueError if vLLM has no method for a drafter of this name."""
    if serving.method is None:
        raise ValueError(
            f"vLLM cannot run {name!r}: {serving.not_exported}. It can run this target without a trained drafter: "
            f"`hf-specdec serve {target} ngram`."
        )
    return serving


def _default_tokens(drafter: Drafter, serving: Serving, measurements: Any) -> tuple[int, str]:
    """Tokens to draft per round, and the reason."""
    most = MOST_TOKENS if serving.tokens is None else serving.tokens(drafter)
    lengths = [
        found["mean_acceptance_length"]
        for found in ((measurements or {}).get("methods") or {}).values()
        if found.get("mean_acceptance_length")
    ]
    if not lengths:
        default = most if serving.tokens is not None else serving.default_tokens
        return default, "the default for drafters of this kind, since it was not measured"
    # The method with the shortest length is most similar to a chain.
    length = min(lengths)
    return (
        tokens_worth_drafting(length, most),
        f"it was measured with {length} tokens per round, and further tokens would be accepted in less than "
        f"{LEAST_ACCEPTANCE:.0%} of rounds",
    )
