"""The grammars of answers, without a model: patterns, classes of characters, bounds of numbers, and ends."""

from __future__ import annotations

import datetime
import itertools
import json
import re

import pytest
from json_schemas import STRING
from pydantic import TypeAdapter

pytest.importorskip("xgrammar")
BYTES = [bytes([byte]) for byte in range(256)]  # the tokens; a further one ends the text


@pytest.mark.parametrize(
    "pattern",
    [
        r"^a(\.\d+)?$", "^(a+b)?$", "^(b(a){0,2}|b)$", "^(((a|[ab])|1)|((a){1,2}){1,2})$", "^((a{1,2}|(b|a)){1,2})$",
        "^(|a+b)(|b+a)$", "^$|^b$", "^((^a|b)(1$|é))$", "^()a$", r'^a"\\?$', r"^\n[^a]*$", "^(?:é|😀)*$", "^.+$", r"^[\s\S]$", r"^a{2}b?$",
    ],
)  # fmt: skip
def test_pattern_admits_no_other_texts(pattern):
    from executorch_mlx.serve.grammar.pattern import rule

    admits = admitted(rf'root ::= "\"" {rule(pattern)} "\""')
    found = 0
    for count in range(4):
        for text in map("".join, itertools.product('ab1."\\\né😀', repeat=count)):
            for encoded in {json.dumps(text, ensure_ascii=False), f'"{text}"'}:
                if admits(encoded):
                    assert re.search(pattern, json.loads(encoded)), encoded
                    found += 1
    assert found > 0


def admitted(grammar: str):
    """Return a function that tells whether a grammar admits a text, or bytes."""
    import xgrammar

    tokens = xgrammar.TokenizerInfo([*BYTES, b""], xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[256])
    compiler = xgrammar.GrammarCompiler(tokens, max_threads=1)
    compiled = compiler.compile_structural_tag(
        {"type": "structural_tag", "format": {"type": "grammar", "grammar": grammar}}
    )

    def admits(text: str | bytes) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return all(map(matcher.accept_token, [*(text.encode() if isinstance(text, str) else text), 256]))

    return admits


def test_many_repetitions_are_no_copies():
    import xgrammar
    from executorch_mlx.serve.grammar.pattern import rule

    tokens = xgrammar.TokenizerInfo([*BYTES, b""], xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[256])
    compiler = xgrammar.GrammarCompiler(tokens, max_threads=1)
    for text in (".", "[a-z]", r"\d"):
        few, many = (compiler.compile_grammar(f"root ::= {rule(f'{text}{{0,{n}}}', False)}") for n in (200, 400))
        assert many.memory_size_bytes == few.memory_size_bytes


NO_UTF8 = [b"\xed\xa0\x80", b"\xe0\x80\x80", b"\xf0\x80\x80\x80", b"\xf5\x80\x80\x80", b"\xff"]


@pytest.mark.parametrize(
    "pattern, matching, others",
    [
        (".", "aé😀\t\0", "\n\r\u2028"),
        (r"\d", "09", "a٣"),
        (r"\D", "aé😀", "0٣"),
        (r"\w", "aZ0_", "-é"),
        (r"\W", "- ", "aé"),
        (r"[^\w-]", ". ", "aé-"),
        (r"\s", " \t\n", "a\xa0"),
        (r"\S", "aé", " \xa0"),
        (r"[\s\S]", "aé \n😀\xa0", ""),
        (r"[\w\W]", "aé \n😀\xa0", ""),
        (r"[^\D]", "09", "a٣"),
        (r"[\u00e9a-f]", "éaf", "gê\u0e9a"),
        ("[éa-f]", "éaf", "gê\u0e9a"),
        (r"[a\-z]", "a-z", "b"),
        (r"[\w-.]", "a-.", "/"),
        (r"[\x41-\x43\u{1F600}]", "AC😀", "D"),
        (r"[\]\[^\\]", "][^\\", "a"),
        (r"[\b\0]", "\b\0", "b0"),
        (r"\u00e9", "é", "e"),
    ],
)
def test_classes_match_in_every_dialect(pattern, matching, others):
    from executorch_mlx.serve.grammar.pattern import rule

    plain, in_json = admitted(f"root ::= {rule(pattern, in_json=False)}"), admitted(f"root ::= {rule(pattern)}")
    for character in matching:
        assert plain(character)
        # Long escapes stand only for characters of a class without others.
        assert character == "\0" or in_json(json.dumps(character, ensure_ascii=False)[1:-1])
    assert not any(map(plain, [*others, *NO_UTF8]))
    assert not any(map(in_json, [*others, *NO_UTF8, "\n", '"', "\\"]))


@pytest.mark.parametrize("text", [r"\t", r"\u0001", r"\""])
def test_class_of_characters_that_json_escapes(text):
    from executorch_mlx.serve.grammar.pattern import rule

    admits = admitted(f"root ::= {rule(f'[{json.loads(chr(34) + text + chr(34))}]')}")
    assert admits(text)


def test_strings_have_no_bytes_that_are_not_utf8():
    from executorch_mlx.serve.grammar.gbnf import checked_grammar, repaired

    for schema in (STRING, STRING | {"maxLength": 9}):
        grammar = xgrammar_of(schema)
        assert admitted(repaired(grammar))('"é"')
        assert not any(admitted(repaired(grammar))(b'"' + text + b'"') for text in NO_UTF8)
    for grammar in (r'root ::= [^"a]', r'root ::= [^-\x41] # "['):
        admits = admitted(checked_grammar(grammar, "grammar"))
        assert admits("é") and not admits("-" if "-" in grammar else "a") and not any(map(admits, NO_UTF8))


@pytest.mark.parametrize(
    "schema, text, is_valid",
    [
        ({"type": "integer", "minimum": 0.5, "maximum": 2.5}, "1", True),
        ({"type": "integer", "minimum": 0.5, "maximum": 2.5}, "0", False),
        ({"type": "integer", "exclusiveMinimum": 1.5, "exclusiveMaximum": 4}, "2", True),
        ({"type": "integer", "exclusiveMinimum": 1.5, "exclusiveMaximum": 4}, "4", False),
        ({"type": "integer", "maximum": 1e30}, "9" * 18, True),
        ({"type": "integer", "maximum": 2**63 - 1}, "9" * 40, False),
        ({"type": ["integer", "number"], "maximum": 0.5}, "0.5", True),
        ({"type": ["integer", "null"], "maximum": 0.5}, "null", True),
        ({"type": "number", "minimum": 1e-6, "maximum": 1.5e-6}, "0.000001", True),
    ],
)
def test_bounds(schema, text, is_valid):
    from executorch_mlx.serve.grammar.json_schema import check_schema

    assert admitted(xgrammar_of(check_schema(schema)))(text) == is_valid


LONGEST = "P9999Y9999M9999DT9999H9999M9999S"


@pytest.mark.parametrize("text", ["P1Y2M3DT4H5M6S", "PT9999S", "P5W", LONGEST, "!PT1H1S", "!P1D1Y", "!P99999D"])
def test_durations(text):
    """Those after `!` are not admitted: the numbers have at most four digits, as programs refuse longer durations."""
    from executorch_mlx.serve.grammar.json_schema import check_schema
    from executorch_mlx.serve.grammar.pattern import with_rules

    admits = admitted(with_rules(xgrammar_of(check_schema({"type": "string", "format": "duration"}))))
    assert admits(json.dumps(text.removeprefix("!"))) != text.startswith("!")
    if not text.startswith("!"):
        TypeAdapter(datetime.timedelta).validate_python(text)


def xgrammar_of(schema) -> str:
    import xgrammar

    return str(xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False))


NUMBER = {"type": "number"}
DIGITS = "123456789012345678"


@pytest.mark.parametrize(
    "schema, text, is_valid",
    [
        (NUMBER, "-1.5e99", True),
        (NUMBER, "1e+7", True),
        (NUMBER, "1e999", False),
        (NUMBER, f"-{DIGITS}.{DIGITS[:-1]}E-9", True),
        (NUMBER, f"{DIGITS}9", False),
        (NUMBER, f"0.{DIGITS}", False),
        ({"type": "integer"}, DIGITS, True),
        ({"type": "integer"}, f"{DIGITS}9", False),
        ({"type": "integer", "minimum": 5}, DIGITS, True),
        ({"type": "integer", "minimum": 5}, f"{DIGITS}9", False),
        ({"type": "number", "minimum": 5}, f"{DIGITS}.123456", True),
        ({"type": "number", "minimum": 5}, f"{DIGITS}9", False),
        ({"type": "integer", "maximum": -5}, f"-{DIGITS}9", False),
        ({"const": "[1-9] [0-9]* root_1{1, -1}"}, '"[1-9] [0-9]* root_1{1, -1}"', True),
        ({"type": "array", "items": {"enum": [7]}}, f"[{'7, ' * 30}7]", True),
    ],
)  # fmt: skip
def test_numbers_have_few_digits(schema, text, is_valid):
    """Models may write digits until the answer is cut off, and parsers read the number as infinity, or refuse it."""
    from executorch_mlx.serve.grammar.gbnf import repaired
    from executorch_mlx.serve.grammar.json_schema import check_schema
    from executorch_mlx.serve.grammar.pattern import with_rules

    admits = admitted(with_rules(repaired(xgrammar_of(check_schema(schema)))))
    assert admits(text) == is_valid


def test_growth_of_the_end():
    from executorch_mlx.serve.grammar.growth import growth

    for grammar, expected in (
        ('root ::= (("a" [0-9]* "bc"))', 0),
        (r'root ::= (("[" root_1 "]"))\nroot_1 ::= ("" | ("\"abc\"" root_1)) (=("]" "long"))', 5),
        (r'root ::= ((b{2, 9}) | ("x"))\nb ::= (("cd" e) | ("fghi"))\ne ::= ("" | ([a-z]))', 5),  # not "x"
        (r'root ::= (("a" b{0, 9}))\nb ::= (("cd") | (Regex("[(]", json_string=true) "efgh"))', 5),
        (r'root ::= ((a))\na ::= (("a" a "b") | ("\u00e9\xe9é"))', 2),
    ):
        assert growth(grammar.replace(r"\n", "\n"), len) == expected, grammar
