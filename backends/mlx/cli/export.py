"""`executorch-mlx export`"""

from __future__ import annotations

import argparse
import atexit
import collections
import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    _add_weights(parser.add_argument_group("weights").add_argument)
    _add_sizes(parser.add_argument_group("sizes").add_argument)
    _add_outputs(parser.add_argument_group("outputs and sampling"))
    parser.add_argument(
        "--allow-extensions", action="store_true",
        help="use IR nodes that ExecuTorch's own MLX delegate lacks; that delegate then cannot run the file",
    )  # fmt: skip
    parser.add_argument(
        "--portable", action="store_true",
        help="write a file that gives the same values on ExecuTorch's own MLX delegate, which phones have: one method, "
             "one row, no speculation; what would differ there is an error",
    )  # fmt: skip
    parser.add_argument(
        "--no-verify", dest="verify", action="store_false",
        help="write the file without comparing it with the eager model",
    )  # fmt: skip
    parser.set_defaults(run=run)


# fmt: off
def _add_weights(add: Callable) -> None:
    add("--dtype", choices=("float32", "float16", "bfloat16"), default="float32",
        help="dtype of weights and computation (default: %(default)s)")
    add("--quantize", choices=("none", "int4", "int8", "mixed", "nvfp4", "mxfp4", "mxfp8"), default="none",
        help="quantize linear layers and embeddings; mixed has 4 bits and keeps sensitive layers wider (default: "
             "%(default)s)")
    add("--group-size", type=int, choices=(32, 64, 128), default=argparse.SUPPRESS,
        help="number of weights that share a quantization scale (default: 32)")
    add("--calibrate", type=Path, metavar="FILE",
        help="measure the model on the text in this file instead of a part of Python's documentation; with int4, int8 "
             "and mixed, also tune the weights on this text, which takes longer")
    add("--activations", choices=("float", "int8"), default="float",
        help="int8 rounds the inputs of the quantized linear layers to 8 bits, which is faster on a CPU with "
             "--allow-extensions (default: %(default)s)")
    add("--adapter", type=Path, metavar="DIR",
        help="merge the LoRA adapter in this folder of peft or mlx-lm")


def _add_sizes(add: Callable) -> None:
    add("--max-context-len", type=int, metavar="N",
        help="capacity of the KV caches in positions (default: the model's limit, but at most 4096)")
    add("--sliding-window", type=_parse_window, default="auto", metavar="N",
        help="attention window of every layer in positions, 0 for none (default: auto, as in the model's config)")
    add("--chunk", type=int, metavar="N",
        help="largest number of tokens in one call (default: 2048; 512 for a model with sliding windows)")
    add("--batch", type=int, metavar="N",
        help=f"rows of the KV caches: requests that the program serves side by side (default: {DEFAULT_BATCH}; 1 with "
             "--portable, and with --outputs logits or both, as ExecuTorch's own runner expects)")
    add("--kv-bits", type=int, choices=(16, 8, 4), metavar="{16,8,4}",
        help="16: KV caches of float16 in place of float32; 8 or 4: quantize the KV caches (default: the dtype of the "
             "model)")
    add("--max-seconds", type=float, default=argparse.SUPPRESS, metavar="S",
        help="speech models that take sounds of different lengths: the longest sound that one call takes (default: 30)")


def _add_outputs(group: argparse._ArgumentGroup) -> None:
    add, add_seed = group.add_argument, group.add_mutually_exclusive_group().add_argument
    add("--outputs", choices=("tokens", "logits", "both"), default="tokens",
        help="what the program returns (default: %(default)s)")
    add_seed("--seeded", dest="seed", action="store_true", default=True,
        help="give the program an input for the seed (default)")
    add_seed("--unseeded", dest="seed", action="store_false",
        help="give the program no input for a seed: draws differ from run to run")
    add("--penalties", type=int, default=0, metavar="N",
        help="a window of N tokens: give the program inputs for repetition, presence and frequency penalties, which "
             "count the last N tokens of prompt and answer (default: 0, no penalties)")
    add("--logit-bias", type=int, default=0, metavar="K",
        help="give the program an input for logit biases of up to K tokens (default: 0, no biases)")
    add("--allowed-tokens", action="store_true",
        help="give the program an input for a mask of the tokens that may be drawn")
    add("--logprobs", type=int, default=0, metavar="K",
        help="let the program return log probabilities: of the drawn token and of the K most likely tokens "
             "(default: 0, none)")
    add("--no-speculation", dest="speculation", action="store_false",
        help="leave out the method that checks draft tokens: the program is smaller, and answers need a call per token")
# fmt: on


def run(options: argparse.Namespace) -> int:
    _check(options)
    atexit.register(gc.freeze)  # else Python searches all objects for cycles when it ends, which takes seconds
    progress = _Progress()
    with progress.step("import"):
        from ..llm.export import VerificationError, export_llm
        from ..speech.export import export_speech, is_speech
    try:
        with progress:
            if is_speech(options.model):
                exported = export_speech(options.model, **_speech_arguments(options), progress=progress.begin)
            elif "max_seconds" in options:
                raise CommandError(f"--max-seconds: expected a speech model, got {options.model}")
            else:
                exported = export_llm(options.model, **_export_arguments(options), progress=progress.begin)
            progress.begin("write and verify" if options.verify else "write")
            size = exported.save(options.output)
    except (ValueError, VerificationError) as error:
        raise CommandError(error) from error
    if exported.check:
        progress.note(exported.check.cost())
    _print_summary(exported)
    print(f"{options.output}: {size / 1e6:.1f} MB")
    return 0


def _export_arguments(options: argparse.Namespace) -> dict[str, Any]:
    from ..llm.export import DTYPES, HeadConfig

    names = ("adapter", "quantize", "calibrate", "max_context_len", "chunk", "sliding_window", "batch", "outputs")
    names = (*names, "activations", "kv_bits", "speculation", "allow_extensions", "portable")
    arguments = {name: getattr(options, name) for name in (*names, "verify")}
    if options.batch is None:
        arguments["batch"] = 1 if options.portable or options.outputs != "tokens" else DEFAULT_BATCH
    head = HeadConfig(
        seed=options.seed,
        penalties=options.penalties,
        logit_bias=options.logit_bias,
        allowed_tokens=options.allowed_tokens,
        logprobs=options.logprobs,
    )
    group_size = getattr(options, "group_size", None)
    return arguments | {"dtype": DTYPES[options.dtype], "group_size": group_size, "head": head}


# Options for language models only, with their defaults.
_TEXT_ONLY = {
    "activations": "float", "adapter": None, "calibrate": None, "sliding_window": "auto", "chunk": None, "batch": None,
    "outputs": "tokens",
    "penalties": 0, "speculation": True, "kv_bits": None, "portable": False,
}  # fmt: skip


def _speech_arguments(options: argparse.Namespace) -> dict[str, Any]:
    from ..llm.export import DTYPES, HeadConfig

    for name, default in _TEXT_ONLY.items():
        if getattr(options, name) != default:
            option = "--no-speculation" if name == "speculation" else f"--{name.replace('_', '-')}"
            raise CommandError(f"{option}: {options.model} is a speech model, expected a language model")
    arguments = {name: getattr(options, name) for name in ("quantize", "max_context_len", "allow_extensions", "verify")}
    arguments |= {"max_seconds": options.max_seconds} if "max_seconds" in options else {}
    head = HeadConfig(seed=options.seed, logit_bias=options.logit_bias, logprobs=options.logprobs)
    group_size = getattr(options, "group_size", None)
    return arguments | {"dtype": DTYPES[options.dtype], "group_size": group_size, "head": head}


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
    if getattr(exported, "whole", None):
        print(f"not split    {', '.join(exported.whole)}")
    for note in exported.notes:
        print(f"note         {note}")
    counts = collections.Counter(exported.cache_values_per_token)
    layers = ", ".join(f"{count} layers of {values}" for values, count in counts.items())
    print(f"KV caches    {exported.cache_bytes / 1e6:.1f} MB; values per token: {layers or 'none'}")
    if getattr(exported, "kv_quantization", None):
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


def _parse_window(argument: str) -> str | int:
    if argument != "auto" and not argument.isdecimal():
        raise argparse.ArgumentTypeError(f"got {argument!r}, expected auto or a number of positions")
    return argument if argument == "auto" else int(argument)


def _check(options: argparse.Namespace) -> None:
    """Raise CommandError for an invalid combination of options, before any slow step."""
    if "group_size" in options and options.quantize not in ("int4", "int8"):
        raise CommandError("--group-size: expected --quantize int4 or int8 as well")
    if options.calibrate and options.quantize == "none":
        raise CommandError("--calibrate: expected --quantize as well")
    if options.outputs == "logits" and not options.seed:
        raise CommandError("--unseeded: got --outputs logits, expected tokens or both")
    is_other = options.output.exists() and not options.output.is_file()
    if is_other or not options.output.parent.is_dir():
        raise CommandError(f"--output: got {options.output}, expected a file in an existing folder")
