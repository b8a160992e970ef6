"""`PictureProcessor`: what a program needs of a picture, and the text that takes its place in a prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from .picture import PictureError, open_picture
from .preprocess import Preprocessor, levels_of
from .tiles import idefics3_tiles, internvl_tiles

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Encoding:
    """A call of `vision_encoder` and the tokens that get its result.

    - `inputs`: the arrays of the call, contiguous.
    - `rows`: for each token, the row of the result that is its embedding.
    - `position`: the position of the first token in the prompt.
    - `rope_positions`, `rope_length`: for models with three rotary axes, the rotary positions of the tokens from the
      first one on, int64 [3, tokens], and how many positions the tokens take.
    """

    inputs: tuple[np.ndarray, ...]
    rows: Sequence[int]
    position: int = 0
    rope_positions: np.ndarray | None = None
    rope_length: int = 0

    @cached_property
    def hash(self) -> int:
        """64 bits of a hash of the inputs and rows."""
        digest = hashlib.sha256(repr([(array.shape, array.dtype.str) for array in self.inputs]).encode())
        for array in self.inputs:
            digest.update(array.data)
        digest.update(np.asarray(self.rows, np.int64).tobytes())
        return int.from_bytes(digest.digest()[:8], "little")


class PictureProcessor:
    """Prepares the pictures of prompts. `settings` are those that the export has stored in the program."""

    def __init__(self, settings: Mapping[str, Any]):
        self._settings = settings
        self.token_id, self.placeholder = settings["token_id"], settings["placeholder"]
        self._pixels = Preprocessor(settings["image"])
        self._prepare = _KINDS[settings["kind"]]

    def insert(
        self, text: str, pictures: Sequence[Any], encode: Callable[[str], list[int]]
    ) -> tuple[list[int], list[Encoding]]:
        """Return the token ids of `text`, in which each placeholder stands for one of `pictures`, and the pictures.

        `pictures` are what `open_picture` takes. `encode` returns the ids of a text. Raises PictureError if the numbers
        differ, or for a picture that is invalid.
        """
        parts = text.split(self.placeholder)
        if len(parts) != len(pictures) + 1:
            raise PictureError(f"got {len(pictures)} pictures for a prompt with {len(parts) - 1} of {self.placeholder}")
        texts, encodings = [parts[0]], []
        for source, part in zip(pictures, parts[1:]):
            shown, tiles = self._prepare(open_picture(source), self._settings)
            texts += [shown, part]
            count = range(self._settings["count"])
            encodings += [
                Encoding((np.ascontiguousarray(self._pixels.normalized(tile)[None]),), count) for tile in tiles
            ]
        ids = encode("".join(texts))
        return ids, _placed(encodings, ids, self.token_id)


def _placed(encodings: list[Encoding], ids: list[int], token_id: int) -> list[Encoding]:
    """Return the encodings with their positions: those of the tokens `token_id`, one after the other."""
    places = [position for position, id in enumerate(ids) if id == token_id]
    placed, used = [], 0
    for encoding in encodings:
        count = len(encoding.rows)
        own = places[used : used + count]
        if len(own) < count or own[-1] - own[0] != count - 1:
            raise PictureError(f"got {len(places)} tokens in the prompt, expected {count} for each part of a picture")
        placed.append(replace(encoding, position=own[0]))
        used += count
    if used != len(places):
        raise PictureError(f"got {len(places)} tokens in the prompt for pictures of {used}")
    return placed


_Prepared = tuple[str, list[np.ndarray]]  # the text of a picture, and the levels of its tiles, uint8 [3, H, W]


def _single(picture: Image, settings: Mapping[str, Any]) -> _Prepared:
    return _around(settings, 1), [Preprocessor(settings["image"]).levels(picture)]


def _internvl(picture: Image, settings: Mapping[str, Any]) -> _Prepared:
    tiles = internvl_tiles(picture, settings)
    return _around(settings, len(tiles)), [levels_of(tile) for tile in tiles]


def _around(settings: Mapping[str, Any], tiles: int) -> str:
    return settings.get("before", "") + settings["token"] * settings["count"] * tiles + settings.get("after", "")


def _idefics3(picture: Image, settings: Mapping[str, Any]) -> _Prepared:
    tiles, columns, rows = idefics3_tiles(picture, settings)
    around, tokens = settings["around"], settings["token"] * settings["count"]
    lines = [
        "".join(f"{around}<row_{row}_col_{column}>{tokens}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    ]
    split = "".join(lines) + ("\n" if lines else "")
    return f"{split}{around}{settings['whole']}{tokens}{around}", [levels_of(tile) for tile in tiles]


_KINDS: dict[str, Callable[[Any, Mapping[str, Any]], _Prepared]] = {
    "idefics3": _idefics3,
    "internvl": _internvl,
    "single": _single,
}
