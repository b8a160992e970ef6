"""The named data of a `.pte` and of its weights file, read from the files when it is used."""

from __future__ import annotations

import io
from pathlib import Path

from executorch.exir._serialize._cord import FileBackedData
from executorch.extension.flat_tensor.serialize.serialize import (
    FlatTensorHeader,
    _deserialize_to_flat_tensor,
    _get_extended_header,
)

from .inspect.pte import Contents, is_pte, read_pte

_MAGIC_END = 8  # bytes before the header of a data file


class FileRegion(FileBackedData):
    """A range of bytes in a file."""

    def __init__(self, path: Path, offset: int, size: int):
        super().__init__(str(path))
        self._offset, self._size = offset, size

    def to_bytes(self) -> bytes:
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            return file.read(self._size)

    def write_to_file(self, outfile: io.BufferedIOBase) -> None:
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            rest = self._size
            while rest:
                chunk = file.read(min(rest, self._COPY_CHUNK_SIZE))
                outfile.write(chunk)
                rest -= len(chunk)


def file_constants(path: Path, contents: Contents) -> dict[str, FileBackedData]:
    """Return the named data of a `.pte`, and of the data files in its folder that it names, by key."""
    offsets = contents.named_data_offsets
    regions = {key: FileRegion(path, offsets[key], size) for key, size in contents.named_data.items()}
    for name in sorted(_data_files(contents)):
        if (file := path.parent / name).exists():
            regions |= read_data_file(file)
    return regions


def _data_files(contents: Contents) -> set[str]:
    """Return the names of the data files that contain constants of a program: their keys begin with the name."""
    keys = (slot.name or "" for d in contents.delegates for slot in d.graph.named_slots or ())
    return {f"{file}.ptd" for file, colon, _ in (key.partition(":") for key in keys) if colon}


def keys_of_program(path: Path) -> set[str]:
    """Return the keys of the data that the MLX programs of a file need; none if it is no file of ExecuTorch."""
    if not is_pte(path):
        return set()
    slots = (slot for delegate in read_pte(path).delegates for slot in delegate.graph.named_slots or ())
    return {slot.name for slot in slots if slot.name is not None}


def read_data_file(path: Path) -> dict[str, FileBackedData]:
    """Return the contents of a data file (`.ptd`) by key. Raises ValueError if it is none."""
    with open(path, "rb") as file:
        header = _get_extended_header(file.read(_MAGIC_END + FlatTensorHeader.EXPECTED_LENGTH))
        if header is None:
            raise ValueError(f"{path}: expected a data file of ExecuTorch")
        file.seek(0)
        table = _deserialize_to_flat_tensor(file.read(header.flatbuffer_offset + header.flatbuffer_size))
    base = header.segment_base_offset
    regions = [FileRegion(path, base + segment.offset, segment.size) for segment in table.segments]
    return {entry.key: regions[entry.segment_index] for entry in table.named_data}
