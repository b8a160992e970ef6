"""The request of `/v1/chat/completions`: messages, tools and the format of the answer."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, PrivateAttr, Tag, model_validator

from ..llm.vision.messages import MARKS, PICTURE, SOUND, audio_url
from ..llm.vision.sound import Sound
from . import strict_json
from .errors import field_error
from .parts import FUNCTION_NAME, RequestPart, Several
from .request import GenerationRequest, limit

MAX_TOOLS = 128
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
TEXT_PARAMETER = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}

# Messages ------------------------------------------------------------------------------


def _join_parts(content: Any) -> Any:
    """Join the content of a message if it is a list of text parts. Raises ValueError for parts of other types."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        key = "refusal" if kind == "refusal" else "text"
        if not isinstance(part, dict) or kind not in ("text", "input_text", "output_text", "refusal"):
            raise ValueError(f"got a part of type {str(kind)[:40]!r}, expected 'text'")
        if not isinstance(part.get(key), str):
            raise ValueError(f"got a part without {key}, expected a string")
        texts.append(part[key])
    return "".join(texts)


class TextPart(RequestPart):
    """A part of a message's content. Only the OpenAPI schema uses this class; `_join_parts` reads the parts."""

    type: Literal["text"]
    text: str


class ImageUrl(RequestPart):
    url: str
    detail: str | None = None


class ImagePart(RequestPart):
    """A picture in a message of the user. Only the OpenAPI schema uses this class; `take_media` reads the parts."""

    type: Literal["image_url"]
    image_url: ImageUrl


class InputAudio(RequestPart):
    data: str
    format: str


class AudioPart(RequestPart):
    """A sound in a message of the user. Only the OpenAPI schema uses this class; `take_media` reads the parts."""

    type: Literal["input_audio"]
    input_audio: InputAudio


Content = Annotated[str, BeforeValidator(_join_parts, json_schema_input_type=str | list[TextPart])]
UserContent = Annotated[
    str, BeforeValidator(_join_parts, json_schema_input_type=str | list[TextPart | ImagePart | AudioPart])
]


def text_input(arguments: str) -> str:
    """Return the input of a call of a tool that takes a text: what its arguments in JSON have, or else their text."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value["input"] if isinstance(value, dict) and isinstance(value.get("input"), str) else arguments


def parse_arguments(text: str) -> Any:
    """Return the value of the arguments of a call, or `text` if it is not JSON. Raises ValueError for deep nesting.

    Lone surrogates become U+FFFD: models write them where they cut off an escaped emoji, and UTF-8 does not have them.
    """
    try:
        value = json.loads(text or "{}")
    except RecursionError as error:
        raise ValueError(strict_json.TOO_DEEP) from error
    except ValueError:
        return text
    if strict_json.depth(value) > strict_json.MAX_DEPTH:
        raise ValueError(strict_json.TOO_DEEP)
    return json.loads(re.sub("[\ud800-\udfff]", "\ufffd", json.dumps(value, ensure_ascii=False)))


def _check_arguments(text: str) -> str:
    parse_arguments(text)
    return text


Arguments = Annotated[str, AfterValidator(_check_arguments)]


class FunctionCall(RequestPart):
    name: str = Field(min_length=1, max_length=256)
    arguments: Arguments
    parsed_arguments: Any = None  # the openai package adds it in parse()

    def as_dict(self) -> dict[str, Any]:
        """The call for chat templates, which take the arguments as a mapping."""
        return {"name": self.name, "arguments": parse_arguments(self.arguments)}


class MessageToolCall(RequestPart):
    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # the index of the call in a stream; some clients send it back


class CustomCall(RequestPart):
    name: str = Field(min_length=1, max_length=256)
    input: str


class CustomToolCall(RequestPart):
    """A call of a tool that takes a text. To the model, it is a call of a function; see `CustomTool`."""

    id: str = Field(min_length=1, max_length=256)
    type: Literal["custom"]
    custom: CustomCall
    index: int | None = None

    @property
    def function(self) -> FunctionCall:
        return FunctionCall(name=self.custom.name, arguments=json.dumps({"input": self.custom.input}))


def _call_type(call: Any) -> str:
    """Return the type of a call, which some clients leave out for functions."""
    type = call.get("type") if isinstance(call, dict) else getattr(call, "type", None)
    return "custom" if type == "custom" else "function"


AnyToolCall = Annotated[
    Annotated[MessageToolCall, Tag("function")] | Annotated[CustomToolCall, Tag("custom")], Discriminator(_call_type)
]


class Cacheable(RequestPart):
    """What a client may mark for the cache of prompts in Anthropic's API, which here needs no marks."""

    cache_control: dict[str, Any] | None = None


class ChatMessage(Cacheable):
    type: Literal["text", "message"] | None = None  # lm-eval sends it; it has no effect


MAX_MEDIA = 64  # pictures and sounds of a message
_MARK = re.compile(f"[{''.join(MARKS)}]")


def picture_part(url: str) -> dict[str, Any]:
    """Return the part of a chat message for a picture."""
    return {"type": "image_url", "image_url": {"url": url}}


def _part(medium: str | Sound) -> dict[str, Any]:
    """Return the part of a chat message for a data URL of a picture, or a sound with such a URL."""
    if isinstance(medium, str):
        return picture_part(medium)
    head, _, data = medium.source.partition(";base64,")
    return {"type": "input_audio", "input_audio": {"data": data, "format": head.rpartition("/")[2]}}


def take_media(content: Any) -> tuple[Any, list[str | Sound]]:
    """Return a content in which a mark takes the place of each picture and sound, and these.

    Pictures are data URLs. Raises ValueError for other URLs: the server fetches nothing.
    """
    if isinstance(content, str):
        return _MARK.sub("", content), []
    if not isinstance(content, list):
        return content, []
    parts: list[Any] = []
    media: list[str | Sound] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image_url", "input_image"):
            url = part.get("image_url")
            url = url.get("url") if isinstance(url, dict) else url
            if not isinstance(url, str) or not url.startswith("data:"):
                raise ValueError(f"image_url: got {str(url)[:40]!r}, expected a data URL, data:image/png;base64,…")
            media.append(url)
            part = {"type": "text", "text": PICTURE}
        elif kind == "input_audio" and isinstance(sound := part.get("input_audio"), dict):
            if not all(isinstance(sound.get(name), str) for name in ("data", "format")):
                raise ValueError(f"input_audio: got {', '.join(sorted(map(str, sound)))}, expected data and format")
            media.append(Sound(audio_url(sound)))
            part = {"type": "text", "text": SOUND}
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            part = part | {"text": _MARK.sub("", part["text"])}
        parts.append(part)
    if len(media) > MAX_MEDIA:
        raise ValueError(f"got {len(media)} pictures and sounds, expected at most {MAX_MEDIA}")
    return parts, media


class SystemMessage(ChatMessage):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class WithMedia(RequestPart):
    """A message with a mark in its content for each of its `media`: data URLs of pictures, and sounds."""

    content: UserContent
    _media: list[str | Sound] = PrivateAttr(default_factory=list)

    @model_validator(mode="wrap")
    @classmethod
    def _with_media(cls, value: Any, handler: Any) -> Any:
        media: list[str | Sound] = []
        if isinstance(value, dict) and "content" in value:
            content, media = take_media(value["content"])
            value = value | {"content": content}
        message = handler(value)
        message._media += media
        return message

    @property
    def media(self) -> list[str | Sound]:
        return self._media

    @property
    def parts(self) -> str | list[dict[str, Any]]:
        """The content as a client sends it, with the pictures and sounds."""
        first, *texts = _MARK.split(self.content)
        parts: list[dict[str, Any]] = [{"type": "text", "text": first}]
        for medium, text in zip(self._media, texts):
            parts += [_part(medium), {"type": "text", "text": text}]
        return parts if texts else self.content


class UserMessage(WithMedia, ChatMessage):
    role: Literal["user"]
    name: str | None = None


class AssistantMessage(ChatMessage):
    """An answer, as clients send it back."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # what other servers call it; used if there is no reasoning_content
    refusal: str | None = None
    tool_calls: Several[AnyToolCall] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    # Clients add these to answers that they send back: the openai package, LiteLLM and OpenRouter's clients.
    parsed: Any = None
    provider_specific_fields: Any = None
    thinking_blocks: Any = None
    reasoning_details: Any = None

    @model_validator(mode="after")
    def _has_content(self) -> AssistantMessage:
        texts = (self.content, self.refusal, self.reasoning_content, self.reasoning)
        if not self.tool_calls and all(text is None for text in texts):
            raise ValueError("got an assistant message without content and tool_calls")
        return self


class ToolMessage(ChatMessage):
    role: Literal["tool"]
    content: Content
    tool_call_id: str = Field(min_length=1, max_length=256)
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


def template_message(message: Message) -> dict[str, Any]:
    """Return a message as chat templates take it."""
    given = message.model_dump(exclude_none=True, include={"role", "name", "reasoning_content", "tool_call_id"})
    given["content"] = message.content if message.content is not None else getattr(message, "refusal", None) or ""
    if reasoning := getattr(message, "reasoning", None):
        given.setdefault("reasoning_content", reasoning)
    if calls := getattr(message, "tool_calls", None):
        given["tool_calls"] = [{"id": c.id, "type": "function", "function": c.function.as_dict()} for c in calls]
    return given


# Tools ---------------------------------------------------------------------------------


class Function(Cacheable):
    """A function. Without `parameters`, it takes none, as in OpenAI's API."""

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    required: list[str] | None = None  # guardrails repeats that of the parameters here; it has no effect

    @model_validator(mode="after")
    def _with_parameters(self) -> Function:
        self.parameters = NO_PARAMETERS if self.parameters is None else self.parameters
        return self


class Tool(Cacheable):
    type: Literal["function"]
    function: Function
    grammar: ClassVar[None] = None


class Grammar(RequestPart):
    """The grammar of the input of a custom tool: in Lark, or a regular expression."""

    syntax: Literal["lark", "regex"]
    definition: str


class GrammarFormat(RequestPart):
    type: Literal["grammar"]
    grammar: Grammar


class PlainFormat(RequestPart):
    type: Literal["text"]


class Custom(RequestPart):
    """A tool that takes a text, which may have to follow a grammar."""

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    format: Annotated[PlainFormat | GrammarFormat, Field(discriminator="type")] | None = None

    @property
    def grammar(self) -> Grammar | None:
        return self.format.grammar if isinstance(self.format, GrammarFormat) else None

    def as_function(self) -> Function:
        """Return the function that stands for the tool: its only parameter is the text."""
        grammar = self.grammar
        form = "The input is any text." if self.format else ""
        if grammar:
            form = f"The input follows this grammar ({grammar.syntax}):\n{grammar.definition}"
        description = "\n\n".join(filter(None, (self.description, form)))
        # The arguments of strict functions follow their schema, and the input of this one its grammar.
        strict = True if grammar else None
        return Function(name=self.name, description=description or None, parameters=TEXT_PARAMETER, strict=strict)


class CustomTool(Cacheable):
    type: Literal["custom"]
    custom: Custom

    @cached_property
    def function(self) -> Function:
        return self.custom.as_function()

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the input, or None for any text."""
        return self.custom.grammar


class ChosenFunction(RequestPart):
    name: str


class ChosenTool(RequestPart):
    type: Literal["function"] = "function"  # huggingface_hub leaves it out
    function: ChosenFunction


class ChosenCustomTool(RequestPart):
    type: Literal["custom"]
    custom: ChosenFunction

    @property
    def function(self) -> ChosenFunction:
        return self.custom


ChosenTools = ChosenTool | ChosenCustomTool


class AllowedTools(RequestPart):
    """Some of the tools. The model may call them, or must call one of them."""

    mode: Literal["auto", "required"]
    tools: Several[ChosenTools] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolChoice(RequestPart):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


AnyTool = Annotated[Tool | CustomTool, Field(discriminator="type")]

# The request ---------------------------------------------------------------------------


class ThinkingOptions(RequestPart):
    """Whether the model reasons before it answers. `budget_tokens` has no effect: the model ends its reasoning."""

    type: Literal["enabled", "adaptive", "auto", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(GenerationRequest):
    """The request of `/v1/chat/completions`."""

    messages: Several[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, lt=2**31)
    max_completion_tokens: int | None = Field(None, lt=2**31)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Several[AnyTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ChosenTools | AllowedToolChoice | None = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: ThinkingOptions | bool | None = None  # as DeepSeek, Kimi and GLM have it
    # Fields of vLLM's API.
    add_generation_prompt: bool | None = None  # the default is true unless the last message is continued
    continue_final_message: bool | None = False

    @property
    def max_new_tokens(self) -> int | None:
        return limit(self.max_tokens) if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def argument_fields(self) -> dict[str, str]:
        length = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        logprobs = "top_logprobs" if self.top_logprobs else "logprobs"
        return super().argument_fields | {"max_new_tokens": length, "logprobs": logprobs}

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def thinks(self) -> bool | None:
        """Whether the model should reason before it answers, or None if the request leaves that to it."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        if isinstance(self.thinking, ThinkingOptions):
            return {"enabled": True, "disabled": False}.get(self.thinking.type)
        return self.thinking

    @property
    def functions(self) -> list[Function]:
        """The functions that the model may call: none if `tool_choice` is none."""
        if self.tool_choice == "none":
            return []
        is_limited = isinstance(self.tool_choice, AllowedToolChoice)
        functions = [tool.function for tool in self.tools or []]
        return [f for f in functions if not is_limited or f.name in self.chosen_names]

    @property
    def custom_names(self) -> set[str]:
        """The names of the tools that take a text."""
        return {tool.custom.name for tool in self.tools or [] if isinstance(tool, CustomTool)}

    @property
    def chosen_names(self) -> set[str]:
        """The names of functions in `tool_choice`."""
        if isinstance(self.tool_choice, ChosenTools):
            return {self.tool_choice.function.name}
        if isinstance(self.tool_choice, AllowedToolChoice):
            return {tool.function.name for tool in self.tool_choice.allowed_tools.tools}
        return set()

    @property
    def forced_functions(self) -> list[Function]:
        """The functions of which the model must call at least one. Empty if the model may answer with text."""
        if isinstance(self.tool_choice, ChosenTools):
            return [f for f in self.functions if f.name in self.chosen_names]
        if isinstance(self.tool_choice, AllowedToolChoice):
            return self.functions if self.tool_choice.allowed_tools.mode == "required" else []
        return self.functions if self.tool_choice == "required" else []

    @property
    def wants_one_call(self) -> bool:
        """Whether an answer may have only one call: if the request says so, or chooses one function."""
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, ChosenTools)

    def check_fields(self) -> None:
        super().check_fields()
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "got a number without logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            problem = "got true together with add_generation_prompt, expected one of them"
            raise field_error("continue_final_message", problem)
        known = {tool.function.name for tool in self.tools or []}
        if not self.chosen_names <= known or self.tool_choice == "required" and not known:
            problem = "got a function that is not in tools" if self.tools else "got it without tools"
            raise field_error("tool_choice", problem)
        names = [function.name for function in self.functions]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise field_error("tools", f"got {twice!r} twice, expected different names")
