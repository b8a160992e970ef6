"""Runs the app on uvicorn."""

from __future__ import annotations

import socket

import uvicorn

from ..llm import LLM
from .app import create_app

PATIENCE = 5  # seconds that connections get to end when the server does


class _Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # First of all: uvicorn waits for the streams on their way.
        self.config.app.state.worker.close()
        await super().shutdown(sockets)


def _bind(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen at {host}:{port}: {error.strerror}") from error


def serve(llm: LLM, *, name: str, host: str = "127.0.0.1", port: int = 8000, queue: int = 64) -> int:
    """Serves `llm` until SIGINT or SIGTERM; returns the exit code. OSError names an address that cannot be had."""
    app = create_app(llm, name=name, queue=queue, host=host)
    config = uvicorn.Config(app, timeout_graceful_shutdown=PATIENCE)
    bound = _bind(host, port)
    print(f"{name}: chat at http://{host}:{bound.getsockname()[1]}/, OpenAI's API below /v1", flush=True)
    try:
        _Server(config).run(sockets=[bound])
    except KeyboardInterrupt:  # uvicorn passes on what ended it
        pass
    return 0
