"""Starts a server in a thread of this process, on a free port."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import uvicorn
from executorch_mlx.llm import LLM, Generation
from executorch_mlx.serve import Settings, create_app
from executorch_mlx.serve.server import configuration
from fastapi import FastAPI

NAME = "small"  # of the served model


def resident_bytes() -> int:
    """The memory of this process. Linux only."""
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


@dataclass
class Served:
    url: str
    app: FastAPI
    llm: LLM
    generations: list[Generation] = field(default_factory=list)  # the answers of all requests
    delay: float = 0  # seconds by which each token is delayed, so that a test can act during an answer


@contextmanager
def serve(path, queue: int = 64, tokenizer=None, **settings) -> Iterator[Served]:
    """Serve a program. `tokenizer` is a folder, or None. `settings` are fields of `Settings`."""
    llm = LLM.load(path, tokenizer, queue_limit=queue)
    settings = replace(Settings(host="127.0.0.1", grace_seconds=0), **settings)
    app = create_app(llm, name=NAME, settings=settings)
    served = Served("", app, llm)
    generate = llm.generate

    def generate_and_record(*args, **options):
        if served.delay:
            options["allowed_tokens"] = lambda answer: time.sleep(served.delay)
        served.generations.append(generate(*args, **options))
        return served.generations[-1]

    llm.generate = generate_and_record
    with listening(app, settings) as served.url:
        yield served


@contextmanager
def listening(app: FastAPI, settings: Settings) -> Iterator[str]:
    """Run an app, and yield its address."""
    config = configuration(app, settings, port=0, log_level="warning")
    server, bound = uvicorn.Server(config), config.bind_socket()
    bound.listen()  # clients can connect before the thread runs
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
