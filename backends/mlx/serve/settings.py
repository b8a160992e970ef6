"""The settings of a server, besides its models."""

from __future__ import annotations

from dataclasses import dataclass

MEBIBYTE = 2**20


@dataclass(frozen=True)
class Settings:
    """What a server accepts, and how long it waits.

    - `host`: the address on which the server listens, or None if another program listens. If it is a loopback address,
      a request whose Host header names another machine returns HTTP 400. This protects against DNS rebinding by web
      pages.
    - `api_key`: the key that requests must have, or None for no key.
    - `allowed_origins`: the origins whose web pages may use the server, such as `https://chat.example`, or `*` for all.
    - `allow_adapter_updates`: clients may load LoRA adapters from folders of this machine, and unload them.
    - `strict`: a request with an unknown field returns HTTP 400. Otherwise, such fields have no effect, and are logged.
    - `stored_bytes`: the size of the responses that the server keeps in memory for later requests. 0: none.
    - `files_bytes`: the largest size of the files that clients upload, together. They are in a temporary folder.
    - `allowed_hosts`: the names in Host headers that are accepted as well if `host` is a loopback address, such as that
      of a reverse proxy. `*` stands for all.
    - `max_body_bytes`: the largest size of a request's body. A larger one returns HTTP 413.
    - `body_seconds`: the longest time until a request's body is complete.
    - `request_seconds`: the longest time from a request to the end of its answer, waiting included. 0: no limit.
    - `send_seconds`: the longest time that a client may leave a part of a stream unread.
    - `ping_seconds`: if a stream has no event for this long, it gets a comment, which keeps the connection alive.
    - `stall_seconds`: if answers run and the engine completes no step for this long, `/health` returns HTTP 503.
    - `grace_seconds`: at the shutdown, running answers have this time to end.
    """

    host: str | None = None
    api_key: str | None = None
    allowed_origins: tuple[str, ...] = ()
    allow_adapter_updates: bool = False
    strict: bool = False
    stored_bytes: int = 64 * MEBIBYTE
    files_bytes: int = 1024 * MEBIBYTE
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 16 * MEBIBYTE
    body_seconds: float = 30.0
    request_seconds: float = 0.0
    send_seconds: float = 60.0
    ping_seconds: float = 15.0
    stall_seconds: float = 120.0
    grace_seconds: float = 30.0
