"""The forms that requests set for their answers: JSON, patterns, choices and grammars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from . import strict_json
from .errors import ApiError
from .parts import FUNCTION_NAME, RequestPart


def _parsed_schema(value: Any) -> Any:
    """Return a schema that comes as JSON text, as vLLM also takes it. Raises ValueError for other text."""
    if not isinstance(value, str):
        return value
    try:
        return strict_json.parse(value.encode())
    except ApiError as error:
        raise ValueError(str(error).replace("the request body", "the text")) from error


@dataclass(frozen=True)
class Form:
    """The form that a request sets for its answers.

    - `kind`, `value`: `json` and a JSON schema, `regex` and a pattern, `choice` and a list of texts, or `grammar` and a
      grammar in GBNF or Lark.
    - `field`: the field of the request that has the value.
    """

    kind: str
    value: Any
    field: str

    @property
    def param(self) -> str:
        """The field of the request that has `field`, or is it."""
        return self.field.partition(".")[0]


Schema = Annotated[dict[str, Any], BeforeValidator(_parsed_schema)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]


def forms_of(prefix: str, values: dict[str, Any]) -> list[Form]:
    """Return the forms of the values that are given, by kind. The names of their fields begin with `prefix`."""
    return [Form(kind, value, prefix + kind) for kind, value in values.items() if value is not None]


class StructuredOutputs(RequestPart):
    """vLLM's way to set the form of an answer: one of the first five fields."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    structural_tag: None = None  # vLLM's form of parts of an answer, which this server lacks
    disable_any_whitespace: bool | None = None  # no effect: the JSON of answers is in one line

    @property
    def forms(self) -> list[Form]:
        """The forms that are given: one, or the request is wrong."""
        given = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        forms = forms_of("structured_outputs.", given)
        any_object = Form("json", {"type": "object"}, "structured_outputs.json_object")
        return [*forms, any_object] if self.json_object else forms


class JsonSchema(RequestPart):
    name: str = Field("answer", pattern=FUNCTION_NAME)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(RequestPart):
    type: Literal["text"]

    @property
    def forms(self) -> list[Form]:
        return []


class JsonObjectFormat(RequestPart):
    """Any JSON object, or one that follows a schema: other servers take it here.

    `value`: the schema under the name that huggingface_hub gives it.
    """

    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    value: dict[str, Any] | None = None

    @property
    def forms(self) -> list[Form]:
        for name, schema in (("schema", self.schema_), ("value", self.value)):
            if schema is not None:
                return [Form("json", schema, f"response_format.{name}")]
        return [Form("json", {"type": "object"}, "response_format")]


class JsonSchemaFormat(RequestPart):
    type: Literal["json_schema"]
    json_schema: JsonSchema

    @property
    def forms(self) -> list[Form]:
        return [Form("json", self.json_schema.schema_, "response_format.json_schema.schema")]


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
