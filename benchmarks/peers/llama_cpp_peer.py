"""Measures llama.cpp through llama-cpp-python. benchmarks/peers_cpu.py runs it in a Python environment of its own.

    python benchmarks/peers/llama_cpp_peer.py FILE.gguf --prefill 128 512 --context 128 2048 --steps 16

The last line of the output is JSON: for `prefill` and `decode`, the seconds by length of the prompt.
"""

from __future__ import annotations

import time

import llama_cpp
from common import parse_arguments, positions, prompt_of, report
from llama_cpp_model import Context

CHUNK = 512  # tokens in one call


def main() -> None:
    options = parse_arguments(__doc__)
    cache = llama_cpp.GGML_TYPE_F32 if options.format == "float32" else llama_cpp.GGML_TYPE_F16
    context = Context(
        options.model,
        options.threads,
        n_ctx=positions(options),
        n_batch=CHUNK,
        n_ubatch=CHUNK,
        type_k=cache,
        type_v=cache,
    )

    def call(tokens: list[int]) -> int:
        """Append tokens to the context. Return the most likely next token."""
        for first in range(0, len(tokens), CHUNK):
            part = tokens[first : first + CHUNK]
            array = (llama_cpp.llama_token * len(part))(*part)
            context.decode(llama_cpp.llama_batch_get_one(array, len(part)))
        return context.most_likely(-1)

    def timed(tokens: list[int]) -> tuple[int, float]:
        begin = time.perf_counter()
        return call(tokens), time.perf_counter() - begin

    def fill(length: int) -> tuple[int, float]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context.handle), True)
        return timed(prompt_of(length))

    def decode(length: int, steps: int) -> list[float]:
        token, _ = fill(length)
        times = []
        for _ in range(steps):
            token, spent = timed([token])
            times.append(spent)
        return times

    report(options, lambda length: fill(length)[1], decode)


if __name__ == "__main__":
    main()
