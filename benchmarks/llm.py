"""Language models with this delegate, mlx-lm and XNNPACK: speed, load time and memory.

    python benchmarks/llm.py                         # the architecture of Qwen3-0.6B, float32 and int4
    python benchmarks/llm.py --shape demo
    python benchmarks/llm.py --only ours --format int4

The model of Qwen3-0.6B has random weights, and `demo` is examples/demo_model. Three sides are measured. This delegate
("ours") and mlx-lm load the same weights. Their int4 weights come from mlx-lm's converter, in groups of 64. XNNPACK
runs the same model through ExecuTorch with its own int4 format (see llm/xnnpack_model.py) and samples on the host.
All three sample with temperature 0.8, top_k 40 and top_p 0.9.

A process measures one side in one format, and the processes run one at a time. The times of prefill and
decode are medians, but the model is loaded only once, and mlx-lm prefills only once. `load` does not include loading
the libraries. Models are built once, in build/benchmarks/llm. The export of a large model to
XNNPACK takes many minutes.

mlx-lm prefills about two tokens per second on a CPU. It therefore gets a prompt of only `--peer-prefill`
tokens; the rate of its prefill hardly depends on the length of the prompt. Before mlx-lm decodes, its
cache is filled with random values.

`ratio` is our value divided by the value in the column before `ratio`. `bar` is the required value of the ratio
to its left. Finally, the script compares a decode step with two capacities of the KV caches. For each capacity, it
takes the shortest of four median times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKERS = ROOT / "benchmarks" / "llm"
BUILD = ROOT / "build" / "benchmarks" / "llm"
CAPACITY = {"qwen3-0.6b": 2304, "demo": 512}  # of the KV caches, in positions
CAPACITIES = (512, 8192)  # the two capacities of the KV caches that are compared
SIDES = ["ours", "mlx-lm", "xnnpack"]

sys.path.insert(0, str(WORKERS))
import models  # noqa: E402
from process import resident  # noqa: E402


def run_worker(name: str, *arguments: object) -> dict:
    """Run a worker and return its measurements, the JSON in its last line."""
    command = [sys.executable, "-W", "ignore", WORKERS / name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def program_path(shape: str, weight_format: str, capacity: int, builder: str = "models.py", suffix: str = "") -> Path:
    path = BUILD / f"{shape}-{weight_format}-{capacity}{suffix}.pte"
    if not path.exists():
        print(f"building {path.name} ...", flush=True)
        command = [sys.executable, "-W", "ignore", WORKERS / builder]
        subprocess.run([*command, shape, weight_format, str(capacity), BUILD], check=True, capture_output=True)
    return path


RUNNER = ROOT / "build" / "mlx_llm_runner"


def runner_memory(path: Path, context: int, steps: int) -> int:
    """Resident memory of mlx_llm_runner in bytes, while it decodes after a prompt of `context` tokens."""
    prompt = ",".join(str(i * 37 % models.vocabulary_size(path)) for i in range(context))
    command = [RUNNER, path, "--prompt-ids", "-", "--ids", "--ignore-eos", "--max-new-tokens", str(steps)]
    command += ["--temperature=0.8", "--top-k=40", "--top-p=0.9", "--seed=1"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    process.stdin.write(prompt)
    process.stdin.close()
    used = 0
    for _ in range(steps - 1):  # one line per token; the process may end with the last one
        process.stdout.readline()
        used = resident(process.pid)
    process.stdout.read()
    if process.wait():
        raise SystemExit(f"the runner failed on {path}")
    return used


def runner_baseline() -> int:
    """Resident memory of mlx_llm_runner in bytes before it loads a model.

    The file of the model is a named pipe without data, so that the process waits.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pte"
        os.mkfifo(path)
        process = subprocess.Popen([RUNNER, path, "--prompt-ids", "1"], stderr=subprocess.DEVNULL)
        time.sleep(1)
        used = resident(process.pid)
        process.kill()
        process.wait()
    return used


class Table:
    """Prints a table: a line per measurement, with the values of the three sides and the ratios."""

    def __init__(self, title: str):
        names = f"{'ours':>10}{'mlx-lm':>10}{'ratio':>9}{'bar':>9}{'XNNPACK':>10}{'ratio':>9}"
        print(f"\n{title}\n{'':34}{names}", flush=True)

    def row(self, name: str, ours=None, peer=None, xnnpack=None, bar: str = "") -> None:
        cells = [cell(ours, 10), cell(peer, 10), ratio(ours, peer), f"{bar:>9}"]
        print(f"{name:34}{''.join([*cells, cell(xnnpack, 10), ratio(ours, xnnpack)])}".rstrip(), flush=True)


def cell(value: float | None, width: int) -> str:
    return " " * width if value is None else f"{value:{width}.{2 if abs(value) >= 1 else 4}f}"


def ratio(a: float | None, b: float | None) -> str:
    return " " * 9 if None in (a, b) else f"{a / b:8.2f}x"


def measure_sides(
    shape: str, weight_format: str, options: argparse.Namespace, contexts: list[int]
) -> list[dict | None]:
    """The measurements of this delegate, of mlx-lm and of XNNPACK. None for a side that `--only` leaves out."""
    capacity = CAPACITY[shape]
    lengths = ["--prefill", *options.prefill, "--context", *contexts, "--steps", options.steps]
    lengths += ["--repeats", options.repeats]
    ours = peer = xnnpack = None
    if "ours" in options.only:
        ours = run_worker("ours.py", program_path(shape, weight_format, capacity), *lengths)
    if "mlx-lm" in options.only:
        peer = run_worker(
            "peer.py",
            models.folder_of(shape, weight_format, BUILD),
            "--prefill",
            options.peer_prefill,
            "--context",
            *contexts,
            "--steps",
            options.peer_steps,
        )
    if "xnnpack" in options.only:
        path = program_path(shape, weight_format, capacity, "xnnpack_model.py", "-xnnpack")
        vocabulary = models.vocabulary_size(program_path(shape, weight_format, capacity))
        xnnpack = run_worker("xnnpack.py", path, "--vocabulary", vocabulary, *lengths)
    return [ours, peer, xnnpack]


def compare(shape: str, weight_format: str, options: argparse.Namespace) -> None:
    contexts = [n for n in options.context if n + options.steps < CAPACITY[shape]]
    options.prefill = [n for n in options.prefill if n < CAPACITY[shape]]
    sides = measure_sides(shape, weight_format, options, contexts)
    ours, peer, xnnpack = sides
    table = Table(f"{shape}, {weight_format}, {time.strftime('%H:%M')}")
    if xnnpack:
        print(f"XNNPACK uses {xnnpack['threads']} threads")
    is_large = shape != "demo"
    peer_rate = None if peer is None else options.peer_prefill / peer["prefill"][str(options.peer_prefill)]
    for length in options.prefill:
        a, c = (each and length / each["prefill"][str(length)] for each in (ours, xnnpack))
        bar = ">= 20x" if weight_format == "float32" and length in (128, 512) and is_large else ""
        table.row(f"prefill of {length}, tokens/s", a, peer_rate, c, bar)
    for length in contexts:
        rates = [each and 1 / each["decode"][str(length)] for each in sides]
        table.row(f"decode after {length}, tokens/s", *rates, ">= 1.3x" if is_large else "")
    table.row("load, s", *[each and each["load"] for each in sides], "<= 1x")
    for length in contexts:
        used = [each and each["resident"][str(length)] / 1e6 for each in sides]
        table.row(f"memory after {length}, MB: Python", *used)
    table.row("  before load", *[each and each["before"] / 1e6 for each in sides])
    if ours:
        print_runner_memory(shape, weight_format, contexts)


def print_runner_memory(shape: str, weight_format: str, contexts: list[int]) -> None:
    """The memory of mlx_llm_runner, whose process contains no Python interpreter."""
    weights = models.weight_bytes(shape, weight_format, BUILD)
    needed = (weights + models.cache_bytes(shape, CAPACITY[shape], BUILD)) / 1e6
    baseline = runner_baseline() / 1e6
    print(f"mlx_llm_runner: {baseline:.1f} MB before load; weights and caches are {needed:.1f} MB")
    for length in contexts:
        used = runner_memory(program_path(shape, weight_format, CAPACITY[shape]), length, 6) / 1e6
        print(
            f"  after {length}: {used:.1f} MB, {used / needed:.2f} of weights and caches (bar <= 1.25); "
            f"without the memory before load {(used - baseline) / needed:.2f}"
        )


def compare_capacities(shape: str, weight_format: str) -> None:
    """Compare the time of a decode step at one position between two capacities of the caches."""
    times = dict.fromkeys(CAPACITIES, float("inf"))
    for capacity in CAPACITIES * 4:  # alternate, and keep the best times: other processes disturb some of them
        result = run_worker("ours.py", program_path(shape, weight_format, capacity), "--context", 128, "--steps", 64)
        times[capacity] = min(times[capacity], result["decode"]["128"] * 1e3)
    small, large = times.values()
    print(f"\n{shape}, {weight_format}: a decode step after 128 tokens")
    for capacity, milliseconds in times.items():
        print(f"  capacity {capacity:5}: {milliseconds:8.2f} ms")
    print(f"  ratio {large / small:.2f}   (bar 0.90 to 1.10)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--shape", choices=models.SHAPES, default="qwen3-0.6b")
    parser.add_argument("--format", choices=models.FORMATS, nargs="*", default=list(models.FORMATS))
    parser.add_argument("--prefill", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--context", type=int, nargs="*", default=[128, 2048])
    parser.add_argument("--steps", type=int, default=16, help="decode steps (ours and XNNPACK)")
    parser.add_argument("--repeats", type=int, default=3, help="prompts of each length (ours and XNNPACK)")
    parser.add_argument("--peer-prefill", type=int, default=16, help="prompt length for mlx-lm")
    parser.add_argument("--peer-steps", type=int, default=4, help="decode steps for mlx-lm")
    parser.add_argument("--only", choices=SIDES, nargs="*", default=SIDES, help="measure only these sides")
    parser.add_argument("--no-capacities", action="store_true", help="do not compare capacities")
    options = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    for weight_format in options.format:
        compare(options.shape, weight_format, options)
    if not options.no_capacities and "ours" in options.only and options.shape != "demo":
        compare_capacities(options.shape, options.format[-1])


if __name__ == "__main__":
    main()
