"""The constants of a `.pte` file, read from the file when they are used."""

from __future__ import annotations

import io
from pathlib import Path

from executorch.exir._serialize._cord import FileBackedData

from ..inspect.pte import Contents


def file_constants(path: Path, contents: Contents) -> dict[str, FileBackedData]:
    """Return the named data of a file by key. A value reads its bytes from the file when they are used."""
    offsets = contents.named_data_offsets
    return {key: _Region(path, offsets[key], size) for key, size in contents.named_data.items()}


class _Region(FileBackedData):
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
