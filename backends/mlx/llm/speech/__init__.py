"""Speech models: transcription with exported programs, without torch. The folder `export` makes the programs.

`executorch_mlx.speech` and `executorch_mlx.speech.export` are the public names of the two folders.
"""

from . import subtitles
from .audio import read_audio
from .model import SpeechModel
from .segments import Segment
from .words import Word

__all__ = ["Segment", "SpeechModel", "Word", "read_audio", "subtitles"]
