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
