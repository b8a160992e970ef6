"""Draws a line chart to a PNG file, without a library for pictures."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

_WIDTH, _HEIGHT, _MARGIN = 900, 500, 60
_COLORS = ((31, 119, 180), (214, 95, 14), (44, 160, 44))
_GRAY, _BLACK = (225, 225, 225), (60, 60, 60)
# The rows of each character, from top to bottom, as 3 bits.
_GLYPHS = {
    **dict(
        zip("0123456789", ("75557", "26227", "71747", "71717", "55711", "74717", "74757", "71111", "75757", "75717"))
    ),
    ".": "00002",
    "-": "00700",
    "e": "07747",
}
_SCALE = 3


def line_chart(series: Mapping[str, Sequence[tuple[float, float]]]) -> bytes:
    """Return a PNG with one line for each series of points (x, y), and numbers at the axes.

    The colors are blue, orange and green, in the order of the series. Points that are not finite are left out.
    """
    picture = np.full((_HEIGHT, _WIDTH, 3), 255, np.uint8)
    lines = [np.array([p for p in points if np.isfinite(p).all()], float).reshape(-1, 2) for points in series.values()]
    points = np.concatenate([*lines, np.zeros((0, 2))])
    if not len(points):
        return _png(picture)
    low, high = points.min(0), points.max(0)
    high = np.where(high > low, high, low + 1)
    for part in np.linspace(0, 1, 6):
        _axis(picture, low + part * (high - low), part)
    for color, line in zip(_COLORS, lines):
        where = _place((line - low) / (high - low))
        for first, second in zip(where, where[1:]):
            _line(picture, first, second, color)
        if len(where) == 1:
            _line(picture, where[0], where[0], color)
    return _png(picture)


def _place(parts: np.ndarray) -> np.ndarray:
    """Return the pixels (x, y) of points in [0, 1]²."""
    size = np.array([_WIDTH, _HEIGHT]) - 2 * _MARGIN
    x, y = (parts * size + _MARGIN).T
    return np.stack([x, _HEIGHT - y], -1)


def _axis(picture: np.ndarray, value: np.ndarray, part: float) -> None:
    """Draw a grid line of each axis at `part` of its length, with its number."""
    (left, y), (right, _) = _place(np.array([[0, part], [1, part]]))
    _line(picture, (left, y), (right, y), _GRAY, 1)
    _write(picture, f"{value[1]:.3g}", 4, int(y) - 2 * _SCALE)
    x = int(_place(np.array([[part, 0]]))[0, 0])
    _write(picture, f"{value[0]:.4g}", x - 10, _HEIGHT - _MARGIN + 12)


def _line(picture: np.ndarray, first: Sequence[float], second: Sequence[float], color: tuple, width: int = 2) -> None:
    first, second = np.asarray(first), np.asarray(second)
    count = int(np.abs(second - first).max()) + 1
    x, y = np.linspace(first, second, count).round().astype(int).T
    for dx in range(width):
        for dy in range(width):
            picture[y + dy, x + dx] = color


def _write(picture: np.ndarray, text: str, x: int, y: int) -> None:
    for character in text:
        for row, bits in enumerate(_GLYPHS.get(character, "00000")):
            for column in range(3):
                if int(bits) >> (2 - column) & 1:
                    top, left = y + row * _SCALE, x + column * _SCALE
                    picture[top : top + _SCALE, left : left + _SCALE] = _BLACK
        x += 4 * _SCALE


def _png(picture: np.ndarray) -> bytes:
    height, width, _ = picture.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), picture.reshape(height, -1)], 1)  # filter 0 in each row

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    compressed = zlib.compress(rows.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", compressed) + chunk(b"IEND", b"")
