"""Answers clients that close their side of the connection behind the request, as `nc -N` does.

To the server, such a client looks like one that has gone: TCP tells only that nothing more will come. The difference
shows when the server sends something, because the machine of a client that has gone rejects it. So the server sends
what does not change the response: before it begins, the first bytes of its status line, and between the events of a
stream, comments.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

BEGINNING = b"HTTP/1.1 "  # of all responses
# The times between what is sent. The first one is rejected, and the error appears at one of the next.
PROBE_SECONDS = (0.25, 0.05, 0.2, 0.5, 1, 2, 4, 8, 16)


class HalfClosedProtocol(H11Protocol):
    """The protocol of a connection. An app may set `scope["state"]["comment"]`, which then goes between two bodies."""

    _probing: asyncio.Task | None = None  # if the client has closed its side

    def eof_received(self) -> bool:
        """Return whether the connection stays open: if a whole request waits for its response."""
        is_waiting = self.cycle is not None and not (self.cycle.response_complete or self.cycle.more_body)
        if is_waiting:
            self._probing = self.loop.create_task(self._probe())
        return is_waiting

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._probing is not None:
            self._probing.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._probing is not None and self.cycle.response_complete:  # there is no further request
            self.transport.close()

    async def _probe(self) -> None:
        cycle = self.cycle
        cycle.transport = begun = _BegunTransport(self.transport)
        for seconds in PROBE_SECONDS:
            await asyncio.sleep(seconds)
            if cycle.response_complete or self.flow.write_paused:
                return
            if not cycle.response_started:
                begun.send_byte()
            elif comment := cycle.scope["state"].get("comment"):
                await cycle.send({"type": "http.response.body", "body": comment, "more_body": True})


class _BegunTransport:
    """A transport that sends some bytes of BEGINNING ahead, and leaves them out of what is written next."""

    def __init__(self, transport: asyncio.Transport):
        self._transport, self._sent = transport, 0

    def send_byte(self) -> None:
        self._transport.write(BEGINNING[self._sent : self._sent + 1])
        self._sent += 1

    def write(self, data: bytes) -> None:
        self._transport.write(data[self._sent :])
        self._sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
