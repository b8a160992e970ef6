"""Recurrent layers: the time of export, and the time of a call relative to eager torch.

    python benchmarks/recurrent.py [--layers 3] [--width 256] [--steps 160] [--rounds 9] [--calls 7] [--threads 2]

WIDTH is the size of the hidden state. The number of time steps is dynamic. "export" is the time from the module to a
program in memory. "error" is the largest difference of an output between the delegate and torch, over sequences of 1, 7
and STEPS steps. The other columns come from four processes, which take turns: in each of ROUNDS rounds, each of them
makes CALLS calls while the others wait. The table shows the medians of all calls.

- "ours" and "torch" run in a process each. "torch/ours" is the quotient.
- "1 thread" is the quotient with `torch.set_num_threads(1)` in the process of the delegate only.
- "together" is the quotient in a process that runs both engines in turn.

After a parallel operation, the threads of torch's OpenMP pool stay busy for some milliseconds. They take processors
from whatever the same program does next, unless that is another operation of torch. Engines in the same process
therefore disturb each other, but not equally. A call of the delegate is `Method.execute` of ExecuTorch, which copies
the outputs with torch. `executorch_mlx.Runtime` makes this copy run on one thread, so that it starts no others.
`torch.set_num_threads(1)` has the same effect, and does not change the threads of the delegate either.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time

INPUTS = 40  # features of a time step
LAYERS = ("LSTM", "GRU", "RNN")
BATCHES = (1, 8)
SETTLE = 0.02  # seconds in which the threads of the process before come to rest


def make(name, batch, args):
    """Return the module and its input."""
    import torch

    torch.manual_seed(0)
    model = getattr(torch.nn, name)(INPUTS, args.width, args.layers, batch_first=True).eval()
    return model, torch.randn(batch, args.steps, INPUTS)


def export(model, x):
    """Return the exported program, and the seconds that the export took."""
    import torch
    from executorch.exir import to_edge_transform_and_lower
    from executorch_mlx import MLXPartitioner, dynamic_steps

    start = time.perf_counter()
    length = torch.export.Dim("length", min=1, max=1 << 16)
    with dynamic_steps():
        exported = torch.export.export(model, (x,), dynamic_shapes=({1: length},))
    partitioner = MLXPartitioner()
    manager = to_edge_transform_and_lower(exported, partitioner=[partitioner])
    if partitioner.explain().refused:
        raise SystemExit(str(partitioner.explain()))
    return manager.to_executorch().buffer, time.perf_counter() - start


def load(buffer):
    from executorch_mlx import Runtime

    program = Runtime.get().load_program(buffer)
    return program, program.load_method("forward")


def measure(calls, count):
    """Return the seconds of `count` calls of each function. The functions take turns."""
    seconds = [[] for _ in calls]
    for _ in range(count):
        for call, times in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return seconds


def work(connection, engines, torch_threads, args):
    """The loop of a process: gets (layer, batch, program), and then the number of calls until it gets None."""
    import torch

    torch.set_grad_enabled(False)
    torch.set_num_threads(torch_threads)
    while (task := connection.recv()) is not None:
        name, batch, buffer = task
        model, x = make(name, batch, args)
        program, method = load(buffer)
        functions = {"ours": lambda: method.execute([x]), "torch": lambda: model(x)}
        calls = [functions[engine] for engine in engines]
        measure(calls, 3)
        connection.send(None)
        while (count := connection.recv()) is not None:
            time.sleep(SETTLE)
            connection.send(measure(calls, count))


def error(model, x, buffer):
    """The largest difference between the delegate and torch."""
    program, method = load(buffer)
    sequences = (x[:, :1].contiguous(), x[:, :7].contiguous(), x)
    return max((method.execute([y])[0] - model(y)[0]).abs().max().item() for y in sequences)


def medians(processes, task, args):
    """Run a task in all processes. Returns the median seconds of each engine of each process."""
    for connection in processes:
        connection.send(task)
    for connection in processes:
        connection.recv()
    seconds = [[] for _ in processes]
    for _ in range(args.rounds):
        for connection, rounds in zip(processes, seconds, strict=True):
            connection.send(args.calls)
            rounds.append(connection.recv())
    for connection in processes:
        connection.send(None)
    return [[statistics.median(sum(engine, [])) for engine in zip(*rounds, strict=True)] for rounds in seconds]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"layers": 3, "width": 256, "steps": 160, "rounds": 9, "calls": 7, "threads": 2}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    # Both engines and all processes read this variable when they start.
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    import torch

    torch.set_grad_enabled(False)
    spawn = multiprocessing.get_context("spawn")
    processes = []
    for engines, torch_threads in (
        (["ours"], args.threads),
        (["torch"], args.threads),
        (["ours"], 1),
        (["ours", "torch"], args.threads),
    ):
        ours, theirs = spawn.Pipe()
        spawn.Process(target=work, args=(theirs, engines, torch_threads, args), daemon=True).start()
        processes.append(ours)
    print(f"{args.threads} threads; load averages before: " + " ".join(f"{x:.2f}" for x in os.getloadavg()))
    titles = ("export", "ours", "torch", "torch/ours", "1 thread", "together", "error")
    print(f"{'layer':6}{'batch':>5}" + "".join(f"{title:>11}" for title in titles))
    for name in LAYERS:
        for batch in BATCHES:
            model, x = make(name, batch, args)
            buffer, seconds = export(model, x)
            (ours,), (theirs,), (alone,), (beside, torch_beside) = medians(processes, (name, batch, buffer), args)
            print(
                f"{name:6}{batch:5}{seconds:9.1f} s{ours * 1e3:8.1f} ms{theirs * 1e3:8.1f} ms{theirs / ours:11.2f}"
                f"{theirs / alone:11.2f}{torch_beside / beside:11.2f}{error(model, x, buffer):11.1e}",
                flush=True,
            )
    print("load averages after: " + " ".join(f"{x:.2f}" for x in os.getloadavg()))
    for connection in processes:
        connection.send(None)


if __name__ == "__main__":
    main()
