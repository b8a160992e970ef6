"""The time to load the saved KV cache of a long prompt, beside the time to compute it.

    python benchmarks/prefix.py                     # 26,000 tokens, the shape of Qwen3-0.6B, weights in 4 bits
    python benchmarks/prefix.py --tokens 2000

One process computes the prompt, saves its KV cache and goes on with the answer. A new process loads the file, which the
operating system may still hold in memory, and must give the same answer. The weights are random.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import engine

ANSWER = 8  # tokens


def answer_of(llm, prompt: list[int]):
    return llm.generate(prompt, max_new_tokens=ANSWER, draft=0, **engine.SAMPLED).result()


def measure_save(program: str, tokens: int, prefix: str) -> dict:
    """Return the seconds to compute the prompt and to save its KV cache, and the answer."""
    from executorch_mlx import LLM

    prompt = engine.prompt_of(tokens)
    with LLM.load(program) as llm:
        cold = answer_of(llm, prompt)
        begin = time.perf_counter()
        llm.save_prefix(prompt, prefix)
        return {"prompt": cold.metrics.prompt_seconds, "save": time.perf_counter() - begin, "answer": cold.tokens}


def measure_load(program: str, tokens: int, prefix: str) -> dict:
    """Return the seconds to load the file, the number of tokens that the answer did not compute, and the answer."""
    from executorch_mlx import LLM

    with LLM.load(program) as llm:
        begin = time.perf_counter()
        llm.load_prefix(prefix)
        seconds = time.perf_counter() - begin
        warm = answer_of(llm, engine.prompt_of(tokens))
        return {"load": seconds, "cached": warm.metrics.cached_tokens, "answer": warm.tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=26_000)
    parser.add_argument("--format", default="w4a8")
    options = parser.parse_args()
    program = str(engine.program_path(options.format, 1, options.tokens + 2 * ANSWER))
    with tempfile.TemporaryDirectory(dir=engine.BUILD) as folder:
        prefix = Path(folder) / "prefix"
        call = f"({program!r}, {options.tokens}, {str(prefix)!r})"
        cold = engine.in_process("measure_save" + call, module="prefix")
        size = prefix.stat().st_size / 1e9
        warm = engine.in_process("measure_load" + call, module="prefix")
    engine.print_line(f"{options.format}: compute {options.tokens} tokens, s", f"{cold['prompt']:.1f}")
    engine.print_line(f"  save their KV cache, {size:.1f} GB, s", f"{cold['save']:.2f}")
    engine.print_line("  load it in a new process, s", f"{warm['load']:.2f}", "<= 5")
    engine.print_line("  tokens that the answer did not compute", f"{warm['cached']}")
    engine.print_line("  same answer", str(warm["answer"] == cold["answer"]), "True")


if __name__ == "__main__":
    main()
