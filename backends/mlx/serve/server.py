"""Runs the app with uvicorn."""

from __future__ import annotations

import socket

import uvicorn

from ..llm import LLM
from .app import create_app

SHUTDOWN_TIMEOUT = 5  # the seconds that uvicorn waits for open connections at the shutdown


class _Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # The answers are ended first, because uvicorn waits until their streams end.
        self.config.app.state.answers.close()
        await super().shutdown(sockets)


def _bind(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error


def serve(llm: LLM, *, name: str, host: str = "127.0.0.1", port: int = 8000) -> int:
    """Serve `llm` until SIGINT or SIGTERM, and return the exit status, 0.

    - `name`: the name of the model in the API.
    - `host`, `port`: the address to listen on. Port 0 selects a free port.

    Raises OSError if the server cannot listen on the address.
    """
    app = create_app(llm, name=name, host=host)
    config = uvicorn.Config(app, timeout_graceful_shutdown=SHUTDOWN_TIMEOUT)
    bound = _bind(host, port)
    url = f"http://{host}:{bound.getsockname()[1]}"
    print(f"{name}: chat page at {url}/, OpenAI API at {url}/v1", flush=True)
    try:
        _Server(config).run(sockets=[bound])
    except KeyboardInterrupt:  # after the shutdown, uvicorn raises SIGINT once more
        pass
    return 0
