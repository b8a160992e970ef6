"""Reads the JSON text of a request, and refuses values that the server could not handle later.

Python's reader accepts NaN, which JSON does not have. It also returns values that fail much later: a lone surrogate
cannot be encoded as UTF-8, and an integer may have any number of digits.
"""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

from .errors import ApiError

MAX_DEPTH = 100  # of nested arrays and objects
TOO_DEEP = f"nested too deeply: expected at most {MAX_DEPTH} levels"
MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1  # a seed may be signed or unsigned


def parse(body: bytes) -> Any:
    """Return the value of a JSON text in UTF-8. Raises ApiError, which names the field, for anything else.

    The text may begin with a byte order mark, as in files that Windows PowerShell writes.
    """
    try:
        value = json.loads(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ApiError(f"the request body is not valid JSON: byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ApiError(f"the request body is not valid JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise ApiError(f"the request body is {TOO_DEEP}") from error
    except ValueError as error:  # int() refuses a number with thousands of digits
        raise ApiError(f"the request body is not valid JSON: {error}") from error
    check(value)
    return value


def check(value: Any) -> None:
    """Raise ApiError for a lone surrogate, a number that is not finite or has more than 64 bits, or deep nesting."""
    if (problem := _problem(value)) is not None:
        raise _error((), problem)
    waiting: list[tuple[tuple, Any]] = [((), value)]
    while waiting:  # only arrays and objects, as there may be very many other values
        path, value = waiting.pop()
        if not isinstance(value, (dict, list)):
            continue
        if value and len(path) >= MAX_DEPTH:
            raise _error(path[:3], TOO_DEEP)
        if isinstance(value, dict) and (problem := next(filter(None, map(_problem, value)), None)):
            raise _error(path, problem)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, (dict, list)):
                waiting.append(((*path, key), item))
            elif (problem := _problem(item)) is not None:
                raise _error((*path, key), problem)


def _problem(value: Any) -> str | None:
    """Return what is wrong with a value that is no array and no object, or None."""
    if isinstance(value, int):
        return None if MIN_INTEGER <= value <= MAX_INTEGER else "expected an integer of 64 bits"
    if isinstance(value, float):
        return None if value - value == 0 else "expected a finite number"
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            return f"character {error.start} is a lone surrogate, expected Unicode text"
    return None


def depth(value: Any) -> int:
    """Return the number of nested arrays and objects around the innermost value."""
    level, count = [value], -1
    while level:
        count += 1
        parts = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, (dict, list)))
        level = [*chain.from_iterable(parts)]
    return count


def _error(path: tuple, message: str) -> ApiError:
    return ApiError(message, param=".".join(map(str, path)) or None)
