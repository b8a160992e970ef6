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

DIED = (RayActorError, WorkerCrashedError, NodeDiedError)
MAX_STARTS = 3  # of an engine in a slot whose engines die while they load the model
MAX_DEATHS_ALONE = 2  # of the engine that answers a request alone
WATCH_SECONDS = 2.0
OBJECT_STORE = 128 * 2**20  # bytes, of a cluster that this process starts: requests and answers are small


@dataclass(frozen=True)
class Slot:
    """The place of an engine: a machine, and the number of the GPU there, or None for an engine on the CPU."""

    node: str
    host: str
    gpu: int | None
    cpus: float


@dataclass
class Running:
    """An engine. `width` is the number of requests that should be sent to it at once, 0 until the model is loaded.

    `requests` counts those that it answers now. If `is_reserved`, it answers one request alone.
    """

    actor: Any
    width: int = 0
    requests: int = 0
    is_reserved: bool = False


class RayEngines:
    """One engine on each machine of the cluster that has CPUs, or one for each GPU of a machine that has GPUs.

    Machines may join and leave. An engine that dies is started again, and its requests go to other engines. Because one
    of them may be the cause, each is then answered alone. If the engine dies again, the request gets an error, so that
    a request that kills engines harms no other.
    """

    def __init__(self, model: ModelOptions, engine: type = Engine):
        self.model, self._class = model, engine
        self._engines: dict[Slot, Running] = {}
        self._starts: dict[Slot, int] = {}  # starts that failed, by slot
        self._changed = asyncio.Condition()
        self._waiting_alone = 0
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
            slot, engine = await self._acquire(alone)
            try:
                return http_answer(request, *await engine.actor.answer.remote(request.url, request.body))
            except RayTaskError as error:
                return error_answer(request, "server_error", str(error.cause))
            except DIED as error:
                await self._remove(slot, engine, f"{slot.host}: the engine died: {error}")
                deaths_alone += alone
                alone = True
            finally:
                await self._release(engine)
        return error_answer(request, "engine_died", f"{MAX_DEATHS_ALONE} engines died while they answered this request")

    async def _acquire(self, alone: bool) -> tuple[Slot, Running]:
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

    def _find(self, alone: bool) -> tuple[Slot, Running] | None:
        ready = [(slot, engine) for slot, engine in self._engines.items() if engine.width and not engine.is_reserved]
        if self._waiting_alone and not alone:
            ready = ready[1:]  # the first one finishes what it has, and then takes a request alone
        room = [found for found in ready if found[1].requests < (1 if alone else found[1].width)]
        return min(room, key=lambda found: found[1].requests / found[1].width, default=None)

    async def _release(self, engine: Running) -> None:
        async with self._changed:
            engine.requests -= 1
            engine.is_reserved = False
            self._changed.notify_all()

    async def _remove(self, slot: Slot, engine: Running, reason: str) -> None:
        async with self._changed:
            engine.width, self._last_error = 0, reason
            if self._engines.get(slot) is engine:
                del self._engines[slot]
                ray.kill(engine.actor)  # it may be alive, and unreachable

    # Start and end of engines -----------------------------------------------------------

    async def watch(self) -> None:
        """Start an engine in every slot that has none, until cancelled."""
        try:
            while True:
                for slot in await asyncio.to_thread(_slots):
                    if slot not in self._engines and self._starts.get(slot, 0) < MAX_STARTS:
                        self._engines[slot] = Running(_actor(slot, self._class))
                        task = asyncio.create_task(self._start(slot, self._engines[slot]))
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

    async def _start(self, slot: Slot, engine: Running) -> None:
        try:
            width = await engine.actor.start.remote(self.model)
        except RayTaskError as error:  # the model cannot be loaded, which another start would not change
            await self._start_failed(slot, engine, MAX_STARTS, f"{slot.host}: {error.cause}")
        except DIED as error:
            failed = self._starts.get(slot, 0) + 1
            await self._start_failed(slot, engine, failed, f"{slot.host}: the engine died: {error}")
        else:
            async with self._changed:
                engine.width = width
                self._changed.notify_all()

    async def _start_failed(self, slot: Slot, engine: Running, failed: int, reason: str) -> None:
        self._starts[slot] = failed
        await self._remove(slot, engine, reason)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for engine in self._engines.values():
            ray.kill(engine.actor)


@asynccontextmanager
async def ray_engines(model: ModelOptions, address: str = "") -> AsyncIterator[RayEngines]:
    """A context manager: engines on the Ray cluster at `address`.

    Without an address, it is the one in the environment variable RAY_ADDRESS, or the one that runs on this machine, or
    a new one. Raises ConnectionError if there is no cluster at the address.
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
        ray.init("local", include_dashboard=False, object_store_memory=OBJECT_STORE, **options)


def _slots() -> list[Slot]:
    """Return the places for engines on the machines that are alive now."""
    found = []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        cpus, gpus = (node["Resources"].get(name, 0) for name in ("CPU", "GPU"))
        for gpu in range(int(gpus)) if gpus >= 1 else [None] if cpus >= 1 else []:
            found.append(Slot(node["NodeID"], node["NodeManagerHostname"], gpu, cpus))
    return found


def _actor(slot: Slot, engine: type) -> Any:
    """Create an actor in a slot. Without a GPU it takes all CPUs, because an engine computes with all of them."""
    resources = {"num_cpus": slot.cpus} if slot.gpu is None else {"num_cpus": 0, "num_gpus": 1}
    strategy = NodeAffinitySchedulingStrategy(slot.node, soft=False)
    return ray.remote(engine).options(scheduling_strategy=strategy, **resources).remote()
