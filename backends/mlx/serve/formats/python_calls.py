"""Calls in the syntax of Python: `[get_weather(city="Oslo"), now()]`. Only literals are read, nothing is executed."""

from __future__ import annotations

import ast
import re

from .reader import NAME, CallReader, Reading, json_text

_CLOSING = {"[": "]", "(": ")"}
_LINE = re.compile(r"[^\n]*")
_NO_MARK = re.compile(r"""[^"'\[\](){},#]*""")  # text before the next mark: a quote, bracket, comma or comment
_NO_QUOTE = re.compile(r"""[^"'\\\n]*""")  # text before the next quote, backslash or line feed


def read_several(reader: CallReader) -> Reading[None]:
    """Read a call, or a list or tuple of calls."""
    bracket = yield from _peek(reader)
    closing = _CLOSING.get(bracket, "")
    if closing:
        yield from reader.expect(bracket)
    while True:
        yield from _peek(reader)
        yield from _read(reader)
        if (yield from _peek(reader)) != ",":
            break
        yield from reader.expect(",")
        if (yield from _peek(reader)) in (closing, ""):  # a comma after the last call
            break
    yield from reader.expect(closing)
    yield from _peek(reader)


def _peek(reader: CallReader) -> Reading[str]:
    """Skip space and comments. Return the next character, or "" at the end."""
    while (yield from reader.peek()) == "#":
        yield from reader.take_while(_LINE)
    return reader.next_char


def _read(reader: CallReader) -> Reading[None]:
    name = yield from reader.take_while(NAME)
    yield from reader.expect("(")
    # print(call()) occurs in the examples of Gemma.
    if name == "print" and (yield from _is_call_next(reader)):
        yield from _read(reader)
        yield from reader.expect(")")
        return
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"got {name}, expected the name of a function")
    reader.begin(name)
    before = "{"
    while (yield from _peek(reader)) != ")":
        reader.write(before + _member((yield from _argument(reader))))
        reader.send()
        before = ", "
        if reader.next_char == ",":
            yield from reader.expect(",")
    yield from reader.expect(")")
    reader.write("" if before == ", " else "{")
    reader.end()


def _is_call_next(reader: CallReader) -> Reading[bool]:
    yield from _peek(reader)
    begin = reader.position
    name = yield from reader.take_while(NAME)
    following = yield from reader.peek()
    reader.position = begin
    return bool(name) and following == "("


def _argument(reader: CallReader) -> Reading[str]:
    """Take the text of an argument, up to the comma or bracket after it."""
    begin, depth = reader.position, 0
    while True:
        yield from reader.take_while(_NO_MARK)
        mark = reader.next_char
        if mark in ('"', "'"):
            yield from _string(reader)
        elif mark == "#":
            yield from reader.take_while(_LINE)
        elif not mark:
            raise ValueError(f"got {reader.since(begin)!r}, expected the end of an argument")
        elif depth == 0 and mark in ",)":
            return reader.since(begin)
        else:
            depth += (mark in "[({") - (mark in "])}")
            reader.position += 1


def _string(reader: CallReader) -> Reading[None]:
    """Take a string literal. Only one in triple quotes has line feeds."""
    quote, reader.in_string = reader.next_char, True
    if (yield from reader.take(quote * 3)):
        quote *= 3
    else:
        reader.position += 1
    while True:
        yield from reader.take_while(_NO_QUOTE)
        if reader.next_char == quote[0] and (yield from reader.take(quote)):
            break
        if reader.next_char == "\n" and len(quote) == 1:
            raise ValueError("got a line feed in a string")
        if reader.next_char == "\\":
            reader.position += 1
        if not reader.next_char:
            yield from reader.more("the end of a string")
        reader.position += 1
    reader.in_string = False


def _member(argument: str) -> str:
    """Return the member of a JSON object for `key=value`. Raises ValueError if the value is no literal."""
    try:
        call = ast.parse(f"f({argument})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or len(call.keywords) != 1 or call.keywords[0].arg is None:
            raise ValueError(f"got {argument!r}, expected an argument with a name")
        (keyword,) = call.keywords
        return f"{json_text(keyword.arg)}: {json_text(ast.literal_eval(keyword.value))}"
    except (SyntaxError, TypeError, MemoryError) as error:
        raise ValueError(f"expected an argument with a literal: {error}") from error
