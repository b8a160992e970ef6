"""Errors in the format of the OpenAI API."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException


class ApiError(Exception):
    """An error response. The attributes are the HTTP status `status` and the JSON `body`.

    `kind` is OpenAI's type of the error. `param` is the name of the wrong field of the request, or None.
    `code` identifies the error for programs that read it, or is None.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def add_error_handlers(app: FastAPI) -> None:
    """Register handlers on `app` that give all error responses the format of the OpenAI API."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return JSONResponse(error.body, error.status)

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            position = first["loc"][-1]
            message = f"the request body is not valid JSON: {first['ctx']['error']} at character {position}"
            return JSONResponse(ApiError(message).body, 400)
        field = ".".join(str(part) for part in first["loc"] if part != "body")
        message = f"{field}: {first['msg']}"
        if not field:
            message = "the request body is not a JSON object, or its Content-Type is not application/json"
        return JSONResponse(ApiError(message, param=field or None).body, 400)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        return JSONResponse(ApiError(str(error.detail)).body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def internal_error(_: Request, error: Exception) -> Response:
        body = ApiError(f"internal error: {type(error).__name__}", kind="server_error").body
        return JSONResponse(body, 500)
