"""`PictureProcessor`: what a program needs of a picture, video or sound, and the text for it in a prompt."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from .messages import PICTURE, SOUND, VIDEO
from .patches import gemma4_size, patches_of, pixtral_size, qwen_size, qwen_video_size
from .picture import MediaError, PictureError, open_picture
from .preprocess import Preprocessor, bicubic, levels_of
from .sound import Sound, SoundError, open_sound, whisper_tokens
from .tiles import idefics3_tiles, internvl_tiles, llama4_tiles, llava_next_tiles, phi4_tiles, without_border
from .video import Video, VideoError, open_video

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_SAMPLES = 1 << 26  # of a sound


@dataclass(frozen=True)
class Encoding:
    """A call of `vision_encoder` or `audio_encoder`, and the tokens that get its result.

    - `inputs`: the arrays of the call, contiguous.
    - `rows`: for each token, the row of the result that is its embedding, or -1 for a token of text in between.
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
        """64 bits of a hash of the inputs, rows and rotary positions."""
        digest = hashlib.sha256(repr([(array.shape, array.dtype.str) for array in self.inputs]).encode())
        for array in self.inputs:
            digest.update(array.data)
        digest.update(np.asarray(self.rows, np.int64).tobytes())
        if self.rope_positions is not None:
            digest.update(np.append(self.rope_positions, self.rope_length).tobytes())
        return int.from_bytes(digest.digest()[:8], "little")


class PictureProcessor:
    """Prepares the pictures or sounds of prompts. `settings` are those that the export has stored in the program.

    `takes_sounds` says which of them. Raises ValueError for settings that are damaged.
    """

    def __init__(self, settings: Mapping[str, Any]):
        _check(settings, _KINDS | _SOUNDS)
        self._settings = settings
        self.token_id, self.placeholder = settings["token_id"], settings["placeholder"]
        self.takes_sounds = settings["kind"] in _SOUNDS
        self._prepare = (_SOUNDS if self.takes_sounds else _KINDS)[settings["kind"]]
        self._pixels = None if self.takes_sounds else Preprocessor(settings["image"])
        self._token_ids = [self.token_id]
        self._video = settings.get("video")
        if self._video is not None:
            _check({**settings, **self._video}, _VIDEOS)
            self._token_ids.append(self._video.get("token_id", self.token_id))

    def insert(
        self, text: str, pictures: Sequence[Any], encode: Callable[[str], list[int]]
    ) -> tuple[list[int], list[Encoding]]:
        """Return the token ids of `text`, in which each placeholder stands for one of `pictures`, and the pictures.

        `pictures` are what `open_picture` takes, or each a `Sound` or `Video`. `encode` returns the ids of a text.
        Raises PictureError, SoundError or VideoError if the numbers differ, or for one that is invalid.
        """
        marks = {SOUND if self.takes_sounds else PICTURE: self.placeholder}
        places: dict[str, type] = {self.placeholder: Sound if self.takes_sounds else object}
        if self._video is not None:
            marks[VIDEO] = self._video["placeholder"]
            places[self._video["placeholder"]] = Video
        for mark, placeholder in marks.items():
            text = text.replace(mark, placeholder)
        for source in pictures:
            if (kind := _class(source)) not in places.values():
                taken = " and ".join(_ERRORS[kind].things for kind in places.values())
                raise _ERRORS[kind](f"the model takes {taken} only")
        parts = re.split("({})".format("|".join(map(re.escape, sorted(places, key=len, reverse=True)))), text)
        if [places[place] for place in parts[1::2]] != [_class(source) for source in pictures]:
            raise self._error(
                f"got {len(pictures)} {self._error.things} for a prompt with {len(parts) // 2} of {', '.join(places)}"
            )
        texts, encodings = [parts[0]], []
        for source, part in zip(pictures, parts[2::2]):
            shown, calls = self._prepared(source)
            texts += [shown, part]
            encodings += calls
        ids = encode("".join(texts))
        return ids, _placed(encodings, ids, self._token_ids)

    def _prepared(self, source: Any) -> _Prepared:
        """Return the text for a picture, sound or video, and its calls."""
        if isinstance(source, Sound):
            most = self._settings["samples"] * self._settings["windows"]
            return self._prepare(open_sound(source, self._settings["rate"], most), self._settings, None)
        if isinstance(source, Video):
            settings = {**self._settings, **self._video}
            return _VIDEOS[settings["kind"]](source, settings, Preprocessor(settings["image"]))
        return self._prepare(open_picture(source), self._settings, self._pixels)

    @property
    def _error(self) -> type[MediaError]:
        return SoundError if self.takes_sounds else PictureError


_ERRORS: dict[type, type[MediaError]] = {object: PictureError, Sound: SoundError, Video: VideoError}


def _class(source: Any) -> type:
    return type(source) if isinstance(source, (Sound, Video)) else object


def _check(settings: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Raise ValueError unless `settings` cost bounded memory: they may come from a file that is not trusted."""
    if settings.get("kind") not in kinds:
        raise ValueError(f"picture_settings: kind: got {settings.get('kind')}, expected one of {', '.join(kinds)}")
    samples = settings.get("samples")
    limits = {
        "count": 1 << 16,
        "merge": 16,
        "frames": 16,
        "patch": 256,
        "edge": 1 << 13,
        "longest": 1 << 13,
        "side": 1 << 8,
        "rate": 192_000,
        "samples": MAX_SAMPLES,
        "hop": 1 << 16,
        "windows": MAX_SAMPLES // (samples if isinstance(samples, int) and samples > 0 else 1),
    }
    limits |= {"most": 256} if settings["kind"] in ("internvl", "phi4") else {"most": 1 << 26}
    for name, limit in limits.items():
        value = settings.get(name)
        if value is not None and not (isinstance(value, int) and 1 <= value <= limit):
            raise ValueError(f"picture_settings: {name}: got {value}, expected 1 to {limit}")
    edges = [
        *settings.get("image", {}).get("output", ()),
        *(edge for size in settings.get("sizes", ()) for edge in size),
    ]
    if not all(isinstance(edge, int) and 1 <= edge <= 1 << 13 for edge in edges):
        raise ValueError(f"picture_settings: got sizes {edges}, expected edges of 1 to {1 << 13}")


def _placed(encodings: list[Encoding], ids: list[int], token_ids: list[int]) -> list[Encoding]:
    """Return the encodings with their positions: those of the tokens `token_ids`, one after the other."""
    is_token = np.isin(ids, token_ids)
    placed, end = [], 0
    for encoding in encodings:
        has_row = np.asarray(encoding.rows) >= 0
        first = end + int(is_token[end:].argmax()) - int(has_row.argmax())
        end = first + len(has_row)
        if not (is_token[max(first, 0) : end].shape == has_row.shape and (is_token[first:end] == has_row).all()):
            raise PictureError(f"got other tokens for a picture than {has_row.sum()} in a row")
        placed.append(replace(encoding, position=first))
    if (count := is_token.sum()) != (used := sum((np.asarray(e.rows) >= 0).sum() for e in encodings)):
        raise PictureError(f"got {count} tokens in the prompt for pictures of {used}")
    return placed


_Prepared = tuple[str, list[Encoding]]  # the text of a picture, and the calls of the encoder


def _tiles(settings: Mapping[str, Any], pixels: Preprocessor, tiles: Sequence[np.ndarray]) -> list[Encoding]:
    """Return a call for each of `tiles`, the levels of pictures, uint8 [3, H, W]."""
    count = range(settings["count"])
    return [Encoding((np.ascontiguousarray(pixels.normalized(tile)[None]),), count) for tile in tiles]


def _around(settings: Mapping[str, Any], tiles: int) -> str:
    return settings.get("before", "") + settings["token"] * settings["count"] * tiles + settings.get("after", "")


def _single(picture: Image, settings: Mapping[str, Any], pixels: Preprocessor) -> _Prepared:
    return _around(settings, 1), _tiles(settings, pixels, [pixels.levels(picture)])


def _internvl(picture: Image, settings: Mapping[str, Any], pixels: Preprocessor) -> _Prepared:
    tiles = [levels_of(tile) for tile in internvl_tiles(picture, settings)]
    return _around(settings, len(tiles)), _tiles(settings, pixels, tiles)


def _idefics3(picture: Image, settings: Mapping[str, Any], pixels: Preprocessor) -> _Prepared:
    tiles, columns, rows = idefics3_tiles(picture, settings)
    around, tokens = settings["around"], settings["token"] * settings["count"]
    lines = [
        "".join(f"{around}<row_{row}_col_{column}>{tokens}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    ]
    split = "".join(lines) + ("\n" if lines else "")
    text = f"{split}{around}{settings['whole']}{tokens}{around}"
    return text, _tiles(settings, pixels, [levels_of(tile) for tile in tiles])


def _llama4(picture: Image, settings: Mapping[str, Any], pixels: Preprocessor) -> _Prepared:
    tiles, columns, rows = llama4_tiles(picture, settings)
    tokens = settings["token"] * settings["count"]
    line = "<|tile_x_separator|>".join([tokens] * columns) + "<|tile_y_separator|>"
    split = line * rows if len(tiles) > 1 else ""
    text = f"<|image_start|>{split}{settings['placeholder']}{tokens}<|image_end|>"
    return text, _tiles(settings, pixels, tiles)


def _qwen(picture: Image, settings: Mapping[str, Any], pixels: Preprocessor) -> _Prepared:
    edge, merge = settings["patch"], settings["merge"]
    width, height = qwen_size(picture.size, edge * merge, settings["least"], settings["most"])
    levels = levels_of(picture.resize((width, height), settings["image"]["resample"]))
    patches, places = patches_of(pixels.normalized(levels), edge, merge)
    patches = np.repeat(patches[:, :, None], settings["frames"], 2).reshape(len(patches), -1)
    rows, columns = height // (edge * merge), width // (edge * merge)
    count = rows * columns
    row, column = np.divmod(np.arange(count), columns)
    positions = np.stack([np.zeros(count, np.int64), row, column])
    encoding = Encoding((patches, places), range(count), rope_positions=positions, rope_length=max(rows, columns))
    return settings["token"] * count, [encoding]


def _qwen_video(video: Video, settings: Mapping[str, Any], pixels: Preprocessor) -> _Prepared:
    """Frames of a patch are encoded together. Their tokens have the time on the first rotary axis, or before them."""
    edge, merge, step = settings["patch"], settings["merge"], settings["frames"]
    count, resized = len(video.frames), []
    for frame in open_video(video):
        if settings["limits_all"]:
            size = qwen_video_size(
                frame.size, edge * merge, settings["least"], settings["most"], max(count, step), step
            )
        else:
            size = qwen_size(frame.size, edge * merge, settings["least"], settings["most"])
        levels = levels_of(frame.resize(size, settings["image"]["resample"]))
        patches, places = patches_of(pixels.normalized(levels), edge, merge)
        resized.append(patches)
    resized += [resized[-1]] * (-count % step)
    columns, rows = (length // (edge * merge) for length in size)
    row, column = np.divmod(np.arange(rows * columns), columns)
    tokens = settings["token"] * (rows * columns)
    times = range(0, len(resized), step)
    texts, encodings, end = [], [], max(rows, columns)
    for index, first in enumerate(times):
        patches = np.stack(resized[first : first + step], 2).reshape(len(places), -1)
        time, length = 0, end
        if settings["interval"] is None:
            seconds = [min(first + i, count - 1) / video.fps for i in (0, step - 1)]
            texts.append(f"<{sum(seconds) / 2:.1f} seconds><|vision_start|>{tokens}<|vision_end|>")
        else:
            interval = settings["interval"] * step / video.fps if settings["has_rate"] else settings["interval"]
            texts.append(tokens)
            time = int(np.float32(index) * np.float32(interval))
            length = max(end, time + 1) if first == times[-1] else 0  # what follows is behind the whole video
        positions = np.stack([np.full(len(row), time), row, column])
        encodings.append(Encoding((patches, places), range(len(row)), rope_positions=positions, rope_length=length))
    return "".join(texts), encodings


def _internvl_video(video: Video, settings: Mapping[str, Any], pixels: Preprocessor) -> _Prepared:
    tiles = [pixels.levels(frame) for frame in open_video(video)]
    texts = [f"Frame{index + 1}: {_around(settings, 1)}" for index in range(len(tiles))]
    return "\n".join(texts), _tiles(settings, pixels, tiles)


def _gemma4(picture: Image, settings: Mapping[str, Any], pixels: Preprocessor) -> _Prepared:
    edge, merge = settings["patch"], settings["merge"]
    size = gemma4_size(picture.size, edge * merge, settings["most"])
    levels = levels_of(picture.resize(size, settings["image"]["resample"]))
    patches, places = patches_of(pixels.normalized(levels), edge, merge)
    patches = np.ascontiguousarray(patches.transpose(0, 2, 1)).reshape(len(patches), -1)  # channels last
    count = len(patches) // merge**2
    text = settings["before"] + settings["token"] * count + settings["after"]
    return text, [Encoding((patches, places), range(count))]


def _pixtral(picture: Image, settings: Mapping[str, Any], pixels: Preprocessor) -> _Prepared:
    edge, merge = settings["patch"], settings["merge"]
    width, height = pixtral_size(picture.size, edge * merge, settings["longest"])
    levels = levels_of(picture.resize((width, height), settings["image"]["resample"]))
    patches, places = patches_of(pixels.normalized(levels), edge, merge)
    rows, columns = height // (edge * merge), width // (edge * merge)
    index = np.full((rows, columns + 1), -1)  # behind each row of the picture is a token of text
    index[:, :-1] = np.arange(rows * columns).reshape(rows, columns)
    line = settings["token"] * columns
    text = settings["break"].join([line] * rows) + settings["end"]
    return text, [Encoding((patches.reshape(len(patches), -1), places), index.reshape(-1)[:-1].tolist())]


def _llava_next(picture: Image, settings: Mapping[str, Any], pixels: Preprocessor) -> _Prepared:
    tiles, columns, rows = llava_next_tiles(picture, settings)
    inputs = np.stack([pixels.normalized(tile) for tile in tiles])
    side = settings["side"]
    tile = side * side
    # Behind the rows of all tiles is that of the end of a line.
    index = np.arange(tile, len(tiles) * tile).reshape(rows, columns, side, side).transpose(0, 2, 1, 3)
    index = without_border(index.reshape(rows * side, columns * side), picture.size)
    lines = np.pad(index, ((0, 0), (0, 1)), constant_values=len(tiles) * tile)
    found = [*range(tile), *lines.reshape(-1).tolist()]
    return settings["token"] * len(found), [Encoding((np.ascontiguousarray(inputs),), found)]


def _phi4(picture: Image, settings: Mapping[str, Any], pixels: Preprocessor) -> _Prepared:
    edge, patch = settings["image"]["output"][0], settings["patch"]
    levels, (columns, rows), (width, height) = phi4_tiles(picture, settings)
    whole = pixels.normalized(levels)
    tiles = whole.reshape(3, rows, edge, columns, edge).transpose(1, 3, 0, 2, 4).reshape(-1, 3, edge, edge)
    side = edge // patch
    held = np.ones((rows * side, columns * side), bool)  # patches that are not in the border
    held[:, held.shape[1] - width // patch :] = False
    held[held.shape[0] - height // patch :] = False
    masks = held.reshape(rows, side, columns, side).swapaxes(1, 2).reshape(-1, side, side)
    masks = np.concatenate([np.ones((1, side, side), bool), masks])
    inputs = np.concatenate([bicubic(whole, edge, edge)[None], tiles]), _phi4_places(masks)
    # Two patches in a row, and two rows, become one embedding. Behind those of all tiles are two of separators.
    side = -(-side // 2)
    count = side * side
    end, separator = len(masks) * count, len(masks) * count + 1
    index = np.arange(count, end).reshape(rows, columns, side, side).transpose(0, 2, 1, 3)
    held = masks[1:, ::2, ::2].reshape(rows, columns, side, side).transpose(0, 2, 1, 3).reshape(rows * side, -1)
    index = index.reshape(held.shape)[: held[:, 0].sum(), : held[0].sum()]
    lines = [
        np.pad(part, ((0, 0), (0, 1)), constant_values=end) for part in (index, np.arange(count).reshape(side, side))
    ]
    found = [*lines[0].reshape(-1).tolist(), separator, *lines[1].reshape(-1).tolist()]
    return settings["token"] * len(found), [Encoding(tuple(map(np.ascontiguousarray, inputs)), found)]


def _phi4_places(masks: np.ndarray) -> np.ndarray:
    """Return the index of the position of each patch, int64 [N, P], or -1 where `masks` [N, side, side] is False.

    The positions of a smaller picture are spread over those of a whole one.
    """
    side = masks.shape[1]
    bounds = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)
    steps = [np.float32(1) / axis.sum(1).astype(np.float32) for axis in (masks[:, :, 0], masks[:, 0])]
    spread = [np.minimum(np.arange(side, dtype=np.float32) * step[:, None], np.float32(1 - 1e-6)) for step in steps]
    row, column = (np.searchsorted(bounds, places, side="right") for places in spread)
    return np.where(masks, row[:, :, None] * side + column[:, None], -1).reshape(len(masks), -1)


_KINDS: dict[str, Callable[[Any, Mapping[str, Any], Preprocessor], _Prepared]] = {
    "gemma4": _gemma4,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "llama4": _llama4,
    "llava_next": _llava_next,
    "phi4": _phi4,
    "pixtral": _pixtral,
    "qwen": _qwen,
    "single": _single,
}


_VIDEOS: dict[str, Callable[[Video, Mapping[str, Any], Preprocessor], _Prepared]] = {
    "internvl": _internvl_video,
    "qwen": _qwen_video,
}


def _whisper(samples: np.ndarray, settings: Mapping[str, Any], _: None) -> _Prepared:
    encodings, size = [], settings["samples"]
    for first in range(0, len(samples), size):
        window = samples[first : first + size]
        padded = np.zeros((1, size), np.float32)
        padded[0, : len(window)] = window
        if settings.get("is_padded"):  # the model also hears the silence behind the sound
            encodings.append(Encoding((padded,), range(settings["count"])))
            continue
        frames, count = whisper_tokens(settings, len(window))
        if count > 0:  # the end of the sound may be too short for a token
            encodings.append(Encoding((padded, np.array([frames])), range(count)))
    if not encodings:
        raise SoundError(f"got {len(samples)} samples, expected enough for a token")
    tokens = settings["token"] * sum(len(encoding.rows) for encoding in encodings)
    return settings.get("before", "") + tokens, encodings


_SOUNDS: dict[str, Callable[[Any, Mapping[str, Any], Any], _Prepared]] = {"whisper": _whisper}
