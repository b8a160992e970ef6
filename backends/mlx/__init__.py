"""MLX delegate for ExecuTorch, with token sampling inside the model.

A public name is imported when it is first used. Commands that need no torch therefore start quickly. `Runtime` is a
subclass of ExecuTorch's, and its first use registers the delegate: see `programs.py`. Importing
`executorch_mlx.custom_kernel_ops` defines this project's operators in `torch.ops.mlx`. Importing
`executorch_mlx.custom_ops.official` defines the operators of ExecuTorch's own MLX delegate there.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import gpu_kernels, memory
    from .encoders import Encoder, encode
    from .llm import LLM, SamplingHead
    from .loader import load_delegate
    from .partitioner import MLXPartitioner
    from .preprocess import MLXBackend
    from .programs import Runtime
    from .state import reset
    from .verification import verify  # type: ignore[no-redef]
    from .weights_file import save_program
    from .workarounds.dynamic_steps import dynamic_steps

__all__ = [
    "Encoder",
    "LLM",
    "MLXBackend",
    "MLXPartitioner",
    "Runtime",
    "SamplingHead",
    "dynamic_steps",
    "encode",
    "gpu_kernels",
    "load_delegate",
    "memory",
    "reset",
    "save_program",
    "verify",
]

_MODULES = {
    "Encoder": "encoders",
    "LLM": "llm",
    "MLXBackend": "preprocess",
    "MLXPartitioner": "partitioner",
    "SamplingHead": "llm",
    "dynamic_steps": "workarounds.dynamic_steps",
    "encode": "encoders",
    "load_delegate": "loader",
    "reset": "state",
    "save_program": "weights_file",
    "verify": "verification",
}


# Names that `__getattr__` imports without `quiet_imports`: their modules import no torch or, as for `SamplingHead`,
# call `quiet_imports` themselves.
_QUIET = {"Encoder", "LLM", "SamplingHead", "encode", "load_delegate", "reset", "save_program"}


def __getattr__(name: str) -> Any:
    if name in ("gpu_kernels", "memory"):
        return import_module(f".{name}", __name__)
    if name in _QUIET:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    if name != "Runtime" and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .quiet import quiet_imports

    with quiet_imports():
        if name == "Runtime":  # imported after the delegate is registered
            return import_module(".bindings", __name__).import_runtime()
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
