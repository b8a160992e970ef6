"""executorch-mlx export"""

from __future__ import annotations

import argparse
import contextlib
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from .model import CommandError, quiet


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "export",
        help="a Hugging Face causal LM to a .pte",
        description="Exports a Hugging Face causal LM with its caches, and with the sampling head if asked for.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="folder, of transformers or of mlx-lm, or hub id")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE", help="the .pte to write")
    weights = parser.add_argument_group("weights")
    weights.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="of weights and arithmetic")
    weights.add_argument("--quantize", choices=("int4", "int8", "none"), default="none", help="linear layers and embeddings")
    weights.add_argument("--group-size", type=int, choices=(32, 64, 128), default=argparse.SUPPRESS, help="weights that share a scale (default: 64)")
    weights.add_argument("--adapter", type=Path, metavar="DIR", help="peft folder with a LoRA adapter to merge")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--max-seq-len", type=int, metavar="N", help="positions of the caches; all of the model's up to 4096 unless given")
    sizes.add_argument("--sliding-window", type=_window, default="auto", metavar="auto|N", help="the model's own, or N for every layer, 0 for none")
    sizes.add_argument("--chunk", type=int, default=512, metavar="N", help="tokens of one call at most")
    sizes.add_argument("--batch", type=int, default=1, metavar="N", help="sequences side by side")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--sampling", choices=("head", "logits", "both"), default="head", help="what the program returns")
    seeds = sampling.add_mutually_exclusive_group()
    seeds.add_argument("--seeded", dest="seed", action="store_true", default=True, help="the seed is an input")
    seeds.add_argument("--unseeded", dest="seed", action="store_false", help="MLX draws from its own sequence")
    sampling.add_argument("--penalties", type=int, default=0, metavar="N", help="take penalties over the last N tokens")
    sampling.add_argument("--logit-bias", type=int, default=0, metavar="K", help="take a bias for up to K tokens")
    sampling.add_argument("--allowed-tokens", action="store_true", help="take a mask of allowed tokens")
    parser.add_argument("--portable", action=argparse.BooleanOptionalAction, default=True,
                        help="use only nodes that ExecuTorch's own MLX delegate has")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    _check(options)
    progress = _Progress()
    with progress.step("import"), quiet():
        from ..llm.export import DTYPES, export_llm
        from ..llm.parameters import Sampling
    try:
        with progress, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            exported = export_llm(
                options.model,
                adapter=options.adapter,
                dtype=DTYPES[options.dtype],
                quantize=options.quantize,
                group_size=getattr(options, "group_size", 64),
                max_seq_len=options.max_seq_len,
                chunk=options.chunk,
                sliding_window=options.sliding_window,
                batch=options.batch,
                outputs=options.sampling,
                sampling=Sampling(
                    seed=options.seed,
                    penalties=options.penalties,
                    logit_bias=options.logit_bias,
                    allowed_tokens=options.allowed_tokens,
                ),
                portable=options.portable,
                progress=progress.begin,
            )
            progress.begin("write")
            size = exported.save(options.output)
    except ValueError as error:
        raise CommandError(error) from error
    print(exported.report)
    print(f"methods   {', '.join(exported.methods)}")
    values = {k: v for k, v in exported.metadata.items() if isinstance(v, (bool, int, list))}
    print(f"metadata  {', '.join(f'{k}={v}' for k, v in values.items())}")
    if exported.unquantized:
        print(f"unpacked  {', '.join(exported.unquantized)}: no group divides their rows")
    print(f"caches    {exported.cache_bytes / 1e6:.1f} MB")
    print(f"{options.output}: {size / 1e6:.1f} MB")
    return 0


class _Progress:
    """The step that is under way, and how long those before it took, on standard error."""

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
        self.console.print(f"{name}: {time.perf_counter() - started:.1f} s", style="dim", highlight=False)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error) -> None:
        self.steps.__exit__(*error)


def _window(text: str) -> str | int:
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}, expected auto or a number of positions")
    return text if text == "auto" else int(text)


def _check(options: argparse.Namespace) -> None:
    """What is wrong is told before anything long begins."""
    if "group_size" in options and options.quantize == "none":
        raise CommandError("--group-size belongs to --quantize int4 or int8")
    if options.sampling == "logits" and not options.seed:
        raise CommandError("--unseeded belongs to a head, and --sampling is logits")
    if options.output.is_dir() or not options.output.parent.is_dir():
        raise CommandError(f"--output is {options.output}, expected a file in a folder that is there")
