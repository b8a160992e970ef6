"""Grammars as texts, in GBNF: checks those of clients, and mends those that xgrammar writes."""

import re

from .json_schema import SchemaError, reason

# Comments, texts and classes of characters in a grammar, and functions of xgrammar that are about tokens.
_PARTS = re.compile(
    r'#[^\n]*|"(?:\\.|[^"\\])*"|\[(?P<excluded>\^?)(?:\\.|[^\]\\])*\]'
    r"|\b(?P<function>ExcludeToken|TagDispatch|Token|TokenTagDispatch)\s*\("
)
# In a grammar of xgrammar: texts, the digits after the first one, classes, and rules that may be repeated without end.
_ENDLESS = re.compile(
    r'"(?:\\.|[^"\\])*"|(?<=\[1-9\] )(?P<digits>\[0-9\]\*)|\[(?:\\.|[^\]\\])*\]|(?P<rule>\w+)\{(?P<least>\d+), -1\}'
)
MAX_DIGITS = 18  # of a number before the point: an integer then has at most 64 bits


def checked_grammar(grammar: str, field: str) -> str:
    """Return a grammar that a client wrote in GBNF, in a form that xgrammar follows. Raises SchemaError."""
    import xgrammar

    if function := next(filter(None, (part["function"] for part in _PARTS.finditer(grammar))), None):
        raise SchemaError(f"{field}: {function} is not supported, expected a grammar over characters")
    grammar = _without_surrogates(_with_long_escapes(grammar))
    try:
        xgrammar.Grammar.from_ebnf(grammar)
    except RuntimeError as error:
        raise SchemaError(f"{field}: {reason(error)}, expected GBNF, such as root ::= \"yes\" | \"no\"") from error
    return grammar


def _without_surrogates(grammar: str) -> str:
    """Return a grammar whose classes of excluded characters exclude surrogates, which are no characters of UTF-8."""

    def changed(part: re.Match) -> str:
        return rf"[^\ud800-\udfff{part[0][2:]}" if part["excluded"] else part[0]

    return _PARTS.sub(changed, grammar)


def _with_long_escapes(grammar: str) -> str:
    """Return a grammar with \\u00HH for \\xHH. xgrammar reads further digits as a part of the latter."""
    return re.sub(r"\\(?:x([0-9a-fA-F]{2})|(.))", lambda m: rf"\u00{m[1]}" if m[1] else m[0], grammar)


def repaired(grammar: str) -> str:
    """Return a grammar of xgrammar without further defects.

    In strings, xgrammar admits surrogates, and in strings with a length also control characters, which JSON strings do
    not have. In numbers, it admits any exponent. One of more than two digits can make a number too large for a double,
    which parsers read as infinity. It admits any number of digits, which a model may write until its answer is cut off.
    """
    grammar = _with_long_escapes(grammar)
    grammar = _without_surrogates(grammar.replace(r"[^\"\\\r\n]", r"[^\0-\u001f\"\\]"))
    return _with_few_digits(re.sub(r"(\[eE\] \w+ \w+)\{1, -1\}", r"\1{1, 2}", grammar))


def _with_few_digits(grammar: str) -> str:
    """Return a grammar of xgrammar with at most MAX_DIGITS digits where it has any number of them."""
    rules = {*re.findall(r"^(\w+) ::= \(\(\[0-9\]\)\)$", grammar, re.MULTILINE)}  # those of a digit

    def changed(part: re.Match) -> str:
        if part["digits"]:
            return f"[0-9]{{0, {MAX_DIGITS - 1}}}"
        if part["rule"] not in rules:
            return part[0]
        least = int(part["least"])
        return f"{part['rule']}{{{least}, {max(least, MAX_DIGITS - 1)}}}"

    return _ENDLESS.sub(changed, grammar)
