"""Runs the app with uvicorn."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from ..llm.errors import FieldError
from .app import create_app
from .middleware import is_loopback
from .models import Model, Models
from .settings import Settings

CLOSE_SECONDS = 5  # after the grace time: the time to send the last events of the streams
MAX_HEADER_BYTES = 64 * 1024
# Longer than clients and proxies keep idle connections, usually for up to 60 s. Otherwise they could send a request at
# the moment when the server closes the connection.
KEEP_ALIVE_SECONDS = 75


class _Server(uvicorn.Server):
    """A server that gives running answers `grace_seconds` to end at the shutdown, and ends those that take longer.

    The second SIGINT ends them at once, with an error for their clients. The third one closes the connections.
    """

    _ends_answers = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT and not self._ends_answers:
            self._ends_answers = True
            asyncio.get_running_loop().call_soon_threadsafe(self.config.app.state.service.answers.close)
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        service = self.config.app.state.service
        service.is_draining = True
        asyncio.get_running_loop().call_later(service.settings.grace_seconds, service.answers.close)
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn would cancel the requests and the app, and log that as errors
            for connection in [*self.server_state.connections]:
                connection.transport.abort()
            await self.lifespan.shutdown()
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks, timeout=CLOSE_SECONDS)


def _bind(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error


def configuration(app, settings: Settings, **options) -> uvicorn.Config:
    """Return the configuration of uvicorn for `app`. `options` are further fields."""
    timeout = int(settings.grace_seconds) + CLOSE_SECONDS
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=timeout,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        **options,
    )


def serve(
    models: Model | Models,
    *,
    name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: Settings | None = None,
    no_auth: bool = False,
) -> int:
    """Serve language models until SIGINT or SIGTERM, close them, and return the exit status, 0.

    - `models`, `name`: one model and its name in the API, or several models.
    - `host`, `port`: the address to listen on. Port 0 selects a free port.
    - `settings`: the API key and limits. `host` replaces `settings.host`.
    - `no_auth`: other machines may use the server without an API key.

    Raises OSError if the server cannot listen on the address, and ValueError if other machines can reach it and
    neither `settings.api_key` nor `no_auth` is set.
    """
    settings = Settings(**{**vars(settings or Settings()), "host": host})
    if settings.api_key is None and not no_auth and not is_loopback(host):
        problem = f"other machines can reach {host}: set an API key, or no_auth to serve without one"
        raise FieldError("host", problem=problem)
    if not isinstance(models, Models):
        models = Models.of(models, name or "model")
    app = create_app(models, settings=settings)
    bound = _bind(host, port)
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{bound.getsockname()[1]}"
    names = ", ".join(model["id"] for model in models.descriptions())
    print(f"{names}: chat page at {url}/, OpenAI API at {url}/v1", flush=True)
    with _sigterm_interrupts(), _logs_on_stderr():
        try:
            _Server(configuration(app, settings)).run(sockets=[bound])
        except KeyboardInterrupt:
            pass
        finally:
            models.close()
    return 0


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, as SIGINT does.

    After a shutdown, uvicorn restores the earlier signal handlers and raises the signal again. The default handler of
    SIGTERM would end the process at once, before the models are closed.
    """
    if threading.current_thread() is not threading.main_thread():  # other threads cannot set handlers
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class OneLine(logging.Formatter):
    """Formats a record, with its traceback, as one line: the text of others cannot look like another record."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@contextmanager
def _logs_on_stderr() -> Iterator[None]:
    """Write the access log, one JSON object per line, and the other logs to stderr. Restores the loggers at the end."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("%(message)s"))
    loggers = [logging.getLogger(name) for name in ("executorch_mlx", "uvicorn")]
    previous = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, (handlers, propagate, level) in zip(loggers, previous, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
