"""Measures ONNX Runtime GenAI. benchmarks/peers_cpu.py runs it in a Python environment of its own.

    python benchmarks/peers/onnxruntime_peer.py FOLDER --prefill 128 512 --context 128 2048 --steps 16

onnxruntime_model.py writes FOLDER. A prefill is one call with all tokens. It computes the logits of the last token
only. KV caches are float32. Tokens are drawn greedily. The last line of the output is JSON: for `prefill` and `decode`,
the seconds by length of the prompt.
"""

from __future__ import annotations

import json
import time

import onnxruntime_genai as genai
from common import parse_arguments, positions, prompt_of, report


def main() -> None:
    options = parse_arguments(__doc__)
    config = genai.Config(options.model)
    session = {"intra_op_num_threads": options.threads}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    model = genai.Model(config)
    params = genai.GeneratorParams(model)
    capacity = positions(options)
    # No end-of-sequence token ends an answer before `min_length`.
    params.set_search_options(max_length=capacity, min_length=capacity, do_sample=False)

    def fill(length: int) -> tuple[genai.Generator, float]:
        generator = genai.Generator(model, params)  # allocates the KV caches
        begin = time.perf_counter()
        generator.append_tokens(prompt_of(length))
        generator.generate_next_token()
        return generator, time.perf_counter() - begin

    def decode(length: int, steps: int) -> list[float]:
        generator, _ = fill(length)
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            generator.generate_next_token()
            times.append(time.perf_counter() - begin)
        return times

    report(options, lambda length: fill(length)[1], decode)


if __name__ == "__main__":
    main()
