"""Language models: the sampling head, and text generation with exported programs.

The names below are imported on first use, so that a program can read the table of sampling parameters
without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..quiet import quiet_imports

if TYPE_CHECKING:
    from .generate.generate import Generation, PromptLengthError, Result, Token
    from .llm import LLM
    from .sampling_head import SamplingHead
    from .sampling_parameters import SamplingParameters, SettingError

__all__ = [
    "LLM", "Generation", "PromptLengthError", "Result", "SamplingHead", "SamplingParameters", "SettingError", "Token",
]  # fmt: skip

_MODULES = {
    "LLM": "llm",
    "Generation": "generate.generate",
    "PromptLengthError": "generate.generate",
    "Result": "generate.generate",
    "SamplingHead": "sampling_head",
    "SamplingParameters": "sampling_parameters",
    "SettingError": "sampling_parameters",
    "Token": "generate.generate",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with quiet_imports():
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
