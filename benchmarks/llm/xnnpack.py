"""The same model through ExecuTorch's XNNPACK delegate; the driver is benchmarks/llm.py.

    python benchmarks/llm/xnnpack.py SHAPE FOLDER --prefill 128 --context 128 --steps 8

A static cache of Hugging Face's, exported for one length of tokens at a time: `transformers`' own
recipe for ExecuTorch. The program returns the logits of the last position; the host takes the most
likely token. The last line is JSON: seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import models
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime
from transformers import AutoModelForCausalLM
from transformers.cache_utils import StaticCache


class Cached(torch.nn.Module):
    """`(tokens [1, S], position [S]) -> logits [1, 1, V]` over a cache of its own."""

    def __init__(self, model, capacity: int):
        super().__init__()
        config = model.config
        self.model = model
        self.cache = StaticCache(config=config, max_cache_len=capacity)
        heads, size = config.num_key_value_heads, config.head_dim
        self.cache.early_initialization(1, heads, size, torch.float32, torch.device("cpu"))
        for index, layer in enumerate(self.cache.layers):
            self.register_buffer(f"key_{index}", layer.keys, persistent=False)
            self.register_buffer(f"value_{index}", layer.values, persistent=False)

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return self.model(
            input_ids=tokens,
            position_ids=position[None],
            cache_position=position,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits


def load(model, tokens: int, capacity: int, folder: Path, name: str):
    path = folder / f"{name}-xnnpack-{tokens}.pte"
    if not path.exists():
        arguments = (torch.zeros(1, tokens, dtype=torch.int64), torch.arange(tokens))
        with torch.no_grad():
            program = torch.export.export(Cached(model, capacity), arguments, strict=False)
        edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        with open(path, "wb") as file:
            edge.to_executorch().write_to_file(file)
    program = Runtime.get().load_program(path)
    method = program.load_method("forward")
    return lambda inputs, keep=program: method.execute(inputs)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shape")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prefill", type=int, nargs="*", default=[128])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    folder = models.folder_of(options.shape, "float32", options.folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    capacity = max([options.context + options.steps, *options.prefill])
    result = {"prefill": {}, "decode": {}}

    def seconds(call, *inputs) -> float:
        start = time.perf_counter()
        call(inputs)[0, -1].argmax()
        return time.perf_counter() - start

    for length in options.prefill:
        call = load(model, length, capacity, options.folder, options.shape)
        inputs = torch.zeros(1, length, dtype=torch.int64), torch.arange(length)
        result["prefill"][length] = min(seconds(call, *inputs) for _ in range(2))
        del call
    call = load(model, 1, capacity, options.folder, options.shape)
    times = [
        seconds(call, torch.tensor([[1]]), torch.tensor([options.context + i])) for i in range(options.steps)
    ]
    result["decode"][options.context] = statistics.median(times[1:])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
