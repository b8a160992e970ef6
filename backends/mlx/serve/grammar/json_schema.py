"""Checks JSON schemas, and rewrites them to a form that xgrammar follows exactly.

xgrammar ignores some keywords, alone or beside others. An answer could then violate the schema, so such schemas are
rewritten if that is simple, and refused otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from .bounds import BOUNDS, with_followed_bounds
from .pattern import count_repetitions, rule, simplified, stand_in

MAX_DEPTH = 64
MAX_SCHEMA_CHARACTERS = 64 * 1024
MAX_REPETITIONS = 256  # in a pattern: xgrammar compiles (a?)(a?)… in the square of their number, 256 in half a second
# Keywords whose value is a schema, a list of schemas, and a dict of schemas by name.
WITH_SCHEMA = (
    "items", "additionalProperties", "additionalItems", "propertyNames", "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
WITH_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
WITH_NAMES = ("properties", "patternProperties", "$defs", "definitions")
# Keywords of JSON Schema's drafts that restrict values, and that the masks cannot enforce. Keywords of no draft are
# annotations, as the drafts define them.
UNSUPPORTED = {
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "multipleOf",
    "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef", "extends", "disallow",
    "divisibleBy",
}  # fmt: skip
# Keywords that restrict values, or hold schemas that do.
SUPPORTED = {
    *WITH_SCHEMA, *WITH_LIST, *WITH_NAMES, "type", "enum", "const", "$ref", "required", "minProperties",
    "maxProperties", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum",
}  # fmt: skip
# Keywords whose value is a count.
COUNT_KEYWORDS = {"minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength"}
MAX_COUNT = 2**31 - 1  # xgrammar's limit of counts; no answer is so long
# Keywords that only hold schemas for references.
DEFINITIONS = {"$defs", "definitions"}
# Types -> the keywords that constrain only values of this type.
TYPE_KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {*BOUNDS},
    "object": {
        "properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames",
        "required", "minProperties", "maxProperties",
    },
    "array": {"items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems"},
}  # fmt: skip
# Keywords that constrain what another keyword of the same schema does not declare.
REMAINDERS = (
    ("additionalProperties", "properties"), ("additionalProperties", "patternProperties"),
    ("unevaluatedProperties", "properties"), ("items", "prefixItems"),
)  # fmt: skip
TYPES = {*TYPE_KEYWORDS, "integer", "boolean", "null"}
# The accepted values of the keyword `format`.
FORMATS = {
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer",
}  # fmt: skip
# Formats of OpenAPI and pydantic, which only say how programs store a value.
STORAGE_FORMATS = {
    "int32", "int64", "float", "double", "password", "byte", "binary", "path", "file-path", "directory-path",
}  # fmt: skip


_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_DAY = "(0[1-9]|1[0-9]|2[0-8])"
_DATE = f"[1-9][0-9]{{3}}-((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_POINTER = "(/([^~]|~[01])*)?"
# A duration of RFC 3339. Programs refuse one with long numbers.
_COUNT = "[0-9]{1,4}"
_MINUTES = f"{_COUNT}M({_COUNT}S)?"
_DURATION_TIME = f"T({_COUNT}H({_MINUTES})?|{_MINUTES}|{_COUNT}S)"
_MONTHS = f"{_COUNT}M({_COUNT}D)?"
_DURATION = f"P(({_COUNT}Y({_MONTHS})?|{_MONTHS}|{_COUNT}D)({_DURATION_TIME})?|{_DURATION_TIME}|{_COUNT}W)"
# Formats for which xgrammar also admits texts that are invalid or too long, with the patterns that replace them.
FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": f"^{_DURATION}$",
    "email": r"^[a-z0-9_+-]{1,32}(\.[a-z0-9_+-]{1,16}){0,2}@([a-z0-9]{1,16}\.){1,3}[a-z]{2,6}$",
    "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]{{0,3}})(#|{_POINTER})$",
}
# The pattern of an address with lengths, as those of pydantic have them, and the lengths of its texts.
_HOST = r"[a-z0-9]{1,32}([.-][a-z0-9]{1,32}){0,3}\.[a-z]{2,12}"
URL_PATTERN = rf"^https?://{_HOST}(/[A-Za-z0-9._~/-]{{0,500}}(\?[A-Za-z0-9._~=&-]{{0,200}})?)?$"
URL_LENGTHS = len("http://a.aa"), 1024


class SchemaError(ValueError):
    """Raised for a schema that is invalid, or that xgrammar does not follow exactly."""


def check_schema(schema: Any) -> Any:
    """Return `schema` in a form that xgrammar follows. Raises SchemaError, which names the place and the keyword."""
    return _checked(schema, schema, "$", 0)


def _checked(schema: Any, root: Any, path: str, depth: int) -> Any:
    flat = _flat(schema, root, path, depth)
    return _enforced(flat, root, path) if isinstance(flat, dict) else flat


def _flat(schema: Any, root: Any, path: str, depth: int) -> Any:
    """Return a schema without annotations and `allOf`, in which all other schemas are checked."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise SchemaError(f"{path}: got {type(schema).__name__}, expected a schema")
    if depth > MAX_DEPTH:
        raise SchemaError(f"{path}: nested too deeply: expected at most {MAX_DEPTH} levels")
    schema = _with_prefix_items(schema)
    _check_keywords(schema, path)
    for pattern in schema.get("patternProperties", ()):
        check_pattern(pattern, f"{path}.patternProperties")
    if "pattern" in schema:
        check_pattern(schema["pattern"], f"{path}.pattern")
    if "$ref" in schema:
        _resolve(schema["$ref"], root, path)

    def change(part: Any, key: str, place: str) -> Any:
        return (_flat if key == "allOf" else _checked)(part, root, f"{path}.{place}", depth + 1)

    flat = _merged(_mapped(schema, change), path)
    # Of the given schemas: a checked one may admit fewer values, and then seem to be disjoint from the others.
    if "oneOf" in schema:
        branches = _branches(schema, "oneOf", root, path)
        if len(branches) < len(schema["oneOf"]) or not _are_disjoint(branches):
            raise SchemaError(f"{path}.oneOf: the schemas may overlap; use anyOf, or a required constant that differs")
    return flat


def _with_prefix_items(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with a list of `items`, as drafts before 2020-12 have it for tuples, in its present form."""
    if not isinstance(schema.get("items"), list) or "prefixItems" in schema:
        return schema
    rest = {key: value for key, value in schema.items() if key not in ("items", "additionalItems")}
    others = {"items": schema["additionalItems"]} if "additionalItems" in schema else {}
    return rest | {"prefixItems": schema["items"]} | others


def _mapped(schema: dict[str, Any], change: Callable[[Any, str, str], Any]) -> dict[str, Any]:
    """Return a schema without annotations, in which `change(part, key, place)` replaces each schema that it contains.

    Formats with an entry in FORMAT_PATTERNS become patterns. A format beside a pattern is an annotation. Stand-ins
    replace the patterns.
    """
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in WITH_SCHEMA:
            result[key] = change(value, key, key)
        elif key in WITH_LIST:
            result[key] = [change(part, key, f"{key}.{index}") for index, part in enumerate(value)]
        elif key in WITH_NAMES:
            parts = {name: change(part, key, f"{key}.{name}") for name, part in value.items()}
            is_by_pattern = key == "patternProperties"
            result[key] = {stand_in(name): part for name, part in parts.items()} if is_by_pattern else parts
        elif key == "pattern":
            result[key] = stand_in(value)
        elif _is_url_with_length(schema) and key in ("format", "minLength", "maxLength"):
            result["pattern"] = stand_in(URL_PATTERN)
        elif key == "format" and _is_annotation(schema):
            continue
        elif key == "format" and value in FORMAT_PATTERNS:
            result["pattern"] = stand_in(FORMAT_PATTERNS[value])
        elif key in COUNT_KEYWORDS:
            count = int(value)  # 1.0 is an integer in JSON Schema
            result[key] = min(count, MAX_COUNT) if key.startswith("max") else count
        elif key in SUPPORTED:
            result[key] = value
    return result


def _check_keywords(schema: dict[str, Any], path: str) -> None:
    """Raise SchemaError if a keyword of a schema is not supported or has an invalid value. Ignores schemas in it."""
    for key, value in schema.items():
        place = f"{path}.{key}"
        if key in WITH_LIST and (not isinstance(value, list) or not value):
            raise SchemaError(f"{place}: expected a list of schemas")
        if key in WITH_NAMES and not isinstance(value, dict):
            raise SchemaError(f"{place}: got {type(value).__name__}, expected schemas by name")
        if key in COUNT_KEYWORDS and (_type_of(value) != "integer" or value < 0):
            raise SchemaError(f"{place}: got {str(value)[:40]!r}, expected an integer of at least 0")
        if key in BOUNDS and _type_of(value) not in ("integer", "number"):
            raise SchemaError(f"{place}: got {str(value)[:40]!r}, expected a number")
        if key in UNSUPPORTED and not (key == "uniqueItems" and value is False):
            raise SchemaError(f"{path}: the keyword {key!r} is not supported")
    types = schema.get("type", "null")
    for name in types if isinstance(types, list) and types else [types]:
        if not isinstance(name, str) or name not in TYPES:
            raise SchemaError(f"{path}.type: got {str(name)[:40]!r}, expected {', '.join(sorted(TYPES))}")
    names = schema.get("required", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SchemaError(f"{path}.required: expected a list of names")
    if "enum" in schema and (not isinstance(schema["enum"], list) or not schema["enum"]):
        raise SchemaError(f"{path}.enum: expected a list of values")
    if "format" in schema and not isinstance(schema["format"], str):
        raise SchemaError(f"{path}.format: got {type(schema['format']).__name__}, expected a string")
    has_format = "format" in schema and not _is_annotation(schema)
    if has_format and schema["format"] not in FORMATS:
        raise SchemaError(f"{path}.format: got {schema['format']!r}, expected one of {', '.join(sorted(FORMATS))}")
    has_length = bool({"minLength", "maxLength"} & schema.keys())
    if has_length and ("pattern" in schema or has_format) and not _is_url_with_length(schema):
        raise SchemaError(f"{path}: lengths together with pattern or format are not supported")


def _is_annotation(schema: dict[str, Any]) -> bool:
    """Return whether the `format` of a schema does not restrict its values, as it does by default in JSON Schema."""
    if "pattern" in schema or schema["format"] in STORAGE_FORMATS:  # zod has names of its own beside each pattern
        return True
    return "type" in schema and not _admits(schema["type"], "string")


def _is_url_with_length(schema: dict[str, Any]) -> bool:
    """Return whether a schema is that of an address with lengths that URL_PATTERN keeps."""
    if schema.get("format") != "uri" or "pattern" in schema or not {"minLength", "maxLength"} & schema.keys():
        return False
    lowest, highest = URL_LENGTHS
    return schema.get("minLength", 0) <= lowest and schema.get("maxLength", highest) >= highest


def check_pattern(pattern: Any, place: str) -> None:
    """Raise SchemaError if a pattern is invalid, or is one that xgrammar does not follow."""
    import xgrammar

    if not isinstance(pattern, str):
        raise SchemaError(f"{place}: got {type(pattern).__name__}, expected a string")
    if len(pattern) > MAX_SCHEMA_CHARACTERS:
        raise SchemaError(f"{place}: got {len(pattern)} characters, expected at most {MAX_SCHEMA_CHARACTERS}")
    if (count := count_repetitions(pattern)) > MAX_REPETITIONS:
        raise SchemaError(f"{place}: got {count} repetitions, expected at most {MAX_REPETITIONS}")
    if any(token in pattern for token in ("(?=", "(?!", "(?<")):
        raise SchemaError(f"{place}: lookaround is not supported")
    try:
        xgrammar.Grammar.from_regex(simplified(pattern))
        rule(pattern)
    except RuntimeError as error:
        raise SchemaError(f"{place}: {reason(error)}") from error
    except ValueError as error:
        raise SchemaError(f"{place}: {error}") from error


def reason(error: Exception) -> str:
    """Return the message of an error of xgrammar, without the place in xgrammar's sources."""
    return str(error).strip().partition(": ")[2].split("\n")[0] or str(error).strip()


def _resolve(reference: Any, root: Any, path: str) -> Any:
    """Return the schema to which a `$ref` points. Raises SchemaError if there is none."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise SchemaError(f"{path}.$ref: got {str(reference)[:80]!r}, expected a reference within the schema")
    value, is_schema = root, True  # what the reference has led to so far: a schema, or schemas by name
    for name in reference.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(value, dict) or name not in value:
            raise SchemaError(f"{path}.$ref: {reference!r} points to nothing")
        if is_schema and name not in (*WITH_SCHEMA, *WITH_NAMES):
            raise SchemaError(f"{path}.$ref: {reference!r} points to no schema, expected a place such as '#/$defs/a'")
        value, is_schema = value[name], not is_schema or name in WITH_SCHEMA
    return value


def _dereferenced(schema: Any, root: Any) -> Any:
    """Return the schema to which the references of `schema` lead, or {} if they form a circle."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        schema = _resolve(schema["$ref"], root, "$")
    return {}


def _target(schema: Any, root: Any, path: str) -> Any:
    """Return the schema to which the references of `schema` lead, and check its keywords."""
    target = _dereferenced(schema, root)
    if isinstance(target, dict):
        _check_keywords(target, path)
    return target


def _branches(schema: dict[str, Any], keyword: str, root: Any, path: str) -> list[Any]:
    """Return the different schemas of an `anyOf` or `oneOf`, without references."""
    targets: dict[int, Any] = {}
    for index, part in enumerate(schema[keyword]):
        target = _dereferenced(part, root)
        if id(target) not in targets:
            targets[id(target)] = _target(target, root, f"{path}.{keyword}.{index}")
    return [*targets.values()]


def _are_disjoint(schemas: list[Any]) -> bool:
    """Return whether no value can match two of the schemas.

    Compares their types, their constants, and the constants of required properties. False if these do not tell.
    """
    if not all(isinstance(schema, dict) for schema in schemas):
        return False
    types = [schema.get("type") for schema in schemas]
    if all(isinstance(t, str) for t in types):
        known = ["number" if t == "integer" else t for t in types]
        if len({*known}) == len(known):
            return True
    if _differ(map(_constants, schemas)):
        return True
    common = set.intersection(*({*schema.get("required", ())} for schema in schemas))
    return any(_differ(_constants(schema.get("properties", {}).get(name)) for schema in schemas) for name in common)


def _constants(schema: Any) -> set[str] | None:
    """Return the values that an enum or const allows, each as `_key` returns it, or None for other schemas."""
    values = _values(schema) if isinstance(schema, dict) else None
    return {*map(_key, values)} if isinstance(values, list) else None


def _values(schema: dict[str, Any]) -> Any:
    """Return the list of values that an enum or const allows, or None for other schemas."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _key(value: Any) -> str:
    """Return a text that is the same for equal values. In JSON schemas, 1 equals 1.0 and differs from true."""
    text = json.dumps(value)
    return json.dumps(json.loads(text, parse_float=_whole_as_integer), sort_keys=True)


def _whole_as_integer(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _differ(values: Iterable[set[str] | None]) -> bool:
    """Whether no value is in two of the sets. False if a set is None."""
    seen: set[str] = set()
    for part in values:
        if part is None or not seen.isdisjoint(part):
            return False
        seen |= part
    return True


# Keywords beside others --------------------------------------------------------------------


def _enforced(schema: dict[str, Any], root: Any, path: str) -> dict[str, Any]:
    """Return a schema in which xgrammar ignores no keyword. It admits no further values. Raises SchemaError.

    xgrammar follows only the first of $ref, const, enum, anyOf and oneOf, and without them only the keywords of `type`.
    """
    if "$ref" in schema:
        _check_siblings(schema, "$ref", set(), path)
        return schema
    if "enum" in schema or "const" in schema:
        return _enumeration(schema, path)
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            _check_siblings(schema, keyword, {"type"}, path)
            if "type" in schema:
                _check_types(schema, keyword, root, path)
            return {key: value for key, value in schema.items() if key != "type"}
    if types := _types(schema):
        types = [name for name in types if name != "integer" or "number" not in types]
        schema = schema | {"type": types[0] if len(types) == 1 else types}
        try:
            schema = with_followed_bounds(schema, types)
        except ValueError as error:
            raise SchemaError(f"{path}: {error}") from error
    return _checked_object(schema, root, path)


def _check_siblings(schema: dict[str, Any], keyword: str, accepted: set[str], path: str) -> None:
    if others := schema.keys() - {keyword} - DEFINITIONS - accepted:
        raise SchemaError(f"{path}: {keyword} together with {min(others)!r} is not supported")


def _enumeration(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the schema of the values of an enum or const that follow the other keywords."""
    keyword = "const" if "const" in schema else "enum"
    _check_siblings(schema, keyword, {"type", "enum", "minLength", "maxLength", *BOUNDS}, path)
    values = [value for value in _values(schema) if _is_valid(value, schema)]
    if {"const", "enum"} <= schema.keys() and _key(schema["const"]) not in map(_key, schema["enum"]):
        values = []
    if not values:
        raise SchemaError(f"{path}.{keyword}: no value follows the other keywords")
    return {key: schema[key] for key in DEFINITIONS & schema.keys()} | {"enum": values}


def _is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a value follows the type, lengths and bounds of a schema."""
    kind = _type_of(value)
    if "type" in schema and not _admits(schema["type"], kind):
        return False
    if kind == "string":
        return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
    if kind in ("integer", "number"):
        return all(follows(value, schema[key]) for key, follows in BOUNDS.items() if key in schema)
    return True


def _check_types(schema: dict[str, Any], keyword: str, root: Any, path: str) -> None:
    """Raise SchemaError unless the schemas of an `anyOf` or `oneOf` have types that the `type` beside it admits."""
    for branch in _branches(schema, keyword, root, path):
        types = _types(branch)
        if not types or not all(_admits(schema["type"], kind) for kind in types):
            raise SchemaError(f"{path}: {keyword} together with 'type' is not supported: its schemas have other types")


def _admits(types: str | list[str], kind: str) -> bool:
    """Return whether the keyword `type` admits the values of a type."""
    names = [types] if isinstance(types, str) else types
    return kind in names or kind == "integer" and "number" in names


def _types(schema: Any) -> list[str]:
    """Return the types of the values that a schema admits, or [] if only schemas in it tell."""
    if not isinstance(schema, dict):
        return []
    if isinstance(values := _values(schema), list):
        return [*dict.fromkeys(map(_type_of, values))]
    types = schema.get("type") or [name for name, keywords in TYPE_KEYWORDS.items() if keywords & schema.keys()]
    return [types] if isinstance(types, str) else types


def _type_of(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _checked_object(schema: dict[str, Any], root: Any, path: str) -> dict[str, Any]:
    """Return the schema with all required properties declared. xgrammar would leave out undeclared ones."""
    names, declared, patterns = (schema.get(key, {}) for key in ("required", "properties", "patternProperties"))
    others = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
    if len(patterns) > 1:
        raise SchemaError(f"{path}.patternProperties: got {len(patterns)} patterns, expected one: they may overlap")
    # A name that is not declared may come twice. It then counts once.
    is_open = patterns or (not declared if others is None else others is not False)
    if is_open and schema.get("minProperties", 0) > len({*names}) + 1:
        message = f"got {schema['minProperties']}, expected at most one more than in required: names may repeat"
        raise SchemaError(f"{path}.minProperties: {message}")
    if missing := [name for name in names if name not in declared]:
        if others is False or patterns:
            raise SchemaError(f"{path}.required: {missing[0]!r} is not in properties")
        schema = schema | {"properties": {**declared, **dict.fromkeys(missing, True if others is None else others)}}
    if "propertyNames" in schema:
        if _types(_target(schema["propertyNames"], root, f"{path}.propertyNames")) != ["string"]:
            raise SchemaError(f"{path}.propertyNames: expected a schema with the type string")
        if others is False:
            raise SchemaError(f"{path}: propertyNames together with 'additionalProperties' is not supported")
    for keyword in ("patternProperties", "propertyNames"):
        for other in {"properties", "patternProperties"} - {keyword}:
            if keyword in schema and schema.get(other):
                raise SchemaError(f"{path}: {keyword} together with {other!r} is not supported")
    return schema


def _merged(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a schema into which its `allOf` is merged. xgrammar follows an `allOf` only if it has one schema."""
    if "allOf" not in schema:
        return schema
    rest = {key: value for key, value in schema.items() if key != "allOf"}
    # The `unevaluatedProperties` beside an `allOf` is about what no schema declares.
    sources = [{key: value for key, value in rest.items() if key != "unevaluatedProperties"}, *schema["allOf"]]
    for part in schema["allOf"]:
        if not isinstance(part, dict):
            raise SchemaError(f"{path}.allOf: got {part}, expected objects")
        for key, value in part.items():
            if key in ("properties", *DEFINITIONS) and not rest.get(key, {}).keys() & value.keys():
                rest[key] = {**rest.get(key, {}), **value}
            elif key == "required":
                rest[key] = [*dict.fromkeys([*rest.get(key, []), *value])]
            elif key not in rest or rest[key] == value:
                rest[key] = value
            else:
                raise SchemaError(f"{path}.allOf: two schemas with {key!r} are not supported")
    for source in sources:
        for key, declared in REMAINDERS:
            if source.get(key, True) is not True and source.get(declared) != rest.get(declared):
                raise SchemaError(f"{path}.allOf: {key!r} beside {declared!r} of another schema is not supported")
    if "pattern" in rest:
        rest.pop("format", None)
    if _is_url_with_length(rest):
        raise SchemaError(f"{path}: lengths together with pattern or format are not supported")
    _check_keywords(rest, path)
    return rest
