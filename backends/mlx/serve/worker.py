"""One model, many clients: whose turn it is."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator

from ..llm import Generation, Token

_END = object()


class Busy(Exception):
    """As many requests wait as may."""


class Job:
    """An answer on its way to the event loop of who asked for it. To be iterated once.

    Whoever stops iterating, or is cancelled, gives up its turn: in the queue at once, on the
    model after the step that is on its way.
    """

    def __init__(self, worker: Worker, generation: Generation):
        self.generation = generation
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue = asyncio.Queue()

    async def tokens(self) -> AsyncIterator[Token]:
        """The tokens as they come; raises what the generation raised."""
        try:
            while (item := await self._arrived.get()) is not _END:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.cancel()

    def cancel(self) -> None:
        self._worker.cancel(self)

    def work(self) -> None:
        """Draws all tokens; in the worker's thread."""
        try:
            for token in self.generation:
                self._send(token)
        except (RuntimeError, ValueError) as error:  # a step that failed, a mask that is none
            self._send(error)
        finally:
            self.end()

    def end(self) -> None:
        self._send(_END)

    def _send(self, item: object) -> None:
        try:
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody is there any more
            self.generation.cancel()


class Worker:
    """The one thread that runs the model, and the `limit` jobs at most that wait for it."""

    def __init__(self, limit: int):
        self.limit = limit
        self._turn = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._closed = False
        # A daemon: a step that is on its way does not keep the process.
        self._thread = threading.Thread(target=self._run, name="executorch-mlx", daemon=True)
        self._thread.start()

    def submit(self, generation: Generation) -> Job:
        """Queues `generation`, whose job has to be iterated or cancelled. Raises Busy."""
        job = Job(self, generation)
        with self._turn:
            if self._closed:
                raise Busy("the server is shutting down")
            if len(self._waiting) >= self.limit:
                raise Busy(f"{self.limit} requests are waiting already")
            self._waiting.append(job)
            self._turn.notify()
        return job

    def cancel(self, job: Job) -> None:
        job.generation.cancel()
        with self._turn:
            if job in self._waiting:
                self._waiting.remove(job)
                job.generation.close()
                job.end()

    def count(self) -> tuple[int, int]:
        """Jobs that run, and that wait."""
        with self._turn:
            return int(self._running is not None), len(self._waiting)

    def close(self) -> None:
        """Ends all jobs, takes no more."""
        with self._turn:
            self._closed = True
            jobs = [*self._waiting, *([self._running] if self._running else [])]
            self._turn.notify()
        for job in jobs:
            self.cancel(job)

    def _run(self) -> None:
        try:
            self._work()
        finally:  # nobody waits for a thread that a bug has ended
            self.close()

    def _work(self) -> None:
        while True:
            with self._turn:
                self._running = None
                self._turn.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                self._running = job = self._waiting.popleft()
            job.work()
            del job  # it and its answer are not kept while nobody asks
