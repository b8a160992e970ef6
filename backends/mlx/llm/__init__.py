"""Language models: the sampling head, and text generation with exported programs.

The names below are imported on first use, so that a program can read the table of sampling parameters
without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .binding import BusyError
    from .errors import PromptLengthError, SettingError
    from .generation import Generation, Result, Token
    from .llm import LLM
    from .metrics import Metrics
    from .program import EngineStats
    from .sampling_head import SamplingHead
    from .sampling_parameters import SamplingParameters
    from .scoring import Classification, Score

_MODULES = {
    "LLM": "llm",
    "BusyError": "binding",
    "Classification": "scoring",
    "EngineStats": "program",
    "Generation": "generation",
    "Metrics": "metrics",
    "PromptLengthError": "errors",
    "Result": "generation",
    "SamplingHead": "sampling_head",
    "SamplingParameters": "sampling_parameters",
    "Score": "scoring",
    "SettingError": "errors",
    "Token": "generation",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name != "SamplingHead":
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    from ..quiet import quiet_imports

    with quiet_imports():
        return import_module(".sampling_head", __name__).SamplingHead


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
