"""`executorch-mlx export`"""

from __future__ import annotations

import argparse
import atexit
import collections
import contextlib
import gc
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..llm.export_options import ENCODER, HEAD_OPTIONS, OPTIONS, SPEECH, TEXT, ExportOptions, HeadConfig, OptionError
from . import export_defaults
from .errors import CommandError
from .export_arguments import add_options, flag, given
from .extras import EXPORT, check_installed
from .files import CHECKPOINTS, check_checkpoint

if TYPE_CHECKING:
    from ..encoders.export import ExportedEncoder
    from ..llm.export import ExportedLLM


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "export",
        help="export a language model, an encoder or a speech model to a .pte file",
        description="Export a Hugging Face causal language model to a .pte file, with KV caches and a sampling head. A "
        "speech model (Whisper, Moonshine) becomes a program that takes sound, and an encoder (sentence-transformers, "
        "BERT, CLIP) one that returns vectors or scores.",
    )
    parser.add_argument("model", metavar="MODEL", help=CHECKPOINTS)
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE", help=".pte file to write")
    parser.add_argument("--expect", choices=(TEXT, SPEECH, ENCODER), help=argparse.SUPPRESS)  # see export_arguments
    add_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    check_installed("export", "export", EXPORT)
    values = given(options)
    _check_output(options.output)
    _arguments(values)  # before any slow step
    check_checkpoint(options.model, CHECKPOINTS)
    atexit.register(gc.freeze)  # else Python searches all objects for cycles when it ends, which takes seconds
    progress = _Progress()
    with progress.step("import"):
        from ..encoders.export import find_encoder, judge
        from ..llm.export import VerificationError
        from ..llm.export.checkpoints.open import find_checkpoint

        _quiet_transformers()
    try:
        with progress:
            folder = find_checkpoint(options.model)
            encoder = (judge if values.get("rerank") else find_encoder)(folder) if folder.is_dir() else None
            exported: Any
            if encoder is not None:
                _check_kind(values, ENCODER, options)
                exported = _export_encoder(encoder, values, progress)
            else:
                exported = _export_decoder(options, values, progress)
            progress.begin("write and verify" if values.get("verify", True) else "write")
            size = exported.save(options.output)
    except (ValueError, VerificationError) as error:
        raise CommandError(error) from error
    if exported.check:
        progress.note(exported.check.cost())
    _print_common(exported)
    if encoder is None:
        _print_decoder(exported)
    if exported.check:
        print(f"verified     {exported.check}")
    print(f"{options.output}: {size / 1e6:.1f} MB")
    return 0


def _export_decoder(options: argparse.Namespace, values: dict[str, Any], progress: _Progress) -> ExportedLLM:
    """Export a language model or a speech model."""
    from ..llm.export import export_llm
    from ..llm.export.checkpoints.open import opened
    from ..llm.speech.export import export_speech, is_speech

    checkpoint = opened(options.model, "export_llm")
    kind, export = (SPEECH, export_speech) if is_speech(checkpoint) else (TEXT, export_llm)
    _check_kind(values, kind, options)
    if kind == TEXT:
        values |= export_defaults.defaults(checkpoint, values)
        if hint := export_defaults.memory_hint(checkpoint, values):
            progress.note(hint)
    return export(checkpoint, **_arguments(values), progress=progress.begin)


def _export_encoder(encoder: Any, values: dict[str, Any], progress: _Progress) -> ExportedEncoder:
    from ..encoders.export import export_encoder

    return export_encoder(encoder, **_arguments(values), progress=progress.begin)


def _quiet_transformers() -> None:
    """Keep bars and warnings of transformers from the terminal, such as that a calibration text is long."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the export. Raises CommandError for an invalid combination."""
    head = {name: value for name, value in values.items() if name in HEAD_OPTIONS}
    try:
        arguments = {n: value for n, value in values.items() if n not in head} | {"head": HeadConfig(**head)}
        ExportOptions(**arguments)
    except OptionError as error:
        name = flag(error.name.removeprefix("head."))
        raise CommandError(f"{name}: expected --{error.needs} as well" if error.needs else error.about(name)) from error
    if values.get("outputs") == "logits" and not values.get("seed", True):
        raise CommandError("--unseeded: got --outputs logits, expected tokens or both")
    return arguments


def _check_output(output: Path) -> None:
    """Raise CommandError if the file cannot be written."""
    is_other = output.exists() and not output.is_file()
    if is_other or not output.parent.is_dir():
        raise CommandError(f"--output: got {output}, expected a file in an existing folder")
    try:
        tempfile.TemporaryFile(dir=output.parent).close()
    except OSError as error:
        raise CommandError(f"--output: cannot write to the folder of {output}: {error.strerror}") from error


def _check_kind(values: Mapping[str, Any], kind: str, options: argparse.Namespace) -> None:
    """Raise CommandError if a command needs another kind of model, or for an option that this kind does not take."""
    model, name_of = options.model, {TEXT: "a language model", SPEECH: "a speech model", ENCODER: "an encoder"}
    if options.expect not in (None, kind):
        command = {TEXT: "run", SPEECH: "transcribe", ENCODER: "embed"}[kind]
        raise CommandError(
            f"{model}: got {name_of[kind]}, expected {name_of[options.expect]}; executorch-mlx {command} runs it"
        )
    for name, value in values.items():
        spec = OPTIONS[name]
        if kind not in spec.models and value != spec.default:
            raise CommandError(f"{flag(name)}: expected {name_of[spec.models[0]]}, got {model}, {name_of[kind]}")


def _print_common(exported: ExportedLLM | ExportedEncoder) -> None:
    print(exported.report)
    print(f"methods      {', '.join(exported.methods)}")
    values = {k: v for k, v in exported.metadata.items() if isinstance(v, (bool, int, str, list))}
    print(f"metadata     {', '.join(f'{k}={v}' for k, v in values.items())}")
    if exported.unquantized:
        names = ", ".join(exported.unquantized)
        print(f"unquantized  {names}: the length of their weights' rows is not a multiple of any group size")
    for note in exported.notes:
        print(f"note         {note}")


def _print_decoder(exported: ExportedLLM) -> None:
    if exported.perplexity:
        print(f"perplexity   {exported.perplexity}")
    counts = collections.Counter(exported.cache_values_per_token)
    layers = ", ".join(f"{count} layers of {values}" for values, count in counts.items())
    print(f"KV caches    {exported.cache_bytes / 1e6:.1f} MB; values per token: {layers or 'none'}")
    if exported.kv_quantization:
        print(f"quantized    {exported.kv_quantization}")


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
