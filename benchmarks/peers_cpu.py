"""Compares this delegate with other engines on a CPU, in one table.

    make peers                                       # installs the engines; compiles llama.cpp, which takes minutes
    python benchmarks/peers_cpu.py                   # the architecture of Qwen3-0.6B, all formats
    python benchmarks/peers_cpu.py --engines ours llama.cpp --formats w8a8 --rounds 5
    python benchmarks/peers_cpu.py --shape demo      # a small model, to try the engines

Engines: this delegate (`ours`), llama.cpp, OpenVINO GenAI, ONNX Runtime GenAI, MNN, CTranslate2, XNNPACK
(ExecuTorch's CPU delegate) and mlx-lm. An engine that is not installed is left out, with a line that says how to
install it. The weights are random, and the same for all engines.

A format stands for weights and activations. In float32, int8 and int4, activations are float32, and KV caches too. In
bf16, both are bfloat16. w8a8 and w4a8 have the weights of int8 and int4, and 8-bit activations in products. The other
parts differ:

- Groups of quantized weights have 64 elements here and in mlx-lm, XNNPACK, ONNX Runtime, OpenVINO and MNN, and 32 in
  llama.cpp (Q8_0 and Q4_0). With weights of 8 bits, OpenVINO and CTranslate2 have a scale for each row. In XNNPACK and
  CTranslate2, weights have no zero points. The scales are float16 here, as in programs that
  `executorch-mlx export --quantize` writes, and in llama.cpp.
- MNN's file for float32 has float16 weights. They are float32 in memory.
- The embedding is quantized like the other matrices, except in XNNPACK (8 bits) and in ONNX Runtime's w8a8 (float32).
- llama.cpp, MNN and CTranslate2 round activations to 8 bits if they keep quantized weights. They are therefore in w8a8
  and w4a8, as far as they have such weights, and not in int8 and int4. ONNX Runtime is not in int8, because it has no
  fast kernel for weights of 8 bits with float activations.
- KV caches of w8a8 and w4a8 are float16 here and in llama.cpp and OpenVINO, and float32 in the other engines. In bf16,
  llama.cpp has float16 caches, its default. Apart from products, OpenVINO computes w8a8 and w4a8 in bfloat16 if the
  processor can, which is its default.

Each measurement runs in its own process. The engines take turns in each round. The table has the medians over the
rounds, the largest resident memory of a process, and the load of the machine. For each format, `ours / best` is this
delegate relative to the best of the other engines, by column. mlx-lm prefills about two tokens per second on a CPU. It
therefore gets a prompt of 8 tokens, and its speed is in the first prefill column.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKERS = ROOT / "benchmarks" / "llm"
PEERS = ROOT / "benchmarks" / "peers"
BUILD = ROOT / "build" / "benchmarks" / "llm"
PEER_PACKAGES = ROOT / "build" / "peers"  # of make peers
CAPACITY = {"qwen3-0.6b": 2304, "demo": 512}  # of the KV caches, in positions
MLX_LM_PREFILL = 8  # tokens

sys.path.insert(0, str(WORKERS))
import models  # noqa: E402


def build(path: Path, *command: object) -> Path:
    """Return `path`. If it does not exist, `command` writes it first."""
    if not path.exists():
        print(f"building {path.relative_to(BUILD)} ...", flush=True)
        offline = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=offline)
        if done.returncode:
            raise SystemExit(f"{path.name}: the build failed:\n{done.stderr[-3000:]}")
    return path


def checkpoint(shape: str, weight_format: str) -> Path:
    code = "import models, sys; models.folder_of(sys.argv[1], sys.argv[2], models.Path(sys.argv[3]))"
    command = [sys.executable, "-W", "ignore", "-c", f"import sys; sys.path.insert(0, {str(WORKERS)!r}); {code}"]
    folder = BUILD / f"{shape}-{weight_format}"
    build(folder / "config.json", *command, shape, weight_format, BUILD)
    return folder


def program_path(shape: str, weight_format: str, builder: str = "models.py", suffix: str = "") -> Path:
    path = BUILD / f"{shape}-{weight_format}-{CAPACITY[shape]}{suffix}.pte"
    return build(path, sys.executable, "-W", "ignore", WORKERS / builder, shape, weight_format, CAPACITY[shape], BUILD)


def peer_python(name: str) -> Path:
    """The Python of an engine that `make peers` installs."""
    return PEER_PACKAGES / name / "bin" / "python"


def length_arguments(options: argparse.Namespace) -> list[object]:
    return ["--prefill", *options.prefill, "--context", *options.context, "--steps", options.steps]


def weights_of(weight_format: str) -> str:
    """The format of the weights: that of w4a8 is int4, for example."""
    return models.INT8_ACTIVATIONS.get(weight_format, weight_format)


# Each function returns the command that measures a format of an engine.


def ours(weight_format: str, options: argparse.Namespace) -> list[object]:
    path = program_path(options.shape, weight_format)
    return [sys.executable, "-W", "ignore", WORKERS / "ours.py", path, *length_arguments(options)]


def peer_worker(name: str, model: Path, weight_format: str, options: argparse.Namespace) -> list[object]:
    worker = [peer_python(name), "-W", "ignore", PEERS / f"{name}_peer.py", model, "--format", weight_format]
    return [*worker, *length_arguments(options), "--threads", len(os.sched_getaffinity(0))]


def gguf_path(shape: str, weight_format: str) -> Path:
    """The model as a GGUF file. Writes the file if it does not exist."""
    weights = weights_of(weight_format)
    path = BUILD / f"{shape}-{weights}.gguf"
    convert = [peer_python("llama_cpp"), PEERS / "gguf_model.py"]
    return build(path, *convert, checkpoint(shape, "float32"), weights, path)


def llama_cpp(weight_format: str, options: argparse.Namespace) -> list[object]:
    return peer_worker("llama_cpp", gguf_path(options.shape, weight_format), weight_format, options)


def converted(name: str, file: str, shape: str, weights: str, source: str = "float32") -> Path:
    """Return the folder of a checkpoint that a peer has converted. A complete folder has the file `file`."""
    folder = BUILD / f"{shape}-{weights}-{name}"
    convert = [peer_python(name), "-W", "ignore", PEERS / f"{name}_model.py"]
    build(folder / file, *convert, checkpoint(shape, source), weights, folder)
    return folder


def openvino(weight_format: str, options: argparse.Namespace) -> list[object]:
    weights = weights_of(weight_format)
    source = "bf16" if weights == "bf16" else "float32"
    folder = converted("openvino", "openvino_model.xml", options.shape, weights, source)
    return peer_worker("openvino", folder, weight_format, options)


def onnxruntime(weight_format: str, options: argparse.Namespace) -> list[object]:
    folder = converted("onnxruntime", "genai_config.json", options.shape, weight_format)
    return peer_worker("onnxruntime", folder, weight_format, options)


def mnn(weight_format: str, options: argparse.Namespace) -> list[object]:
    folder = converted("mnn", "config.json", options.shape, weights_of(weight_format))
    return peer_worker("mnn", folder, weight_format, options)


def ctranslate2(weight_format: str, options: argparse.Namespace) -> list[object]:
    folder = converted("ctranslate2", "model.bin", options.shape, weights_of(weight_format))
    return peer_worker("ctranslate2", folder, weight_format, options)


def xnnpack(weight_format: str, options: argparse.Namespace) -> list[object]:
    path = program_path(options.shape, weights_of(weight_format), "xnnpack_model.py", "-xnnpack")
    vocabulary = models.vocabulary_size(program_path(options.shape, weight_format))
    worker = [sys.executable, "-W", "ignore", WORKERS / "xnnpack.py", path, "--vocabulary", vocabulary]
    return [*worker, *length_arguments(options), "--repeats", 1]


def mlx_lm(weight_format: str, options: argparse.Namespace) -> list[object]:
    worker = [sys.executable, "-W", "ignore", WORKERS / "peer.py", checkpoint(options.shape, weight_format)]
    return [*worker, "--prefill", MLX_LM_PREFILL, "--context", *options.context, "--steps", 3]


@dataclass(frozen=True)
class Engine:
    command: Callable[[str, argparse.Namespace], list[object]]
    modules: str  # `python` can import them if the engine is installed
    formats: tuple[str, ...]
    python: Path = Path(sys.executable)
    install: str = "make peers"


FLOAT_ACTIVATIONS = tuple(f for f in models.ALL_FORMATS if f not in models.INT8_ACTIVATIONS)
ENGINES = {
    "ours": Engine(ours, "executorch_mlx", models.ALL_FORMATS, install="make build"),
    "llama.cpp": Engine(llama_cpp, "llama_cpp, gguf", ("float32", "bf16", "w8a8", "w4a8"), peer_python("llama_cpp")),
    "OpenVINO": Engine(openvino, "openvino_genai, optimum.intel", models.ALL_FORMATS, peer_python("openvino")),
    "ONNX Runtime": Engine(
        onnxruntime, "onnxruntime_genai, onnx_ir", ("float32", "int4", "w8a8", "w4a8"), peer_python("onnxruntime")
    ),
    "MNN": Engine(mnn, "MNN.llm, onnx, yaspin", ("float32", "w8a8", "w4a8"), peer_python("mnn")),
    "CTranslate2": Engine(
        ctranslate2, "ctranslate2, transformers, torch", ("float32", "w8a8"), peer_python("ctranslate2")
    ),
    "XNNPACK": Engine(xnnpack, "executorch.backends.xnnpack", ("float32", "w4a8"), install="make build"),
    "mlx-lm": Engine(mlx_lm, "mlx_lm", FLOAT_ACTIVATIONS, install="pip install mlx-lm"),
}


def why_missing(engine: Engine) -> str | None:
    """Return the reason why an engine cannot run on this machine, or None if it can."""
    if not engine.python.exists():
        return f"run {engine.install}"
    done = subprocess.run([engine.python, "-c", f"import {engine.modules}"], capture_output=True, text=True)
    return f"{done.stderr.splitlines()[-1]}: run {engine.install}" if done.returncode else None


def run(command: list[object]) -> tuple[dict, int]:
    """Run a worker. Returns the JSON in its last line, and the largest resident memory in bytes."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=errors, text=True)
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(map(str, command))}: failed\n{errors.read()[-3000:].strip()}")
    return json.loads(output.splitlines()[-1]), usage.ru_maxrss * 1024


def measure(options: argparse.Namespace) -> tuple[dict, list[float]]:
    """Return the values of all rounds, and the load of the machine before each run.

    The values are `results[engine, weight_format][column]`, a list with one value per round. A peer that fails is left
    out of the format: not every engine supports all formats on all processors.
    """
    jobs = [
        (engine, weight_format, ENGINES[engine].command(weight_format, options))
        for weight_format in options.formats
        for engine in options.engines
        if weight_format in ENGINES[engine].formats
    ]
    results, loads = defaultdict(lambda: defaultdict(list)), []
    for _ in range(options.rounds):
        for job in list(jobs):
            engine, weight_format, command = job
            loads.append(os.getloadavg()[0])
            try:
                found, memory = run(command)
            except RuntimeError as error:
                if engine == "ours":
                    raise SystemExit(str(error)) from error
                print(f"{engine} left out of {weight_format}: {error}")
                jobs.remove(job)
                results.pop((engine, weight_format), None)
                continue
            row = results[engine, weight_format]
            for length, seconds in found["prefill"].items():
                column = length if engine != "mlx-lm" else options.prefill[0]
                row["prefill", int(column)].append(int(length) / seconds)
            for length, seconds in found["decode"].items():
                row["decode", int(length)].append(1 / seconds)
            row["memory"].append(memory)
    return results, loads


def medians(results: dict, weight_format: str, columns: list[tuple[str, int]]) -> dict[str, list[float | None]]:
    """Return the values of each engine in a format: the columns, and the largest memory in MB."""
    return {
        engine: [*(statistics.median(row[c]) if row[c] else None for c in columns), max(row["memory"]) / 1e6]
        for (engine, form), row in results.items()
        if form == weight_format
    }


def ratios(ours: list[float | None], peers: list[list[float | None]]) -> list[float | None]:
    """Return `ours` relative to the best of `peers` in each column: the largest speed, or the smallest memory."""

    def ratio(column: int) -> float | None:
        values = [peer[column] for peer in peers if peer[column] is not None]
        best = min if column == len(ours) - 1 else max
        return None if ours[column] is None or not values else ours[column] / best(values)

    return [ratio(column) for column in range(len(ours))]


def print_table(results: dict, loads: list[float], options: argparse.Namespace) -> None:
    columns = [("prefill", n) for n in options.prefill] + [("decode", n) for n in options.context]
    names = [f"{kind} {'at ' if kind == 'decode' else ''}{n}" for kind, n in columns]
    print(f"\n{options.shape}, tokens per second, medians of {options.rounds} rounds")
    print(f"{'':24}{''.join(f'{name:>16}' for name in names)}{'peak MB':>12}")

    def print_row(weight_format: str, name: str, row: list[float | None], form: str = ".4g") -> None:
        cells = [f"{'' if value is None else format(value, form):>16}" for value in row[:-1]]
        print(f"{weight_format:9}{name:15}{''.join(cells)}{row[-1]:12{'.0f' if form == '.4g' else form}}")

    for weight_format in [f for f in models.ALL_FORMATS if f in options.formats]:
        rows = medians(results, weight_format, columns)
        for engine, row in rows.items():
            print_row(weight_format, engine, row)
        others = [row for engine, row in rows.items() if engine != "ours"]
        if others and "ours" in rows:
            print_row(weight_format, "ours / best", ratios(rows["ours"], others), ".2f")
    load = f"{min(loads):.1f} to {max(loads):.1f}, median {statistics.median(loads):.1f}"
    print(f"load of the machine before each run: {load}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--formats", nargs="+", choices=models.ALL_FORMATS, default=list(models.ALL_FORMATS))
    parser.add_argument("--shape", choices=models.SHAPES, default="qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefill", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--context", nargs="+", type=int, default=[128, 2048])
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    capacity = CAPACITY[options.shape]
    options.prefill = [n for n in options.prefill if n < capacity]
    options.context = [n for n in options.context if n + options.steps < capacity]
    for engine in list(options.engines):
        if reason := why_missing(ENGINES[engine]):
            print(f"{engine}: left out: {reason}")
            options.engines.remove(engine)
    BUILD.mkdir(parents=True, exist_ok=True)
    print_table(*measure(options), options)


if __name__ == "__main__":
    main()
