"""Answers that follow a JSON schema. `LONG=1 pytest` asks for 20 answers to each of 50 schemas."""

import json
import os

import jsonschema
import openai
import pytest
from json_schemas import SCHEMAS, STRING, record
from served import NAME

pytest.importorskip("xgrammar")
MESSAGES = [{"role": "user", "content": "Return"}]


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


def test_stream_has_the_same_answer(client):
    schema = record(name=STRING)
    whole = ask(client, schema, seed=3, max_tokens=60).choices[0].message.content
    chunks = ask(client, schema, seed=3, max_tokens=60, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, "$.properties.a: the keyword 'not' is not supported"),
        ({"type": "array", "uniqueItems": True}, "the keyword 'uniqueItems' is not supported"),
        ({"type": "string", "format": "color"}, "$.format: got 'color', expected one of date"),
        ({"type": "string", "pattern": "(?=a)b"}, "lookaround"),
        ({"type": "string", "pattern": "["}, "Unclosed"),
        ({"type": "string", "minLength": -1}, "$.minLength: got '-1', expected an integer of at least 0"),
        ({"type": "number", "minimum": "a"}, ""),
        ({"type": "thing"}, "Unsupported type"),
        ({"$ref": "http://example.org/a"}, "expected a reference within the schema"),
        ({"$ref": "#/$defs/a"}, "points to nothing"),
        ({"$ref": "#"}, "the grammar admits no complete answer"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "$.oneOf: the schemas may overlap"),
        ({"type": "object", "required": ["b"], "additionalProperties": False}, "'b' is not in properties"),
        ({"properties": []}, "$.properties: got list, expected schemas by name"),
        ({"anyOf": []}, "$.anyOf: expected a list of schemas"),
        ({"enum": []}, "must not be empty"),
        ({"enum": "a"}, ""),
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
