"""The app and its routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles

from ..llm import LLM
from . import strict_json
from .chat_request import ChatRequest
from .errors import ANTHROPIC_ERRORS, ERRORS, Responses, add_error_handlers
from .messages import MessagesFormat, count_tokens, start_message
from .messages_request import CountRequest, MessagesRequest
from .middleware import add_middleware
from .models import Models
from .request import CompletionRequest
from .response import ChatFormat, CompletionFormat
from .responses import ResponsesFormat, input_tokens, start_response
from .responses_request import ResponsesRequest
from .service import Service
from .settings import Settings
from .start import start_chat, start_completion
from .tokenize_request import DetokenizeRequest, TokenizeRequest, detokenize, tokenize, tokenizer_info

PAGE = Path(__file__).parent / "page"
# The second form of an answer, for the description of the API.
STREAM: Responses = {200: {"content": {"text/event-stream": {}}}}
LARGE_BODY = 64 * 1024  # bytes; a larger body is parsed on another thread, so that other requests need not wait


def create_app(
    models: LLM | Models, *, name: str | None = None, host: str | None = None, settings: Settings | None = None
) -> FastAPI:
    """Return an ASGI app that serves language models with the OpenAI API.

    As many requests run at once as a program has rows. Other requests wait. If `queue_limit` requests of a model wait
    already, a further request returns HTTP 503; see `LLM.load`.

    - `models`: one model, or several.
    - `name`: the name in the API if `models` is one model, by default `model`.
    - `settings`: by default `Settings(host=host)`. If it is given, `host` has no effect.
    """
    if isinstance(models, LLM):
        models = Models.of(models, name or "model")
    service = Service(models, settings or Settings(host=host))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(service.health.watch()), asyncio.create_task(models.unload_idle())]
        yield
        for task in tasks:
            task.cancel()
        service.answers.close()

    app = FastAPI(title="executorch-mlx", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False  # the address of a redirect would be wrong behind a proxy with TLS
    app.state.service, app.state.answers = service, service.answers
    add_middleware(app, service.settings)
    add_error_handlers(app)
    app.include_router(_generation_routes(service))
    app.include_router(_information_routes(service))
    app.mount("/page", StaticFiles(directory=PAGE))
    return app


class _StrictRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        return await asyncio.to_thread(strict_json.parse, body) if len(body) > LARGE_BODY else strict_json.parse(body)


class _Route(APIRoute):
    """A route whose request bodies are read by `strict_json`."""

    def get_route_handler(self) -> Callable:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


def _generation_routes(service: Service) -> APIRouter:
    """The routes that generate text."""
    router = APIRouter(route_class=_Route, responses=ERRORS)

    @router.post("/v1/chat/completions", responses=STREAM)
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await service.respond(request, body, start_chat, ChatFormat)

    @router.post("/v1/completions", responses=STREAM)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        return await service.respond(request, body, start_completion, CompletionFormat)

    @router.post("/v1/responses", responses=STREAM)
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        return await service.respond(request, body, start_response, ResponsesFormat)

    @router.post("/v1/messages", responses=STREAM | ANTHROPIC_ERRORS)
    async def write_message(body: MessagesRequest, request: Request) -> Response:
        return await service.respond(request, body, start_message, MessagesFormat)

    return router


def _information_routes(service: Service) -> APIRouter:
    """The routes that generate no text."""
    router = APIRouter(route_class=_Route, responses=ERRORS)

    @router.get("/", include_in_schema=False)
    async def chat_page() -> Response:
        return FileResponse(PAGE / "index.html")

    @router.get("/health")
    async def health() -> Response:
        status, body = service.health.report()
        return JSONResponse(body, status)

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        models = service.models.descriptions()
        ends = {"has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}  # as in Anthropic's API
        return {"object": "list", "data": models, **ends}

    @router.get("/v1/models/{requested:path}")
    async def get_model(requested: str) -> dict[str, Any]:
        return service.models.description(requested)

    @router.post("/v1/responses/input_tokens")
    async def count_input_tokens(body: ResponsesRequest) -> dict[str, Any]:
        return await service.with_model(body.model, lambda model: input_tokens(model, body))

    @router.post("/v1/messages/count_tokens", responses=ANTHROPIC_ERRORS)
    async def count_message_tokens(body: CountRequest) -> dict[str, Any]:
        return await service.with_model(body.model, lambda model: count_tokens(model, body))

    @router.post("/tokenize")
    async def tokenize_text(body: TokenizeRequest) -> dict[str, Any]:
        return await service.with_model(body.model, lambda model: tokenize(model, body))

    @router.post("/detokenize")
    async def detokenize_ids(body: DetokenizeRequest) -> dict[str, Any]:
        return await service.with_model(body.model, lambda model: detokenize(model, body))

    @router.get("/tokenizer_info")
    async def get_tokenizer_info(model: str | None = None) -> dict[str, Any]:
        return await service.with_model(model, tokenizer_info)

    return router
