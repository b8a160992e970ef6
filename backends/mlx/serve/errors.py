"""Errors in the formats of the APIs: that of OpenAI, Anthropic's for `/v1/messages`, and Ollama's for `/api/`."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from ..llm import BusyError, PromptLengthError, SettingError
from ..llm.errors import FieldError
from ..memory import OutOfMemoryError

log = logging.getLogger("executorch_mlx.serve")

ANTHROPIC_PATH = "/v1/messages"  # the paths that begin so belong to Anthropic's API
OLLAMA_PATH = "/api/"  # and these to Ollama's
# Anthropic's types of errors by HTTP status. Others are `invalid_request_error`, and `api_error` from 500 on.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of an error in OpenAI's API."""

    error: ErrorDetails


class AnthropicErrorDetails(BaseModel):
    type: str
    message: str
    details: dict[str, str] = {}


class AnthropicErrorBody(BaseModel):
    """The body of an error in Anthropic's API."""

    type: Literal["error"]
    error: AnthropicErrorDetails


class OllamaErrorBody(BaseModel):
    """The body of an error in Ollama's API."""

    error: str


# The errors of routes, for the description of the API. Without them, FastAPI adds its own error 422.
Responses = dict[int | str, dict[str, Any]]
ERRORS: Responses = {"default": {"description": "An error", "model": ErrorBody}}
ANTHROPIC_ERRORS: Responses = {"default": {"description": "An error", "model": AnthropicErrorBody}}
OLLAMA_ERRORS: Responses = {"default": {"description": "An error", "model": OllamaErrorBody}}


class ApiError(HTTPException):
    """An error that a client gets. `response` renders it in the format of the client's API.

    `param` is the name of the wrong field of the request, or None. `problem` says what the field got and what was
    expected; the message is the name, a colon, and the problem. `kind` is OpenAI's type of the error. `code` identifies
    the error for programs that read it, or is None.
    """

    def __init__(
        self,
        problem: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(status, f"{param}: {problem}" if param else problem, dict(headers) if headers else None)
        self.problem, self.kind, self.param, self.code = problem, kind, param, code

    def response(self, path: str) -> JSONResponse:
        """Return the response to a request for `path`, in the format of the API to which the path belongs."""
        if path.startswith(OLLAMA_PATH):
            body = self.ollama_body
        else:
            body = self.anthropic_body if path.startswith(ANTHROPIC_PATH) else self.openai_body
        return JSONResponse(body, self.status_code, self.headers)

    @property
    def openai_body(self) -> dict[str, Any]:
        """The body in the format of OpenAI's API."""
        return {"error": {"message": self.detail, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The body in the format of Anthropic's API."""
        message, code = self.detail, self.code
        if code == "context_length_exceeded":
            message = f"prompt is too long: {message}"  # clients that shorten their prompt look for these words
        other = "api_error" if self.status_code >= 500 else "invalid_request_error"
        error: dict[str, Any] = {"type": ANTHROPIC_TYPES.get(self.status_code, other), "message": message}
        return {"type": "error", "error": error | ({"details": {"error_code": code}} if code else {})}

    @property
    def ollama_body(self) -> dict[str, Any]:
        """The body in the format of Ollama's API."""
        return {"error": self.detail}

    def __str__(self) -> str:
        return self.detail


def field_error(field: str, problem: str, **options: Any) -> ApiError:
    """Return the error for a field of the request, such as `got 2, expected a number from 0 to 1`. As `ApiError`."""
    return ApiError(problem, param=field, **options)


def argument_error(error: FieldError, fields: Mapping[str, str] = {}, **options: Any) -> ApiError:
    """Return the error for an argument. `fields`: the fields of arguments that a request names otherwise."""
    return field_error(fields.get(error.name, error.name), error.problem, **options)


def server_error(message: str, status: int = 500, code: str | None = None) -> ApiError:
    """Return the error for a request that the server cannot answer through no fault of the client."""
    return ApiError(message, status=status, kind="server_error", code=code)


def no_embeddings() -> ApiError:
    problem = "embeddings: no model of this server computes embeddings or scores: serve an encoder, also beside others"
    return ApiError(problem, code="unsupported_endpoint")


def request_error(error: Exception, prompt_field: str, fields: Mapping[str, str] = {}) -> ApiError:
    """Return the error for an exception of `LLM.generate`. The message names the field of the request.

    - `prompt_field`: the field with the prompt.
    - `fields`: the fields of other arguments whose names differ from those of the fields.
    """
    if isinstance(error, SettingError):
        fields = {"bias_tokens": "logit_bias", "bias_values": "logit_bias", **fields}
        return argument_error(error, fields, code="unsupported_value")
    if isinstance(error, PromptLengthError) and error.count != 0:
        # Clients recognize this error by its code or by OpenAI's words.
        problem = f"{error.problem}. This model's maximum context length is {error.longest} tokens"
        return field_error(prompt_field, problem, code="context_length_exceeded")
    if isinstance(error, BusyError):
        return server_error(str(error), 503, "overloaded")
    if isinstance(error, FieldError) and error.name in ("prompt", "text"):
        return field_error(prompt_field, error.problem)
    if isinstance(error, ValueError):
        return field_error(prompt_field, str(error))
    return answer_error(error)


def answer_error(error: Exception) -> ApiError:
    """Return the error for an exception that ended an answer."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OutOfMemoryError):
        return server_error(str(error), 503, "out_of_memory")
    if not isinstance(error, (RuntimeError, SettingError)):
        log.error("an answer failed", exc_info=error)
    return server_error(f"the model failed: {error}")


@contextmanager
def renamed_fields(rename: Callable[[str], str]) -> Iterator[None]:
    """Let an ApiError about a field of a chat request name the field of another API, which `rename` returns."""
    try:
        yield
    except ApiError as error:
        field = rename(error.param or "")
        if field == (error.param or ""):
            raise
        renamed = field_error(field, error.problem, status=error.status_code, kind=error.kind, code=error.code)
        raise renamed from error


def _path(error: Mapping[str, Any], body: Any) -> list[str]:
    """Return the path to the field of `body` that one of pydantic's errors is about.

    For a value that may have several types, pydantic adds the name of the type to the location. The path omits it.
    """
    path: list[str] = []
    location = error["loc"][1:] if error["loc"][:1] == ("body",) else error["loc"]
    for index, part in enumerate(location):
        is_missing = error["type"] == "missing" and index == len(location) - 1
        if isinstance(body, dict) and isinstance(part, str) and (part in body or is_missing):
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            body = body[part]
        else:
            continue
        path.append(str(part))
    if error["type"] in _TAG_ERRORS:
        path.append(_tag_field(error))
    return path


def _tag_field(error: Mapping[str, Any]) -> str:
    """Return the name of the field that tells the type of an object, for an error about this field."""
    return error["ctx"]["discriminator"].strip("'")


def _message(errors: Sequence[Mapping[str, Any]]) -> str:
    """Return the message of pydantic's errors about one value. It says what the field has and what it should have.

    There are several errors if the value may have several types. If the value has one of them, its error is about
    something else, and counts.
    """
    error = next((error for error in errors if not error["type"].endswith("_type")), errors[0])
    message, value = error["msg"].removeprefix("Value error, "), error["input"]
    if error["type"] in _LENGTHS:
        unit, bound, limit = _LENGTHS[error["type"]]
        return f"got {len(value)} {unit}, expected {bound} {error['ctx'][limit]}"
    if error["type"] == "union_tag_invalid":
        others, _, last = error["ctx"]["expected_tags"].rpartition(", ")
        return f"got {_shown(value[_tag_field(error)])}, expected {others} or {last}"
    if not message.startswith("Input should be "):
        return _MESSAGES.get(error["type"], message)
    same = errors if error["type"].endswith("_type") else [error]
    expected = [_EXPECTED.get(other["type"], other["msg"].removeprefix("Input should be ")) for other in same]
    return f"got {_shown(value)}, expected {' or '.join(dict.fromkeys(expected))}"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    return "a list" if isinstance(value, list) else json.dumps(value, ensure_ascii=False, default=str)[:40]


# Errors about the field that tells the type of an object.
_TAG_ERRORS = ("union_tag_invalid", "union_tag_not_found")
# The messages of errors, and what errors expect, where pydantic's words are about Python.
_MESSAGES = {"extra_forbidden": "unknown field", "union_tag_not_found": "Field required"}
_EXPECTED = dict.fromkeys(("dict_type", "model_attributes_type", "model_type"), "an object")
_EXPECTED["none_required"] = "null"


# Pydantic's errors about the length of a value: what is counted, and the bound with its name in the error.
_LENGTHS = {
    "too_short": ("items", "at least", "min_length"),
    "too_long": ("items", "at most", "max_length"),
    "string_too_short": ("characters", "at least", "min_length"),
    "string_too_long": ("characters", "at most", "max_length"),
}


def validation_error(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """Return the error for pydantic's errors about a request body. Its message names a field, as `messages.0.role`."""
    if not isinstance(body, dict):
        return ApiError("the request body is not a JSON object, or its Content-Type is not application/json")
    located = [(_path(error, body), error) for error in errors]
    # A value that may have several types has one error per type. The deepest error is that of the type that fits best.
    path, _ = max((entry for entry in located if entry[0][:1] == located[0][0][:1]), key=lambda entry: len(entry[0]))
    field, same = ".".join(path), [error for other, error in located if other == path]
    code = "unknown_parameter" if same[0]["type"] == "extra_forbidden" else None
    return ApiError(_message(same), param=field or None, code=code)


def add_error_handlers(app: FastAPI) -> None:
    """Register handlers on `app` that give all error responses the format of the OpenAI API."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response(request.scope["path"])

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return validation_error(error.errors(), error.body).response(request.scope["path"])

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:100]}: {error.detail}{_expected_route(request, error)}"
        return ApiError(message, status=error.status_code, headers=error.headers).response(request.scope["path"])


def _expected_route(request: Request, error: HTTPException) -> str:
    """Return the end of the message of an error about the path or the method of a request."""
    if error.status_code == 405:
        return f", expected {error.headers['Allow']}"
    if error.status_code != 404:
        return ""
    paths = [*request.app.openapi()["paths"]]
    # Clients add /chat/completions to an address to which their user has not, or has already, added /v1.
    similar = difflib.get_close_matches(request.url.path, paths, n=1, cutoff=0.8)
    return f", expected {', '.join(similar or paths)}"


class InternalErrors:
    """Middleware: answers a request with HTTP 500 if an exception comes from its route.

    FastAPI's handlers of `Exception` run around all middleware. Their responses would lack the headers that the
    middleware adds, such as those without which a page of another origin cannot read the error.
    """

    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send) -> None:
        has_started = False

        async def send_and_note(message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception as error:
            if scope["type"] != "http" or has_started:
                raise
            log.error("internal error", exc_info=error)
            response = server_error(f"internal error: {type(error).__name__}").response(scope["path"])
            await response(scope, receive, send)
