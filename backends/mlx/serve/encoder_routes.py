"""The routes of encoders: `/v1/embeddings`, `/v1/rerank`, `/classify`, and those of Ollama's API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request

from . import encoders, ollama
from .encoder_requests import (
    ClassifyRequest,
    EmbeddingRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    RerankRequest,
)
from .encoders import ServedEncoder
from .errors import ERRORS, OLLAMA_ERRORS, answer_error, no_embeddings, server_error
from .middleware import annotate
from .parts import RequestPart
from .route import AnyTypeRoute, Route
from .service import Service


def encoder_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=Route, responses=ERRORS)

    @router.post("/v1/embeddings")
    async def embed(body: EmbeddingRequest, request: Request) -> dict[str, Any]:
        return await _respond(service, request, body, encoders.embeddings)

    @router.post("/v1/rerank")
    @router.post("/v2/rerank")
    @router.post("/rerank")
    async def rerank(body: RerankRequest, request: Request) -> dict[str, Any]:
        return await _respond(service, request, body, encoders.rerank)

    @router.post("/classify")
    async def classify(body: ClassifyRequest, request: Request) -> dict[str, Any]:
        return await _respond(service, request, body, encoders.classify)

    return router


def ollama_encoder_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=AnyTypeRoute, prefix="/api", responses=OLLAMA_ERRORS)

    @router.post("/embed")
    async def embed(body: OllamaEmbedRequest, request: Request) -> dict[str, Any]:
        body.model = ollama.own_name(body.model, service.models)
        return await _respond(service, request, body, encoders.ollama_embed)

    @router.post("/embeddings")
    async def embeddings(body: OllamaEmbeddingsRequest, request: Request) -> dict[str, Any]:
        body.model = ollama.own_name(body.model, service.models)
        return await _respond(service, request, body, encoders.ollama_embeddings)

    return router


async def _respond(
    service: Service, request: Request, body: RequestPart, work: Callable[[ServedEncoder, Any], dict[str, Any]]
) -> dict[str, Any]:
    """Run `work` with the encoder that a request names, on another thread. Raises ApiError."""
    if service.is_draining:
        raise server_error("the server is shutting down", 503)
    service.check_fields(request, body)
    if not service.models.has_kind(ServedEncoder):
        raise no_embeddings()
    name: str | None = body.model
    annotate(request.scope, model=(name or "")[:100])
    model = await service.models.acquire(name, ServedEncoder)
    try:
        return await asyncio.to_thread(work, model, body)
    except RuntimeError as error:
        raise answer_error(error) from error
    finally:
        service.models.release(model)
