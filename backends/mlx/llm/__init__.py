"""Language models: the sampling head, and text generation with exported programs.

The names below are imported on first use, so that a program can read the table of sampling parameters
without importing torch.
"""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, _MODULES, quiet={"SamplingHead"})
