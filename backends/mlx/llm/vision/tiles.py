"""Cuts pictures into tiles as processors of vision-language models in transformers do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .preprocess import levels_of

if TYPE_CHECKING:
    from PIL.Image import Image

_BILINEAR = 2  # of PIL's filters
_MOST = 4096  # pixels of an edge in Idefics3


def internvl_tiles(picture: Image, settings: Mapping[str, Any]) -> list[Image]:
    """Return the tiles of a picture, row by row, and behind several tiles the whole picture.

    The grid has `settings["least"]` to `settings["most"]` tiles and the aspect ratio that is closest to the picture's.
    """
    height, width = settings["image"]["output"]
    columns, rows = _best_grid(picture.size, (width, height), settings["least"], settings["most"])
    resample = settings["image"]["resample"]
    resized = picture.resize((columns * width, rows * height), resample)
    tiles = _grid(resized, columns, rows, width, height)
    return tiles if len(tiles) == 1 else [*tiles, picture.resize((width, height), resample)]


def idefics3_tiles(picture: Image, settings: Mapping[str, Any]) -> tuple[list[Image], int, int]:
    """Return the tiles of a picture, row by row, then the whole picture, and the numbers of columns and rows.

    If the whole picture is one tile, the numbers are 0.
    """
    edge, resample = settings["image"]["output"][0], settings["image"]["resample"]
    if settings["edge"] is not None:
        picture = picture.resize(_with_longest_edge(picture.size, settings["edge"]), resample)
    if not settings["splits"]:
        return [picture.resize((edge, edge), resample)], 0, 0
    picture = picture.resize(_multiples(picture.size, edge), resample)
    columns, rows = (length // edge for length in picture.size)
    if columns <= 1 and rows <= 1:
        return [picture], 0, 0
    return [*_grid(picture, columns, rows, edge, edge), picture.resize((edge, edge), resample)], columns, rows


def llava_next_tiles(picture: Image, settings: Mapping[str, Any]) -> tuple[list[np.ndarray], int, int]:
    """Return the whole picture and its tiles, row by row, uint8 [3, H, W]; and the numbers of columns and rows.

    The picture is resized to the best of the sizes `settings["sizes"]`, which are heights and widths, with a border.
    """
    edge, resample = settings["image"]["output"][0], settings["image"]["resample"]
    height, width = _best_size(picture.size, settings["sizes"])
    by_width, by_height = width / picture.size[0], height / picture.size[1]
    if by_width < by_height:
        inner = width, min(math.ceil(picture.size[1] * by_width), height)
    else:
        inner = min(math.ceil(picture.size[0] * by_height), width), height
    levels = levels_of(picture.resize(inner, resample))
    borders = [((whole - part) // 2, -(-(whole - part) // 2)) for whole, part in zip((height, width), levels.shape[1:])]
    levels = np.pad(levels, ((0, 0), *borders))
    rows, columns = height // edge, width // edge
    corners = [(y * edge, x * edge) for y in range(rows) for x in range(columns)]
    tiles = [levels[:, y : y + edge, x : x + edge] for y, x in corners]
    return [levels_of(picture.resize((edge, edge), resample)), *tiles], columns, rows


def _best_size(size: tuple[int, int], sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the height and width that keep most pixels of a picture, and of these the smallest."""

    def key(candidate: tuple[int, int]) -> tuple[int, int]:
        height, width = candidate
        scale = min(width / size[0], height / size[1])
        kept = min(int(size[0] * scale) * int(size[1] * scale), math.prod(size))
        return kept, kept - height * width

    return max(sizes, key=key)


def llama4_tiles(picture: Image, settings: Mapping[str, Any]) -> tuple[list[np.ndarray], int, int]:
    """Return the tiles of a picture, row by row, uint8 [3, H, W], and the numbers of columns and rows.

    Behind several tiles is the whole picture. The picture lies at the top left of one of the sizes `settings["sizes"]`,
    which are heights and widths. It is not made larger than this needs, unless `settings["enlarges"]`.
    """
    edge, resample = settings["image"]["output"][0], settings["image"]["resample"]
    canvas = _best_canvas(picture.size, settings["sizes"], settings["enlarges"])
    height, width = canvas
    if not settings["enlarges"]:
        height, width = (min(max(length, edge), most) for length, most in zip(picture.size[::-1], canvas))
    by_height, by_width = height / picture.size[1], width / picture.size[0]
    if by_width < by_height:
        inner = width, min(math.floor(picture.size[1] * by_width), height)
    else:
        inner = min(math.floor(picture.size[0] * by_height), width), height
    levels = levels_of(picture.resize((max(inner[0], 1), max(inner[1], 1)), resample))
    levels = np.pad(levels, ((0, 0), *((0, whole - part) for whole, part in zip(canvas, levels.shape[1:]))))
    rows, columns = canvas[0] // edge, canvas[1] // edge
    tiles = list(levels.reshape(3, rows, edge, columns, edge).transpose(1, 3, 0, 2, 4).reshape(-1, 3, edge, edge))
    if len(tiles) > 1:
        tiles.append(levels_of(picture.resize((edge, edge), resample)))
    return tiles, columns, rows


def _best_canvas(size: tuple[int, int], sizes: Sequence[tuple[int, int]], enlarges: bool) -> tuple[int, int]:
    """Return the height and width, of those that need the smallest change of a picture, with the fewest pixels.

    A picture is made smaller only if it fits none of `sizes`. If `enlarges`, the largest change is chosen if it fits.
    """
    scales = [
        min(np.float32(height) / np.float32(size[1]), np.float32(width) / np.float32(size[0]))
        for height, width in sizes
    ]
    fitting = [scale for scale in scales if scale >= 1]
    best = (max if enlarges else min)(fitting) if fitting else max(scales)
    return min((candidate for candidate, scale in zip(sizes, scales) if scale == best), key=math.prod)


def phi4_tiles(picture: Image, settings: Mapping[str, Any]) -> tuple[np.ndarray, tuple[int, int], tuple[int, int]]:
    """Return the picture with a white border at the right and at the bottom, uint8 [3, H, W], and two sizes.

    These are the numbers of columns and rows of tiles, and the width and height of the border.
    """
    edge, most = settings["image"]["output"][0], settings["most"]
    grid = math.ceil(picture.size[0] / edge), math.ceil(picture.size[1] / edge)
    if math.prod(grid) > most:
        grid = _best_grid(picture.size, (edge, edge), 1, most)
    width, height = grid[0] * edge, grid[1] * edge
    by_width, by_height = width / picture.size[0], height / picture.size[1]
    if by_width < by_height:
        inner = width, max(int(picture.size[1] * by_width), 1)
    else:
        inner = max(int(picture.size[0] * by_height), 1), height
    border = width - inner[0], height - inner[1]
    levels = levels_of(picture.resize(inner, _BILINEAR))
    return np.pad(levels, ((0, 0), (0, border[1]), (0, border[0])), constant_values=255), grid, border


def without_border(index: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return `index` [rows, columns] without the border around a picture of `size`, width and height."""
    rows, columns = index.shape
    if size[0] / size[1] > columns / rows:
        border = (rows - int(round(size[1] * (columns / size[0]), 7))) // 2
        return index[border : rows - border]
    border = (columns - int(round(size[0] * (rows / size[1]), 7))) // 2
    return index[:, border : columns - border]


def _grid(picture: Image, columns: int, rows: int, width: int, height: int) -> list[Image]:
    corners = [(column * width, row * height) for row in range(rows) for column in range(columns)]
    return [picture.crop((x, y, x + width, y + height)) for x, y in corners]


def _best_grid(size: tuple[int, int], tile: tuple[int, int], least: int, most: int) -> tuple[int, int]:
    """Return the columns and rows of the grid with the aspect ratio closest to `size`.

    Of equally close grids, the larger one is chosen if the picture has more than half of its pixels.
    """
    edges = range(1, most + 1)
    grids = [(columns, rows) for columns in edges for rows in edges if least <= columns * rows <= most]
    best, smallest = (1, 1), math.inf
    for grid in sorted(grids, key=math.prod):
        difference = abs(size[0] / size[1] - grid[0] / grid[1])
        is_large = math.prod(size) > 0.5 * math.prod(tile) * math.prod(grid)
        if difference < smallest or (difference == smallest and is_large):
            best, smallest = grid, difference
    return best


def _with_longest_edge(size: tuple[int, int], edge: int) -> tuple[int, int]:
    """Return `size` scaled so that the longer edge has `edge` pixels, and at most `_MOST`. The other one is even."""
    width, height = size
    ratio = width / height
    if width >= height:
        width, height = edge, int(edge / ratio)
        height += height % 2
    else:
        width, height = int(edge * ratio), edge
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _MOST:
        width, height = _MOST, int(_MOST / ratio)
    elif height > width and height > _MOST:
        width, height = int(_MOST * ratio), _MOST
    return max(width, 1), max(height, 1)


def _multiples(size: tuple[int, int], edge: int) -> tuple[int, int]:
    """Return a size with about the same aspect ratio, whose edges are multiples of `edge`."""
    width, height = size
    ratio = width / height
    if width >= height:
        width = math.ceil(width / edge) * edge
        height = math.ceil(int(width / ratio) / edge) * edge
    else:
        height = math.ceil(height / edge) * edge
        width = math.ceil(int(height * ratio) / edge) * edge
    return width, height
