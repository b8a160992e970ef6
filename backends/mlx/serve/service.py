"""The parts of a running server, and how a request becomes a response."""

from __future__ import annotations

import asyncio
import json
import time
import weakref
from collections.abc import Callable
from itertools import islice
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from .answer import Answer
from .errors import ApiError, field_error, log, server_error
from .health import Health
from .metrics import Metrics
from .middleware import annotate
from .model import ServedModel
from .models import Models
from .parts import RequestPart
from .settings import Settings
from .stored import StoredResponses
from .streaming import EventStream, ResponseFormat, events, log_answer, whole_response
from .uploads import Files

MAX_NAMES, MAX_NAME = 16, 100  # of unknown fields in a line of the log: their number, and their characters


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
        self.stored = StoredResponses(settings.stored_bytes)
        self.files = Files(settings.files_bytes, settings.files_folder)
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
        self.check_fields(request, body)
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
            return EventStream(answer, stream, format.media_type, self.settings.send_seconds, end)
        try:
            return await whole_response(request, answer, format.response)
        finally:
            end()

    def check_fields(self, request: Request, body: RequestPart) -> None:
        """Log the unknown fields of a request, which have no effect. Raises ApiError if the server is strict."""
        self.check_names(request, [".".join(path) for path in islice(body.unknown_fields(), MAX_NAMES)])

    def check_names(self, request: Request, names: list[str]) -> None:
        """Log the names of unknown fields, if there are any. Raises ApiError if the server is strict."""
        names = [name[:MAX_NAME] for name in names[:MAX_NAMES]]
        if names and self.settings.strict:
            raise field_error(names[0], "unknown field", code="unknown_parameter")
        if names:
            log.warning("%s: ignored unknown fields: %s", request.scope["path"], json.dumps(names)[1:-1])

    async def apply(self, request: Request, body: Any, work: Callable[[ServedModel, Any], Any]) -> Any:
        """Run `work` for the model that a request names, and return its result."""
        self.check_fields(request, body)
        return await self.with_model(body.model, lambda model: work(model, body))

    async def with_model(self, name: str | None, work: Callable[[ServedModel], Any]) -> Any:
        """Run `work(model)` on another thread and return its result. A ValueError becomes an ApiError."""
        model = await self.models.acquire(name)
        try:
            return await asyncio.to_thread(work, model)
        except ValueError as error:
            raise ApiError(str(error)) from error
        finally:
            self.models.release(model)
