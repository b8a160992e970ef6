"""Speech models: the public name of `executorch_mlx.llm.speech`. `executorch_mlx.speech.export` has `export_speech`."""

from ..llm.speech import Segment, SpeechModel, Word, read_audio

__all__ = ["Segment", "SpeechModel", "Word", "read_audio"]
