"""`executorch-mlx export`"""

from __future__ import annotations

import argparse
import atexit
import collections
import contextlib
import gc
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..llm.export_options import HEAD_OPTIONS, OPTIONS, SPEECH, TEXT, ExportOptions, HeadConfig, OptionError
from .model_arguments import CommandError

if TYPE_CHECKING:
    from ..llm.export import ExportedLLM

# For a program that returns only tokens and is not portable. docs/performance.md says what a row costs.
DEFAULT_BATCH = 4


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "export",
        help="export a language model or a speech model to a .pte file",
        description="Export a Hugging Face causal language model to a .pte file, with KV caches and a sampling head. A "
        "speech model (Whisper, Moonshine) becomes a program that takes sound.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="checkpoint folder (Hugging Face or mlx-lm), GGUF file, or hub id"
    )
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE", help=".pte file to write")
    _add_options(parser)
    parser.set_defaults(run=run)


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the table. Those that are not given are missing in the result of the parser."""
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for name, spec in OPTIONS.items():
        if spec.group not in groups:
            groups[spec.group] = parser.add_argument_group(spec.group)
        group = groups[spec.group]
        if len(spec.flags) > 1:
            group = group.add_mutually_exclusive_group()
        for flag, value in spec.flags.items():
            default = " (default)" if value == spec.default else ""
            group.add_argument(
                flag, dest=name, action="store_const", const=value, default=argparse.SUPPRESS, help=spec.help + default
            )
        if not spec.flags:
            default = spec.default_text or spec.default
            group.add_argument(
                _flag(name),
                type=spec.type,
                choices=spec.choices or None,
                metavar=spec.metavar,
                default=argparse.SUPPRESS,
                help=spec.help + (f" (default: {default})" if default else ""),
            )


def _flag(name: str) -> str:
    """Return the flag of an option."""
    spec = OPTIONS[name]
    return next((flag for flag, value in spec.flags.items() if value != spec.default), f"--{name.replace('_', '-')}")


def run(options: argparse.Namespace) -> int:
    given = {name: getattr(options, name) for name in OPTIONS if name in options}
    arguments = _arguments(given, options.output)
    atexit.register(gc.freeze)  # else Python searches all objects for cycles when it ends, which takes seconds
    progress = _Progress()
    with progress.step("import"):
        from ..llm.export import VerificationError, export_llm
        from ..llm.export.checkpoints.open import opened
        from ..llm.speech.export import export_speech, is_speech
    try:
        with progress:
            checkpoint = opened(options.model, "export_llm")
            kind, export = (SPEECH, export_speech) if is_speech(checkpoint) else (TEXT, export_llm)
            _check_kind(given, kind, options.model)
            if kind == TEXT and not given.get("portable") and given.get("outputs", "tokens") == "tokens":
                arguments.setdefault("batch", DEFAULT_BATCH)
            exported = export(checkpoint, **arguments, progress=progress.begin)
            progress.begin("write and verify" if given.get("verify", True) else "write")
            size = exported.save(options.output)
    except (ValueError, VerificationError) as error:
        raise CommandError(error) from error
    if exported.check:
        progress.note(exported.check.cost())
    _print_summary(exported)
    print(f"{options.output}: {size / 1e6:.1f} MB")
    return 0


def _arguments(given: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """Return the options of the export. Raises CommandError for an invalid combination, before any slow step."""
    head = {name: value for name, value in given.items() if name in HEAD_OPTIONS}
    try:
        arguments = {n: value for n, value in given.items() if n not in head} | {"head": HeadConfig(**head)}
        ExportOptions(**arguments)
    except OptionError as error:
        needed = f"{_flag(error.name)}: expected --{error.needs} as well" if error.needs else error
        raise CommandError(needed) from error
    if given.get("outputs") == "logits" and not given.get("seed", True):
        raise CommandError("--unseeded: got --outputs logits, expected tokens or both")
    is_other = output.exists() and not output.is_file()
    if is_other or not output.parent.is_dir():
        raise CommandError(f"--output: got {output}, expected a file in an existing folder")
    return arguments


def _check_kind(given: Mapping[str, Any], kind: str, model: str) -> None:
    """Raise CommandError for an option that this kind of model does not take."""
    for name, value in given.items():
        spec = OPTIONS[name]
        if kind not in spec.models and value != spec.default:
            raise CommandError(f"{_flag(name)}: expected a {spec.models[0]} model, got {model}, a {kind} model")


def _print_summary(exported: ExportedLLM) -> None:
    print(exported.report)
    print(f"methods      {', '.join(exported.methods)}")
    values = {k: v for k, v in exported.metadata.items() if isinstance(v, (bool, int, list))}
    print(f"metadata     {', '.join(f'{k}={v}' for k, v in values.items())}")
    if exported.unquantized:
        names = ", ".join(exported.unquantized)
        print(f"unquantized  {names}: the length of their weights' rows is not a multiple of any group size")
    if exported.perplexity:
        print(f"perplexity   {exported.perplexity}")
    for note in exported.notes:
        print(f"note         {note}")
    counts = collections.Counter(exported.cache_values_per_token)
    layers = ", ".join(f"{count} layers of {values}" for values, count in counts.items())
    print(f"KV caches    {exported.cache_bytes / 1e6:.1f} MB; values per token: {layers or 'none'}")
    if exported.kv_quantization:
        print(f"quantized    {exported.kv_quantization}")
    if exported.check:
        print(f"verified     {exported.check}")


class _Progress:
    """Shows the current step on standard error while it runs, and prints how long it took when it ends."""

    def __init__(self):
        from rich.console import Console

        self.console = Console(stderr=True)
        self.steps = contextlib.ExitStack()

    def begin(self, name: str) -> None:
        self.steps.close()
        self.steps.enter_context(self.step(name))

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        with self.console.status(name):
            yield
        self.note(f"{name}: {time.perf_counter() - started:.1f} s")

    def note(self, line: str) -> None:
        self.console.print(line, style="dim", highlight=False)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error) -> None:
        self.steps.__exit__(*error)
