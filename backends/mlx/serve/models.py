"""The models of a server: loaded when a request needs them, within a budget of memory, and unloaded when idle."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from .. import memory
from ..encoders.program import is_encoder
from ..llm import LLM, EngineStats
from ..llm.errors import FieldError
from ..llm.llm import IsSpeechModel
from ..llm.speech import SpeechModel
from .encoders import ServedEncoder
from .errors import field_error, server_error
from .model import ServedModel
from .speech import ServedSpeech

if TYPE_CHECKING:
    from ..encoders import Encoder

Model: TypeAlias = "LLM | SpeechModel | Encoder"
Loaded = ServedModel | ServedSpeech | ServedEncoder
_KINDS = {ServedModel: "a language model", ServedSpeech: "a speech model", ServedEncoder: "an encoder"}


def load_model(path: str | Path, tokenizer: str | Path | None = None, **options: Any) -> Model:
    """Load a language model, a speech model or an encoder.

    The arguments are those of `LLM.load`. Raises the same errors.
    """
    device = options.get("device")
    if is_encoder(path, device):
        from ..encoders import Encoder  # imports numpy, which a server of texts does not need

        return Encoder(path, device=device)
    try:
        return LLM.load(path, tokenizer, **options)
    except IsSpeechModel:
        return SpeechModel(path, device=device)


def _served(loaded: Model, entry: Entry) -> Loaded:
    if isinstance(loaded, SpeechModel):
        return ServedSpeech(loaded, entry.name)
    if isinstance(loaded, LLM):
        return ServedModel(loaded, entry.name, entry.tool_format)
    return ServedEncoder(loaded, entry.name)


@dataclass
class Entry:
    """A model: how to load it, and its state.

    - `size`: the memory that the model took when it was last loaded, in bytes. Until then, it is the size of its file.
      Other models that ran at that time can make it too large.
    - `kind`: the class of `model`, also while it is not loaded. None until it is loaded for the first time.
    - `users`: the number of requests that use the model.
    - `created`: the Unix time in seconds at which the server got the model.
    - `adapters`: the folders of the adapters that its requests can name, by name, or None if they are unknown.
    """

    name: str
    load: Callable[[], Model]
    file_size: int
    tool_format: str | None = None
    model: Loaded | None = None
    kind: type[Loaded] | None = None
    users: int = 0
    last_used: float = 0.0
    created: int = field(default_factory=lambda: int(time.time()))
    description: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, Path | None] = field(default_factory=dict)
    size: int = 0

    def __post_init__(self):
        self.size = self.file_size


class Models:
    """The models of a server, by name.

    - `budget`: the memory in bytes that loaded models may take together, or None for no limit. To make room for a
      model, models that no request uses are unloaded, the least recently used model first.
    - `idle_seconds`: a model that no request used for this long is unloaded. 0: never.

    A model whose memory is not known yet counts with the size of its file.
    """

    def __init__(self, budget: int | None = None, idle_seconds: float = 0.0):
        self._budget, self._idle_seconds = budget, idle_seconds
        self._entries: dict[str, Entry] = {}
        self._lock = asyncio.Lock()  # held while models are loaded or unloaded
        # Protects `model` and `users` of the entries. Models are unloaded in another thread than the one of acquire(),
        # and no request may get a model that is being unloaded.
        self._mutex = threading.Lock()

    @classmethod
    def of(cls, model: Model, name: str, tool_format: str | None = None) -> Models:
        """Return the models of a server that has only `model`, with its adapters if it has any; they stay loaded."""
        models = cls()
        models.add(name, lambda: model, 0, tool_format)
        models._load(models._entries[name])
        if isinstance(model, LLM):
            models._entries[name].adapters = dict.fromkeys(model.adapters)
        return models

    def add(self, name: str, load: Callable[[], Model], size: int, tool_format: str | None = None) -> None:
        """Add a model. `size` is the size of its file in bytes. Raises ValueError if the name is taken."""
        if name in self.names:
            raise FieldError("name", f"{name!r} twice", "different names")
        self._entries[name] = Entry(name, load, size, tool_format)

    def add_adapter(self, name: str, folder: str | Path, model: str) -> None:
        """Add an adapter of a model that is not loaded yet. Raises ValueError if the name is taken."""
        if name in self.names:
            raise FieldError("adapter", f"{name!r} twice", "different names")
        self._entries[model].adapters[name] = Path(folder)

    async def load_adapter(self, name: str, folder: str | Path, model: str | None = None) -> None:
        """Load an adapter, or another one in the place of the adapter `name`.

        `model` may be None if the adapter exists, or if only one model takes adapters. Raises ApiError for an unknown
        model, and the errors of `LLM.load_adapter`.
        """
        if model is None:
            model = self.adapters.get(name) or self._only_adaptable()
        served = await self.acquire(model)
        try:
            await asyncio.to_thread(served.llm.load_adapter, name, folder)
            self._entries[served.base].adapters[name] = Path(folder)
        finally:
            self.release(served)

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter, whose requests keep it until they end. Raises KeyError if there is none."""
        entry = self._entries[self.adapters[name]]
        del entry.adapters[name]
        with self._mutex:
            if isinstance(entry.model, ServedModel):
                entry.model.llm.unload_adapter(name)

    def _only_adaptable(self) -> str | None:
        """Return the name of the only model that takes adapters, or None."""
        found = [name for name, entry in self._entries.items() if entry.description.get("max_adapters")]
        return found[0] if len(found) == 1 else None

    def load_all(self) -> None:
        """Load each model once, so that errors show up at the start. The last ones that fit stay loaded.

        Raises the errors of `LLM.load`, and ValueError for a model that does not fit into the budget alone.
        """
        for entry in self._entries.values():
            self._make_room(entry)
            try:
                self._load(entry)
            except (ValueError, RuntimeError) as error:
                kind = ValueError if isinstance(error, ValueError) else RuntimeError
                raise kind(f"{entry.name}: {error}") from error
            self._make_room(entry)  # again, because the size is measured now
            if self._budget is not None and entry.size > self._budget:
                raise ValueError(f"{entry.name}: takes {entry.size} bytes, the budget is {self._budget}")

    @property
    def names(self) -> list[str]:
        """The names of the models, and of their adapters."""
        return [*self._entries, *self.adapters]

    @property
    def adapters(self) -> dict[str, str]:
        """The name of each adapter → that of its model."""
        return {adapter: name for name, entry in self._entries.items() for adapter in entry.adapters}

    def has_kind(self, kind: type[Loaded]) -> bool:
        """Whether a model may be of this kind: that of a model which was never loaded is unknown."""
        return any(entry.kind in (kind, None) for entry in self._entries.values())

    def size(self, name: str) -> int:
        """Return the size of a model in bytes, as in `Entry`."""
        return self._find(name)[0].size

    @property
    def loaded(self) -> Mapping[str, ServedModel]:
        """The language models that are in memory, by name."""
        return {name: entry.model for name, entry in self._entries.items() if isinstance(entry.model, ServedModel)}

    def stats(self) -> dict[ServedModel, EngineStats]:
        """Return the numbers of the engines of the loaded models. No model is unloaded meanwhile."""
        with self._mutex:
            return {model: model.llm.stats for model in self.loaded.values()}

    def descriptions(self) -> list[dict[str, Any]]:
        """Return the objects of `/v1/models`."""
        return [self.description(name) for name in self.names]

    def description(self, name: str) -> dict[str, Any]:
        """Return the object of a model in `/v1/models`. Raises ApiError for an unknown name."""
        entry, adapter = self._find(name)
        fields = {"id": name, "object": "model", "created": entry.created, "owned_by": "executorch-mlx"}
        created = datetime.fromtimestamp(entry.created, UTC).isoformat()
        fields |= {"type": "model", "display_name": name, "created_at": created}  # as in Anthropic's API
        parent = {}
        if adapter is not None:
            folder = entry.adapters[adapter]
            parent = {"parent": entry.name, "root": None if folder is None else str(folder)}  # as in vLLM
        return fields | entry.description | {"loaded": entry.model is not None} | parent

    async def acquire(self, name: str | None, kind: type[Loaded] = ServedModel) -> Any:
        """Return a model of this kind, loading it if necessary. Call `release` when its answer is complete.

        `name` may be None if there is only one model. Raises ApiError for an unknown name, for a model of another kind,
        or if the model cannot be loaded now.
        """
        entry, adapter = self._find(name)
        with self._mutex:
            entry.users += 1  # from now on, the model is not unloaded
        try:
            if entry.model is None:
                async with self._lock:
                    if entry.model is None:
                        await asyncio.to_thread(self._load_with_room, entry)
            if not isinstance(entry.model, kind):
                raise field_error("model", f"got {entry.name!r}, expected {_KINDS[kind]}")
            if adapter is not None and isinstance(entry.model, ServedModel):
                return entry.model.with_adapter(adapter)
            return entry.model
        except BaseException:
            with self._mutex:
                entry.users -= 1
            raise

    def release(self, model: Loaded) -> None:
        """Give back a model that `acquire` returned."""
        entry = self._entries[model.base]
        with self._mutex:
            entry.users -= 1
            entry.last_used = time.monotonic()

    async def unload_idle(self) -> None:
        """Check for idle models at intervals and unload them, until the task is cancelled."""
        while self._idle_seconds > 0:
            await asyncio.sleep(min(self._idle_seconds / 4, 10))
            async with self._lock:
                for entry in self._unused():
                    if time.monotonic() - entry.last_used >= self._idle_seconds:
                        await asyncio.to_thread(self._unload_unused, entry)

    def close(self) -> None:
        """Unload all models, also those in use."""
        for entry in self._entries.values():
            with self._mutex:
                model, entry.model = entry.model, None
            if model is not None:
                model.close()

    def _find(self, name: str | None) -> tuple[Entry, str | None]:
        """Return the model of this name and None, or the model of an adapter and the adapter. Raises ApiError."""
        known = ", ".join(map(repr, self.names))
        if name in (adapters := self.adapters):
            return self._entries[adapters[name]], name
        if name is None:
            if len(self._entries) > 1:
                raise field_error("model", f"got none, expected one of {known}")
            (name,) = self._entries
        if name not in self._entries:
            problem = f"got {name[:100]!r}, which does not exist; this server has {known}"
            raise field_error("model", problem, status=404, code="model_not_found")
        return self._entries[name], None

    def _unused(self) -> list[Entry]:
        """Return the loaded models that no request uses, the least recently used model first."""
        entries = [entry for entry in self._entries.values() if entry.model is not None and not entry.users]
        return sorted(entries, key=lambda entry: entry.last_used)

    def _load_with_room(self, entry: Entry) -> None:
        if not self._make_room(entry):
            raise server_error(f"the model {entry.name!r} does not fit into memory while others run", 503, "overloaded")
        try:
            self._load(entry)
        except (OSError, ValueError, RuntimeError) as error:
            raise server_error(f"the model {entry.name!r} cannot be loaded: {error}", 503) from error

    def _make_room(self, entry: Entry) -> bool:
        """Unload other models until `entry` fits into the budget. Return whether it fits.

        A model always fits if no other is loaded: each fitted at the start, and its size can be wrong.
        """
        if self._budget is None:
            return True
        unused = [other for other in self._unused() if other is not entry]
        while True:
            others = [other for other in self._entries.values() if other.model is not None and other is not entry]
            if not others or entry.size + sum(other.size for other in others) <= self._budget:
                return True
            if not unused:
                return False
            self._unload_unused(unused.pop(0))

    def _load(self, entry: Entry) -> None:
        before = memory.get_active_memory()
        loaded = entry.load()
        for adapter, folder in entry.adapters.items():
            if not isinstance(loaded, LLM):
                raise ValueError("adapter: expected a language model, other models take none")
            loaded.load_adapter(adapter, folder)
        model = _served(loaded, entry)
        # Less than the file if another model was freed meanwhile.
        entry.size = max(entry.file_size, memory.get_active_memory() - before)
        entry.description, entry.last_used = model.description(), time.monotonic()
        entry.model, entry.kind = model, type(model)

    def _unload_unused(self, entry: Entry) -> None:
        """Unload a model, unless a request uses it by now."""
        with self._mutex:
            if entry.users or entry.model is None:
                return
            model, entry.model = entry.model, None
        model.close()
