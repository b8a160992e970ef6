"""`local_worker`: an app of the server with one model, for the requests of a batch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..batch.request_file import MAX_LINE
from ..llm import LLM
from .app import create_app
from .app_worker import AppWorker, queue_width
from .in_process import running
from .settings import Settings


@asynccontextmanager
async def local_worker(llm: LLM, name: str) -> AsyncIterator[AppWorker]:
    """A context manager: yields a worker that answers with `llm`. `name` is the name of the model in the requests."""
    async with running(create_app(llm, name=name, settings=Settings(max_body_bytes=MAX_LINE))) as app:
        yield AppWorker(app, queue_width(llm.rows))
