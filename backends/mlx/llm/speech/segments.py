"""Splits the answers of a speech model into segments, and long sound into windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .words import Word

if TYPE_CHECKING:
    import numpy

_CUT_FRACTION = 0.25  # a window is cut in its last quarter
_FRAME = 320  # samples of a frame: 20 ms
_QUIETEST = 1e-3  # the amplitude, of at most 1, below which nothing is a voice
_VOICE_LEVEL = 0.1  # the threshold for a voice, from the level of the background (0) to that of the loud parts (1)
_LONGEST_PAUSE = 50  # frames of a pause within a span
_MARGIN = 25  # frames that are added at each end of a span


@dataclass(frozen=True)
class Segment:
    """A part of a transcript.

    - `start`, `end`: its time in the sound, in seconds.
    - `text`: its text, as the model wrote it: it may begin with a space.
    - `tokens`: its token ids, with the timestamp tokens.
    - `language`: the code of the spoken language, or None if the model has one language only.
    - `words`: its words with their times, if they were asked for.
    """

    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    language: str | None = None
    words: tuple[Word, ...] = ()


@dataclass(frozen=True)
class Piece:
    """A segment as the answer to a window has it.

    Its tokens are `[begin, end)` of the answer. `begin_time` and `end_time` count from the begin of the window, in
    units of `seconds_per_timestamp`. If `end_time` is None, the piece ends with the window.
    """

    begin: int
    end: int
    begin_time: int
    end_time: int | None


class TimestampSplitter:
    """Splits an answer of Whisper at its timestamps, while the answer grows.

    `timestamp_begin` is the first timestamp token. A segment has a timestamp at each end, so two timestamps in a row
    separate two segments.
    """

    def __init__(self, timestamp_begin: int):
        self._timestamp_begin = timestamp_begin
        self._done = 0  # the tokens before this index are in segments
        self._end_time = 0  # of the last segment

    def take(self, tokens: Sequence[int]) -> Piece | None:
        """Return the segment that the last of `tokens` completes, or None. `tokens` is the answer so far."""
        if len(tokens) - self._done < 2 or not all(token >= self._timestamp_begin for token in tokens[-2:]):
            return None
        begin, end = self._done, len(tokens) - 1
        if end - begin < 2:  # no text: the begin of a segment
            return None
        self._done, self._end_time = end, tokens[end - 1] - self._timestamp_begin
        return Piece(begin, end, self._time(tokens, begin), self._end_time)

    def finish(self, tokens: Sequence[int]) -> tuple[Piece | None, int | None]:
        """Return the last segment of the answer, or None, and the timestamp at which the next window begins.

        The timestamp is None if the next window begins at the end of this one.
        """
        is_time = [token >= self._timestamp_begin for token in tokens]
        ends_with_single_timestamp = is_time[-2:] == [False, True]
        if self._done and not ends_with_single_timestamp:
            return None, self._end_time  # the end of the window cut the last segment: the next window has it whole
        times = [token - self._timestamp_begin for token, found in zip(tokens, is_time) if found]
        if self._done:
            return Piece(self._done, len(tokens), self._time(tokens, self._done), times[-1]), None
        last = times[-1] if times and times[-1] else None
        return (Piece(0, len(tokens), 0, last) if len(tokens) else None), None

    def _time(self, tokens: Sequence[int], index: int) -> int:
        return max(0, tokens[index] - self._timestamp_begin)


def quiet_window_length(samples: numpy.ndarray, length: int) -> int:
    """Return the length of a window that begins at sample 0: all of `samples` if they fit, else at most `length`.

    The window ends in the quietest frame of the last quarter of `length`.
    """
    if len(samples) <= length:
        return len(samples)
    begin = length - max(_FRAME, int(length * _CUT_FRACTION) // _FRAME * _FRAME)
    frames = samples[max(0, begin) : length]
    frames = frames[: len(frames) // _FRAME * _FRAME].reshape(-1, _FRAME)
    if not len(frames):
        return length
    quietest = int((frames.astype("float64") ** 2).sum(axis=1).argmin())
    return max(0, begin) + quietest * _FRAME + _FRAME // 2


def voiced_spans(samples: numpy.ndarray) -> list[tuple[int, int]]:
    """Return the spans `[begin, end)` of `samples` in which there is a voice or another loud sound, by their loudness.

    The threshold lies between the levels of the quietest and the loudest tenth of the sound. A pause of a second or
    less does not divide a span.
    """
    import numpy

    count = len(samples) // _FRAME
    if not count:
        return [(0, len(samples))] if len(samples) else []
    frames = samples[: count * _FRAME].reshape(count, _FRAME).astype("float64")
    levels = numpy.sqrt((frames**2).mean(axis=1))
    background, loud = numpy.quantile(levels, (0.1, 0.9))
    loud = max(loud, levels.max() / 4)  # a short word in a long silence
    background = min(background, loud / 4)  # a voice without pauses
    is_voiced = levels > max(_QUIETEST, background + _VOICE_LEVEL * (loud - background))
    spans: list[list[int]] = []
    for frame in numpy.flatnonzero(is_voiced):
        if spans and frame - spans[-1][1] <= _LONGEST_PAUSE:
            spans[-1][1] = frame
        else:
            spans.append([frame, frame])
    return [(int(max(0, (a - _MARGIN) * _FRAME)), int(min(len(samples), (b + 1 + _MARGIN) * _FRAME))) for a, b in spans]
