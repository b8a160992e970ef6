"""The store of exported programs. A checkpoint is exported once for a version and a set of options, and then only run.

    ~/.cache/executorch-mlx/     or $XDG_CACHE_HOME/executorch-mlx/
        programs/NAME-KEY.pte    a program. KEY is a hash of the checkpoint's contents, the options and the version
        exports/DIGEST.json      a model and options as a user gave them, the files that were read, and the program
        locks/NAME-KEY           held by the process that exports this program

A file of a checkpoint is read for the hash only if its size or its time of modification has changed. Files get their
names when they are complete, so that a process that is killed leaves nothing that a later one would take for whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..llm import hub

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Export:
    """A model that was exported.

    - `model`: the hub id, or the absolute path of a folder or GGUF file.
    - `options`: those of the export, name → value.
    - `program`: the name of the file in `programs`.
    - `files`: the files that the export read: path → (size, time of modification in ns, SHA-256).
    """

    model: str
    options: dict[str, Any]
    version: str
    program: str
    files: dict[str, tuple[int, int, str]]

    @property
    def path(self) -> Path:
        return folder("programs") / self.program

    @property
    def is_of_hub(self) -> bool:
        return not os.path.isabs(self.model)

    def is_current(self) -> bool:
        """Whether the program exists, and was made of the files as they are now.

        The local copy of a hub id may be gone: the program does not need it.
        """
        if not self.path.is_file():
            return False
        stats = {path: _stat(path) for path in self.files}
        if self.is_of_hub and not any(stats.values()):
            return True
        return all(stats[path] == (size, time) for path, (size, time, _) in self.files.items())


def folder(name: str) -> Path:
    """Return the path of a folder of the store. It may not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "executorch-mlx" / name


def name_of(model: str) -> str:
    """Return the name of a model for people: a hub id as it is, else the last part of the path without its suffix."""
    path = Path(model)
    if path.exists():
        path = path.resolve()
        return path.name if path.is_dir() else path.stem
    return model


def full_name(model: str) -> str:
    """Return the name of a model in the store: its absolute path, or the hub id."""
    return str(Path(model).resolve()) if Path(model).exists() else model


def find(model: str, options: Mapping[str, Any]) -> Export | None:
    """Return the export of `model` with these options if its program is current, else None. Reads no weights."""
    known = _read(_record(full_name(model), options))
    return known if known is not None and known.is_current() else None


def export(
    model: str,
    options: Mapping[str, Any],
    sources: Sequence[Path],
    run: Callable[[Path, Path, int], None],
    note: Callable[[str], None],
) -> Export:
    """Return the export of `model`, whose program is made now unless the store has it.

    - `sources`: files and folders that the options name.
    - `run`: makes a program from a checkpoint: `run(checkpoint, program, lock)`. The open file `lock` is locked.
    - `note`: called with lines for the user.

    Raises HubError if the hub does not provide the model, OSError, and what `run` raises.
    """
    own_name = full_name(model)
    checkpoint = Path(own_name) if os.path.isabs(own_name) else hub.download(model)
    record = _record(own_name, options)
    earlier = _read(record)
    files = _hashes([checkpoint, *sources], earlier)
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in name_of(model))
    made = Export(own_name, dict(options), _version(), f"{name}-{_key(files, options)}.pte", files)
    made.path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(made.path.stem, note) as lock:
        if not made.path.is_file():
            for leftover in made.path.parent.glob(f".{made.program}.*"):  # of a process that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            run(checkpoint, made.path, lock)
    _write(record, made)
    if earlier is not None and earlier.program not in {export.program for export in exports()}:
        earlier.path.unlink(missing_ok=True)  # that of earlier contents
    return made


def exports() -> list[Export]:
    """Return all exports whose programs exist, by model."""
    found = filter(None, map(_read, folder("exports").glob("*.json")))
    return sorted(
        (export for export in found if export.path.is_file()),
        key=lambda export: (export.model, len(export.options), str(export.options)),
    )


def remove(removed: Sequence[Export]) -> int:
    """Remove exports, and the programs that no other export has. Returns the number of freed bytes."""
    for export in removed:
        _record(export.model, export.options, export.version).unlink(missing_ok=True)
    kept = {export.program for export in exports()}
    programs = {export.path for export in removed if export.program not in kept}
    size = sum(path.stat().st_size for path in programs)
    for path in programs:
        path.unlink()
    return size


# Files ---------------------------------------------------------------------------------


def _version() -> str:
    try:
        return importlib.metadata.version("executorch-mlx")
    except importlib.metadata.PackageNotFoundError:  # the package runs from its sources
        return ""


def _record(model: str, options: Mapping[str, Any], version: str | None = None) -> Path:
    """Return the path of the file about an export."""
    text = json.dumps([model, options, _version() if version is None else version], sort_keys=True)
    return folder("exports") / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def _read(record: Path) -> Export | None:
    try:
        fields = json.loads(record.read_text(encoding="utf-8"))
        fields["files"] = {path: (size, time, content) for path, (size, time, content) in fields["files"].items()}
        return Export(**fields)
    except (OSError, ValueError, TypeError, LookupError, AttributeError):  # missing, or written by another version
        return None


def _write(record: Path, export: Export) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=record.parent, prefix=".", delete=False) as file:
        json.dump(asdict(export), file)
    os.replace(file.name, record)


def _stat(path: str | Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _hashes(sources: Sequence[Path], known: Export | None) -> dict[str, tuple[int, int, str]]:
    """Return the size, the time of modification and the hash of each file below `sources`, by path."""
    hashes = {}
    for path in (file for source in sources for file in hub.checkpoint_files(source)):
        status = os.stat(path)
        size, time, content = known.files.get(str(path), (0, 0, "")) if known is not None else (0, 0, "")
        if not content or (size, time) != (status.st_size, status.st_mtime_ns):
            content = _hash(path)
        hashes[str(path)] = (status.st_size, status.st_mtime_ns, content)
    return hashes


def _hash(path: Path) -> str:
    content = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            content.update(block)
    return content.hexdigest()


def _key(files: Mapping[str, tuple[int, int, str]], options: Mapping[str, Any]) -> str:
    """Return a hash of the names and contents of the files, the options and the version."""
    contents = [[os.path.basename(path), content] for path, (_, _, content) in files.items()]
    text = json.dumps([contents, options, _version()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def _locked(name: str, note: Callable[[str], None]) -> Iterator[int]:
    """A context manager that one process at a time enters with this name. Yields the locked file."""
    path = folder("locks") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note("another process exports this model: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()
