"""`Engine`: an actor of Ray that answers requests with a model."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ModelOptions:
    """What an actor loads.

    - `path`: the `.pte` file, which every machine of the cluster must be able to read.
    - `name`: the name by which requests refer to the model.
    - `tokenizer`: a Hugging Face folder, or None for the tokenizer in the file.
    - `memory_limit`: the memory limit of each engine in bytes, or None.
    """

    path: Path
    name: str
    tokenizer: Path | None = None
    memory_limit: int | None = None

    def load(self):
        """Load the model, a language model or an encoder, in this process. Raises what `LLM.load` raises."""
        from .. import memory
        from ..serve.models import load_model

        if self.memory_limit is not None:
            memory.set_memory_limit(self.memory_limit)
        return load_model(self.path, self.tokenizer)


class Engine:
    """Answers requests with the app of the server. `start` must be called first."""

    async def start(self, model: ModelOptions) -> int:
        """Load the model, and return the number of requests that should be sent to this engine at once."""
        from ..serve.local_worker import local_worker

        self._stack = AsyncExitStack()
        loaded = self._stack.enter_context(model.load())
        self._worker = await self._stack.enter_async_context(local_worker(loaded, model.name))
        return self._worker.width

    async def answer(self, url: str, body: bytes) -> tuple[int, bytes, str]:
        """Return the HTTP status and the body of the response to a request, and the id of the request in the server."""
        from ..serve.in_process import post

        response = await post(self._worker.app, url, body)
        return response.status, response.body, response.request_id
