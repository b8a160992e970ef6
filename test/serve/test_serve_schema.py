"""Answers that follow a JSON schema. `LONG=1 pytest` asks for 20 answers to each of 50 schemas."""

from __future__ import annotations

import datetime
import enum
import json
import os
import pathlib
from typing import Annotated, Literal

import httpx
import jsonschema
import numpy
import openai
import pytest
import served
import small_llm
from executorch_mlx.llm.export import HeadConfig
from json_schemas import INTEGER, SCHEMAS, STRING, any_of, array_of, enum_of, matching, record
from pydantic import AnyUrl, BaseModel, ConfigDict, Field, HttpUrl, TypeAdapter
from served import NAME

pytest.importorskip("xgrammar")
MESSAGES = [{"role": "user", "content": "Return"}]
NAMES = {"type": "object", "properties": {"a": STRING, "b": STRING}}


def ask(client, schema, **fields):
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    fields = {"model": NAME, "messages": MESSAGES, "temperature": 1, "response_format": response_format} | fields
    return client.chat.completions.create(**fields)


def test_answers_follow_their_schema(client):
    """Answers end within max_tokens: the grammar brings an answer to its end before it gets too long."""
    answers = 20 if os.environ.get("LONG") else 1
    checked = 0
    for number, schema in enumerate(SCHEMAS):
        for choice in ask(client, schema, n=answers, seed=number, max_tokens=200).choices:
            assert choice.finish_reason == "stop", (schema, choice.message.content)
            jsonschema.validate(json.loads(choice.message.content), schema, format_checker=jsonschema.FormatChecker())
            checked += 1
    assert checked == 50 * answers


def test_json_object(client):
    for seed in range(3):
        answer = client.chat.completions.create(
            model=NAME, messages=MESSAGES, response_format={"type": "json_object"}, seed=seed, max_tokens=80
        )
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_response_format_of_a_completion(client):
    """As in vLLM's API."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": record(ok={"type": "boolean"})}}
    fields = {"model": NAME, "prompt": ["Return", "The"], "max_tokens": 40}
    for choice in client.completions.create(**fields, extra_body={"response_format": form}).choices:
        assert choice.finish_reason == "stop" and isinstance(json.loads(choice.text)["ok"], bool)
    text = client.completions.create(**fields, seed=1, extra_body={"response_format": {"type": "text"}}).choices[0].text
    assert text == client.completions.create(**fields, seed=1).choices[0].text


def test_keywords_of_no_draft_are_annotations(client):
    """As in JSON Schema. Libraries add their own, such as `min_items` and `x-order`."""
    schema = record(a=INTEGER | {"x-order": 1}) | {"min_items": 1, "models": {"not": {}}, "$anchor": "top"}
    for choice in ask(client, schema, n=2, seed=1, max_tokens=40).choices:
        assert isinstance(json.loads(choice.message.content)["a"], int)


@pytest.mark.parametrize("field", ["schema", "value"])
def test_json_object_with_a_schema(client, field):
    """As in the APIs of llama.cpp and Together, and as huggingface_hub sends it."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_object", field: schema}
    request = {"model": NAME, "messages": MESSAGES, "max_tokens": 80}
    answer = client.chat.completions.create(**request, response_format=form, seed=1)
    assert isinstance(json.loads(answer.choices[0].message.content)["ok"], bool)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**request, response_format=form | {field: {"not": {}}})
    assert caught.value.param == f"response_format.{field}"


def test_tokenizer_in_a_folder(tmp_path):
    """A program without a tokenizer, and the tokenizer in a folder, as in docs/own-decoder.md."""
    small_llm.tokenizer().save_pretrained(tmp_path)
    head = HeadConfig(allowed_tokens=True, logprobs=2)
    path = small_llm.export(tmp_path / "bare.pte", tokenizer=None, head=head)
    with served.serve(path, tokenizer=tmp_path) as running, openai.OpenAI(
        base_url=f"{running.url}/v1", api_key="none", max_retries=0
    ) as client:
        choice = ask(client, record(name=STRING), seed=3, max_tokens=60, logprobs=True, top_logprobs=2).choices[0]
        assert json.loads(choice.message.content).keys() == {"name"}
        assert "".join(entry.token for entry in choice.logprobs.content).startswith(choice.message.content)
        echo = client.completions.create(model=NAME, prompt="Return the", echo=True, logprobs=1, max_tokens=2)
        assert echo.choices[0].text.startswith("Return the") and len(echo.choices[0].logprobs.tokens) > 2
        fields = {"model": NAME, "prompt": "Return the", "return_token_strs": True, "add_special_tokens": False}
        assert "".join(httpx.post(f"{running.url}/tokenize", json=fields).json()["token_strs"]) == "Return the"


def test_stream_has_the_same_answer(client):
    schema = record(name=STRING)
    whole = ask(client, schema, seed=3, max_tokens=60).choices[0].message.content
    chunks = ask(client, schema, seed=3, max_tokens=60, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool | None = None


class Owner(BaseModel):
    """An owner of pets."""

    model_config = ConfigDict(extra="forbid")
    color: Color
    level: Level = Level.LOW
    favorite: Color | None = Field(None, title="Favorite", description="A color")
    code: Literal["a", 1, None]
    size: Literal["s", "m"] | None
    pet: Annotated[Cat | Dog, Field(discriminator="kind", description="A pet")]
    other: Cat | None = Field(None, description="Another pet")
    age: int | None = Field(None, ge=1, le=99)
    score: Annotated[float, Field(gt=0, lt=1)] | None = None
    pair: tuple[int, bool]
    places: dict[str, bool] = Field(default_factory=dict, min_length=1, max_length=2)
    counts: dict[Color, int]
    born: datetime.date
    tags: list[Literal["x"]] = Field(min_length=1, max_length=2)


class Link(BaseModel):
    value: Literal[True] = True
    next: Link | None = None


@pytest.mark.parametrize("model", [Owner, Link])
def test_answers_follow_schemas_of_pydantic(client, model):
    for choice in ask(client, model.model_json_schema(), n=4, seed=1, max_tokens=400).choices:
        assert choice.finish_reason == "stop", choice.message.content
        model.model_validate_json(choice.message.content)


@pytest.mark.parametrize("type", [HttpUrl, AnyUrl, pathlib.Path])
def test_addresses_and_paths_of_pydantic(client, type):
    adapter = TypeAdapter(type)
    (choice,) = ask(client, adapter.json_schema(), seed=1, max_tokens=60).choices
    assert choice.finish_reason == "stop" and adapter.validate_json(choice.message.content)


# As zod 4 writes them.
ZOD = [
    record(name={"type": "string", "enum": ["a", "b"]}, kind={"type": "string", "const": "k"})
    | {"$schema": "https://json-schema.org/draft/2020-12/schema"},
    record(count={"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991, "default": 3}),
    record(name=any_of({"type": "string", "maxLength": 3}, {"type": "null"}) | {"default": None, "description": "n"}),
    {
        "oneOf": [
            record(type={"type": "string", "const": "a"}, value={"type": "number"}),
            record(type={"type": "string", "const": "b"}, value={"type": "boolean"}),
        ],
        "description": "one of two",
    },
    {"type": "object", "propertyNames": {"type": "string", "enum": ["x", "y"]}, "additionalProperties": INTEGER},
    record(
        key=matching("^[0-9a-z]{4}$") | {"format": "cuid2"},
        born=matching(r"^[12]\d{3}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1\d|2[0-8])$") | {"format": "date"},
        start=matching("^ab.*") | {"format": "starts_with"},
    ),
    # With the target draft-07, as the AI SDK asks for.
    array_of([STRING, INTEGER], additionalItems=False, minItems=2, maxItems=2)
    | {"$schema": "http://json-schema.org/draft-07/schema#"},
]


@pytest.mark.parametrize(
    "schema",
    [
        *ZOD,
        {"type": "string", "enum": ["a", None, 1]},
        {"type": ["integer", "null"], "enum": [1.0, "1", True, None]},
        {"type": "integer", "minimum": 3, "exclusiveMaximum": 5, "enum": [1, 3, 5]},
        {"minLength": 2, "maxLength": 2, "enum": ["a", "ab", "abc", "日本", None]},
        {"const": 1.0, "enum": [1, 2]},
        {"type": "number", "anyOf": [{"type": "integer", "minimum": 5}, enum_of(1, 2.5)]},
        {"type": "object", "anyOf": [{"properties": {"a": INTEGER}}, {"required": ["b"]}]},
        {"type": "object", "anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": record(a=INTEGER)}},
        {"allOf": [{"properties": {"a": INTEGER}}, {"required": ["a"]}], "minProperties": 1},
        {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 12}]},
        {"allOf": [{"properties": {"a": INTEGER}}], "unevaluatedProperties": False},
        {"allOf": [{"format": "uri"}, {"pattern": "^a{2,3}$"}]},
        {"properties": {"a": INTEGER}, "required": ["a"], "additionalProperties": True, "minProperties": 2},
        {"minimum": 300, "maximum": 400},
        {"minLength": 2, "maxLength": 3, "minimum": 7, "maximum": 9},
        {"pattern": "^a{2,3}$"},
        {"format": "date"},
        {"format": "json-pointer"},
        record(
            id={"type": "integer", "format": "int32", "maximum": 9}, key={"type": "string", "format": "byte"},
            secret={"type": "string", "format": "password", "maxLength": 3}, on={"type": "boolean", "format": "flag"},
        ),
        {"pattern": r'^"\\?[a"]*$'},
        {"maxItems": 1},
        array_of({"type": "string", "minLength": 1.0, "maxLength": 2.0}, minItems=1.0, maxItems=2.0),
        {"additionalProperties": INTEGER, "minProperties": 1, "maxProperties": 2**32},
        {"propertyNames": {"pattern": "^a$"}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "items": [INTEGER], "additionalItems": {"const": "a"}},
        {"patternProperties": {"^a$": INTEGER}},
    ],
)  # fmt: skip
def test_keywords_beside_others_have_an_effect(client, schema):
    for choice in ask(client, schema, n=8, seed=2, max_tokens=100).choices:
        assert choice.finish_reason == "stop", choice.message.content
        jsonschema.validate(json.loads(choice.message.content), schema, format_checker=jsonschema.FormatChecker())


URI = {"type": "string", "format": "uri"}
EMAIL = matching(r"^([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$")  # that of zod


@pytest.mark.parametrize(
    "schema",
    [
        record(page=URI, mail=EMAIL, other={"type": "string", "format": "email"}),
        # Repetitions: of the symbols that end JSON, and ones that the end has to count.
        matching(r"^[,\]}0-9]+x$"),
        matching("^[a-z]*@[a-z]{12,}-(ab){3}$"),
    ],
    ids=["formats", "closing-symbols", "counted"],
)
def test_patterns_without_an_early_end_are_completed(client, schema):
    for choice in ask(client, schema, n=6, seed=5, max_tokens=60).choices:
        assert choice.finish_reason == "stop", choice.message.content
        jsonschema.validate(json.loads(choice.message.content), schema, format_checker=jsonschema.FormatChecker())


def test_model_chooses_near_the_limit(client):
    """As long as all values fit, `max_tokens` does not change which one is drawn. Then the shorter ones remain."""
    labels = enum_of("a", "bbbbbbbbbbbb")

    def answers(count: int) -> list[str]:
        return [ask(client, labels, seed=seed, max_tokens=count).choices[0].message.content for seed in range(12)]

    assert answers(16) == answers(200) and {*answers(16)} == {'"a"', '"bbbbbbbbbbbb"'}
    assert {*answers(6)} == {'"a"'}
    person = record(name=STRING, age=INTEGER, member={"type": "boolean"})
    for seed in range(4):  # the shortest form has 24 tokens
        choice = ask(client, person, seed=seed, max_tokens=29).choices[0]
        assert choice.finish_reason == "stop" and len(json.loads(choice.message.content)["name"]) > 2


@pytest.mark.parametrize(
    "schema",
    [
        array_of(record(**{f"value_{i}": INTEGER for i in range(6)})),
        {"properties": {"a": INTEGER, "b": array_of(INTEGER) | {"minItems": 20}}, "required": ["a"]},
    ],
    ids=["items", "optional"],
)
def test_what_lengthens_an_answer_begins_only_if_it_fits(client, schema):
    """Each of these parts has more tokens than those near the limit, where each token is checked."""
    for length in (50, 75, 100):
        for choice in ask(client, schema, n=12, seed=3, max_tokens=length).choices:
            assert choice.finish_reason == "stop", (length, choice.message.content)


def test_far_from_the_limit_no_end_is_searched(server):
    """A search can take a second, in which the engine draws no tokens. The ends that it finds have a limit."""
    import xgrammar
    from executorch_mlx.serve.grammar.end_finder import MAX_END
    from executorch_mlx.serve.grammar.token_budget import NEAR, TokenBudget
    from executorch_mlx.serve.model import ServedModel

    end_finder = ServedModel(server.llm, NAME).grammars.end_finder
    matcher = xgrammar.GrammarMatcher(end_finder.compile({"type": "const_string", "value": "yes"}))
    mask = numpy.full(small_llm.VOCABULARY // 32, -1, numpy.int32)
    assert TokenBudget(end_finder, matcher, False, growth=9).restrict(mask, 10_000) == 10_000 - MAX_END - NEAR - 9
    assert (mask == -1).all()


def test_strings_with_a_length_have_no_control_characters(client):
    text = {"type": "string", "minLength": 1, "maxLength": 90}
    for choice in ask(client, text, n=4, seed=1, max_tokens=100).choices:
        assert 0 < len(json.loads(choice.message.content)) <= 90


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, "$.properties.a: the keyword 'not' is not supported"),
        ({"type": "array", "uniqueItems": True}, "the keyword 'uniqueItems' is not supported"),
        ({"type": "string", "format": "color"}, "$.format: got 'color', expected one of date"),
        ({"type": "string", "pattern": "(?=a)b"}, "lookaround"),
        ({"type": "string", "pattern": r"a\b"}, r"$.pattern: the escape \b is not supported"),
        ({"type": "string", "pattern": "(a$|b)c"}, "$.pattern: $ in the middle is not supported"),
        ({"type": "string", "pattern": "a(?:^b)?"}, "$.pattern: ^ in the middle is not supported"),
        ({"type": "string", "pattern": "[b-a]"}, "$.pattern: the range b-a is empty"),
        ({"type": "string", "pattern": r"a[^\s\S]"}, "$.pattern: no character matches"),
        ({"type": "string", "pattern": r"[^]"}, "$.pattern: a class without characters is not supported"),
        ({"type": "string", "pattern": r"\ud83d"}, r"$.pattern: \ud83d is no character"),
        ({"type": "string", "pattern": "["}, "$.pattern: Regex parsing error at position 2: Unclosed '['"),
        ({"pattern": "("}, "$.pattern: Regex parsing error at position 2: The parenthesis is not closed"),
        ({"pattern": "(a?)" * 300}, "$.pattern: got 300 repetitions, expected at most 256"),
        ({"pattern": "a**"}, "$.pattern: Regex parsing error at position 3: Two consecutive repetition modifiers"),
        ({"patternProperties": {"a{2,1}": STRING}}, "$.patternProperties: EBNF parser error"),
        ({"type": "string", "minLength": -1}, "$.minLength: got '-1', expected an integer of at least 0"),
        ({"type": "array", "maxItems": 1.5}, "$.maxItems: got '1.5', expected an integer of at least 0"),
        ({"type": "number", "minimum": "a"}, "$.minimum: got 'a', expected a number"),
        (record(a={"type": "integer", "minimum": 3, "maximum": 2}), "$.properties.a: no integer of 64 bits lies"),
        ({"type": "integer", "minimum": 1e30}, "$: no integer of 64 bits lies within the bounds"),
        ({"exclusiveMinimum": 0, "maximum": 1e-7}, "$: no number with at most 6 decimals lies within the bounds"),
        ({"type": "thing"}, "$.type: got 'thing', expected array, boolean"),
        ({"type": []}, "$.type: got '[]', expected array, boolean"),
        ({"$ref": "http://example.org/a"}, "expected a reference within the schema"),
        ({"$ref": "#/$defs/a"}, "points to nothing"),
        ({"$ref": "#/models/a", "models": {"a": INTEGER}}, "'#/models/a' points to no schema, expected a place such as"),
        ({"$ref": "#"}, "the grammar admits no complete answer"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "$.oneOf: the schemas may overlap"),
        ({"type": "object", "required": ["b"], "additionalProperties": False}, "'b' is not in properties"),
        ({"properties": []}, "$.properties: got list, expected schemas by name"),
        ({"anyOf": []}, "$.anyOf: expected a list of schemas"),
        ({"enum": []}, "$.enum: expected a list of values"),
        ({"enum": "a"}, "$.enum: expected a list of values"),
        ({"type": "string", "const": 1}, "$.const: no value follows the other keywords"),
        ({"const": True, "enum": [1, 2]}, "$.const: no value follows the other keywords"),
        ({"type": "string", "pattern": "^a", "enum": ["a"]}, "$: enum together with 'pattern' is not supported"),
        (NAMES | any_of({"required": ["a"]}, {"required": ["b"]}), "$: anyOf together with 'properties'"),
        ({"allOf": [NAMES, any_of({"required": ["a"]})]}, "$: anyOf together with 'properties'"),
        (any_of(STRING, {"type": "null"}) | {"maxLength": 2}, "$: anyOf together with 'maxLength' is not supported"),
        (array_of(INTEGER) | any_of({"minItems": 1}), "$: anyOf together with 'items' is not supported"),
        ({"type": "string", "anyOf": [STRING, INTEGER]}, "$: anyOf together with 'type' is not supported"),
        ({"oneOf": [record(k={"const": 1}), record(k={"const": 2})], "required": ["b"]}, "$: oneOf together with"),
        ({"oneOf": [{"minimum": 3}, STRING]}, "$.oneOf: the schemas may overlap"),
        ({"oneOf": [{"$ref": "#/$defs/a"}] * 2, "$defs": {"a": INTEGER}}, "$.oneOf: the schemas may overlap"),
        ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "$.oneOf: the schemas may overlap"),
        ({"oneOf": [{"required": 5}, {"type": "object"}]}, "$.oneOf.0.required: expected a list of names"),
        ({"oneOf": [{"properties": 5, "required": ["a"]}, NAMES]}, "$.oneOf.0.properties: got int, expected schemas"),
        (
            {"items": {"oneOf": [{"$ref": "#/$defs/a"}, NAMES]}, "$defs": {"a": {"required": [[]]}}},
            "$.items.oneOf.0.required: expected a list of names",
        ),
        ({"type": "object", "additionalProperties": INTEGER, "minProperties": 2}, "$.minProperties: got 2, expected"),
        (NAMES | {"patternProperties": {"^a$": STRING}}, "$: patternProperties together with 'properties'"),
        (NAMES | {"propertyNames": {"maxLength": 1}}, "$: propertyNames together with 'properties'"),
        ({"propertyNames": {"maxItems": 1}}, "$.propertyNames: expected a schema with the type string"),
        ({"propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": 5}}, "$.$defs.a: got int, expected a schema"),
        ({"propertyNames": STRING, "additionalProperties": False}, "$: propertyNames together with 'additionalProp"),
        ({"patternProperties": {"^a": STRING, "a$": INTEGER}}, "$.patternProperties: got 2 patterns, expected one"),
        ({"allOf": [record(a=STRING), record(b=STRING)]}, "$.allOf: 'additionalProperties' beside 'properties'"),
        ({"allOf": [{"pattern": "^a"}, {"minLength": 2}]}, "$: lengths together with pattern or format"),
        ({"format": "date", "maxLength": 2}, "$: lengths together with pattern or format"),
        ({"format": "uri", "maxLength": 80}, "$: lengths together with pattern or format"),
        ({"allOf": [{"format": "uri"}, {"maxLength": 2083}]}, "$: lengths together with pattern or format"),
        ({"format": ["date"]}, "$.format: got list, expected a string"),
        ({"title": "x" * 70000, "const": "x" * 70000}, "expected at most 65536"),
    ],
)
def test_schema_that_answers_cannot_follow_returns_400(client, schema, message):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, schema)
    error = caught.value
    assert (
        message in error.message and error.param.startswith("response_format") and error.code == "invalid_json_schema"
    )


def test_model_without_masks_refuses_a_schema(batch_program):
    import served

    with served.serve(batch_program) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        with pytest.raises(openai.BadRequestError, match="was exported without allowed_tokens") as caught:
            ask(client, record(a=STRING))
        assert caught.value.param == "response_format"
        for name, rule in {"min_tokens": 1, "bad_words": ["a"], "allowed_token_ids": [5]}.items():
            message = f"{name}: .* was exported without allowed_tokens"
            with pytest.raises(openai.BadRequestError, match=message) as caught:
                client.completions.create(model=NAME, prompt="x", extra_body={name: rule})
            assert caught.value.param == name
