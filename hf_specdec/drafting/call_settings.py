"""Settings of transformers for assistants, in calls with a drafter of this library.

Two have a meaning here: `num_assistant_tokens` and `assistant_confidence_threshold` restrict the drafts of a call. The
others are reported. A value that equals transformers' default cannot be told from one that nobody has set.
"""

from __future__ import annotations

import warnings
from typing import Any

from transformers import GenerationConfig

from hf_specdec.decoding.upstream import default_settings
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.drafting.options import TreeOptions, is_number

# What to do instead, for settings without a meaning here.
_INSTEAD = {
    "num_assistant_tokens_schedule": 'drafter.set_options(tree_budget="auto") adapts the number of drafted tokens',
    "prompt_lookup_num_tokens": 'the look-up of this library is load_drafter("ngram", tree_budget=...)',
    "max_matching_ngram_size": 'it is the option longest_suffix of load_drafter("ngram")',
    "assistant_early_exit": "a SpecBound drafter drafts by early exit",
    "assistant_lookbehind": "a drafter drafts the target's own tokens, so no text is encoded again",
    "target_lookbehind": "a drafter drafts the target's own tokens, so no text is encoded again",
    "assistant_tokenizer": "a drafter drafts the target's own tokens",
    "speculation_type": "the drafter itself, and drafter.options.method, say how it drafts",
    "use_mtp": 'load_drafter("mtp", target) drafts with the target\'s own layer',
}


def limits_of_drafts(config: GenerationConfig) -> tuple[int | None, float | None]:
    """The settings of a call that restrict its drafts, from its config, which transformers has completed with defaults.

    Returns:
        `num_assistant_tokens`, the most drafted tokens of a round, or None for the drafter's own limits, and
        `assistant_confidence_threshold`: a draft is not extended after a token that the drafter gives a lower
        probability; None for no threshold.

    Raises:
        ValueError: one is out of range.
    """
    defaults = default_settings()

    def given(name: str) -> Any:
        value = getattr(config, name)
        return None if value == defaults.get(name) else value

    most, least = given("num_assistant_tokens"), given("assistant_confidence_threshold")
    if most is not None and (type(most) is not int or most < 1):
        raise ValueError(
            f"num_assistant_tokens={most!r} must be an integer of at least 1; to decode without drafts, leave "
            "assistant_model out."
        )
    if least is not None and not (is_number(least) and 0 <= least <= 1):
        raise ValueError(f"assistant_confidence_threshold={least!r} must be a probability; 0 is for no threshold.")
    return most, least or None


def report_unused(config: GenerationConfig, mode_kwargs: dict[str, Any], drafter: Drafter) -> None:
    """Warns about settings of a call that have no effect with this drafter; names each.

    Args:
        config: of the call, with transformers' defaults.
        mode_kwargs: arguments of `generate` for the decoding mode.
        drafter: of the call.

    Raises:
        ValueError: as `limits_of_drafts`.
    """
    defaults = default_settings()
    for name, instead in _INSTEAD.items():
        value = mode_kwargs[name] if name in mode_kwargs else getattr(config, name, None)  # some are newer than 5.17
        if value and value != defaults.get(name):
            warnings.warn(
                f"{name}={value!r} has no effect with assistant_model={type(drafter).__name__}: {instead}. Leave it "
                "out.",
                stacklevel=2,
            )
    (most, _), options = limits_of_drafts(config), drafter.options
    if most is not None and isinstance(options, TreeOptions) and most > options.node_limit:
        warnings.warn(
            f"num_assistant_tokens={most} is the most tokens that a draft of this call may have; it does not raise the "
            f"drafter's own limit, tree_budget={options.tree_budget!r}: call drafter.set_options(tree_budget={most}).",
            stacklevel=2,
        )
