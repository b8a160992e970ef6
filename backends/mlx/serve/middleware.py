"""What every request passes before its route: access log, Host header, API key, and the limits of size and time."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import time
import uuid
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from .errors import ApiError, InternalErrors
from .settings import Settings

access_log = logging.getLogger("executorch_mlx.access")
CLIENT_DISCONNECTED = 499  # nginx's status for this case; it appears only in the log
OPEN_PATHS = ("/", "/health")  # paths that need no key, in addition to those below /page/


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address `host`."""
    if host.lower().removesuffix(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def add_middleware(app: FastAPI, settings: Settings) -> None:
    """Add the middleware to `app`. A request passes first the middleware that is added last."""
    app.add_middleware(WithoutExtraSlashes)
    app.add_middleware(BodyLimits, settings=settings)
    if settings.api_key is not None:
        app.add_middleware(ApiKey, key=settings.api_key)
    if settings.host is not None and is_loopback(settings.host) and "*" not in settings.allowed_hosts:
        app.add_middleware(LocalHost, allowed=settings.allowed_hosts)
    app.add_middleware(InternalErrors)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-ID"],
            allow_private_network=True,  # browsers ask for it when a page of a public address uses a local server
        )
    app.add_middleware(HeadAsGet)
    app.add_middleware(AccessLog)


class AccessLog:
    """Writes one JSON line for each request, without text of prompts or answers. Routes add entries with `annotate`."""

    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        entry = {"request_id": f"req_{uuid.uuid4().hex}", "method": scope["method"], "path": scope["path"]}
        scope["access_entry"], status, started = entry, CLIENT_DISCONNECTED, time.monotonic()

        async def send_and_note(message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", []).append((b"x-request-id", entry["request_id"].encode()))
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            entry |= {"status": entry.pop("status", status), "seconds": round(time.monotonic() - started, 4)}
            access_log.info(json.dumps(entry))


def annotate(scope, **entries: Any) -> None:
    """Add entries to the line of a request in the access log."""
    scope.get("access_entry", {}).update(entries)


class HeadAsGet:
    """Gives a request with the method HEAD, as health checks send it, to the route for GET. uvicorn omits the body."""

    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send) -> None:
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self._app(scope | {"method": "GET"} if is_head else scope, receive, send)


class WithoutExtraSlashes:
    """Gives a request whose path has extra slashes to the route without them: `/v1/models/` and `//v1/models`.

    Clients make such paths from a base address that ends with a slash.
    """

    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http" and not scope["path"].startswith("/page/"):
            scope = scope | {"path": "/" + "/".join(filter(None, scope["path"].split("/")))}
        await self._app(scope, receive, send)


class LocalHost:
    """Refuses requests whose Host header names another machine. This protects against DNS rebinding by web pages.

    `allowed`: names that are accepted, such as that of a reverse proxy. A request without the header, which HTTP/1.0
    permits, comes from no browser.
    """

    def __init__(self, app, allowed: tuple[str, ...] = ()):
        self._app, self._allowed = app, {name.lower() for name in allowed}

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http" and any(name == b"host" for name, _ in scope["headers"]):
            host = _header(scope, b"host").rsplit("]", 1)
            name = host[0].removeprefix("[") if len(host) == 2 else host[0].split(":")[0]
            if not (is_loopback(name) or name.lower() in self._allowed):
                message = "the Host header names another machine, expected the loopback address or an allowed host"
                error = ApiError(message)
                return await error.response(scope["path"])(scope, receive, send)
        await self._app(scope, receive, send)


class ApiKey:
    """Refuses requests without the key, but for the page and `/health`."""

    def __init__(self, app, key: str):
        self._app, self._key = app, key.encode()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http" and not self._is_open(scope["path"]) and not self._has_key(scope):
            error = ApiError(
                "the API key is missing or wrong: send the header Authorization: Bearer <key>",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            return await error.response(scope["path"])(scope, receive, send)
        await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in OPEN_PATHS or path.startswith("/page/")

    def _has_key(self, scope) -> bool:
        scheme, _, given = _header(scope, b"authorization").partition(" ")
        is_bearer = self._is_key(given.strip()) and scheme.lower() == "bearer"
        return is_bearer or self._is_key(_header(scope, b"x-api-key"))  # the header of Anthropic's API

    def _is_key(self, given: str) -> bool:
        # compare_digest takes the same time however much of the key is right.
        return hmac.compare_digest(given.encode("latin-1"), self._key)


class BodyLimits:
    """Limits the size of a request's body, and the time until all of it is there."""

    def __init__(self, app, settings: Settings):
        self._app, self._settings = app, settings

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        limit, seconds = self._settings.max_body_bytes, self._settings.body_seconds
        deadline, size, is_complete = time.monotonic() + seconds, 0, False
        too_large = ApiError(f"the request body is too large: expected at most {limit} bytes", status=413)
        if encoding := _header(scope, b"content-encoding").removeprefix("identity"):
            message = f"Content-Encoding: got {encoding[:40]!r}, expected a body without compression"
            error = ApiError(message, status=415)
            return await error.response(scope["path"])(scope, receive, send)
        length = _header(scope, b"content-length")
        if length.isdecimal() and int(length[:20]) > limit:
            return await too_large.response(scope["path"])(scope, receive, send)

        async def receive_limited():
            nonlocal size, is_complete
            if is_complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(deadline - time.monotonic(), 0))
            except TimeoutError:
                raise ApiError(f"the request body did not arrive within {seconds:g} s", status=408) from None
            size += len(message.get("body", b""))
            if size > limit:
                raise too_large
            is_complete = not message.get("more_body", False)
            return message

        await self._app(scope, receive_limited, send)


def _header(scope, name: bytes) -> str:
    """The value of a header, or "" if the request has none or several."""
    values = [value for key, value in scope["headers"] if key == name]
    return values[0].decode("latin-1") if len(values) == 1 else ""
