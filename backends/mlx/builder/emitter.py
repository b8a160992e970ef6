"""Collects the instructions of a program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from ..serialization import ir
from . import dtypes
from .peephole import can_represent, simplify, source_of_elements
from .registry import Unsupported
from .slots import Slot, SlotTypes, Space, TensorSlot, ValueSlot


@dataclass
class Emitted:
    """An instruction that names its operands and results by slot. `assemble` numbers the slots."""

    op: type[ir.Op]
    fields: dict[str, Any]
    origin: Any = None  # the FX node of the delegated graph that was lowered to the instruction, if there is one
    expression: tuple | None = None  # of the value, if later instructions may reuse the result


@dataclass
class Replacement:
    """Instructions of one chain, and the instruction that this runtime runs instead of them."""

    chain: list[Emitted]
    emitted: list[Emitted]
    extension: Emitted


class Emitter:
    """Appends instructions to chains and creates the slots of their results.

    `emit` simplifies instructions (see `peephole`) and reuses the result of an equal earlier instruction.
    """

    def __init__(self, *, allow_extensions: bool = False, replaced: Collection[type[ir.Op]] = ()):
        """`replaced`: the extensions that a program without extensions may have, because portable instructions take
        their place later.
        """
        self.allow_extensions, self._replaced = allow_extensions, replaced
        self.chains: list[list[Emitted]] = [[]]
        self.replacements: list[Replacement] = []
        self.types = SlotTypes()
        self._chain = self.chains[0]
        self._scalars: dict[tuple, TensorSlot] = {}
        # The result of each earlier instruction, with its `_expression` as key. There is one table for each chain that
        # is being emitted, the main chain first. A chain may reuse a result of the chains around it. A result of a
        # finished inner chain may not be reused, because that chain may not run.
        self._results: list[dict[tuple, Slot]] = [{}]
        self._producers: dict[Slot, Emitted] = {}

    def emit(self, op: type[ir.Op], **fields: Any) -> Any:
        """Append an instruction of type `op` to the current chain and return the slot of its result.

        `fields` are the fields of the instruction. The result is the slot `out`, or the slots `outs`, if `fields` has
        them. Otherwise the result is a new slot, whose dtype and shape the rules in `serialization/type_rules.py`
        compute.

        Appends nothing, and returns an existing slot, in two cases: an equal instruction was emitted earlier (its
        result is returned), or the instruction simplifies away (an operand is returned). Returns None for an
        instruction without a result.

        Raises `Unsupported` if `op` is an extension and the program may not use extensions, and TypeError if `fields`
        contains a name that is not a field of `op`.
        """
        self._check(op, fields)
        types = {f.name: f.type for f in op.FIELDS}
        if "out" not in types or "out" in fields:
            self._chain.append(Emitted(op, fields, self._origin))
            return fields.get("out", fields.get("outs"))
        fields_or_slot = simplify(self._producers, op, fields)
        if isinstance(fields_or_slot, TensorSlot):
            return fields_or_slot
        fields = fields_or_slot
        expression = _expression(op, fields)
        if expression is not None:
            for results in self._results:
                if expression in results:
                    return results[expression]
        out = ValueSlot(int) if types["out"] == "Vid" else self.types.result(op, fields)
        emitted = Emitted(op, fields | {"out": out}, self._origin, expression)
        self._chain.append(emitted)
        if expression is not None:
            self._results[-1][expression] = out
            self._producers[out] = emitted
        return out

    @property
    def _origin(self) -> Any:
        """The `origin` of the instructions that are emitted now."""
        return None

    def _check(self, op: type[ir.Op], fields: dict[str, Any]) -> None:
        unknown = set(fields) - {f.name for f in op.FIELDS}
        if unknown:
            raise TypeError(f"{op.__name__} has no field {', '.join(sorted(unknown))}")
        for f in op.FIELDS:
            value = fields.get(f.name)
            values = value if isinstance(value, (list, tuple)) else [value]
            if "Vid" not in f.type and any(isinstance(v, ValueSlot) for v in values):
                raise Unsupported(
                    f"{f.name}: a number that is known only at run time is unsupported; use a Python number"
                )
        if op.OP_TYPE >= ir.FIRST_EXTENSION and not self.allow_extensions and op not in self._replaced:
            raise Unsupported(
                f"{op.__name__} is an extension: ExecuTorch's own MLX delegate lacks it, and "
                "MLXPartitioner(allow_extensions=True) permits it"
            )

    @contextmanager
    def chain(self) -> Iterator[int]:
        """A context manager: inside the `with` block, `emit` appends to a new chain. Yields the index of that chain."""
        outer, self._chain = self._chain, []
        self.chains.append(self._chain)
        self._results.append({})
        try:
            yield len(self.chains) - 1
        finally:
            self._results.pop()
            self._chain = outer

    def _clear_chains(self) -> None:
        """Forget all instructions."""
        self.chains[:] = [[]]
        self.replacements.clear()
        self._chain, self._results, self._producers = self.chains[0], [{}], {}

    @contextmanager
    def detached_chain(self, results: dict[tuple, Slot], producers: dict[Slot, Emitted]) -> Iterator[list[Emitted]]:
        """A context manager that yields a list. Inside the `with` block, `emit` appends to it, and to no chain.

        Instructions inside reuse `results`, those of earlier instructions by expression, and no others. `producers` has
        the instructions that computed these results.
        """
        saved = self._chain, self._results, self._producers
        self._chain, self._results, self._producers = [], [results, {}], dict(producers)
        try:
            yield self._chain
        finally:
            self._chain, self._results, self._producers = saved

    def constant(
        self,
        name: str,
        data: torch.Tensor | Callable[[], torch.Tensor],
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> TensorSlot:
        """Return the slot of a new constant.

        `data` is a tensor, or a function that returns a tensor of `shape` and `dtype`. The function is called when the
        program is serialized. A constant that no instruction reads is not stored.
        """
        if isinstance(data, torch.Tensor):
            tensor = data
            shape, dtype, data = tensor.shape, tensor.dtype, lambda: tensor
        return TensorSlot(dtype=dtype, shape=tuple(shape), space=Space.CONSTANT, name=name, data=data)

    def scalar(self, value: bool | int | float | ValueSlot, dtype: torch.dtype) -> TensorSlot:
        """Return the slot of a 0-d tensor with `value`.

        For a Python number the slot is a constant. An int that an integer dtype cannot hold wraps around, as in torch.
        For a value slot an instruction is appended.
        """
        if isinstance(value, ValueSlot):
            return self.full([], value, dtype)
        key = (repr(value), dtype)  # as dictionary keys, 1, 1.0 and True are equal; as strings they differ
        if key not in self._scalars:
            tensor = torch.tensor(_wrapped(value, dtype), dtype=dtype)
            slot = self.constant(f"scalar_{len(self._scalars)}", tensor)
            slot.constant_value = value if dtype.is_floating_point else tensor.item()
            self._scalars[key] = slot
        return self._scalars[key]

    def full(self, shape: list, value: bool | int | float | ValueSlot, dtype: torch.dtype) -> TensorSlot:
        """Return the slot of a tensor of `shape` filled with `value`. `shape` holds ints and value slots.

        Unlike a `scalar`, the tensor has only the precision of `dtype`: its `constant_value` is rounded to half
        precision.
        """
        if not shape and not isinstance(value, ValueSlot):
            return self.scalar(torch.tensor(value, dtype=dtype).item() if dtype in dtypes.HALVES else value, dtype)
        if isinstance(value, bool):
            value = int(value)
        if isinstance(value, int) and float(value) != value:  # the field of `FullNode` is a float64
            return self.emit(ir.BroadcastToNode, x=self.scalar(value, dtype), shape=shape)
        scalar_type = dtypes.scalar_type(dtype)
        return self.emit(ir.FullNode, shape=shape, v=value, scalar_type=scalar_type)

    def cast(self, x: TensorSlot, dtype: torch.dtype) -> TensorSlot:
        """Return a slot with `x` converted to `dtype`: `x` itself if it has that dtype."""
        if x.dtype == dtype:
            return x
        if x.constant_value is not None:
            value = x.constant_value
            if not dtype.is_floating_point or can_represent(dtype, x.dtype):
                value = torch.tensor(value, dtype=x.dtype).to(dtype).item()
            return self.scalar(value, dtype)
        return self.emit(ir.AsTypeNode, x=x, scalar_type=dtypes.scalar_type(dtype))

    def known_elements(self, x: TensorSlot) -> torch.Tensor | None:
        """Return a tensor, of any shape, with the elements of `x`, or None if they are not known now.

        They are not if they depend on an input, or if the partitioner asks, which has fake tensors for constants.
        """
        source = source_of_elements(self._producers, x)
        is_known = source.data is not None and source.space != Space.BUFFER
        with unset_fake_temporarily():
            elements = source.data() if is_known else None
            return None if isinstance(elements, FakeTensor) else elements

    def size(self, x: TensorSlot, dim: int) -> int | ValueSlot:
        """Return the size of a dimension of `x`: an int if the size is static, else a value slot."""
        static = x.shape[dim]
        if isinstance(static, int):
            return static
        size = self.emit(ir.SymSizeNode, a=x, dim=dim % x.ndim)
        size.symbol = static
        return size

    def with_extent(self, x: TensorSlot, axis: int, extent: int | ValueSlot) -> TensorSlot:
        """Return `x`, whose size on `axis` is `extent`. No rule can know that a part of a tensor is not cut short."""
        if x.shape is None:
            self.types.set_extent(x, axis, extent.symbol if isinstance(extent, ValueSlot) else extent)
        return x

    def item(self, x: TensorSlot) -> ValueSlot:
        """Return a value slot with the integer in `x`, a tensor of one element.

        At run time, the host waits until `x` is computed.
        """
        return self.emit(ir.ItemIntNode, x=x)


def _wrapped(value: bool | int | float, dtype: torch.dtype) -> bool | int | float:
    """Return `value`, wrapped around if it is an int that the integer dtype `dtype` cannot hold."""
    if not isinstance(value, int) or dtype.is_floating_point or dtype == torch.bool:
        return value
    limits = torch.iinfo(dtype)
    return (value - limits.min) % 2**limits.bits + limits.min


def _expression(op: type[ir.Op], fields: dict[str, Any]) -> tuple | None:
    """Return a dictionary key for an instruction. Instructions with equal keys compute equal values.

    Returns None if the same instruction may compute another value when it runs again.
    """
    if op in (ir.RandomBitsNode, ir.SampleNode) and fields.get("seed") is None:
        return None
    frozen = []
    for name, value in sorted(fields.items()):
        values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(v, TensorSlot) and v.space == Space.BUFFER for v in values):
            return None
        # Numbers enter the key as strings: as numbers, 1, 1.0 and True would be equal.
        frozen.append((name, tuple(v if isinstance(v, Slot) else repr(v) for v in values)))
    return op, tuple(frozen)
