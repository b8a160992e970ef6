"""Exports models for benchmarks/cuda/pack.py, in the shapes of shapes.py.

    python benchmarks/cuda/export.py FOLDER [--shape llama-8b] [--portable] [--context 4096]

writes FOLDER/qwen3-0.6b.pte. With --rows 8, it writes FOLDER/qwen3-0.6b-rows8.pte, and with --head
FOLDER/qwen3-0.6b-head.pte. The weights are uninitialized, because run.py replaces them with random numbers. The shape
of 8B parameters needs about 18 GB of memory, and 16 GB on the disk.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pack
import torch
from executorch_mlx.cli.export_defaults import HEAD
from executorch_mlx.llm.export import HeadConfig, export_llm
from shapes import GROUP_SIZE, SHAPES, bits_of
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def empty_model(shape: dict) -> PreTrainedModel:
    """Return a model of uninitialized weights.

    Each matrix has a number other than zero in a place of its own, also after quantization. Equal constants would be
    stored only once, and the file would be too small.
    """
    config = AutoConfig.for_model(**shape, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu").eval().requires_grad_(False)
    model.tie_weights()
    for number, parameter in enumerate(model.parameters(), 1):
        words = parameter.data.view(torch.int16)
        if words.dim() == 1:
            words.fill_(0x3F80)  # 1.0, of a norm
            continue
        if words.nbytes < pack.LARGE_SEGMENT:
            words.zero_()  # the bundle has these weights
        words[number, number] = -0x4100  # -0.5
    for module in model.modules():
        if hasattr(module, "original_inv_freq"):  # rotary embedding: `to_empty` discarded its frequencies
            fresh = type(module)(config)
            module.inv_freq, module.original_inv_freq = fresh.inv_freq, fresh.inv_freq
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--portable", action="store_true", help="without extensions")
    parser.add_argument("--rows", type=int, default=1, help="requests at once, for batch.py")
    parser.add_argument("--context", type=int, default=4096, help="capacity of the KV cache")
    parser.add_argument("--head", action="store_true", help="the head that the commands export: penalties, masks, ...")
    options = parser.parse_args()
    bits = bits_of(options.shape)
    format = {"quantize": f"int{bits}", "group_size": GROUP_SIZE} if bits < 16 else {}
    options.folder.mkdir(parents=True, exist_ok=True)
    exported = export_llm(
        empty_model(SHAPES[options.shape]),
        max_context_len=options.context,
        chunk=2048,
        allow_extensions=not options.portable,
        speculation=False,
        verify=False,
        batch=options.rows,
        head=HeadConfig(**(HEAD if options.head else {})),
        progress=print,
        **format,
    )
    name = options.shape + ("-head" if options.head else "")
    name += f"-rows{options.rows}" if options.rows > 1 else ""
    exported.save(options.folder / f"{name}.pte")


if __name__ == "__main__":
    main()
