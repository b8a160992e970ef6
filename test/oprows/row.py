"""The op row, and the module that is exported for it."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from executorch_mlx.serialization import ir
from torch.utils import _pytree as pytree

from .inputs import FLOATS, Input

# The relative and the absolute tolerance. In half precision, the relative tolerance is two units in the last place.
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 6e-4), torch.bfloat16: (1.6e-2, 5e-3)}


@dataclass(frozen=True)
class OpRow:
    """A test of one operator. The function `row` makes an OpRow and documents the fields.

    The exported program calls `fn` with each of `cases` in each of `dtypes`, and with each of `once` in the first
    dtype only. The results of all calls are the outputs of the program.
    """

    name: str
    fn: Callable
    cases: tuple[tuple, ...]
    once: tuple[tuple, ...]
    dtypes: tuple[torch.dtype, ...]
    loose: float
    loose_half: float
    calls: int
    traced: bool
    host: str | None
    edge_verified: bool
    signed_zero: bool
    nodes: tuple[str, ...]
    has_kernel: bool

    @property
    def target(self) -> str | None:
        """The name of the target that must be lowered, such as "aten.exp.default".

        None if the name of the op row begins with "program/".
        """
        name = self.name.split("/")[0]
        if name == "program":
            return None
        if "::" in name:
            library, name = name.split("::")
        elif name.startswith(("operator.", "torch.", "higher_order.")):
            return name
        else:
            library = "aten"
        return f"{library}.{name}" if "." in name else f"{library}.{name}.default"

    @property
    def slug(self) -> str:
        """The name of the op row, with all characters replaced that a folder name should not have."""
        return "".join(c if c.isalnum() or c in ".-_" else "_" for c in self.name)

    def __str__(self) -> str:
        return self.name

    def recipes(self) -> Iterator[tuple[Input, torch.dtype]]:
        """Yield the recipe and the dtype of each input of the program, in order: dtype by dtype, case by case."""
        for i, dtype in enumerate(self.dtypes):
            for leaf in pytree.tree_leaves(self.cases_for(i)):
                if isinstance(leaf, Input):
                    yield leaf, dtype

    def cases_for(self, i: int) -> tuple[tuple, ...]:
        """The cases in the `i`-th dtype."""
        return self.cases + (self.once if i == 0 else ())

    def inputs(self, call: int) -> tuple[torch.Tensor, ...]:
        """The input tensors of the `call`-th call. They depend only on the name and the call."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()) + call)
        return tuple(recipe.make(dtype, call, generator) for recipe, dtype in self.recipes())

    def dynamic_shapes(self) -> tuple | None:
        """The argument `dynamic_shapes` of `torch.export.export`."""
        dims = {d.name: d.dim for r, _ in self.recipes() for d in r.dynamic.values()}
        if not dims:
            return None
        return (tuple({axis: dims[d.name] for axis, d in r.dynamic.items()} or None for r, _ in self.recipes()),)

    def module(self) -> torch.nn.Module:
        return Cases(self)

    @property
    def allow_extensions(self) -> bool:
        """Whether `nodes` names an extension."""
        return any(op.OP_TYPE >= ir.FIRST_EXTENSION for op in ir.OPS.values() if op.NAME in self.nodes)

    def tolerance(self, dtype: torch.dtype) -> tuple[float, float]:
        """The relative and the absolute tolerance for results of `dtype`."""
        factor = self.loose if dtype == torch.float32 else self.loose_half
        rtol, atol = TOLERANCE[dtype]
        return factor * rtol, factor * atol


class Cases(torch.nn.Module):
    """Calls the function of an op row with every case in every dtype. Returns all results as a flat tuple."""

    def __init__(self, row: OpRow):
        super().__init__()
        self.cases = [row.cases_for(i) for i in range(len(row.dtypes))]
        if isinstance(row.fn, torch.nn.Module):
            modules = [copy.deepcopy(row.fn).to(dtype) for dtype in row.dtypes]
            self.functions = torch.nn.ModuleList(modules)
        else:
            self.functions = [row.fn] * len(row.dtypes)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        remaining = iter(tensors)
        results = []
        for function, cases in zip(self.functions, self.cases):
            for case in cases:
                arguments = pytree.tree_map(lambda leaf: next(remaining) if isinstance(leaf, Input) else leaf, case)
                results += pytree.tree_leaves(function(*arguments))
        return tuple(r for r in results if r is not None)


def row(
    name: str,
    *arguments: Any,
    cases: Sequence[tuple] = (),
    once: Sequence[tuple] = (),
    dtypes: Sequence[torch.dtype] = FLOATS,
    loose: float = 1,
    loose_half: float = 1,
    calls: int | None = None,
    traced: bool = False,
    host: str | None = None,
    edge_verified: bool = True,
    signed_zero: bool = True,
    nodes: Sequence[str] = (),
    has_kernel: bool = False,
) -> OpRow:
    """Make an op row. The test exports, lowers and runs calls of an operator and compares with eager torch.

    Args:
        name: the overload, then optionally "/" and a variant. "exp" is `aten.exp.default`, "sum.dim_IntList" is another
            overload of ATen, and "mlx::sample" is an overload of another library. "operator.add",
            "torch.sym_max" and "higher_order.cond" name Python functions. "program/..." names no operator.
        arguments: the arguments of the call. An `Input` stands for a tensor. A function or module as first argument
            is called in place of the overload.
        cases: tuples of arguments, one for each further call of the operator.
        once: like `cases`, but these calls are made in the first dtype only.
        dtypes: the dtypes of the inputs that have no dtype of their own. Every case runs in each of these dtypes.
        loose: the factor by which the float32 tolerance is multiplied.
        loose_half: the factor by which the tolerances of float16 and bfloat16 are multiplied.
        calls: how many times the exported program runs, each time with new inputs; by default once for each size of
            the dynamic extents.
        traced: whether the operator is called in a composite, which lowering traces. This is necessary if torch.export
            would replace the operator by another one.
        host: the reason why part of the program is not delegated. If None, all of the program must be delegated.
        edge_verified: whether ExecuTorch's verifier of the edge dialect checks the program. The verifier rejects
            unsigned integers, operators that promote dtypes and operators outside core ATen. It also makes a dynamic
            first dimension static where an operator returns a list. A `traced` op row is never verified.
        signed_zero: whether the signs of zeros are compared.
        nodes: IR nodes that the program must contain. If one of them is an extension, extensions are allowed.
        has_kernel: whether the program also runs with each instruction set of the CPU kernels.
    """
    if arguments and callable(arguments[0]) and not isinstance(arguments[0], Input):
        fn, *arguments = arguments
    else:
        fn = _overload(name)
    all_cases = ((tuple(arguments),) if arguments or not cases else ()) + tuple(cases)
    used = [leaf for leaf in pytree.tree_leaves((all_cases, tuple(once))) if isinstance(leaf, Input)]
    if not any(leaf.dtype is None for leaf in used) and not isinstance(fn, torch.nn.Module):
        dtypes = (torch.float32,)  # no input depends on the dtype
    if calls is None:
        calls = 1 + max((len(d.also) for i in used for d in i.dynamic.values()), default=0)
    return OpRow(
        name,
        fn,
        all_cases,
        tuple(once),
        tuple(dtypes),
        loose,
        loose_half,
        calls,
        traced,
        host,
        edge_verified,
        signed_zero,
        tuple(nodes),
        has_kernel,
    )


def _overload(name: str) -> Callable:
    name = name.split("/")[0]
    library, _, name = name.rpartition("::")
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, library or "aten"), packet), overload or "default")
