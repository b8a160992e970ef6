"""Speech models: the public name of `executorch_mlx.llm.speech`. `executorch_mlx.speech.export` has `export_speech`."""

from ..llm.speech import Segment, SpeechModel, read_audio

__all__ = ["Segment", "SpeechModel", "read_audio"]
