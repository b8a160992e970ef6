"""Encoders on this CPU beside ONNX Runtime and OpenVINO, by turns: a BERT of MiniLM's shape, and a ViT.

python benchmarks/encoders.py [--rounds 5] [--threads N] [--only minilm|vit]

Needs `pip install onnxruntime onnx onnxscript openvino`; a peer that is not installed is left out. The weights are
random, float32. Prints the median time of a call in milliseconds over the rounds, its range, and how many times as fast
as the fastest peer this package is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np

Run = Callable[[list[np.ndarray]], np.ndarray]
SECONDS = 0.4  # of the calls of an engine in a round


def models():
    """Yield, for each model: its name, the module, the names of the inputs, those of dynamic axes, and inputs."""
    import torch
    from transformers import BertConfig, BertModel, ViTConfig, ViTModel

    class MiniLM(torch.nn.Module):
        def __init__(self):
            super().__init__()
            sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
            self.model = BertModel(BertConfig(**sizes), add_pooling_layer=False)

        def forward(self, tokens, mask):
            hidden = self.model(input_ids=tokens, attention_mask=mask).last_hidden_state
            weights = mask.unsqueeze(-1).float()
            return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)

    class ViT(torch.nn.Module):
        def __init__(self):
            super().__init__()
            sizes = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}
            self.model = ViTModel(ViTConfig(**sizes), add_pooling_layer=False)

        def forward(self, pixels):
            return self.model(pixel_values=pixels).last_hidden_state[:, 0]

    def texts(rows: int, length: int) -> list[np.ndarray]:
        mask = np.ones((rows, length), np.int64)
        mask[1:, length - length // 10 :] = 0
        return [np.random.default_rng(0).integers(0, 30000, (rows, length)), mask]

    def pictures(rows: int) -> list[np.ndarray]:
        return [np.random.default_rng(0).standard_normal((rows, 3, 224, 224)).astype(np.float32)]

    torch.manual_seed(0)
    axes = {0: "rows", 1: "length"}
    calls = {"1 x 16": texts(1, 16), "1 x 128": texts(1, 128), "16 x 128": texts(16, 128)}
    yield "minilm", MiniLM().eval(), {"tokens": axes, "mask": axes}, texts(3, 24), calls
    yield "vit", ViT().eval(), {"pixels": {0: "rows"}}, pictures(2), {"1": pictures(1), "8": pictures(8)}


def ours(module, axes, example, folder: Path, threads: int) -> Run:
    import torch
    from executorch.exir import to_edge_transform_and_lower
    from executorch_mlx import MLXPartitioner
    from executorch_mlx.encoders.program import ArrayProgram

    dims = {name: torch.export.Dim(name, min=1, max=256) for named in axes.values() for name in named.values()}
    shapes = tuple({axis: dims[name] for axis, name in named.items()} for named in axes.values())
    inputs = tuple(map(torch.from_numpy, example))
    with torch.no_grad():
        exported = torch.export.export(module, inputs, dynamic_shapes=shapes)
    partitioner = MLXPartitioner()
    to_edge_transform_and_lower(exported, partitioner=[partitioner]).to_executorch().save(str(folder / "model.pte"))
    if partitioner.explain().refused:
        print(partitioner.explain(), file=sys.stderr)
    program = ArrayProgram(folder / "model.pte", device="cpu")
    return lambda inputs: program.call("forward", inputs)[0]


def onnxruntime(module, axes, example, folder: Path, threads: int) -> Run:
    import onnxruntime
    import torch

    inputs = tuple(map(torch.from_numpy, example))
    path = str(folder / "model.onnx")
    with torch.no_grad():
        torch.onnx.export(module, inputs, path, input_names=[*axes], dynamic_axes=axes, dynamo=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, dict(zip(axes, inputs)))[0]


def openvino(module, axes, example, folder: Path, threads: int) -> Run:
    import openvino
    import torch

    inputs = tuple(map(torch.from_numpy, example))
    with torch.no_grad():
        model = openvino.convert_model(module, example_input=inputs)
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.compile_model(model, "CPU", settings).create_infer_request()
    return lambda inputs: request.infer(list(inputs))[0]


ENGINES = {"executorch-mlx": ours, "onnxruntime": onnxruntime, "openvino": openvino}


def measure(runs: dict[str, Run], inputs: list[np.ndarray], rounds: int) -> dict[str, list[float]]:
    """Return the times of a call by engine: the fastest of each round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            best, end = float("inf"), time.perf_counter() + SECONDS
            while time.perf_counter() < end or best == float("inf"):
                begin = time.perf_counter()
                run(inputs)
                best = min(best, time.perf_counter() - begin)
            times[name].append(best)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", choices=("minilm", "vit"))
    options = parser.parse_args()
    from executorch_mlx import load_delegate

    load_delegate()
    for name, module, axes, example, calls in models():
        if options.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            runs = {
                engine: make(module, axes, example, Path(folder), options.threads)
                for engine, make in ENGINES.items()
                if engine == "executorch-mlx" or find_spec(engine) is not None
            }
            for shape, inputs in calls.items():
                results = {engine: run(inputs) for engine, run in runs.items()}
                worst = max(np.abs(result - results["executorch-mlx"]).max() for result in results.values())
                times = measure(runs, inputs, options.rounds)
                medians = {engine: statistics.median(values) * 1e3 for engine, values in times.items()}
                cells = [
                    f"{engine} {medians[engine]:.2f} ms ({min(values) * 1e3:.2f} to {max(values) * 1e3:.2f})"
                    for engine, values in times.items()
                ]
                peers = [median for engine, median in medians.items() if engine != "executorch-mlx"]
                ratio = f"; ratio to the best peer {min(peers) / medians['executorch-mlx']:.2f}" if peers else ""
                print(f"{name:7} {shape:9} {', '.join(cells)}{ratio}; largest difference {worst:.0e}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
