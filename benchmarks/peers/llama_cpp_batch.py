"""Measures several requests at once in llama.cpp. benchmarks/engine.py runs it in a Python environment of its own.

    python benchmarks/peers/llama_cpp_batch.py FILE.gguf --requests 8 --steps 32 --threads 2

Each request is a sequence of the KV cache, and each call decodes one token of all sequences, as llama.cpp's server
does. Tokens are drawn greedily. The last line of the output is the tokens per second of all requests together, after
prompts of 64 tokens.
"""

from __future__ import annotations

import argparse
import time

import llama_cpp
from common import prompt_of
from llama_cpp_model import Context

PROMPT = 64  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    requests = range(options.requests)
    positions = 256 * -(-(PROMPT + options.steps + 1) // 256)  # of a request
    context = Context(options.model, options.threads, n_ctx=options.requests * positions, n_seq_max=options.requests)
    batch = llama_cpp.llama_batch_init(max(PROMPT, options.requests), 0, 1)

    def call(entries: list[tuple[int, int, int]]) -> list[int]:
        """Append (token, position, sequence) to the cache. Return the most likely next token after each entry."""
        batch.n_tokens = len(entries)
        for i, (token, position, sequence) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, 1
            batch.seq_id[i][0] = sequence
        context.decode(batch)
        return [context.most_likely(i) for i in range(len(entries))]

    tokens = [call([(t, i, r) for i, t in enumerate(prompt_of(PROMPT))])[-1] for r in requests]
    begin = time.perf_counter()
    for step in range(options.steps):
        tokens = call([(tokens[r], PROMPT + step, r) for r in requests])
    print(options.requests * options.steps / (time.perf_counter() - begin))


if __name__ == "__main__":
    main()
