"""Programs whose weights lie beside the `.pte`, in a data file (`.ptd`) that several programs may share.

`MLXPartitioner(weights_file="name.ptd")` leaves the weights to the file. The key of a weight there contains the digest
of the weight, so that equal weights of all programs are stored once, and no program runs with other weights than its
own. The method `get_weights_file` of a program returns the name of the file, which the engine and `Runtime` look for in
the folder of the `.pte`.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from executorch.exir import ExecutorchProgramManager
    from executorch.exir._serialize._cord import FileBackedData

METHOD = "get_weights_file"
SUFFIX = ".ptd"
_PAGE = 16 << 10  # bytes of a page of memory of an Apple device, which maps whole pages of a file for its GPU


def check_name(name: str) -> None:
    """Raise ValueError unless `name` is the name of a `.ptd` file without a folder."""
    if Path(name).name != name or not name.endswith(SUFFIX) or name == SUFFIX or ":" in name:
        raise ValueError(f"got {name!r}, expected the name of a {SUFFIX} file, without a folder")


def methods(name: str | None) -> dict[str, torch.Tensor]:
    """Return the constant method by which a program names its weights file; none for None."""
    import torch

    return {} if name is None else {METHOD: torch.frombuffer(bytearray(name.encode()), dtype=torch.uint8)}


def save_program(program: ExecutorchProgramManager, path: str | Path) -> int:
    """Write a program to `path`, and its weights file, if it has one, beside it. Returns the size of the `.pte`.

    A weights file that exists keeps its weights, also those that no program needs any more, and gets those of
    `program` that it lacks. Programs that have mapped it go on with the old file.

    Raises FileNotFoundError or FileExistsError for an unsuitable `path`, and ValueError if the weights file exists and
    is no data file.
    """
    with staged(program, Path(path)) as file:
        return file.stat().st_size


@contextmanager
def staged(program: ExecutorchProgramManager, path: Path) -> Iterator[Path]:
    """Write what `save_program` writes to a temporary folder beside `path`, and yield the path of the `.pte` there.

    When the context ends without an exception, the files take the places of older ones. Raises FileNotFoundError if the
    folder of `path` does not exist, and FileExistsError if `path` is something else than a file, such as /dev/null.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "expected a file, or a path where nothing is", str(path))
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as name:
        folder = Path(name)
        program.write_tensor_data_to_file(folder)
        changed = [file for file in list(folder.iterdir()) if _merge(path.parent / file.name, file)]
        unchecked = folder / "model.pte"
        with open(unchecked, "wb") as file:
            program.write_to_file(file)
        yield unchecked
        for weights in changed:
            os.replace(weights, path.parent / weights.name)
        os.replace(unchecked, path)


def compact(path: Path) -> list[Path]:
    """Remove the data from a weights file that no program in its folder needs. Returns the programs that need some.

    The new file takes the place of the old one at once, and needs room beside it. Programs that have mapped the old one
    go on with it.

    Raises ValueError if the file is no data file, or no program needs any of the data, and ProgramError if a program
    cannot be read.
    """
    from .file_regions import keys_of_program, read_data_file

    data, needed, programs = read_data_file(path), set[str](), []
    for file in sorted(path.parent.iterdir()):
        if file.is_file() and (keys := keys_of_program(file) & data.keys()):
            needed |= keys
            programs.append(file)
    if not needed:
        raise ValueError(f"{path}: expected a program in its folder that needs it")
    if needed != data.keys():
        _replace({key: region for key, region in data.items() if key in needed}, path)
    return programs


def _merge(old: Path, new: Path) -> bool:
    """Add the data of `old`, which may be missing, to the data file `new`.

    Returns False if `old` has all data of `new`. Then `new` is a link to `old` afterwards.
    """
    from .file_regions import read_data_file

    before, added = read_data_file(old) if old.exists() else {}, read_data_file(new)
    if added.keys() <= before.keys():
        new.unlink()
        new.symlink_to(old.resolve())
        return False
    _replace(before | added, new)
    return True


def _replace(regions: Mapping[str, FileBackedData], path: Path) -> None:
    """Write a data file with `regions`, by key, which may be those of the file that it replaces."""
    from executorch.exir._serialize.data_serializer import DataEntry, DataPayload
    from executorch.extension.flat_tensor.serialize.serialize import FlatTensorConfig, FlatTensorSerializer

    unique = list({id(region): region for region in regions.values()}.values())  # several keys may have equal data
    numbers = {id(region): i for i, region in enumerate(unique)}
    entries = {key: DataEntry(numbers[id(region)], _PAGE, None) for key, region in regions.items()}
    new = path.with_suffix(".new")
    try:
        with open(new, "wb") as file:
            serializer = FlatTensorSerializer(FlatTensorConfig(_PAGE))
            serializer.serialize(DataPayload(unique, entries)).write_to_file(file)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
