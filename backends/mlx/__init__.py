"""MLX delegate for ExecuTorch, with token sampling inside the model.

The public names are imported on first use, so that commands that need no torch start quickly. Importing
`executorch_mlx.custom_kernel_ops` defines this project's operators in `torch.ops.mlx`, and importing
`executorch_mlx.custom_ops.official` those of ExecuTorch's own MLX delegate.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loader import load_delegate
    from .llm import LLM, SamplingHead
    from .partitioner import MLXPartitioner
    from .preprocess import MLXBackend
    from .verification import verify

__all__ = ["LLM", "MLXBackend", "MLXPartitioner", "SamplingHead", "load_delegate", "verify"]

_MODULES = {
    "LLM": "llm",
    "MLXBackend": "preprocess",
    "MLXPartitioner": "partitioner",
    "SamplingHead": "llm",
    "load_delegate": "loader",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
