"""Config keys that make transformers load or run what a checkpoint names: dropped, or ignored.

All such keys that transformers 5.23 reads:

- `attn_implementation`, `experts_implementation`, with and without an underscore, at the top or nested, one name or one
  per part: a kernel on the Hub ("owner/kernel"), or one that is downloaded if a package is missing
  ("flash_attention_2"). Dropped: this library chooses the attention of a drafter.
- `fusion_config` patches classes of transformers; `distributed_config` distributes a model over devices;
  `transformers_weights` and `configuration_files` name other files than the usual ones. Dropped.
- Other keys that begin with an underscore are private state of config objects, such as `_auto_class`, or comments.
  Dropped, and not reported.
- `auto_map` and `custom_pipelines` name Python files. Kept at the top, since drafters are saved as they were published,
  but ignored: this library does not run code of a checkpoint. Dropped where nested.
- `quantization_config`, whose methods use kernels that transformers chooses: refused for drafters in
  `hub/checkpoint.py`.

`use_kernels`, `kernel_config`, `tp_plan`, `device_map` and `gguf_file` are arguments of `from_pretrained`; in a config
nothing reads them. `generation_config.json` has no such key: `custom_generate` is a folder of code, which is not run
either.
"""

from __future__ import annotations

import reprlib
from typing import Any

DROPPED = frozenset(
    (
        "attn_implementation", "configuration_files", "distributed_config", "experts_implementation", "fusion_config",
        "transformers_weights",
    )
)  # fmt: skip
CODE = ("auto_map", "custom_pipelines")
MOST_SHOWN, MOST_CHARACTERS = 6, 60


def shown(place: str, key: str, value: Any) -> str:
    """A key of a config and its value, for messages; long texts are truncated."""
    return f"{place}{key}"[:MOST_CHARACTERS] + f"={reprlib.repr(value)}"


def listed(items: list[str]) -> str:
    """The first items, and the number of the others."""
    more = len(items) - MOST_SHOWN
    return ", ".join(items[:MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")


def without_unsafe_keys(fields: dict[str, Any], place: str = "") -> tuple[dict[str, Any], list[str]]:
    """A config without the dropped keys, and the list of dropped keys with a value that is reported.

    Examples:
        >>> without_unsafe_keys({"hidden_size": 8, "text_config": {"_attn_implementation": "owner/kernel"}})
        ({'hidden_size': 8, 'text_config': {}}, ["text_config._attn_implementation='owner/kernel'"])
    """
    kept: dict[str, Any] = {}
    dropped: list[str] = []
    for key, value in fields.items():
        named = key.removeprefix("_") in DROPPED or (key in CODE and bool(place))
        if named or key.startswith("_"):
            if named and value is not None:
                dropped.append(shown(place, key, value))
            continue
        parts = value if isinstance(value, list) else [value]
        cleaned = []
        for part in parts:
            if isinstance(part, dict):
                part, more = without_unsafe_keys(part, f"{place}{key}.")
                dropped += more
            cleaned.append(part)
        kept[key] = cleaned if isinstance(value, list) else cleaned[0]
    return kept, dropped
