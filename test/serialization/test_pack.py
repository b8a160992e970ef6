"""Values that pack.py rejects, payloads that read.py rejects, and a golden program of version 1."""

import random
from pathlib import Path

import pytest
from executorch_mlx.serialization import ir
from executorch_mlx.serialization.ir import IntOrVid, NamedSlot, ShapeDim, SlotType, SlotVariant, TensorMeta, Tid, Vid
from executorch_mlx.serialization.pack import HEADER, pack, pack_payload
from executorch_mlx.serialization.read import read_payload

GOLDEN = Path(__file__).with_name("golden_1.bin")


def graph_of(*ops: ir.Op, **fields) -> ir.MLXGraph:
    instructions = [ir.Instruction(op=op) for op in ops]
    chains = [ir.InstructionChain(instructions=instructions)]
    return ir.MLXGraph(instruction_chains=chains, **fields)


T0, T1 = Tid(0), Tid(1)


def reduce(**fields) -> ir.SumNode:
    return ir.SumNode(**{"x": T0, "out": T1, **fields})


def gelu(approximate) -> ir.GeluNode:
    return ir.GeluNode(x=T0, out=T1, approximate=approximate)


def take(**index) -> ir.TakeNode:
    return ir.TakeNode(x=T0, out=T1, index=ir.IntOrVidOrTid(**index))


ILLEGAL = [
    (reduce(x=None), ValueError, "(SumNode).x: is required"),
    (gelu(None), ValueError, "(GeluNode).approximate: is required"),
    (reduce(x=Tid(-1)), ValueError, "(SumNode).x: -1 is outside uint32 [0, 4294967295]"),
    (reduce(x=Tid(2**32)), ValueError, "(SumNode).x: 4294967296 is outside uint32"),
    (reduce(x=Vid(0)), TypeError, "(SumNode).x: got Vid(idx=0) of type Vid, expected Tid"),
    (reduce(x=3), TypeError, "(SumNode).x: got 3 of type int, expected Tid"),
    (reduce(x=Tid(1.0)), TypeError, "(SumNode).x: got 1.0 of type float, expected uint32"),
    (reduce(axes=1), TypeError, "(SumNode).axes: got 1 of type int, expected [int32]"),
    (reduce(axes=[0, 2**31]), ValueError, "(SumNode).axes[1]: 2147483648 is outside int32"),
    (reduce(axes=[-(2**31) - 1]), ValueError, "(SumNode).axes[0]: -2147483649 is outside"),
    (reduce(axes=[None]), TypeError, "(SumNode).axes[0]: got None of type NoneType"),
    (reduce(axes=[True]), TypeError, "(SumNode).axes[0]: got True of type bool, expected int32"),
    (reduce(keepdims=1), TypeError, "(SumNode).keepdims: got 1 of type int, expected bool"),
    (reduce(keepdims=None), TypeError, "(SumNode).keepdims: got None of type NoneType"),
    (gelu(b"none"), TypeError, "(GeluNode).approximate: got b'none' of type bytes"),
    (gelu("\ud800"), ValueError, "(GeluNode).approximate: '\\ud800' is not valid Unicode"),
    (take(literal=2**63), ValueError, "(TakeNode).index.literal: 9223372036854775808 is outside"),
    (take(kind=256), ValueError, "(TakeNode).index.kind: 256 is outside uint8 [0, 255]"),
    (take(vid=T0), TypeError, "(TakeNode).index.vid: got Tid(idx=0) of type Tid, expected Vid"),
    (
        ir.TakeNode(x=T0, out=T1, index=IntOrVid()),
        TypeError,
        "(TakeNode).index: got IntOrVid(literal=0, vid=None, is_vid=False) of type IntOrVid",
    ),
    (
        ir.AsTypeNode(x=T0, out=T1, scalar_type=128),
        ValueError,
        "(AsTypeNode).scalar_type: 128 is outside int8 [-128, 127]",
    ),
    (
        ir.AsStridedNode(x=T0, out=T1, shape=[], strides=[], offset=-1),
        ValueError,
        "(AsStridedNode).offset: -1 is outside uint64",
    ),
    (
        ir.AsStridedNode(x=T0, out=T1, shape=[IntOrVid(), 4], strides=[]),
        TypeError,
        "(AsStridedNode).shape[1]: got 4 of type int, expected IntOrVid",
    ),
    (ir.RMSNormNode(x=T0, out=T1, eps=1e39), ValueError, "(RMSNormNode).eps: 1e+39 is outside float"),
    (ir.RMSNormNode(x=T0, out=T1, eps="1e-5"), TypeError, "(RMSNormNode).eps: got '1e-5' of type str, expected float"),
    (
        ir.UnaryNode(x=T0, out=T1),
        TypeError,
        ": got UnaryNode(x=Tid(idx=0), out=Tid(idx=1)) of type UnaryNode, expected an op",
    ),
]


@pytest.mark.parametrize("op, error, message", ILLEGAL, ids=[case[2].split(": ")[0] for case in ILLEGAL])
def test_illegal_op(op, error, message):
    with pytest.raises(error) as raised:
        pack(graph_of(ir.NoopNode(), op))
    assert str(raised.value).startswith("MLXGraph.instruction_chains[0].instructions[1].op" + message)


@pytest.mark.parametrize(
    "fields, error, message",
    [
        (dict(version=1), TypeError, "MLXGraph.version: got 1 of type int, expected string"),
        (dict(num_values=-1), ValueError, "MLXGraph.num_values: -1 is outside uint32"),
        (
            dict(input_map=[SlotVariant(slot_type=1)]),
            TypeError,
            "MLXGraph.input_map[0].slot_type: got 1 of type int, expected SlotType",
        ),
        (dict(named_slots=[NamedSlot(name="a", slot=None)]), ValueError, "MLXGraph.named_slots[0].slot: is required"),
        (
            dict(tensor_meta=[TensorMeta(shape=[], dim_order=[256])]),
            ValueError,
            "MLXGraph.tensor_meta[0].dim_order[0]: 256 is outside uint8 [0, 255]",
        ),
    ],
)
def test_illegal_graph(fields, error, message):
    with pytest.raises(error) as raised:
        pack(graph_of(**fields))
    assert str(raised.value).startswith(message)


def test_wrong_root_type():
    with pytest.raises(TypeError, match="^MLXGraph: got 3 of type int, expected MLXGraph$"):
        pack(3)


def test_equal_strings_are_shared():
    name = "some/long/source/of/a/kernel"
    assert pack(graph_of(*[gelu(name)] * 10)).count(name.encode()) == 1


def test_equal_operands_are_shared():
    def size(*literals):
        shape = [IntOrVid(literal=literal) for literal in literals]
        return len(pack(graph_of(ir.ReshapeNode(x=T0, out=T1, shape=shape))))

    # Nine of the ten equal operands are not stored again. Each would take at least 8 bytes.
    assert size(*[3] * 10) + 9 * 8 < size(*range(1, 11))


def test_defaults_take_no_space():
    plain = ir.RopeNode(x=T0, out=T1, offset=ir.VidOrTid())
    explicit = ir.RopeNode(x=T0, out=T1, offset=ir.VidOrTid(), base=500000.0, scale=1.0, traditional=False)
    other = ir.RopeNode(x=T0, out=T1, offset=ir.VidOrTid(), base=10000.0)
    assert pack(graph_of(plain)) == pack(graph_of(explicit))
    assert len(pack(graph_of(plain))) < len(pack(graph_of(other)))


@pytest.mark.parametrize("scalar_type", [None, 0, 6])
def test_optional_scalar_keeps_zero_and_absent_apart(scalar_type):
    op = ir.FullLikeNode(x=T0, out=T1, v=ir.FloatOrVid(literal=1.0), scalar_type=scalar_type)
    back = read_payload(pack_payload(graph_of(op)))
    assert back.instruction_chains[0].instructions[0].op.scalar_type == scalar_type


def test_packing_is_deterministic():
    assert pack(golden()) == pack(golden())


# ---------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "payload, message",
    [
        (b"", "payload: got 0 bytes, expected a header of 24"),
        (b"\0\0\0\0MLX0", "payload: got 8 bytes"),
        (b"\0\0\0\0XNN0" + bytes(16), "payload: got magic b'XNN0', expected b'MLX0'"),
        (b"\0\0\0\0MLX0" + bytes(16), "MLXGraph: 4 bytes at offset 0 are outside the buffer of 0 bytes"),
        (b"\0\0\0\0MLX0\x28" + bytes(15), "payload: the data segment of 0 bytes at offset 40 is outside [24, 24]"),
        (b"\0\0\0\0MLX0" + b"\xff" * 16, "payload: the data segment of 18446744073709551615 bytes"),
        (b"\0\0\0\0MLX0\x18" + bytes(15), "MLXGraph: 4 bytes at offset 0 are outside the buffer of 0 bytes"),
    ],
)
def test_illegal_payload(payload, message):
    with pytest.raises(ValueError) as raised:
        read_payload(payload)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("data_offset", [None, 0])
def test_payload_without_padding(data_offset):
    graph = golden()
    program = pack(graph)
    magic, offset, size = HEADER.unpack_from(pack_payload(graph))
    header = HEADER.pack(magic, offset if data_offset is None else data_offset, size)
    assert read_payload(header + program) == read_payload(pack_payload(graph))


def test_unknown_op():
    payload = bytearray(pack_payload(graph_of(ir.TanhNode(x=T0, out=T1))))
    at = [i for i, byte in enumerate(payload) if byte == ir.TanhNode.OP_TYPE][-1]
    payload[at] = 255
    with pytest.raises(ValueError, match=r"instructions\[0\].op: unknown op 255$"):
        read_payload(bytes(payload))


def test_corrupted_payloads_raise_only_value_error():
    rng = random.Random(3)
    payload = pack_payload(golden())
    refused = 0
    for _ in range(3000):
        bad = bytearray(payload[: rng.choice((len(payload), rng.randrange(len(payload))))])
        for _ in range(rng.randint(1, 4)):
            if bad:
                bad[rng.randrange(len(bad))] = rng.randrange(256)
        try:
            read_payload(bytes(bad))
        except ValueError:
            refused += 1
    assert refused > 1000


# ---------------------------------------------------------------------------
# Programs written by earlier versions
# ---------------------------------------------------------------------------


def golden() -> ir.MLXGraph:
    """The program that golden_1.bin contains. Never change this function or the file.

    A new version of the format gets a new function and a new file.
    """
    chain = ir.InstructionChain(
        instructions=[
            ir.Instruction(op=op)
            for op in (
                ir.SymSizeNode(a=Tid(1), dim=1, out=Vid(1)),
                ir.AddIntNode(a=IntOrVid(vid=Vid(0), is_vid=True), b=IntOrVid(literal=-7), out=Vid(2)),
                ir.AddmmNode(mat1=Tid(1), mat2=Tid(0), out=Tid(4), bias=Tid(5), alpha=0.5),
                ir.RopeNode(x=Tid(4), out=Tid(4), dims=64, offset=ir.VidOrTid(vid=Vid(0), is_vid=True)),
                ir.SliceUpdateNode(
                    dst=Tid(3),
                    update=Tid(4),
                    out=Tid(3),
                    axis=IntOrVid(literal=2),
                    start=IntOrVid(vid=Vid(0), is_vid=True),
                    stop=IntOrVid(vid=Vid(2), is_vid=True),
                ),
                ir.FullLikeNode(x=Tid(4), out=Tid(5), v=ir.FloatOrVid(literal=-0.0), scalar_type=0),
                ir.QuantizedMatmulNode(
                    x=Tid(4), w=Tid(0), scales=Tid(5), out=Tid(4), group_size=32, bits=4, mode="affine", transpose=False
                ),
                ir.SumNode(x=Tid(4), out=Tid(5), axes=[-1], keepdims=True),
                ir.IfNode(cond=IntOrVid(literal=1), then_chain_idx=1, else_chain_idx=2),
                ir.FlipNode(x=Tid(4), out=Tid(2), axes=[0, 1]),
            )
        ]
    )
    then = ir.Instruction(op=ir.LogNode(x=Tid(4), out=Tid(5)))
    otherwise = ir.Instruction(op=ir.RandomBitsNode(out=Tid(5), shape=[IntOrVid(literal=3)], seed=Vid(0), width=2))
    return ir.MLXGraph(
        version="1",
        num_constant_tensors=1,
        num_input_tensors=1,
        num_output_tensors=1,
        num_mutable_buffer_tensors=1,
        num_temp_tensors=2,
        num_values=3,
        instruction_chains=[
            chain,
            ir.InstructionChain(instructions=[then]),
            ir.InstructionChain(instructions=[otherwise]),
        ],
        input_map=[SlotVariant(idx=1), SlotVariant(idx=0, slot_type=SlotType.IntValueSlot)],
        output_map=[SlotVariant(idx=2)],
        mutable_buffer_map=[SlotVariant(idx=3)],
        named_slots=[
            NamedSlot(name="weight", slot=SlotVariant(idx=0)),
            NamedSlot(name="cache", slot=SlotVariant(idx=3)),
        ],
        tensor_meta=[
            TensorMeta(shape=[ShapeDim(value=4), ShapeDim(min_value=1, max_value=8)], scalar_type=6, dim_order=[0, 1])
        ]
        * 4,
    )


def test_golden_program_is_unchanged():
    back = read_payload(GOLDEN.read_bytes())
    assert back == golden()
    assert repr(back) == repr(golden())  # == ignores the sign of zero
