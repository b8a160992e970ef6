"""50 JSON schemas of growing difficulty, in the order of `SCHEMAS`."""

STRING, INTEGER, NUMBER, BOOLEAN = ({"type": name} for name in ("string", "integer", "number", "boolean"))


def thing(**properties) -> dict:
    """An object with required properties and no others."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def some(items, **limits) -> dict:
    return {"type": "array", "items": items} | limits


def choice(*values) -> dict:
    return {"enum": list(values)}


def either(*schemas) -> dict:
    return {"anyOf": list(schemas)}


def text(pattern: str) -> dict:
    return {"type": "string", "pattern": pattern}


ADDRESS = thing(street=STRING, zip=text("^[0-9]{5}$"), country=choice("NO", "SE", "DK"))
TREE = {"$defs": {"node": thing(value=INTEGER, children=some({"$ref": "#/$defs/node"}))}, "$ref": "#/$defs/node"}
EXPRESSION = {
    "$defs": {
        "sum": thing(kind={"const": "sum"}, left={"$ref": "#/$defs/any"}, right={"$ref": "#/$defs/any"}),
        "leaf": thing(kind={"const": "leaf"}, value=NUMBER),
        "any": {"anyOf": [NUMBER, {"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/sum"}]},
    },
    "$ref": "#/$defs/any",
}
LINKED = {
    "$defs": {"list": thing(head=STRING, tail=either({"$ref": "#/$defs/list"}, {"type": "null"}))},
    "$ref": "#/$defs/list",
}

SCHEMAS = [
    {"type": "null"},
    BOOLEAN,
    INTEGER,
    NUMBER,
    STRING,
    choice("red", "green", "blue"),
    {"const": {"fixed": [1, 2, None]}},
    choice(1, "two", None, 3.5, True),
    {"type": "integer", "minimum": 1, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": -100, "exclusiveMaximum": 1000},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "string", "minLength": 3, "maxLength": 8},
    text("^.{2,5}$"),
    text("^(GET|POST) /[a-z0-9/]{1,20}$"),
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "email"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": ["string", "null"]},
    either(INTEGER, STRING),
    some(INTEGER),
    some(STRING, minItems=1, maxItems=3),
    some(choice("a", "b"), minItems=4, maxItems=4),
    some(some(NUMBER, minItems=2, maxItems=2), maxItems=3),
    {"type": "array", "prefixItems": [STRING, INTEGER], "items": False, "minItems": 2},
    {"type": "object"},
    thing(name=STRING),
    thing(name=STRING, age=INTEGER, member=BOOLEAN),
    {"type": "object", "properties": {"a": INTEGER, "b": STRING}},
    {"type": "object", "properties": {"a": INTEGER, "b": STRING}, "required": ["b"]},
    {"type": "object", "additionalProperties": INTEGER},
    {"type": "object", "properties": {"id": INTEGER}, "required": ["id"], "additionalProperties": STRING},
    {"type": "object", "properties": {"id": INTEGER}, "required": ["id", "other"]},
    {"type": "object", "patternProperties": {"^x_[a-z]+$": BOOLEAN}, "additionalProperties": False},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,3}$"}, "maxProperties": 2},
    thing(place=ADDRESS),
    thing(people=some(thing(name=STRING, home=ADDRESS), maxItems=2)),
    thing(status=choice("ok", "failed"), error=either(STRING, {"type": "null"})),
    either(thing(kind={"const": "circle"}, radius=NUMBER), thing(kind={"const": "square"}, side=NUMBER)),
    {"oneOf": [thing(kind={"const": "cat"}, lives=INTEGER), thing(kind={"const": "dog"}, good=BOOLEAN)]},
    {"allOf": [thing(a=INTEGER)]},
    {
        "$defs": {"id": {"type": "integer", "minimum": 0}},
        **thing(id={"$ref": "#/$defs/id"}, other={"$ref": "#/$defs/id"}),
    },
    thing(matrix=some(some(INTEGER, minItems=3, maxItems=3), minItems=3, maxItems=3)),
    thing(when={"type": "string", "format": "date"}, tags=some(text("^[a-z]+$"), minItems=1, maxItems=4), note=STRING),
    thing(**{"key with spaces": STRING, 'quote"': INTEGER, "ünïcode": choice("å", "日本")}),
    thing(**{f"field{i}": either(INTEGER, BOOLEAN, some(STRING, maxItems=1)) for i in range(12)}),
    LINKED,
    TREE,
    EXPRESSION,
]
assert len(SCHEMAS) == 50
