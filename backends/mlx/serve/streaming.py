"""HTTP responses with an answer: `EventStream` sends it as server-sent events, `whole_response` in one piece."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from .answer import Answer, Choice
from .delta import Delta
from .errors import ApiError, answer_error
from .middleware import CLIENT_DISCONNECTED, annotate

DONE = "data: [DONE]\n\n"
PING = ": the answer goes on\n\n"  # a comment, which clients skip
Events = AsyncIterator[str]


class ServerSentEvents:
    """How a stream writes its chunks: as events. `ping` keeps the connection alive, and `ending` follows the answer."""

    media_type, ping, ending = "text/event-stream", PING, ""

    @staticmethod
    def line(data: dict[str, Any]) -> str:
        """Return an event. The `type` in the data, as in `/v1/responses`, becomes the name of the event."""
        name = f"event: {data['type']}\n" if "type" in data else ""
        return f"{name}data: {json.dumps(data)}\n\n"


class JsonLines:
    """How a stream writes its chunks in Ollama's API: as lines of JSON, of which an empty one has no effect."""

    media_type, ping, ending = "application/x-ndjson", "\n", ""

    @staticmethod
    def line(data: dict[str, Any]) -> str:
        return json.dumps(data) + "\n"


class ResponseFormat(Protocol):
    """Makes the JSON of one response: see `CompletionFormat` and `ResponsesFormat`."""

    media_type: str
    ping: str
    ending: str

    def line(self, data: dict[str, Any]) -> str: ...
    def first_chunks(self) -> list[dict[str, Any]]: ...
    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]: ...
    def error_chunks(self, error: ApiError) -> list[dict[str, Any]]: ...
    def last_chunks(self) -> list[dict[str, Any]]: ...
    def response(self) -> dict[str, Any]: ...


class EventStream(StreamingResponse):
    """A stream of an answer. When the stream ends, it closes the answer and calls `on_end`.

    The stream also ends if the client disconnects, or does not read an event for `send_seconds`.
    """

    def __init__(
        self, answer: Answer, events: Events, media_type: str, send_seconds: float, on_end: Callable[[], object]
    ):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type=media_type, headers=headers)
        self._answer, self._send_seconds, self._on_end = answer, send_seconds, on_end

    async def __call__(self, scope, receive, send) -> None:
        async def send_in_time(message) -> None:
            await asyncio.wait_for(send(message), self._send_seconds)

        try:
            await super().__call__(scope, receive, send_in_time)
        except TimeoutError:
            annotate(scope, status=CLIENT_DISCONNECTED, error="the client does not read")
        finally:
            self._answer.close()
            self._on_end()


async def events(answer: Answer, format: ResponseFormat, ping_seconds: float) -> Events:
    """Yield the events of a streamed answer. An error becomes the last event.

    Whenever no event came for `ping_seconds`, as during a long prompt, yields a comment. Clients and proxies close
    connections on which nothing comes for a minute or more.
    """
    for chunk in format.first_chunks():
        yield format.line(chunk)
    try:
        async with aclosing(answer.deltas(ping_seconds)) as deltas:
            async for entry in deltas:
                if entry is None:
                    yield format.ping
                    continue
                for chunk in format.chunks(*entry):
                    yield format.line(chunk)
    except Exception as error:  # noqa: BLE001  (whatever fails, it ends this answer alone)
        for chunk in format.error_chunks(answer_error(error)):
            yield format.line(chunk)
        return
    for chunk in format.last_chunks():
        yield format.line(chunk)
    if format.ending:
        yield format.ending


async def whole_response(request: Request, answer: Answer, response: Callable[[], dict[str, Any]]) -> Response:
    """Wait for the answer and return it with the JSON of `response()`. Ends the answer if the client disconnects."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    waiting = asyncio.create_task(answer.wait())
    disconnect = asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait({waiting, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            return Response(status_code=CLIENT_DISCONNECTED)
        waiting.result()
    except Exception as error:
        raise answer_error(error) from error
    finally:
        answer.close()
        waiting.cancel()
        disconnect.cancel()
    return JSONResponse(response())


def log_answer(request: Request, answer: Answer) -> None:
    """Add the token counts, finish reasons and times of an answer to the access log."""
    first = min((c.first_token_at for c in answer.choices if c.first_token_at), default=None)
    annotate(
        request.scope,
        model=answer.model.name,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        completion_tokens=answer.completion_tokens,
        finish=[choice.total.finish for choice in answer.choices],
        first_token_seconds=None if first is None else round(first - answer.started, 4),
        answer_seconds=round(time.monotonic() - answer.started, 4),
    )
