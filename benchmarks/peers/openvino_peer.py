"""Measures OpenVINO GenAI. benchmarks/peers_cpu.py runs it in a Python environment of its own.

    python benchmarks/peers/openvino_peer.py FOLDER --format int4 --prefill 128 512 --context 128 2048 --steps 16

openvino_model.py writes FOLDER. The pipeline uses its default attention for CPUs, paged attention, without reuse of
prompts. A prefill is one call with all tokens. It computes the logits of the last token only. Tokens are drawn
greedily. The last line of the output is JSON: for `prefill` and `decode`, the seconds by length of the prompt.
"""

from __future__ import annotations

import time

import numpy as np
import openvino
import openvino_genai as genai
from common import parse_arguments, positions, prompt_of, report

# Without settings, OpenVINO computes in bfloat16 if the processor can, rounds activations to 8 bits for products with
# quantized weights, and has 8-bit KV caches.
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
PROPERTIES = {
    "float32": FLOAT32,
    "bf16": {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"},
    "int8": FLOAT32,
    "int4": FLOAT32,
    "w8a8": {"KV_CACHE_PRECISION": "f16"},
    "w4a8": {"KV_CACHE_PRECISION": "f16"},
}
BLOCK = 32  # positions in a block of the paged KV cache


def main() -> None:
    options = parse_arguments(__doc__)
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = positions(options)
    scheduler.num_kv_blocks = -(-positions(options) // BLOCK) + 1
    properties = PROPERTIES[options.format] | {"INFERENCE_NUM_THREADS": options.threads}
    pipeline = genai.LLMPipeline(options.model, "CPU", scheduler_config=scheduler, **properties)

    def generate(length: int, count: int) -> genai.EncodedResults:
        tokens = openvino.Tensor(np.array([prompt_of(length)]))
        return pipeline.generate(tokens, max_new_tokens=count, ignore_eos=True, do_sample=False)

    def prefill(length: int) -> float:
        begin = time.perf_counter()
        generate(length, 1)
        return time.perf_counter() - begin

    def decode(length: int, steps: int) -> list[float]:
        microseconds = generate(length, steps + 1).perf_metrics.raw_metrics.m_durations  # without the first token
        return [value / 1e6 for value in microseconds]

    report(options, prefill, decode)


if __name__ == "__main__":
    main()
