"""The request of `/v1/responses`, and the chat request that has the same answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from .chat_request import MAX_TOOLS, Arguments, ChatRequest, Content, Grammar, PlainFormat, ReasoningEffort, WithMedia
from .errors import field_error
from .parts import FUNCTION_NAME, Caller, RequestPart, Several
from .request import SERVICE_TIERS, ExtendedFields, Metadata, Stops, StreamOptions
from .stored import StoredResponses

NAME_PART = r"^[a-zA-Z0-9_.-]{1,127}$"  # two of them are a FUNCTION_NAME


class InputItemBase(RequestPart):
    """An item of the input. `id` and `status` come from answers that a client sends back."""

    id: str | None = None
    status: str | None = None


class InputMessage(WithMedia, InputItemBase):
    """A message. `phase` also comes from an answer."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    phase: str | None = None


class InputCall(InputItemBase):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=256)
    arguments: Arguments
    namespace: str | None = None
    caller: Caller | None = None
    parsed_arguments: Any = None  # the openai package for JavaScript adds it in parse()


class InputResult(InputItemBase):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str = Field(min_length=1, max_length=256)
    output: Content
    name: str | None = None
    namespace: str | None = None
    caller: Caller | None = None


class InputCustomCall(InputItemBase):
    type: Literal["custom_tool_call"]
    call_id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=256)
    input: str
    namespace: None = None

    @property
    def arguments(self) -> str:
        return json.dumps({"input": self.input})


class InputReasoning(InputItemBase):
    """Reasoning of an earlier answer, before its message or calls. Chat templates keep it between calls."""

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        parts = [part for part in self.content or self.summary or () if isinstance(part, dict)]
        return "".join(part["text"] for part in parts if isinstance(part.get("text"), str))


class InputReference(RequestPart):
    """An item of a stored conversation, by its id."""

    type: Literal["item_reference"] | None = None
    id: str


def _item_type(item: Any) -> Any:
    """Return the type of an item. A reference may omit it."""
    if not isinstance(item, dict):
        return getattr(item, "type", None)
    if item.get("type") == "custom_tool_call_output":
        return "function_call_output"
    return item.get("type") or ("item_reference" if item.keys() == {"id"} else "message")


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputResult, Tag("function_call_output")]
    | Annotated[InputCustomCall, Tag("custom_tool_call")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[InputReference, Tag("item_reference")],
    Discriminator(
        _item_type,
        custom_error_type="item_type",
        custom_error_message="expected an object of type message, function_call, function_call_output or reasoning",
    ),
]


class ResponseTool(RequestPart):
    type: Literal["function"]
    name: str = Field(pattern=NAME_PART)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    # Values without effect: the model sees all functions, and calls them itself.
    defer_loading: Literal[False] | None = None
    allowed_callers: Several[Literal["direct"]] | None = None
    output_schema: dict[str, Any] | None = None  # of results that programs of the model would read


class ResponseGrammar(Grammar):
    """The grammar of a custom tool's input, which here is not in a member of its own."""

    type: Literal["grammar"]


class CustomResponseTool(RequestPart):
    """A tool that takes a text."""

    type: Literal["custom"]
    name: str = Field(pattern=NAME_PART)
    description: str | None = None
    format: Annotated[PlainFormat | ResponseGrammar, Field(discriminator="type")] | None = None
    defer_loading: Literal[False] | None = None

    def as_chat_tool(self) -> dict[str, Any]:
        custom = self.model_dump(exclude_none=True, include={"name", "description"})
        if isinstance(self.format, ResponseGrammar):
            grammar = {"syntax": self.format.syntax, "definition": self.format.definition}
            custom["format"] = {"type": "grammar", "grammar": grammar}
        return {"type": "custom", "custom": custom}


class Namespace(RequestPart):
    """Functions of a common origin, such as an MCP server. To the model, their names are `namespace.function`."""

    type: Literal["namespace"]
    name: str = Field(pattern=NAME_PART)
    description: str | None = None
    tools: Several[ResponseTool] = Field(min_length=1, max_length=MAX_TOOLS)


AnyTool = Annotated[
    Annotated[ResponseTool, Tag("function")]
    | Annotated[CustomResponseTool, Tag("custom")]
    | Annotated[Namespace, Tag("namespace")],
    Discriminator(
        lambda tool: tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None),
        custom_error_type="tool_type",
        custom_error_message="expected an object of type function, custom or namespace: the server runs no tools",
    ),
]


def chat_name(name: str, namespace: str | None) -> str:
    """Return the name of a function in the chat request."""
    return f"{namespace}.{name}" if namespace else name


@dataclass(frozen=True)
class OfferedFunction:
    """A function of a request. `path` is its place there, such as `tools.1.tools.0`."""

    path: str
    tool: ResponseTool | CustomResponseTool
    namespace: str | None = None
    heading: str | None = None  # the description of the namespace, for its first function

    @property
    def is_custom(self) -> bool:
        return isinstance(self.tool, CustomResponseTool)

    @property
    def chat_name(self) -> str:
        return chat_name(self.tool.name, self.namespace)

    @property
    def name(self) -> dict[str, str]:
        """The fields of a call that name the function."""
        return {"name": self.tool.name} | ({"namespace": self.namespace} if self.namespace else {})

    def as_chat_tool(self) -> dict[str, Any]:
        if isinstance(self.tool, CustomResponseTool):
            return self.tool.as_chat_tool()
        shown = {"description", "parameters", "strict"}
        function = self.tool.model_dump(exclude_none=True, include=shown) | {"name": self.chat_name}
        if self.heading:
            function["description"] = f"{self.heading}\n\n{self.tool.description or ''}"
        return {"type": "function", "function": function}


class ResponseToolChoice(RequestPart):
    type: Literal["function", "custom"]
    name: str


class ResponseAllowedTools(RequestPart):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Several[ResponseToolChoice] = Field(min_length=1, max_length=MAX_TOOLS)

    def as_chat_choice(self) -> dict[str, Any]:
        """Return the `tool_choice` of the chat request."""
        tools = [{"type": "function", "function": {"name": tool.name}} for tool in self.tools]
        return {"type": self.type, "allowed_tools": {"mode": self.mode, "tools": tools}}


class Reasoning(RequestPart):
    effort: ReasoningEffort | None = None
    # No effect: an answer has the whole reasoning, and no summary.
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # its former name
    # Values without effect. The chat template decides which reasoning of earlier turns the model sees.
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class PlainText(RequestPart):
    type: Literal["text"]


class JsonObject(RequestPart):
    type: Literal["json_object"]


class JsonSchemaText(RequestPart):
    type: Literal["json_schema"]
    name: str = Field("answer", pattern=FUNCTION_NAME)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextOptions(RequestPart):
    format: Annotated[PlainText | JsonObject | JsonSchemaText, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


# What an answer should contain. Only the log probabilities have an effect: answers have no items of the other kinds.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponsesRequest(ExtendedFields, RequestPart):
    """The request of `/v1/responses`. The response is stored unless `store` is false."""

    model: str
    input: str | Annotated[Several[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    tools: Several[AnyTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | ResponseAllowedTools | None = None
    parallel_tool_calls: bool | None = True
    max_tool_calls: int | None = Field(None, ge=1)  # no effect: it counts the calls of OpenAI's own tools
    metadata: Metadata | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None  # auto: the oldest turns of a long input are left out
    include: Several[Includable] | None = None
    background: bool | None = None
    service_tier: Literal[SERVICE_TIERS] | None = None  # type: ignore[valid-type]
    previous_response_id: str | None = None
    conversation: None = None  # OpenAI's objects that store conversations and prompts, which this server lacks
    prompt: None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None  # Codex identifies itself and its turn by it
    reasoning: Reasoning | None = None
    # Not in OpenAI's API, as most extended fields.
    stop: Stops | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)

    @cached_property
    def functions(self) -> list[OfferedFunction]:
        """The functions of `tools`, in their order."""
        functions = []
        for index, tool in enumerate(self.tools or []):
            path = f"tools.{index}"
            if not isinstance(tool, Namespace):
                functions.append(OfferedFunction(path, tool))
                continue
            for place, member in enumerate(tool.tools):
                heading = tool.description if place == 0 else None
                functions.append(OfferedFunction(f"{path}.tools.{place}", member, tool.name, heading))
        return functions

    def check_fields(self) -> None:
        """Raise ApiError for an unsupported field, one that needs stored answers, or for too many functions."""
        super().check_fields()
        if len(self.functions) > MAX_TOOLS:
            raise field_error("tools", f"got {len(self.functions)} functions, expected at most {MAX_TOOLS}")
        if self.background:
            raise field_error("background", "got true, expected false or null", code="unsupported_parameter")

    def with_stored_items(self, stored: StoredResponses) -> ResponsesRequest:
        """Return the request with the items of the response to which it refers before its own. Raises ApiError."""
        before: list[dict[str, Any]] = []
        if self.previous_response_id is not None:
            before = stored.get(self.previous_response_id, "previous_response_id").conversation
        if isinstance(self.input, str):
            items = [InputMessage(role="user", content=self.input)]
        else:
            items = [_resolved(item, f"input.{index}", stored) for index, item in enumerate(self.input)]
        return self.model_copy(update={"input": [*map(_ITEM.validate_python, before), *items]})

    @property
    def stored_items(self) -> list[dict[str, Any]]:
        """The items of the input in JSON, to be stored."""
        items = [item for item in self.input if isinstance(item, RequestPart)]
        return [
            item.model_dump(exclude_none=True) | ({"content": item.parts} if isinstance(item, InputMessage) else {})
            for item in items
        ]

    def as_chat_request(self) -> ChatRequest:
        """Return the chat request with the same answer. The input has no references. Raises ApiError."""
        same = {"model", "stream", "stop", "chat_template_kwargs"}
        given = self.extensions() | self.model_dump(exclude_none=True, include=same)
        if self.tools:
            given["tools"] = [function.as_chat_tool() for function in self.functions]
        if isinstance(self.tool_choice, ResponseToolChoice):
            given["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        elif isinstance(self.tool_choice, ResponseAllowedTools):
            given["tool_choice"] = self.tool_choice.as_chat_choice()
        elif self.tool_choice is not None:
            given["tool_choice"] = self.tool_choice
        if self.text is not None and self.text.format is not None:
            given["response_format"] = _response_format(self.text.format)
        if self.reasoning is not None:
            given["reasoning_effort"] = self.reasoning.effort
        if self.wants_logprobs:
            given |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        given |= {"messages": self._messages(), "parallel_tool_calls": self.parallel_tool_calls}
        return ChatRequest(**given, max_completion_tokens=self.max_output_tokens)

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        reasoning = ""  # before the next item
        for item in self.input:
            if isinstance(item, InputReasoning):
                reasoning += item.text
                continue
            if isinstance(item, InputMessage):
                messages.append({"role": item.role, "content": item.parts})
            elif isinstance(item, InputResult):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
            elif isinstance(item, (InputCall, InputCustomCall)):
                call = {
                    "id": item.call_id,
                    "type": "function",
                    "function": {"name": chat_name(item.name, item.namespace), "arguments": item.arguments},
                }
                if reasoning or not (messages and messages[-1]["role"] == "assistant"):
                    messages.append({"role": "assistant", "content": None, "tool_calls": []})
                messages[-1].setdefault("tool_calls", []).append(call)
            if reasoning and messages[-1]["role"] == "assistant":
                messages[-1]["reasoning_content"] = reasoning
            reasoning = ""
        if not messages:
            raise field_error("input", "got no message")
        return messages


_ITEM = TypeAdapter(InputItem)


def _resolved(item: Any, field: str, stored: StoredResponses) -> Any:
    """Return an item of the input, or the stored item to which it refers. Raises ApiError."""
    return _ITEM.validate_python(stored.item(item.id, field)) if isinstance(item, InputReference) else item


def _response_format(format: PlainText | JsonObject | JsonSchemaText) -> dict[str, Any]:
    if not isinstance(format, JsonSchemaText):
        return {"type": format.type}
    schema = {"name": format.name, "schema": format.schema_, "strict": format.strict}
    return {"type": "json_schema", "json_schema": schema}
