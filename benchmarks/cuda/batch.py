"""Tokens per second of several requests at once on an NVIDIA GPU: this delegate, and mlx-lm's batch generator.

    python benchmarks/cuda/batch.py ROOT qwen3-0.6b-rows8

ROOT is the folder of the unpacked bundle, which has the program: export.py --rows 8. As many requests as the program
has rows start together. Each has its own prompt of 128 tokens and generates 128 tokens. The time is that from the
start of the first request to the end of the last. Each side runs in a process of its own, and prints the best of six
runs. `sampled` has temperature 0.8, top_p 0.9 and top_k 40.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

PROMPT, STEPS, REPEATS = 128, 128, 6
SAMPLED = {"top_p": 0.9, "top_k": 40}
KINDS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8, **SAMPLED}}


def prompts(rows: int) -> list[list[int]]:
    return [[(37 * i + 101 * row + 11) % 50_000 for i in range(PROMPT)] for row in range(rows)]


def ours(program: str, rows: int) -> dict[str, float]:
    from executorch_mlx import LLM

    llm = LLM.load(program, reuse_prompts=False)
    speeds = {}
    for kind, parameters in KINDS.items():
        times = []
        for _ in range(1 + REPEATS):
            begin = time.perf_counter()
            options = {"max_new_tokens": STEPS, "ignore_eos": True, "draft": 0, **parameters}
            answers = [llm.generate(prompt, **options) for prompt in prompts(rows)]
            for answer in answers:
                answer.result()
            times.append(time.perf_counter() - begin)
        speeds[kind] = rows * STEPS / min(times[1:])
    return speeds


def mlx_lm(shape: str, rows: int) -> dict[str, float]:
    import mlx.core as mx
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.sample_utils import make_sampler
    from shapes import SHAPES

    config = SHAPES[shape]
    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    samplers = {"greedy": make_sampler(temp=0.0), "sampled": make_sampler(temp=0.8, **SAMPLED)}
    speeds = {}
    for kind, sampler in samplers.items():
        times = []
        for _ in range(1 + REPEATS):
            begin = time.perf_counter()
            generator = BatchGenerator(
                model, max_tokens=STEPS, sampler=sampler, completion_batch_size=rows, prefill_batch_size=rows
            )
            generator.insert(prompts(rows))
            while generator.next_generated():
                pass
            generator.close()
            times.append(time.perf_counter() - begin)
        speeds[kind] = rows * STEPS / min(times[1:])
    return speeds


def main() -> None:
    if sys.argv[1] == "--side":
        side, name, rows = sys.argv[2:]
        return print(json.dumps({"ours": ours, "mlx_lm": mlx_lm}[side](name, int(rows))))
    from run import write_program

    root, name = Path(sys.argv[1]), sys.argv[2]
    shape, rows = name.rsplit("-rows", 1)
    arguments = {"ours": str(write_program(root, name)), "mlx_lm": shape}
    speeds = {}
    for side, argument in arguments.items():
        command = [sys.executable, __file__, "--side", side, argument, rows]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise SystemExit(f"{side}: failed\n{done.stderr[-3000:]}")
        speeds[side] = json.loads(done.stdout.splitlines()[-1])
    for kind in KINDS:
        a, b = (speeds[side][kind] for side in arguments)
        print(f"{name}, {kind}: ours {a:.1f} tokens/s, mlx-lm {b:.1f} tokens/s, ratio {a / b:.2f}")


if __name__ == "__main__":
    main()
