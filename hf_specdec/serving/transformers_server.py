"""transformers' own OpenAI-compatible server, with a drafter attached to its target."""

from __future__ import annotations

import json
import sys
import time
from typing import Any
from weakref import WeakValueDictionary

from hf_specdec.drafting.drafter import Drafter
from hf_specdec.hub.checkpoint import check_is_target
from hf_specdec.hub.loading import load_drafter
from hf_specdec.integration import attach
from hf_specdec.serving.engine import check_port
from hf_specdec.serving.requests import CHAT, LOAD, RESPONSES, TEXT, why_refused


def serve_with_transformers(
    target: str, drafter: str, *, host: str, port: int, dtype: str, name: str | None = None, **settings: Any
) -> None:
    """Serves a target with a drafter until the process is interrupted.

    Requests are decoded one after the other, each by `generate`. The pair stays: requests to unload the target or to
    load another one are refused, and so are those of which the server would ignore a part (`requests.py`). The `usage`
    of an answer counts its accepted and rejected draft tokens, under the names that OpenAI has for predicted outputs:
    `completion_tokens_details` with `accepted_prediction_tokens` and `rejected_prediction_tokens`.

    Args:
        target: Hub id or folder.
        drafter: as for `load_drafter`.
        host: to listen at.
        port: to listen at.
        dtype: of the target.
        name: by which clients name the target; None for `target`.
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
            manager = self._model_manager
            (loaded,) = manager.loaded_models.values()
            loaded_drafter = load_drafter(drafter, loaded.model, **settings)
            attach(loaded.model, loaded_drafter)
            for handler in (self._chat_handler, self._completion_handler):
                _report_drafts(handler, loaded_drafter)
            # The name that requests are compared with, and by which the loaded model is found.
            manager.force_model = name or target
            manager.loaded_models = {manager.process_model_name(manager.force_model): loaded}
            _pin(self.server.config.app, manager.force_model, loaded.processor)
            print(
                f"Serving {manager.force_model} with {drafter} at http://{host}:{port}/v1. Requests are answered one "
                "after the other.",
                file=sys.stderr,
            )
            self.server.run()

    _Serve(force_model=target, host=host, port=port, dtype=dtype, non_blocking=True)  # which calls `start_server`


def _pin(app: Any, name: str, processor: Any) -> None:
    """Makes transformers' server refuse what would change the pair, or what it cannot answer as asked."""
    from fastapi import HTTPException
    from fastapi.responses import JSONResponse
    from jinja2 import TemplateError

    has_tools = "tools" in str(processor.chat_template)
    model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "hf_specdec"}

    def refused(status: int, message: str) -> JSONResponse:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": error}, status_code=status)

    @app.exception_handler(HTTPException)
    async def said(_: Any, error: HTTPException) -> JSONResponse:  # where clients of OpenAI's interface show it
        return refused(error.status_code, str(error.detail))

    @app.middleware("http")
    async def pinned(request: Any, call_next: Any) -> Any:
        path = request.url.path
        if path == "/v1/models":  # transformers lists the Hub cache
            return JSONResponse({"object": "list", "data": [model]})
        if request.method != "POST":
            return await call_next(request)
        try:
            body: Any = json.loads(await request.body()) if path in (CHAT, TEXT, RESPONSES, LOAD) else None
        except ValueError as error:
            return refused(400, f"The request is not JSON: {error}.")
        if path not in (CHAT, TEXT, RESPONSES):  # /reset, and what would load models of other kinds
            if path == LOAD and body == {"model": name}:  # it is loaded, which `transformers chat` asks first
                return await call_next(request)
            return refused(403, f"This server serves {name} with its drafter and nothing else: {path} is switched off.")
        if (reason := why_refused(path, body, has_tools=has_tools)) is not None:
            return refused(400, reason)
        if body.get("model") not in (None, name):
            return refused(404, f"The model {body['model']!r} does not exist: this server serves {name!r}.")
        try:
            return await call_next(request)
        except TemplateError as error:
            return refused(400, f"The chat template of {name} refuses these messages: {error}")


class _Counted:
    """A target as the handler of one request sees it: `generate` keeps the counts of that call."""

    def __init__(self, model: Any, drafter: Drafter) -> None:
        self.model, self.drafter = model, drafter
        self.details: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def generate(self, *args: Any, streamer: Any = None, **kwargs: Any) -> Any:
        self.drafter.stats = None  # it stays None if the call is decoded plainly
        if streamer is None:
            output = self.model.generate(*args, **kwargs)
            self.count()
            return output
        end = streamer.end

        def count_and_end() -> None:  # after the end, another thread sends the last chunk at once
            self.count()
            end()

        streamer.end = count_and_end
        return self.model.generate(*args, streamer=streamer, **kwargs)

    def count(self) -> None:
        stats = self.drafter.stats
        accepted, drafted = (stats.num_accepted_draft_tokens, stats.num_draft_tokens) if stats else (0, 0)
        self.details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}


def _report_drafts(handler: Any, drafter: Drafter) -> None:
    """Makes a handler of transformers' server report the drafts of each answer in its `usage`."""
    from fastapi.responses import JSONResponse
    from openai.types.completion_usage import CompletionTokensDetails

    whole, stream, chunk_of = handler._non_streaming, handler._streaming, handler._build_chunk_sse
    streamed: WeakValueDictionary[str, _Counted] = WeakValueDictionary()  # by request

    async def answer(request_id: str, model: Any, *args: Any, **kwargs: Any) -> Any:
        counted = _Counted(model, drafter)
        content = json.loads((await whole(request_id, counted, *args, **kwargs)).body)
        content["usage"]["completion_tokens_details"] = counted.details
        return JSONResponse(content)

    def start_stream(request_id: str, model: Any, *args: Any, **kwargs: Any) -> Any:
        counted = streamed[request_id] = _Counted(model, drafter)
        response = stream(request_id, counted, *args, **kwargs)
        response.counted = counted  # kept as long as it is sent
        return response

    def build_chunk(request_id: str = "", *args: Any, usage: Any = None, **kwargs: Any) -> Any:
        if usage is not None:
            usage.completion_tokens_details = CompletionTokensDetails.model_validate(streamed[request_id].details)
        return chunk_of(request_id, *args, usage=usage, **kwargs)

    handler._non_streaming, handler._streaming, handler._build_chunk_sse = answer, start_stream, build_chunk
