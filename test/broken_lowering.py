"""A deliberately broken lowering: one constant of a program is scaled by 1.01."""

from contextlib import contextmanager

from executorch_mlx.builder.emitter import Emitter


@contextmanager
def scaled_constant(name: str):
    """While open, every program that is compiled has 1.01 times the constant `name`."""
    emit = Emitter.emit

    def scaling(self, op, **fields):
        for field, value in fields.items():
            if getattr(value, "name", None) == name and value.data is not None:
                fields[field] = self.constant(name, value.data().detach() * 1.01)
        return emit(self, op, **fields)

    Emitter.emit = scaling
    try:
        yield
    finally:
        Emitter.emit = emit
