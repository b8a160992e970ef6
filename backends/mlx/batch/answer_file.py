"""`AnswerFile`: a file with the answers of a batch. It stays usable if the process is killed at any moment."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from .request_file import request_number


class AnswerFile:
    """A JSON Lines file with the answers of a batch, in OpenAI's format, opened for appending.

    Each answer is one line. If the process is killed while it writes a line, the end of that line is missing. Opening
    the file again then drops the line, and its request counts as not answered.

    Attributes: `answered` maps the number of a request to the id of its answer.

    Raises BlockingIOError if another process writes the file, ValueError if a line is not an answer of a batch, and
    OSError if the file cannot be opened.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end = self._end_of_complete_lines()
            self.answered: dict[int, str] = {
                request_number(answer["id"]): answer["id"] for _, answer in read_answers(path, end)
            }
            os.ftruncate(self._file, end)  # now that all lines are known to be answers
        except BaseException:
            os.close(self._file)
            raise

    def _end_of_complete_lines(self) -> int:
        """Return the size of the file without an incomplete last line.

        Raises ValueError if the file has no complete line and does not begin like an answer.
        """
        size, block = os.fstat(self._file).st_size, 2**16
        end = size
        while end > 0:
            start = max(0, end - block)
            found = os.pread(self._file, end - start, start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        beginning = b'{"id": "'
        if end == 0 < size and os.pread(self._file, len(beginning), 0) != beginning[:size]:
            raise ValueError(f"{self.path}: line 1 is not an answer of a batch; choose another file for the answers")
        return end

    def write(self, answer: dict[str, Any]) -> None:
        """Append an answer. Raises OSError if that fails, for instance because the disk is full."""
        line = memoryview(json.dumps(answer).encode() + b"\n")
        while line:
            line = line[os.write(self._file, line) :]
        self.answered[request_number(answer["id"])] = answer["id"]

    def close(self) -> None:
        """Write the file to the disk and close it."""
        os.fsync(self._file)
        os.close(self._file)

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_answers(path: Path, end: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the offset in bytes and the contents of each answer, of the first `end` bytes or of the whole file.

    Raises ValueError for a line that is no answer.
    """
    with open(path, "rb") as file:
        offset = 0
        for number, line in enumerate(file, 1):
            if offset == end:
                return
            yield offset, _parse(path, number, line)
            offset += len(line)


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(line)
        _check_answer(answer)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: line {number} is not an answer of a batch; choose another file for the answers"
        ) from error
    return answer


def _check_answer(value: Any) -> None:
    """Raise ValueError unless `value` has the fields of an answer."""
    match value:
        case {"id": str(id), "error": None, "response": {"status_code": int(), "body": dict()}}:
            request_number(id)
        case {"id": str(id), "error": {"message": str()}}:
            request_number(id)
        case _:
            raise ValueError("got other fields than those of an answer")
