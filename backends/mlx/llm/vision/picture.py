"""Decodes pictures of users with Pillow, so that a hostile file costs no more than a clear error and bounded memory."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import FieldError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # the decoders that may run
MAX_BYTES = 32 << 20  # of a file
MAX_PIXELS = 50_000_000  # 150 MB as RGB
MAX_EDGE = 1 << 16
MAX_RATIO = 200  # of the longer edge to the shorter one, which models cut or shrink
_DATA_URL = "data:"


class MediaError(FieldError):
    """Raised for a picture or a sound that is invalid."""

    medium, things = "", ""  # the name of the field, and what they are
    sources = "a path, bytes or a data URL"

    def __init__(self, problem: str):
        super().__init__(self.medium, problem=problem)


class PictureError(MediaError):
    """Raised for a picture that cannot be decoded, or that is too large."""

    medium, things = "image", "pictures"
    sources = "a path, bytes, a data URL or a picture of PIL"


def open_picture(source: Any) -> Image:
    """Return a picture as RGB, turned as its metadata say. Of an animation, this is the first frame.

    - `source`: a path, the bytes of a file, a data URL in base64, or a picture of PIL.

    The size is checked before the pixels are decoded. Raises PictureError, and OSError for a path that cannot be read.
    """
    from PIL import Image, ImageOps

    if isinstance(source, Image.Image):
        _check_size(source)
        return source.convert("RGB")
    data = read_bytes(source, PictureError)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow about large pictures and damaged metadata
            with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
                _check_size(picture)
                picture.load()
                return ImageOps.exif_transpose(picture).convert("RGB")
    except PictureError:
        raise
    except Image.DecompressionBombError as error:
        raise PictureError(f"got too many pixels, expected at most {MAX_PIXELS}: {error}") from error
    except Image.UnidentifiedImageError:
        raise PictureError(f"got a file of another format, expected {', '.join(FORMATS)}") from None
    except MemoryError as error:
        raise PictureError("does not fit into memory") from error
    except Exception as error:
        raise PictureError(
            f"damaged: {str(error).splitlines()[0][:200] if str(error) else type(error).__name__}"
        ) from error


def _check_size(picture: Image) -> None:
    width, height = picture.size
    if width < 1 or height < 1 or width * height > MAX_PIXELS or max(width, height) > MAX_EDGE:
        raise PictureError(f"got {width} x {height} pixels, expected 1 to {MAX_PIXELS} with edges up to {MAX_EDGE}")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise PictureError(
            f"got {width} x {height} pixels, expected a longer edge of at most {MAX_RATIO} times the other"
        )


def read_bytes(source: Any, error: type[MediaError]) -> bytes:
    """Return the bytes of a file, which is a path, bytes or a data URL. Raises `error` if they are too many."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        data = bytes(source)
    elif isinstance(source, str) and source.startswith(_DATA_URL):
        data = _decoded(source, error)
    elif isinstance(source, (str, Path)):
        with open(source, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    else:
        raise error(f"got {type(source).__name__}, expected {error.sources}")
    if len(data) > MAX_BYTES:
        raise error(f"got {len(data)} bytes, expected at most {MAX_BYTES}")
    return data


def _decoded(url: str, error: type[MediaError]) -> bytes:
    head, _, content = url.partition(",")
    if not head.endswith(";base64"):
        raise error(f"got {head[:40]!r}, expected a data URL in base64, data:{error.medium}/…;base64,…")
    if len(content) > MAX_BYTES * 4 // 3 + 4:
        raise error(f"got a data URL of {len(content)} characters, expected a file of at most {MAX_BYTES} bytes")
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as problem:
        raise error(f"invalid base64: {problem}") from problem
