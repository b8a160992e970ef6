"""Videos of users: frames in their order, which are pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .picture import MediaError, open_picture

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_FRAMES = 768


class VideoError(MediaError):
    """Raised for a video that is invalid."""

    medium, things = "video", "videos"


@dataclass(frozen=True)
class Video:
    """A video in a prompt. `frames` are what `open_picture` takes, of one size, and `fps` how many are in a second."""

    frames: Sequence[Any]
    fps: float = 2.0


def open_video(video: Video) -> Iterator[Image]:
    """Yield the frames of a video in RGB. Raises VideoError if it is invalid, and PictureError for an invalid frame."""
    if isinstance(video.frames, (str, bytes)) or not isinstance(video.frames, Sequence):
        raise VideoError(f"got {type(video.frames).__name__}, expected a list of frames")
    if not 1 <= len(video.frames) <= MAX_FRAMES:
        raise VideoError(f"got {len(video.frames)} frames, expected 1 to {MAX_FRAMES}")
    if not isinstance(video.fps, (int, float)) or not 0 < video.fps < math.inf:
        raise VideoError(f"fps: got {video.fps!r}, expected frames per second above 0")
    size = None
    for frame in video.frames:
        picture = open_picture(frame)
        if size not in (None, picture.size):
            raise VideoError(f"got frames of {size} and {picture.size} pixels, expected one size")
        size = picture.size
        yield picture
