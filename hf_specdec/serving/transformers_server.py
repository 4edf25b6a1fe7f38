"""transformers' own OpenAI-compatible server, with a drafter attached to its target."""

from __future__ import annotations

from typing import Any

from hf_specdec.hub.checkpoint import check_is_target
from hf_specdec.hub.loading import load_drafter
from hf_specdec.integration import attach
from hf_specdec.serving.engine import check_port


def serve_with_transformers(target: str, drafter: str, *, host: str, port: int, dtype: str, **settings: Any) -> None:
    """Serves a target with a drafter until the process is interrupted.

    Requests are decoded one after the other, each by `generate`.

    Args:
        target: Hub id or folder; clients name it so.
        drafter: as for `load_drafter`.
        host: to listen at.
        port: to listen at.
        dtype: of the target.
        settings: of `load_drafter`.

    Raises:
        ImportError: the packages of transformers' server are not installed.
        OSError: the port is in use, or a checkpoint does not exist.
        ValueError: target and drafter do not fit together, or are swapped.
    """
    check_port(host, port)
    check_is_target(target, drafter)
    try:
        import fastapi  # noqa: F401
        import openai  # noqa: F401
        import uvicorn  # noqa: F401
        from transformers.cli.serve import Serve
    except ImportError as error:
        raise ImportError(
            f"--engine transformers needs the package {error.name}, which is not installed: "
            "pip install 'transformers[serving]'."
        ) from error

    class _Serve(Serve):
        def start_server(self) -> None:
            (loaded,) = self._model_manager.loaded_models.values()
            attach(loaded.model, load_drafter(drafter, loaded.model, **settings))
            self.server.run()

    _Serve(force_model=target, host=host, port=port, dtype=dtype, non_blocking=True)  # which calls `start_server`
