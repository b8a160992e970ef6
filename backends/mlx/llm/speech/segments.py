"""Splits the answers of a speech model into segments, and long sound into windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy

_CUT_FRACTION = 0.25  # a window is cut in its last quarter
_FRAME = 320  # samples of a frame: 20 ms


@dataclass(frozen=True)
class Segment:
    """A part of a transcript.

    - `start`, `end`: its time in the sound, in seconds.
    - `text`: its text, as the model wrote it: it may begin with a space.
    - `tokens`: its token ids, with the timestamp tokens.
    - `language`: the code of the spoken language, or None if the model has one language only.
    """

    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    language: str | None = None


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
