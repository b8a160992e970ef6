"""Grammars of texts that models write as JSON strings, as the input of a custom tool: the grammar of the quoted text.

JSON writes each character of a text on its own: as it is, or as an escape sequence. So the grammar of the quoted text
is the grammar of the text with each character, each class and each `.` replaced by what JSON writes for it. Each
character has one form, that of `json.dumps`; models never write the others, such as `\\u0041`.
"""

from __future__ import annotations

import json
import re
from functools import cache, lru_cache

ESCAPED = [*map(chr, range(32)), '"', "\\"]  # the characters that JSON escapes
# Terminals of Lark's module `common` that have such characters.
COMMON = {
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*([^*]|\*+[^*\/])*\*+\/",
    "SQL_COMMENT": r"--[^\n]*",
}
_STRING = r'"(?:\\.|[^"\\\n])*"'
_ELEMENT = re.compile(
    rf"""(?P<comment>(?:\#|//)[^\n]*)
    |(?P<range>{_STRING}\s*\.\.\s*{_STRING})
    |(?P<string>{_STRING}i?)
    |/(?P<pattern>(?:\\.|[^/\\])+)/(?P<flags>[imslux]*)
    |%import[ ]+common\s*(?:\.\s*(?P<name>\w+)(?:\s*->\s*(?P<alias>\w+))?|\((?P<names>[^)]*)\))
    |(?P<options>%llguidance\s*\{{[^}}]*\}})
    |(?P<repeat>~\s*\d)
    |(?P<refused><[^<>\s]+>|@[\w-]+|%(?:json|regex|lark|import)\b|\b(?:stop|suffix|capture|stop_capture)\s*=|~)""",
    re.VERBOSE | re.DOTALL,
)
_ATOM = re.compile(
    r"""\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|[xuU]\{(?P<code>[0-9a-fA-F]+)\}
        |(?P<category>[pP](?:\{[^}]*\}|.)|[dDsSwW])|(?P<letter>[nrtfva0])|(?P<sign>[^a-zA-Z0-9]))
    |(?P<group>\((?:\?P?<\w+>|\?(?P<set>[a-zA-Z]*)(?:-(?P<unset>[a-zA-Z]+))?(?P<end>[:)]))?)
    |(?P<close>\))
    |(?P<class>\[)
    |(?P<any>\.)
    |(?P<other>[*+?|^$]|\{\d*,?\d*\}|\\.)
    |(?P<character>.)""",
    re.VERBOSE | re.DOTALL,
)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}


def quoted(grammar: str) -> str:
    """Return the grammar in Lark of the text between the quotes of a JSON string whose value follows `grammar`.

    Raises ValueError for parts of Lark that have no such form.
    """
    return _ELEMENT.sub(_element, grammar)


def _element(match: re.Match) -> str:
    if match["refused"]:
        raise ValueError(
            f"{match['refused'][:40]} is not supported in the grammar of a text that becomes a JSON string"
        )
    if match["range"]:
        first, last = map(_text, re.findall(_STRING, match["range"]))
        return f"/{_quoted_pattern(f'[{_code(first)}-{_code(last)}]', set())}/"
    if match["string"]:
        return _string(match["string"])
    if match["pattern"]:
        if "x" in match["flags"]:
            raise ValueError("the flag x is not supported in the grammar of a text that becomes a JSON string")
        return f"/{_quoted_pattern(match['pattern'], {*match['flags']})}/{match['flags']}"
    if match["names"]:
        return "\n".join(_import(name.strip(), None) for name in match["names"].split(","))
    if match["name"]:
        return _import(match["name"], match["alias"])
    return match[0]


def _import(name: str, alias: str | None) -> str:
    if name in COMMON:
        return f"{alias or name}: /{_quoted_pattern(COMMON[name], set())}/"
    return f"%import common.{name}" + (f" -> {alias}" if alias else "")


def _string(literal: str) -> str:
    """Return the expression of a string in Lark, in which only its letters have the flag of the literal."""
    flag = "i" if literal.endswith("i") else ""
    text = _text(literal.removesuffix("i"))
    pieces = re.split(r'([\x00-\x1f"\\]+)', text) if flag else [text]
    literals = [json.dumps(_quoted(piece), ensure_ascii=False) for piece in pieces if piece]
    flags = ["" if piece[0] in ESCAPED else flag for piece in pieces if piece]
    return "(" + " ".join(map(str.__add__, literals, flags)).replace("\x7f", "\\u007f") + ")" if literals else '""'


def _text(literal: str) -> str:
    """Return the text of a string in Lark: one of JSON, in which \\x41 is a character, too."""
    return json.loads(re.sub(r"\\(?:x(..)|.)", lambda m: f"\\u00{m[1]}" if m[1] else m[0], literal))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _quoted_pattern(pattern: str, flags: set[str]) -> str:
    """Return a regular expression in Rust's syntax, without the flag x, for the quoted text. Raises ValueError."""
    parts, scopes, position = [], [flags], 0
    while position < len(pattern):
        match = _ATOM.match(pattern, position)
        if match is None:
            raise ValueError(f"/{pattern[:40]}/ is not a regular expression")
        end, flags = match.end(), scopes[-1]
        if match["class"]:
            end = _class_end(pattern, position)
            parts.append(_members(pattern[position:end], flags))
        elif match["any"] or match["category"]:
            parts.append(_members(match[0], flags))
        elif match["group"]:
            changed = flags | {*(match["set"] or "")} - {*(match["unset"] or "")}
            if "x" in changed:
                raise ValueError("the flag x is not supported in the grammar of a text that becomes a JSON string")
            if match["end"] == ")":
                scopes[-1] = changed
            else:
                scopes.append(changed)
            parts.append(match[0])
        elif match["close"]:
            scopes = scopes[:-1] or scopes
            parts.append(match[0])
        elif match["other"]:
            parts.append(match[0])
        else:
            parts.append(_character(match, flags))
        position = end
    return "".join(parts)


def _character(match: re.Match, flags: set[str]) -> str:
    """Return the expression of an atom that stands for one character."""
    if digits := match["x"] or match["u"] or match["U"] or match["code"]:
        character = chr(min(int(digits, 16), 0x10FFFF))
    else:
        character = _LETTERS.get(match["letter"] or "", match["sign"] or match["character"])
    return _alternatives("", [character], flags) if character in ESCAPED else match[0]


def _class_end(pattern: str, begin: int) -> int:
    """Return the end of the class that begins at an opening bracket. Classes may be nested."""
    depth, position = 0, begin
    while position < len(pattern):
        found = re.compile(r"\\.|\[\^?\]?|.", re.DOTALL).match(pattern, position)
        if found is None:
            break
        position = found.end()
        depth += (found[0][0] == "[") - (found[0] == "]")
        if not depth:
            return position
    raise ValueError(f"{pattern[begin : begin + 40]} has no end")


def _members(atom: str, flags: set[str]) -> str:
    """Return the expression of a class, a category or `.`."""
    if atom == ".":
        atom = r"[\s\S]" if "s" in flags else r"[^\n]"
    matched = _matched(atom)
    return _alternatives(rf'[{atom}&&[^"\\\x00-\x1f]]', matched, flags) if matched else atom


def _alternatives(rest: str, characters: list[str], flags: set[str]) -> str:
    """Return the expression of what `rest` matches, and of quoted characters."""
    forms = "|".join(re.sub(r"[^a-z0-9]", r"\\\g<0>", _quoted(character)) for character in characters)
    escaped = f"(?-i:{forms})" if "i" in flags else f"(?:{forms})"
    return f"(?:{rest}|{escaped})" if rest else escaped


@cache
def _byte_tokenizer():
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


@lru_cache(maxsize=1000)
def _matched(atom: str) -> list[str]:
    """Return the characters of ESCAPED that an atom matches. Raises ValueError if it is not valid."""
    from llguidance import LLMatcher

    matcher = LLMatcher(_byte_tokenizer(), f"start: /{atom}/", log_level=0)
    if error := matcher.get_error():
        raise ValueError(" ".join(error.split())[:200])
    return [character for character in ESCAPED if matcher.validate_tokens([ord(character)])]


def _code(character: str) -> str:
    if len(character) != 1:
        raise ValueError(f"got {character[:40]!r} as an end of a range, expected one character")
    return f"\\x{{{ord(character):x}}}"
