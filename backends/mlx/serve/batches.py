"""`/v1/batches`: files of requests that the server answers, with the loop of the batch command."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from typing import Any, Literal

from fastapi import FastAPI

from ..batch import RequestLines, answer_all
from .app_worker import AppWorker, queue_width
from .errors import ApiError
from .models import Models
from .parts import RequestPart
from .request import Metadata
from .uploads import Files

log = logging.getLogger("executorch_mlx.serve")
DAY = 24 * 3600
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class BatchRequest(RequestPart):
    """The request of `/v1/batches`. `completion_window` has no effect: a batch begins at once, and does not expire."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: str | None = None
    metadata: Metadata | None = None


class Batch:
    """A batch that runs or has run. `object` is its description in OpenAI's API."""

    def __init__(self, body: BatchRequest):
        now = int(time.time())
        self.task: asyncio.Task | None = None
        self.object: dict[str, Any] = {
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

    def become(self, status: str) -> None:
        self.object |= {"status": status, f"{status}_at": int(time.time())}

    @property
    def runs(self) -> bool:
        return self.task is not None and not self.task.done()


class Batches:
    """The batches of a server. `headers`: what its middleware wants of requests, such as the API key."""

    def __init__(self, app: FastAPI, models: Models, files: Files, headers: list[tuple[bytes, bytes]]):
        self._app, self._models, self._files, self._headers = app, models, files, headers
        self._batches: dict[str, Batch] = {}

    def start(self, body: BatchRequest) -> dict[str, Any]:
        """Start a batch, and return its object. Raises ApiError if there is no such file."""
        self._files.get(body.input_file_id, "input_file_id")
        batch = Batch(body)
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
            batch.become("cancelling")
            batch.task.cancel()
            await asyncio.wait({batch.task})
        return batch.object

    def close(self) -> None:
        for batch in self._batches.values():
            if batch.runs:
                batch.task.cancel()

    async def _run(self, batch: Batch) -> None:
        object = batch.object
        lines = RequestLines(self._files.get(object["input_file_id"]).path)
        output = {name: self._files.add(f"{object['id']}_{name}.jsonl", "batch_output") for name in ("output", "error")}
        try:
            object["request_counts"]["total"] = sum(1 for _ in lines.ids())
            batch.become("in_progress")
            with open(output["output"].path, "ab") as good, open(output["error"].path, "ab") as bad:

                def write(answer: dict[str, Any]) -> None:
                    is_good = answer["response"] is not None and answer["response"]["status_code"] == 200
                    object["request_counts"]["completed" if is_good else "failed"] += 1
                    (good if is_good else bad).write(json.dumps(answer).encode() + b"\n")

                rows = [model.llm.rows for model in self._models.loaded.values()]
                worker = AppWorker(self._app, queue_width(max(rows, default=1)), object["endpoint"], self._headers)
                await answer_all(lines, worker, write)
            batch.become("finalizing")
            batch.become("completed")
        except asyncio.CancelledError:
            batch.become("cancelled")
            raise
        except Exception as error:  # whatever fails, the batch must not stay `in_progress`
            log.error("batch %s failed", object["id"], exc_info=error)
            batch.become("failed")
            object["errors"] = {"object": "list", "data": [{"code": "server_error", "message": str(error)}]}
        finally:
            for name, file in output.items():
                if file.path.exists() and file.path.stat().st_size:
                    object[f"{name}_file_id"] = file.object["id"]
                elif file.path.exists():
                    self._files.remove(file.object["id"])
