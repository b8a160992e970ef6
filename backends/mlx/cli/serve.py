"""executorch-mlx serve MODEL.pte"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.util import find_spec

from . import model


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a language model to OpenAI clients",
        description="Serves a language model by OpenAI's API below /v1, with a page to chat at /. It knows no passwords: "
        "with --host 0.0.0.0 everybody who reaches this machine may use it.",
    )
    model.add_to(parser)
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (%(default)s)")
    parser.add_argument("--port", type=_whole(0, 65535), default=8000, help="0 takes a free one (%(default)s)")
    parser.add_argument("--name", help="what clients call the model; by default the file's name")
    parser.add_argument("--queue", type=_whole(1, None), default=64, metavar="N", help="requests that may wait at most (%(default)s)")
    parser.set_defaults(run=run)


def _whole(low: int, high: int | None) -> Callable[[str], int]:
    def read(text: str) -> int:
        if text.lstrip("-").isdecimal() and low <= int(text) and (high is None or int(text) <= high):
            return int(text)
        upwards = f"{low} to {high}" if high is not None else f"{low} or more"
        raise argparse.ArgumentTypeError(f"{text!r}, expected {upwards}")

    return read


def run(options: argparse.Namespace) -> int:
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise model.CommandError(f"serve needs {' and '.join(missing)}: pip install 'executorch-mlx[serve]'")
    llm = model.load(options)
    from ..serve import serve

    return serve(llm, name=options.name or options.model.stem, host=options.host, port=options.port, queue=options.queue)
