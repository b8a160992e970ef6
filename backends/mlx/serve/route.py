"""The class of the routes that take JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from . import strict_json

LARGE_BODY = 64 * 1024  # bytes; a larger body is parsed on another thread, so that other requests need not wait


class _StrictRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        return await asyncio.to_thread(strict_json.parse, body) if len(body) > LARGE_BODY else strict_json.parse(body)


class Route(APIRoute):
    """A route whose request bodies are read by `strict_json`."""

    def get_route_handler(self) -> Callable:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


class AnyTypeRoute(Route):
    """A route that takes JSON of any Content-Type, as Ollama does: its users call curl without one.

    Web pages of other origins can send other types than JSON without asking first, so their requests are refused.
    """

    def get_route_handler(self) -> Callable:
        handle = super().get_route_handler()

        async def handle_any_type(request: Request) -> Response:
            if "origin" in request.headers:
                return await handle(request)
            headers = [header for header in request.scope["headers"] if header[0] != b"content-type"]
            scope = request.scope | {"headers": [*headers, (b"content-type", b"application/json")]}
            return await handle(Request(scope, request.receive))

        return handle_any_type
