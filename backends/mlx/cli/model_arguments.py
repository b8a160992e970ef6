"""The arguments that name a model, and loading it. A checkpoint is exported, unless the store has its program."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import memory
from ..llm.export_options import TEXT
from ..llm.hub import HubError
from ..loader import load_delegate
from . import adapter_arguments, export_arguments, store
from .adapter_arguments import AdapterFolder
from .errors import CommandError, ReportedError
from .export_arguments import RUN_OPTIONS
from .extras import EXPORT, check_installed
from .files import MODELS, check_checkpoint, check_program, is_program

if TYPE_CHECKING:
    from ..encoders import Encoder
    from ..llm import LLM

_DEVICE_VARIABLE = "EXECUTORCH_MLX_DEVICE"


def add_to(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Add the arguments. `several`: the command takes several models, as the list `models`."""
    add_model(parser, "models" if several else "model", nargs="+" if several else None)
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        type=Path,
        help="Hugging Face folder with a tokenizer (default: the tokenizer of MODEL)",
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", type=Path, help="chat template in Jinja (default: that of the tokenizer)"
    )
    parser.add_argument(
        "--draft-model",
        metavar="DRAFT",
        help="smaller model with the same tokenizer, which guesses tokens; the answers stay the same",
    )
    parser.add_argument(
        "--memory-limit",
        metavar="SIZE",
        type=parse_size,
        help="limit of the memory for weights, KV caches and results together, such as 2GiB (default: no limit)",
    )
    add_device(parser)
    adapter_arguments.add_to(parser)
    add_export_options(parser, tuple(name for name in RUN_OPTIONS if name != "adapter"))


def add_model(parser: argparse.ArgumentParser, name: str = "model", nargs: str | None = None) -> None:
    """Add the argument for a model that is exported if necessary."""
    parser.add_argument(
        name, metavar="MODEL", nargs=nargs, help=f"{MODELS}; a checkpoint is exported once, into a cache"
    )


def add_export_options(parser: argparse.ArgumentParser, names: tuple[str, ...] = RUN_OPTIONS) -> None:
    export_arguments.add_options(parser, names, "export, if MODEL is a checkpoint")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "gpu"), help="device to run on (default: the GPU if there is one)")


def parse_size(text: str) -> int:
    """Return the number of bytes in a size such as 2GiB, 512MiB, 1.5GB or 1000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([KMGT])(i?)B?|B?)", text, re.IGNORECASE)
    if match:
        number, prefix, binary = match.groups()
        factor = (1024 if binary else 1000) ** " KMGT".index((prefix or " ").upper())
        bytes = float(number) * factor
        if 1 <= bytes < 2**63 and (prefix or bytes.is_integer()):
            return int(bytes)
    raise argparse.ArgumentTypeError(f"got {text!r}, expected a size such as 2GiB, 512MiB or 1000000 (bytes)")


@dataclass(frozen=True)
class Model:
    """A program that a command runs: its path, and the name of the model for people."""

    path: Path
    name: str


def find_model(model: str, options: argparse.Namespace, kind: str | None = None) -> Model:
    """Return the program of a model that the command line names. Exports a checkpoint unless the store has its program.

    A checkpoint of another `kind` than this is refused before it is exported. None: any kind.

    Raises CommandError, ReportedError or OSError if there is no such model, or if it cannot be exported.
    """
    _check_files(options)
    _check_device(getattr(options, "device", None))
    values = export_arguments.given(options, RUN_OPTIONS)
    adapters: list[AdapterFolder] = []
    if isinstance(values.get("adapter"), list):  # not of a command that only merges one
        del values["adapter"]
        values |= adapter_arguments.merged(options)
        adapters = adapter_arguments.named(options)
    path = Path(model)
    if path.is_file() and (is_program(path) or path.suffix == ".pte"):
        check_program(path)
        if values:
            name = export_arguments.flag(next(iter(values)))
            hint = "write NAME=DIR to load an adapter" if name == "--adapter" else "see executorch-mlx export"
            raise CommandError(f"{name}: {model} is exported already, expected a checkpoint; {hint}")
        return Model(path, path.stem)
    check_checkpoint(model)
    values |= adapter_arguments.room(adapters, values)
    return Model((store.find(model, values) or export_model(model, values, kind)).path, store.name_of(model))


def _check_files(options: argparse.Namespace) -> None:
    """Raise CommandError if a file that an option names does not exist."""
    for name in ("tokenizer", "chat_template"):
        path = getattr(options, name, None)
        if path is not None and not path.exists():
            raise CommandError(f"--{name.replace('_', '-')}: {path}: No such file or folder")


def _check_device(device: str | None) -> None:
    """Raise CommandError if the command shall run on a GPU and there is none: an export would be in vain."""
    if (device or os.environ.get(_DEVICE_VARIABLE)) != "gpu":
        return
    load_delegate()  # before mlx is imported
    import mlx.core as mx

    if not mx.is_available(mx.gpu):
        raise CommandError(f"{'--device' if device else _DEVICE_VARIABLE}: got gpu, but MLX finds no GPU here")


def export_model(model: str, values: dict[str, Any], kind: str | None = None) -> store.Export:
    """Export a checkpoint into the store, in a process of its own, unless the store has its program.

    Raises CommandError, ReportedError or OSError.
    """
    check_installed(f"{model} has to be exported, which", "export", EXPORT)
    sources = [Path(values[name]) for name in ("adapter", "calibrate") if name in values]

    def run(checkpoint: Path, program: Path, lock: int) -> None:
        # The process keeps the lock, also if this one is killed. Its memory is free before the program runs.
        note(f"{model}: exporting it once, for later runs")
        command = export_arguments.command(checkpoint, program, values, kind)
        code = subprocess.run(command, stdout=subprocess.DEVNULL, pass_fds=[lock], check=False).returncode
        if code:
            raise ReportedError(code)

    try:
        return store.export(model, values, sources, run, note)
    except HubError as error:
        raise CommandError(str(error)) from error


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def loading(path: Path | None = None) -> Iterator[None]:
    """A context manager: turns the errors of a load into errors of the command, which begin with `path`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise CommandError(f"{error.name} is not installed: pip install 'executorch-mlx[export]'") from error
    except (ValueError, RuntimeError) as error:
        name = "" if path is None else f"{path}: "
        raise CommandError(name + str(error).removeprefix(name)) from error


def load(options: argparse.Namespace, **settings: Any) -> LLM:
    """Load the model that the command line names and return it. Raises CommandError, ReportedError or OSError.

    `settings` are further arguments of `LLM.load`.
    """
    from ..llm import LLM

    return _load(LLM.load, options, TEXT, **settings)


def load_any(options: argparse.Namespace) -> LLM | Encoder:
    """Like `load`, but the model may also be an encoder."""
    from ..serve.models import load_model

    return _load(load_model, options, None)


def _load(load: Callable[..., Any], options: argparse.Namespace, kind: str | None, **settings: Any) -> Any:
    model = find_model(options.model, options, kind)
    draft = find_draft(options)
    if options.memory_limit is not None:
        memory.set_memory_limit(options.memory_limit)
    with loading(model.path):
        loaded = load(
            model.path,
            options.tokenizer,
            draft=draft,
            device=options.device,
            chat_template=options.chat_template,
            **settings,
        )
    if adapters := adapter_arguments.named(options):
        if not hasattr(loaded, "load_adapter"):
            raise CommandError(f"--adapter: got {options.model}, expected a language model")
        adapter_arguments.load(loaded, adapters)
    return loaded


def find_draft(options: argparse.Namespace) -> Path | None:
    """Return the program of the draft model, or None. A checkpoint is exported with the defaults."""
    return None if options.draft_model is None else find_model(options.draft_model, argparse.Namespace(), TEXT).path
