"""The engine: concurrent requests, what rows cost, the stall during a long prefill, speculation, and cold start.

    python benchmarks/engine.py                        # the architecture of Qwen3-0.6B, float32 and int4
    python benchmarks/engine.py --only throughput --format int4 --rows 4
    python benchmarks/engine.py --only throughput --format w4a8         # int4 with activations in 8 bits
    python benchmarks/engine.py --only throughput --format int4_bf16    # int4 with bfloat16 activations
    python benchmarks/engine.py --peer llama.cpp       # also several sequences at once in llama.cpp; needs make peers
    python benchmarks/engine.py --peer mlx-lm          # also the batch generator of mlx-lm, which is slow on a CPU

The model has random weights, or is examples/demo_model where the line says so. Each measurement runs in its own
process. `bar` is the required value.

- throughput: tokens per second of all answers together, while `rows` requests run, and while one request runs.
- rows: programs with 1, 2 and 4 rows, in turns: memory that is allocated and in use after an answer, and the tokens per
  second of one request and of as many requests as rows.
- stall: the longest time between two tokens of an answer while another prompt of 2,000 tokens is prefilled, with and
  without the time of the chunk between the two tokens.
- repeat: an answer that repeats a text of 500 tokens from its prompt, with speculation and without. In both runs, a
  mask of allowed tokens makes the model repeat the text.
- prose: an answer of the demo model, with speculation and without.
- cold: the wall time of `executorch-mlx run`, from the start of the process to the end, for one token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "benchmarks" / "llm"
DEMO = ROOT / "examples" / "demo_model"
SHAPE = "qwen3-0.6b"
CAPACITY = 2304
MEASUREMENTS = ("throughput", "rows", "stall", "repeat", "prose", "cold")
SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 1, "ignore_eos": True}

sys.path[:0] = [str(ROOT / "benchmarks" / "llm"), str(ROOT / "benchmarks")]
import models  # noqa: E402
import peers_cpu  # noqa: E402


def program_path(weight_format: str, rows: int, capacity: int = CAPACITY) -> Path:
    """Return the path of the random model with `rows` rows. Export the model first if the file does not exist."""
    path = BUILD / f"{SHAPE}-{weight_format}-{capacity}-rows{rows}.pte"
    if not path.exists():
        print(f"building {path.name} ...", flush=True)
        BUILD.mkdir(parents=True, exist_ok=True)
        code = f"import engine; engine.export({weight_format!r}, {rows}, {capacity}, {str(path)!r})"
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT / "benchmarks", check=True)
    return path


def export(weight_format: str, rows: int, capacity: int, path: str) -> None:
    from executorch_mlx.llm.export import HeadConfig, export_llm

    model = models.load(models.folder_of(SHAPE, weight_format, BUILD))
    head = HeadConfig(allowed_tokens=True)
    options = {"head": head, "verify": False} | models.activations_of(weight_format)
    exported = export_llm(model, max_context_len=capacity, batch=rows, **options)
    unfinished = Path(path).with_suffix(".part")
    exported.save(unfinished)
    unfinished.rename(path)


# Measurements, each in its own process --------------------------------------------------


def prompt_of(length: int, key: int = 0) -> list[int]:
    return [(i * 37 + key * 101 + 11) % 50_000 for i in range(length)]


def measure_throughput(path: str, requests: int, seconds: float) -> float:
    """Tokens per second while `requests` answers run side by side."""
    from executorch_mlx import LLM

    with LLM.load(path) as llm:
        options = SAMPLED | {"max_new_tokens": 2000, "draft": 0}
        generations = [llm.generate(prompt_of(64, key), **options) for key in range(requests)]
        for generation in generations:
            next(generation)
        before, begin = llm.stats.generated_tokens, time.perf_counter()
        time.sleep(seconds)
        count, end = llm.stats.generated_tokens - before, time.perf_counter()
        for generation in generations:
            generation.close()
    return count / (end - begin)


def measure_memory(path: str) -> dict[str, float]:
    """The memory in bytes that MLX has allocated, and that the process uses, after an answer. Linux only."""
    from executorch_mlx import LLM, memory

    with LLM.load(path) as llm:
        llm.generate(prompt_of(64), max_new_tokens=8, **SAMPLED).result()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {"allocated": memory.get_active_memory(), "used": pages * os.sysconf("SC_PAGE_SIZE")}


def measure_row_speeds(paths: dict[int, str], rounds: int) -> list[list]:
    """Return a list of [rows, requests, tokens per second of all requests].

    Each speed is the highest average over 8 steps. The programs take turns, `rounds` times.
    """
    from executorch_mlx import LLM

    llms = {count: LLM.load(path) for count, path in paths.items()}
    cases = sorted({(count, requests) for count in paths for requests in (1, count)})
    best = dict.fromkeys(cases, 0.0)
    for _ in range(rounds):
        for count, requests in cases:
            options = SAMPLED | {"max_new_tokens": 200, "draft": 0}
            generations = [llms[count].generate(prompt_of(64, key), **options) for key in range(requests)]
            for generation in generations:
                next(generation)  # the first token: then the prompt is prefilled
            for _ in range(4):
                before = llms[count].stats
                for _ in range(8):
                    next(generations[0])
                after = llms[count].stats
                seconds = after.busy_seconds - before.busy_seconds
                if seconds > 0:
                    rate = (after.generated_tokens - before.generated_tokens) / seconds
                    best[count, requests] = max(best[count, requests], rate)
            for generation in generations:
                generation.close()
    return [[*case, rate] for case, rate in best.items()]


def measure_stall(path: str, length: int) -> dict[str, float]:
    """Return seconds of the run of one answer, while another prompt of `length` tokens is prefilled.

    - `step`: the median time between two tokens before the prefill.
    - `longest`: the longest time between two tokens during the prefill.
    - `chunk` and `longest_chunk`: the mean and the longest time of a chunk of the prefill. Chunks alternate with steps
      of the answer.
    - `without_chunk`: the longest time between two tokens beyond the time of the chunk between them.
    """
    from executorch_mlx import LLM

    with LLM.load(path, reuse_prompts=False) as llm:
        times: list[float] = []
        busy: list[float] = []  # seconds that the engine has worked
        options = SAMPLED | {"draft": 0}

        def read(generation) -> None:
            for _ in generation:
                times.append(time.perf_counter())
                busy.append(llm.stats.busy_seconds)

        running = llm.generate(prompt_of(64), max_new_tokens=2000, **options)
        reader = threading.Thread(target=read, args=[running])
        reader.start()
        while len(times) < 20:
            time.sleep(0.1)
        begin = time.perf_counter()
        other = llm.generate(prompt_of(length, 1), max_new_tokens=1, **options)
        other.result()
        end = time.perf_counter()
        running.close()
        reader.join()
    gaps = [(a, b - a) for a, b in zip(times, times[1:])]
    step = statistics.median(gap for at, gap in gaps if at < begin)
    during = [gap for at, gap in gaps if begin <= at < end]
    work = [b - a for at, a, b in zip(times, busy, busy[1:]) if begin <= at < end]
    return {
        "step": step,
        "longest": max(during),
        "chunk": statistics.mean(work) - step,
        "longest_chunk": max(work) - step,
        "without_chunk": max(gap - (seconds - step) for gap, seconds in zip(during, work)),
    }


def measure_repeat(path: str, length: int, draft: int) -> float:
    """Tokens per second of an answer that repeats `length` tokens of its prompt."""
    from executorch_mlx import LLM
    from executorch_mlx.llm.scoring import allow_only

    text = prompt_of(length)
    with LLM.load(path) as llm:

        def allowed(answer):
            return allow_only(llm.program.vocab_size, [text[len(answer) % length]])

        generation = llm.generate(text, max_new_tokens=length, draft=draft, allowed_tokens=allowed, **SAMPLED)
        result = generation.result()
    assert result.tokens == text, "the answer does not repeat the text"
    return result.metrics.generation_tokens_per_second


def measure_prose(path: str, draft: int) -> float:
    """Tokens per second of answers of the demo model."""
    from executorch_mlx import LLM

    with LLM.load(path) as llm:
        rates = []
        for seed in range(5):
            options = SAMPLED | {"seed": seed, "max_new_tokens": 400, "draft": draft}
            rates.append(llm.generate("Once upon a time", **options).result().metrics.generation_tokens_per_second)
    return statistics.median(rates)


def in_process(call: str, module: str = "engine") -> object:
    """Evaluate `call`, an expression of this module or another one, in a new process, and return its value."""
    code = f"import json, {module}; print(json.dumps({module}.{call}))"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "benchmarks")
    if done.returncode:
        raise SystemExit(f"{call} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# The table ------------------------------------------------------------------------------


def print_line(name: str, value: str, bar: str = "") -> None:
    print(f"{name:44}{value:>34}   {bar}".rstrip(), flush=True)


def print_throughput(weight_format: str, rows: list[int], rounds: int) -> None:
    for count in rows:
        path = str(program_path(weight_format, count))
        rates: dict[int, list[float]] = {1: [], count: []}
        for _ in range(rounds):
            for requests, values in rates.items():
                values.append(in_process(f"measure_throughput({path!r}, {requests}, 6.0)"))
        one, many = (statistics.median(values) for values in rates.values())
        bar = {4: ">= 2.5x", 8: ">= 3.5x"}.get(count, "")
        speeds = f"{many:.1f} / {one:.1f} = {many / one:.2f}x"
        print_line(f"{weight_format}: {count} requests over 1, tokens/s", speeds, bar)
        single = statistics.median(
            in_process(f"measure_throughput({str(program_path(weight_format, 1))!r}, 1, 6.0)") for _ in range(rounds)
        )
        speeds = f"{one:.1f} / {single:.1f} = {one / single:.2f}x"
        print_line(f"  1 request, {count} rows over 1 row, tokens/s", speeds, ">= 0.90x")


def print_row_costs(weight_format: str, rounds: int) -> None:
    paths = {count: str(program_path(weight_format, count)) for count in (1, 2, 4)}
    for count, path in paths.items():
        memory = in_process(f"measure_memory({path!r})")
        value = f"{memory['allocated'] / 1e6:.0f} / {memory['used'] / 1e6:.0f}"
        print_line(f"{weight_format}: {count} rows, MB allocated / in use", value)
    speeds = in_process(f"measure_row_speeds({paths!r}, {rounds})")
    for count, requests, rate in speeds:
        name = f"{weight_format}: {count} rows, {requests} requests, tokens/s"
        print_line(name, f"{rate:.1f}", f">= {speeds[0][2] / 1.1:.1f}" if requests == 1 < count else "")


def print_stall(weight_format: str, rows: int) -> None:
    result = in_process(f"measure_stall({str(program_path(weight_format, rows))!r}, 2000)")
    longest, step, chunk, longest_chunk, without_chunk = (
        1e3 * result[name] for name in ("longest", "step", "chunk", "longest_chunk", "without_chunk")
    )
    value = f"{longest:.0f} ms; a step {step:.0f}, a chunk {chunk:.0f}"
    bar = f"<= {2 * step + chunk:.0f} ms: two steps and a mean chunk"
    print_line(f"{weight_format}: longest stall, prefill of 2,000", value, bar)
    print_line("  longest stall without its own chunk", f"{without_chunk:.0f} ms", f"<= {2 * step:.0f} ms: two steps")
    print_line("  longest chunk", f"{longest_chunk:.0f} ms", "a chunk should take 250 ms")


def print_speculation(path: Path, name: str, call: str, bar: str, rounds: int, max_draft: int = -1) -> None:
    """Print the speed with draft tokens over the speed without.

    `call` is the measurement, an expression with the fields `{path}` and `{draft}`. `max_draft` is the largest number
    of draft tokens, or -1 if the engine chooses it.
    """
    rates = {0: [], max_draft: []}
    for _ in range(rounds):
        for draft, values in rates.items():
            values.append(in_process(call.format(path=str(path), draft=draft)))
    plain, drafted = (statistics.median(values) for values in rates.values())
    print_line(name, f"{drafted:.1f} / {plain:.1f} = {drafted / plain:.2f}x", bar)


def print_cold_start(path: Path, rounds: int) -> None:
    script = Path(sys.executable).parent / "executorch-mlx"
    program = [str(script)] if script.exists() else [sys.executable, "-m", "executorch_mlx.cli.main"]
    command = [*program, "run", str(path), "--prompt", "Once", "--max-new-tokens", "1"]
    times = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - begin)
    print_line("demo: executorch-mlx run, one token, s", f"{statistics.median(times[1:]):.2f}", "<= 0.5")


def export_demo(folder: Path) -> Path:
    path = folder / "demo.pte"
    from executorch_mlx.llm.export import export_llm

    export_llm(DEMO, verify=False).save(path)
    return path


def print_peer(peer: str, weight_format: str, counts: list[int]) -> None:
    """Print the tokens per second of all answers together in another engine."""
    for count in counts:
        rate = RATE_OF_PEER[peer](weight_format, count)
        print_line(f"{weight_format}: {peer}, {count} requests, tokens/s", f"{rate:.2f}")


def mlx_lm_rate(weight_format: str, requests: int) -> float:
    return in_process(f"measure_mlx_lm({str(models.folder_of(SHAPE, weight_format, BUILD))!r}, {requests}, 4)")


def llama_cpp_rate(weight_format: str, requests: int) -> float:
    script = peers_cpu.PEERS / "llama_cpp_batch.py"
    command = [peers_cpu.peer_python("llama_cpp"), script, peers_cpu.gguf_path(SHAPE, weight_format)]
    command += ["--requests", requests, "--threads", len(os.sched_getaffinity(0))]
    done = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


RATE_OF_PEER = {  # engine → function that measures its tokens per second
    "llama.cpp": llama_cpp_rate,
    "mlx-lm": mlx_lm_rate,
}


def measure_mlx_lm(folder: str, requests: int, tokens: int) -> float:
    import mlx.core as mx
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.utils import load_model

    model, _ = load_model(Path(folder))
    generator = BatchGenerator(model, max_tokens=tokens + 2)
    generator.insert([prompt_of(4, key) for key in range(requests)])
    generator.next()
    mx.synchronize()
    begin = time.perf_counter()
    for _ in range(tokens):
        generator.next()
    return requests * tokens / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--format", nargs="*", choices=[*models.ALL_FORMATS, "int4_bf16"], default=list(models.FORMATS))
    parser.add_argument("--rows", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--only", nargs="*", choices=MEASUREMENTS, default=list(MEASUREMENTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", nargs="*", choices=RATE_OF_PEER, default=[], help="also run these engines")
    options = parser.parse_args()
    for weight_format in options.format:
        if "throughput" in options.only:
            print_throughput(weight_format, options.rows, options.rounds)
        if "rows" in options.only:
            print_row_costs(weight_format, 2 * options.rounds)
        for peer in options.peer:
            print_peer(peer, weight_format, [1, *options.rows])
        if "stall" in options.only:
            print_stall(weight_format, 4)
        if "repeat" in options.only:
            call = "measure_repeat({path!r}, 500, {draft})"
            name = f"{weight_format}: repeat 500 tokens, tokens/s"
            # For a request with a mask, the engine uses draft tokens only if their number is given.
            print_speculation(program_path(weight_format, 4), name, call, ">= 4x", options.rounds, max_draft=31)
    with tempfile.TemporaryDirectory() as folder:
        if {"prose", "cold"} & {*options.only}:
            path = export_demo(Path(folder))
        if "prose" in options.only:
            call = "measure_prose({path!r}, {draft})"
            print_speculation(path, "demo: prose, tokens/s", call, ">= 0.98x", options.rounds)
        if "cold" in options.only:
            print_cold_start(path, 2 * options.rounds)


if __name__ == "__main__":
    main()
