"""Runs the app with uvicorn."""

from __future__ import annotations

import socket

import uvicorn

from ..llm import LLM
from .app import create_app

SHUTDOWN_TIMEOUT = 5  # seconds that open connections get to finish


class _Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # First end the running answers: uvicorn waits for their streams.
        self.config.app.state.worker.close()
        await super().shutdown(sockets)


def _bind(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error


def serve(llm: LLM, *, name: str, host: str = "127.0.0.1", port: int = 8000, queue: int = 64) -> int:
    """Serve `llm` until SIGINT or SIGTERM. Return the exit status.

    - `name`: what clients call the model.
    - `host`, `port`: the address to listen on. Port 0 selects a free port.
    - `queue`: how many requests may wait.

    Raises OSError if the server cannot listen on the address.
    """
    app = create_app(llm, name=name, queue=queue, host=host)
    config = uvicorn.Config(app, timeout_graceful_shutdown=SHUTDOWN_TIMEOUT)
    bound = _bind(host, port)
    url = f"http://{host}:{bound.getsockname()[1]}"
    print(f"{name}: chat page at {url}/, OpenAI API at {url}/v1", flush=True)
    try:
        _Server(config).run(sockets=[bound])
    except KeyboardInterrupt:  # uvicorn raises the signal again after the shutdown
        pass
    return 0
