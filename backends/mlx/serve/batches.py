"""`/v1/batches`: files of requests that the server answers, with the loop of the batch command."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from pathlib import Path
from typing import Any, Literal, cast

from fastapi import FastAPI

from ..batch import AnswerFile, RequestLines, answer_all
from ..batch.request_file import request_number
from .app_worker import AppWorker, queue_width
from .errors import ApiError
from .models import Models
from .parts import RequestPart
from .request import Metadata
from .uploads import Files

log = logging.getLogger("executorch_mlx.serve")
DAY = 24 * 3600
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class BatchRequest(RequestPart):
    """The request of `/v1/batches`. `completion_window` has no effect: a batch begins at once, and does not expire."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: str | None = None
    metadata: Metadata | None = None


class Batch:
    """A batch that runs or has run. `object` is its description in OpenAI's API."""

    def __init__(self, object: dict[str, Any]):
        self.object, self.task = object, cast(asyncio.Task | None, None)

    @classmethod
    def of(cls, body: BatchRequest) -> Batch:
        now = int(time.time())
        object = {
            "id": f"batch_{uuid.uuid4().hex}",
            "object": "batch",
            "endpoint": body.endpoint,
            "errors": None,
            "input_file_id": body.input_file_id,
            "completion_window": body.completion_window or "24h",
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + DAY,
            **{f"{name}_at": None for name in TIMES},
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": body.metadata,
        }
        return cls(object)

    @property
    def runs(self) -> bool:
        return self.task is not None and not self.task.done()


class Batches:
    """The batches of a server. `headers`: what its middleware wants of requests, such as the API key.

    Those that a server has not finished at its end go on when the next one calls `resume`, if `files` survive.
    """

    def __init__(self, app: FastAPI, models: Models, files: Files, headers: list[tuple[bytes, bytes]]):
        self._app, self._models, self._files, self._headers = app, models, files, headers
        self._batches = {object["id"]: Batch(object) for object in files.kept("batch_*.json")}
        self._is_closing = False

    def resume(self) -> None:
        """Go on with the batches that an earlier server has not finished."""
        for batch in self._batches.values():
            if batch.object["status"] in UNFINISHED:
                batch.task = asyncio.create_task(self._run(batch))

    def start(self, body: BatchRequest) -> dict[str, Any]:
        """Start a batch, and return its object. Raises ApiError if there is no such file."""
        self._files.get(body.input_file_id, "input_file_id")
        batch = Batch.of(body)
        self._files.keep(batch.object)
        self._batches[batch.object["id"]] = batch
        batch.task = asyncio.create_task(self._run(batch))
        return batch.object

    def get(self, id: str) -> Batch:
        if id not in self._batches:
            raise ApiError(f"there is no batch {id[:100]!r}", status=404)
        return self._batches[id]

    def describe_all(self) -> dict[str, Any]:
        data = [batch.object for batch in reversed(self._batches.values())]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        return {"object": "list", "data": data, "has_more": False, **ends}

    async def cancel(self, id: str) -> dict[str, Any]:
        """End a batch. The answers so far stay."""
        batch = self.get(id)
        if batch.runs:
            self._become(batch, "cancelling")
            batch.task.cancel()
            await asyncio.wait({batch.task})
        return batch.object

    async def close(self) -> None:
        """Stop the batches that run. They stay unfinished."""
        self._is_closing = True
        running = [batch.task for batch in self._batches.values() if batch.runs]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _become(self, batch: Batch, status: str) -> None:
        batch.object |= {"status": status, f"{status}_at": int(time.time())}
        self._files.keep(batch.object)

    async def _run(self, batch: Batch) -> None:
        object = batch.object
        files = {
            name: self._files.named(f"{object['id']}_{name}.jsonl", "batch_output") for name in ("output", "error")
        }
        status = "completed"
        try:
            if object["status"] == "cancelling":  # the server ended before
                raise asyncio.CancelledError
            await self._answer(batch, files["output"].path, files["error"].path)
            self._become(batch, "finalizing")
        except asyncio.CancelledError:
            if self._is_closing:
                raise
            status = "cancelled"
        except Exception as error:  # whatever fails, the batch must not stay `in_progress`
            log.error("batch %s failed", object["id"], exc_info=error)
            object["errors"] = {"object": "list", "data": [{"code": "server_error", "message": str(error)}]}
            status = "failed"
        for name, file in files.items():
            if file.path.exists() and file.path.stat().st_size:
                object[f"{name}_file_id"] = file.object["id"]
            elif file.path.exists():
                self._files.remove(file.object["id"])
        self._become(batch, status)

    async def _answer(self, batch: Batch, output: Path, error: Path) -> None:
        """Answer the requests that have no answer yet, and write the answers to two files."""
        object = batch.object
        lines = RequestLines(self._files.get(object["input_file_id"]).path)
        with AnswerFile(output) as good, AnswerFile(error) as bad:

            def count() -> None:
                object["request_counts"] |= {"completed": len(good.answered), "failed": len(bad.answered)}

            def write(answer: dict[str, Any]) -> None:
                is_good = answer["response"] is not None and answer["response"]["status_code"] == 200
                (good if is_good else bad).write(answer)
                count()

            object["request_counts"]["total"] = sum(1 for _ in lines.ids())
            count()
            self._become(batch, "in_progress")
            answered = good.answered.keys() | bad.answered.keys()
            rest = (request for request in lines if request_number(request.id) not in answered)
            rows = [model.llm.rows for model in self._models.loaded.values()]
            worker = AppWorker(self._app, queue_width(max(rows, default=1)), object["endpoint"], self._headers)
            await answer_all(rest, worker, write)
