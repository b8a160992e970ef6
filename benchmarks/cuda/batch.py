"""Tokens per second of several requests at once on an NVIDIA GPU: this delegate, mlx-lm and llama.cpp.

    python benchmarks/cuda/batch.py ROOT qwen3-0.6b-rows8

ROOT is the folder of the unpacked bundle, which has the program: export.py --rows 8. As many requests as the program
has rows start together. Each has its own prompt of 128 tokens and generates 128 tokens. The time is that from the
start of the first request to the end of the last. Each side runs in a process of its own, and prints the best of six
runs; llama.cpp runs if the bundle has its sources, three times, without a sampler. `sampled` has temperature 0.8,
top_p 0.9 and top_k 40.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

PROMPT, STEPS, REPEATS = 128, 128, 6
KINDS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8, "top_p": 0.9, "top_k": 40}}


def prompts(rows: int) -> list[list[int]]:
    return [[(37 * i + 101 * row + 11) % 50_000 for i in range(PROMPT)] for row in range(rows)]


def speed(rows: int, run: Callable[[], None]) -> float:
    """Return the tokens per second of the best run. The first one is not timed."""
    times = []
    for _ in range(1 + REPEATS):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return rows * STEPS / min(times[1:])


def ours(program: str, rows: int) -> dict[str, float]:
    from executorch_mlx import LLM

    llm = LLM.load(program, reuse_prompts=False)

    def run(parameters):
        options = {"max_new_tokens": STEPS, "ignore_eos": True, "draft": 0, **parameters}
        answers = [llm.generate(prompt, **options) for prompt in prompts(rows)]
        for answer in answers:
            answer.result()

    return {kind: speed(rows, partial(run, parameters)) for kind, parameters in KINDS.items()}


def mlx_lm(shape: str, rows: int) -> dict[str, float]:
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.sample_utils import make_sampler
    from mlx_lm_side import load

    model = load(shape)

    def run(temperature, **options):
        generator = BatchGenerator(
            model,
            max_tokens=STEPS,
            sampler=make_sampler(temp=temperature, **options),
            completion_batch_size=rows,
            prefill_batch_size=rows,
        )
        generator.insert(prompts(rows))
        while generator.next_generated():
            pass
        generator.close()

    return {kind: speed(rows, partial(run, **parameters)) for kind, parameters in KINDS.items()}


def llama_cpp(shape: str, rows: int) -> dict[str, float]:
    import llama_cpp_side

    llama_cpp_side.build()
    return llama_cpp_side.several_requests(llama_cpp_side.write_model(shape), rows)


def main() -> None:
    if sys.argv[1] == "--side":
        side, name, rows = sys.argv[2:]
        return print(json.dumps({"ours": ours, "mlx_lm": mlx_lm, "llama_cpp": llama_cpp}[side](name, int(rows))))
    from run import write_program

    root, name = Path(sys.argv[1]), sys.argv[2]
    shape, rows = name.rsplit("-rows", 1)
    arguments = {"ours": str(write_program(root, name)), "mlx_lm": shape}
    if (root / "llama.cpp").exists():
        arguments["llama_cpp"] = shape
    speeds = {}
    for side, argument in arguments.items():
        command = [sys.executable, __file__, "--side", side, argument, rows]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise SystemExit(f"{side}: failed\n{done.stderr[-3000:]}")
        speeds[side] = json.loads(done.stdout.splitlines()[-1])
    for side in list(arguments)[1:]:
        for kind in KINDS.keys() & speeds[side].keys():
            a, b = speeds["ours"][kind], speeds[side][kind]
            print(f"{name}, {kind}: ours {a:.1f} tokens/s, {side} {b:.1f} tokens/s, ratio {a / b:.2f}")


if __name__ == "__main__":
    main()
