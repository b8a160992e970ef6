"""`LocalWorker`: answers the requests of a batch with the app of the server, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from ..batch.request_file import MAX_LINE, Request
from ..batch.run import error_answer, http_answer
from ..llm import LLM
from .in_process import post, running
from .settings import Settings


class LocalWorker:
    """Answers requests with the app of the server.

    - `width`: the number of requests that should run or wait at once.
    - `endpoint`: the path of all requests, or None if they may have any.
    - `headers`: those of all requests, as pairs of bytes.
    """

    def __init__(self, app: FastAPI, width: int, endpoint: str | None = None, headers: Sequence[tuple] = ()):
        self.app, self.width, self._endpoint, self._headers = app, width, endpoint, headers

    async def answer(self, request: Request) -> dict[str, Any]:
        if self._endpoint not in (None, request.url):
            return error_answer(request, "invalid_request", f"url: got {request.url}, expected {self._endpoint}")
        response = await post(self.app, request.url, request.body, self._headers)
        return http_answer(request, response.status, response.body, response.request_id)


@asynccontextmanager
async def local_worker(llm: LLM, name: str) -> AsyncIterator[LocalWorker]:
    """A context manager: yields a worker that answers with `llm`. `name` is the name of the model in the requests."""
    from .app import create_app

    async with running(create_app(llm, name=name, settings=Settings(max_body_bytes=MAX_LINE))) as app:
        yield LocalWorker(app, queue_width(llm.rows))


def queue_width(rows: int) -> int:
    """Return the number of requests that keep `rows` rows busy: whenever a row becomes free, a request is waiting."""
    return 2 * rows
