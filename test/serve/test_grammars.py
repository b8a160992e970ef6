"""The grammars of answers, without a model: schemas, patterns, grammars and tokens."""

from __future__ import annotations

import itertools
import json
import random
import re
import threading
from types import SimpleNamespace

import jsonschema
import pytest
from executorch_mlx.serve.grammar import GrammarError, Grammars, grammars
from executorch_mlx.serve.grammar.json_schema import adapted
from executorch_mlx.serve.grammar.lark import LarkGrammar
from executorch_mlx.serve.grammar.quoted import quoted
from json_schemas import INTEGER, NUMBER, SCHEMAS, STRING, any_of, array_of, enum_of, matching, record
from random_schemas import random_schema, random_value

pytest.importorskip("llguidance")
MARKER, END = 256, 257  # behind the 256 bytes, the tokens of the model
SPECIAL = {MARKER: "<|call|>", END: "</s>"}


class Model:
    """What `Grammars` uses of a model whose tokens are the bytes and two special tokens."""

    name, special_tokens, marker_tokens = "bytes", SPECIAL, {MARKER: SPECIAL[MARKER]}
    llm = SimpleNamespace(eos_ids={END}, program=SimpleNamespace(vocab_size=258, takes=lambda name: True))

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else SPECIAL[token].encode()


MODEL = Grammars(Model())


def matcher(kind: str, value):
    """Return a matcher for texts of a form."""
    form = SimpleNamespace(kind=kind, value=value, field="field")
    return MODEL._compile(grammars._form(LarkGrammar(Model.marker_tokens), form), "field")


def allowed(at) -> list[int]:
    """Return the tokens that the mask of a matcher allows."""
    mask = at.compute_bitmask()
    assert not at.is_error(), at.get_error()
    return [token for token in range(258) if mask[token // 8] >> token % 8 & 1]


def admits(compiled, text: str | bytes) -> bool:
    """Return whether the masks allow a text, token by token, and then the end."""
    at = compiled.deep_copy()
    for token in [*(text.encode() if isinstance(text, str) else text), END]:
        if token not in allowed(at):
            return False
        at.consume_token(token)
    return True


def drawn(compiled, rng: random.Random, limit: int = 300) -> str | None:
    """Return a text of tokens that the masks allow. Closing characters are likely. None: it has no end at the limit."""
    at, text = compiled.deep_copy(), bytearray()
    for _ in range(limit):
        tokens = allowed(at)
        if END in tokens and (tokens == [END] or rng.random() < 0.5):
            return text.decode()
        tokens = [token for token in tokens if token != END]
        closing = [token for token in tokens if token in b'"]},']
        text.append(rng.choice(closing if closing and rng.random() < 0.4 else tokens))
        assert at.consume_token(text[-1])
    return None


DRAFT_7 = "http://json-schema.org/draft-07/schema#"
CASES = [
    ({"type": "array", "maxItems": 4}, [1, "a"], [1, 2, 3, 4, 5]),
    ({"type": "array", "minItems": 1}, [None], []),
    ({"type": "object", "maxProperties": 2}, {"a": 1}, {"a": 1, "b": 2, "c": 3}),
    ({"type": "object", "additionalProperties": True}, {"a": [{}]}, []),
    ({"type": "object"}, {"a": {"b": []}}, "a"),
    ({"type": "array"}, [[], {}, None, "x", -1.5], {}),
    (
        {"properties": {"a": {"anyOf": [INTEGER]}, "b": {"$ref": "#/properties/a/anyOf/0"}}, "required": ["b"]},
        {"b": 3},
        {"b": "3"},
    ),
    (
        {"type": "array", "prefixItems": [INTEGER, {"$ref": "#/prefixItems/0"}, {"$ref": "#/items"}], "items": STRING},
        [1, 2, "x"],
        [1, "2"],
    ),
    (
        {"items": [INTEGER, {"$ref": "#/items/0"}], "additionalItems": False, "type": "array", "$schema": DRAFT_7},
        [1, 2],
        [1, 2, 3],
    ),
    ({"$defs": {"a/b": {"allOf": [INTEGER]}}, "$ref": "#/$defs/a~1b/allOf/0"}, 5, "5"),
    (record(tags={"type": "array", "maxItems": 5}), {"tags": ["x"]}, {"tags": 1}),
    (
        {
            "allOf": [
                {"type": "object", "properties": {"x": NUMBER}, "required": ["x"]},
                {"type": "object", "properties": {"y": STRING}, "required": ["y"]},
            ]
        },
        {"x": 1, "y": "a"},
        {"x": 1},
    ),
    (matching("^https?://"), "https://a", "ftp://a"),
    (matching("b$"), "ab", "ba"),
    (matching("b"), "abc", "ac"),
    (matching(r"^\d+\.[^\s]$"), "12.é", "1.2 "),
    ({"type": "string", "pattern": "^[a-z]*$", "minLength": 2, "maxLength": 3}, "ab", "a"),
    ({"type": "integer", "multipleOf": 7}, 21, 22),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-7}, 0.00000005, 1),
    (
        {
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {"a": record(k={"const": "a"}, v=INTEGER), "b": record(k={"const": "b"})},
        },
        {"k": "a", "v": 1},
        {"k": "a"},
    ),
    ({"oneOf": [{"const": 1}, enum_of(2, "x")]}, "x", 3),
    ({"oneOf": [{"$ref": "#/$defs/k"}, STRING], "$defs": {"k": {"enum": [1, None]}}}, None, 2),
    ({"propertyNames": enum_of("x", "y"), "additionalProperties": INTEGER, "type": "object"}, {"y": 1}, {"z": 1}),
    (
        {"propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": matching("^[a-z]$")}, "type": "object"},
        {"y": 1},
        {"Y": 1},
    ),
    ({"type": "array", "items": INTEGER, "uniqueItems": False}, [1, 1], ["1"]),
    ({"type": "string", "pattern": "^a+$", "format": "cuid2"}, "aa", "b"),
    ({"type": "string", "format": "password"}, "x", 1),
    (array_of(STRING | {"x-order": 1}, min_items=1), [], [1]),
    (any_of(STRING, {"type": "null"}) | {"maxLength": 2}, None, "abc"),
]


@pytest.mark.parametrize("schema, value, other", CASES)
def test_a_schema_admits_the_values_that_follow_it(schema, value, other):
    validator = jsonschema.validators.validator_for(schema)(schema)
    assert validator.is_valid(value) and not validator.is_valid(other)
    compiled = matcher("json", schema)
    for separators in ((", ", ": "), (",", ":")):
        text = json.dumps(value, ensure_ascii=False, separators=separators)
        assert admits(compiled, text.replace("5e-08", "0.00000005"))
    assert not admits(compiled, json.dumps(other))
    assert not admits(compiled, json.dumps(value, indent=1)) or not isinstance(value, (list, dict)) or not value


def test_drawn_values_follow_random_schemas_and_others_are_admitted():
    """Values of properties are in the order of `properties`, and those without a declaration come last."""
    rng, compiled, checked, found = random.Random(1), 0, 0, 0
    for schema in [*SCHEMAS, *(random_schema(rng) for _ in range(150))]:
        try:
            grammar = matcher("json", schema)
        except GrammarError as error:
            assert (
                "not supported" in str(error)
                or "only supported" in str(error)
                or "nsatisfiable" in str(error)
                or ("minProperties" in str(error))
            ), (error, schema)
            continue
        validator, compiled = jsonschema.Draft202012Validator(schema), compiled + 1
        for text in (drawn(grammar, rng) for _ in range(2)):
            if text is not None:
                assert validator.is_valid(json.loads(text)), (text, schema)
                checked += 1
        has_format = '"format"' in json.dumps(schema)  # an annotation for jsonschema
        for value in (random_value(rng) for _ in range(20)):
            if not has_format and validator.is_valid(value):
                assert admits(grammar, json.dumps(value, ensure_ascii=False)), (value, schema)
                found += 1
    assert compiled > 150 and checked > 250 and found > 250


def orders(value):
    """Yield a value with the members of its objects in each order."""
    if isinstance(value, list):
        yield from map(list, itertools.product(*map(list, map(orders, value))))
    elif isinstance(value, dict):
        for names in itertools.permutations(value):
            for parts in itertools.product(*(list(orders(value[name])) for name in names)):
                yield dict(zip(names, parts, strict=True))
    else:
        yield value


def incomplete(rng: random.Random, count: int) -> list:
    """Return those of `count` random pairs of a schema and a valid value whose value is not admitted in any order.

    A refused schema counts as a pair if the error names a keyword.
    """
    pairs, wrong = 0, []
    while pairs < count:
        schema = random_schema(rng)
        validator = jsonschema.Draft202012Validator(schema)
        values = [value for value in (random_value(rng) for _ in range(20)) if validator.is_valid(value)][:5]
        pairs += len(values)
        try:
            compiled = matcher("json", schema) if values else None
        except GrammarError as error:
            keywords = (
                *schema,
                "oneOf",
                "minProperties",
                "nsatisfiable",
                "allOf",
                "patternProperties",
                "not supported",
            )
            wrong += [] if any(keyword in str(error) for keyword in keywords) else [(schema, str(error))]
            continue
        for value in values:
            if not any(admits(compiled, json.dumps(order, ensure_ascii=False)) for order in orders(value)):
                wrong.append((schema, value))
    return wrong


def test_valid_values_are_admitted():
    """`python test/serve/schema_bars.py` looks at 2,000 pairs."""
    assert incomplete(random.Random(5), 200) == []


CASES_OF_CLIENTS = [  # of pydantic and zod
    ({"type": "array", "maxItems": 4}, [1, "a"]),
    ({"type": "object", "maxProperties": 2}, {"a": 1}),
    ({"properties": {"a": {"anyOf": [INTEGER]}, "b": {"$ref": "#/properties/a/anyOf/0"}}, "required": ["b"]}, {"b": 3}),
    ({"allOf": [{"properties": {"x": NUMBER}, "required": ["x"]}, {"properties": {"y": STRING}}]}, {"x": 1, "y": "a"}),
    ({"type": "string", "pattern": "^https?://"}, "https://a"),
]


@pytest.mark.parametrize("schema, value", CASES_OF_CLIENTS)
def test_schemas_with_an_open_end_admit_values(schema, value):
    assert admits(matcher("json", schema), json.dumps(value))


def test_repeated_names_cannot_count_twice():
    for required, least, is_accepted in (([], 1, True), ([], 2, False), (["a"], 2, True), (["a", "a"], 3, False)):
        schema = {"type": "object", "required": required, "minProperties": least, "additionalProperties": INTEGER}
        if is_accepted:
            matcher("json", schema)
        else:
            with pytest.raises(GrammarError, match=r"field: \$.minProperties: got . expected|got"):
                matcher("json", schema)


@pytest.mark.parametrize(
    "schemas",
    [
        [{"const": 1}, {"const": 1.0}],
        [record(k={"const": 1}), {"properties": {"k": {"const": 2}}, "required": ["k"]}],  # also admits no objects
        [record(k={"const": [1]}), record(k={"const": [1.0]})],
        [record(k={"const": "a"}), record(k=STRING)],
        [record(k={"const": "a"}), {"type": "object", "properties": {"k": {"const": "b"}}}],
        [{"$ref": "#/oneOf/1"}, {"$ref": "#/oneOf/0"}],
    ],
)
def test_schemas_that_may_overlap_stay_one_of(schemas):
    assert "oneOf" in adapted({"oneOf": schemas})


def test_options_of_the_grammar_library_have_no_effect():
    schema = {"not": {}, "x-guidance": {"lenient": True, "whitespace_flexible": True}}
    with pytest.raises(GrammarError, match='Unimplemented keys: ."not".'):
        matcher("json", schema)
    assert not admits(matcher("json", {"x-guidance": schema["x-guidance"], "type": "array"}), "[ ]")


NO_UTF8 = [b"\xed\xa0\x80", b"\xe0\x80\x80", b"\xf0\x80\x80\x80", b"\xf5\x80\x80\x80", b"\xff"]


@pytest.mark.parametrize(
    "pattern, matching, others",
    [
        (r"\d", "09", "a٣"),
        (r"\D", "aé😀", "0"),
        (r"\w", "aZ0_", "-é"),
        (r"\W", "- .", "aZ"),
        (r"\s", " \t\n", "a\xa0"),
        (r"\S", "aé", " "),
        (r"[\s\S]", "aé \n😀\xa0", ""),
        (r"[^\D]", "09", "a٣"),
        (r"[éa-f]", "éaf", "gê"),
        (r"[\]\[^\\]", "][^\\", "a"),
        (r"[a\-z/]", "a-z/", "b"),
        (r"\u00e9", "é", "e"),
        (r"\/", "/", "a"),
    ],
)
def test_classes_of_patterns(pattern, matching, others):
    compiled, in_json = matcher("regex", pattern), matcher("json", {"type": "string", "pattern": f"^{pattern}$"})
    for character in matching:
        assert admits(compiled, character)
        assert character in "\t\n" or admits(in_json, json.dumps(character, ensure_ascii=False))
    assert not any(admits(compiled, other) for other in [*others, *NO_UTF8])
    assert not any(admits(in_json, b'"' + other + b'"') for other in NO_UTF8)


@pytest.mark.parametrize("pattern", ["^(a|b)$", "^a|b$", "a?b?", "(ab)+|", "a{2}b?", "[ab]{1,2}"])
def test_pattern_is_one_of_the_whole_text(pattern):
    compiled = matcher("regex", pattern)
    for text in map("".join, itertools.chain(*(itertools.product("ab", repeat=count) for count in range(4)))):
        assert admits(compiled, text) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize(
    "grammar, matching, others",
    [
        ('root ::= "x" | "yy"', ["x", "yy"], ["y", ""]),
        (r'root ::= [^"a] # a [ in a comment', ["é", "\n"], ["a", '"']),
        (r'root ::= "\u00e9" [\u00e9\x2d\U0001F600-\U0001F601]', ["éé", "é-", "é😁"], ["é"]),
        (r'root ::= "a\\b\"c/" [\]\[/^]', ['a\\b"c/]', 'a\\b"c/^'], ["a"]),
        ('root ::= item ("," item)*\nitem ::= [0-9]{1,2} | "(" root ")"', ["1,(22,3)"], ["1,", "123"]),
        ('root ::= (\n  a-b\n  | [x-z]+ )\na-b ::= ws "a"\nws ::= [ \\t]*', ["  a", "xyz"], ["a "]),
        ("root ::= " + "a " * 30 + '\na ::= "b"?', ["", "b" * 30], ["b" * 31]),
        ('start: "a" NUMBER\nNUMBER: /[0-9]+/', ["a12"], ["a"]),
        ('start: %json {"type": "integer"} <[256]>?', ["12"], ["x"]),
    ],
)
def test_grammars_of_clients(grammar, matching, others):
    compiled = matcher("grammar", grammar)
    assert [text for text in matching if not admits(compiled, text)] == []
    assert [text for text in others if admits(compiled, text)] == []


def test_every_character_of_a_choice_stands_for_itself():
    characters = [*map(chr, range(0x250)), *"\u2028\ufeff\ue000\uffff😀\U0010ffff"]
    texts = ["".join(characters), "", '"\\', "<|call|>"]
    compiled = matcher("choice", texts)
    assert all(admits(compiled, text) for text in texts) and not admits(compiled, texts[0][:-1])
    at = compiled.deep_copy()
    assert MARKER not in allowed(at)  # its name in a text is no special token


def references(count: int, schema: dict) -> dict:
    """A chain of references, each of which a schema contains in place of its string "next"."""
    text = json.dumps(schema)
    chain = {f"a{i}": json.loads(text.replace('"next"', f'{{"$ref": "#/$defs/a{i + 1}"}}')) for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": chain | {f"a{count}": INTEGER}}


@pytest.mark.parametrize(
    "kind, value",
    [
        ("json", references(1000, {"properties": {"x": "next"}})),
        ("json", references(1000, {"anyOf": ["next", {"type": "null"}]})),
        ("json", references(1000, {"items": "next"})),
        ("grammar", "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(4500)) + 'a4500: "x"'),
        ("grammar", "root ::= a0\n" + "".join(f'a{i} ::= "b" a{i + 1}\n' for i in range(3000)) + 'a3000 ::= "x"'),
        ("grammar", "start: " + "(" * 20000 + '"a"' + ")" * 20000),
        ("regex", "(" * 20000 + "a" + ")" * 20000),
        ("regex", "((((a{1,100}){1,100}){1,100}){1,100})"),
        ("json", {"type": "string", "minLength": 10**5, "maxLength": 2 * 10**9}),
        ("json", {"type": "array", "minItems": 10**5, "maxItems": 2 * 10**9}),
        ("json", {"type": "integer", "multipleOf": 999999937}),
        ("grammar", "start: " + "a " * 3000 + '\na: "b"?'),
    ],
)
def test_hostile_grammars_end_no_process(kind, value):
    """Also on threads with small stacks, such as those of macOS."""
    results = []

    def use() -> None:
        try:
            compiled = matcher(kind, value)
            results.append(allowed(compiled.deep_copy()))
        except GrammarError as error:
            results.append(str(error))

    before = threading.stack_size(512 * 1024)
    try:
        thread = threading.Thread(target=use)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert len(results) == 1 and results[0]


# Grammars of quoted texts: (a grammar in Lark, texts) -------------------------------------------------------------

QUOTED = [
    ('start: "a\\n" /x+/', ["a\nx", "a\nxx", "a\n", "ax"]),
    ("start: LINE+\nLINE: /[^\\n]*/ LF\n%import common.LF", ['a\n"b\\\n', "a", "\n", "é\x7f\t\n"]),
    ("start: L1 | (INT)\nL1: NL\n%import common (WS, INT)\n%import common.NEWLINE -> NL", ["\n\n", "\r\n", "12", " "]),
    ("start: /.+/", ['a"b\\', "a\nb", "\x1f"]),
    ("start: /.+/s", ['a"b\\', "a\nb", "\x1f"]),
    ("start: /(?s:.)+|a(?s)(b.)c./", ['a"b\\', "a\nb", "ab\nc\n"]),
    ('start: "Sel\\nEct\\""i WS /[a-z\\n]+/i\n%import common.WS', ['SEL\nect" \n Ab\nC', 'SELECT" x', 'Sel\nEct"\ta']),
    ('start: "!".."~"', ['"', "\\", "a", "\n", "}"]),
    ('start: "\\x00" .. "\\u001f"', ["\0", "\x1f", " ", "\b"]),
    (r"start: /\s\S[[:cntrl:]]/", ['\t"\n', 'a"a', "\n\\\x01"]),
    (r"start: /[^]\]a]+[]\[]/", ['"\\]', "a]", "\n["]),
    (r"start: /[\w&&[^\d]]\x{22}\u{5c}\U00000009/", ['a"\\\t', '1"\\\t']),
    (r'start: /a{2,3}?("|\\|\x0a|\/)?/', ['aa"', "aaa\\", "aa\n", "aa/", "a"]),
    ('// "comment"\n# /x/\nstart: x~2 | "]"\nx[lazy]: /"[^"]*"/', ['"a""b"', "]", '""']),
    (r'start: /a/ "b" -> c', ["ab"]),
    ('%llguidance {"no_forcing": true}\n%ignore /[ "]/\nstart: "a" "b"', ['a "b', "ab", "a\nb"]),
]


@pytest.mark.parametrize("grammar, texts", QUOTED)
def test_quoted_texts_follow_the_grammar_of_the_text(grammar, texts):
    plain, inside = (matcher("grammar", text) for text in (grammar, quoted(grammar)))
    results = [admits(plain, text) for text in texts]
    assert [admits(inside, json.dumps(text, ensure_ascii=False)[1:-1]) for text in texts] == results and any(results)
    rng = random.Random(0)
    for _ in range(5):
        text = drawn(inside, rng)
        assert text is None or admits(plain, json.loads(f'"{text}"'))


def test_characters_have_one_quoted_form():
    inside = matcher("grammar", quoted("start: /[^b]/"))
    assert admits(inside, "a") and not admits(inside, "\\u0061") and not admits(inside, "\\/")


@pytest.mark.parametrize(
    "part",
    [
        "<|call|>",
        "@part0",
        "%json {}",
        "%regex {}",
        "%import other.X",
        'x[stop="a"]',
        "~/a/",
        "/a/x",
        "/(?x: a)/",
        "/[a/",
    ],
)
def test_parts_of_grammars_without_a_quoted_form_are_refused(part):
    with pytest.raises(ValueError):
        quoted(f"start: {part}")
