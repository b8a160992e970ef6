"""The throughput of `executorch-mlx batch`, against one request at a time.

    python benchmarks/batch.py                       # the architecture of Qwen3-0.6B, int4, 8 rows
    python benchmarks/batch.py --rows 4 --requests 16

The model has random weights. The requests have 64 prompt tokens and 64 to 128 new tokens, drawn with a fixed seed.
Both measurements run the functions of the command `batch`. For one request at a time, the program has one row. The
printed line shows the generated tokens per second of both, their ratio, and the ratio that is required.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME, REQUIRED_RATIO = "model", 3.0
PROMPT_TOKENS, ANSWER_TOKENS = 64, (64, 128)  # ANSWER_TOKENS: smallest and largest number

sys.path.insert(0, str(ROOT / "benchmarks"))
import engine  # noqa: E402


def write_requests(path: Path, count: int) -> None:
    rng = random.Random(0)
    with open(path, "w") as file:
        for number in range(count):
            body = {"model": NAME, "prompt": engine.prompt_of(PROMPT_TOKENS, number)}
            body |= {"max_tokens": rng.randint(*ANSWER_TOKENS)}
            body |= {"temperature": 0.8, "seed": number, "ignore_eos": True}
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def measure(program: str, requests: str) -> float:
    """Return the generated tokens per second of a batch in this process."""
    import time

    from executorch_mlx.batch import RequestLines, Totals, answer_all
    from executorch_mlx.llm import LLM
    from executorch_mlx.serve.local_worker import local_worker

    totals = Totals()

    async def work() -> float:
        with LLM.load(program) as llm:
            async with local_worker(llm, NAME) as worker:
                if llm.rows == 1:
                    worker.width = 1
                begin = time.perf_counter()
                await answer_all(RequestLines(Path(requests)), worker, totals.add)
                return time.perf_counter() - begin

    seconds = asyncio.run(work())
    assert totals.answers and not totals.errors, totals
    return totals.answer_tokens / seconds


def measure_in_process(program: Path, requests: Path) -> float:
    """`measure` in a process of its own."""
    code = f"import batch; print(batch.measure({str(program)!r}, {str(requests)!r}))"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="int4", choices=("float32", "int4", "w4a8"))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32)
    options = parser.parse_args()
    many, one = (engine.program_path(options.format, rows) for rows in (options.rows, 1))
    with tempfile.TemporaryDirectory() as folder:
        requests = Path(folder) / "requests.jsonl"
        write_requests(requests, options.requests)
        alone, batch = measure_in_process(one, requests), measure_in_process(many, requests)
    print(
        f"{engine.SHAPE} {options.format}, {options.requests} requests: one at a time {alone:.1f} tokens/s, batch with "
        f"{options.rows} rows {batch:.1f} tokens/s: {batch / alone:.2f} x, required {REQUIRED_RATIO} x"
    )


if __name__ == "__main__":
    main()
