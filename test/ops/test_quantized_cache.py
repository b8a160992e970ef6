"""Quantized KV caches: the nodes for them, and portable programs, where these nodes are replacements."""

import dataclasses

import pytest
import torch
from executorch_mlx.custom_ops.quantized_cache import EntryFormat, dequantize, hadamard, quantize
from executorch_mlx.serialization import ir
from loaded_method import LoadedMethod
from oprows import Dyn, OpRow, bf16, f16, f32, floats, ints, lower, pytest_function, row, run_in_process
from oprows.portable import without_replacements

N = Dyn("n", 3, also=(1, 7))
M = Dyn("m", 3, also=(1, 5))
HEAD_SIZE = 40  # fills two groups of 32, the second with 8 numbers and 24 zeros
CAPACITY = 16
FUSED = ("QuantizeEntriesNode", "QuantizedSdpaNode")
EXTENSIONS = {op.NAME for op in ir.OPS.values() if op.OP_TYPE >= ir.FIRST_EXTENSION}
UNROTATED = EntryFormat(32, 8, False)
ROTATED = EntryFormat(32, 4, True)
GROUPS_OF_64 = EntryFormat(64, 8, True)


class QuantizedAttention(torch.nn.Module):
    """Writes keys and values from position `start` on, then attends.

    If `value_size` is None, the values are the first 33 numbers of the keys.
    """

    def __init__(self, format, capacity=CAPACITY, rows=1, value_size=HEAD_SIZE, dtype=f32, **options):
        super().__init__()
        self.format, self.rows, self.value_size, self.options = format, rows, value_size, options
        groups = format.groups(HEAD_SIZE) + format.groups(value_size or 0)
        self.register_buffer("entries", torch.zeros(1, 2, rows * capacity, format.bytes(groups), dtype=torch.uint8))
        self.register_buffer("scales", torch.zeros(1, 2, rows * capacity, 2 * groups, dtype=dtype))

    def forward(self, query, key, value, start, row=None):
        format_arguments = self.format.group_size, self.format.bits, self.format.rotate
        tensors = [key, value] if self.value_size else [key + 0 * value]
        new = torch.ops.mlx.quantize_entries(tensors, *format_arguments, self.scales.dtype)
        for cache, update in zip((self.entries, self.scales), new):
            written = torch.ops.mlx.cache_update(cache, update, start, "window" in self.options, row, self.rows)
            cache.copy_(written)
        offset = self.format.groups(HEAD_SIZE) * self.format.group_size if self.value_size else 0
        return torch.ops.mlx.quantized_attention(
            query,
            self.entries,
            self.scales,
            start,
            0.2,
            offset,
            self.value_size or 33,
            *format_arguments,
            **self.options,
            row=row,
            rows=self.rows,
        )


def fused(variant, module, *inputs, **options):
    return row(
        f"mlx::quantized_attention{variant}",
        module,
        *inputs,
        **{"dtypes": (f32,), "loose": 20, "nodes": FUSED, "edge_verified": False, **options},
    )


def qkv(length):
    return floats(1, 4, length, HEAD_SIZE), floats(1, 2, length, HEAD_SIZE), floats(1, 2, length, HEAD_SIZE)


RING = {"capacity": 10, "window": 6}  # chunks of up to 5 positions
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
ROW = ints(1, low=0, high=3)
# For calls with four tokens: the position of each token, and its row of the cache.
TOKEN_POSITIONS, TOKEN_ROWS = ints(4, low=0, high=16), ints(4, low=0, high=3)

CACHE_ROWS = [
    fused("", QuantizedAttention(UNROTATED), *qkv(3), ints(low=0, high=13), calls=3),
    fused("/rotated, dynamic", QuantizedAttention(ROTATED), *qkv(N), ints(low=0, high=9)),
    fused("/groups of 64", QuantizedAttention(GROUPS_OF_64), *qkv(N), ints(low=0, high=9)),
    fused("/ring", QuantizedAttention(UNROTATED, **RING), *qkv(M), ints(low=0, high=100), calls=4),
    fused("/rows", QuantizedAttention(ROTATED, rows=3), *qkv(4), TOKEN_POSITIONS, TOKEN_ROWS, calls=4),
    fused("/row", QuantizedAttention(UNROTATED, rows=3), *qkv(N), ints(1, low=0, high=9), ROW, calls=4),
    fused("/values in the keys", QuantizedAttention(ROTATED, value_size=None), *qkv(N), ints(low=0, high=9)),
    fused("/ring, rows", QuantizedAttention(ROTATED, rows=3, **RING), *qkv(4), ints(4, low=0, high=100), TOKEN_ROWS),
    fused("/blocks", QuantizedAttention(UNROTATED, blocks=True, **RING), *qkv(M), ints(low=0, high=100), calls=4),
    fused("/slopes", QuantizedAttention(UNROTATED, slopes=SLOPES), *qkv(N), ints(low=0, high=9)),
    fused("/float16", QuantizedAttention(ROTATED), *qkv(N), ints(low=0, high=9), dtypes=(f16,), loose_half=4),
    fused("/softcap", QuantizedAttention(UNROTATED, softcap=2.0), *qkv(N), ints(low=0, high=9), nodes=FUSED[:1]),
    fused(
        "/rows, sinks",
        QuantizedAttention(ROTATED, rows=3, sinks=SINKS),
        *qkv(4),
        TOKEN_POSITIONS,
        TOKEN_ROWS,
        nodes=FUSED[:1],
    ),
]
SCALES = row(
    "mlx::quantize_entries/scales",
    lambda x, y: torch.ops.mlx.quantize_entries([x, y], 32, 8, False, torch.float32)[1],
    floats(1, 2, 3, HEAD_SIZE),
    floats(1, 2, 3, 7),
    dtypes=(f32, f16, bf16),
    nodes=FUSED[:1],
    edge_verified=False,
)

ROWS = [*CACHE_ROWS, SCALES]

test_op_row = pytest_function(ROWS)


# Portable programs -------------------------------------------------------------------------


def outputs_of(lowered):
    method = LoadedMethod(lowered.pte)
    return [[x.clone() for x in method.execute(list(inputs))] for inputs, _ in lowered.calls]


def node_names(lowered):
    """Return the names of the nodes in the chains, and of those in the replacements."""
    in_chains = {i.op.NAME for g in lowered.graphs for chain in g.instruction_chains for i in chain.instructions}
    return in_chains, {r.instruction.op.NAME for g in lowered.graphs for r in g.replacements or ()}


@pytest.mark.parametrize("row", CACHE_ROWS, ids=str)
def test_portable_program(row, delegate):
    """Its replacements give the bits of the nodes. Its own instructions agree with eager torch."""
    portable = dataclasses.replace(row, nodes=())
    replaced, with_nodes = lower(portable), lower(row)
    in_chains, replacements = node_names(replaced)
    assert not in_chains & EXTENSIONS
    assert replacements - {"RowUpdateNode", "FullNode"} == set(row.nodes)
    for a, b in zip(outputs_of(replaced), outputs_of(with_nodes), strict=True):
        assert all(x.equal(y) and x.isfinite().all() for x, y in zip(a, b, strict=True))
    with without_replacements():
        plain = lower(portable)
    assert node_names(plain)[1] <= {"FullNode"}
    run_in_process(portable, plain)


def test_the_runtime_runs_the_replacements(delegate, tmp_path):
    from executorch.devtools import Inspector
    from executorch_mlx import Runtime

    lowered = lower(dataclasses.replace(CACHE_ROWS[1], nodes=()))
    program = Runtime.get().load_program(lowered.pte, enable_etdump=True, debug_buffer_size=0)
    program.load_method("forward").execute(list(lowered.calls[0][0]))
    program.write_etdump_result_to_file(str(tmp_path / "dump.etdp"), str(tmp_path / "debug.bin"))
    blocks = Inspector(etdump_path=str(tmp_path / "dump.etdp")).event_blocks
    ran = [event.name.split()[1] for block in blocks for event in block.events if event.is_delegated_op]
    assert [ran.count(name) for name in FUSED] == [1, 1]
    # A portable program quantizes with RoundNode, and takes two integers of 4 bits apart with BitwiseAndNode.
    in_chains, _ = node_names(lowered)
    assert {"RoundNode", "BitwiseAndNode", "SdpaNode"} <= in_chains
    assert not {"RoundNode", "BitwiseAndNode", "SdpaNode"} & set(ran)


HUGE = 32 * 1025  # fills more groups than the nodes support


class HugeHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("entries", torch.zeros(1, 1, 4, 2 * HUGE, dtype=torch.uint8))
        self.register_buffer("scales", torch.zeros(1, 1, 4, 4 * HUGE // 32))

    def forward(self, query, key, value, start):
        new = torch.ops.mlx.quantize_entries([key, value], 32, 8, False, f32)
        for cache, update in zip((self.entries, self.scales), new):
            cache.copy_(torch.ops.mlx.cache_update(cache, update, start))
        return torch.ops.mlx.quantized_attention(
            query, self.entries, self.scales, start, 0.01, HUGE, HUGE, 32, 8, False
        )


UNSUPPORTED = {
    "entries of too many groups": fused(
        "/huge", HugeHeads(), *[floats(1, 1, 2, HUGE)] * 3, ints(low=0, high=3), nodes=()
    ),
    "five axes": row(
        "mlx::quantize_entries/five axes",
        lambda x: torch.ops.mlx.quantize_entries([x], 32, 8, True, f32)[1],
        floats(1, 1, 2, 3, 40),
        dtypes=(f32,),
        edge_verified=False,
    ),
}


class WithExtensions(OpRow):
    allow_extensions = True


@pytest.mark.parametrize("row", UNSUPPORTED.values(), ids=UNSUPPORTED)
@pytest.mark.parametrize("extensions", [False, True])
def test_what_the_nodes_do_not_support_is_lowered_without_them(row, extensions, delegate):
    lowered = lower(WithExtensions(**vars(row)) if extensions else row)
    in_chains, replacements = node_names(lowered)
    assert not {*in_chains, *replacements} & set(FUSED)
    run_in_process(row, lowered)


# The format ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [f32, f16, bf16])
@pytest.mark.parametrize("format", [UNROTATED, ROTATED, GROUPS_OF_64, EntryFormat(128, 4, False)])
def test_the_error_is_bounded_by_the_scale(format, dtype):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1, 2, 5, width, generator=generator) for width in (200, 33))
    y[:, :, 2] = 3.0  # a constant group
    y[:, :, 3] = 0.0
    entries, scales = quantize([x, y], format, dtype)
    first_group = 0
    for tensor in (x, y):
        width = tensor.shape[-1]
        restored = dequantize(entries, scales, first_group, width, format, f32)
        largest_scale = scales[..., first_group : first_group + format.groups(width)].float().amax()
        # Without a rotation, quantization changes a number by at most half a scale. A rotation spreads the errors of a
        # group over its numbers. In half precision, the scale is rounded too.
        slack = (format.group_size**0.5 if format.rotate else 1) * (1 if dtype == f32 else 3)
        assert (restored - tensor).abs().max() <= 0.51 * largest_scale * slack
        first_group += format.groups(width)


def test_hadamard_is_its_own_inverse():
    for size in (32, 64, 128):
        torch.testing.assert_close(hadamard(size) @ hadamard(size), torch.eye(size))


@pytest.mark.parametrize("bits, group_size", [(3, 32), (8, 16), (4, 33)])
def test_formats_are_checked(bits, group_size):
    with pytest.raises(ValueError, match="expected 4 or 8 bits in groups of 32, 64 or 128"):
        torch.ops.mlx.quantize_entries([torch.zeros(1, 1, 1, 64)], group_size, bits, False, f32)
