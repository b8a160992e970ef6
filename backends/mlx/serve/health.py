"""Whether the engines make progress."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from .models import Models

POLL_SECONDS = 1.0


class Health:
    """Watches the engines. An engine is stalled if it has requests but has completed no step for `stall_seconds`."""

    def __init__(self, models: Models, stall_seconds: float):
        self._models, self._stall_seconds = models, stall_seconds
        self._seen: dict[str, tuple[Any, float]] = {}  # model name -> its engine's numbers, and when they changed

    async def watch(self) -> None:
        """Look at the engines every POLL_SECONDS, until the task is cancelled."""
        while True:
            self.stalled()
            await asyncio.sleep(POLL_SECONDS)

    def stalled(self) -> dict[str, float]:
        """Return the models whose engine is stalled, and for how many seconds."""
        now, seen = time.monotonic(), {}
        for model, stats in self._models.stats().items():
            is_idle = stats.running + stats.waiting == 0
            numbers = (id(model), stats.requests, stats.steps, stats.generated_tokens, stats.busy_seconds)
            before, since = self._seen.get(model.name, (None, now))
            seen[model.name] = (numbers, now if is_idle or numbers != before else since)
        self._seen = seen
        ages = {name: now - since for name, (_, since) in seen.items()}
        return {name: age for name, age in ages.items() if age >= self._stall_seconds}

    def report(self) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of `/health`."""
        stalled = self.stalled()
        stats = self._models.stats().values()
        body: dict[str, Any] = {
            "status": "stalled" if stalled else "ok",
            "running": sum(entry.running for entry in stats),
            "waiting": sum(entry.waiting for entry in stats),
        }
        if stalled:
            body["stalled_seconds"] = {name: round(age, 1) for name, age in stalled.items()}
        return 503 if stalled else 200, body
