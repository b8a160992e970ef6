"""`SCHEMAS`, 50 JSON schemas from easy to hard, functions that make schemas, and a bias towards the end of JSON."""

import small_llm

# Logit biases that make a model of random weights end texts, objects, arrays and answers.
ENDING = dict.fromkeys([*small_llm.tokenizer().convert_tokens_to_ids(['"', "}", "]"]), small_llm.EOS], 6)

STRING, INTEGER, NUMBER, BOOLEAN = ({"type": name} for name in ("string", "integer", "number", "boolean"))


def record(**properties) -> dict:
    """The schema of an object with required properties and no others."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def array_of(items, **limits) -> dict:
    return {"type": "array", "items": items} | limits


def enum_of(*values) -> dict:
    return {"enum": list(values)}


def any_of(*schemas) -> dict:
    return {"anyOf": list(schemas)}


def matching(pattern: str) -> dict:
    return {"type": "string", "pattern": pattern}


ADDRESS = record(street=STRING, zip=matching("^[0-9]{5}$"), country=enum_of("NO", "SE", "DK"))
TREE = {"$defs": {"node": record(value=INTEGER, children=array_of({"$ref": "#/$defs/node"}))}, "$ref": "#/$defs/node"}
EXPRESSION = {
    "$defs": {
        "sum": record(kind={"const": "sum"}, left={"$ref": "#/$defs/any"}, right={"$ref": "#/$defs/any"}),
        "leaf": record(kind={"const": "leaf"}, value=NUMBER),
        "any": {"anyOf": [NUMBER, {"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/sum"}]},
    },
    "$ref": "#/$defs/any",
}
LINKED = {
    "$defs": {"list": record(head=STRING, tail=any_of({"$ref": "#/$defs/list"}, {"type": "null"}))},
    "$ref": "#/$defs/list",
}

SCHEMAS = [
    {"type": "null"},
    BOOLEAN,
    INTEGER,
    NUMBER,
    STRING,
    enum_of("red", "green", "blue"),
    {"const": {"fixed": [1, 2, None]}},
    enum_of(1, "two", None, 3.5, True),
    {"type": "integer", "minimum": 1, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": -100, "exclusiveMaximum": 1000},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "string", "minLength": 3, "maxLength": 8},
    matching("^.{2,5}$"),
    matching("^(GET|POST) /[a-z0-9/]{1,20}$"),
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "email"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": ["string", "null"]},
    any_of(INTEGER, STRING),
    array_of(INTEGER),
    array_of(STRING, minItems=1, maxItems=3),
    array_of(enum_of("a", "b"), minItems=4, maxItems=4),
    array_of(array_of(NUMBER, minItems=2, maxItems=2), maxItems=3),
    {"type": "array", "prefixItems": [STRING, INTEGER], "items": False, "minItems": 2},
    {"type": "object"},
    record(name=STRING),
    record(name=STRING, age=INTEGER, member=BOOLEAN),
    {"type": "object", "properties": {"a": INTEGER, "b": STRING}},
    {"type": "object", "properties": {"a": INTEGER, "b": STRING}, "required": ["b"]},
    {"type": "object", "additionalProperties": INTEGER},
    {"type": "object", "properties": {"id": INTEGER}, "required": ["id"], "additionalProperties": STRING},
    {"type": "object", "properties": {"id": INTEGER}, "required": ["id", "other"]},
    {"type": "object", "patternProperties": {"^x_[a-z]+$": BOOLEAN}, "additionalProperties": False},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,3}$"}, "maxProperties": 2},
    record(place=ADDRESS),
    record(people=array_of(record(name=STRING, home=ADDRESS), maxItems=2)),
    record(status=enum_of("ok", "failed"), error=any_of(STRING, {"type": "null"})),
    any_of(record(kind={"const": "circle"}, radius=NUMBER), record(kind={"const": "square"}, side=NUMBER)),
    {"oneOf": [record(kind={"const": "cat"}, lives=INTEGER), record(kind={"const": "dog"}, good=BOOLEAN)]},
    {"allOf": [record(a=INTEGER)]},
    {
        "$defs": {"id": {"type": "integer", "minimum": 0}},
        **record(id={"$ref": "#/$defs/id"}, other={"$ref": "#/$defs/id"}),
    },
    record(matrix=array_of(array_of(INTEGER, minItems=3, maxItems=3), minItems=3, maxItems=3)),
    record(
        when={"type": "string", "format": "date"},
        tags=array_of(matching("^[a-z]+$"), minItems=1, maxItems=4),
        note=STRING,
    ),
    record(**{"key with spaces": STRING, 'quote"': INTEGER, "ünïcode": enum_of("å", "日本")}),
    record(**{f"field{i}": any_of(INTEGER, BOOLEAN, array_of(STRING, maxItems=1)) for i in range(12)}),
    LINKED,
    TREE,
    EXPRESSION,
]
assert len(SCHEMAS) == 50
