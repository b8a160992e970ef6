"""Starts a server in a thread of this process, on a free port."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn
from executorch_mlx.llm import LLM, Generation
from executorch_mlx.serve import create_app
from fastapi import FastAPI

NAME = "small"


@dataclass
class Served:
    url: str
    app: FastAPI
    llm: LLM
    generations: list[Generation] = field(default_factory=list)  # the answers of all requests
    delay: float = 0  # seconds before each token: answers then run long enough for what a test does meanwhile


@contextmanager
def serve(path, queue: int = 64) -> Iterator[Served]:
    llm = LLM.load(path, queue_limit=queue)
    app = create_app(llm, name=NAME, host="127.0.0.1")
    config = uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=5)
    server, bound = uvicorn.Server(config), config.bind_socket()
    served = Served(f"http://127.0.0.1:{bound.getsockname()[1]}", app, llm)
    generate = llm.generate

    def generate_and_record(*args, **options):
        if served.delay:
            options["allowed_tokens"] = lambda answer: time.sleep(served.delay)
        served.generations.append(generate(*args, **options))
        return served.generations[-1]

    llm.generate = generate_and_record
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield served
    finally:
        server.should_exit = True
        thread.join()
