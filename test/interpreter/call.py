"""One call of an MLX program: its slots, and the operands of instructions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from executorch_mlx.serialization import ir

from .arrays import HALF
from .meaning import Meaning, Refused

# What `mlx.core` raises for the exceptions of MLX's functions. A TypeError is an error in this interpreter.
MLX_ERRORS = (ValueError, IndexError, RuntimeError, OverflowError)


@dataclass
class Call:
    """The state of a call. `tensors` and `values` have the slots that were written, by their numbers.

    `constants` and `buffers` outlive the call. Several programs may share `buffers`; `buffer_keys` has the keys of the
    slots of this program. `is_init` says that the call runs the init chain, which may write constants.
    """

    graph: ir.MLXGraph
    meaning: Meaning
    constants: dict[int, mx.array]
    buffers: dict[Hashable, mx.array]
    buffer_keys: dict[int, Hashable]
    is_init: bool = False
    tensors: dict[int, mx.array] = field(default_factory=dict)
    values: dict[int, int] = field(default_factory=dict)

    def run(self, chain: int) -> None:
        for i, instruction in enumerate(self.graph.instruction_chains[chain].instructions):
            node = instruction.op
            try:
                result = self.meaning.nodes[type(node)](node, self)
                if result is not None:
                    self.write(node.out, result)
            except MLX_ERRORS as error:
                raise Refused(f"chain {chain}, instruction {i}, {node.NAME}: {error}") from error
            except Refused as refused:
                if not refused.args[0].startswith("chain "):
                    refused.args = (f"chain {chain}, instruction {i}, {node.NAME}: {refused}",)
                raise

    # -- tensors ----------------------------------------------------------------------

    def _place(self, tid: ir.Tid) -> tuple[dict[Hashable, mx.array], Hashable]:
        """Return where a tensor is: a dictionary, and its key there."""
        if tid.idx < self.graph.num_constant_tensors:
            return self.constants, tid.idx
        if tid.idx in self.buffer_keys:
            return self.buffers, self.buffer_keys[tid.idx]
        return self.tensors, tid.idx

    def read(self, tid: ir.Tid) -> mx.array:
        store, key = self._place(tid)
        if key not in store:
            raise Refused(f"tensor slot {tid.idx} is read before it is written")
        return store[key]

    def optional(self, tid: ir.Tid | None) -> mx.array | None:
        return None if tid is None else self.read(tid)

    def destination(self, tid: ir.Tid) -> mx.array:
        """Read the first operand of an update."""
        if tid.idx < self.graph.num_constant_tensors and not self.meaning.constant_destination:
            raise Refused(f"tensor slot {tid.idx} is a constant, which an update cannot have as its destination")
        return self.read(tid)

    def write(self, slot: ir.Tid | ir.Vid, result: Any) -> None:
        if isinstance(slot, ir.Vid):
            self.values[slot.idx] = self.meaning.checked(result, "result")
            return
        store, key = self._place(slot)
        if store is self.constants and not self.is_init:
            raise Refused(f"tensor slot {slot.idx} is a constant, which cannot be written")
        store[key] = result

    def write_all(self, slots: Sequence[ir.Tid], results: Sequence[mx.array]) -> None:
        if len(slots) != len(results):
            raise Refused(f"got {len(results)} results for {len(slots)} slots")
        for slot, result in zip(slots, results):
            self.write(slot, result)

    # -- numbers ----------------------------------------------------------------------

    def value(self, vid: ir.Vid) -> int:
        if vid.idx not in self.values:
            raise Refused(f"value slot {vid.idx} is read before it is written")
        return self.values[vid.idx]

    def int(self, x: ir.IntOrVid) -> int:
        return self.value(x.vid) if x.is_vid else self.meaning.clamped(x.literal)

    def ints(self, xs: Sequence[ir.IntOrVid] | None) -> list[int]:
        return [self.int(x) for x in xs or ()]

    def float(self, x: ir.FloatOrVid) -> float:
        if x.is_vid:
            return self.value(x.vid)
        return x.literal if self.meaning.number_bits == 64 else float(np.float32(x.literal))


class Widened(Call):
    """A call whose tensors of half precision are read in float32."""

    def read(self, tid: ir.Tid) -> mx.array:
        x = super().read(tid)
        return x.astype(mx.float32) if x.dtype in HALF else x
