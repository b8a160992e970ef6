"""`LocalWorker`: answers the requests of a batch with a model in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from ..llm import LLM
from ..serve import Settings, create_app
from ..serve.in_process import post, running
from .request_file import MAX_LINE, Request
from .run import http_answer


class LocalWorker:
    """Answers requests with the app of the server.

    `width`: the number of requests that should run or wait at once.
    """

    def __init__(self, app: FastAPI, width: int):
        self.app, self.width = app, width

    async def answer(self, request: Request) -> dict[str, Any]:
        response = await post(self.app, request.url, request.body)
        return http_answer(request, response.status, response.body, response.request_id)


@asynccontextmanager
async def local_worker(llm: LLM, name: str) -> AsyncIterator[LocalWorker]:
    """A context manager: yields a worker that answers with `llm`. `name` is the name of the model in the requests."""
    async with running(create_app(llm, name=name, settings=Settings(max_body_bytes=MAX_LINE))) as app:
        yield LocalWorker(app, queue_width(llm.rows))


def queue_width(rows: int) -> int:
    """Return the number of requests that keep `rows` rows busy: whenever a row becomes free, a request is waiting."""
    return 2 * rows
