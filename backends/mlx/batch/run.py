"""The loop of a batch: keeps the workers busy and writes the answers as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .answer_file import AnswerFile
from .request_file import Request, request_number

WATCH_SECONDS = 1.0  # the time between two looks at the width of the workers, while no answer is complete


class Requests(Protocol):
    """The requests of a file."""

    @property
    def path(self) -> Path: ...

    def ids(self) -> Iterator[str]:
        """Yield the ids of the requests."""

    def __iter__(self) -> Iterator[Request]: ...


class Workers(Protocol):
    """What answers the requests of a batch."""

    @property
    def width(self) -> int:
        """The number of requests that should run or wait at once. It may change during a batch."""

    async def answer(self, request: Request) -> dict[str, Any]:
        """Return the answer to a request. Raises RuntimeError if nothing can answer requests any more."""


@dataclass
class Totals:
    """Counts of answers, of the errors among them, and of prompt and answer tokens. An error adds no tokens."""

    answers: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0

    def add(self, answer: dict[str, Any]) -> None:
        self.answers += 1
        response = answer["response"]
        if response is None or response["status_code"] != 200:
            self.errors += 1
            return
        usage = response["body"].get("usage") or {}
        self.prompt_tokens += usage.get("prompt_tokens", usage.get("input_tokens", 0))
        self.answer_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))


def http_answer(request: Request, status: int, body: bytes, server_id: str) -> dict[str, Any]:
    """Wrap an HTTP response in an answer. `server_id` is the id that the server gave the request."""
    try:
        response = {"status_code": status, "request_id": server_id, "body": json.loads(body)}
    except ValueError:
        return error_answer(request, "invalid_response", f"the response with status {status} has no JSON body")
    return {"id": request.id, "custom_id": request.custom_id, "response": response, "error": None}


def error_answer(request: Request, code: str, message: str) -> dict[str, Any]:
    """Return the answer to a request that got no response."""
    error = {"code": code, "message": message}
    return {"id": request.id, "custom_id": request.custom_id, "response": None, "error": error}


def count_and_check(requests: Requests, answers: AnswerFile) -> int:
    """Return the number of requests, and check that the answers belong to them.

    Raises ValueError if `answers` has an answer to another request: the file belongs to another batch, or the requests
    have changed since the answer was written.
    """
    total, known = 0, 0
    for id in requests.ids():
        total += 1
        answered = answers.answered.get(request_number(id))
        known += answered is not None
        if answered not in (None, id):
            raise ValueError(
                f"{answers.path} has an answer for request {request_number(id)} whose id is {answered}, expected {id} "
                f"as in {requests.path}: choose another file for the answers"
            )
    if others := len(answers.answered) - known:
        raise ValueError(
            f"{answers.path} answers {others} requests that {requests.path} lacks: choose another file for the answers"
        )
    return total


async def answer_all(requests: Iterable[Request], workers: Workers, write: Callable[[dict[str, Any]], None]) -> None:
    """Answer `requests` and pass each answer to `write` as soon as it is complete.

    Raises what `write` raises, and RuntimeError if the workers cannot answer any more. In both cases, the running
    requests are cancelled first.
    """
    running: set[asyncio.Task] = set()
    try:
        for request in requests:
            if request.error is not None:
                write(error_answer(request, request.error.code, str(request.error)))
                continue
            running.add(asyncio.create_task(workers.answer(request)))
            while running and len(running) >= workers.width:  # the width is 0 while no engine is ready
                running = await _write_some(running, write)
        while running:
            running = await _write_some(running, write)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _write_some(running: set[asyncio.Task], write: Callable[[dict[str, Any]], None]) -> set[asyncio.Task]:
    """Wait for an answer, at most WATCH_SECONDS, write all complete answers, and return the tasks that still run."""
    done, running = await asyncio.wait(running, timeout=WATCH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        write(task.result())
    return running
