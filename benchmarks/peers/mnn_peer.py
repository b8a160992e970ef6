"""Measures MNN. benchmarks/peers_cpu.py runs it in a Python environment of its own.

    python benchmarks/peers/mnn_peer.py FOLDER --format w4a8 --prefill 128 512 --context 128 2048 --steps 16

mnn_model.py writes FOLDER. A prefill is one call with all tokens. It computes the logits of the last token only. Tokens
are drawn greedily. The times are MNN's own. The last line of the output is JSON: for `prefill` and `decode`, the
seconds by length of the prompt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import MNN.llm
from common import parse_arguments, report

# With memory "low", weights stay quantized, and activations are rounded to 8 bits. With "normal", weights are float32
# in memory, whatever the file has.
FLOAT32 = {"memory": "normal", "precision": "high"}
QUANTIZED = {"memory": "low", "precision": "normal"}
SETTINGS = {"float32": FLOAT32, "w8a8": QUANTIZED, "w4a8": QUANTIZED}
FLOAT32_CACHES = 8  # the default of attention_mode
PRINTABLE = range(ord("!"), ord("~") + 1)


def text_of(length: int) -> str:
    """A prompt of `length` tokens, for a tokenizer with a token for each byte."""
    return "".join(chr(PRINTABLE[(i * 37 + 11) % len(PRINTABLE)]) for i in range(length))


def main() -> None:
    options = parse_arguments(__doc__)
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(sys.stderr.fileno(), 1)  # MNN prints prompts and answers
    llm = MNN.llm.create(str(Path(options.model) / "config.json"))
    settings = SETTINGS[options.format] | {"attention_mode": FLOAT32_CACHES, "reuse_kv": False}
    llm.set_config(settings | {"thread_num": options.threads, "sampler_type": "greedy", "use_template": False})
    llm.load()

    def generate(length: int, count: int) -> MNN.llm.Context:
        llm.reset()
        llm.set_config({"max_new_tokens": count})
        llm.response(text_of(length))
        context = llm.context
        got = (context.prompt_len, len(context.output_tokens))
        if got != (length, count):
            raise RuntimeError(f"MNN: got {got} tokens of the prompt and the answer, expected {(length, count)}")
        return context

    def prefill(length: int) -> float:
        return generate(length, 1).prefill_us / 1e6

    def decode(length: int, steps: int) -> list[float]:
        return [generate(length, steps).decode_us / 1e6 / steps]  # MNN runs a step after the last token too

    report(options, prefill, decode)


if __name__ == "__main__":
    main()
