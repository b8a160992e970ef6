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
    - `tokens`: its token ids, with timestamps.
    - `language`: the code of the spoken language, or None if the model has one language only.
    """

    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    language: str | None = None


@dataclass(frozen=True)
class Piece:
    """The tokens `[begin, end)` of an answer, and the time in the window at which they begin and end.

    `first` and `last` count timestamps from the begin of the window. If `last` is None, the piece ends with the window.
    """

    begin: int
    end: int
    first: int
    last: int | None


class TimestampSplitter:
    """Splits an answer of Whisper at its timestamps, while it grows.

    `begin` is the first timestamp token. A segment has a timestamp at each end, so two timestamps in a row separate two
    segments. `take(tokens)` returns the segment that the last of `tokens` completes, or None. `finish(tokens)`
    returns the rest of the answer, or None, and the timestamp at which the next window begins, or None for the end of
    the window.
    """

    def __init__(self, begin: int):
        self._begin = begin
        self._done = 0  # the tokens before this one are in segments
        self._end = 0  # the end of the last segment

    def take(self, tokens: Sequence[int]) -> Piece | None:
        if len(tokens) - self._done < 2 or not all(token >= self._begin for token in tokens[-2:]):
            return None
        first, last = self._done, len(tokens) - 1
        if last - first < 2:  # no text: the begin of a segment
            return None
        self._done, self._end = last, tokens[last - 1] - self._begin
        return Piece(first, last, self._time(tokens, first), self._end)

    def finish(self, tokens: Sequence[int]) -> tuple[Piece | None, int | None]:
        is_time = [token >= self._begin for token in tokens]
        ends_with_one = is_time[-2:] == [False, True]
        if self._done and not ends_with_one:
            return None, self._end  # the rest was cut by the end of the window
        times = [token - self._begin for token, found in zip(tokens, is_time) if found]
        if self._done:
            return Piece(self._done, len(tokens), self._time(tokens, self._done), times[-1]), None
        last = times[-1] if times and times[-1] else None
        return (Piece(0, len(tokens), 0, last) if len(tokens) else None), None

    def _time(self, tokens: Sequence[int], index: int) -> int:
        return max(0, tokens[index] - self._begin)


def quiet_cut(samples: numpy.ndarray, length: int) -> int:
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
