"""KV caches in mutable buffers, and attention over them."""

from contextlib import nullcontext

import pytest
import torch
from loaded_method import LoadedMethod
from oprows import Dyn, f32, floats, ints, pytest_function, row
from oprows.portable import without_replacements

N = Dyn("n", 3, also=(1, 7))
M = Dyn("m", 3, also=(1, 5))
SDPA = ("SdpaNode",)


class CachedAttention(torch.nn.Module):
    """Writes keys and values from position `start` on, then attends.

    If `rows` is more than 1, the input `row` has the row of each token, or one row for all of them. `sinks` and
    `slopes` are lists with a number for each query head.
    """

    def __init__(self, kv_heads, capacity=16, rows=1, value_size=8, sinks=None, slopes=None, **options):
        super().__init__()
        self.rows, self.options = rows, options
        for name, size in (("keys", 8), ("values", value_size)):
            self.register_buffer(name, torch.zeros(1, kv_heads, rows * capacity, size))
        for name, numbers in (("sinks", sinks), ("slopes", slopes)):
            self.register_buffer(name, None if numbers is None else torch.tensor(numbers))

    def forward(self, query, key, value, start, row=None):
        ring = "window" in self.options
        for name, update in (("keys", key), ("values", value)):
            cache = getattr(self, name)
            cache.copy_(torch.ops.mlx.cache_update(cache, update, start, ring, row, self.rows))
        return torch.ops.mlx.cached_attention(
            query,
            self.keys,
            self.values,
            start,
            8**-0.5,
            **self.options,
            row=row,
            rows=self.rows,
            sinks=self.sinks,
            slopes=self.slopes,
        )


def cached(variant, module, *inputs, **options):
    return row(
        f"mlx::cached_attention{variant}", module, *inputs, **{"dtypes": (f32,), "loose": 10, "nodes": SDPA, **options}
    )


def qkv(length, kv_heads=2, value_size=8):
    """Return a query of 4 heads, a key and a value for `length` positions."""
    return floats(1, 4, length, 8), floats(1, kv_heads, length, 8), floats(1, kv_heads, length, value_size)


CAP = {"softcap": 2.0}
RING = {"capacity": 10, "window": 6}  # chunks of up to 5 positions
BLOCKS = {**RING, "blocks": True}
SINKS = {"sinks": [0.5, -1.0, 2.0, 0.0]}
SLOPES = {"slopes": [0.5, 0.25, 0.125, 0.0625]}
ROW = ints(1, low=0, high=3)
# The position and the row of each of four tokens. Several tokens may have the same row.
TOKEN_POSITIONS, TOKEN_ROWS = ints(4, low=0, high=16), ints(4, low=0, high=3)

ROWS = [
    cached("", CachedAttention(4), *qkv(3, kv_heads=4), ints(low=0, high=13), calls=3),
    cached("/grouped, dynamic", CachedAttention(2), *qkv(N), ints(low=0, high=9)),
    cached("/softcap", CachedAttention(2, **CAP), *qkv(N), ints(low=0, high=9), nodes=()),
    cached("/ring", CachedAttention(2, **RING), *qkv(M), ints(low=0, high=100), calls=4),
    cached("/ring, one", CachedAttention(2, **RING), *qkv(1), ints(low=0, high=100), calls=4),
    cached("/row", CachedAttention(2, rows=3), *qkv(N), ints(1, low=0, high=9), ROW, calls=4),
    cached("/row, ring", CachedAttention(2, rows=3, **RING), *qkv(M), ints(1, low=0, high=100), ROW, calls=4),
    cached(
        "/rows",
        CachedAttention(2, rows=3),
        *qkv(4),
        TOKEN_POSITIONS,
        TOKEN_ROWS,
        calls=4,
        nodes=("SdpaNode", "RowSdpaNode", "RowUpdateNode"),
    ),
    cached(
        "/rows, softcap", CachedAttention(2, rows=3, **CAP), *qkv(4), TOKEN_POSITIONS, TOKEN_ROWS, calls=4, nodes=()
    ),
    cached(
        "/rows, ring, softcap",
        CachedAttention(2, rows=3, **RING, **CAP),
        *qkv(4),
        ints(4, low=0, high=100),
        TOKEN_ROWS,
        calls=4,
        nodes=(),
    ),
    cached("/values of another size", CachedAttention(2, value_size=5), *qkv(N, value_size=5), ints(low=0, high=9)),
    cached("/blocks", CachedAttention(2, **BLOCKS), *qkv(M), ints(low=0, high=100), calls=4),
    cached(
        "/rows, blocks", CachedAttention(2, rows=3, **BLOCKS), *qkv(4), ints(4, low=0, high=100), TOKEN_ROWS, calls=4
    ),
    cached("/slopes", CachedAttention(2, **SLOPES), *qkv(N), ints(low=0, high=9)),
    cached(
        "/rows, ring, slopes",
        CachedAttention(2, rows=3, **RING, **SLOPES),
        *qkv(4),
        ints(4, low=0, high=100),
        TOKEN_ROWS,
        calls=4,
    ),
    cached("/sinks", CachedAttention(2, **SINKS), *qkv(N), ints(low=0, high=9), nodes=()),
    cached("/ring, sinks", CachedAttention(2, **RING, **SINKS), *qkv(M), ints(low=0, high=100), calls=4, nodes=()),
    cached(
        "/rows, sinks, slopes, softcap",
        CachedAttention(2, rows=3, value_size=5, **SINKS, **SLOPES, **CAP),
        *qkv(4, value_size=5),
        TOKEN_POSITIONS,
        TOKEN_ROWS,
        calls=4,
        nodes=(),
    ),
    row("mlx::read_state", lambda buffer: torch.ops.mlx.read_state(buffer) * 2, floats(3, 4), dtypes=(f32,)),
]

test_op_row = pytest_function(ROWS)


OPTIONS = {"plain": {}, "softcap": CAP, "blocks": {"blocks": True}, "sinks": SINKS, "slopes": SLOPES}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("chunks", [(5, 5, 5, 5), (1,) * 20, (5, 1, 1, 4, 3, 5, 1)])
def test_ring_buffer_equals_attention_with_a_band_mask(options, chunks):
    total, window = sum(chunks), RING["window"]
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, total, 8), torch.randn(1, 2, total, 8), torch.randn(1, 2, total, 8)
    band = torch.ones(total, total, dtype=torch.bool).tril().triu(1 - window)
    keys, values = (x.repeat_interleave(2, 1) for x in (key, value))
    scores = query @ keys.transpose(2, 3) * 8**-0.5
    at = torch.arange(total)
    if options is CAP:
        scores = 2.0 * torch.tanh(scores / 2.0)
    if options is SLOPES:
        scores = scores + torch.tensor(SLOPES["slopes"])[:, None, None] * at
    if "blocks" in options:
        band = band & (at[:, None] // window == at // window)
    scores = scores.masked_fill(~band, -torch.inf)
    if options is SINKS:
        sinks = torch.tensor(SINKS["sinks"])[None, :, None, None].expand(1, 4, total, 1)
        expected = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ values
    else:
        expected = scores.softmax(-1) @ values

    ring, start, outputs = CachedAttention(2, **RING, **options), 0, []
    for length in chunks:
        part = slice(start, start + length)
        outputs.append(ring(query[:, :, part], key[:, :, part], value[:, :, part], torch.tensor([start])))
        start += length
    torch.testing.assert_close(torch.cat(outputs, 2), expected)


@pytest.mark.parametrize(
    "options, message",
    [({"blocks": True}, "blocks: got no window"), ({"sinks": [1.0]}, r"sinks: got shape \[1\], expected \[4\]")],
)
def test_settings_of_attention_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        CachedAttention(2, **options)(*(torch.zeros(1, heads, 2, 8) for heads in (4, 2, 2)), torch.tensor([0]))


def test_ring_buffer_smaller_than_the_window_raises():
    ring = CachedAttention(2, **RING)
    update = torch.zeros(1, 2, 6, 8)
    with pytest.raises(ValueError, match="got a capacity of 10 positions, expected at least"):
        ring(torch.zeros(1, 4, 6, 8), update, update, torch.tensor([20]))


# Rows ------------------------------------------------------------------------------------


def row_inputs(positions, rows):
    torch.manual_seed(len(positions))
    count = len(positions)
    tensors = [torch.randn(1, heads, count, 8) for heads in (4, 2, 2)]
    return [*tensors, torch.tensor(positions), torch.tensor(rows)]


@pytest.mark.parametrize("options", [{}, RING], ids=["plain", "ring"])
def test_positions_of_several_rows_equal_calls_for_one_row_each(options):
    positions, rows = [3, 0, 3, 7, 4], [1, 2, 0, 1, 0]
    together, alone = CachedAttention(2, rows=3, **options), CachedAttention(2, rows=3, **options)
    for step in range(3):
        inputs = row_inputs([p + 4 * step for p in positions], rows)
        given = [[x[:, :, i : i + 1] for x in inputs[:3]] + [x[i : i + 1] for x in inputs[3:]] for i in range(5)]
        expected = torch.cat([alone(*one) for one in given], 2)
        assert together(*inputs).equal(expected)
        assert together.keys.equal(alone.keys)


@pytest.mark.parametrize(
    "start, row, message",
    [
        ([14], [0], "got a capacity of 16 positions, expected at least 17"),
        ([0], [3], r"row: got \[3\], expected rows in \[0, 3\)"),
        ([0, 1, 2], [0, -1, 1], "expected rows in"),
        ([0, 1, 2], [0], r"row: got torch.int64 of shape \[1\]"),
        ([0, 1], [0, 1], r"start of shape \[1\] or \[3\]"),
        ([0, 16, 1], [0, 1, 2], "got a capacity of 16 positions, expected at least 17"),
    ],
)
def test_eager_operators_check_rows(start, row, message):
    inputs = row_inputs([0, 0, 0], [0, 0, 0])[:3]
    with pytest.raises(ValueError, match=message):
        CachedAttention(2, rows=3)(*inputs, torch.tensor(start), torch.tensor(row))


@pytest.fixture(scope="module")
def row_method():
    from executorch.exir import to_edge_transform_and_lower
    from executorch_mlx import MLXPartitioner

    inputs = row_inputs([0, 0], [0, 0])
    inputs[3:] = torch.tensor([0]), torch.tensor([0])
    length = torch.export.Dim("length", min=1, max=16)
    shapes = tuple({2: length} for _ in range(3)) + (None, None)
    program = torch.export.export(CachedAttention(2, rows=3), tuple(inputs), dynamic_shapes=shapes)
    lowered = to_edge_transform_and_lower(program, partitioner=[MLXPartitioner()]).to_executorch()
    method = LoadedMethod(lowered.buffer)
    return lambda *inputs: method.execute(list(inputs))[0].clone()


@pytest.mark.parametrize("start, row, length", [(16, 0, 1), (14, 1, 3), (0, 3, 1), (0, 7, 2)])
def test_positions_beyond_a_row_are_refused_and_change_no_row(row_method, start, row, length):
    """Position 16 of row 0 would be position 0 of row 1."""
    eager = CachedAttention(2, rows=3)
    for r in range(3):
        inputs = [torch.full((1, heads, 2, 8), float(r + 1)) for heads in (4, 2, 2)]
        inputs += [torch.tensor([0]), torch.tensor([r])]
        assert row_method(*inputs).allclose(eager(*inputs))
    bad = [torch.ones(1, heads, length, 8) for heads in (4, 2, 2)]
    with pytest.raises(RuntimeError):
        row_method(*bad, torch.tensor([start]), torch.tensor([row]))
    for r in range(3):
        inputs = [torch.full((1, heads, 1, 8), 0.5 + r) for heads in (4, 2, 2)]
        inputs += [torch.tensor([2]), torch.tensor([r])]
        assert row_method(*inputs).allclose(eager(*inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, RING, BLOCKS, {**RING, **SLOPES}], ids=["plain", "ring", "blocks", "slopes"])
def test_nodes_of_rows_have_the_bits_of_the_instructions_that_they_replace(options, dtype):
    """Programs with `RowUpdateNode` and `RowSdpaNode`, and without them, give the same results in several calls."""
    from executorch.exir import to_edge_transform_and_lower
    from executorch_mlx import MLXPartitioner

    module = CachedAttention(2, rows=3, **options).eval()
    for name in ("keys", "values"):
        module.register_buffer(name, getattr(module, name).to(dtype))
    generator = torch.Generator().manual_seed(0)
    results = {how: [] for how in ("replaced", "portable")}
    example = (*torch.randn(3, 1, 4, 4, 8), torch.arange(4), torch.tensor([0, 1, 2, 0]))
    example = (example[0], example[1][:, :2].to(dtype), example[2][:, :2].to(dtype), *example[3:])
    methods = {}
    for how in results:
        exported = torch.export.export(module, example)
        with without_replacements() if how == "portable" else nullcontext():
            lowered = to_edge_transform_and_lower(exported, partitioner=[MLXPartitioner()]).to_executorch()
        methods[how] = LoadedMethod(lowered.buffer)
    for call in range(6):
        query, key, value = torch.randn(3, 1, 4, 4, 8, generator=generator)
        positions = torch.tensor([call, 2 * call, 9 - call, call + 6])
        arguments = (query, key[:, :2].to(dtype), value[:, :2].to(dtype), positions, torch.tensor([0, 1, 2, 0]))
        for how, method in methods.items():
            results[how].append(method.execute(arguments)[0].clone())
    assert all(a.equal(b) for a, b in zip(results["replaced"], results["portable"], strict=True))
    assert all(x.isfinite().all() for x in results["replaced"])
