"""Adapts JSON schemas to llguidance, which follows a schema exactly or refuses it.

A few keywords that llguidance refuses have an equal form that it follows. Clients send them often: the schemas of
pydantic have `oneOf` with references, and those of zod `propertyNames`. Everything else stays as it is.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

# Keywords whose value is a schema, a list of schemas, and a dict of schemas by name.
WITH_SCHEMA = ("items", "additionalProperties", "additionalItems", "propertyNames")
WITH_LIST = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
WITH_NAMES = ("properties", "patternProperties", "$defs", "definitions")
COUNTS = ("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength")
# Formats of OpenAPI and pydantic, which only say how programs store a value.
STORAGE_FORMATS = {
    "int32",
    "int64",
    "float",
    "double",
    "password",
    "byte",
    "binary",
    "path",
    "file-path",
    "directory-path",
}
MAX_REFERENCES = 64  # that lead from one to the next


class SchemaError(ValueError):
    """Raised for a schema that answers cannot follow. The message names the place."""


def adapted(schema: dict[str, Any]) -> dict[str, Any]:
    """Return an equal schema that llguidance follows, if there is one. Raises SchemaError."""
    return _adapted(schema, schema, "$")


def _adapted(schema: Any, root: dict[str, Any], path: str) -> Any:
    if not isinstance(schema, dict):
        return schema  # true, false, or an error that llguidance reports
    _check_minimum(schema, path)
    schema = {key: _integer(key, value) for key, value in schema.items() if not _is_annotation(key, value, schema)}
    if "propertyNames" in schema:
        schema = _without_property_names(schema, root)
    if "oneOf" in schema and "anyOf" not in schema and _are_disjoint(schema["oneOf"], root):
        schema = {"anyOf" if key == "oneOf" else key: value for key, value in schema.items()}
    return {
        key: _mapped(key, value, lambda part, place: _adapted(part, root, place), path) for key, value in schema.items()
    }


def _mapped(key: str, value: Any, change: Callable[[Any, str], Any], path: str) -> Any:
    """Return the value of a keyword in which `change(part, place)` replaces each schema that it holds."""
    if key in WITH_NAMES and isinstance(value, dict):
        return {name: change(part, f"{path}.{key}.{name}") for name, part in value.items()}
    if key in WITH_LIST and isinstance(value, list):
        return [change(part, f"{path}.{key}.{index}") for index, part in enumerate(value)]
    return change(value, f"{path}.{key}") if key in WITH_SCHEMA else value


def _is_annotation(key: str, value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a keyword has no effect on the values, although llguidance would refuse it."""
    if key == "format":  # zod has names of its own beside each pattern
        return "pattern" in schema or isinstance(value, str) and value in STORAGE_FORMATS
    return key == "uniqueItems" and value is False


def _integer(key: str, value: Any) -> Any:
    """Return the value of a keyword as an int if it is a count: 1.0 is an integer in JSON Schema."""
    return int(value) if key in COUNTS and isinstance(value, float) and value.is_integer() else value


def _check_minimum(schema: dict[str, Any], path: str) -> None:
    """Raise SchemaError if names that the schema does not declare would have to differ from each other."""
    least, required = schema.get("minProperties"), schema.get("required")
    is_open = schema.get("additionalProperties", True) is not False or "patternProperties" in schema
    most = 1 + (len({*required}) if isinstance(required, list) and all(isinstance(r, str) for r in required) else 0)
    if is_open and isinstance(least, (int, float)) and least > most:
        raise SchemaError(
            f"{path}.minProperties: got {least}, expected at most {most}, one more than `required` has, because an "
            "answer could repeat the other names"
        )


def _without_property_names(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with the names that `propertyNames` allows as properties, if it lists them, or as a pattern."""
    names, values = _target(schema["propertyNames"], root), schema.get("additionalProperties", True)
    if not isinstance(names, dict) or {"properties", "patternProperties"} & schema.keys():
        return schema
    given = {key for key in names if key not in ("title", "description", "$schema")}
    rest = {key: value for key, value in schema.items() if key not in ("propertyNames", "additionalProperties")}
    if given == {"type"} and names["type"] == "string" or not given:
        return rest | {"additionalProperties": values}
    if given <= {"type", "enum", "const"} and names.get("type", "string") == "string" and len(given - {"type"}) == 1:
        listed = names["enum"] if "enum" in names else [names["const"]]
        if isinstance(listed, list):
            properties = {name: values for name in listed if isinstance(name, str)}
            return rest | {"properties": properties, "additionalProperties": False}
    if given <= {"type", "pattern"} and names.get("type", "string") == "string":
        return rest | {"patternProperties": {names["pattern"]: values}, "additionalProperties": False}
    return schema


def _target(schema: Any, root: dict[str, Any]) -> Any:
    """Return the schema to which the references of `schema` lead, or `schema` if they lead to nothing."""
    target = schema
    for _ in range(MAX_REFERENCES):
        if not isinstance(target, dict) or not isinstance(target.get("$ref"), str) or target["$ref"][:2] != "#/":
            return target
        target = _at(root, target["$ref"])
    return schema


def _at(root: dict[str, Any], reference: str) -> Any:
    """Return what a reference such as `#/$defs/a` names, or None."""
    value: Any = root
    for name in reference.split("/")[1:]:
        value = value.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
    return value


def _are_disjoint(schemas: Any, root: dict[str, Any]) -> bool:
    """Return whether no value follows two of the schemas, as far as their types and constants tell."""
    if not isinstance(schemas, list):
        return False
    traits = [_traits(_target(schema, root), root) for schema in schemas]
    return all(
        any(key in other and not values & other[key] for key, values in one.items())
        for one, other in itertools.combinations(traits, 2)
    )


def _traits(schema: Any, root: dict[str, Any]) -> dict[tuple[str, ...], set[str]]:
    """Return what each value of a schema has one of: types, values, and values of required members of an object."""
    if not isinstance(schema, dict):
        return {}
    if (values := _listed(schema)) is not None:
        return {("type",): {*map(_type_of, values)}, ("value",): values}
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or not all(isinstance(name, str) for name in types):
        return {}
    traits: dict[tuple[str, ...], set] = {("type",): {"number" if name == "integer" else name for name in types}}
    properties, required = schema.get("properties"), schema.get("required")
    if types == ["object"] and isinstance(properties, dict) and isinstance(required, list):
        for name in required:
            if isinstance(name, str) and (values := _listed(_target(properties.get(name), root))) is not None:
                traits["member", name] = values
    return traits


def _type_of(text: str) -> str:
    """Return the type of a scalar as JSON text."""
    return {'"': "string", "t": "boolean", "f": "boolean", "n": "null"}.get(text[0], "number")


def _listed(schema: Any) -> set[str] | None:
    """Return the values of a schema as JSON texts, or None if it does not list them or one is no scalar."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or any(isinstance(value, (dict, list)) for value in values):
        return None
    return {*map(_text, values)}


def _text(value: Any) -> str:
    """Return a scalar as JSON text. Equal numbers, such as 1 and 1.0, have the same one."""
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)
