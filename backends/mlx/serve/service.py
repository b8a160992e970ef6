"""The parts of a running server, and how a request becomes a response."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from .answer import Answer
from .errors import ApiError, server_error
from .health import Health
from .metrics import Metrics
from .middleware import annotate
from .model import ServedModel
from .models import Models
from .settings import Settings
from .streaming import EventStream, ResponseFormat, events, log_answer, whole_response


class Answers:
    """The answers that clients wait for."""

    def __init__(self):
        self._answers: weakref.WeakSet[Answer] = weakref.WeakSet()
        self._is_closed = False

    def add(self, answer: Answer) -> None:
        """Add an answer, so that `close` can end it. After `close`, an added answer ends at once."""
        self._answers.add(answer)
        if self._is_closed:
            answer.cancel()

    def close(self) -> None:
        """End all answers. Their requests return HTTP 503."""
        self._is_closed = True
        for answer in list(self._answers):
            answer.cancel()


class Service:
    """The models, limits and metrics of a server, and the code that answers requests. `create_app` adds the routes."""

    def __init__(self, models: Models, settings: Settings):
        self.models, self.settings = models, settings
        self.answers, self.metrics = Answers(), Metrics(models)
        self.health = Health(models, settings.stall_seconds)
        self.is_draining = False  # the server shuts down, and takes no more requests

    async def respond(
        self,
        request: Request,
        body: Any,
        start: Callable[[ServedModel, Any], Answer],
        make_format: Callable[[Answer, Any], ResponseFormat],
    ) -> Response:
        """Start the answer to a request and return the response with it, as a stream if the client asked for one."""
        if self.is_draining:
            raise server_error("the server is shutting down", 503)
        started = time.monotonic()
        annotate(request.scope, model=body.model[:100], stream=bool(body.stream))
        model = await self.models.acquire(body.model)
        try:
            answer = await asyncio.to_thread(start, model, body)
        except BaseException:
            self.models.release(model)
            raise
        answer.started = started
        if self.settings.request_seconds:
            answer.deadline = started + self.settings.request_seconds
        self.answers.add(answer)

        def end() -> None:
            self.models.release(model)
            self.metrics.add(answer)
            log_answer(request, answer)

        format = make_format(answer, body)
        if body.stream:
            stream = events(answer, format, self.settings.ping_seconds)
            return EventStream(answer, stream, self.settings.send_seconds, end)
        try:
            return await whole_response(request, answer, format.response)
        finally:
            end()

    async def with_model(self, name: str | None, work: Callable[[ServedModel], Any]) -> Any:
        """Run `work(model)` on another thread and return its result. A ValueError becomes an ApiError."""
        model = await self.models.acquire(name)
        try:
            return await asyncio.to_thread(work, model)
        except ValueError as error:
            raise ApiError(str(error)) from error
        finally:
            self.models.release(model)
