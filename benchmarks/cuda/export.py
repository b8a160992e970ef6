"""Exports a model with the shape of Qwen3-0.6B and random bfloat16 weights, for benchmarks/cuda/pack.py.

    python benchmarks/cuda/export.py PROGRAM.pte [--portable] [--context 4096]
"""

from __future__ import annotations

import argparse

import torch
from executorch_mlx.llm.export import export_llm
from export_config import CONFIG
from transformers import Qwen3Config, Qwen3ForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("program")
    parser.add_argument("--portable", action="store_true", help="without extensions")
    parser.add_argument("--context", type=int, default=4096, help="capacity of the KV cache")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG, dtype=torch.bfloat16)).eval()
    torch.set_default_dtype(torch.float32)
    exported = export_llm(
        model, max_context_len=options.context, chunk=2048, allow_extensions=not options.portable, speculation=False,
        verify=False, progress=print,
    )  # fmt: skip
    exported.save(options.program)


if __name__ == "__main__":
    main()
