"""`Preprocessor`: resizes, crops and normalizes a picture as the processor of a checkpoint in transformers does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

_BILINEAR = 2  # of PIL's filters, the default of processors
_FILTERS = range(6)


def preprocessor_settings(config: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return the settings of a `Preprocessor` from a `preprocessor_config.json`.

    `size` is the edge of the pictures that the model takes. Raises ValueError for a setting that is not supported.
    """
    resize = _size(config, "size", size) if config.get("do_resize", True) else None
    crop = None
    if config.get("do_center_crop", "crop_size" in config):
        edges = _size(config, "crop_size", size)
        crop = [edges["height"], edges["width"]] if "height" in edges else [edges["shortest_edge"]] * 2
    output = crop or (resize and [resize.get("height"), resize.get("width")])
    if output != [size, size]:
        raise ValueError(f"size: got pictures of {output}, expected [{size}, {size}], as the model takes them")
    resample = config.get("resample", _BILINEAR)
    if resample not in _FILTERS:
        raise ValueError(f"resample: got {resample!r}, expected a filter of PIL, 0 to 5")
    normalizes = config.get("do_normalize", True)
    scale = config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1.0
    return {
        "resize": resize,
        "resample": int(resample),
        "crop": crop,
        "scale": float(scale),
        "mean": _channels(config, "image_mean", 0.0) if normalizes else [0.0] * 3,
        "std": _channels(config, "image_std", 1.0) if normalizes else [1.0] * 3,
        "output": output,
    }


class Preprocessor:
    """Makes pixels, float32 [3, H, W], of a picture of PIL in RGB.

    `settings`: `resize`, with `height` and `width`, or with `shortest_edge` for one that keeps the aspect ratio, or
    None; `resample`, PIL's number of the filter; `crop`, the height and the width of the centre, or None; `scale`,
    `mean` and `std`, with which a value v of 0 to 255 becomes (v · scale − mean) / std; `output`, the height and the
    width of the result; and `rounds`, whether each step of this computation is rounded to bfloat16.
    """

    def __init__(self, settings: Mapping[str, Any]):
        self._settings = settings
        self._mean, self._std = (np.asarray(settings[name], np.float32)[:, None, None] for name in ("mean", "std"))

    def __call__(self, picture: Image) -> np.ndarray:
        return self.normalized(self.levels(picture))

    def levels(self, picture: Image) -> np.ndarray:
        """Return the levels of a picture after resize and crop, uint8 [3, H, W]."""
        resize, crop = self._settings["resize"], self._settings["crop"]
        if resize is not None:
            picture = picture.resize(_new_size(picture.size, resize), self._settings["resample"])
        return levels_of(picture) if crop is None else _center(levels_of(picture), *crop)

    def normalized(self, levels: np.ndarray) -> np.ndarray:
        """Return the pixels for levels [3, H, W] of 0 to 255."""
        rounded = _bfloat16 if self._settings.get("rounds") else np.asarray
        scaled = rounded(levels * np.float32(self._settings["scale"]))
        return rounded(rounded(scaled - rounded(self._mean)) / rounded(self._std))


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """Return finite values of float32, rounded to bfloat16."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def bicubic(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return `pixels`, float32 [C, H, W], resized as torch does without antialiasing: [C, height, width]."""
    rows, columns = (_cubic_weights(*sizes) for sizes in ((pixels.shape[1], height), (pixels.shape[2], width)))
    return np.einsum("yh,chw,xw->cyx", rows, pixels, columns, optimize=True).astype(np.float32)


def _cubic_weights(old: int, new: int) -> np.ndarray:
    """Return the weights [new, old] of the pixels of a line, by the cubic convolution with a = -0.75."""
    place = (np.arange(new) + 0.5) * (old / new) - 0.5
    first = np.floor(place).astype(np.int64)
    weights = np.zeros((new, old))
    for tap in range(-1, 3):
        x = np.abs(place - first - tap)
        near = 1.25 * x**3 - 2.25 * x**2 + 1
        far = -0.75 * (x**3 - 5 * x**2 + 8 * x - 4)
        np.add.at(weights, (np.arange(new), (first + tap).clip(0, old - 1)), np.where(x <= 1, near, far))
    return weights


def levels_of(picture: Image) -> np.ndarray:
    return np.moveaxis(np.asarray(picture, np.uint8), -1, 0)


def _new_size(size: tuple[int, int], resize: Mapping[str, int]) -> tuple[int, int]:
    """Return the width and the height after a resize."""
    if "height" in resize:
        return resize["width"], resize["height"]
    short, long = sorted(size)
    edge = resize["shortest_edge"]
    other = int(edge * long / short)
    return (edge, other) if size[0] <= size[1] else (other, edge)


def _center(values: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return the centre of `values` [3, H, W]. A smaller picture gets a black border."""
    missing = max(0, height - values.shape[1]), max(0, width - values.shape[2])
    if any(missing):
        # The border is one pixel wider before a picture whose missing part is odd, as in transformers.
        before = tuple(-(-n // 2) for n in missing)
        values = np.pad(values, ((0, 0), *((b, n - b) for b, n in zip(before, missing))))
    top, left = (values.shape[1] - height) // 2, (values.shape[2] - width) // 2
    return values[:, top : top + height, left : left + width]


def _size(config: Mapping[str, Any], name: str, default: int) -> dict[str, int]:
    given = config.get(name)
    if given is None:
        return {"height": default, "width": default}
    if isinstance(given, int):  # older files: the shortest edge of a resize, or both edges of a crop
        return {"shortest_edge": given} if name == "size" else {"height": given, "width": given}
    edges = {key: given[key] for key in ("height", "width", "shortest_edge") if given.get(key) is not None}
    if given.get("longest_edge") or edges.keys() not in ({"height", "width"}, {"shortest_edge"}):
        raise ValueError(f"{name}: got {given}, expected height and width, or shortest_edge")
    return {key: int(edge) for key, edge in edges.items()}


def _channels(config: Mapping[str, Any], name: str, default: float) -> list[float]:
    values = config.get(name, [default] * 3)
    if not isinstance(values, list) or len(values) != 3:
        raise ValueError(f"{name}: got {values}, expected three numbers")
    return [float(value) for value in values]
