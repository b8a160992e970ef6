"""Groups texts of different lengths into calls with little padding."""

from __future__ import annotations

from collections.abc import Sequence

MAX_TOKENS = 2048  # of a call, padding included, unless a single text has more: larger calls are not faster
MAX_PADDING = 0.1  # the largest part of a call that is padding


def batches(
    lengths: Sequence[int], max_rows: int, max_tokens: int = MAX_TOKENS, max_padding: float = MAX_PADDING
) -> list[list[int]]:
    """Return the indices of the texts of each call, longest texts first.

    All texts of a call are padded to the length of its longest one.
    """
    found: list[list[int]] = []
    longest = total = 0  # of the last call
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        size = longest * (len(found[-1]) + 1) if found else 0
        fits = found and len(found[-1]) < max_rows and size <= max_tokens
        if fits and size - total - length <= max_padding * size:
            found[-1].append(index)
            total += length
        else:
            found.append([index])
            longest = total = length
    return found
