"""`RequestLines`: the requests of a file in OpenAI's batch format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_LINE = 64 * 2**20  # bytes; a longer line is an error, so that no file exhausts the memory
KNOWN_FIELDS = {"custom_id", "method", "url", "body"}


class LineError(ValueError):
    """Raised for a line that is not a request. `code` identifies the error for programs."""

    def __init__(self, message: str, code: str = "invalid_request"):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Request:
    """A request of a batch.

    - `id`: the number of the request in its file, from 1, and a digest of its contents. The answer has the same id. A
      second run compares the ids to find the requests that are answered already.
    - `custom_id`: the id that the file gives the request, or None if the line has none.
    - `url`: the path of the endpoint.
    - `body`: the JSON body of the request.
    - `error`: why the line is not a request, or None if it is one.
    """

    id: str
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    error: LineError | None = None


def request_id(number: int, content: bytes) -> str:
    """Return the id of a request: `batch_req_`, the number from 1, and 16 hexadecimal digits."""
    return f"batch_req_{number}_{hashlib.blake2b(content, digest_size=8).hexdigest()}"


def request_number(id: str) -> int:
    """Return the number of the request in its file. Raises ValueError if `id` is not the id of a request."""
    prefix, number, digest = id.rsplit("_", 2)
    if prefix != "batch_req" or len(digest) != 16:
        raise ValueError(f"id: got {id!r}, expected an id of a request")
    return int(number)


class RequestLines:
    """The requests of a JSON Lines file in OpenAI's batch format: `custom_id`, `method`, `url` and `body`.

    Blank lines are skipped. Every other line gives a `Request`, whose `error` is set if the line is not valid.
    """

    def __init__(self, path: Path):
        self.path = path

    def ids(self) -> Iterator[str]:
        """Yield the ids of the requests, without parsing them. Raises OSError if the file cannot be read."""
        return (request_id(number, line) for number, line in self._lines())

    def __iter__(self) -> Iterator[Request]:
        seen: set[str] = set()
        for number, line in self._lines():
            id, custom_id = request_id(number, line), None
            try:
                fields = _parse(line)
                if isinstance(fields.get("custom_id"), str):
                    custom_id = fields["custom_id"]
                url, body = _checked_url_and_body(fields, seen)
            except LineError as error:
                yield Request(id, custom_id, error=error)
                continue
            seen.add(fields["custom_id"])
            yield Request(id, custom_id, url, body)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with open(self.path, "rb") as file:
            number = 0
            while line := file.readline(MAX_LINE + 1):
                number += 1
                end = line
                while len(line) > MAX_LINE and end and not end.endswith(b"\n"):  # skips the rest of the line
                    end = file.readline(MAX_LINE)
                if line := line.strip():
                    yield number, line


def _parse(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE:
        raise LineError(f"the line is longer than {MAX_LINE} bytes", "line_too_long")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LineError(f"the line is not valid JSON: {error}", "invalid_json") from error
    if not isinstance(fields, dict):
        raise LineError("the line is not a JSON object", "invalid_json")
    return fields


def _checked_url_and_body(fields: dict[str, Any], seen: set[str]) -> tuple[str, bytes]:
    """Return the URL and the body of the request in a line. Raises LineError if the line is not a request."""
    custom_id, method, url, body = (fields.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError(f"custom_id: got {_shortened_json(custom_id)}, expected a string")
    if custom_id in seen:
        raise LineError(f"custom_id: {_shortened_json(custom_id)} occurs in an earlier line", "duplicate_custom_id")
    if method != "POST":
        raise LineError(f'method: got {_shortened_json(method)}, expected "POST"')
    if not isinstance(url, str) or not url.startswith("/v1/") or not url.isascii():
        raise LineError(f"url: got {_shortened_json(url)}, expected a path such as /v1/chat/completions")
    if not isinstance(body, dict):
        raise LineError(f"body: got {_shortened_json(body)}, expected a JSON object")
    if body.get("stream"):
        raise LineError(f"body.stream: got {_shortened_json(body['stream'])}, expected false in a batch")
    if unknown := sorted(fields.keys() - KNOWN_FIELDS):
        raise LineError(f"{unknown[0]}: unknown field")
    return url, json.dumps(body).encode()


def _shortened_json(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
