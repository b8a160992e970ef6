"""The command `inspect` ends soon if a small file describes something enormous. It refuses most of these files.

Without limits, each of these files would take hours or all memory.
"""

import json
import struct

import pytest
from executorch_mlx.cli.main import main
from executorch_mlx.serialization import ir
from executorch_mlx.serialization.pack import HEADER, pack_payload
from executorch_mlx.serialization.read import U32, Buffer, Table
from irprograms import Graph, lit, pte, value_of


@pytest.fixture
def inspect(capsys, tmp_path):
    def run(graph: Graph, payload: bytes | None = None) -> tuple[int, str, str]:
        (tmp_path / "hostile.pte").write_bytes(pte({"forward": graph}, payload))
        code = main(["inspect", "--json", str(tmp_path / "hostile.pte")])
        return code, *capsys.readouterr()

    return run


def nested(depth: int) -> Graph:
    """Return a program of nested branches. In every chain, both branches of an IfNode are the next inner chain, so
    that the innermost chain runs 2^depth times."""
    g = Graph()
    inner = g.chain(ir.NoopNode())
    for _ in range(depth - 1):
        inner = g.chain(ir.IfNode(cond=lit(1), then_chain_idx=inner, else_chain_idx=inner))
    g.emit(ir.IfNode(cond=lit(1), then_chain_idx=inner, else_chain_idx=inner))
    return g


@pytest.mark.parametrize("depth, message", [(50, "the chains expand to more than"), (500, "at most 64 nested chains")])
def test_nested_branches(inspect, depth, message):
    code, out, err = inspect(nested(depth))
    assert code == 1 and message in err and out == "" and err.count("\n") == 1


def test_shallow_branches_are_shown(inspect):
    code, out, _ = inspect(nested(8))
    assert code == 0 and len(json.loads(out)["delegates"][0]["chains"]) == 9


def test_integers_that_double_their_digits(inspect):
    g = Graph()
    value = g.new_value()
    g.emit(ir.AddIntNode(a=lit(3), b=lit(4), out=value))
    g.emit(*[ir.MultiplyIntNode(a=value_of(value), b=value_of(value), out=value)] * 60)
    g.output_value(value)
    assert inspect(g)[0] == 0


@pytest.mark.parametrize("field", ["num_temp_tensors", "num_constant_tensors", "num_values"])
def test_billions_of_slots(inspect, field):
    g = Graph()
    graph = g.graph()
    setattr(graph, field, 2**32 - 1)
    code, _, err = inspect(g, pack_payload(graph))
    assert code == 1 and "expected at most 1048576" in err


def with_shared_chain(g: Graph) -> bytes:
    """Return the payload of `g`, changed so that every entry of the vector of chains refers to the first chain."""
    payload = bytearray(g.payload())
    program = Buffer(bytes(payload[HEADER.size :]))
    chains = next(f for f in ir.MLXGraph.FIELDS if f.name == "instruction_chains")
    vector = program.follow(Table.at(program, program.follow(0)).field(chains.id))
    entries = [vector + 4 + 4 * i for i in range(program.get(U32, vector))]
    target = program.follow(entries[0])
    for entry in entries:
        struct.pack_into("<I", payload, HEADER.size + entry, target - entry)
    return bytes(payload)


def test_a_table_that_is_stored_once_and_used_many_times(inspect):
    g = Graph()
    g.emit(*[ir.NoopNode()] * 3000)
    for _ in range(3000):
        g.chain()
    code, _, err = inspect(g, with_shared_chain(g))
    assert code == 1 and "the program is more than 8 times larger than its" in err
