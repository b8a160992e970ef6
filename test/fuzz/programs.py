"""Torch programs in the form of source code, which the fuzzer generates, runs and prints.

A `Program` is a list of statements over named inputs. Its source is complete, so that a failing program can be
pasted into a Python session.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# The values of the dynamic extent. Programs are exported with the first one, and run with all of them.
EXTENTS = (7, 5, 1)
LARGEST_EXTENT = 64
DYNAMIC = "n"
SPECIAL_FLOATS = (math.nan, math.inf, -math.inf, 0.0, 1e-3, 300.0, -1e4, 11.0, 88.5)

Shape = tuple["int | str", ...]


@dataclass(frozen=True)
class Input:
    """A tensor argument. An extent that is the string "n" is dynamic.

    Integers are in [low, high), or in [max(low, 0), high) for uint8. Floats are multiples of 1/8 in [-4, 4]. With
    `special`, about a quarter of the elements of floats and integers are a value of SPECIAL_FLOATS or a limit of the
    dtype.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    low: int = -4
    high: int = 5
    special: bool = False

    @property
    def is_dynamic(self) -> bool:
        return DYNAMIC in self.shape

    def make(self, extent: int, seed: int = 0) -> torch.Tensor:
        """Return a tensor for this input, with `extent` in place of the dynamic extent."""
        shape = [extent if size == DYNAMIC else size for size in self.shape]
        if 0 in shape:  # the strides of a computed empty tensor may be such that ExecuTorch ends the process
            return torch.empty(shape, dtype=self.dtype)
        generator = torch.Generator().manual_seed(seed + sum(map(ord, self.name)))
        if self.dtype == torch.bool:
            return torch.randint(0, 2, shape, generator=generator).bool()
        if self.dtype.is_floating_point:
            values = (torch.randint(-32, 33, shape, generator=generator) / 8).to(self.dtype)
        else:
            low = max(self.low, 0) if self.dtype == torch.uint8 else self.low
            values = torch.randint(low, self.high, shape, generator=generator).to(self.dtype)
        return self._with_special_values(values, generator) if self.special else values

    def _with_special_values(self, values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        limits = None if self.dtype.is_floating_point else torch.iinfo(self.dtype)
        special = torch.tensor([limits.min, limits.max] if limits else SPECIAL_FLOATS).to(self.dtype)
        chosen = special[torch.randint(len(special), values.shape, generator=generator)]
        return torch.where(torch.rand(values.shape, generator=generator) < 0.25, chosen, values)


@dataclass(frozen=True)
class Statement:
    """The statement `target = expression`."""

    target: str
    expression: str


@dataclass(frozen=True)
class Program:
    """A list of statements over `inputs`. `outputs` are the names of the variables that the program returns.

    `constants` and `state` are pairs (name, expression). Each becomes a buffer of the module with the value of the
    expression. The statements write the buffers of `state`.
    """

    inputs: tuple[Input, ...]
    statements: tuple[Statement, ...]
    outputs: tuple[str, ...]
    constants: tuple[tuple[str, str], ...] = ()
    state: tuple[tuple[str, str], ...] = ()

    @property
    def is_dynamic(self) -> bool:
        return any(i.is_dynamic for i in self.inputs)

    @property
    def extents(self) -> tuple[int, ...]:
        """The extents of the calls that are compared with eager torch. The state is kept from each call to the next."""
        return EXTENTS if self.is_dynamic or self.state else EXTENTS[:1]

    @property
    def buffers(self) -> tuple[tuple[str, str], ...]:
        return (*self.constants, *self.state)

    def body(self) -> list[str]:
        """Return the lines of `forward`."""
        return [*(f"{s.target} = {s.expression}" for s in self.statements), f"return ({', '.join(self.outputs)},)"]

    def source(self) -> str:
        """Return complete torch code: a module, inputs, and one call of the module."""
        names = ", ".join(i.name for i in self.inputs)
        buffers = [f"        self.register_buffer({name!r}, {expression})" for name, expression in self.buffers]
        unpack = [f"{name} = self.{name}" for name, _ in self.buffers]
        lines = [
            "import math",
            "import torch",
            "import torch.nn.functional as F",
            "",
            "",
            "nan, inf = math.nan, math.inf",
            "",
            "",
            "class Model(torch.nn.Module):",
        ]
        if buffers:
            lines += ["    def __init__(self):", "        super().__init__()", *buffers, ""]
        lines += [f"    def forward(self, {names}):", *(f"        {line}" for line in [*unpack, *self.body()])]
        lines += ["", ""]
        for i in self.inputs:
            value = i.make(EXTENTS[0])
            lines.append(
                f"{i.name} = torch.tensor({value.tolist()}, dtype={value.dtype}).reshape({tuple(value.shape)})"
                + (f"  # dynamic: {i.shape}" if i.is_dynamic else "")
            )
        return "\n".join([*lines, f"print(Model()({names}))", ""])

    def arguments(self, extent: int) -> tuple[torch.Tensor, ...]:
        """Return a tensor for each input, with `extent` in place of the dynamic extent."""
        return tuple(i.make(extent) for i in self.inputs)

    def run(self, extent: int) -> tuple[torch.Tensor, ...]:
        """Return the outputs in eager torch of the call with `extent`, after the calls before it in `extents`."""
        state = [evaluated(expression).clone() for _, expression in self.state]
        with torch.no_grad():
            for each in self.extents[: self.extents.index(extent) + 1]:
                outputs = self.function()(*self.arguments(each), *self.constant_values(), *state)
        return outputs

    def check_eager(self) -> None:
        """Raise an error if eager torch refuses the program at the extent used for export."""
        self.run(EXTENTS[0])

    def function(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Return the program as a function of the inputs, the constants and the state, which it writes in place."""
        return _compiled(self)

    def constant_values(self) -> list[torch.Tensor]:
        return [evaluated(expression) for _, expression in self.constants]


@functools.lru_cache(maxsize=4096)
def _compiled(program: Program):
    parameters = [i.name for i in program.inputs] + [name for name, _ in program.buffers]
    source = "\n    ".join([f"def run({', '.join(parameters)}):", *program.body()])
    scope = dict(SCOPE)
    exec(compile(source, "<fuzz>", "exec"), scope)
    return scope["run"]


@functools.lru_cache(maxsize=4096)
def evaluated(expression: str) -> torch.Tensor:
    return eval(expression, dict(SCOPE))


SCOPE = {"torch": torch, "F": torch.nn.functional, "math": math}


class Batch(torch.nn.Module):
    """Several programs as one module.

    The module takes the inputs of all programs, one program after the other, and returns the outputs in the same order.
    """

    def __init__(self, programs: Sequence[Program]):
        super().__init__()
        self.programs = list(programs)
        for index, program in enumerate(programs):
            for name, expression in program.buffers:
                self.register_buffer(f"{name}_{index}", evaluated(expression).clone())

    def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results, rest = [], iter(arguments)
        for index, program in enumerate(self.programs):
            own = [next(rest) for _ in program.inputs]
            buffers = [getattr(self, f"{name}_{index}") for name, _ in program.buffers]
            results += program.function()(*own, *buffers)
        return tuple(results)

    def dynamic_shapes(self) -> tuple | None:
        if not any(p.is_dynamic for p in self.programs):
            return None
        extent = torch.export.Dim(DYNAMIC, min=1, max=LARGEST_EXTENT)
        shapes = [
            {axis: extent for axis, size in enumerate(i.shape) if size == DYNAMIC} or None
            for p in self.programs
            for i in p.inputs
        ]
        return (tuple(shapes),)
