"""Every op with random legal values, judged by stock flatc.

What pack.py writes is read by flatc with our schema and with that of the official
delegate; what flatc writes with the official one is read by read.py.
"""

import random
import struct
from enum import IntEnum
from typing import NamedTuple

import pytest
from executorch_mlx.serialization import ir
from executorch_mlx.serialization.pack import HEADER, pack, pack_payload
from executorch_mlx.serialization.read import read, read_payload

# The first instance of an op has its required fields only, the second has all.
INSTANCES = 8
RANGES = {
    **{f"int{n}": (-(2 ** (n - 1)), 2 ** (n - 1) - 1) for n in (8, 32, 64)},
    **{f"uint{n}": (0, 2**n - 1) for n in (8, 32, 64)},
}
SCALARS = (*RANGES, "bool", "float", "double")
STRINGS = ("", "affine", "out[i] = x;\n", 'a "quoted" \\ text', "Grüße, 世界 🙂", "x\x7f\x01")


class Random(random.Random):
    def value(self, type_: str, fill: float):
        """A legal value; every field that may be absent is there with chance `fill`."""
        if type_.startswith("["):
            return [self.value(type_.strip("[]"), fill) for _ in range(self.choice((0, 1, 2, 5)))]
        if type_ in RANGES:
            low, high = RANGES[type_]
            return self.choice((low, high, max(low, -1), 0, 1, self.randint(low, high)))
        if type_ == "bool":
            return self.random() < 0.5
        if type_ in ("float", "double"):  # eighths: exact in the decimals that flatc prints
            return self.randint(-4096, 4096) / 8 or 1.0
        if type_ == "string":
            return self.choice(STRINGS)
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
    """What flatc prints for a value; knows nothing of pack.py."""
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
    return {
        f.name: as_json(item) for f, item in items if item is not None or f.type in SCALARS
    }


class Programs(NamedTuple):
    """One graph of all ops, and what flatc reads in it with either schema."""

    graph: ir.MLXGraph
    program: bytes
    ours: dict
    official: dict


# The official schema lacks ours.
OFFICIAL_OPS = [op for op in ir.OPS.values() if op.OP_TYPE < 200]


@pytest.fixture(scope="module")
def programs(schema, official_schema, to_json) -> Programs:
    """Chain i has the instances of op i."""
    rng = Random(20)
    fills = (0.0, 1.0, *[0.5] * (INSTANCES - 2))
    chains = [chain_of(*(rng.table(op, fill) for fill in fills)) for op in OFFICIAL_OPS]
    graph = rng.table(ir.MLXGraph, 1.0, instruction_chains=chains)
    program = pack(graph)
    return Programs(graph, program, to_json(schema, program), to_json(official_schema, program))


def chain_of(*ops: ir.Op) -> ir.InstructionChain:
    return ir.InstructionChain(instructions=[ir.Instruction(op=op) for op in ops])


@pytest.mark.parametrize("op", OFFICIAL_OPS, ids=lambda op: op.NAME)
def test_op(op, programs):
    i = OFFICIAL_OPS.index(op)
    packed = programs.graph.instruction_chains[i]
    assert [type(instruction.op) for instruction in packed.instructions] == [op] * INSTANCES
    assert programs.ours["instruction_chains"][i] == as_json(packed)
    assert programs.official["instruction_chains"][i] == as_json(packed)


def test_graph(programs):
    assert len(programs.graph.instruction_chains) == 136
    assert programs.ours == as_json(programs.graph)
    assert programs.official == as_json(programs.graph)


def test_read_what_pack_wrote(programs):
    assert read(programs.program) == programs.graph
    assert read_payload(pack_payload(programs.graph)) == programs.graph


def test_read_what_flatc_wrote(programs, official_schema, from_json):
    assert read(from_json(official_schema, programs.official)) == programs.graph


@pytest.mark.parametrize("seed", range(10))
def test_graphs_with_absent_parts(seed, schema, to_json):
    rng = Random(seed)
    own = [op for op in ir.OPS.values() if op.OP_TYPE >= 200]
    chain = chain_of(*(rng.table(op, fill) for op in own for fill in (0.0, 0.5, 1.0)))
    graph = rng.table(ir.MLXGraph, 0.5, instruction_chains=[chain])
    assert to_json(schema, pack(graph)) == as_json(graph)
    assert read(pack(graph)) == graph


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 2.0**-149, 3.4028234663852886e38, float("inf"), -float("inf")]
)
def test_float_keeps_its_bits(value):
    # PadNode's default is 0.0, RopeNode's 500000.0.
    for op in (
        ir.PadNode(x=ir.Tid(0), out=ir.Tid(1), pad_width=[], mode="", constant_value=value),
        ir.RopeNode(x=ir.Tid(0), out=ir.Tid(1), offset=ir.VidOrTid(), base=value),
    ):
        back = back_of(op)
        assert back == op and repr(back) == repr(op)  # == does not see the sign of zero


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 5e-324, 0.1, float("inf"), -float("inf"), float("nan")]
)
def test_double_keeps_its_bits(value):
    op = ir.FullNode(out=ir.Tid(0), shape=[], v=ir.FloatOrVid(literal=value))
    assert repr(back_of(op)) == repr(op)


def back_of(op: ir.Op) -> ir.Op:
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
