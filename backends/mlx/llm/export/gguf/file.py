"""`GGUFFile`: the metadata and tensors of a GGUF file, as they are stored."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf


class GGUFFile:
    """An open GGUF file, memory-mapped. If the file is one of several parts of a model, all parts are open.

    Raises ValueError if a file is damaged or missing.
    """

    def __init__(self, path: Path):
        paths = _parts(Path(path))
        readers = [_open(path) for path in paths]
        self.path, self.reader = paths[0], readers[0]  # with the metadata
        self.tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        if (count := self.value("split.count", 1)) > 1 and count != len(readers):
            raise ValueError(f"{self.path}: got {len(readers)} of {count} parts, expected their original names")
        self.architecture = self.value("general.architecture")

    def value(self, key: str, default: Any = None) -> Any:
        """Return a value of the metadata, or `default` if the file lacks it."""
        return default if (found := self.reader.get_field(key)) is None else found.contents()

    def get(self, key: str, default: Any = None) -> Any:
        """Like `value`, for a key that begins with the name of the architecture. `key` is the part after this name."""
        return self.value(f"{self.architecture}.{key}", default)

    def require(self, key: str) -> Any:
        """Like `get`, for a key without a default. Raises ValueError if the file lacks it."""
        if (value := self.get(key)) is None:
            raise ValueError(f"{self.path}: expected {self.architecture}.{key}")
        return value

    def has(self, name: str) -> bool:
        """Whether the file has a tensor of this name."""
        return name in self.tensors

    def has_any(self, leaf: str) -> bool:
        """Whether any layer has a tensor whose name ends in `leaf`."""
        return any(self.has(f"blk.{i}.{leaf}") for i in range(self.layer_count))

    def row_count(self, name: str) -> int:
        """Return the number of rows of a tensor. Raises ValueError if the file lacks it."""
        if not self.has(name):
            raise ValueError(f"{self.path}: expected a tensor {name}")
        return int(self.tensors[name].shape[-1])

    @property
    def layer_count(self) -> int:
        """The number of layers, without those of a head for multi-token prediction.

        Raises ValueError for more layers than have tensors: a model with millions of layers would fill the memory.
        """
        count = self.require("block_count") - self.get("nextn_predict_layers", 0)
        layers = {match[1] for name in self.tensors if (match := re.match(r"blk\.(\d+)\.", name))}
        if count > len(layers):
            message = f"got {count} layers, expected {len(layers)}, which have tensors"
            raise ValueError(f"{self.path}: {self.architecture}.block_count: {message}")
        return count


def _parts(path: Path) -> list[Path]:
    """Return the files of the model in `path`, by the names that llama.cpp gives to the parts of a model."""
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if match is None:
        return [path]
    return [path.with_name(f"{match[1]}-{i + 1:05}-of-{match[2]}.gguf") for i in range(int(match[2]))]


def _open(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path, "c")  # copy-on-write: PyTorch warns about read-only memory
    except FileNotFoundError as error:
        raise ValueError(f"{path}: this part of the model is missing") from error
    except (ValueError, KeyError, IndexError, UnicodeDecodeError) as error:  # as `gguf` raises them
        raise ValueError(f"{path}: damaged or not a GGUF file: {error!r}") from error
