"""Calls the app without a network. With it, the batch command and Ray replicas answer with the code of the server."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from fastapi import FastAPI


@dataclass(frozen=True)
class Response:
    """A whole response: the HTTP status, the bytes of the body, and the id of the request, by which logs name it."""

    status: int
    body: bytes
    request_id: str


@asynccontextmanager
async def running(app: FastAPI) -> AsyncIterator[FastAPI]:
    """A context manager: runs the start-up and the shutdown of `app`, as a server does."""
    async with app.router.lifespan_context(app):
        yield app


async def post(app: FastAPI, path: str, body: bytes, headers: Sequence[tuple] = ()) -> Response:
    """Send a POST request with a JSON body to `app`, and return the response. `headers`: see `exchange`.

    If the app raises an exception, the response is the HTTP 500 that a client of the server would get. Cancelling the
    call cancels the answer.
    """
    status, given, parts = 500, {}, []
    async for message in exchange(app, path, body, headers=[*headers]):
        if message["type"] == "http.response.start":
            status, given = message["status"], dict(message["headers"])
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))
    id = given.get(b"x-request-id", b"").decode() or f"req_{uuid.uuid4().hex}"
    return Response(status, b"".join(parts), id)


async def exchange(
    app: FastAPI, path: str, body: bytes, *, method: str = "POST", query: bytes = b"", headers: Iterable = ()
) -> AsyncIterator[dict]:
    """Send a request to `app`, and yield the ASGI messages of the response as they come.

    - `query`: the query string.
    - `headers`: pairs of bytes, beside the content type and length that every request here has.

    The end of the iteration, also by `aclose`, tells the app that the client has disconnected.
    """
    messages: asyncio.Queue[dict | None] = asyncio.Queue(maxsize=1)  # the app waits for a slow reader
    call = asyncio.create_task(_call(app, _scope(path, body, method, query, headers), body, messages))
    try:
        while (message := await messages.get()) is not None:
            yield message
    finally:
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def _call(app: FastAPI, scope: dict, body: bytes, messages: asyncio.Queue) -> None:
    requests = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict:
        if (request := next(requests, None)) is not None:
            return request
        return await asyncio.get_running_loop().create_future()  # the client stays; `exchange` cancels this task

    with suppress(Exception):  # a defect of the app, which has already sent the response 500
        await app(scope, receive, messages.put)
    await messages.put(None)


def _scope(path: str, body: bytes, method: str, query: bytes, headers: Iterable) -> dict:
    own = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"host", b"localhost")]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query,
        "headers": [*own, *headers],
        "client": None,
        "server": None,
    }
