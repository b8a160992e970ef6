"""The fields that the requests for answers share, and the request of `/v1/completions`.

A request with an unsupported field returns HTTP 400 unless the value of the field has no effect. Fields of which this
server does not know the meaning are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, create_model, model_validator

from ..llm.sampling_parameters import SCALARS
from .errors import field_error
from .forms import Form, ResponseFormat, Schema, StructuredOutputs, Texts, forms_of
from .parts import RequestPart, Several

MAX_CHOICES = 128  # the limit of n in OpenAI's API
MAX_STOPS = 64
MAX_BAD_WORDS = 1024
MAX_METADATA = 16
SEED_STRIDE = 2**32  # choice i draws with seed + i * SEED_STRIDE, so that choices do not share draws

SERVICE_TIERS = ("auto", "default", "flex", "priority", "scale")  # of OpenAI: they set its prices and waiting times

# The unsupported fields, and for each the values that have no effect. The value None has no effect in any field.
UNSUPPORTED: dict[str, tuple] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": SERVICE_TIERS,
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
    # Fields of vLLM's API, which its clients send with their defaults.
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),  # in a chat, whose template writes them
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    # Fields of SGLang and llama.cpp.
    "cache_prompt": (True,),
    "dry_multiplier": (0.0,),
    "dynatemp_range": (0.0,),
    "id_slot": (-1,),
    "mirostat": (0,),
    "no_stop_trim": (False,),
    "return_progress": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "tfs_z": (1.0,),
    "timings_per_token": (False,),
    "top_a": (0.0,),
    "typical_p": (1.0,),
    "xtc_probability": (0.0,),
}
# What other servers call some fields.
OTHER_NAMES = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
# Fields that identify the client or the request, or guide OpenAI's cache. They have no effect on the answer.
IDENTITIES = {"user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "request_id", "rid"}


def _token_keys(value: Any) -> Any:
    """Return `logit_bias` with token ids as keys, which JSON has as strings. Raises ValueError for a wrong item."""
    if not isinstance(value, dict):
        return value
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isdecimal() and len(key) < 20):
            raise ValueError(f"got the key {key[:40]!r}, expected token ids")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)):
            raise ValueError(f"got {type(bias).__name__} for token {key}, expected a number")
    return {int(key): bias for key, bias in value.items()}


def _few(value: Any) -> Any:
    """Raise ValueError for more than MAX_METADATA entries, before each of them is checked."""
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"got {len(value)} entries, expected at most {MAX_METADATA}")
    return value


LogitBias = Annotated[dict[int, float], BeforeValidator(_token_keys, json_schema_input_type=dict[str, float])]
Metadata = Annotated[
    dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=MAX_METADATA), BeforeValidator(_few)
]
Stop = Annotated[str, Field(min_length=1)]
Stops = Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)]

# The sampling parameters that have a JSON form: all but allowed_tokens, which is a function.
SamplingFields = create_model(
    "SamplingFields",
    __base__=RequestPart,
    **{name: (spec.type | None, Field(None, ge=spec.low, le=spec.high)) for name, spec in SCALARS.items()},
    logit_bias=(LogitBias | None, None),
)


class StreamOptions(RequestPart):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False  # with include_usage: in each chunk, as other servers know it
    include_obfuscation: bool | None = False  # OpenAI's padding of events, which this server never sends


class ExtendedFields(SamplingFields):  # type: ignore[misc, valid-type]
    """The sampling parameters, and fields of other servers. Requests of all APIs for answers take them.

    - `keep_alive`: Ollama's time to keep the model in memory, which here is an option of the server.
    - `parse_special`: whether special tokens in texts of the client are control tokens. By default, they are text in
      chats, and control tokens in the prompts of `/v1/completions`, which the client formats itself.
    """

    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    ignore_eos: bool | None = False
    min_tokens: int | None = Field(0, ge=0, lt=2**31)
    allowed_token_ids: Annotated[list[int], Field(min_length=1, fail_fast=True)] | None = None
    bad_words: Annotated[list[Stop], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    priority: int | None = Field(0, ge=-(2**31), lt=2**31)
    structured_outputs: StructuredOutputs | None = None
    enable_thinking: bool | None = None
    parse_special: bool | None = None
    keep_alive: Any = None
    # Forms of the answer, by the names of llama.cpp and SGLang.
    grammar: str | None = None
    json_schema: Schema | None = None
    regex: str | None = None
    ebnf: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_own_names(cls, value: Any) -> Any:
        """Give fields with another server's name their own, unless both are given."""
        if not isinstance(value, dict) or OTHER_NAMES.keys().isdisjoint(value):
            return value
        renamed = {OTHER_NAMES[name]: part for name, part in value.items() if name in OTHER_NAMES}
        return renamed | {name: part for name, part in value.items() if name not in OTHER_NAMES}

    def extensions(self) -> dict[str, Any]:
        """Return the values of these fields, as in a request."""
        values = self.model_dump(exclude_none=True, by_alias=True, include={*ExtendedFields.model_fields})
        if self.logit_bias:
            values["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return values

    def unknown_fields(self) -> Iterator[tuple[str, ...]]:
        known = UNSUPPORTED.keys() | IDENTITIES
        return (path for path in super().unknown_fields() if len(path) > 1 or path[0] not in known)

    def check_fields(self) -> None:
        """Raise ApiError for an unsupported field."""
        for name, value in self.model_extra.items():
            if value is None or _is_one_of(value, UNSUPPORTED.get(name, ())):
                continue
            if name in IDENTITIES and not isinstance(value, str):
                raise field_error(name, f"got {type(value).__name__}, expected a string")
            if name in UNSUPPORTED:
                accepted = " or ".join(map(json.dumps, (*UNSUPPORTED[name], None)))
                problem = f"got a value that this server does not support, expected {accepted}"
                raise field_error(name, problem, code="unsupported_parameter")


class GenerationRequest(ExtendedFields):
    """The fields that chat and completion requests share."""

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: Stops | None = None
    n: int | None = Field(1, ge=1, le=MAX_CHOICES)
    metadata: Metadata | None = None
    store: bool | None = None  # no effect: the server stores no answers
    prompt_cache_options: dict[str, Any] | None = None  # guides OpenAI's cache
    response_format: ResponseFormat | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)  # vLLM's field
    # The names of structured outputs in older versions of vLLM.
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None

    def generate_arguments(self, defaults: Mapping[str, Any] = {}) -> dict[str, Any]:
        """Return the arguments of `LLM.generate`, without the prompt. `defaults` are those of the model."""
        given = {name: getattr(self, name) for name in SamplingFields.model_fields}
        arguments = {name: defaults.get(name) if value is None else value for name, value in given.items()}
        arguments |= {"ignore_eos": bool(self.ignore_eos), "priority": self.priority or 0}
        arguments["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop or []
        arguments["stop_ids"] = self.stop_token_ids or []
        if arguments["temperature"] is None:
            arguments["temperature"] = 1.0  # OpenAI's default
        arguments |= {"max_new_tokens": self.max_new_tokens, "min_new_tokens": self.min_tokens or 0}
        arguments["logprobs"] = self.logprob_count
        return arguments

    def choice_seed(self, index: int) -> int | None:
        """Return the seed of a choice, or None for a random seed. Choice 0 has the seed of the request."""
        if self.seed is None:
            return None
        return (self.seed + index * SEED_STRIDE) % 2**64

    @property
    def max_new_tokens(self) -> int | None:
        """The maximum length of an answer in tokens, or None for no limit."""
        raise NotImplementedError

    @property
    def argument_fields(self) -> dict[str, str]:
        """The fields of the arguments of `LLM.generate` that have another name."""
        return {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "stop_ids": "stop_token_ids"}

    @property
    def logprob_count(self) -> int | None:
        """The number of most likely tokens to return with each token, or None for no log probabilities."""
        raise NotImplementedError

    @property
    def prompt_logprob_counts(self) -> dict[str, int | None]:
        """The numbers of most likely tokens to return with each token of the prompt, by the fields that set them."""
        return {"prompt_logprobs": self.prompt_logprobs}

    @property
    def form(self) -> Form | None:
        """The form that the answers have, or None for any text."""
        return next(iter(self.forms), None)

    @property
    def forms(self) -> list[Form]:
        """The forms that the fields give: one or none, or the request is wrong."""
        guided = {kind: getattr(self, f"guided_{kind}") for kind in ("json", "regex", "choice", "grammar")}
        structured, format = ([] if p is None else p.forms for p in (self.structured_outputs, self.response_format))
        own = {"json": self.json_schema, "regex": self.regex or None, "grammar": self.grammar or self.ebnf or None}
        fields = {"json": "json_schema", "regex": "regex", "grammar": "grammar" if self.grammar else "ebnf"}
        others = [Form(kind, value, fields[kind]) for kind, value in own.items() if value is not None]
        return [*structured, *forms_of("guided_", guided), *others, *format]

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options.continuous_usage_stats)

    def check_fields(self) -> None:
        super().check_fields()
        if self.structured_outputs is not None and len(self.structured_outputs.forms) != 1:
            got = ", ".join(form.field.partition(".")[2] for form in self.structured_outputs.forms) or "none"
            problem = f"got {got}, expected one of json, json_object, regex, choice and grammar"
            raise field_error("structured_outputs", problem)
        if len(self.forms) > 1:
            first, *_, last = (form.param for form in self.forms)
            raise field_error(last, f"got it together with {first}, expected one of them")
        longest = self.max_new_tokens
        if self.min_tokens and longest is not None and self.min_tokens > longest:
            problem = f"got {self.min_tokens}, expected at most the maximum length, which is {longest}"
            raise field_error("min_tokens", problem)
        if self.stream and self.prompt_logprobs is not None:
            raise field_error("prompt_logprobs", "got it with stream, expected one of them")
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "got options without stream")


def limit(max_tokens: int | None) -> int | None:
    """Return the limit of a field `max_tokens`, or None. In LM Studio and llama.cpp, -1 stands for no limit."""
    return None if max_tokens == -1 else max_tokens


Ids = Annotated[list[int], Field(min_length=1, fail_fast=True)]


class CompletionRequest(GenerationRequest):
    """The request of `/v1/completions`."""

    prompt: str | Several[int] | Several[str] | Several[Ids]
    max_tokens: int | None = Field(None, lt=2**31)
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    echo: bool | None = False
    add_special_tokens: bool | None = True  # vLLM's field

    @property
    def max_new_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else limit(self.max_tokens)  # OpenAI's default

    @property
    def logprob_count(self) -> int | None:
        return self.logprobs

    @property
    def prompt_logprob_counts(self) -> dict[str, int | None]:
        return super().prompt_logprob_counts | ({"logprobs": self.logprobs} if self.echo else {})

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as text or token ids."""
        if isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int):
            return list(self.prompt)
        return [self.prompt]  # type: ignore[list-item]

    def check_fields(self) -> None:
        super().check_fields()
        choices = self.n or 1
        if self.best_of not in (None, choices):
            problem = f"got {self.best_of}, expected n, which is {choices}"
            raise field_error("best_of", problem, code="unsupported_parameter")
        if len(self.prompts) * choices > MAX_CHOICES:
            problem = f"got {len(self.prompts)} prompts with n = {choices}, expected at most {MAX_CHOICES} answers"
            raise field_error("prompt", problem)


def _is_one_of(value: Any, accepted: tuple) -> bool:
    # For `==`, 0 and False are equal. They must differ here.
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in accepted)
