"""Cuts pictures of any size into patches."""

from __future__ import annotations

import math

import numpy as np


def qwen_size(
    size: tuple[int, int], multiple: int, least: int, most: int, frames: int = 1, counted: int = 1
) -> tuple[int, int]:
    """Return the width and height to which a picture is resized: multiples of `multiple`, about in its aspect ratio.

    The number of pixels is `least` to `most`, if the aspect ratio permits it. For a video, this is the number of pixels
    of all `frames`, which are taken as `counted` to decide whether it is in these limits.
    """
    edges = [round(edge / multiple) * multiple for edge in size]
    area = math.prod(size) * frames
    if math.prod(edges) * counted > most:
        factor = math.sqrt(area / most)
        edges = [max(multiple, math.floor(edge / factor / multiple) * multiple) for edge in size]
    elif math.prod(edges) * counted < least:
        factor = math.sqrt(least / area)
        edges = [math.ceil(edge * factor / multiple) * multiple for edge in size]
    return edges[0], edges[1]


def qwen_video_size(
    size: tuple[int, int], multiple: int, least: int, most: int, frames: int, step: int
) -> tuple[int, int]:
    """Return the width and height of the `frames` of a video, of which `step` are in a patch, as `qwen_size` does."""
    if min(size) < multiple:
        factor = max(multiple / edge for edge in size)
        size = int(size[0] * factor), int(size[1] * factor)
    return qwen_size(size, multiple, least, most, frames, round(frames / step) * step)


def gemma4_size(size: tuple[int, int], multiple: int, most: int) -> tuple[int, int]:
    """Return the width and height to which a picture is resized: multiples of `multiple`, about in its aspect ratio.

    They are the largest with at most `most` pixels.
    """
    factor = math.sqrt(most / math.prod(size))
    edges = [math.floor(factor * edge / multiple) * multiple for edge in size]
    if 0 in edges:  # longer than all units in one row
        long = min(max(size) // min(size), most // multiple**2) * multiple
        edges = [edge and long for edge in edges]
    return edges[0] or multiple, edges[1] or multiple


def pixtral_size(size: tuple[int, int], multiple: int, longest: int) -> tuple[int, int]:
    """Return the width and height to which a picture is resized: the next multiples of `multiple`.

    If an edge is longer than `longest`, the picture is made smaller first.
    """
    ratio = max(*size, longest) / longest
    width, height = (math.floor(edge / ratio) if ratio > 1 else edge for edge in size)
    return tuple(math.ceil(max(edge, 1) / multiple) * multiple for edge in (width, height))  # type: ignore[return-value]


def patches_of(pixels: np.ndarray, edge: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the patches of pixels [3, H, W], float32 [N, 3, edge²], and the row and column of each, int64 [N, 2].

    They are in blocks of `merge` × `merge` patches, block by block and row by row.
    """
    rows, columns = pixels.shape[1] // edge, pixels.shape[2] // edge
    shape = (rows // merge, merge, columns // merge, merge)
    blocks = pixels.reshape(3, shape[0], merge, edge, shape[2], merge, edge)
    patches = blocks.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, 3, edge * edge)
    places = [index.reshape(shape).transpose(0, 2, 1, 3).reshape(-1) for index in np.indices((rows, columns))]
    return np.ascontiguousarray(patches, np.float32), np.ascontiguousarray(np.stack(places, 1), np.int64)
