"""Exports a model with the shape of an 8B model in bfloat16, whole and in two parts, for benchmarks/cuda/pack.py.

    python benchmarks/cuda/export_parallel.py FOLDER [--layers 32] [--processes 2]

writes FOLDER/large.pte and FOLDER/large-0-of-2.pte, … The weights are uninitialized, because run.py replaces them with
random numbers. 32 layers need 32 GB on the disk and about 18 GB of memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from executorch_mlx.llm.export import export_llm
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500_000.0, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip


def empty_model(layers: int, shape: dict) -> LlamaForCausalLM:
    """Return a model of uninitialized weights.

    A few elements of each matrix have a value that no other matrix has. Equal constants would be stored only once, and
    the file would be too small.
    """
    config = LlamaConfig(**shape, num_hidden_layers=layers, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu").eval().requires_grad_(False)
    for number, parameter in enumerate(model.parameters(), 1):
        words = parameter.data.view(torch.int16)
        if words.dim() == 1:
            words.fill_(0x3F80)  # 1.0, of a norm
            continue
        for row in (0, 0.5):  # in both halves of each axis, because a matrix can be split along either
            for column in (0, 0.5):
                words[int(row * words.shape[0]), int(column * words.shape[1])] = number
    for module in model.modules():
        if hasattr(module, "original_inv_freq"):  # rotary embedding: `to_empty` discarded its frequencies
            fresh = type(module)(config)
            module.inv_freq, module.original_inv_freq = fresh.inv_freq, fresh.inv_freq
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="a small shape, to try the script")
    options = parser.parse_args()
    small = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8}
    shape = SHAPE | small if options.small else SHAPE
    for parts in (1, options.processes):
        exported = export_llm(
            empty_model(options.layers, shape), max_context_len=2048, chunk=512, speculation=False, verify=False,
            allow_extensions=True, tensor_parallel=parts, progress=print,
        )  # fmt: skip
        exported.save(options.folder / "large.pte")
        del exported  # frees the memory before the next export


if __name__ == "__main__":
    main()
