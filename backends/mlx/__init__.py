"""MLX delegate for ExecuTorch, with token sampling inside the model.

The names below come when they are asked for: whatever does without torch, such as the help of the
command line, starts without it. `executorch_mlx.custom_kernel_ops` defines what is ours of
`torch.ops.mlx`, `executorch_mlx.official_ops` what is ExecuTorch's own delegate's.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._load import load_delegate
    from .llm import LLM, SamplingHead
    from .partitioner import MLXPartitioner
    from .preprocess import MLXBackend

__all__ = ["LLM", "MLXBackend", "MLXPartitioner", "SamplingHead", "load_delegate"]

_PLACES = {
    "LLM": "llm",
    "MLXBackend": "preprocess",
    "MLXPartitioner": "partitioner",
    "SamplingHead": "llm",
    "load_delegate": "_load",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PLACES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
