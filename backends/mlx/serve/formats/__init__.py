"""The formats in which families of models write tool calls and reasoning, and parsers that read them from a stream."""

from .base import AnswerFormat
from .detect import FORMATS, detect, format_name

__all__ = ["FORMATS", "AnswerFormat", "detect", "format_name"]
