"""transformers' own OpenAI-compatible server, with a drafter attached to its target."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Queue
from typing import Any
from weakref import WeakValueDictionary

import torch

from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.hub.checkpoint import check_is_target
from hf_specdec.hub.loading import load_drafter
from hf_specdec.integration import attach
from hf_specdec.many_prompts import Batch, Ended
from hf_specdec.serving.engine import check_port
from hf_specdec.serving.requests import CHAT, LOAD, RESPONSES, TEXT, why_refused

AT_ONCE = 32  # requests in the batch; further ones wait


def serve_with_transformers(
    target: str, drafter: str, *, host: str, port: int, dtype: str, name: str | None = None, **settings: Any
) -> None:
    """Serves a target with a drafter until the process is interrupted.

    Requests that come at once are decoded in one batch (`many_prompts.py`), and each is answered as by its own call of
    `generate`; a client that closes its stream frees its row. The pair stays: requests to unload the target or to
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
            rounds = BatchThread(loaded.model, loaded_drafter)
            for handler in (self._chat_handler, self._completion_handler):
                _report_drafts(handler, rounds)
            _share_rounds(self._response_handler, rounds)
            # The name that requests are compared with, and by which the loaded model is found.
            manager.force_model = name or target
            found = manager.process_model_name(manager.force_model)
            manager.loaded_models = {found: loaded}
            self._generation_state.get_manager(found)._thread = _Threads()
            _pin(self.server.config.app, manager.force_model, loaded.processor)
            print(
                f"Serving {manager.force_model} with {drafter} at http://{host}:{port}/v1. Up to {AT_ONCE} requests "
                "at once share a batch.",
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


class _Row:
    """A target as the handler of one request sees it: `generate` is a row of the batch, whose counts it keeps."""

    def __init__(self, model: Any, rounds: BatchThread) -> None:
        self.model, self.rounds = model, rounds
        # The handler has just given torch's generator the seed of the request, if it has one.
        self.seed = int(torch.empty((), dtype=torch.int64).random_())
        self.details: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def generate(self, *, streamer: Any = None, **arguments: Any) -> Any:
        if streamer is None:
            ended = self.rounds.decoded(seed=self.seed, **arguments)
            self.count(ended.stats)
        else:
            end = streamer.end

            def count_and_end() -> None:  # after the end, another thread sends the last chunk at once
                self.count(self.rounds.drafter.stats)
                end()

            streamer.end = count_and_end
            ended = self.rounds.decoded(seed=self.seed, streamer=streamer, **arguments)
        if isinstance(ended.result, Exception):
            raise ended.result
        return ended.result

    def count(self, stats: SpeculationStats | None) -> None:
        accepted, drafted = (stats.num_accepted_draft_tokens, stats.num_draft_tokens) if stats else (0, 0)
        self.details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}


class BatchThread:
    """Decodes the requests of all threads in one batch, in a thread of its own.

    Args:
        model: the target, with the drafter attached.
        drafter: for all requests.
    """

    def __init__(self, model: Any, drafter: Drafter) -> None:
        self.model, self.drafter = model, drafter
        self.requests: Queue[tuple[Future[Ended], dict[str, Any]]] = Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def decoded(self, **arguments: Any) -> Ended:
        """Waits for the end of a prompt with these arguments of `generate`."""
        done: Future[Ended] = Future()
        self.requests.put((done, arguments))
        return done.result()

    def _run(self) -> None:
        while True:
            batch = Batch(self.model, self.drafter, AT_ONCE, None, {})
            try:
                while True:
                    if batch.has_room and not (batch.num_rows and self.requests.empty()):
                        batch.add(*self.requests.get())
                    else:
                        batch.round()
                    for ended in batch.take_ended():
                        ended.key.set_result(ended)
            except Exception as error:  # of the shared forward, such as a lack of memory
                for done in batch.keys:
                    done.set_result(Ended(done, error, None))
                batch.close()


class _Threads:
    """In the place of transformers' one thread of a model: each request waits for its row in a thread of its own."""

    def submit(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_running_or_notify_cancel()

        def work() -> None:
            try:
                done.set_result(run(*args, **kwargs))
            except Exception as error:
                done.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return done

    def async_submit(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        return asyncio.wrap_future(self.submit(run, *args, **kwargs))


def _share_rounds(handler: Any, rounds: BatchThread) -> None:
    """Makes a handler of transformers' server decode its requests in the batch."""
    whole, stream = handler._non_streaming, handler._streaming
    handler._non_streaming = lambda request_id, model, *args, **kwargs: whole(
        request_id, _Row(model, rounds), *args, **kwargs
    )
    handler._streaming = lambda request_id, model, *args, **kwargs: stream(
        request_id, _Row(model, rounds), *args, **kwargs
    )


def _report_drafts(handler: Any, rounds: BatchThread) -> None:
    """Makes a handler decode its requests in the batch, and report the drafts of each answer in its `usage`."""
    from fastapi.responses import JSONResponse
    from openai.types.completion_usage import CompletionTokensDetails

    whole, stream, chunk_of = handler._non_streaming, handler._streaming, handler._build_chunk_sse
    streamed: WeakValueDictionary[str, _Row] = WeakValueDictionary()  # by request

    async def answer(request_id: str, model: Any, *args: Any, **kwargs: Any) -> Any:
        counted = _Row(model, rounds)
        content = json.loads((await whole(request_id, counted, *args, **kwargs)).body)
        content["usage"]["completion_tokens_details"] = counted.details
        return JSONResponse(content)

    def start_stream(request_id: str, model: Any, *args: Any, **kwargs: Any) -> Any:
        counted = streamed[request_id] = _Row(model, rounds)
        response = stream(request_id, counted, *args, **kwargs)
        response.counted = counted  # kept as long as it is sent
        return response

    def build_chunk(request_id: str = "", *args: Any, usage: Any = None, **kwargs: Any) -> Any:
        if usage is not None:
            usage.completion_tokens_details = CompletionTokensDetails.model_validate(streamed[request_id].details)
        return chunk_of(request_id, *args, usage=usage, **kwargs)

    handler._non_streaming, handler._streaming, handler._build_chunk_sse = answer, start_stream, build_chunk
