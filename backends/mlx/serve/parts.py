"""The bases of requests and of their parts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,256}$"  # OpenAI allows 64 characters; those of MCP servers can be longer

T = TypeVar("T")
# A list of which only the first error is reported: a large body could have millions of them.
Several = Annotated[list[T], Field(fail_fast=True)]


class RequestPart(BaseModel):
    """The base of a request and of all its parts: no conversion between types.

    A number such as 5.0 is an integer, as in JSON Schema. Clients in which a parameter is a float send it so. Fields
    that no class declares have no effect; see `unknown_fields`.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _with_integers(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = {name: value.get(name) for name in _integer_fields(cls)}  # type: ignore[arg-type]
        whole = {name: int(part) for name, part in given.items() if isinstance(part, float) and part.is_integer()}
        return value | whole

    def unknown_fields(self) -> Iterator[tuple[str, ...]]:
        """Yield the paths to the fields that no class declares. Those with the value null are left out."""
        yield from ((name,) for name, value in self.model_extra.items() if value is not None)
        for name, field in type(self).model_fields.items():
            value, path = getattr(self, name), field.alias or name
            if isinstance(value, RequestPart):
                yield from ((path, *rest) for rest in value.unknown_fields())
            elif isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, RequestPart):
                        yield from ((path, str(index), *rest) for rest in item.unknown_fields())


class Caller(RequestPart):
    """Who calls a function: always the model. With OpenAI and Anthropic, a program of the model may do so, too."""

    type: Literal["direct"]


@cache
def _integer_fields(model: type[BaseModel]) -> set[str]:
    fields = model.model_fields.items()
    return {name for name, field in fields if int in (field.annotation, *get_args(field.annotation))}
