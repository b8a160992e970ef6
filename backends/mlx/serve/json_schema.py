"""Checks JSON schemas, and rewrites them to a form that xgrammar follows exactly.

xgrammar ignores some keywords. An answer could then violate the schema, so schemas with these keywords are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MAX_DEPTH = 64
# Keywords whose value is a schema, a list of schemas, and a dict of schemas by name.
WITH_SCHEMA = (
    "items", "additionalProperties", "additionalItems", "propertyNames", "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
WITH_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
WITH_NAMES = ("properties", "patternProperties", "$defs", "definitions")
# Keywords without an effect on which values are valid.
ANNOTATIONS = {
    "$schema", "$id", "$comment", "title", "description", "default", "examples", "example", "deprecated", "readOnly",
    "writeOnly", "discriminator", "contentMediaType", "contentEncoding", "nullable", "strict",
}  # fmt: skip
# All other keywords that are accepted.
SUPPORTED = {
    *WITH_SCHEMA, *WITH_LIST, *WITH_NAMES, "type", "enum", "const", "$ref", "required", "minProperties",
    "maxProperties", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum",
}  # fmt: skip
# Keywords whose value is a count.
COUNT_KEYWORDS = {"minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength"}
# The accepted values of the keyword `format`.
FORMATS = {
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer",
}  # fmt: skip


_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_DAY = "(0[1-9]|1[0-9]|2[0-8])"
_DATE = f"[1-9][0-9]{{3}}-((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
# Formats for which xgrammar also admits invalid texts, with the patterns that replace these formats.
FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "email": r"^[a-z0-9_+-]{1,32}(\.[a-z0-9_+-]{1,16}){0,2}@([a-z0-9]{1,16}\.){1,3}[a-z]{2,6}$",
    "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$",
}


class SchemaError(ValueError):
    """Raised for a schema that is invalid, or that xgrammar does not follow exactly."""


def check_schema(schema: Any) -> Any:
    """Return `schema` in a form that xgrammar follows. Raises SchemaError, which names the place and the keyword."""
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
    """Return a schema without annotations, in which `change(part, place)` replaces each schema that it contains.

    Formats with an entry in FORMAT_PATTERNS become patterns.
    """
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in WITH_SCHEMA:
            result[key] = change(value, key)
        elif key in WITH_LIST:
            if not isinstance(value, list) or not value:
                raise SchemaError(f"{path}.{key}: expected a list of schemas")
            result[key] = [change(part, f"{key}.{index}") for index, part in enumerate(value)]
        elif key in WITH_NAMES:
            if not isinstance(value, dict):
                raise SchemaError(f"{path}.{key}: got {type(value).__name__}, expected schemas by name")
            result[key] = {name: change(part, f"{key}.{name}") for name, part in value.items()}
        elif key == "format" and value in FORMAT_PATTERNS:
            result["pattern"] = FORMAT_PATTERNS[value]
        elif key not in ANNOTATIONS:
            result[key] = value
    return result


def _check_keywords(schema: dict[str, Any], root: Any, path: str) -> None:
    for key, value in schema.items():
        if key in ANNOTATIONS or key in SUPPORTED or key == "uniqueItems" and value is False:
            continue
        raise SchemaError(f"{path}: the keyword {key!r} is not supported")
    if "format" in schema and (not isinstance(schema["format"], str) or schema["format"] not in FORMATS):
        raise SchemaError(f"{path}.format: got {schema['format']!r}, expected one of {', '.join(sorted(FORMATS))}")
    for key in COUNT_KEYWORDS & schema.keys():
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
        if others := schema.keys() - ANNOTATIONS - {"$ref", "$defs", "definitions"}:
            raise SchemaError(f"{path}: $ref together with {min(others)!r} is not supported")
    if "oneOf" in schema and not _are_disjoint([_dereferenced(part, root) for part in schema["oneOf"]]):
        raise SchemaError(f"{path}.oneOf: the schemas may overlap; use anyOf, or a required constant that differs")


def _resolve(reference: Any, root: Any, path: str) -> Any:
    """Return the schema to which a `$ref` points. Raises SchemaError if there is none."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise SchemaError(f"{path}.$ref: got {str(reference)[:80]!r}, expected a reference within the schema")
    value = root
    for name in reference.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(value, dict) or name not in value:
            raise SchemaError(f"{path}.$ref: {reference!r} points to nothing")
        value = value[name]
    return value


def _dereferenced(schema: Any, root: Any) -> Any:
    """Return the schema to which the references of `schema` lead, or {} if they form a circle."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        schema = _resolve(schema["$ref"], root, "$")
    return {}


def _are_disjoint(schemas: Any) -> bool:
    """Return whether no value can match two of the schemas.

    Compares their types, their constants, and the constants of required properties. False if these do not tell.
    """
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
    """Return the values that an enum or const allows, each as its repr, or None for other schemas."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return {repr(schema["const"])}
    return {*map(repr, schema["enum"])} if isinstance(schema.get("enum"), list) else None


def _differ(values: list[set[str] | None]) -> bool:
    """Whether no value is in two of the sets. False if a set is None."""
    return None not in values and sum(map(len, values)) == len(set.union(*values))


def _with_required_properties(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a schema that declares all its required properties. xgrammar would leave out undeclared ones."""
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
    """Return a schema into which its `allOf` is merged. xgrammar follows an `allOf` only if it has one schema."""
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
            elif key in ANNOTATIONS or key not in rest or rest[key] == value:
                rest.setdefault(key, value)
            else:
                raise SchemaError(f"{path}.allOf: two schemas with {key!r} are not supported")
    if "$ref" in rest and rest.keys() - ANNOTATIONS - {"$ref", "$defs", "definitions"}:
        raise SchemaError(f"{path}.allOf: $ref together with other keywords is not supported")
    return rest
