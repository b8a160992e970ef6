"""Measures llama.cpp through llama-cpp-python. benchmarks/peers_cpu.py runs it in a Python environment of its own.

    python benchmarks/peers/llama_cpp_peer.py FILE.gguf --prefill 128 512 --context 128 2048 --steps 16

The last line of the output is JSON: for `prefill` and `decode`, the seconds by length of the prompt.
"""

from __future__ import annotations

import ctypes
import time

import llama_cpp
import numpy as np
from common import parse_arguments, positions, prompt_of, report

CHUNK = 512  # tokens in one call


def main() -> None:
    options = parse_arguments(__doc__)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(options.model.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = positions(options)
    params.n_batch = params.n_ubatch = CHUNK
    params.n_threads = params.n_threads_batch = options.threads
    context = llama_cpp.llama_init_from_model(model, params)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def call(tokens: list[int]) -> int:
        """Append tokens to the context. Return the most likely next token."""
        for first in range(0, len(tokens), CHUNK):
            part = tokens[first : first + CHUNK]
            array = (llama_cpp.llama_token * len(part))(*part)
            if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(part))):
                raise RuntimeError("llama_decode failed")
        logits = llama_cpp.llama_get_logits_ith(context, -1)
        floats = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(floats, (vocabulary,)).argmax())

    def timed(tokens: list[int]) -> tuple[int, float]:
        begin = time.perf_counter()
        return call(tokens), time.perf_counter() - begin

    def fill(length: int) -> tuple[int, float]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
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
