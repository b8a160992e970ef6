"""Measures CTranslate2. benchmarks/peers_cpu.py runs it in a Python environment of its own.

    python benchmarks/peers/ctranslate2_peer.py FOLDER --format w8a8 --prefill 128 512 --context 128 2048 --steps 16

ctranslate2_model.py writes FOLDER. KV caches are float32. Tokens are drawn greedily. The last line of the output is
JSON: for `prefill` and `decode`, the seconds by length of the prompt.
"""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import ctranslate2
from common import parse_arguments, prompt_of, report


def main() -> None:
    options = parse_arguments(__doc__)
    vocabulary = json.loads((Path(options.model) / "vocabulary.json").read_text())
    compute_type = "int8" if options.format == "w8a8" else options.format
    generator = ctranslate2.Generator(
        options.model, compute_type=compute_type, intra_threads=options.threads, inter_threads=1
    )

    def times(length: int, count: int) -> list[float]:
        """The times of the start and of each token."""
        found = [time.perf_counter()]
        generator.generate_batch(
            [[vocabulary[token] for token in prompt_of(length)]],
            max_length=count,
            min_length=count,
            include_prompt_in_result=False,
            sampling_topk=1,
            callback=lambda result: found.append(time.perf_counter()),
        )
        return found

    def prefill(length: int) -> float:
        begin, end = times(length, 1)
        return end - begin

    def decode(length: int, steps: int) -> list[float]:
        return [end - begin for begin, end in pairwise(times(length, steps + 1)[1:])]

    report(options, prefill, decode)
    generator.unload_model()


if __name__ == "__main__":
    main()
