"""Compares this delegate with other engines on a CPU, in one table.

    make peers                                       # installs llama.cpp; compiles it, which takes minutes
    python benchmarks/peers_cpu.py                   # the architecture of Qwen3-0.6B, all formats
    python benchmarks/peers_cpu.py --engines ours llama.cpp --formats int4 --rounds 5
    python benchmarks/peers_cpu.py --shape demo      # a small model, to try the engines

Engines: this delegate (`ours`), llama.cpp, XNNPACK (ExecuTorch's CPU delegate) and mlx-lm. An engine that is not
installed is left out, with a line that says how to install it. The weights are random, and the same for all engines:
float32, bf16, or quantized from float32 (groups of 64 here and in mlx-lm; Q8_0 and Q4_0 in llama.cpp, also for the
embedding). Some engines quantize activations to 8 bits: llama.cpp always, XNNPACK with int4, and this delegate in the
format w4a8, which has the weights of int4. In all other formats, this delegate and mlx-lm compute with float32 or
bfloat16 activations.

Each measurement runs in its own process. The engines take turns in each round. The table has the medians over the
rounds, the largest resident memory of a process, and the load of the machine. mlx-lm prefills about two tokens per
second on a CPU. It therefore gets a prompt of 8 tokens, and its speed is in the first prefill column.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKERS = ROOT / "benchmarks" / "llm"
PEERS = ROOT / "benchmarks" / "peers"
BUILD = ROOT / "build" / "benchmarks" / "llm"
LLAMA_PYTHON = ROOT / "build" / "peers" / "llama_cpp" / "bin" / "python"
CAPACITY = {"qwen3-0.6b": 2304, "demo": 512}  # of the KV caches, in positions
MLX_LM_PREFILL = 8  # tokens

sys.path.insert(0, str(WORKERS))
import models  # noqa: E402


def build(path: Path, *command: object) -> Path:
    """Returns `path`. If it does not exist, `command` writes it first."""
    if not path.exists():
        print(f"building {path.name} ...", flush=True)
        done = subprocess.run([*map(str, command)], capture_output=True, text=True)
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


def length_arguments(options: argparse.Namespace) -> list[object]:
    return ["--prefill", *options.prefill, "--context", *options.context, "--steps", options.steps]


# Each function returns the command that measures a format of an engine.


def ours(weight_format: str, options: argparse.Namespace) -> list[object]:
    path = program_path(options.shape, weight_format)
    return [sys.executable, "-W", "ignore", WORKERS / "ours.py", path, *length_arguments(options)]


def llama_cpp(weight_format: str, options: argparse.Namespace) -> list[object]:
    path = BUILD / f"{options.shape}-{weight_format}.gguf"
    build(path, LLAMA_PYTHON, PEERS / "gguf_model.py", checkpoint(options.shape, "float32"), weight_format, path)
    threads = ["--threads", len(os.sched_getaffinity(0))]
    return [LLAMA_PYTHON, PEERS / "llama_cpp_peer.py", path, *length_arguments(options), *threads]


def xnnpack(weight_format: str, options: argparse.Namespace) -> list[object]:
    path = program_path(options.shape, weight_format, "xnnpack_model.py", "-xnnpack")
    vocabulary = models.vocabulary_size(program_path(options.shape, weight_format))
    worker = [sys.executable, "-W", "ignore", WORKERS / "xnnpack.py", path, "--vocabulary", vocabulary]
    return [*worker, *length_arguments(options), "--repeats", 1]


def mlx_lm(weight_format: str, options: argparse.Namespace) -> list[object]:
    worker = [sys.executable, "-W", "ignore", WORKERS / "peer.py", checkpoint(options.shape, weight_format)]
    return [*worker, "--prefill", MLX_LM_PREFILL, "--context", *options.context, "--steps", 3]


ENGINES = {"ours": ours, "llama.cpp": llama_cpp, "XNNPACK": xnnpack, "mlx-lm": mlx_lm}
WEIGHT_FORMATS = ("float32", "bf16", "int8", "int4")
SUPPORTED = {"XNNPACK": ("float32", "int4"), "llama.cpp": WEIGHT_FORMATS, "mlx-lm": WEIGHT_FORMATS}  # ours: all


def why_missing(engine: str) -> str | None:
    """Return the reason why an engine cannot run on this machine, or None if it can."""
    if engine == "llama.cpp":
        if not LLAMA_PYTHON.exists():
            return "run make peers"
        done = subprocess.run([LLAMA_PYTHON, "-c", "import llama_cpp, gguf"], capture_output=True, text=True)
        return done.stderr.splitlines()[-1] if done.returncode else None
    if engine == "mlx-lm":
        done = subprocess.run([sys.executable, "-c", "import mlx_lm"], capture_output=True)
        return "run pip install mlx-lm" if done.returncode else None
    return None


def run(command: list[object]) -> tuple[dict, int]:
    """Runs a worker. Returns the JSON in its last line, and the largest resident memory in bytes."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=errors, text=True)
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            raise SystemExit(f"{' '.join(map(str, command))}: failed\n{errors.read()[-3000:]}")
    return json.loads(output.splitlines()[-1]), usage.ru_maxrss * 1024


def measure(options: argparse.Namespace) -> tuple[dict, list[float]]:
    """Return the values of all rounds, and the load of the machine before each run.

    The values are `results[engine, weight_format][column]`, a list with one value per round.
    """
    jobs = [
        (engine, weight_format, ENGINES[engine](weight_format, options))
        for weight_format in options.formats
        for engine in options.engines
        if weight_format in SUPPORTED.get(engine, models.ALL_FORMATS)
    ]
    results, loads = defaultdict(lambda: defaultdict(list)), []
    for _ in range(options.rounds):
        for engine, weight_format, command in jobs:
            loads.append(os.getloadavg()[0])
            found, memory = run(command)
            row = results[engine, weight_format]
            for length, seconds in found["prefill"].items():
                column = length if engine != "mlx-lm" else options.prefill[0]
                row["prefill", int(column)].append(int(length) / seconds)
            for length, seconds in found["decode"].items():
                row["decode", int(length)].append(1 / seconds)
            row["memory"].append(memory)
    return results, loads


def print_table(results: dict, loads: list[float], options: argparse.Namespace) -> None:
    columns = [("prefill", n) for n in options.prefill] + [("decode", n) for n in options.context]
    names = [f"{kind} {'at ' if kind == 'decode' else ''}{n}" for kind, n in columns]
    print(f"\n{options.shape}, tokens per second, medians of {options.rounds} rounds")
    print(f"{'':22}{''.join(f'{name:>16}' for name in names)}{'peak MB':>12}")
    for (engine, weight_format), row in sorted(results.items(), key=lambda item: models.ALL_FORMATS.index(item[0][1])):
        cells = [f"{statistics.median(row[c]):16.4g}" if row[c] else f"{'':16}" for c in columns]
        print(f"{weight_format:9}{engine:13}{''.join(cells)}{max(row['memory']) / 1e6:12.0f}")
    print(f"load of the machine before each run: {min(loads):.1f} to {max(loads):.1f}, median {statistics.median(loads):.1f}")


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
        if reason := why_missing(engine):
            print(f"{engine}: left out: {reason}")
            options.engines.remove(engine)
    BUILD.mkdir(parents=True, exist_ok=True)
    print_table(*measure(options), options)


if __name__ == "__main__":
    main()
