"""Reads tool calls from text that arrives in pieces, and passes their arguments on while they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

CONTENT, CALL, ARGUMENTS, CALL_END = "content", "call", "arguments", "call_end"
# A part of an answer: its kind and its text. CALL has the name of a function, and ARGUMENTS a piece of JSON text.
Part = tuple[str, str]

T = TypeVar("T")
Reading = Generator[None, None, T]  # a generator that yields when it needs more text, and returns a T

SPACE = re.compile(r"\s*")
NAME = re.compile(r"[\w.-]*")


class CallReader:
    """Reads the calls of one section of an answer.

    - `functions`: the functions that the model may call: their names, and the JSON schemas of their arguments.
    - `read`: reads the section, in the syntax of a format. It takes text with the methods `peek`, `take` and so on, and
      passes calls on with `begin`, `write`, `send` and `end`. Raises ValueError if the text does not have this syntax,
      or if it calls another function.
    - `open`: the tag before the section.

    A call becomes the parts CALL, one or several ARGUMENTS, and CALL_END. They go out before the call is complete.

    If `read` raises ValueError, all text that did not go out becomes content: the whole section with its tags if no
    part went out. A call that went out in part has no CALL_END, and its arguments lack the closing brace. They are
    therefore not valid JSON, and no client takes the call for a complete one.

    Attributes: `is_ended`, whether all text of the section has arrived; `is_closed`, whether a closing tag ended it;
    `in_string`, whether the text so far ends within quotes, where a closing tag is a part of an argument;
    `has_failed`, whether `read` raised ValueError.
    """

    def __init__(self, functions: Mapping[str, Any], read: Callable[[CallReader], Reading[None]], open: str = ""):
        self._functions, self._open = functions, open
        self._text, self._sent = "", 0  # the section so far, and how much of it went out
        self.position = 0  # how much of it is read; may also be set back
        self._name: str | None = None  # of the call that has begun
        self._is_announced = False  # whether that name went out
        self._written = ""  # JSON text that did not go out
        self._parts: list[Part] = []
        self._count = 0  # of complete calls
        self.is_ended = self.is_closed = self.in_string = self.has_failed = False
        self._reading = self._read_all(read)

    def feed(self, text: str) -> list[Part]:
        """Return the parts that `text` completes."""
        if self.has_failed:
            return [(CONTENT, text)] if text else []
        self._text += text
        return self._advance()

    def finish(self, close: str) -> list[Part]:
        """Return the parts that were held back. `close`: the tag after the section, or "" if the answer ends in it."""
        self.is_ended, self.is_closed = True, bool(close)
        parts = [] if self.has_failed else self._advance()
        if self.has_failed and close:
            parts.append((CONTENT, close))
        return parts

    def _read_all(self, read: Callable[[CallReader], Reading[None]]) -> Reading[None]:
        yield from read(self)
        if (yield from self.peek()):
            raise ValueError(f"got {self._rest()} after the calls")
        if not self._count:
            raise ValueError("got no call")

    def _advance(self) -> list[Part]:
        try:
            next(self._reading, None)
        except (ValueError, RecursionError):
            self.has_failed, self.in_string = True, False
            if rest := (self._open if self._is_whole else "") + self._text[self._sent :]:
                self._parts.append((CONTENT, rest))
        parts, self._parts = self._parts, []
        return parts

    def _rest(self) -> str:
        return repr(self.ahead[:20])

    @property
    def holds_text(self) -> bool:
        """Whether text did not go out. It becomes content if the rest of the call is malformed."""
        return not self.has_failed and (self._sent < len(self._text) or self._is_whole and bool(self._open))

    @property
    def _is_whole(self) -> bool:
        """Whether no part of the section went out, not even its tag."""
        return not self._count and not self._is_announced

    # Taking text ----------------------------------------------------------------------------

    @property
    def next_char(self) -> str:
        """The next character, or "" if it has not arrived."""
        return self._text[self.position : self.position + 1]

    @property
    def ahead(self) -> str:
        """The text that has arrived and is not taken."""
        return self._text[self.position :]

    def since(self, position: int) -> str:
        """Return the text that was taken since `position`."""
        return self._text[position : self.position]

    def peek(self) -> Reading[str]:
        """Skip space. Return the next character, or "" at the end of the section."""
        yield from self.take_while(SPACE)
        return self.next_char

    def take(self, literal: str) -> Reading[bool]:
        """Skip space. Take `literal`, and return whether it is there."""
        yield from self.take_while(SPACE)
        while not self.is_ended and self._is_beginning(literal):
            yield
        if not self._text.startswith(literal, self.position):
            return False
        self.position += len(literal)
        return True

    def _is_beginning(self, literal: str) -> bool:
        """Whether the rest of the text is a beginning of `literal`, and not all of it."""
        length = len(self._text) - self.position
        return length < len(literal) and self._text.endswith(literal[:length])

    def expect(self, literal: str) -> Reading[None]:
        """Skip space. Take `literal`. Raises ValueError if it is not there."""
        if not (yield from self.take(literal)):
            raise ValueError(f"got {self._rest()}, expected {literal!r}")

    def take_while(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Take the longest text that `pattern` matches, and return it. The pattern is a repeated character class."""
        begin = self.position
        while True:
            self.position = pattern.match(self._text, self.position).end()
            if self.next_char or self.is_ended:
                return self.since(begin)
            yield

    def take_until(self, tag: str) -> Reading[str]:
        """Take the text before `tag` and return it. Takes the tag, too. Raises ValueError if there is no tag."""
        begin = seen = self.position
        while (end := self._text.find(tag, max(begin, seen - len(tag)))) < 0:
            seen = len(self._text)
            yield from self.more(tag)
        self.position = end + len(tag)
        return self._text[begin:end]

    def more(self, expected: str) -> Reading[None]:
        """Wait for more text. Raises ValueError at the end of the section."""
        if self.is_ended:
            raise ValueError(f"got the end of the section, expected {expected}")
        yield

    def follows(self, literal: str, characters: str) -> Reading[bool]:
        """Return whether `literal`, perhaps some space and one of `characters` follow. Takes nothing but space."""
        yield from self.take_while(SPACE)
        begin = self.position
        found = (yield from self.peek()) if (yield from self.take(literal)) else ""
        self.position = begin
        return bool(found) and found in characters

    # JSON -----------------------------------------------------------------------------------

    def json_value(self, sends: bool = False) -> Reading[str]:
        """Skip space. Take a JSON value and return its text. Raises ValueError if it is not valid.

        - `sends`: pass the value, an object, on as it comes. Its closing brace remains for `end`.
        """
        if (yield from self.peek()) in ('"', "{", "["):
            return (yield from self._bracketed(sends))
        word = yield from self.take_while(_WORD)
        parse_json(word)
        return word

    def _bracketed(self, sends: bool) -> Reading[str]:
        """Take a JSON string, array or object."""
        begin = written = scanned = self.position
        depth = 0

        def pass_on(end: int) -> None:
            nonlocal written
            self.position = end
            if sends:
                self.write(self._text[written:end])
                written = end
                self.send()

        while depth or self.in_string or scanned == begin:
            if found := _JSON_MARK.search(self._text, scanned):
                scanned = found.end()
                if found[0] == "\\":
                    scanned += 1  # perhaps beyond the text so far
                elif found[0] == '"':
                    self.in_string = not self.in_string
                elif self.in_string and found[0] == "\n":
                    pass_on(found.start())
                    raise ValueError("got a line feed in a string of JSON")
                elif not self.in_string and found[0] != "\n":
                    depth += 1 if found[0] in "{[" else -1
                continue
            scanned = max(scanned, len(self._text))
            pass_on(len(self._text))
            yield from self.more("the end of a JSON value")
        if sends:
            pass_on(scanned - 1)
        parse_json(self._text[begin:scanned])
        self.position = scanned
        return self.since(begin)

    # Passing calls on -----------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._name is not None

    def is_text(self, argument: str) -> bool:
        """Whether an argument of the call is a string, by the schema of the function."""
        schema = self._functions.get(self._name) or {}
        properties = schema.get("properties")
        property = properties.get(argument) if isinstance(properties, dict) else None
        return isinstance(property, dict) and property.get("type") == "string"

    def begin(self, name: Any) -> None:
        """Begin a call. Raises ValueError if `name` is not the name of one of the functions."""
        if self._name is not None:
            raise ValueError("got two names or arguments in a call")
        if not isinstance(name, str) or name not in self._functions:
            raise ValueError(f"got the function name {name!r}, expected one of {list(self._functions)}")
        self._name = name

    def write(self, text: str) -> None:
        """Add JSON text to the arguments of the call. The closing brace comes from `end`."""
        self._written += text

    def send(self) -> None:
        """Pass on what is written, and the name of the call before it."""
        if not self._is_announced:
            self._parts.append((CALL, self._name))
            self._is_announced = True
        if self._written:
            self._parts.append((ARGUMENTS, self._written))
        self._written, self._sent = "", self.position

    def end(self) -> None:
        """End the call, with the closing brace of its arguments."""
        self._written += "}"
        self.send()
        self._parts.append((CALL_END, ""))
        self._name, self._is_announced = None, False
        self._count += 1

    def send_string_until(self, tags: Sequence[str]) -> Reading[None]:
        """Take text up to the first of `tags`, and the tag. Pass the text on as it comes, within a JSON string."""
        while True:
            found = [(at, tag) for tag in tags if (at := self._text.find(tag, self.position)) >= 0]
            end, tag = min(found) if found else (len(self._text), "")
            if not found:
                end -= max(overlap(self.ahead, tag) for tag in tags)
            self.write(json_text(self._text[self.position : end])[1:-1])
            self.position = end
            self.send()
            self.position += len(tag)
            if found:
                return
            yield from self.more(tags[0])


_WORD = re.compile(r"[^\s,:\]}]*")
_JSON_MARK = re.compile(r'["\\{}\[\]\n]')


def json_text(value: Any) -> str:
    """Return a value as JSON text. Raises ValueError if JSON has no such value."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise ValueError(str(error)) from error
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON has only as an escape
        return json.dumps(value)
    return text


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is not valid."""

    def refuse(constant: str) -> None:  # NaN and Infinity, which Python reads
        raise ValueError(f"got {constant}, which is no JSON")

    return json.loads(text, parse_constant=refuse)


def json_or_text(text: str) -> str:
    """Return `text` if it is JSON, and otherwise the JSON string with it."""
    try:
        parse_json(text)
    except ValueError:
        return json_text(text)
    return text.strip()


def overlap(text: str, tag: str) -> int:
    """The length of the longest end of `text` that is a beginning of `tag`, and not all of it."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
