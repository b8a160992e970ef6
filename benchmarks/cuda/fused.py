"""Compares the logits of small models on the GPU and on the CPU. The GPU uses kernels that fuse several operations.

python benchmarks/cuda/fused.py export FOLDER     writes the programs; needs no GPU
python benchmarks/cuda/fused.py FOLDER            compares their logits; run.sh calls it
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from op_runner import run, write

# Formats of the weights → dtype, options of export, and the limit of the error, relative to the largest logit.
FORMATS = {
    "float32": ("float32", {}, 1e-4),
    "bfloat16": ("bfloat16", {}, 5e-2),
    "int4": ("bfloat16", {"quantize": "int4", "group_size": 32}, 5e-2),
}
# The number of tokens in each call. Beyond 256 positions, several blocks compute the attention of a query head.
CALLS = (9, 1, 1, 4, 1, 300, 1, 1, 400, 1, 1)
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
# Architectures: norms of the queries and keys, none, and norms after attention and MLP with a sliding window. 2, 4 or 3
# query heads share keys and values.
MODELS = {
    "qwen3": ("Qwen3", {}),
    "llama": ("Llama", {"head_dim": 128, "num_attention_heads": 8, "initializer_range": 0.05}),
    "gemma3": (
        "Gemma3",
        {"num_attention_heads": 6, "sliding_window": 32, "query_pre_attn_scalar": 64, "initializer_range": 0.05},
    ),
}


def export(folder: Path) -> None:
    import torch
    import transformers
    from executorch_mlx.llm.export import export_llm

    for name, (architecture, changes) in MODELS.items():
        suffix = "TextConfig" if architecture == "Gemma3" else "Config"
        config = getattr(transformers, architecture + suffix)(**SHAPE | changes)
        for format, (dtype, quantization, _) in FORMATS.items():
            torch.manual_seed(0)
            model = getattr(transformers, f"{architecture}ForCausalLM")(config).to(getattr(torch, dtype)).eval()
            with torch.no_grad():
                for parameter, weight in model.named_parameters():
                    if "norm" in parameter:
                        weight.copy_(weight + 0.3 * torch.randn_like(weight))
            options = {"outputs": "logits", "max_context_len": 1024, "chunk": 640, "speculation": False}
            exported = export_llm(model, allow_extensions=True, verify=False, **options, **quantization)
            exported.save(folder / f"fused-{name}-{format}.pte")


def logits(program: Path, inputs: list[Path], device: str, folder: Path) -> list[np.ndarray]:
    """Return the logits after the last token of each call."""
    calls = run(program, inputs, device, folder)
    return [results[0].flatten()[-SHAPE["vocab_size"] :].float().numpy() for results in calls]


def main() -> None:
    if sys.argv[1] == "export":
        return export(Path(sys.argv[2]))
    for name in MODELS:
        for format, (_, _, limit) in FORMATS.items():
            compare(name, format, limit, Path(sys.argv[1]))


def compare(name: str, format: str, limit: float, programs: Path) -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        inputs, position = [], 0
        for call, count in enumerate(CALLS):
            inputs.append(folder / f"in{call}")
            inputs[-1].mkdir()
            write(inputs[-1] / "0.tensor", rng.integers(0, SHAPE["vocab_size"], (1, count)))
            write(inputs[-1] / "1.tensor", np.array([position]))
            position += count
        program = programs / f"fused-{name}-{format}.pte"
        on_gpu, on_cpu = (logits(program, inputs, device, folder) for device in ("gpu", "cpu"))
    errors = [np.abs(a - b).max() / np.abs(b).max() for a, b in zip(on_gpu, on_cpu, strict=True)]
    print(f"fused kernels, {name}, {format}: largest error of the logits {max(errors):.1e} (limit {limit:.0e})")
    assert max(errors) <= limit


if __name__ == "__main__":
    main()
