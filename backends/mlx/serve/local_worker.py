"""`local_worker`: an app of the server with one model, for the requests of a batch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..batch.request_file import MAX_LINE
from ..encoders import Encoder
from ..llm import LLM
from .app import create_app
from .app_worker import AppWorker, queue_width
from .encoder_queue import TEXTS_AT_A_TIME
from .in_process import running
from .settings import Settings


@asynccontextmanager
async def local_worker(model: LLM | Encoder, name: str) -> AsyncIterator[AppWorker]:
    """A context manager: yields a worker that answers with `model`. `name` is its name in the requests."""
    width = TEXTS_AT_A_TIME if isinstance(model, Encoder) else queue_width(model.rows)
    async with running(create_app(model, name=name, settings=Settings(max_body_bytes=MAX_LINE))) as app:
        yield AppWorker(app, width)
