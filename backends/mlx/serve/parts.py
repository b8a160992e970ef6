"""The bases of requests and of their parts."""

from __future__ import annotations

from functools import cache
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,256}$"  # OpenAI allows 64 characters; those of MCP servers can be longer

T = TypeVar("T")
# A list of which only the first error is reported: a large body could have millions of them.
Several = Annotated[list[T], Field(fail_fast=True)]


class RequestPart(BaseModel):
    """The base of a request and of all its parts: no conversion between types.

    A number such as 5.0 is an integer, as in JSON Schema. Clients in which a parameter is a float send it so.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _with_integers(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = {name: value.get(name) for name in _integer_fields(cls)}  # type: ignore[arg-type]
        whole = {name: int(part) for name, part in given.items() if isinstance(part, float) and part.is_integer()}
        return value | whole


class Strict(RequestPart):
    """A part of a request without unknown fields.

    An unknown field with the value null has no effect. Clients send such fields, for instance in messages of answers.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        names = _field_names(cls)  # type: ignore[arg-type]
        known = {key: part for key, part in value.items() if key in names}
        unknown = ((key, part) for key, part in value.items() if key not in names and part is not None)
        return known | dict(islice(unknown, 1))  # pydantic reports it


class Caller(Strict):
    """Who calls a function: always the model. With OpenAI and Anthropic, a program of the model may do so, too."""

    type: Literal["direct"]


@cache
def _integer_fields(model: type[BaseModel]) -> set[str]:
    fields = model.model_fields.items()
    return {name for name, field in fields if int in (field.annotation, *get_args(field.annotation))}


@cache
def _field_names(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}
