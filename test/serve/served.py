"""Starts a server in a thread of this process, on a free port."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn
from executorch_mlx.llm import LLM, Generation
from executorch_mlx.serve import create_app
from executorch_mlx.serve.worker import Worker

NAME = "small"


@dataclass
class Served:
    url: str
    llm: LLM
    worker: Worker
    generations: list[Generation] = field(default_factory=list)  # everything submitted to the worker


@contextmanager
def serve(path, queue: int = 64) -> Iterator[Served]:
    llm = LLM.load(path)
    app = create_app(llm, name=NAME, queue=queue, host="127.0.0.1")
    config = uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=5)
    server, bound = uvicorn.Server(config), config.bind_socket()
    served = Served(f"http://127.0.0.1:{bound.getsockname()[1]}", llm, app.state.worker)
    submit = served.worker.submit

    def record_and_submit(generation):
        served.generations.append(generation)
        return submit(generation)

    served.worker.submit = record_and_submit
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield served
    finally:
        server.should_exit = True
        thread.join()
