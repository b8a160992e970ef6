"""Which JSON schemas xgrammar follows exactly. It ignores some keywords, so answers would not follow the schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MAX_DEPTH = 64
# Keywords with a schema, with a list of schemas, and with schemas by name.
ONE = ("items", "additionalProperties", "additionalItems", "propertyNames", "unevaluatedProperties", "unevaluatedItems")
MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED = ("properties", "patternProperties", "$defs", "definitions")
# Keywords without an effect on what is valid.
NOTES = {
    "$schema", "$id", "$comment", "title", "description", "default", "examples", "example", "deprecated", "readOnly",
    "writeOnly", "discriminator", "contentMediaType", "contentEncoding", "nullable", "strict",
}  # fmt: skip
FOLLOWED = {
    *ONE, *MANY, *NAMED, "type", "enum", "const", "$ref", "required", "minProperties", "maxProperties", "minItems",
    "maxItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum",
}  # fmt: skip
COUNTS = {"minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength"}
FORMATS = {
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer",
}  # fmt: skip


_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_DAY = "(0[1-9]|1[0-9]|2[0-8])"
_DATE = f"[1-9][0-9]{{3}}-((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
# Formats for which xgrammar also admits other texts.
PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "email": r"^[a-z0-9_+-]{1,32}(\.[a-z0-9_+-]{1,16}){0,2}@([a-z0-9]{1,16}\.){1,3}[a-z]{2,6}$",
    "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$",
}


class SchemaError(ValueError):
    """Raised for a schema that is invalid, or that answers could not be made to follow."""


def check_schema(schema: Any) -> Any:
    """Return a schema in the form that xgrammar follows. Raises SchemaError, which names the place and the keyword."""
    return _checked(schema, schema, "$", 0)


def _checked(schema: Any, root: Any, path: str, depth: int) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise SchemaError(f"{path}: got {type(schema).__name__}, expected a schema")
    if depth > MAX_DEPTH:
        raise SchemaError(f"{path}: nested too deeply: expected at most {MAX_DEPTH} levels")
    _check_keywords(schema, root, path)
    checked = _mapped(schema, path, lambda part, place: _checked(part, root, f"{path}.{place}", depth + 1))
    return _with_required_properties(_merged(checked, path), path)


def _mapped(schema: dict[str, Any], path: str, change: Callable[[Any, str], Any]) -> dict[str, Any]:
    """Return a schema without notes, in which `change(part, place)` replaces each part."""
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ONE:
            result[key] = change(value, key)
        elif key in MANY:
            if not isinstance(value, list) or not value:
                raise SchemaError(f"{path}.{key}: expected a list of schemas")
            result[key] = [change(part, f"{key}.{index}") for index, part in enumerate(value)]
        elif key in NAMED:
            if not isinstance(value, dict):
                raise SchemaError(f"{path}.{key}: got {type(value).__name__}, expected schemas by name")
            result[key] = {name: change(part, f"{key}.{name}") for name, part in value.items()}
        elif key == "format" and value in PATTERNS:
            result["pattern"] = PATTERNS[value]
        elif key not in NOTES:
            result[key] = value
    return result


def _check_keywords(schema: dict[str, Any], root: Any, path: str) -> None:
    for key, value in schema.items():
        if key in NOTES or key in FOLLOWED or key == "uniqueItems" and value is False:
            continue
        raise SchemaError(f"{path}: the keyword {key!r} is not supported")
    if "format" in schema and (not isinstance(schema["format"], str) or schema["format"] not in FORMATS):
        raise SchemaError(f"{path}.format: got {schema['format']!r}, expected one of {', '.join(sorted(FORMATS))}")
    for key in COUNTS & schema.keys():
        if not isinstance(schema[key], int) or isinstance(schema[key], bool) or schema[key] < 0:
            raise SchemaError(f"{path}.{key}: got {str(schema[key])[:40]!r}, expected an integer of at least 0")
    pattern = schema.get("pattern", "")
    if not isinstance(pattern, str):
        raise SchemaError(f"{path}.pattern: got {type(pattern).__name__}, expected a string")
    if any(token in pattern for token in ("(?=", "(?!", "(?<", "\\b", "\\B")):
        raise SchemaError(f"{path}.pattern: lookaround and word boundaries are not supported")
    if len({"pattern", "format"} & schema.keys()) + bool({"minLength", "maxLength"} & schema.keys()) > 1:
        raise SchemaError(f"{path}: pattern, format and lengths together are not supported")
    reference = schema.get("$ref")
    if reference is not None:
        _resolve(reference, root, path)
        if others := schema.keys() - NOTES - {"$ref", "$defs", "definitions"}:
            raise SchemaError(f"{path}: $ref together with {min(others)!r} is not supported")
    if "oneOf" in schema and not _are_disjoint([_followed(part, root) for part in schema["oneOf"]]):
        raise SchemaError(f"{path}.oneOf: the schemas may overlap; use anyOf, or a required constant that differs")


def _resolve(reference: Any, root: Any, path: str) -> Any:
    """The schema to which a `$ref` points."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise SchemaError(f"{path}.$ref: got {str(reference)[:80]!r}, expected a reference within the schema")
    value = root
    for name in reference.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(value, dict) or name not in value:
            raise SchemaError(f"{path}.$ref: {reference!r} points to nothing")
        value = value[name]
    return value


def _followed(schema: Any, root: Any) -> Any:
    """The schema behind references; {} if they go round in a circle."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        schema = _resolve(schema["$ref"], root, "$")
    return {}


def _are_disjoint(schemas: Any) -> bool:
    """Whether no value can match two of the schemas: by their types, or by a required property with a constant."""
    if not isinstance(schemas, list) or not all(isinstance(schema, dict) for schema in schemas):
        return False
    types = [schema.get("type") for schema in schemas]
    if all(isinstance(t, str) for t in types):
        known = ["number" if t == "integer" else t for t in types]
        if len({*known}) == len(known):
            return True
    if _differ([_constants(schema) for schema in schemas]):
        return True
    common = set.intersection(*({*schema.get("required", ())} for schema in schemas)) if schemas else set()
    return any(_differ([_constants(schema.get("properties", {}).get(name)) for schema in schemas]) for name in common)


def _constants(schema: Any) -> set[str] | None:
    """The values of an enum or const, in a form to compare, or None for other schemas."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return {repr(schema["const"])}
    return {*map(repr, schema["enum"])} if isinstance(schema.get("enum"), list) else None


def _differ(values: list[set[str] | None]) -> bool:
    return None not in values and sum(map(len, values)) == len(set.union(*values))


def _with_required_properties(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """Declare the properties that are required and not declared: xgrammar would leave them out."""
    names = schema.get("required", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SchemaError(f"{path}.required: expected a list of names")
    declared, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    if missing := [name for name in names if name not in declared]:
        if others is False or "patternProperties" in schema:
            raise SchemaError(f"{path}.required: {missing[0]!r} is not in properties")
        schema = schema | {"properties": {**declared, **dict.fromkeys(missing, others)}}
    return schema


def _merged(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """Replace `allOf`: xgrammar follows it only if it has one schema."""
    if "allOf" not in schema:
        return schema
    rest = {key: value for key, value in schema.items() if key != "allOf"}
    for part in schema["allOf"]:
        if not isinstance(part, dict):
            raise SchemaError(f"{path}.allOf: got {part}, expected objects")
        for key, value in part.items():
            if key in ("properties", "$defs", "definitions") and not rest.get(key, {}).keys() & value.keys():
                rest[key] = {**rest.get(key, {}), **value}
            elif key == "required":
                rest[key] = [*dict.fromkeys([*rest.get(key, []), *value])]
            elif key in NOTES or key not in rest or rest[key] == value:
                rest.setdefault(key, value)
            else:
                raise SchemaError(f"{path}.allOf: two schemas with {key!r} are not supported")
    if "$ref" in rest and rest.keys() - NOTES - {"$ref", "$defs", "definitions"}:
        raise SchemaError(f"{path}.allOf: $ref together with other keywords is not supported")
    return rest
