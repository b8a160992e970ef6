"""The row itself, and the module that is exported for it."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from executorch_mlx.serialization import ir
from executorch_mlx.serialization.generate import FIRST_OWN_OP
from torch.utils import _pytree as pytree

from .inputs import FLOATS, Input

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Row:
    """One exported program, run once or more, compared with eager torch.

    Every case is called for every dtype, those of `once` for the first dtype alone; the
    results are the outputs of one program.
    """

    name: str
    fn: Callable
    cases: tuple[tuple, ...]
    once: tuple[tuple, ...]
    dtypes: tuple[torch.dtype, ...]
    loose: float
    calls: int
    traced: bool
    host: str | None
    verified: bool
    signed_zero: bool
    fused: tuple[str, ...]

    @property
    def target(self) -> str | None:
        """The registry's spelling of what the row is about: `aten.exp.default`.
        None where the name begins with `program/`."""
        name = self.name.split("/")[0]
        if name == "program":
            return None
        if "::" in name:
            library, name = name.split("::")
        elif name.startswith(("operator.", "higher_order.")):
            return name
        else:
            library = "aten"
        return f"{library}.{name}" if "." in name else f"{library}.{name}.default"

    @property
    def slug(self) -> str:
        """A folder name."""
        return "".join(c if c.isalnum() or c in ".-_" else "_" for c in self.name)

    def __str__(self) -> str:
        return self.name

    def recipes(self) -> Iterator[tuple[Input, torch.dtype]]:
        """The program's inputs, in order: every tensor of every case, dtype by dtype."""
        for i, dtype in enumerate(self.dtypes):
            for leaf in pytree.tree_leaves(self.cases_of(i)):
                if isinstance(leaf, Input):
                    yield leaf, dtype

    def cases_of(self, i: int) -> tuple[tuple, ...]:
        """What is called for the `i`-th dtype."""
        return self.cases + (self.once if i == 0 else ())

    def inputs(self, call: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()) + call)
        return tuple(recipe.make(dtype, call, generator) for recipe, dtype in self.recipes())

    def dynamic_shapes(self) -> tuple | None:
        dims = {d.name: d.dim for r, _ in self.recipes() for d in r.dynamic.values()}
        if not dims:
            return None
        return (
            tuple(
                {axis: dims[d.name] for axis, d in r.dynamic.items()} or None
                for r, _ in self.recipes()
            ),
        )

    def module(self) -> torch.nn.Module:
        return Cases(self)

    @property
    def own_nodes(self) -> bool:
        return any(op.OP_TYPE >= FIRST_OWN_OP for op in ir.OPS.values() if op.NAME in self.fused)

    def tolerance_of(self, dtype: torch.dtype) -> float:
        """Relative and absolute."""
        return self.loose * TOLERANCE[dtype]


class Cases(torch.nn.Module):
    """Calls a row's function on every case, for every dtype; returns all results, flat."""

    def __init__(self, row: Row):
        super().__init__()
        self.cases = [row.cases_of(i) for i in range(len(row.dtypes))]
        if isinstance(row.fn, torch.nn.Module):
            modules = [copy.deepcopy(row.fn).to(dtype) for dtype in row.dtypes]
            self.functions = torch.nn.ModuleList(modules)
        else:
            self.functions = [row.fn] * len(row.dtypes)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = iter(tensors)
        results = []
        for function, cases in zip(self.functions, self.cases):
            for case in cases:
                arguments = pytree.tree_map(
                    lambda leaf: next(rest) if isinstance(leaf, Input) else leaf, case
                )
                results += pytree.tree_leaves(function(*arguments))
        return tuple(r for r in results if r is not None)


def row(
    name: str,
    *arguments: Any,
    cases: Sequence[tuple] = (),
    once: Sequence[tuple] = (),
    dtypes: Sequence[torch.dtype] = FLOATS,
    loose: float = 1,
    calls: int | None = None,
    traced: bool = False,
    host: str | None = None,
    verified: bool = True,
    signed_zero: bool = True,
    fused: Sequence[str] = (),
) -> Row:
    """A row about the overload `name` of ATen (`exp` is `exp.default`), of another library
    (`mlx::sample`), of `operator` or of `higher_order`; what follows a `/` tells rows of one target apart.

    `arguments`: the function, if it is not the overload itself, then its arguments; an
    `Input` stands for a tensor. `cases` are further tuples of arguments, `once` those
    for the first dtype only. `loose` multiplies the tolerance. `calls`: how often
    one loaded program is run. `traced`: reach the target through the builder's tracing of a
    composite, for export itself would rewrite it. `host`: why something stays undelegated.
    `verified`: let ExecuTorch's verifier of the edge dialect look; it knows no unsigned
    integers, no operators that promote and none outside core ATen, and where an operator
    returns a list it makes a dynamic first dimension static.
    `fused`: IR nodes that the program must have; nodes of ours are asked for.
    """
    if arguments and callable(arguments[0]) and not isinstance(arguments[0], Input):
        fn, *arguments = arguments
    else:
        fn = _overload(name)
    all_cases = ((tuple(arguments),) if arguments or not cases else ()) + tuple(cases)
    used = [leaf for leaf in pytree.tree_leaves((all_cases, tuple(once))) if isinstance(leaf, Input)]
    if not any(leaf.dtype is None for leaf in used) and not isinstance(fn, torch.nn.Module):
        dtypes = (torch.float32,)  # no input depends on it
    if calls is None:
        calls = 1 + max((len(d.also) for i in used for d in i.dynamic.values()), default=0)
    return Row(
        name, fn, all_cases, tuple(once), tuple(dtypes), loose, calls, traced, host, verified,
        signed_zero,
        tuple(fused),
    )


def _overload(name: str) -> Callable:
    name = name.split("/")[0]
    library, _, name = name.rpartition("::")
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, library or "aten"), packet), overload or "default")
