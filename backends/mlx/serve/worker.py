"""The queue of requests, and the one thread that runs the model."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator

from ..llm import Generation, Token

_END = object()


class Busy(Exception):
    """Raised if the queue is full, or the server is shutting down."""


class Job:
    """An answer for a client. The worker thread generates it, and the client's event loop receives it.

    Iterate over `tokens()` once. If the loop is left, or the task with the loop is cancelled, the job is
    cancelled: a waiting job at once, and a running job after the current step.
    """

    def __init__(self, worker: Worker, generation: Generation):
        self.generation = generation
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue = asyncio.Queue()  # tokens, then possibly an exception, then _END

    async def tokens(self) -> AsyncIterator[Token]:
        """Yield the tokens as they are generated. Raises the exceptions of the generation."""
        try:
            while (item := await self._items.get()) is not _END:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the job: a waiting job at once, and a running job after the current step."""
        self._worker.cancel(self)

    def work(self) -> None:
        """Generate the answer. Runs in the worker thread."""
        try:
            for token in self.generation:
                self._send(token)
        except (RuntimeError, ValueError) as error:  # a failed step, or an invalid mask
            self._send(error)
        finally:
            self.end()

    def end(self) -> None:
        """Make the iteration over `tokens()` end."""
        self._send(_END)

    def _send(self, item: object) -> None:
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:  # the event loop is closed
            self.generation.cancel()


class Worker:
    """The thread that runs the model, and a queue of at most `limit` waiting jobs."""

    def __init__(self, limit: int):
        self.limit = limit
        self._changed = threading.Condition()  # guards all attributes below
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._closed = False
        # The thread is a daemon thread, so that the process can exit during a step.
        self._thread = threading.Thread(target=self._run, name="executorch-mlx", daemon=True)
        self._thread.start()

    def submit(self, generation: Generation) -> Job:
        """Queue `generation` and return the job for it. Raises Busy if the queue is full.

        The caller must iterate over the job's tokens or cancel the job.
        """
        job = Job(self, generation)
        with self._changed:
            if self._closed:
                raise Busy("the server is shutting down")
            if len(self._waiting) >= self.limit:
                raise Busy(f"the queue is full: {self.limit} requests are waiting")
            self._waiting.append(job)
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """End a job: a waiting job at once, and a running job after the current step."""
        job.generation.cancel()
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
                job.generation.close()
                job.end()

    def count(self) -> tuple[int, int]:
        """Return the number of running jobs, 0 or 1, and the number of waiting jobs."""
        with self._changed:
            return int(self._running is not None), len(self._waiting)

    def close(self) -> None:
        """Cancel all jobs and accept no more."""
        with self._changed:
            self._closed = True
            jobs = [*self._waiting, *([self._running] if self._running else [])]
            self._changed.notify()
        for job in jobs:
            self.cancel(job)

    def _run(self) -> None:
        try:
            self._work()
        finally:  # if a bug ends the thread, the jobs are cancelled, so that no client waits forever
            self.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._running = None
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                self._running = job = self._waiting.popleft()
            job.work()
            del job  # release the job and its answer while the queue is empty
