"""Our language models beside mlx-lm's: speed, load time, memory.

    python benchmarks/llm.py                         # Qwen3-0.6B's shape, float32 and int4
    python benchmarks/llm.py --shape demo
    python benchmarks/llm.py --only ours --format int4

One model with random weights, from a config; both sides load the same numbers (int4 is what
mlx-lm's converter makes, in groups of 64), read the same kind of prompt and sample with
temperature 0.8, top_k 40 and top_p 0.9. Every measurement is a process of its own, one at a time.
Models are built once, in build/benchmarks/llm.

mlx-lm reads a prompt with some two tokens a second here, so its rate is measured on
`--peer-prefill` tokens (it hardly depends on the length) and its cache is filled with random
values for decoding at a length. Times are medians; busy processors make them longer for all.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKERS = ROOT / "benchmarks" / "llm"
BUILD = ROOT / "build" / "benchmarks" / "llm"
CAPACITY = {"qwen3-0.6b": 2304, "demo": 512}  # positions of the caches
CAPACITIES = (512, 8192)

sys.path.insert(0, str(WORKERS))
import models  # noqa: E402
from process import resident  # noqa: E402


def worker(name: str, *arguments: object) -> dict:
    """What a worker has measured: the JSON of its last line."""
    command = [sys.executable, "-W", "ignore", WORKERS / name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def program(shape: str, form: str, capacity: int) -> Path:
    path = BUILD / f"{shape}-{form}-{capacity}.pte"
    if not path.exists():
        print(f"building {path.name} ...", flush=True)
        command = [sys.executable, "-W", "ignore", WORKERS / "models.py"]
        subprocess.run([*command, shape, form, str(capacity), BUILD], check=True, capture_output=True)
    return path


def runner_memory(path: Path, context: int, steps: int) -> int:
    """Bytes that the C++ runner has in use while it decodes behind `context` tokens."""
    prompt = ",".join(str(i * 37 % models.vocabulary(path)) for i in range(context))
    command = [ROOT / "build" / "mlx_llm_runner", path, "--prompt-ids", "-", "--ids", "--ignore-eos"]
    command += ["--max-new-tokens", str(steps), "--temperature=0.8", "--top-k=40", "--top-p=0.9", "--seed=1"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    process.stdin.write(prompt)
    process.stdin.close()
    used = 0
    for _ in range(steps - 1):  # each line is a token: the last one may come with the end
        process.stdout.readline()
        used = resident(process.pid)
    process.stdout.read()
    if process.wait():
        raise SystemExit(f"the runner failed on {path}")
    return used


class Table:
    """Rows of what was measured, with the ratio and its bar."""

    def __init__(self, title: str):
        print(f"\n{title}\n{'':34}{'ours':>10}{'mlx-lm':>10}{'ratio':>9}{'bar':>9}", flush=True)

    def row(self, name: str, ours, peer=None, ratio=None, bar: str = "") -> None:
        cells = [f"{ours:10.2f}" if ours is not None else " " * 10]
        cells.append(f"{peer:10.2f}" if peer is not None else " " * 10)
        cells.append(f"{ratio:8.2f}x" if ratio is not None else " " * 9)
        print(f"{name:34}{''.join(cells)}{bar:>9}", flush=True)


def compare(shape: str, form: str, options: argparse.Namespace) -> None:
    path = program(shape, form, CAPACITY[shape])
    contexts = [n for n in options.context if n + options.steps < CAPACITY[shape]]
    ours = peer = None
    if options.only != "mlx-lm":
        ours = worker(
            "ours.py", path, "--prefill", *options.prefill, "--context", *contexts, "--steps", options.steps,
            "--repeats", options.repeats,
        )
    if options.only != "ours":
        peer = worker(
            "peer.py", BUILD / f"{shape}-{form}", "--prefill", options.peer_prefill, "--context", *contexts,
            "--steps", options.peer_steps,
        )
    table = Table(f"{shape}, {form}, {time.strftime('%H:%M')}")
    dense = form == "float32"

    def rate(result, kind, length, tokens):
        return None if result is None else tokens / result[kind][str(length)]

    def ratio(a, b):
        return None if None in (a, b) else a / b

    theirs = rate(peer, "prefill", options.peer_prefill, options.peer_prefill)
    for length in options.prefill:
        a = rate(ours, "prefill", length, length)
        bar = ">= 20x" if dense and length in (128, 512) and shape != "demo" else ""
        table.row(f"prefill of {length}, tokens/s", a, theirs, ratio(a, theirs), bar)
    for length in contexts:
        a, b = (rate(result, "decode", length, 1) for result in (ours, peer))
        table.row(f"decode after {length}, tokens/s", a, b, ratio(a, b), ">= 1.3x" if shape != "demo" else "")
    a, b = (None if result is None else result["load"] for result in (ours, peer))
    table.row("load, s", a, b, ratio(a, b), "<= 1x")
    memory(table, shape, form, path, contexts, ours, peer)


def memory(table: Table, shape: str, form: str, path: Path, contexts, ours, peer) -> None:
    weights = models.weight_bytes(shape, form, BUILD)
    for length in contexts:
        key = str(length)
        needed = (weights + models.cache_bytes(shape, CAPACITY[shape], BUILD)) / 1e6
        theirs = None if peer is None else peer["resident"][key] / 1e6
        if ours is None:
            continue
        used = runner_memory(path, length, 6) / 1e6
        table.row(f"memory after {length}, MB: runner", used, theirs, None)
        python = ours["resident"][key] / 1e6
        table.row("  the same in Python", python, None, None)
        table.row("  over weights + caches", used, needed, used / needed, "<= 1.25x")


def capacities(shape: str, form: str, steps: int) -> None:
    """A step at one position costs the same whatever the caches could hold."""
    times = dict.fromkeys(CAPACITIES, float("inf"))
    for capacity in CAPACITIES * 3:  # in turn: the better of processors that come and go
        result = worker("ours.py", program(shape, form, capacity), "--context", 128, "--steps", steps)
        times[capacity] = min(times[capacity], result["decode"]["128"] * 1e3)
    small, large = times.values()
    print(f"\n{shape}, {form}: a decode step after 128 tokens")
    for capacity, milliseconds in times.items():
        print(f"  capacity {capacity:5}: {milliseconds:8.2f} ms")
    print(f"  ratio {large / small:.2f}   (bar 0.90 to 1.10)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--shape", choices=models.SHAPES, default="qwen3-0.6b")
    parser.add_argument("--format", choices=models.FORMATS, nargs="*", default=list(models.FORMATS))
    parser.add_argument("--prefill", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--context", type=int, nargs="*", default=[128, 2048])
    parser.add_argument("--steps", type=int, default=16, help="decode steps of ours")
    parser.add_argument("--repeats", type=int, default=3, help="prompts of ours, of each length")
    parser.add_argument("--peer-prefill", type=int, default=16, help="tokens of mlx-lm's prompt")
    parser.add_argument("--peer-steps", type=int, default=4, help="decode steps of mlx-lm")
    parser.add_argument("--only", choices=["ours", "mlx-lm"], help="one side")
    parser.add_argument("--no-capacities", action="store_true", help="leave out the cost of capacity")
    options = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    for form in options.format:
        compare(options.shape, form, options)
    if not options.no_capacities and options.only != "mlx-lm" and options.shape != "demo":
        capacities(options.shape, options.format[-1], options.steps)


if __name__ == "__main__":
    main()
