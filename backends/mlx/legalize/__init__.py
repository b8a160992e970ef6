"""Passes that the user asks for: each replaces tensors of a dtype that MLX lacks by pairs of tensors that it has.

`MLXPartitioner(legalize=("complex", "float64"))` runs both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch.export import ExportedProgram

from .complex_numbers import check_complex_operators, with_real_numbers
from .float64 import with_constants, with_float32_numbers

# The complex pass is the first: a complex128 tensor becomes two of float64.
PASSES: dict[str, Callable[[ExportedProgram], ExportedProgram]] = {
    "complex": with_real_numbers,
    "float64": with_float32_numbers,
}


def checked_names(names: Collection[str]) -> tuple[str, ...]:
    """Return the names of passes in the order in which they run. Raises ValueError for the name of no pass."""
    unknown = [names] if isinstance(names, str) else [name for name in names if name not in PASSES]
    if unknown:
        raise ValueError(f"legalize: got {unknown[0]!r}, expected a tuple of {' and '.join(map(repr, PASSES))}")
    return tuple(name for name in PASSES if name in names)


def legalized(program: ExportedProgram, names: Collection[str]) -> ExportedProgram:
    """Return the program that the passes `names` make of `program`.

    Float64 tensors that depend on no input are computed with torch in any case, because that is exact.

    Raises ValueError if the result has an operator of complex tensors that ExecuTorch refuses or cannot run.
    """
    for name in names:
        program = PASSES[name](program)
    check_complex_operators(program)
    return with_constants(program)
