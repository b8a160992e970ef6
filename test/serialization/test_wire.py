"""pack.py and read.py agree with flatc on every op with random legal values.

flatc reads what pack.py writes, with this schema and with the official schema, that of ExecuTorch's own MLX delegate.
read.py reads what flatc writes with the official schema.
"""

import dataclasses
import random
import struct
from enum import IntEnum
from typing import NamedTuple

import pytest
from executorch_mlx.serialization import ir
from executorch_mlx.serialization.pack import HEADER, pack, pack_payload
from executorch_mlx.serialization.read import read, read_payload

# Instances per op. The first has only the required fields, the second has all fields.
INSTANCES = 8
RANGES = {
    **{f"int{n}": (-(2 ** (n - 1)), 2 ** (n - 1) - 1) for n in (8, 32, 64)},
    **{f"uint{n}": (0, 2**n - 1) for n in (8, 32, 64)},
}
SCALARS = (*RANGES, "bool", "float", "double")
STRINGS = ("", "affine", "out[i] = x;\n", 'a "quoted" \\ text', "Grüße, 世界 🙂", "x\x7f\x01")


class Random(random.Random):
    def value(self, type_: str, fill: float):
        """A legal value. Each optional field is present with probability `fill`."""
        if type_.startswith("["):
            return [self.value(type_.strip("[]"), fill) for _ in range(self.choice((0, 1, 2, 5)))]
        if type_ in RANGES:
            low, high = RANGES[type_]
            return self.choice((low, high, max(low, -1), 0, 1, self.randint(low, high)))
        if type_ == "bool":
            return self.random() < 0.5
        if type_ in ("float", "double"):  # multiples of 1/8: flatc prints them exactly
            return self.randint(-4096, 4096) / 8 or 1.0
        if type_ == "string":
            return self.choice(STRINGS)
        if type_ == "OpNode":
            return self.table(self.choice(list(ir.OPS.values())), fill)
        cls = getattr(ir, type_)
        if cls in (ir.Tid, ir.Vid):
            return cls(self.value("uint32", fill))
        if issubclass(cls, IntEnum):
            return self.choice(list(cls))
        return self.table(cls, fill)

    def table(self, cls: type[ir.Table], fill: float, **given) -> ir.Table:
        for f in cls.FIELDS:
            if f.name not in given and (f.required or self.random() < fill):
                given[f.name] = self.value(f.type, fill)
        return cls(**given)


def as_json(value):
    """The JSON that flatc prints for a value, derived without pack.py."""
    if isinstance(value, IntEnum):
        return value.name
    if isinstance(value, (ir.Tid, ir.Vid)):
        return {"idx": value.idx}
    if isinstance(value, list):
        return [as_json(item) for item in value]
    if isinstance(value, ir.Instruction):
        return {"op_type": type(value.op).__name__, "op": as_json(value.op)}
    if not isinstance(value, ir.Table):
        return value
    items = ((f, getattr(value, f.name)) for f in value.FIELDS)
    return {f.name: as_json(item) for f, item in items if item is not None or f.type in SCALARS}


class PackedGraph(NamedTuple):
    """A graph with all official ops, its FlatBuffer, and the JSON to which flatc converts it with each schema."""

    graph: ir.MLXGraph
    program: bytes
    ours: dict
    official: dict


OFFICIAL_OPS = [op for op in ir.OPS.values() if op.OP_TYPE < ir.FIRST_EXTENSION]
EXTENSIONS = [op for op in ir.OPS.values() if op.OP_TYPE >= ir.FIRST_EXTENSION]


@pytest.fixture(scope="module")
def packed(schema, official_schema, to_json) -> PackedGraph:
    """Chain `i` of the graph has the instances of `OFFICIAL_OPS[i]`."""
    rng = Random(20)
    fills = (0.0, 1.0, *[0.5] * (INSTANCES - 2))
    chains = [chain_of(*(rng.table(op, fill) for fill in fills)) for op in OFFICIAL_OPS]
    graph = rng.table(ir.MLXGraph, 1.0, instruction_chains=chains)
    program = pack(graph)
    return PackedGraph(graph, program, to_json(schema, program), to_json(official_schema, program))


def chain_of(*ops: ir.Op) -> ir.InstructionChain:
    return ir.InstructionChain(instructions=[ir.Instruction(op=op) for op in ops])


@pytest.mark.parametrize("op", OFFICIAL_OPS, ids=lambda op: op.NAME)
def test_op(op, packed):
    i = OFFICIAL_OPS.index(op)
    chain = packed.graph.instruction_chains[i]
    assert [type(instruction.op) for instruction in chain.instructions] == [op] * INSTANCES
    assert packed.ours["instruction_chains"][i] == as_json(chain)
    assert packed.official["instruction_chains"][i] == as_json(chain)


def test_graph(packed):
    assert len(packed.graph.instruction_chains) == 136
    assert packed.ours == as_json(packed.graph)
    assert packed.graph.replacements
    assert packed.official == as_json(without_extensions(packed.graph))


def without_extensions(graph: ir.MLXGraph) -> ir.MLXGraph:
    """The graph as ExecuTorch's own delegate reads it."""
    return dataclasses.replace(graph, replacements=None)


def test_read_reverses_pack(packed):
    assert read(packed.program) == packed.graph
    assert read_payload(pack_payload(packed.graph)) == packed.graph


def test_read_reverses_flatc(packed, official_schema, from_json):
    assert read(from_json(official_schema, packed.official)) == without_extensions(packed.graph)


@pytest.mark.parametrize("seed", range(10))
def test_graph_with_absent_fields(seed, schema, to_json):
    rng = Random(seed)
    chain = chain_of(*(rng.table(op, fill) for op in EXTENSIONS for fill in (0.0, 0.5, 1.0)))
    graph = rng.table(ir.MLXGraph, 0.5, instruction_chains=[chain])
    assert to_json(schema, pack(graph)) == as_json(graph)
    assert read(pack(graph)) == graph


@pytest.mark.parametrize("value", [0.0, -0.0, 2.0**-149, 3.4028234663852886e38, float("inf"), -float("inf")])
def test_float_keeps_its_bits(value):
    # The field's default is 0.0 in PadNode and 500000.0 in RopeNode.
    for op in (
        ir.PadNode(x=ir.Tid(0), out=ir.Tid(1), pad_width=[], mode="", constant_value=value),
        ir.RopeNode(x=ir.Tid(0), out=ir.Tid(1), offset=ir.VidOrTid(), base=value),
    ):
        back = round_trip(op)
        assert back == op and repr(back) == repr(op)  # == ignores the sign of zero


@pytest.mark.parametrize("value", [0.0, -0.0, 5e-324, 0.1, float("inf"), -float("inf"), float("nan")])
def test_double_keeps_its_bits(value):
    op = ir.FullNode(out=ir.Tid(0), shape=[], v=ir.FloatOrVid(literal=value))
    assert repr(round_trip(op)) == repr(op)


def round_trip(op: ir.Op) -> ir.Op:
    zero = ir.FullNode(out=ir.Tid(0), shape=[], v=ir.FloatOrVid())
    graph = ir.MLXGraph(instruction_chains=[chain_of(zero, op)])
    return read(pack(graph)).instruction_chains[0].instructions[1].op


def test_payload_header():
    graph = ir.MLXGraph(version="1", instruction_chains=[])
    payload, program = pack_payload(graph), pack(graph)
    assert payload[:8] == b"\0\0\0\0MLX0"
    offset, size = struct.unpack("<QQ", payload[8:24])
    assert HEADER.size == 24 and payload[24 : 24 + len(program)] == program
    assert offset == len(payload) and offset % 16 == 0 and offset - 24 - len(program) < 16
    assert size == 0
