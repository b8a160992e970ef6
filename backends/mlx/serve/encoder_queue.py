"""`EncoderQueue`: joins the texts of requests that wait at the same time to calls of an encoder."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from ..encoders import Encoder

TEXTS_AT_A_TIME = 256  # texts of all requests that are sorted by length together
SHARE = 32  # texts of one request in a round, while others wait


class _Job:
    """The texts of a request, of which `done` have results."""

    def __init__(self, ids: Sequence[list[int]], types: Sequence[list[int]] | None, size: int):
        import numpy as np

        self.ids, self.types, self.done = ids, types, 0
        self.results = np.zeros((len(ids), size), np.float32)
        self.future: Future[np.ndarray] = Future()


class EncoderQueue:
    """Runs an encoder on a thread of its own.

    In each round, every request has its turn, so that a short request does not wait for the whole of a long one.
    """

    def __init__(self, encoder: Encoder):
        self._encoder, self._jobs = encoder, deque[_Job]()
        self._changed, self._is_closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="encoder", daemon=True)
        self._thread.start()

    def submit(self, ids: Sequence[list[int]], types: Sequence[list[int]] | None = None) -> Future[np.ndarray]:
        """Return a future of the results for texts, float32 [N, size]. Cancelling it leaves out what has not begun."""
        job = _Job(ids, types, self._encoder.config.size)
        with self._changed:
            if self._is_closed:
                raise RuntimeError(f"{self._encoder.name} is closed")
            self._jobs.append(job)
            self._changed.notify()
        return job.future

    def close(self) -> None:
        """End the thread after the call that runs. Requests that wait get a RuntimeError."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while (turns := self._next_turns()) is not None:
            ids = [job.ids[index] for job, indices in turns for index in indices]
            types = [job.types[index] for job, indices in turns if job.types for index in indices]
            try:
                results = self._encoder.run(ids, types or None)
            except Exception as error:  # noqa: BLE001  (each waiting request gets it)
                for job, _ in turns:
                    self._fail(job, error)
                continue
            for job, indices in turns:
                job.results[indices.start : indices.stop], results = results[: len(indices)], results[len(indices) :]
                job.done = indices.stop
                if job.done == len(job.ids) and job.future.set_running_or_notify_cancel():
                    job.future.set_result(job.results)

    def _next_turns(self) -> list[tuple[_Job, range]] | None:
        """Wait for texts, and return those of the next round by request. Returns None when the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_closed)
            self._jobs = deque(job for job in self._jobs if not job.future.cancelled() and job.done < len(job.ids))
            if self._is_closed:
                for job in self._jobs:
                    self._fail(job, RuntimeError(f"{self._encoder.name} is closed"))
                return None
            turns, room = [], TEXTS_AT_A_TIME
            share = TEXTS_AT_A_TIME if len(self._jobs) == 1 else SHARE
            for job in self._jobs:
                indices = range(job.done, min(len(job.ids), job.done + min(share, room)))
                room -= len(indices)
                if indices:
                    turns.append((job, indices))
            self._jobs.rotate(-len(turns))
            return turns

    def _fail(self, job: _Job, error: Exception) -> None:
        job.done = len(job.ids)
        if job.future.set_running_or_notify_cancel():
            job.future.set_exception(error)
