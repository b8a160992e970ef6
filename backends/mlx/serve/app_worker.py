"""`AppWorker`: answers the requests of a batch with the app of the server, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI

from ..batch.request_file import Request
from ..batch.run import error_answer, http_answer
from .in_process import post


class AppWorker:
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


def queue_width(rows: int) -> int:
    """Return the number of requests that keep `rows` rows busy: whenever a row becomes free, a request is waiting."""
    return 2 * rows
