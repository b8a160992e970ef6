"""The cost of sampling inside the model, relative to a plain argmax and to mlx-lm.

    python benchmarks/sampling.py [--vocab 128256] [--repeats 51] [--logits text] [--portable]

Each call draws a token from float32 logits [1, V]. Every round runs each setting once, with a new seed. The
programs run the node SampleNode; with --portable, the instructions that it replaces, which ExecuTorch's own MLX
delegate has.

The table shows medians. "over argmax" is the time divided by the time of a plain argmax through the same delegate.
"mlx-lm" is the time of mlx-lm's `make_sampler` with the same settings divided by our time; `make_sampler` takes
log probabilities, whose computation is not measured. "bar" is the limit for the number before it: a maximum for "over
argmax", and a minimum for "mlx-lm".
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner, Runtime, SamplingHead
from executorch_mlx.builder.registry import REGISTRY, tracing_handler
from executorch_mlx.custom_kernel_ops.sample import sample, sample_definition

# setting: (parameters, bar over argmax, bar of mlx-lm over ours)
SETTINGS = {
    "greedy": ({"temperature": 0.0}, 1.1, None),
    "top_k 40": ({"top_k": 40}, 3, 2),
    "temperature": ({}, 7, None),
    "top_k 40, top_p 0.9, min_p 0.05": ({"top_k": 40, "top_p": 0.9, "min_p": 0.05}, 7.5, 4),
    "top_p 0.9": ({"top_p": 0.9}, 9, 3),
}
NODE_BAR = 1.0  # the bar over argmax of programs with SampleNode
DTYPES = {"temperature": torch.float32, "top_p": torch.float32, "seed": torch.int64}
DTYPES |= {"top_k": torch.int64, "min_p": torch.float32}


class Argmax(torch.nn.Module):
    def forward(self, logits):
        return logits.argmax(-1)


class Head(torch.nn.Module):
    """`SamplingHead` on given logits, with the parameters as inputs."""

    def __init__(self, names):
        super().__init__()
        self.head, self.names = SamplingHead(torch.nn.Identity()), names

    def forward(self, logits, *values):
        return self.head(logits, **dict(zip(self.names, values, strict=True)))


def make_logits(kind: str, vocabulary: int) -> torch.Tensor:
    """Return logits `[1, V]` of a kind.

    - `text`: probabilities follow a power law of the rank with exponent 1.5, as tokens of text do.
    - `normal`: independent values with standard deviation 3, flatter than those of a trained model.
    """
    g = torch.Generator().manual_seed(0)
    if kind == "normal":
        return 3 * torch.randn(1, vocabulary, generator=g)
    rank = torch.randperm(vocabulary, generator=g).float()
    return (-1.5 * torch.log(1 + rank) + 0.1 * torch.randn(vocabulary, generator=g))[None]


def lower_and_load(model, arguments, portable):
    """Return a function that runs `model` through the delegate: inputs → outputs."""
    exported = torch.export.export(model, arguments)
    partitioner = MLXPartitioner(allow_extensions=not portable)
    program = to_edge_transform_and_lower(exported, partitioner=[partitioner]).to_executorch()
    loaded = Runtime.get().load_program(program.buffer)
    method = loaded.load_method("forward")
    return lambda inputs, keep=loaded: method.execute(inputs)  # the method needs the loaded program


def delegate_call(logits, parameters, portable):
    values = {"temperature": 1.0} | parameters | {"seed": 0}
    given = [torch.tensor(v, dtype=DTYPES[n]) for n, v in values.items()]
    run = lower_and_load(Head(tuple(values)), (logits, *given), portable)
    # Created in advance, so that their creation is not measured.
    seeds = iter([torch.tensor(i) for i in range(10000)])
    return lambda: run([logits, *given[:-1], next(seeds)])


def mlx_lm_call(logits, parameters):
    import mlx.core as mx
    from mlx_lm.sample_utils import make_sampler

    values = {"temperature": 1.0} | parameters
    names = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    sampler = make_sampler(**{names[n]: v for n, v in values.items()})
    x = mx.array(logits.numpy())
    x = x - mx.logsumexp(x, axis=-1, keepdims=True)
    mx.eval(x)
    return lambda: mx.eval(sampler(x))


def measure(calls, repeats: int) -> dict[str, float]:
    """Median microseconds of each call. Every round runs all calls."""
    times = {name: [] for name in calls}
    for round_ in range(repeats + 3):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if round_ >= 3:
                times[name].append(time.perf_counter() - start)
    return {name: 1e6 * statistics.median(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vocab", type=int, default=128256, help="size of the vocabulary")
    parser.add_argument("--repeats", type=int, default=51, help="measured rounds")
    parser.add_argument("--portable", action="store_true", help="without SampleNode")
    parser.add_argument("--logits", choices=["text", "normal"], default="text")
    options = parser.parse_args()

    if options.portable:  # the handler that composites without an IR node have
        REGISTRY.handlers[sample] = tracing_handler(sample, sample_definition)
    logits = make_logits(options.logits, options.vocab)
    argmax = lower_and_load(Argmax(), (logits,), portable=True)
    calls = {"argmax": lambda: argmax([logits])}
    for name, (parameters, _, _) in SETTINGS.items():
        calls[name] = delegate_call(logits, parameters, options.portable)
    try:
        for name, (parameters, _, _) in SETTINGS.items():
            calls[f"mlx-lm {name}"] = mlx_lm_call(logits, parameters)
    except ModuleNotFoundError as missing:
        print(f"no comparison with mlx-lm: {missing} (pip install mlx-lm)")
    median = measure(calls, options.repeats)

    print(f"V = {options.vocab}, {options.logits} logits, float32, B = 1, {options.repeats} rounds")
    print(f"{'':32} {'us':>7}  {'over argmax':>11} {'bar':>5}  {'mlx-lm':>7} {'bar':>5}")
    print(f"{'argmax':32} {median['argmax']:7.0f}")
    for name, (_, bar, lm_bar) in SETTINGS.items():
        bar = bar if options.portable else NODE_BAR
        row = f"{name:32} {median[name]:7.0f}  {median[name] / median['argmax']:11.2f} {bar:5}"
        if f"mlx-lm {name}" in median:
            factor = median[f"mlx-lm {name}"] / median[name]
            row += f"  {factor:6.1f}x" + (f" {lm_bar:4}x" if lm_bar else "")
        print(row)


if __name__ == "__main__":
    main()
