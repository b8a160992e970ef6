"""Measures several requests at once in llama.cpp. benchmarks/engine.py runs it in a Python environment of its own.

    python benchmarks/peers/llama_cpp_batch.py FILE.gguf --requests 8 --steps 32 --threads 2

Each request is a sequence of the KV cache, and each call decodes one token of all sequences, as llama.cpp's server does.
Tokens are drawn greedily. The last line of the output is the tokens per second of all requests together, after prompts
of 64 tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import time

import llama_cpp
import numpy as np
from common import prompt_of

PROMPT = 64  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    requests = range(options.requests)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(options.model.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = options.requests * 256 * -(-(PROMPT + options.steps + 1) // 256)
    params.n_seq_max = options.requests
    params.n_threads = params.n_threads_batch = options.threads
    context = llama_cpp.llama_init_from_model(model, params)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(max(PROMPT, options.requests), 0, 1)

    def call(entries: list[tuple[int, int, int]]) -> list[int]:
        """Append (token, position, sequence) to the cache. Return the most likely next token after each entry."""
        batch.n_tokens = len(entries)
        for i, (token, position, sequence) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, 1
            batch.seq_id[i][0] = sequence
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        rows = [llama_cpp.llama_get_logits_ith(context, i) for i in range(len(entries))]
        floats = [ctypes.cast(row, ctypes.POINTER(ctypes.c_float)) for row in rows]
        return [int(np.ctypeslib.as_array(row, (vocabulary,)).argmax()) for row in floats]

    tokens = [call([(t, i, r) for i, t in enumerate(prompt_of(PROMPT))])[-1] for r in requests]
    begin = time.perf_counter()
    for step in range(options.steps):
        tokens = call([(tokens[r], PROMPT + step, r) for r in requests])
    print(options.requests * options.steps / (time.perf_counter() - begin))


if __name__ == "__main__":
    main()
