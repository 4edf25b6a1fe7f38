"""The default target of the examples, with its drafters and prompts, all from a checkout.

It is SmolLM2-135M-Instruct, an assistant that is downloaded and converted once (`smollm2.py`), or the small bundled
model if the assistant cannot be downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import smollm2

from hf_specdec.benchmark.prompts import Prompt, render
from hf_specdec.benchmark.run import tokenise

EXAMPLES = Path(os.path.relpath(Path(__file__).parent))  # relative: paths go into records


@dataclass(frozen=True)
class Bundle:
    """A target with its drafters and prompts.

    Attributes:
        target: folder or Hub id to load.
        name: of the target in records, where a folder is one of this machine.
        folder: of the drafters.
        prompts: JSONL.
        dtype: in which the target is published, if the folder has another one.
    """

    target: str
    name: str
    folder: Path
    prompts: Path
    dtype: str | None = None


_TINY = str(EXAMPLES / "tiny-code/target")
TINY = Bundle(_TINY, _TINY, EXAMPLES / "tiny-code", EXAMPLES / "tiny-code/prompts.jsonl")
ASSISTANT = Bundle(
    smollm2.HUB_ID, smollm2.HUB_ID, EXAMPLES / "smollm2-135m", EXAMPLES / "smollm2-135m/held_out.jsonl", "bfloat16"
)


def bundle_of(model: str | None, line: Callable[[str], None]) -> Bundle | None:
    """What belongs to the target that was asked for; None where that is one of the user's own.

    Args:
        model: as given; None for the assistant, or the small model where that cannot be had.
        line: told why it cannot.

    Raises:
        ValueError: the download is damaged.
    """
    if model in (TINY.target, ASSISTANT.target):
        return TINY if model == TINY.target else ASSISTANT
    if model is not None:
        return None
    if not (ASSISTANT.folder / "dflash").is_dir():
        return TINY
    try:
        return replace(ASSISTANT, target=str(smollm2.model_folder()))
    except OSError as error:
        line(f"{error} The small bundled model stands in.")
        return TINY


def inputs_of(tokenizer: Any, prompt: Prompt) -> Any:
    """The prompt as `generate` takes it, in the chat template where there is one."""
    chat = bool(tokenizer.chat_template)
    return tokenise(tokenizer, [render(prompt, tokenizer, chat=chat, thinking="default")], chat=chat)
