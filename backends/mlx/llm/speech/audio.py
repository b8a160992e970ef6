"""Reads sound files as samples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy

SAMPLE_RATE = 16000


def read_audio(path: str | Path, rate: int = SAMPLE_RATE) -> numpy.ndarray:
    """Return the samples of a sound file, float32 `[N]` in [-1, 1], at `rate` Hz. Several channels are averaged.

    Reads the formats of libsndfile: WAV, FLAC, MP3, Ogg and more. Needs the packages `soundfile` and `soxr`, which the
    extra `speech` installs.

    Raises FileNotFoundError if there is no such file, and ValueError if it is not a sound file or a package is missing.
    """
    path = Path(path)
    try:
        import soundfile
        import soxr  # noqa: F401  (resampled needs it)
    except (ImportError, OSError) as error:
        raise ValueError(f"read_audio: {error}; install it: pip install 'executorch-mlx[speech]'") from error
    if not path.is_file():
        raise FileNotFoundError(f"read_audio: {path}: no such file")
    try:
        samples, file_rate = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise ValueError(f"read_audio: {path}: {error.error_string}") from error
    return resampled(samples.mean(axis=1, dtype="float32"), file_rate, rate)


def resampled(samples: numpy.ndarray, rate: int, new_rate: int) -> numpy.ndarray:
    """Return samples `[N]` at another rate, in Hz."""
    if rate == new_rate:
        return samples
    import soxr

    return soxr.resample(samples, rate, new_rate, quality="VHQ")
