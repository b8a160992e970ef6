"""The times of words, from how the decoder of Whisper attends to the sound when it writes each token."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import FieldError

if TYPE_CHECKING:
    import numpy

_SMOOTHED = 7  # states that the median filter covers
_OPENING = set("\"'“¿([{-")  # punctuation that belongs to the next word
# Languages whose words have no spaces between them: each character counts as a word.
_WITHOUT_SPACES = {"zh", "ja", "th", "lo", "my", "yue"}
_LONGEST = 2.0  # how many times as long as the median word of its segment the first and the last one may be


@dataclass(frozen=True)
class Word:
    """A word of a segment: its time in the sound, in seconds, and its text, which may begin with a space."""

    start: float
    end: float
    text: str


class Aligner:
    """Runs the methods `encode` and `align` of a speech program, beside the engine. Needs torch."""

    def __init__(self, path: Path):
        try:
            from ...bindings import import_runtime

            program = import_runtime().get().load_program(path)
        except ModuleNotFoundError as error:
            raise FieldError("words", problem=f"expected the package {error.name}, which is not installed") from error
        self._encode, self._align = program.load_method("encode"), program.load_method("align")

    def token_states(self, samples: numpy.ndarray, tokens: Sequence[int], first: int, states: int) -> list[int]:
        """Return, for each token from index `first` on, the state of the encoder at which the token begins.

        `samples` are those of a whole window, of whose states the first `states` belong to the sound. `tokens` end with
        the token that ends a text. Returns an empty list if there are more tokens than states.
        """
        import torch

        self._encode.execute([torch.from_numpy(samples).unsqueeze(0)])
        attention = self._align.execute([torch.tensor([list(tokens)])])[0].numpy()
        # Row i says what the decoder attends to when it chooses token i + 1.
        return path_of(alignment_cost(attention[:, :, :states])[first - 1 : -1])


def alignment_cost(attention: numpy.ndarray) -> numpy.ndarray:
    """Return the cost `[S, T]` of the attention `[H, S, T]` of H heads: low where they attend more than elsewhere."""
    import numpy

    deviation = attention.std(axis=1, keepdims=True)
    normal = (attention - attention.mean(axis=1, keepdims=True)) / numpy.maximum(deviation, 1e-10)
    half = _SMOOTHED // 2
    padded = numpy.pad(normal, ((0, 0), (0, 0), (half, half)), mode="reflect" if normal.shape[2] > half else "edge")
    smooth = numpy.median(numpy.lib.stride_tricks.sliding_window_view(padded, _SMOOTHED, axis=2), axis=-1)
    return -smooth.mean(axis=0)


def path_of(cost: numpy.ndarray) -> list[int]:
    """Return the first column of each row on the cheapest path through `cost` `[N, T]`, or [] if N is larger than T.

    The path goes from the first row and column to the last. At each column, it stays in its row or enters the next.
    """
    import numpy

    rows, columns = cost.shape
    if rows > columns:
        return []
    total = numpy.full(rows, numpy.inf)
    total[0] = 0.0
    enters = numpy.zeros((columns, rows), dtype=bool)
    for column in range(columns):
        before = numpy.concatenate(([numpy.inf], total[:-1]))
        enters[column] = (before < total) & (column > 0)
        total = numpy.where(enters[column], before, total) + cost[:, column]
        total[column + 1 :] = numpy.inf  # rows that cannot be reached yet
    begins, row = [0] * rows, rows - 1
    for column in range(columns - 1, -1, -1):
        if enters[column, row]:
            begins[row] = column
            row -= 1
    return begins


def split_words(tokens: Sequence[int], bytes_of: Callable[[int], bytes], language: str | None) -> list[tuple[int, str]]:
    """Return the words of a text: the number of the tokens of each, and its text. Each has whole characters."""
    words: list[tuple[int, str]] = []
    count, data = 0, b""
    for index, token in enumerate(tokens):
        count, data = count + 1, data + bytes_of(token)
        piece = data.decode(errors="replace")
        if piece.endswith("\ufffd") and index + 1 < len(tokens):
            continue  # a part of a character
        is_mark = bool(piece.strip()) and set(piece.strip()) <= set(string.punctuation + "。，！？：、…”’")
        begins = piece.startswith(" ") or language in _WITHOUT_SPACES and not is_mark
        if words and (not begins or set(words[-1][1].strip()) <= _OPENING):
            words[-1] = (words[-1][0] + count, words[-1][1] + piece)
        else:
            words.append((count, piece))
        count, data = 0, b""
    return words


def without_pauses(words: Sequence[Word]) -> tuple[Word, ...]:
    """Return the words of a segment without the pause that the path adds to the first and the last of them."""
    if not words:
        return ()
    durations = sorted(word.end - word.start for word in words)
    limit = _LONGEST * durations[len(durations) // 2]
    first, *middle = words
    shortened = [replace(first, start=max(first.start, first.end - limit)), *middle]
    last = shortened.pop()
    return *shortened, replace(last, end=min(last.end, last.start + limit))
