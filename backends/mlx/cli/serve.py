"""`executorch-mlx serve`"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.util import find_spec

from . import model_arguments


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a language model with an OpenAI-compatible API",
        description="Serve a language model with an OpenAI-compatible API below /v1 and a chat page at /. The server "
        "has no authentication: with --host 0.0.0.0 everyone who can reach this machine can use it.",
    )
    model_arguments.add_to(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=_integer(0, 65535), default=8000, help="port; 0 picks a free one (default: %(default)s)"
    )
    parser.add_argument("--name", help="name of the model in the API (default: the file name without .pte)")
    parser.add_argument(
        "--queue", type=_integer(1, None), default=64, metavar="N",
        help="number of requests that may wait (default: %(default)s)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def _integer(low: int, high: int | None) -> Callable[[str], int]:
    """Returns a parser of an integer argument in [low, high], for argparse. `high` may be None, for no limit."""
    def parse(argument: str) -> int:
        if argument.lstrip("-").isdecimal() and low <= int(argument) and (high is None or int(argument) <= high):
            return int(argument)
        expected = f"{low} to {high}" if high is not None else f"at least {low}"
        raise argparse.ArgumentTypeError(f"got {argument!r}, expected {expected}")

    return parse


def run(options: argparse.Namespace) -> int:
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise model_arguments.CommandError(f"serve needs {' and '.join(missing)}: pip install 'executorch-mlx[serve]'")
    llm = model_arguments.load(options, queue_limit=options.queue)
    from ..serve import serve

    name = options.name or options.model.stem
    return serve(llm, name=name, host=options.host, port=options.port)
