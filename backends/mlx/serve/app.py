"""The routes of the server."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware

from ..llm import LLM, BusyError, Generation, PromptLengthError, SettingError
from ..memory import OutOfMemoryError
from .errors import ApiError, add_error_handlers
from .request import ChatRequest, CompletionRequest, GenerationRequest
from .response import ChatFormat, CompletionFormat, finish_reason

CLIENT_DISCONNECTED = 499  # nginx's status for this case; it appears only in the log
LOOPBACK = ("127.0.0.1", "localhost")


class Answers:
    """The answers that clients wait for."""

    def __init__(self):
        self._answers: weakref.WeakSet[Generation] = weakref.WeakSet()
        self._is_closed = False

    def add(self, generation: Generation) -> None:
        """Add an answer, which `close` then cancels. After `close`, this cancels it at once."""
        self._answers.add(generation)
        if self._is_closed:
            generation.cancel()

    def close(self) -> None:
        self._is_closed = True
        for generation in list(self._answers):
            generation.cancel()


def create_app(llm: LLM, *, name: str, host: str | None = None) -> FastAPI:
    """Return an ASGI app that serves `llm` as the model `name`.

    As many requests run at once as the program has rows. Others wait; if more than `queue_limit` of `llm` would wait, a
    request returns HTTP 503.

    - `host`: the address on which the server listens. If it is the loopback address, a request whose Host
      header names another host returns HTTP 400. This protects against DNS rebinding by web pages.
    """
    answers = Answers()
    page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        answers.close()

    app = FastAPI(title=name, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.answers = answers
    if host in LOOPBACK:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK))
    add_error_handlers(app)

    @app.get("/", response_class=HTMLResponse)
    async def chat_page() -> str:
        return page

    @app.get("/health")
    async def health() -> dict[str, Any]:
        stats = llm.stats
        return {"status": "ok", "running": stats.running, "waiting": stats.waiting}

    model = {"id": name, "object": "model", "created": 0, "owned_by": "executorch-mlx"}
    model["has_chat_template"] = llm.chats  # not in OpenAI's API; the page reads it

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{requested:path}")
    async def get_model(requested: str) -> dict[str, Any]:
        _check_model(requested, name)
        return model

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        _check_model(body.model, name)
        body.check_fields()
        with _generation_errors("messages", body.max_tokens_field):
            generation = llm.chat(
                [message.as_dict() for message in body.messages],
                template_options=body.chat_template_kwargs,
                **body.generate_arguments(),
            )
        answers.add(generation)
        return await _respond(request, body, generation, ChatFormat(name))

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        _check_model(body.model, name)
        body.check_fields()
        with _generation_errors("prompt", body.max_tokens_field):
            generation = llm.generate(body.single_prompt, **body.generate_arguments())
        answers.add(generation)
        return await _respond(request, body, generation, CompletionFormat(name))

    return app


def _check_model(requested: str, name: str) -> None:
    if requested != name:
        message = f"the model {requested!r} does not exist; this server has {name!r}"
        raise ApiError(message, status=404, param="model", code="model_not_found")


@contextmanager
def _generation_errors(prompt_field: str, max_tokens_field: str) -> Iterator[None]:
    """A context manager: turns the errors of `LLM.generate` into `ApiError`s that name the fields of the request."""
    try:
        yield
    except SettingError as error:
        message, name = str(error), error.name
        if name == "max_new_tokens":
            message, name = message.replace(name, max_tokens_field, 1), max_tokens_field
        raise ApiError(message, param=name, code="unsupported_value") from error
    except PromptLengthError as error:
        message = str(error).replace("prompt", prompt_field, 1)
        raise ApiError(message, param=prompt_field, code="context_length_exceeded") from error
    except ValueError as error:
        raise ApiError(str(error), param=prompt_field) from error
    except BusyError as error:
        raise ApiError(str(error), status=503, kind="server_error", code="overloaded") from error


async def _respond(
    request: Request, body: GenerationRequest, generation: Generation, format: CompletionFormat
) -> Response:
    """Return the response with an answer: a stream if the client asked for one."""
    if body.stream:
        return _EventStream(generation, _events(generation, format, body.include_usage))
    return await _whole_response(request, generation, format)


# Streams -------------------------------------------------------------------------------


class _EventStream(StreamingResponse):
    """A stream of server-sent events. Cancels the answer when the stream ends, also if the client disconnects."""

    def __init__(self, generation: Generation, events: AsyncIterator[str]):
        headers = {"Cache-Control": "no-cache"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._generation = generation

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()


async def _events(generation: Generation, format: CompletionFormat, include_usage: bool) -> AsyncIterator[str]:
    """Yields the events of a streamed answer. An error becomes the last event."""
    if first := format.first_chunk():
        yield _event(first)
    try:
        async for token in generation:
            if token.text:
                yield _event(format.chunk(token.text))
        _check_complete(generation)
    except (RuntimeError, ValueError, ApiError) as error:
        yield _event(_api_error(error).body)
        return
    yield _event(format.chunk(None, finish_reason(generation)))
    if include_usage:
        yield _event(format.usage_chunk(generation))
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


# Whole responses -----------------------------------------------------------------------


async def _whole_response(request: Request, generation: Generation, format: CompletionFormat) -> Response:
    """Wait for the answer and return the response with it. Cancels it if the client disconnects."""

    async def wait_for_answer() -> None:
        async for _ in generation:
            pass

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer = asyncio.create_task(wait_for_answer())
    disconnect = asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait({answer, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            return Response(status_code=CLIENT_DISCONNECTED)
        answer.result()
        _check_complete(generation)
    except (RuntimeError, ValueError) as error:
        raise _api_error(error) from error
    finally:
        generation.close()
        answer.cancel()
        disconnect.cancel()
    return JSONResponse(format.response(generation))


def _check_complete(generation: Generation) -> None:
    """Raise ApiError if the answer ended because of an error or the shutdown of the server."""
    if generation.finish == "cancelled":
        raise ApiError("the server is shutting down", status=503, kind="server_error")
    if generation.finish in (None, "error"):
        raise ApiError("the model failed", status=500, kind="server_error")


def _api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OutOfMemoryError):
        return ApiError(str(error), status=503, kind="server_error", code="out_of_memory")
    return ApiError(f"the model failed: {error}", status=500, kind="server_error")
