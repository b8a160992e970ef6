"""Language models: exported with the sampling head, and run."""

from .generate import Generation, PromptLengthError, Result, Token
from .llm import LLM
from .sampling import SamplingHead
from .settings import SettingError

__all__ = ["LLM", "Generation", "PromptLengthError", "Result", "SamplingHead", "SettingError", "Token"]
