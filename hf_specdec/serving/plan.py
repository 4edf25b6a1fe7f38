"""plan_serving: vLLM's arguments for a target with a drafter, and the differences from decoding with this library."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.causal_lm import CausalLMDrafter
from hf_specdec.drafters.dflash import DFlashDrafter
from hf_specdec.drafters.dspark import DSparkDrafter
from hf_specdec.drafters.eagle3 import Eagle3Drafter
from hf_specdec.drafters.gemma4_assistant import Gemma4AssistantDrafter
from hf_specdec.drafters.lookup import NGramDrafter
from hf_specdec.drafters.medusa import MedusaDrafter
from hf_specdec.drafters.mtp import find_layout
from hf_specdec.drafters.peagle import PEagleDrafter
from hf_specdec.drafters.specbranch import SpecBranchDrafter
from hf_specdec.hub.checkpoint import check_is_target
from hf_specdec.hub.export import export_drafter, why_not_served
from hf_specdec.hub.files import CONFIG_FILE, Source, read_json
from hf_specdec.hub.loading import load_drafter
from hf_specdec.hub.mtp import MTP
from hf_specdec.hub.target_files import locate_config, locate_target

NGRAM, SUFFIX = "ngram", "suffix"
# Drafting and verifying a token costs more than it gains if it is accepted less often than this.
LEAST_ACCEPTANCE = 0.1
# Default number of tokens in vLLM for drafters that draft token by token.
DEFAULT_CHAIN = 5


@dataclass(frozen=True)
class Plan:
    """vLLM's arguments.

    Attributes:
        target: absolute folder, or Hub id.
        architectures: classes in the target's config.
        dtype: of the target and the drafter; "auto" for the dtype in the target's config.
        speculative: content of `--speculative-config`.
        notes: sentences on what vLLM does, and which features of the drafter it lacks.
    """

    target: str
    architectures: list[str]
    dtype: str
    speculative: dict[str, Any]
    notes: list[str] = field(default_factory=list)

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
    check_is_target(target, drafter)
    config = locate_config(Source(target, local_files_only=local_files_only))
    location = str(Path(target).resolve()) if Path(target).is_dir() else target
    architectures: list[str] = config.get("architectures") or []
    if drafter in (NGRAM, SUFFIX, MTP) and not Path(drafter).is_dir():
        if drafter == MTP:
            _check_mtp(Source(target, local_files_only=local_files_only))
        own, note = _without_checkpoint(drafter, num_speculative_tokens)
        return Plan(location, architectures, dtype, own, [note])
    source = Source(drafter, revision, local_files_only=local_files_only)
    loaded: Drafter = load_drafter(drafter, revision=revision, local_files_only=local_files_only)
    notes: list[str] = []
    if isinstance(loaded, SpecBranchDrafter):
        assert loaded.draft_model is not None
        notes.append("vLLM cannot draft during verification as SpecBranch does: it runs its draft model alone.")
        drafter = loaded.draft_model.name_or_path
        source = Source(drafter, local_files_only=local_files_only)
        loaded = load_drafter(drafter, local_files_only=local_files_only)
    method = _method(loaded, drafter, target)
    tokens = num_speculative_tokens
    if tokens is None:
        tokens, why = _default_tokens(loaded, getattr(loaded, "measurements", None))
        notes.append(f"It drafts {tokens} token{'s' if tokens > 1 else ''} per round: {why}.")
    model = str(Path(drafter).resolve()) if Path(drafter).is_dir() else drafter
    if _needs_export(loaded, source):
        folder = Path(export_folder or f"{Path(drafter).resolve().name}-vllm")
        with warnings.catch_warnings():  # a local target name is fine here: the target is served on this machine
            warnings.filterwarnings("ignore", message="The export names its target by the folder")
            model = str(export_drafter(loaded, folder, target_id=target).resolve())
        notes.append(f"The drafter was exported to {model}.")
    notes.append(
        "vLLM verifies one chain of drafts per round, and no trees, so it accepts fewer tokens per round than "
        "hf_specdec does with trees of this drafter."
    )
    speculative: dict[str, Any] = {"model": model, "method": method, "num_speculative_tokens": tokens}
    if isinstance(loaded, PEagleDrafter):
        speculative["parallel_drafting"] = True
    return Plan(location, architectures, dtype, speculative, notes)


def tokens_worth_drafting(mean_acceptance_length: float, most: int) -> int:
    """The longest chain whose last token is accepted in at least one round of ten, at least 1 and at most `most`.

    Args:
        mean_acceptance_length: tokens per round, bonus token included, as in vLLM's metrics.
        most: tokens that the drafter can draft.

    Example:
        >>> [tokens_worth_drafting(length, 7) for length in (1.0, 1.6, 2.0, 3.0, 6.0)]
        [1, 2, 3, 5, 7]
    """
    # If each token is accepted with the same rate given the one before, a round has 1 / (1 - rate) tokens.
    rate = 1 - 1 / mean_acceptance_length
    tokens = 1
    while tokens < most and rate ** (tokens + 1) >= LEAST_ACCEPTANCE:
        tokens += 1
    return tokens


def _check_mtp(source: Source) -> None:
    """Raises ValueError if the target's checkpoint has no multi-token-prediction layer."""
    files = locate_target(source)
    text = files.config | (files.config.get("text_config") or {})
    if find_layout(files.shards, text.get("num_hidden_layers", 0), text.get("model_type", "")) is None:
        raise ValueError(
            f"The checkpoint of target {source.name!r} has no multi-token-prediction layer of a known layout: name "
            f"another drafter, such as {NGRAM}."
        )


def _without_checkpoint(name: str, num_speculative_tokens: int | None) -> tuple[dict[str, Any], str]:
    """The arguments of vLLM for a drafter without files, and a note."""
    if name == MTP:
        speculative: dict[str, Any] = {"method": MTP, "num_speculative_tokens": num_speculative_tokens or 1}
        return speculative, "vLLM reads the multi-token-prediction layer of the targets for which it has a class."
    speculative = {"method": name, "num_speculative_tokens": num_speculative_tokens or DEFAULT_CHAIN}
    if name == SUFFIX:
        return speculative, "This is vLLM's own suffix decoding; it needs the package arctic-inference."
    options = NGramDrafter().options
    speculative |= {"prompt_lookup_max": options.longest_suffix, "prompt_lookup_min": options.shortest_suffix}
    return speculative, "This is vLLM's own look-up: one continuation from the request's text, no trees."


def _method(drafter: Drafter, name: str, target: str) -> str:
    """The name of the method in vLLM.

    Raises:
        ValueError: there is none for this drafter.
    """
    for kind, method in (
        (PEagleDrafter, "eagle3"),
        (Eagle3Drafter, "eagle3"),
        (DSparkDrafter, "dspark"),
        (DFlashDrafter, "dflash"),
        (MedusaDrafter, "medusa"),
        (Gemma4AssistantDrafter, MTP),
        (CausalLMDrafter, "draft_model"),
    ):
        if isinstance(drafter, kind):
            return method
    raise ValueError(
        f"vLLM cannot run {name!r}: {why_not_served(drafter)}. It can run this target without a trained drafter: "
        f"`hf-specdec serve {target} {NGRAM}`."
    )


def _default_tokens(drafter: Drafter, measurements: Any) -> tuple[int, str]:
    """Tokens to draft per round, and the reason."""
    most, at_once = _most_tokens(drafter)
    lengths = [
        found["mean_acceptance_length"]
        for found in ((measurements or {}).get("methods") or {}).values()
        if found.get("mean_acceptance_length")
    ]
    if not lengths:
        default = most if at_once else min(most, DEFAULT_CHAIN)
        return default, "the default for drafters of this kind, since it was not measured"
    # The method with the shortest length is most similar to a chain.
    length = min(lengths)
    return (
        tokens_worth_drafting(length, most),
        f"it was measured with {length} tokens per round, and further tokens would be accepted in less than "
        f"{LEAST_ACCEPTANCE:.0%} of rounds",
    )


def _most_tokens(drafter: Drafter) -> tuple[int, bool]:
    """Most tokens that it can draft per round, and whether it drafts all of them in one forward."""
    config: Any = getattr(drafter, "config", None)
    if isinstance(drafter, DFlashDrafter):
        return config.block_size - config.first_slot, True
    if isinstance(drafter, PEagleDrafter):
        return config.num_draft_tokens, True
    if isinstance(drafter, MedusaDrafter):
        return config.medusa_num_heads, True
    return 64, False


def _needs_export(drafter: Drafter, source: Source) -> bool:
    """Whether vLLM cannot read the checkpoint's format."""
    if isinstance(drafter, CausalLMDrafter):
        return drafter.target_ids is not None
    if isinstance(drafter, MedusaDrafter):
        return False
    config = read_json(source.locate([CONFIG_FILE]) / CONFIG_FILE, source.name)
    if isinstance(drafter, Gemma4AssistantDrafter):  # as published; what we save is not exported either
        return config["model_type"] == drafter.config.model_type
    return "speculators_config" not in config
