"""Files that clients send: the parts of a form, and the files of `/v1/files`."""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import Request

from .errors import ApiError, field_error


@dataclass(frozen=True)
class Part:
    """A field of a form. `filename` is None unless it is a file."""

    data: bytes
    filename: str | None = None


class Form:
    """The fields of a form, each with its parts in order. Raises ApiError for a body in another format."""

    def __init__(self, content_type: str, body: bytes):
        boundary = re.search(r'^multipart/form-data\b.*\bboundary=(?:"([^"]+)"|([^\s;]+))', content_type, re.IGNORECASE)
        if boundary is None:
            raise ApiError(f"Content-Type: got {content_type[:40]!r}, expected multipart/form-data")
        delimiter = b"\r\n--" + (boundary[1] or boundary[2]).encode()
        self._parts: dict[str, list[Part]] = {}
        for piece in (b"\r\n" + body).split(delimiter)[1:]:
            if piece.startswith(b"--"):
                return
            head, separator, data = piece.partition(b"\r\n\r\n")
            name = re.search(rb'[;\s]name="([^"]*)"', head)
            if not separator or name is None:
                raise ApiError("the form has a part without a name")
            filename = re.search(rb'[;\s]filename="([^"]*)"', head)
            part = Part(data, None if filename is None else filename[1].decode(errors="replace"))
            self._parts.setdefault(name[1].decode(errors="replace"), []).append(part)
        raise ApiError("the form is cut off")

    @classmethod
    async def of(cls, request: Request) -> Form:
        return cls(request.headers.get("content-type", ""), await request.body())

    def file(self, name: str) -> Part:
        """Return a file. Raises ApiError if the form has none with this name."""
        part = self._parts.get(name, [Part(b"")])[0]
        if part.filename is None:
            raise field_error(name, "Field required, expected a file")
        return part

    def texts(self, name: str) -> list[str]:
        """Return the values of a field that is no file. A list has the name with or without brackets."""
        parts = self._parts.get(name, []) + self._parts.get(f"{name}[]", [])
        return [part.data.decode(errors="replace") for part in parts]

    def text(self, name: str, default: str = "") -> str:
        return (self.texts(name) or [default])[0]

    def names(self) -> set[str]:
        """The names of the fields, without the brackets of lists."""
        return {name.removesuffix("[]") for name in self._parts}


@dataclass
class StoredFile:
    """A file of `/v1/files`. `object` is its description in OpenAI's API."""

    path: Path
    object: dict[str, Any]


class Files:
    """The files of `/v1/files`, in a folder. The description of the file `ID` is in `ID.json`.

    - `folder`: lasts longer than this object, which also has the files of earlier ones. By default, a temporary folder,
      which does not.
    - `limit`: the largest size of all files together, in bytes.

    Raises OSError if the folder cannot be made, or if another server uses it.
    """

    def __init__(self, limit: int, folder: Path | None = None):
        self._limit, self._folder, self._files = limit, folder, dict[str, StoredFile]()
        self._temporary: tempfile.TemporaryDirectory | None = None
        self._lock: int | None = None
        if folder is not None:
            folder.mkdir(0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(self._lock)
                raise OSError(error.errno, f"another server uses the folder {folder}") from error
            self._files = {
                object["id"]: StoredFile(folder / object["id"], object) for object in self.kept("file-*.json")
            }

    def _made_folder(self) -> Path:
        """Return the folder. Makes a temporary one at the first call if none is given."""
        if self._folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="executorch-mlx-files-")
            self._folder = Path(self._temporary.name)
        return self._folder

    def kept(self, names: str) -> list[dict[str, Any]]:
        """Return the objects that `keep` has written, the oldest first. `names`: a pattern of the names of files."""
        paths = [] if self._folder is None else self._folder.glob(names)
        return sorted((json.loads(path.read_bytes()) for path in paths), key=lambda object: object["created_at"])

    def keep(self, object: Mapping[str, Any]) -> None:
        """Write an object, so that it survives a restart. The file always has the whole object."""
        path = self._made_folder() / f"{object['id']}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(object))
        partial.replace(path)

    def add(self, filename: str, purpose: str, data: bytes = b"") -> StoredFile:
        """Write a file. Raises ApiError if there is no room for it."""
        used = sum(file.path.stat().st_size for file in self._files.values())
        if used + len(data) > self._limit:
            raise field_error("file", f"got {len(data)} bytes, expected at most {self._limit - used}", status=413)
        id = f"file-{uuid.uuid4().hex}"
        object = {"id": id, "object": "file", "created_at": int(time.time()), "filename": filename}
        file = StoredFile(self._made_folder() / id, object | {"purpose": purpose, "status": "processed"})
        file.path.write_bytes(data)
        self.keep(file.object)
        self._files[id] = file
        return file

    def named(self, filename: str, purpose: str) -> StoredFile:
        """Return the file with this name, which is made if there is none."""
        found = (file for file in self._files.values() if file.object["filename"] == filename)
        return next(found, None) or self.add(filename, purpose)

    def get(self, id: str, param: str | None = None) -> StoredFile:
        """Return a file. Raises ApiError if there is none."""
        if id not in self._files:
            raise ApiError(f"there is no file {id[:100]!r}", status=404, param=param)
        return self._files[id]

    def remove(self, id: str) -> None:
        """Delete a file. Raises ApiError if there is none."""
        file = self.get(id)
        file.path.with_suffix(".json").unlink()
        file.path.unlink()
        del self._files[id]

    def describe(self, id: str) -> dict[str, Any]:
        """Return the object of a file. Raises ApiError if there is none."""
        file = self.get(id)
        return file.object | {"bytes": file.path.stat().st_size}

    def describe_all(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the list of all files, or of those with the `purpose` of the query."""
        data = [self.describe(id) for id in self._files]
        data = [object for object in data if query.get("purpose") in (None, object["purpose"])]
        return {"object": "list", "data": data, "has_more": False}

    def close(self) -> None:
        """Delete the files if the folder is temporary."""
        if self._lock is not None:
            os.close(self._lock)
        if self._temporary is not None:
            self._temporary.cleanup()
        self._files.clear()
