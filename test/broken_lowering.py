"""Deliberately broken lowerings, for the tests of the checks."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from executorch_mlx.builder.emitter import Emitter
from executorch_mlx.serialization import ir


@contextmanager
def _changed_fields(change: Callable[[Emitter, type[ir.Op], dict[str, Any]], None]):
    """In this context, the compiler calls `change(emitter, op, fields)` for every instruction, to modify `fields`."""
    emit = Emitter.emit

    def changing(self, op, **fields):
        change(self, op, fields)
        return emit(self, op, **fields)

    Emitter.emit = changing
    try:
        yield
    finally:
        Emitter.emit = emit


def scaled_constant(name: str):
    """Return a context in which the compiler multiplies the constant `name` of every program by 1.01."""

    def change(emitter, op, fields):
        for field, value in fields.items():
            if getattr(value, "name", None) == name and value.data is not None:
                fields[field] = emitter.constant(name, value.data().detach() * 1.01)

    return _changed_fields(change)


def changed_field(broken: type[ir.Op], field: str, new: Callable[[Any], Any]):
    """Return a context in which the compiler replaces `field` of every instruction `broken` by `new(its value)`."""

    def change(emitter, op, fields):
        if op is broken:
            fields[field] = new(fields.get(field))

    return _changed_fields(change)
