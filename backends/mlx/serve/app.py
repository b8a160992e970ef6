"""The routes of the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from ..llm import LLM, Generation, PromptLengthError, SettingError
from . import protocol
from .protocol import ApiError, ChatRequest, ChatShape, CompletionRequest, Options, Shape
from .worker import Busy, Job, Worker

GONE = 499  # the client left; nobody reads this
LOOPBACK = ("127.0.0.1", "localhost")


def create_app(llm: LLM, *, name: str, queue: int = 64, host: str | None = None) -> FastAPI:
    """The ASGI app that serves `llm` under `name`; at most `queue` requests wait.

    Where `host` is the loopback address, requests have to be addressed to it: a page elsewhere
    cannot reach the model by a name of its own.
    """
    worker = Worker(queue)
    page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        worker.close()

    app = FastAPI(title=name, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.worker = worker
    if host in LOOPBACK:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK))
    _errors(app)

    @app.get("/", response_class=HTMLResponse)
    async def chat_page() -> str:
        return page

    @app.get("/health")
    async def health() -> dict[str, Any]:
        running, waiting = worker.count()
        return {"status": "ok", "running": running, "waiting": waiting}

    model = {"id": name, "object": "model", "created": 0, "owned_by": "executorch-mlx"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{asked:path}")
    async def one_model(asked: str) -> dict[str, Any]:
        _check_model(asked, name)
        return model

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        _check(body, name)
        with _refusals("messages", body.length_name):
            generation = llm.chat(
                [message.plain() for message in body.messages],
                template_options=body.chat_template_kwargs,
                max_new_tokens=body.most(),
                **body.settings(),
            )
        return await _answer(request, body, worker, generation, ChatShape(name))

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        _check(body, name)
        with _refusals("prompt", body.length_name):
            generation = llm.generate(
                body.the_prompt(), max_new_tokens=body.most(), **body.settings()
            )
        return await _answer(request, body, worker, generation, Shape(name))

    return app


def _check(body: Options, name: str) -> None:
    _check_model(body.model, name)
    protocol.check_fields(body)


def _check_model(asked: str, name: str) -> None:
    if asked != name:
        told = f"the model {asked!r} does not exist here, only {name!r}"
        raise ApiError(told, status=404, param="model", code="model_not_found")


@contextmanager
def _refusals(what: str, length: str) -> Iterator[None]:
    """What the model refuses before it runs is the client's to put right; `what` and `length` are
    the client's names for the prompt and for the length of the answer."""
    try:
        yield
    except SettingError as error:
        told, name = str(error), error.name
        if name == "max_new_tokens":
            told, name = told.replace(name, length, 1), length
        raise ApiError(told, param=name, code="unsupported_value") from error
    except PromptLengthError as error:
        raise ApiError(f"{what}: {error}", param=what, code="context_length_exceeded") from error
    except ValueError as error:
        raise ApiError(str(error), param=what) from error


# Answers -------------------------------------------------------------------------------


async def _answer(
    request: Request, body: Options, worker: Worker, generation: Generation, shape: Shape
) -> Response:
    try:
        job = worker.submit(generation)
    except Busy as error:
        raise ApiError(str(error), status=503, kind="server_error", code="overloaded") from error
    if body.stream:
        return _Stream(job, _events(job, shape, body.include_usage))
    return await _whole(request, job, shape)


class _Stream(StreamingResponse):
    """Server-sent events, with whose end, however it comes, the job ends."""

    def __init__(self, job: Job, events: AsyncIterator[str]):
        headers = {"Cache-Control": "no-cache"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._job = job

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


async def _events(job: Job, shape: Shape, include_usage: bool) -> AsyncIterator[str]:
    if opening := shape.opening():
        yield _event(opening)
    try:
        async for token in job.tokens():
            if token.text:
                yield _event(shape.part(token.text))
        _check_whole(job.generation)
    except (RuntimeError, ValueError, ApiError) as error:
        yield _event(_failure(error).body)
        return
    yield _event(shape.part(None, protocol.finish_reason(job.generation)))
    if include_usage:
        yield _event(shape.totals(job.generation))
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


async def _whole(request: Request, job: Job, shape: Shape) -> Response:
    async def collect() -> None:
        async for _ in job.tokens():
            pass

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work, gone = asyncio.create_task(collect()), asyncio.create_task(left())
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=GONE)
        work.result()
        _check_whole(job.generation)
    except (RuntimeError, ValueError) as error:
        raise _failure(error) from error
    finally:
        job.cancel()
        work.cancel()
        gone.cancel()
    return JSONResponse(shape.whole(job.generation))


def _check_whole(generation: Generation) -> None:
    if generation.finish == "cancelled":
        raise ApiError("the server is shutting down", status=503, kind="server_error")
    if generation.finish in (None, "error"):
        raise ApiError("the model failed", status=500, kind="server_error")


def _failure(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    return ApiError(f"the model failed: {error}", status=500, kind="server_error")


# Errors --------------------------------------------------------------------------------


def _errors(app: FastAPI) -> None:
    """Every error in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return JSONResponse(error.body, error.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            told = f"the body is no JSON: {first['ctx']['error']} at character {first['loc'][-1]}"
            return JSONResponse(ApiError(told).body, 400)
        field = ".".join(str(part) for part in first["loc"] if part != "body")
        told = f"{field}: {first['msg']}"
        if not field:
            told = "the body is no JSON object, or its Content-Type is not application/json"
        return JSONResponse(ApiError(told, param=field or None).body, 400)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return JSONResponse(ApiError(str(error.detail)).body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        body = ApiError(f"{type(error).__name__} in the server", kind="server_error").body
        return JSONResponse(body, 500)
