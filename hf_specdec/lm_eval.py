"""The model `hf-specdec` of EleutherAI's evaluation harness: its model `hf`, with a drafter attached.

The harness, up to 0.4.13, has no place where packages announce models, so this module starts it:

    python -m hf_specdec.lm_eval --model hf-specdec --model_args pretrained=<target>,drafter=<drafter> --tasks gsm8k

In Python, call `register()` before `lm_eval.simple_evaluate(model="hf-specdec", ...)`.
"""

from __future__ import annotations

from typing import Any

from hf_specdec.hub.loading import load_drafter
from hf_specdec.integration import attach


def register() -> None:
    """Adds the model to the harness's registry; a second call changes nothing.

    It takes the arguments of `hf`, and `drafter`, as for `load_drafter`, with `drafter_revision`.

    Raises:
        ImportError: the harness is not installed.
    """
    try:
        from lm_eval.api.registry import MODEL_REGISTRY, register_model
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ImportError(
            f"The model hf-specdec needs the package {error.name}, which is not installed: pip install 'lm_eval[hf]'."
        ) from error
    if "hf-specdec" in MODEL_REGISTRY:
        return

    @register_model("hf-specdec")
    class SpeculativeLM(HFLM):
        def __init__(self, drafter: str, drafter_revision: str | None = None, **settings: Any) -> None:
            super().__init__(**settings)
            attach(self.model, load_drafter(drafter, self.model, revision=drafter_revision))


if __name__ == "__main__":
    register()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
