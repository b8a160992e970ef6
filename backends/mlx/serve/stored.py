"""The responses that the server keeps, so that later requests can refer to them."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ApiError, field_error


@dataclass(frozen=True)
class StoredResponse:
    """A response.

    - `body`: the response as the client got it.
    - `items`: the items of its conversation before the answer, as in requests.
    """

    body: dict[str, Any]
    items: Sequence[dict[str, Any]]

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The items of the conversation, with the answer."""
        return [*self.items, *self.body["output"]]


class StoredResponses:
    """Keeps responses in memory, up to a number of bytes. Then the oldest ones go.

    `limit`: the bytes of all responses as JSON, each with its conversation. Methods may be called from any thread.
    """

    def __init__(self, limit: int):
        self._limit, self._size, self._lock = limit, 0, threading.Lock()
        self._entries: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()

    def add(self, body: dict[str, Any], items: Sequence[dict[str, Any]]) -> None:
        size = len(json.dumps(body)) + len(json.dumps(items))
        with self._lock:
            self._entries[body["id"]] = StoredResponse(body, items), size
            self._size += size
            while self._size > self._limit:
                _, (_, removed) = self._entries.popitem(last=False)
                self._size -= removed

    def get(self, id: str, field: str | None = None) -> StoredResponse:
        """Return a response. `field`: the field of a request that has its id. Raises ApiError if there is none."""
        with self._lock:
            if id in self._entries:
                return self._entries[id][0]
        message = f"the response {id[:100]!r} is not stored"
        if field is None:
            raise ApiError(message, status=404)
        raise field_error(field, message, code="previous_response_not_found")

    def remove(self, id: str) -> None:
        """Remove a response. Raises ApiError if there is none."""
        self.get(id)
        with self._lock:
            if id in self._entries:
                self._size -= self._entries.pop(id)[1]

    def item(self, id: str, field: str) -> dict[str, Any]:
        """Return an item of a conversation by its id. Raises ApiError if there is none."""
        with self._lock:
            entries = [entry for entry, _ in self._entries.values()]
        for entry in reversed(entries):
            for item in entry.conversation:
                if item.get("id") == id:
                    return item
        raise field_error(field, f"the item {id[:100]!r} is not stored")
