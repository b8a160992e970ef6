"""The app and its routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles

from . import ollama
from .adapters import adapter_routes
from .batches import Batches
from .chat_request import ChatRequest
from .encoder_routes import encoder_routes, ollama_encoder_routes
from .errors import ANTHROPIC_ERRORS, ERRORS, OLLAMA_ERRORS, Responses, add_error_handlers
from .file_routes import file_routes
from .messages import MessagesFormat, count_tokens, start_message
from .messages_request import CountRequest, MessagesRequest
from .middleware import add_middleware
from .models import Model, Models
from .ollama_request import OllamaChatRequest, OllamaGenerateRequest, ShowRequest
from .request import CompletionRequest
from .response import ChatFormat, CompletionFormat
from .responses import ResponsesFormat, input_items, input_tokens, start_response
from .responses_request import ResponsesRequest
from .route import AnyTypeRoute, Route
from .service import Service
from .settings import Settings
from .start import start_chat, start_completion
from .tokenize_request import DetokenizeRequest, TokenizeRequest, detokenize, tokenize, tokenizer_info

PAGE = Path(__file__).parent / "page"
# The second form of an answer, for the description of the API.
STREAM: Responses = {200: {"content": {"text/event-stream": {}}}}
LINES: Responses = {200: {"content": {"application/x-ndjson": {}}}}  # the same in Ollama's API


def create_app(
    models: Model | Models, *, name: str | None = None, host: str | None = None, settings: Settings | None = None
) -> FastAPI:
    """Return an ASGI app that serves language models, speech models and encoders with the OpenAI API.

    As many requests run at once as a program has rows. Other requests wait. If `queue_limit` requests of a model wait
    already, a further request returns HTTP 503; see `LLM.load`.

    - `models`: one model, or several.
    - `name`: the name in the API if `models` is one model, by default `model`.
    - `settings`: by default `Settings(host=host)`. If it is given, `host` has no effect.
    """
    if not isinstance(models, Models):
        models = Models.of(models, name or "model")
    service = Service(models, settings or Settings(host=host))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(service.health.watch()), asyncio.create_task(models.unload_idle())]
        yield
        for task in tasks:
            task.cancel()
        service.answers.close()
        batches.close()
        service.files.close()

    app = FastAPI(title="executorch-mlx", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False  # the address of a redirect would be wrong behind a proxy with TLS
    app.state.service, app.state.answers = service, service.answers
    key = service.settings.api_key
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    batches = Batches(app, models, service.files, headers)
    add_middleware(app, service.settings)
    add_error_handlers(app)
    app.include_router(_generation_routes(service))
    app.include_router(_ollama_routes(service))
    app.include_router(encoder_routes(service))
    app.include_router(ollama_encoder_routes(service))
    app.include_router(file_routes(service, batches))
    app.include_router(_information_routes(service))
    if service.settings.allow_adapter_updates:
        app.include_router(adapter_routes(service))
    app.mount("/page", StaticFiles(directory=PAGE))
    return app


def _generation_routes(service: Service) -> APIRouter:
    """The routes that generate text."""
    router = APIRouter(route_class=Route, responses=ERRORS)

    @router.post("/v1/chat/completions", responses=STREAM)
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await service.respond(request, body, start_chat, ChatFormat)

    @router.post("/v1/completions", responses=STREAM)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        return await service.respond(request, body, start_completion, CompletionFormat)

    @router.post("/v1/responses", responses=STREAM)
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        start = partial(start_response, service.stored)
        return await service.respond(request, body, start, partial(ResponsesFormat, stored=service.stored))

    @router.get("/v1/responses/{id}")
    async def get_response(id: str) -> dict[str, Any]:
        return service.stored.get(id).body

    @router.delete("/v1/responses/{id}")
    async def delete_response(id: str) -> dict[str, Any]:
        service.stored.remove(id)
        return {"id": id, "object": "response", "deleted": True}

    @router.get("/v1/responses/{id}/input_items")
    async def get_input_items(id: str) -> dict[str, Any]:
        return input_items(service.stored.get(id))

    @router.post("/v1/messages", responses=STREAM | ANTHROPIC_ERRORS)
    async def write_message(body: MessagesRequest, request: Request) -> Response:
        return await service.respond(request, body, start_message, MessagesFormat)

    return router


def _ollama_routes(service: Service) -> APIRouter:
    """The routes of Ollama's API."""
    router = APIRouter(route_class=AnyTypeRoute, prefix="/api", responses=OLLAMA_ERRORS)
    models = service.models

    @router.post("/chat", responses=LINES)
    async def chat(body: OllamaChatRequest, request: Request) -> Response:
        body.model = ollama.own_name(body.model, models)
        return await service.respond(request, body, ollama.start_ollama, ollama.chat_format)

    @router.post("/generate", responses=LINES)
    async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
        body.model = ollama.own_name(body.model, models)
        return await service.respond(request, body, ollama.start_ollama, ollama.generate_format)

    @router.get("/tags")
    async def tags() -> dict[str, Any]:
        return {"models": [ollama.tag(entry, models.size(entry["id"])) for entry in models.descriptions()]}

    @router.get("/ps")
    async def running() -> dict[str, Any]:
        loaded = [entry for entry in models.descriptions() if entry["loaded"]]
        return {"models": [ollama.tag(entry, models.size(entry["id"])) for entry in loaded]}

    @router.post("/show")
    async def show(body: ShowRequest) -> dict[str, Any]:
        return await service.with_model(ollama.own_name(body.model or body.name or "", models), ollama.show)

    @router.get("/version")
    async def get_version() -> dict[str, Any]:
        return {"version": ollama.VERSION}

    return router


def _information_routes(service: Service) -> APIRouter:
    """The routes that generate no text."""
    router = APIRouter(route_class=Route, responses=ERRORS)

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
    async def count_input_tokens(body: ResponsesRequest, request: Request) -> dict[str, Any]:
        return await service.apply(request, body, partial(input_tokens, service.stored))

    @router.post("/v1/messages/count_tokens", responses=ANTHROPIC_ERRORS)
    async def count_message_tokens(body: CountRequest, request: Request) -> dict[str, Any]:
        return await service.apply(request, body, count_tokens)

    @router.post("/tokenize")
    async def tokenize_text(body: TokenizeRequest, request: Request) -> dict[str, Any]:
        return await service.apply(request, body, tokenize)

    @router.post("/detokenize")
    async def detokenize_ids(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
        return await service.apply(request, body, detokenize)

    @router.get("/tokenizer_info")
    async def get_tokenizer_info(model: str | None = None) -> dict[str, Any]:
        return await service.with_model(model, tokenizer_info)

    return router
