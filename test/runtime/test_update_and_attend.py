"""UpdateAndAttendNode: the runtime's KV cache against torch's attention over all positions."""

import pytest
import torch
from executorch_mlx import reset
from irprograms import Graph, ir
from irprograms.node_case import TOLERANCE
from irprograms.options import option

HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 8, 6
SCALE = DIM**-0.5


def program(layers=(0,), dtype=torch.float32, kv_dtype=None, out_dtype=None, computed=False):
    """A program that returns the attention of each layer.

    All layers get the same q. Layer i gets k and v, both multiplied by i + 1.
    """
    kv_dtype = kv_dtype or dtype
    g = Graph()
    q, k = g.input((2, HEADS, (1, 200), DIM), dtype), g.input((2, KV_HEADS, (1, 200), DIM), kv_dtype)
    v, position = g.input((2, KV_HEADS, (1, 200), V_DIM), kv_dtype), g.input(((1, 200), 1), torch.int32)
    if computed:  # the position is not available on the host when the attention runs
        g.emit(ir.AddNode(a=position, b=g.constant(torch.tensor(0, dtype=torch.int32)), out=(p := g.new_temp())))
        position = p
    for layer in layers:
        factor = g.constant(torch.tensor(layer + 1.0).to(kv_dtype))
        scaled = g.new_temp(), g.new_temp()
        for x, y in zip((k, v), scaled):
            g.emit(ir.MultiplyNode(a=x, b=factor, out=y))
        out = g.output((2, HEADS, (1, 200), V_DIM), out_dtype or dtype)
        scalar_type = None if out_dtype is None else {torch.float16: 5, torch.float32: 6}[out_dtype]
        fields = {"position": position, "layer_id": layer, "scale": SCALE, "out_dtype": scalar_type}
        g.emit(ir.UpdateAndAttendNode(q=q, k=scaled[0], v=scaled[1], out=out, **fields))
    return g


class Reference:
    """Attention over all keys and values, in torch. A query attends to the last `window` positions, up to its own."""

    def __init__(self, window=1 << 30):
        self.k = self.v = None
        self.window = window

    def __call__(self, q, k, v, position):
        start = int(position[0])
        self.k = k if start == 0 else torch.cat([self.k[:, :, :start], k], 2)
        self.v = v if start == 0 else torch.cat([self.v[:, :, :start], v], 2)
        repeat = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(repeat, 1).float() for x in (self.k, self.v))
        scores = q.float() @ keys.transpose(-1, -2) * SCALE
        distance = position - torch.arange(keys.shape[2])
        mask = (distance >= 0) & (distance < self.window)
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values


def call_inputs(start, tokens, dtype=torch.float32, kv_dtype=None, batch=2):
    kv_dtype = kv_dtype or dtype
    position = torch.arange(start, start + tokens, dtype=torch.int32).reshape(-1, 1)
    k, v = torch.randn(batch, KV_HEADS, tokens, DIM), torch.randn(batch, KV_HEADS, tokens, V_DIM)
    return [torch.randn(batch, HEADS, tokens, DIM).to(dtype), k.to(kv_dtype), v.to(kv_dtype), position]


# (start, tokens): prefill, decode, a chunk that grows the cache, decode, a rewind to 5, a restart at 0.
CALLS = [(0, 3), (3, 1), (4, 1), (5, 70), (75, 1), (76, 2), (5, 1), (6, 3), (0, 2), (2, 1)]


@pytest.mark.parametrize("computed", [False, True])
def test_matches_attention_over_all_positions(delegate, computed):
    torch.manual_seed(0)
    model, reference = program(computed=computed).load(), Reference()
    for start, tokens in CALLS:
        call = call_inputs(start, tokens)
        torch.testing.assert_close(model(*call)[0], reference(*call), rtol=1e-5, atol=1e-5)


def test_layers_have_separate_caches(delegate):
    torch.manual_seed(1)
    model, references = program(layers=(0, 1, 7)).load(), [(layer, Reference()) for layer in (0, 1, 7)]
    for start, tokens in CALLS:
        q, k, v, position = call_inputs(start, tokens)
        for result, (layer, reference) in zip(model(q, k, v, position), references, strict=True):
            expected = reference(q, k * (layer + 1), v * (layer + 1), position)
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "dtype, kv_dtype, out_dtype",
    [
        (torch.float16, None, None),
        (torch.bfloat16, None, None),
        (torch.float32, torch.float16, None),
        (torch.float32, None, torch.float16),
    ],
    ids=str,
)
def test_dtypes_of_cache_and_output(delegate, dtype, kv_dtype, out_dtype):
    torch.manual_seed(2)
    model, reference = program(dtype=dtype, kv_dtype=kv_dtype, out_dtype=out_dtype).load(), Reference()
    for start, tokens in CALLS[:5]:
        call = call_inputs(start, tokens, dtype, kv_dtype)
        (result,) = model(*call)
        assert result.dtype == (out_dtype or dtype)
        tolerance = TOLERANCE[result.dtype]
        torch.testing.assert_close(result.float(), reference(*call), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("computed", [False, True])
def test_failed_call_after_an_update_leaves_the_caches_undefined(computed, capfd):
    """The call fails after the host has read a value, for which the runtime evaluates the caches.

    If the position is computed, the runtime also evaluates it before each layer.
    """
    g = program((0, 1), computed=computed)
    largest, index = g.new_temp(), g.input((1,), torch.int32)
    g.emit(ir.MaxNode(x=g.outputs[0][0], out=largest, axes=[]), ir.AsTypeNode(x=largest, out=largest, scalar_type=3))
    g.item(largest)
    taken = ir.IntOrVidOrTid(tid=index, kind=2)
    g.emit(ir.TakeNode(x=g.constant(torch.ones(3)), index=taken, out=g.new_temp(), axis=0))
    model = g.load()
    valid, invalid = (torch.tensor([i], dtype=torch.int32) for i in (0, 3))
    for _ in range(2):
        references = Reference(), Reference()
        for start, tokens in [(0, 3), (3, 1), (4, 2)]:
            arguments = call_inputs(start, tokens)
            q, k, v, position = arguments
            for layer, result in enumerate(model(*arguments, valid)):
                torch.testing.assert_close(result, references[layer](q, k * (layer + 1), v * (layer + 1), position))
        assert "undefined now" in error_of(model, capfd, [*arguments, invalid])
        assert "undefined since a call failed" in error_of(model, capfd, [*arguments, valid])
        reset()


def test_two_loads_have_separate_caches(delegate):
    torch.manual_seed(3)
    pair = [(program().load(), Reference()) for _ in range(2)]
    for start, tokens in CALLS[:4]:
        for model, reference in pair:
            call = call_inputs(start, tokens)
            torch.testing.assert_close(model(*call)[0], reference(*call), rtol=1e-5, atol=1e-5)


def error_of(model, capfd, call) -> str:
    capfd.readouterr()
    with pytest.raises(RuntimeError):
        model(*call)
    return capfd.readouterr().err


def test_a_failed_call_does_not_change_the_cache(delegate, capfd):
    torch.manual_seed(4)
    model, reference = program().load(), Reference()
    for start, tokens in ((0, 3), (3, 1)):
        call = call_inputs(start, tokens)
        torch.testing.assert_close(model(*call)[0], reference(*call))
        assert f"position: got 9, expected at most {start + tokens}" in error_of(model, capfd, call_inputs(9, 1))
        q, k, v, position = call_inputs(4, 2)
        assert "UpdateAndAttendNode" in error_of(model, capfd, [q, k, v, position.flip(0)])
        assert "position: got -1" in error_of(model, capfd, call_inputs(-1, 1))
        assert "position" in error_of(model, capfd, [q, k, v, position[:1]])
    call = call_inputs(4, 1)
    torch.testing.assert_close(model(*call)[0], reference(*call))


def test_layer_id_and_scale_are_required(delegate, capfd):
    for missing in ("layer_id", "scale"):
        g = program()
        setattr(g.chains[0][-1], missing, None)
        with pytest.raises(RuntimeError):
            g.load()
        assert f"{missing}: expected" in capfd.readouterr().err


def test_decode_updates_the_cache_in_place(delegate):
    """A decode call allocates less than 1 MB beside its 8 MB cache."""
    import mlx.core as mx

    wide = 8192
    g = Graph()
    q, k = (g.input((1, 1, (1, 200), DIM)) for _ in range(2))
    v, position = g.input((1, 1, (1, 200), wide)), g.input(((1, 200), 1), torch.int32)
    out = g.output((1, 1, (1, 200), wide))
    g.emit(ir.UpdateAndAttendNode(q=q, k=k, v=v, position=position, out=out, layer_id=0, scale=SCALE))
    model = g.load()
    for start, tokens in ((0, 200), (200, 1), (201, 1), (202, 1)):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        q, k, v = (torch.randn(1, 1, tokens, n) for n in (DIM, DIM, wide))
        model(q, k, v, torch.arange(start, start + tokens, dtype=torch.int32).reshape(-1, 1))
        if start > 0:
            assert mx.get_peak_memory() - before < 1 << 20
    assert mx.get_active_memory() >= 256 * wide * 4


# -- ring buffers ----------------------------------------------------------------

# (start, tokens): single tokens, a chunk, a chunk longer than all windows, the last position again, a restart, and a
# first chunk longer than all windows.
RING_CALLS = [(0, 3), *((i, 1) for i in range(3, 19)), (19, 5), (24, 150), (174, 1), (174, 1), (174, 2), (176, 1)]
RING_CALLS += [(0, 2), (2, 1), (2, 3), (0, 130), (130, 1), (131, 9), (140, 1)]


@pytest.mark.parametrize("window", [1, 2, 8, 100])
def test_ring_buffer_matches_windowed_attention(delegate, window):
    torch.manual_seed(5)
    with option("kv_windows", str(window)):
        model = program().load()
    reference = Reference(window)
    for start, tokens in RING_CALLS:
        call = call_inputs(start, tokens)
        torch.testing.assert_close(model(*call)[0], reference(*call), rtol=1e-5, atol=1e-5)


def test_ring_buffers_beside_caches_of_all_positions(delegate):
    """The list kv_windows repeats: of two windows, layer 7 uses the second. The window 0 keeps all positions."""
    torch.manual_seed(6)
    with option("kv_windows", "6,0"):
        model = program(layers=(0, 1, 7)).load()
    references = [(0, Reference(6)), (1, Reference()), (7, Reference())]
    for start, tokens in RING_CALLS[:20]:
        q, k, v, position = call_inputs(start, tokens)
        for result, (layer, reference) in zip(model(q, k, v, position), references, strict=True):
            expected = reference(q, k * (layer + 1), v * (layer + 1), position)
            # The scores and the values of layer 7 are 8 times as large.
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5 * (layer + 1))


def test_full_ring_buffer_rewinds_by_one_position_only(delegate, capfd):
    torch.manual_seed(7)
    with option("kv_windows", "8"):
        model = program().load()
    reference = Reference(8)
    for start, tokens in ((0, 8), (5, 1), (2, 3), (5, 6)):  # before it wraps around, it rewinds to any position
        call = call_inputs(start, tokens)
        torch.testing.assert_close(model(*call)[0], reference(*call))
    message = error_of(model, capfd, call_inputs(9, 1))
    assert "position: got 9, expected 0 or at least 10: the ring buffer holds the last 8 of 11 positions" in message
    call = call_inputs(10, 2)
    torch.testing.assert_close(model(*call)[0], reference(*call))


def test_ring_buffer_does_not_grow_beyond_its_window(delegate):
    import mlx.core as mx

    wide = 4096
    g = Graph()
    q, k = (g.input((1, 1, (1, 200), DIM)) for _ in range(2))
    v, position = g.input((1, 1, (1, 200), wide)), g.input(((1, 200), 1), torch.int32)
    out = g.output((1, 1, (1, 200), wide))
    g.emit(ir.UpdateAndAttendNode(q=q, k=k, v=v, position=position, out=out, layer_id=0, scale=SCALE))
    before = mx.get_active_memory()
    with option("kv_windows", "100"):
        model = g.load()
    for start, tokens in ((0, 200), *((i, 1) for i in range(200, 260))):
        q, k, v = (torch.randn(1, 1, tokens, n) for n in (DIM, DIM, wide))
        model(q, k, v, torch.arange(start, start + tokens, dtype=torch.int32).reshape(-1, 1))
    assert 100 * wide * 4 <= mx.get_active_memory() - before < 1.1 * 100 * wide * 4
