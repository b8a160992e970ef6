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
import openai
import pytest
import served
import small_llm
from executorch_mlx.llm.export import HeadConfig
from json_schemas import ENDING, INTEGER, SCHEMAS, STRING, any_of, array_of, enum_of, matching, record
from pydantic import AnyUrl, BaseModel, ConfigDict, Field, TypeAdapter
from served import NAME

pytest.importorskip("llguidance")
MESSAGES = [{"role": "user", "content": "Return"}]
NAMES = {"type": "object", "properties": {"a": STRING, "b": STRING}}


def ask(client, schema, **fields):
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    fields = {"model": NAME, "messages": MESSAGES, "temperature": 1, "response_format": response_format} | fields
    return client.chat.completions.create(**{"logit_bias": ENDING} | fields)


def check(choices, schema) -> int:
    """Check the answers that have come to their end, and return their number."""
    ended = [json.loads(choice.message.content) for choice in choices if choice.finish_reason == "stop"]
    for value in ended:
        jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
    return len(ended)


def test_answers_follow_their_schema(client):
    answers = 20 if os.environ.get("LONG") else 1
    checked = sum(
        check(ask(client, schema, n=answers, seed=number, max_tokens=200).choices, schema)
        for number, schema in enumerate(SCHEMAS)
    )
    assert checked > 40 * answers


def test_answer_at_the_limit_is_cut_off(client):
    (choice,) = ask(client, {"type": "string", "minLength": 90}, max_tokens=8).choices
    assert choice.finish_reason == "length" and choice.message.content.startswith('"')


def test_json_object(client):
    for seed in range(3):
        answer = client.chat.completions.create(
            model=NAME,
            messages=MESSAGES,
            response_format={"type": "json_object"},
            seed=seed,
            max_tokens=80,
            logit_bias=ENDING,
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
    assert check(ask(client, schema, n=4, seed=1, max_tokens=100).choices, schema)


@pytest.mark.parametrize("field", ["schema", "value"])
def test_json_object_with_a_schema(client, field):
    """As in the APIs of llama.cpp and Together, and as huggingface_hub sends it."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_object", field: schema}
    request = {"model": NAME, "messages": MESSAGES, "max_tokens": 80, "logit_bias": ENDING}
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
    with (
        served.serve(path, tokenizer=tmp_path) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        options = {"logprobs": True, "top_logprobs": 2, "logit_bias": {}}
        choice = ask(client, record(name=STRING | {"maxLength": 9}), seed=3, max_tokens=60, **options).choices[0]
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
    choices = ask(client, model.model_json_schema(), n=6, seed=1, max_tokens=400).choices
    ended = [choice.message.content for choice in choices if choice.finish_reason == "stop"]
    assert ended and all(model.model_validate_json(text) for text in ended)


@pytest.mark.parametrize("type", [AnyUrl, pathlib.Path])
def test_addresses_and_paths_of_pydantic(client, type):
    adapter = TypeAdapter(type)
    choices = ask(client, adapter.json_schema(), seed=1, n=6, max_tokens=120).choices
    ended = [choice.message.content for choice in choices if choice.finish_reason == "stop"]
    assert ended and all(adapter.validate_json(text) for text in ended)


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
        {"allOf": [{"format": "uri"}, {"pattern": "^a{2,3}$"}]},
        {"properties": {"a": INTEGER}, "required": ["a"], "additionalProperties": True, "minProperties": 2},
        {"oneOf": [record(k={"const": 1}), {"$ref": "#/$defs/b"}], "$defs": {"b": record(k={"const": 2})}},
        {"type": "string", "pattern": "^a", "enum": ["a", "b"]},
        NAMES | any_of({"required": ["a"]}, {"required": ["b"]}),
        any_of(STRING, {"type": "null"}) | {"maxLength": 2},
        array_of(INTEGER) | any_of({"minItems": 1}),
        NAMES | {"patternProperties": {"^c$": INTEGER}},
        {"allOf": [{"pattern": "^a"}, {"minLength": 2}]},
        {"type": "integer", "multipleOf": 7},
        {"type": "string", "format": "date", "maxLength": 10},
        {"minimum": 300, "maximum": 400},
        {"minLength": 2, "maxLength": 3, "minimum": 7, "maximum": 9},
        {"pattern": "^a{2,3}$"},
        {"format": "date"},
        record(
            id={"type": "integer", "format": "int32", "maximum": 9},
            key={"type": "string", "format": "byte"},
            secret={"type": "string", "format": "password", "maxLength": 3},
            on={"type": "boolean", "format": "flag"},
        ),
        {"pattern": r'^"\\?[a"]*$'},
        {"maxItems": 1},
        array_of({"type": "string", "minLength": 1.0, "maxLength": 2.0}, minItems=1.0, maxItems=2.0),
        {"additionalProperties": INTEGER, "minProperties": 1, "maxProperties": 2**32},
        {"propertyNames": {"pattern": "^a$"}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "items": [INTEGER], "additionalItems": {"const": "a"}},
        {"patternProperties": {"^a$": INTEGER}},
    ],
)
def test_keywords_beside_others_have_an_effect(client, schema):
    assert check(ask(client, schema, n=8, seed=2, max_tokens=100).choices, schema)


def test_strings_with_a_length_have_no_control_characters(client):
    text = {"type": "string", "minLength": 1, "maxLength": 90}
    assert check(ask(client, text, n=4, seed=1, max_tokens=100).choices, text)


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, 'Unimplemented keys: ["not"]'),
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"if": {}, "then": {"const": 1}}, 'Unimplemented keys: ["if", "then"]'),
        ({"type": "string", "format": "color"}, "Unknown format: color"),
        ({"format": "json-pointer"}, "Unknown format: json-pointer"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": r"a\b"}, "lookarounds not supported"),
        ({"type": "string", "pattern": "["}, "unclosed character class"),
        ({"type": "string", "minLength": -1}, "Expected positive integer for 'minLength', got -1"),
        ({"type": "array", "maxItems": 1.5}, "Expected positive integer for 'maxItems', got 1.5"),
        ({"type": "number", "minimum": "a"}, "Expected f64 for 'minimum'"),
        (record(a={"type": "integer", "minimum": 3, "maximum": 2}), "required property 'a' is unsatisfiable"),
        ({"type": "thing"}, "Invalid type: thing"),
        ({"$ref": "http://example.org/a"}, "'http://example.org/a' is not present"),
        ({"$ref": "#/$defs/a"}, "Pointer '/$defs/a' does not exist"),
        ({"$ref": "#"}, "the grammar admits no answer"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf constraints are not supported"),
        ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "oneOf constraints are not supported"),
        (
            {"type": "object", "required": ["b"], "additionalProperties": False},
            "required property 'b' is unsatisfiable",
        ),
        ({"properties": []}, "properties must be an object"),
        ({"anyOf": []}, "anyOf is empty"),
        ({"enum": "a"}, "enum must be an array"),
        ({"type": "string", "const": 1}, "incompatible types"),
        ({"type": "object", "additionalProperties": INTEGER, "minProperties": 2}, "$.minProperties: got 2, expected"),
        (NAMES | {"propertyNames": {"maxLength": 1}}, 'Unimplemented keys: ["propertyNames"]'),
        ({"patternProperties": {"^a": STRING, "a$": INTEGER}}, "are not disjoint"),
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
