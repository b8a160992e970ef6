"""Recurrent layers: the time of export, and the time of a call relative to eager torch.

    python benchmarks/recurrent.py [--steps 160] [--layers 3] [--width 256] [--repeats 15]

WIDTH is the size of the hidden state. The number of time steps is dynamic. "export" is the time from the module to a
program in memory. Calls of the delegate and of torch alternate, and the table shows medians. "error" is the largest
difference of an output between the delegate and torch, over sequences of 1, 7 and STEPS steps.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from executorch.exir import to_edge_transform_and_lower

from executorch_mlx import MLXPartitioner, Runtime

INPUTS = 40  # features of a time step
LAYERS = {"LSTM": torch.nn.LSTM, "GRU": torch.nn.GRU, "RNN": torch.nn.RNN}


def export(model, x):
    """Returns the exported program, and the seconds that the export took."""
    start = time.perf_counter()
    length = torch.export.Dim("length", min=1, max=1 << 16)
    exported = torch.export.export(model, (x,), dynamic_shapes=({1: length},))
    partitioner = MLXPartitioner()
    manager = to_edge_transform_and_lower(exported, partitioner=[partitioner])
    if partitioner.explain().refused:
        raise SystemExit(str(partitioner.explain()))
    return manager.to_executorch().buffer, time.perf_counter() - start


def measure(model, method, x, repeats):
    """Returns the median seconds of the delegate and of torch."""
    seconds = [], []
    for _ in range(repeats):
        for call, times in zip((lambda: method.execute([x]), lambda: model(x)), seconds):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return [statistics.median(s) for s in seconds]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 160), ("layers", 3), ("width", 256), ("repeats", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    print(f"{'layer':6}{'batch':>6}{'export':>10}{'ours':>10}{'torch':>10}{'torch/ours':>12}{'error':>10}")
    for name, layer in LAYERS.items():
        for batch in (1, 8):
            torch.manual_seed(0)
            model = layer(INPUTS, args.width, args.layers, batch_first=True).eval()
            x = torch.randn(batch, args.steps, INPUTS)
            buffer, seconds = export(model, x)
            program = Runtime.get().load_program(buffer)
            method = program.load_method("forward")
            error = max(
                (method.execute([y])[0] - model(y)[0]).abs().max().item()
                for y in (x[:, :1].contiguous(), x[:, :7].contiguous(), x)
            )
            ours, theirs = measure(model, method, x, args.repeats)
            print(
                f"{name:6}{batch:6}{seconds:8.1f} s{ours * 1e3:7.1f} ms{theirs * 1e3:7.1f} ms{theirs / ours:12.2f}"
                f"{error:10.1e}"
            )


if __name__ == "__main__":
    main()
