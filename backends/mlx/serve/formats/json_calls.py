"""Calls in JSON: `{"name": "get_weather", "arguments": {"city": "Oslo"}}`, and arguments in JSON."""

from __future__ import annotations

from .reader import CallReader, Reading, parse_json

SYNONYMS = {"tool_name": "name", "parameters": "arguments"}
CALL_KEYS = {"name", "function", "type", "id", "arguments"}


def read_several(reader: CallReader) -> Reading[None]:
    """Read a call, or a list of calls."""
    if not (yield from reader.take("[")):
        yield from read(reader)
        return
    yield from read(reader)
    while (yield from reader.take(",")):
        yield from read(reader)
    yield from reader.expect("]")


def read(reader: CallReader, is_bare: bool = False) -> Reading[None]:
    """Read a call: `name` and `arguments`, or a member `function` that contains both. Ignores all other members.

    With `is_bare`, no tag distinguishes a call from an answer in JSON. A call then has arguments, and no other members.
    """
    yield from _members(reader, is_bare)
    reader.end()


def _members(reader: CallReader, is_bare: bool) -> Reading[None]:
    given: dict[str, str] = {}  # the JSON text of members
    yield from reader.expect("{")
    if not (yield from reader.take("}")):
        yield from _member(reader, given, is_bare)
        while (yield from reader.take(",")):
            yield from _member(reader, given, is_bare)
        yield from reader.expect("}")
    if not reader.has_begun:
        if is_bare and "arguments" not in given:
            raise ValueError("got no arguments, expected an object")
        reader.begin(parse_json(given.get("name", "null")))
        _write_arguments(reader, given.get("arguments", "{}"))


def _member(reader: CallReader, given: dict[str, str], is_bare: bool) -> Reading[None]:
    key = parse_json((yield from reader.json_value()))
    if not isinstance(key, str):
        raise ValueError(f"got the key {key!r}, expected a string")
    key = SYNONYMS.get(key, key)
    if is_bare and key not in CALL_KEYS:
        raise ValueError(f"got the key {key!r}, expected a member of a call")
    yield from reader.expect(":")
    if key == "function" and (yield from reader.peek()) == "{":
        yield from _members(reader, is_bare)
    elif key == "arguments" and (reader.has_begun or "name" in given and "arguments" not in given):
        yield from read_arguments(reader, parse_json(given.get("name", "null")))
    else:
        given[key] = yield from reader.json_value()
        if key == "name" and reader.has_begun:
            raise ValueError("got the name of the function twice")


def read_arguments(reader: CallReader, name: object) -> Reading[None]:
    """Begin the call of `name`, and read its arguments: a JSON object, or a string with one. Does not end the call."""
    reader.begin(name)
    if (yield from reader.follows("{", '"}')):
        yield from reader.json_value(sends=True)
    else:
        _write_arguments(reader, (yield from reader.json_value()))


def _write_arguments(reader: CallReader, text: str) -> None:
    arguments = parse_json(text)
    if isinstance(arguments, str):
        text = arguments.strip() or "{}"
        arguments = parse_json(text)
    if not isinstance(arguments, dict):
        raise ValueError(f"got {type(arguments).__name__} as arguments, expected an object")
    text.encode()  # a lone surrogate is a ValueError
    reader.write(text[:-1])
