"""Decodes sounds of users with libsndfile, and prepares them for the encoder of a model."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .picture import MediaError, read_bytes

if TYPE_CHECKING:
    import numpy as np

FORMATS = ("WAV", "WAVEX", "FLAC", "MP3", "OGG")  # of libsndfile, which may be decoded
MAX_CHANNELS = 8
MAX_RATE = 192_000


class SoundError(MediaError):
    """Raised for a sound that cannot be decoded, or that is too long."""

    medium, things = "audio", "sounds"
    sources = "a path, bytes, a data URL or samples"


@dataclass(frozen=True)
class Sound:
    """A sound in a prompt. `source` is a path, the bytes of a file, a data URL, or samples, float32 [N], at 16 kHz."""

    source: Any


def open_sound(sound: Sound, rate: int, most: int) -> np.ndarray:
    """Return the samples of a sound, float32 [N] with 1 to `most` samples, at `rate` Hz. Channels are averaged.

    The size is checked before the samples are decoded. Raises SoundError, and OSError for a path that cannot be read.
    """
    import numpy as np

    if isinstance(sound.source, np.ndarray):
        if sound.source.ndim != 1 or sound.source.dtype != np.float32:
            raise SoundError(f"got {sound.source.dtype}{list(sound.source.shape)}, expected samples float32[N]")
        samples = sound.source
    else:
        samples = _decoded(read_bytes(sound.source, SoundError), rate, most)
    if not 0 < len(samples) <= most:
        raise SoundError(f"got {len(samples) / rate:.1f} s, expected at most {most / rate:g}")
    return np.ascontiguousarray(samples)


def _decoded(data: bytes, rate: int, most: int) -> np.ndarray:
    from ..speech.audio import resampled

    try:
        import soundfile
        import soxr  # noqa: F401  (resampled needs it)
    except (ImportError, OSError) as error:
        raise SoundError(f"{error}; install it: pip install 'executorch-mlx[speech]'") from error
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.format not in FORMATS:
                raise SoundError(f"got a file of format {file.format}, expected {', '.join(FORMATS)}")
            if not (1 <= file.channels <= MAX_CHANNELS and 1 <= file.samplerate <= MAX_RATE):
                raise SoundError(
                    f"got {file.channels} channels at {file.samplerate} Hz, expected 1 to {MAX_CHANNELS} channels, "
                    f"and at most {MAX_RATE} Hz"
                )
            limit = -(-most * file.samplerate // rate)
            samples = file.read(limit + 1, dtype="float32", always_2d=True)
            if len(samples) > limit:
                raise SoundError(f"got more than {most / rate:g} s")
            return resampled(samples.mean(1, dtype="float32"), file.samplerate, rate)[:most]
    except (soundfile.SoundFileError, RuntimeError, TypeError) as error:
        raise SoundError(f"damaged, or of another format than {', '.join(FORMATS)}: {error}") from error


def whisper_tokens(settings: Mapping[str, Any], length: int) -> tuple[int, int]:
    """Return the numbers of frames of Whisper's features for `length` samples, and of embeddings for these."""
    frames = -(-length // settings["hop"])
    return frames, (((frames - 1) // 2 + 1) - 2) // 2 + 1
