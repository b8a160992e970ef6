"""`serve_app`: the OpenAI API of a model as an application of Ray Serve."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import StreamingResponse

from ..serve.settings import Settings
from .engine import ModelOptions
from .prefix import prefix_digests

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

Headers = list[tuple[bytes, bytes]]
# Headers that the ingress drops: they belong to the connection with the client, and `exchange` makes new ones.
HOP_HEADERS = {b"content-type", b"content-length", b"host", b"connection", b"transfer-encoding"}


def serve_app(
    model: str | Path,
    *,
    name: str | None = None,
    tokenizer: str | Path | None = None,
    memory_limit: int | None = None,
    api_key: str | None = None,
    rows: int = 4,
    min_replicas: int = 1,
    max_replicas: int = 1,
    autoscaling: Mapping[str, Any] = {},
    actor_options: Mapping[str, Any] = {"num_cpus": 1},
) -> Application:
    """Return an application of Ray Serve that serves `model` with the OpenAI API and the chat page.

        from ray import serve
        from executorch_mlx.ray import serve_app

        serve.run(serve_app("model.pte", rows=8, max_replicas=4))

    A request goes to the replica that holds the longest beginning of its prompt in its KV cache, unless that replica
    has many more requests than another one.

    - `model`: a `.pte` file, which every machine of the cluster must be able to read.
    - `name`: the name of the model in the API; by default the file name without `.pte`.
    - `tokenizer`: a Hugging Face folder; by default the tokenizer in the file.
    - `memory_limit`: the memory limit of each replica in bytes.
    - `api_key`: the key that requests must have. None: everyone who can reach Serve's address can use the model.
    - `rows`: the number of requests that run at once in a replica, the `--batch` of the export. Twice as many may be
      sent to a replica; others wait.
    - `min_replicas`, `max_replicas`: with more requests than `rows` per replica, Serve starts further replicas up to
      the maximum, and with fewer it stops replicas.
    - `autoscaling`: further fields of Serve's `AutoscalingConfig`, such as `{"upscale_delay_s": 5}`.
    - `actor_options`: the resources of a replica, such as `{"num_gpus": 1}`, and other options of Ray actors.

    Raises ValueError if `rows` or `min_replicas` is less than 1, or `max_replicas` less than `min_replicas`. Raises
    ModuleNotFoundError without Ray.
    """
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    for argument, value, low in (
        ("rows", rows, 1),
        ("min_replicas", min_replicas, 1),
        ("max_replicas", max_replicas, min_replicas),
    ):
        if value < low:
            raise ValueError(f"{argument}: got {value}, expected at least {low}")
    path = Path(model).resolve()
    folder = None if tokenizer is None else Path(tokenizer).resolve()
    options = ModelOptions(path, name or path.stem, folder, memory_limit)
    sizes = {"min_replicas": min_replicas, "max_replicas": max_replicas, "target_ongoing_requests": rows}
    replicas = serve.deployment(Replica).options(
        name=f"{options.name}-engine",
        ray_actor_options=dict(actor_options),
        max_ongoing_requests=2 * rows,
        autoscaling_config=AutoscalingConfig(**sizes | dict(autoscaling)),
        request_router_config=RequestRouterConfig(
            request_router_class="executorch_mlx.ray.router.PrefixRouter", request_router_kwargs={"rows": rows}
        ),
    )
    # The ingress only passes requests on. Requests that no replica takes yet wait in the ingress.
    ingress = serve.deployment(Ingress).options(
        name=options.name, max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0}
    )
    return ingress.bind(replicas.bind(options, api_key))


class Replica:
    """Answers HTTP requests with the app of the server."""

    async def __init__(self, model: ModelOptions, api_key: str | None):  # type: ignore[misc]
        from ..serve import create_app
        from ..serve.in_process import running

        self._stack = AsyncExitStack()
        self._llm = self._stack.enter_context(model.load())
        app = create_app(self._llm, name=model.name, settings=Settings(api_key=api_key))
        self._app = await self._stack.enter_async_context(running(app))

    async def exchange(
        self, method: str, path: str, query: bytes, headers: Headers, body: bytes, *, digests: list[bytes]
    ) -> AsyncIterator[dict]:
        """Yield the ASGI messages of the response. `digests` is for `PrefixRouter`."""
        from ..serve.in_process import exchange

        async for message in exchange(self._app, path, body, method=method, query=query, headers=headers):
            yield message


class Ingress:
    """Passes HTTP requests to the replicas."""

    def __init__(self, replicas: DeploymentHandle):
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> StreamingResponse:
        body = await _read(request, Settings().max_body_bytes)
        messages = self._replicas.exchange.remote(
            request.method,
            request.url.path,
            request.scope["query_string"],
            [(key, value) for key, value in request.headers.raw if key not in HOP_HEADERS],
            body,
            digests=prefix_digests(body),
        )
        start = await anext(messages)
        response = StreamingResponse(_parts(messages), start["status"])
        response.raw_headers = [(bytes(key), bytes(value)) for key, value in start["headers"]]
        return response


async def _read(request: Request, limit: int) -> bytes:
    """Return the body of a request. If it exceeds `limit`, return a beginning that does too: the replica refuses it."""
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > limit:
            break
    return b"".join(parts)


async def _parts(messages: DeploymentResponseGenerator) -> AsyncIterator[bytes]:
    """Yield the parts of the body. Cancels the request if the client disconnects."""
    is_complete = False
    try:
        async for message in messages:
            if message["type"] == "http.response.body":
                yield message.get("body", b"")
        is_complete = True
    finally:
        if not is_complete:
            messages.cancel()
