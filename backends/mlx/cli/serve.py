"""`executorch-mlx serve`"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from .. import memory
from ..collector import paused_collector
from ..llm.errors import FieldError
from . import adapter_arguments, model_arguments
from .errors import CommandError
from .extras import check_installed
from .model_arguments import parse_size

if TYPE_CHECKING:
    from ..serve import Models

KEY_VARIABLE = "EXECUTORCH_MLX_API_KEY"


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve language models with the APIs of OpenAI and Anthropic",
        description="Serve language models with the APIs of OpenAI and Anthropic below /v1 and a chat page at /. If "
        "other machines can reach the server, it needs an API key: --api-key or the environment variable "
        f"{KEY_VARIABLE}.",
    )
    model_arguments.add_to(parser, several=True)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port",
        type=_number_parser(int, 0, 65535),
        default=8000,
        help="port; 0 picks a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--name",
        action="append",
        metavar="NAME",
        help="name of the model in the API; once for each model (default: the hub id, or the name of the "
        "folder or file)",
    )
    parser.add_argument(
        "--queue",
        type=_number_parser(int, 1),
        default=64,
        metavar="N",
        help="number of requests that may wait, for each model (default: %(default)s)",
    )
    parser.add_argument(
        "--files",
        type=Path,
        metavar="FOLDER",
        help="folder for the files of /v1/files and /v1/batches, which then survive a restart (default: a temporary "
        "folder)",
    )
    _add_limits(parser)
    _add_several_models(parser)
    parser.set_defaults(run=run)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("access and limits")
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"key that clients must send (default: the environment variable {KEY_VARIABLE}, which other users of this "
        "machine do not see)",
    )
    group.add_argument(
        "--allow-adapter-updates",
        action="store_true",
        help="let clients load LoRA adapters from folders of this machine, and unload them",
    )
    group.add_argument("--strict", action="store_true", help="refuse requests with unknown fields")
    group.add_argument("--no-auth", action="store_true", help="serve other machines without an API key")
    group.add_argument(
        "--allowed-origins",
        metavar="ORIGINS",
        type=_origins,
        default=(),
        help="other origins whose web pages may use the server, separated by commas, such as https://chat.example, or "
        "* for all",
    )
    group.add_argument(
        "--allowed-hosts",
        metavar="NAMES",
        type=lambda argument: tuple(name.strip() for name in argument.split(",") if name.strip()),
        default=(),
        help="names in Host headers that are accepted beside the loopback address, separated by commas, such as "
        "chat.example behind a reverse proxy, or * for all",
    )
    group.add_argument(
        "--max-body",
        metavar="SIZE",
        type=parse_size,
        default=16 * 2**20,
        help="largest size of a request, such as 1MiB (default: 16MiB)",
    )
    seconds = _number_parser(float, 0)
    group.add_argument(
        "--request-timeout",
        metavar="SECONDS",
        type=seconds,
        default=0.0,
        help="longest time of an answer, waiting included; 0: no limit (default: 0)",
    )
    group.add_argument(
        "--stall-timeout",
        metavar="SECONDS",
        type=_number_parser(float, 1),
        default=120.0,
        help="/health fails if requests run and no step ended for this long (default: 120)",
    )
    group.add_argument(
        "--grace",
        metavar="SECONDS",
        type=seconds,
        default=30.0,
        help="time that running answers have to end at the shutdown; a second Ctrl-C ends them at once (default: 30)",
    )


def _add_several_models(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several models")
    group.add_argument(
        "--model-memory",
        metavar="SIZE",
        type=parse_size,
        help="memory that loaded models may take together, such as 8GiB; others are loaded on demand "
        "(default: no limit)",
    )
    group.add_argument(
        "--idle-timeout",
        metavar="SECONDS",
        type=_number_parser(float, 0),
        default=0.0,
        help="unload a model that no request used for this long; 0: never (default: 0)",
    )
    group.add_argument(
        "--tool-format",
        metavar="FORMAT",
        help="format of tool calls: hermes, llama3, mistral, mistral-named, gemma, gemma-tags, harmony, glm, deepseek, "
        "deepseek-v3, lfm2, cohere, kimi, minimax, minimax-m1, seed, granite or phi (default: the format of the chat "
        "template)",
    )


def _origins(argument: str) -> tuple[str, ...]:
    """Parse origins in the form in which browsers send them: without a path, not even a slash at the end."""
    origins = tuple(origin.strip().rstrip("/").lower() for origin in argument.split(",") if origin.strip())
    for origin in origins:
        if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise argparse.ArgumentTypeError(f"got {origin!r}, expected an origin such as https://chat.example, or *")
    return origins


def _number_parser(kind: type, low: float, high: float | None = None) -> Callable[[str], float]:
    """Return a function for argparse that parses a number of type `kind` in [low, high].

    Without `high`, the upper limit is 1e9, which no sensible value reaches, so that `inf` is refused.
    """

    def parse(argument: str) -> float:
        try:
            value = kind(argument)
        except ValueError:
            value = None
        if value is not None and low <= value <= (high if high is not None else 1e9):
            return value
        expected = f"{low} to {high}" if high is not None else f"at least {low}"
        raise argparse.ArgumentTypeError(f"got {argument!r}, expected {expected}")

    return parse


def run(options: argparse.Namespace) -> int:
    check_installed("serve", "serve", ("fastapi", "uvicorn", "prometheus_client"))
    from ..serve import Settings

    settings = Settings(
        api_key=options.api_key or os.environ.get(KEY_VARIABLE) or None,
        allowed_origins=options.allowed_origins,
        allowed_hosts=options.allowed_hosts,
        max_body_bytes=options.max_body,
        request_seconds=options.request_timeout,
        allow_adapter_updates=options.allow_adapter_updates,
        strict=options.strict,
        files_folder=options.files,
        stall_seconds=options.stall_timeout,
        grace_seconds=options.grace,
    )
    with ThreadPoolExecutor(1) as imports, paused_collector():
        # Python imports the app while the engine loads the models, which takes about as long.
        server = imports.submit(import_module, "..serve.server", __package__)
        models = _models(options)
    try:
        return server.result().serve(
            models, host=options.host, port=options.port, settings=settings, no_auth=options.no_auth
        )
    except FieldError as error:
        remedy = "set --api-key, or --no-auth to serve without one"
        raise CommandError(f"--host: other machines can reach {options.host}: {remedy}") from error


def _models(options: argparse.Namespace) -> Models:
    """Return the models that the command line names. Each was loaded once, to report errors at the start."""
    from ..serve import Models
    from ..serve.formats import FORMATS
    from ..serve.models import load_model

    if options.name and len(options.name) != len(options.models):
        raise CommandError(
            f"--name: got {len(options.name)} names, expected one for each of {len(options.models)} models"
        )
    if options.tokenizer is not None and len(options.models) > 1:
        raise CommandError("--tokenizer: got several models, expected one")
    adapters = adapter_arguments.named(options)
    if adapters and len(options.models) > 1:
        raise CommandError("--adapter: got several models, expected one")
    if options.tool_format not in (None, *FORMATS):
        raise CommandError(f"--tool-format: got {options.tool_format!r}, expected one of {', '.join(FORMATS)}")
    if options.memory_limit is not None:
        memory.set_memory_limit(options.memory_limit)
    found = [model_arguments.find_model(model, options) for model in options.models]
    draft = model_arguments.find_draft(options)
    models = Models(options.model_memory, options.idle_timeout)
    settings = {
        "draft": draft,
        "chat_template": options.chat_template,
        "device": options.device,
        "queue_limit": options.queue,
    }
    for name, path in zip(options.name or [model.name for model in found], [model.path for model in found]):
        load = partial(load_model, path, options.tokenizer, **settings)
        try:
            models.add(name, load, path.stat().st_size, options.tool_format)
        except FieldError as error:
            raise CommandError(error.about("--name")) from error
        for adapter in adapters:
            adapter_arguments.read(adapter)  # for its errors
            try:
                models.add_adapter(adapter.name, adapter.path.resolve(), name)
            except FieldError as error:
                raise CommandError(error.about("--adapter")) from error
    with model_arguments.loading():
        models.load_all()
    return models
