"""Answers of the form that `structured_outputs` sets, the field of vLLM's API."""

import json
import re

import jsonschema
import openai
import pytest
from json_schemas import ENDING, INTEGER, STRING, record
from served import NAME

pytest.importorskip("llguidance")
CITY = record(name=STRING | {"maxLength": 5}, size=INTEGER | {"minimum": 0, "maximum": 99})
EXPRESSION = r"""
root ::= sum # comments may name Token(5)
sum ::= number | number "+" sum
number ::= [\x30-\x39]{1,3} | "(\x2b" number ")"
"""


def texts(client, *, count=6, chat, **form):
    """Return answers of the form in `/v1/chat/completions` or `/v1/completions`. All have come to their end."""
    options = {"model": NAME, "n": count, "seed": 1, "max_tokens": 200, "extra_body": {"structured_outputs": form}}
    if "json" in form or "json_object" in form:
        options["logit_bias"] = ENDING
    if chat:
        choices = client.chat.completions.create(messages=[{"role": "user", "content": "Return"}], **options).choices
    else:
        choices = client.completions.create(prompt="Return", **options).choices
    assert {choice.finish_reason for choice in choices} == {"stop"}
    return [choice.message.content if chat else choice.text for choice in choices]


def text_of(client, chat, field, form):
    """Return an answer whose form a field of the request sets."""
    options = {"model": NAME, "seed": 1, "max_tokens": 60, "extra_body": {field: form}, "logit_bias": ENDING}
    if not chat:
        return client.completions.create(prompt="Return", **options).choices[0].text
    answer = client.chat.completions.create(messages=[{"role": "user", "content": "Return"}], **options)
    return answer.choices[0].message.content


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
@pytest.mark.parametrize(
    "form, pattern",
    [
        ({"choice": ["yes", "no", "maybe not", "日本"]}, "yes|no|maybe not|日本"),
        ({"choice": ["a"]}, "a"),
        ({"choice": ["", "a", "a"]}, "a?"),
        ({"regex": r"^\d{3}-(ab+)?[^\n\"]{2}\"\\\.$"}, r"\d{3}-(ab+)?[^\n\"]{2}\"\\\."),
        ({"regex": "é?.😀"}, "é?.😀"),
        ({"grammar": 'start: "a" ITEM{1,2}\nITEM: /[0-9]/ | "x"'}, r"a[0-9x]{1,2}"),
        ({"grammar": EXPRESSION}, r"(\d{1,3}|(\(\+)+\d{1,3}\)+)(\+(\d{1,3}|(\(\+)+\d{1,3}\)+))*"),
    ],
)
def test_answers_have_their_form(client, chat, form, pattern):
    found = texts(client, chat=chat, **form)
    assert all(re.fullmatch(pattern, text) for text in found), found
    assert len({*found}) > 1 or "a" in form.get("choice", ())


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
def test_json(client, chat):
    for schema in (CITY, json.dumps(CITY)):
        for text in texts(client, chat=chat, json=schema, disable_any_whitespace=True):
            jsonschema.validate(json.loads(text), CITY)
    assert all(isinstance(json.loads(text), dict) for text in texts(client, chat=chat, json_object=True))


def test_older_names_of_the_forms(client):
    guided = {"guided_choice": ["yes", "no"], "guided_regex": "[ab]{3}", "guided_grammar": 'root ::= "x" | "yy"'}
    for field, pattern in zip(guided, ("yes|no", "[ab]{3}", "x|yy")):
        for chat in (True, False):
            assert re.fullmatch(pattern, text_of(client, chat, field, guided[field]))
    for schema in (CITY, json.dumps(CITY)):
        jsonschema.validate(json.loads(text_of(client, True, "guided_json", schema)), CITY)


def test_answers_may_be_calls_instead(client):
    """As with response_format."""
    tool = {"type": "function", "function": {"name": "f", "parameters": record(a=INTEGER)}}
    answer = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "x"}],
        tools=[tool],
        n=16,
        seed=2,
        max_tokens=60,
        extra_body={"structured_outputs": {"choice": ["yes", "<tool"]}},
    )
    calls = [choice.message.tool_calls for choice in answer.choices]
    assert {choice.message.content for choice in answer.choices if not choice.message.tool_calls} <= {"yes", "<tool"}
    assert any(calls) and not all(calls)
    for (call,) in filter(None, calls):
        jsonschema.validate(json.loads(call.function.arguments), record(a=INTEGER))


@pytest.mark.parametrize(
    "form, param, message",
    [
        ({}, "structured_outputs", "got none, expected one of json, json_object, regex, choice and grammar"),
        ({"json_object": False}, "structured_outputs", "got none, expected one of"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs", "got regex, choice, expected one of"),
        ({"structural_tag": "{}"}, "structured_outputs.structural_tag", 'got "{}", expected null'),
        ({"choice": []}, "structured_outputs.choice", "got 0 items, expected at least 1"),
        ({"choice": ["x" * 1000] * 70}, "structured_outputs.choice", "got 70000 characters, expected at most 65536"),
        ({"choice": [1]}, "structured_outputs.choice.0", "valid string"),
        ({"regex": "("}, "structured_outputs.regex", "unclosed group"),
        ({"regex": "(?=a)"}, "structured_outputs.regex", "look-around"),
        ({"grammar": "sum"}, "structured_outputs.grammar", "Expected ::= at line 1"),
        ({"grammar": 'a ::= "b"'}, "structured_outputs.grammar", "No 'root' rule found, expected GBNF"),
        ({"grammar": "root ::= root"}, "structured_outputs.grammar", "the grammar admits no answer"),
        ({"grammar": 'root ::= "a" Token (5)'}, "structured_outputs.grammar", "Rule 'Token' not found"),
        ({"grammar": "root ::= " + "(" * 20000}, "structured_outputs.grammar", "nested too deeply"),
        ({"grammar": r'root ::= "\ud800"'}, "structured_outputs.grammar", r"\ud800 is no character"),
        ({"grammar": "start: a"}, "structured_outputs.grammar", "structured_outputs.grammar: "),
        ({"grammar": "#" * 70000}, "structured_outputs.grammar", "got 70000 characters, expected at most 65536"),
        ({"json": "{"}, "structured_outputs.json", "structured_outputs.json: the text is not valid JSON"),
        ({"json": '{"const": NaN}'}, "structured_outputs.json", "const: expected a finite number"),
        ({"json": r'{"const": "\ud800"}'}, "structured_outputs.json", "lone surrogate"),
        ({"json": "[" * 5000}, "structured_outputs.json", "nested too deeply"),
        ({"json": "[]"}, "structured_outputs.json", "got a list, expected an object"),
        ({"json": {"type": "thing"}}, "structured_outputs.json", "Invalid type: thing"),
    ],
)
def test_wrong_form_returns_400(client, form, param, message):
    with pytest.raises(openai.BadRequestError) as caught:
        texts(client, chat=False, **form)
    assert message in caught.value.message and caught.value.param == param


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"ignore_eos": True}, "structured_outputs"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": None, "guided_json": {"type": "thing"}}, "guided_json"),
    ],
)
def test_form_beside_fields_that_contradict_it_returns_400(client, fields, param):
    body = {"structured_outputs": {"regex": "a"}} | fields
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x"}], extra_body=body)
    assert caught.value.param == param
