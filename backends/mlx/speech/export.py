"""The export of speech models: the public name of `executorch_mlx.llm.speech.export`."""

from ..llm.speech.export import export_speech, is_speech

__all__ = ["export_speech", "is_speech"]
