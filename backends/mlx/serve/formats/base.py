"""What all formats share: the parts of an answer, and a parser of tagged sections."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .reader import CONTENT, CallReader, Part, Reading, overlap

REASONING, CALLS = "reasoning", "calls"  # kinds of sections, besides CONTENT


@dataclass(frozen=True)
class Section:
    """A section of an answer between two tags. It may also end with the answer, as it does if `close` is empty."""

    open: str
    close: str
    kind: str


class Parser:
    """Splits the text of an answer, which comes in pieces, into parts. This base class takes all text as content."""

    def feed(self, text: str) -> list[Part]:
        """Return the parts that `text` completes."""
        return [(CONTENT, text)] if text else []

    def end(self) -> list[Part]:
        """Return the parts that were held back. Called once, when the answer has ended."""
        return []

    @property
    def kind(self) -> str:
        """The kind of part to which the next text belongs."""
        return CONTENT

    @property
    def holds_text(self) -> bool:
        """Whether text is held back that may become content."""
        return False


class SectionParser(Parser):
    """Finds sections by their tags. Text that may be the beginning of a tag is held back.

    Reasoning comes before the content. A tag of reasoning within the content is text, as in an answer about the tag.

    - `sections`: the kinds of sections.
    - `call_reader`: returns the reader of a section with calls.
    - `is_bare`: tells from the beginning of the content whether the rest of the answer may be calls without a tag. It
      returns None if it needs more text.
    - `inside`: the section in which the answer begins, because the prompt opened it.
    - `has_begun`: whether the prompt has text of this section.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        call_reader: Callable[[Section], CallReader],
        is_bare: Callable[[str], bool | None] | None = None,
        inside: Section | None = None,
        has_begun: bool = False,
    ):
        self._sections, self._call_reader, self._is_bare = sections, call_reader, is_bare
        self._inside = inside  # the open section
        self._calls: CallReader | None = None  # its reader, if it has calls
        self._buffer = ""
        self._has_content = False  # besides space
        self._drops_space = inside is not None and not has_begun  # space around the text of a section is dropped

    @property
    def kind(self) -> str:
        return CONTENT if self._inside is None else self._inside.kind

    @property
    def holds_text(self) -> bool:
        return bool(self._buffer) or self.kind == CALLS and self._calls.holds_text

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def end(self) -> list[Part]:
        parts, section, text = self.feed(""), self._inside, self._buffer
        self._buffer, self._inside = "", None
        if section is None:
            self._add_content(parts, text)
        elif section.kind == CALLS:
            parts += self._calls.feed(text) + self._calls.finish("")
        elif text:
            parts.append((section.kind, text))
        return parts

    def _step(self, parts: list[Part]) -> bool:
        """Take the next part from the buffer. Return whether there may be more."""
        if self._inside is not None:
            step = self._step_calls if self._inside.kind == CALLS else self._step_text
            return step(parts, self._inside)
        if self._is_bare is not None:
            bare = self._is_bare(self._buffer)
            if bare is None and not self._next_open():
                return False
            self._is_bare = None
            if bare:
                self._enter(Section("", "", CALLS))
                return True
        if found := self._next_open():
            position, section = found
            self._add_content(parts, self._buffer[:position])
            self._buffer = self._buffer[position + len(section.open) :]
            self._enter(section)
            return True
        held = max((overlap(self._buffer, section.open) for section in self._sections), default=0)
        ready = len(self._buffer) - held
        self._add_content(parts, self._buffer[:ready])
        self._buffer = self._buffer[ready:]
        return False

    def _enter(self, section: Section) -> None:
        self._inside, self._drops_space = section, section.kind != CALLS
        self._calls = self._call_reader(section) if section.kind == CALLS else None

    def _step_calls(self, parts: list[Part], section: Section) -> bool:
        text, is_closed = self._take_inside(section)
        parts += self._calls.feed(text)
        if is_closed and self._calls.in_string:
            parts += self._calls.feed(section.close)
        elif is_closed:
            parts += self._calls.finish(section.close)
            self._inside, self._drops_space = None, not self._calls.has_failed
            self._has_content |= self._calls.has_failed
        return is_closed

    def _step_text(self, parts: list[Part], section: Section) -> bool:
        if self._drops_space:
            self._buffer = self._buffer.lstrip()
        text, is_closed = self._take_inside(section)
        if text:
            parts.append((section.kind, text))
            self._drops_space = False
            self._has_content |= section.kind == CONTENT
        if is_closed:
            self._inside, self._drops_space = None, True
        return is_closed

    def _take_inside(self, section: Section) -> tuple[str, bool]:
        """Take the text of the open section that has arrived. Return it, and whether the section is closed."""
        position = self._buffer.find(section.close) if section.close else -1
        if is_closed := position >= 0:
            length = len(section.close)
        else:
            position, length = len(self._buffer) - overlap(self._buffer, section.close), 0
        text, self._buffer = self._buffer[:position], self._buffer[position + length :]
        return text, is_closed

    def _next_open(self) -> tuple[int, Section] | None:
        """The position of the first opening tag in the buffer, and its section."""
        found = [(self._buffer.find(section.open), -len(section.open), section) for section in self._sections]
        found = [entry for entry in found if entry[0] >= 0 and self._may_open(entry[2], entry[0])]
        if not found:
            return None
        position, _, section = min(found, key=lambda entry: entry[:2])
        return position, section

    def _may_open(self, section: Section, position: int) -> bool:
        """Whether a tag at this position of the buffer opens a section."""
        return section.kind != REASONING or not self._has_content and not self._buffer[:position].strip()

    def _add_content(self, parts: list[Part], text: str) -> None:
        if self._drops_space:
            text = text.lstrip()
        if text:
            parts.append((CONTENT, text))
            self._has_content |= not text.isspace()
            self._drops_space = False


class AnswerFormat:
    """How a family of models writes tool calls and reasoning. `name` selects the format on the command line.

    - `reasoning`: the sections with reasoning.

    Attributes: `has_one_call`, whether the chat template rejects several calls in a message. An answer then ends after
    the first call.
    """

    name = ""
    has_one_call = False
    content_sections: Sequence[Section] = ()  # their text is content, without the tags

    def __init__(self, reasoning: Sequence[Section] = ()):
        self.reasoning = tuple(reasoning)

    def parser(self, functions: Mapping[str, Any], opening: str) -> Parser:
        """Return the parser of an answer.

        - `functions`: the functions that the model may call: their names, and the JSON schemas of their arguments.
        - `opening`: the end of the prompt that begins the answer. It may open a section.
        """
        sections = [*self._text_sections, *(self.call_sections() if functions else ())]
        bare = self.bare_calls(functions) if functions else None
        if not sections and bare is None:
            return Parser()

        def call_reader(section: Section) -> CallReader:
            return CallReader(functions, partial(self.read_calls, section=section), section.open)

        inside = self.opened(opening)
        has_begun = inside is not None and bool(opening.rpartition(inside.open)[2].strip())
        return SectionParser(sections, call_reader, bare, inside, has_begun)

    def opened(self, opening: str) -> Section | None:
        """Return the section of text that `opening`, the end of the prompt, opens and does not close, or None."""
        return next((s for s in self._text_sections if opening.rfind(s.open) > opening.rfind(s.close)), None)

    @property
    def _text_sections(self) -> tuple[Section, ...]:
        return (*self.reasoning, *self.content_sections)

    def call_sections(self) -> Sequence[Section]:
        """Return the sections with tool calls."""
        raise NotImplementedError

    def markers(self) -> Sequence[str]:
        """Return the tags of the format. A special token whose name is in a tag is passed to the parser as text."""
        sections = (*self._text_sections, *self.call_sections())
        return [tag for section in sections for tag in (section.open, section.close)]

    def bare_calls(self, functions: Collection[str]) -> Callable[[str], bool | None] | None:
        """Return `is_bare` of `SectionParser`, or None if calls always have a tag."""
        return None

    def read_calls(self, reader: CallReader, section: Section) -> Reading[None]:
        """Read the calls in a section, as `CallReader` explains. Raises ValueError if its text has another form."""
        raise NotImplementedError

    def call_template(self, name: str) -> tuple[str, str]:
        """Return the text before and after the arguments of a call, which are a JSON object."""
        raise NotImplementedError

    # The text before the first call, between two calls and after the last one, besides that of `call_template`.
    # A separator of None: an answer has one call.
    around_calls: tuple[str, str | None, str] = ("", "\n", "")
    # The text with which every call begins, if there is one. In an answer that may be text or calls, it tells a grammar
    # that a call begins.
    trigger: str | None = None

    def call_id(self, name: str, index: int) -> str:
        """Return a new id for a call of this function, which has this index in its answer."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def instructions(self, functions: Sequence[Mapping[str, Any]]) -> str:
        """Return the system prompt for a model whose chat template has no tools."""
        raise NotImplementedError

    def write_calls(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of calls, for a model whose chat template has no tools."""
        parts = []
        for call in calls:
            begin, end = self.call_template(call["name"])
            parts.append(begin + json.dumps(call["arguments"], ensure_ascii=False) + end)
        prefix, separator, suffix = self.around_calls
        return prefix + (separator or "").join(parts) + suffix
