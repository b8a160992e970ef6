"""`RayEngines`: answers the requests of a batch with engines on the machines of a Ray cluster."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import NodeDiedError, RayActorError, RayError, RayTaskError, WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..batch.request_file import Request
from ..batch.run import error_answer, http_answer
from .engine import Engine, ModelOptions

ENGINE_DIED = (RayActorError, WorkerCrashedError, NodeDiedError)
MAX_FAILED_STARTS = 3  # after so many engines in a place have died while they loaded the model, the place stays empty
MAX_DEATHS_ALONE = 2  # after so many engines have died while they answered one request alone, the request gets an error
WATCH_SECONDS = 2.0  # the time between two looks for places without an engine
OBJECT_STORE_BYTES = 128 * 2**20  # in a cluster that this process starts. Requests and answers are small


@dataclass(frozen=True)
class Place:
    """Where an engine runs: a machine, and the number of the GPU there, or None for an engine on the CPU."""

    node: str
    host: str
    gpu: int | None
    cpus: float


@dataclass
class EngineState:
    """An engine and its load.

    `width` is the number of requests that should be sent to the engine at once, 0 until the model is loaded. `requests`
    is the number of requests that it answers now. If `is_reserved`, it answers one request alone.
    """

    actor: Any
    width: int = 0
    requests: int = 0
    is_reserved: bool = False


class RayEngines:
    """One engine on each machine of the cluster that has CPUs, or one for each GPU of a machine that has GPUs.

    Machines may join and leave. An engine that dies is started again, and its requests go to other engines. Because one
    of these requests may be the cause, each of them is then answered alone: its engine gets no other request. If
    MAX_DEATHS_ALONE engines die while they answer the same request alone, that request gets an error.
    """

    def __init__(self, model: ModelOptions, engine: type = Engine):
        self.model, self._class = model, engine
        self._engines: dict[Place, EngineState] = {}
        self._failed_starts: dict[Place, int] = {}  # failed starts, by place
        self._changed = asyncio.Condition()
        self._waiting_alone = 0  # the number of requests that wait for an engine without other requests
        self._last_error = "the cluster has no machine with CPUs or GPUs"
        self._failure: Exception | None = None
        self._tasks: set[asyncio.Task] = set()

    # Workers of a batch -----------------------------------------------------------------

    @property
    def width(self) -> int:
        return sum(engine.width for engine in self._engines.values())

    async def answer(self, request: Request) -> dict[str, Any]:
        """Return the answer to a request. Raises RuntimeError if no engine can be started any more."""
        deaths_alone, alone = 0, False
        while deaths_alone < MAX_DEATHS_ALONE:
            place, engine = await self._acquire(alone)
            try:
                return http_answer(request, *await engine.actor.answer.remote(request.url, request.body))
            except RayTaskError as error:
                return error_answer(request, "server_error", str(error.cause))
            except ENGINE_DIED as error:
                await self._remove(place, engine, f"{place.host}: the engine died: {error}")
                deaths_alone += alone
                alone = True
            finally:
                await self._release(engine)
        return error_answer(request, "engine_died", f"{MAX_DEATHS_ALONE} engines died while they answered this request")

    async def _acquire(self, alone: bool) -> tuple[Place, EngineState]:
        """Wait for an engine with room for a request, or for one without requests if `alone`."""
        async with self._changed:
            self._waiting_alone += alone
            try:
                while True:
                    if self._failure is not None:
                        raise self._failure
                    if found := self._find(alone):
                        found[1].requests += 1
                        found[1].is_reserved = alone
                        return found
                    await self._changed.wait()
            finally:
                self._waiting_alone -= alone

    def _find(self, alone: bool) -> tuple[Place, EngineState] | None:
        ready = [(place, engine) for place, engine in self._engines.items() if engine.width and not engine.is_reserved]
        if self._waiting_alone and not alone:
            # The first engine gets no further requests. When its own are done, it can answer a request alone.
            ready = ready[1:]
        room = [found for found in ready if found[1].requests < (1 if alone else found[1].width)]
        return min(room, key=lambda found: found[1].requests / found[1].width, default=None)

    async def _release(self, engine: EngineState) -> None:
        async with self._changed:
            engine.requests -= 1
            engine.is_reserved = False
            self._changed.notify_all()

    async def _remove(self, place: Place, engine: EngineState, reason: str) -> None:
        async with self._changed:
            engine.width, self._last_error = 0, reason
            if self._engines.get(place) is engine:
                del self._engines[place]
                ray.kill(engine.actor)  # the actor may be alive but unreachable

    # Start and end of engines -----------------------------------------------------------

    async def watch(self) -> None:
        """Start an engine in every place that has none, until cancelled."""
        try:
            while True:
                for place in await asyncio.to_thread(_places):
                    if place not in self._engines and self._failed_starts.get(place, 0) < MAX_FAILED_STARTS:
                        self._engines[place] = EngineState(_actor(place, self._class))
                        task = asyncio.create_task(self._start(place, self._engines[place]))
                        self._tasks.add(task)
                        task.add_done_callback(self._tasks.discard)
                if not self._engines:
                    return await self._fail(f"no engine can run in the Ray cluster: {self._last_error}")
                await asyncio.sleep(WATCH_SECONDS)
        except (RayError, OSError, RuntimeError) as error:
            await self._fail(f"the connection to the Ray cluster is lost: {error}")

    async def _fail(self, reason: str) -> None:
        async with self._changed:
            self._failure = RuntimeError(reason)
            self._changed.notify_all()

    async def _start(self, place: Place, engine: EngineState) -> None:
        try:
            width = await engine.actor.start.remote(self.model)
        except RayTaskError as error:  # the model cannot be loaded: another start would fail too
            await self._start_failed(place, engine, MAX_FAILED_STARTS, f"{place.host}: {error.cause}")
        except ENGINE_DIED as error:
            failed = self._failed_starts.get(place, 0) + 1
            await self._start_failed(place, engine, failed, f"{place.host}: the engine died: {error}")
        else:
            async with self._changed:
                engine.width = width
                self._changed.notify_all()

    async def _start_failed(self, place: Place, engine: EngineState, failed: int, reason: str) -> None:
        self._failed_starts[place] = failed
        await self._remove(place, engine, reason)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for engine in self._engines.values():
            ray.kill(engine.actor)


@asynccontextmanager
async def ray_engines(model: ModelOptions, address: str = "") -> AsyncIterator[RayEngines]:
    """A context manager: starts engines on the Ray cluster at `address`, and stops them at the end.

    If this process is already connected to a cluster, the engines run there. Otherwise, an empty address stands for the
    cluster at the address in the environment variable RAY_ADDRESS, else the cluster that runs on this machine, else a
    new cluster. Raises ConnectionError if there is no cluster at the address.
    """
    is_own = not ray.is_initialized()
    if is_own:
        await asyncio.to_thread(_connect, address)
    engines = RayEngines(model)
    watching = asyncio.create_task(engines.watch())
    try:
        yield engines
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        engines.close()
        if is_own:
            ray.shutdown()


def _connect(address: str) -> None:
    options = {"log_to_driver": False, "logging_level": "ERROR"}
    given = address or os.environ.get("RAY_ADDRESS")
    try:
        ray.init(given or "auto", **options)
    except ConnectionError:
        if given:
            raise
        ray.init("local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **options)


def _places() -> list[Place]:
    """Return the places for engines on the machines that are alive now."""
    found = []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        cpus, gpus = (node["Resources"].get(name, 0) for name in ("CPU", "GPU"))
        for gpu in range(int(gpus)) if gpus >= 1 else [None] if cpus >= 1 else []:
            found.append(Place(node["NodeID"], node["NodeManagerHostname"], gpu, cpus))
    return found


def _actor(place: Place, engine: type) -> Any:
    """Create an actor in a place. Without a GPU it takes all CPUs, because an engine computes with all of them."""
    resources = {"num_cpus": place.cpus} if place.gpu is None else {"num_cpus": 0, "num_gpus": 1}
    strategy = NodeAffinitySchedulingStrategy(place.node, soft=False)
    return ray.remote(engine).options(scheduling_strategy=strategy, **resources).remote()
