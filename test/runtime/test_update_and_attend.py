"""UpdateAndAttendNode: the runtime's own cache, against attention over the whole history in torch."""

import pytest
import torch
from harness import Graph, ir
from options import option

HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 8, 6
SCALE = DIM**-0.5


def program(layers=(0,), dtype=torch.float32, cells=None, out_dtype=None, computed=False):
    """Outputs of every layer over the same q, k, v; a layer's k and v are `layer + 1` times those."""
    cells = cells or dtype
    g = Graph()
    q, k = g.input((2, HEADS, (1, 200), DIM), dtype), g.input((2, KV_HEADS, (1, 200), DIM), cells)
    v, position = g.input((2, KV_HEADS, (1, 200), V_DIM), cells), g.input(((1, 200), 1), torch.int32)
    if computed:  # then it has to be waited for
        g.emit(ir.AddNode(a=position, b=g.constant(torch.tensor(0, dtype=torch.int32)), out=(p := g.temp())))
        position = p
    for layer in layers:
        times = g.constant(torch.tensor(layer + 1.0).to(cells))
        scaled = g.temp(), g.temp()
        for x, y in zip((k, v), scaled):
            g.emit(ir.MultiplyNode(a=x, b=times, out=y))
        out = g.output((2, HEADS, (1, 200), V_DIM), out_dtype or dtype)
        number = None if out_dtype is None else {torch.float16: 5, torch.float32: 6}[out_dtype]
        fields = {"position": position, "layer_id": layer, "scale": SCALE, "out_dtype": number}
        g.emit(ir.UpdateAndAttendNode(q=q, k=scaled[0], v=scaled[1], out=out, **fields))
    return g


class Reference:
    """Keeps all keys and values; each query sees the `window` last positions up to its own."""

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
        seen = (distance >= 0) & (distance < self.window)
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values


def step(start, tokens, dtype=torch.float32, cells=None, batch=2):
    cells = cells or dtype
    position = torch.arange(start, start + tokens, dtype=torch.int32).reshape(-1, 1)
    k, v = torch.randn(batch, KV_HEADS, tokens, DIM), torch.randn(batch, KV_HEADS, tokens, V_DIM)
    return [torch.randn(batch, HEADS, tokens, DIM).to(dtype), k.to(cells), v.to(cells), position]


# Prefill, steps, a piece that makes it grow, steps, back to 5, back to the begin.
STEPS = [(0, 3), (3, 1), (4, 1), (5, 70), (75, 1), (76, 2), (5, 1), (6, 3), (0, 2), (2, 1)]


@pytest.mark.parametrize("computed", [False, True])
def test_a_conversation(delegate, computed):
    torch.manual_seed(0)
    model, reference = program(computed=computed).load(), Reference()
    for start, tokens in STEPS:
        call = step(start, tokens)
        torch.testing.assert_close(model(*call)[0], reference(*call), rtol=1e-5, atol=1e-5)


def test_layers_are_apart(delegate):
    torch.manual_seed(1)
    model, references = program(layers=(0, 1, 7)).load(), [(layer, Reference()) for layer in (0, 1, 7)]
    for start, tokens in STEPS:
        q, k, v, position = step(start, tokens)
        for result, (layer, reference) in zip(model(q, k, v, position), references, strict=True):
            want = reference(q, k * (layer + 1), v * (layer + 1), position)
            torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "dtype, cells, out_dtype",
    [
        (torch.float16, None, None),
        (torch.bfloat16, None, None),
        (torch.float32, torch.float16, None),
        (torch.float32, None, torch.float16),
    ],
    ids=str,
)
def test_dtypes(delegate, dtype, cells, out_dtype):
    torch.manual_seed(2)
    model, reference = program(dtype=dtype, cells=cells, out_dtype=out_dtype).load(), Reference()
    for start, tokens in STEPS[:5]:
        call = step(start, tokens, dtype, cells)
        (result,) = model(*call)
        assert result.dtype == (out_dtype or dtype)
        torch.testing.assert_close(result.float(), reference(*call), rtol=2e-2, atol=2e-2)


def test_loaded_twice_two_caches(delegate):
    torch.manual_seed(3)
    pair = [(program().load(), Reference()) for _ in range(2)]
    for start, tokens in STEPS[:4]:
        for model, reference in pair:
            call = step(start, tokens)
            torch.testing.assert_close(model(*call)[0], reference(*call), rtol=1e-5, atol=1e-5)


def refused(model, capfd, call) -> str:
    capfd.readouterr()
    with pytest.raises(RuntimeError):
        model(*call)
    return capfd.readouterr().err


def test_what_is_refused_changes_nothing(delegate, capfd):
    torch.manual_seed(4)
    model, reference = program().load(), Reference()
    for start, tokens in ((0, 3), (3, 1)):
        call = step(start, tokens)
        torch.testing.assert_close(model(*call)[0], reference(*call))
        assert "position 9 leaves a hole" in refused(model, capfd, step(9, 1))
        q, k, v, position = step(4, 2)
        assert "UpdateAndAttendNode" in refused(model, capfd, [q, k, v, position.flip(0)])
        assert "position -1" in refused(model, capfd, step(-1, 1))
        assert "position" in refused(model, capfd, [q, k, v, position[:1]])
    call = step(4, 1)
    torch.testing.assert_close(model(*call)[0], reference(*call))


def test_what_the_node_needs(delegate, capfd):
    for missing in ("layer_id", "scale"):
        g = program()
        setattr(g.chains[0][-1], missing, None)
        with pytest.raises(RuntimeError):
            g.load()
        assert "layer_id or scale is absent" in capfd.readouterr().err


def test_a_step_is_made_in_place(delegate):
    """What a step takes beside the cache does not grow with the cache, here of 8 MB."""
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


# -- rings -----------------------------------------------------------------------

# One by one past the window, pieces across it and longer than it, again the last one,
# from the begin, a piece longer than the window at once, and on.
AROUND = [(0, 3), *((i, 1) for i in range(3, 19)), (19, 5), (24, 150), (174, 1), (174, 1), (174, 2), (176, 1)]
AROUND += [(0, 2), (2, 1), (2, 3), (0, 130), (130, 1), (131, 9), (140, 1)]


@pytest.mark.parametrize("window", [1, 2, 8, 100])
def test_a_ring(delegate, window):
    torch.manual_seed(5)
    with option("kv_windows", str(window)):
        model = program().load()
    reference = Reference(window)
    for start, tokens in AROUND:
        call = step(start, tokens)
        torch.testing.assert_close(model(*call)[0], reference(*call), rtol=1e-5, atol=1e-5)


def test_rings_among_flat_caches(delegate):
    """The list goes round too: layer 7 of windows of two is the second."""
    torch.manual_seed(6)
    with option("kv_windows", "6,0"):
        model = program(layers=(0, 1, 7)).load()
    references = [(0, Reference(6)), (1, Reference()), (7, Reference())]
    for start, tokens in AROUND[:20]:
        q, k, v, position = step(start, tokens)
        for result, (layer, reference) in zip(model(q, k, v, position), references, strict=True):
            want = reference(q, k * (layer + 1), v * (layer + 1), position)
            # The scores and the values of layer 7 are 8 times as large.
            torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-5 * (layer + 1))


def test_a_ring_goes_back_as_far_as_it_holds(delegate, capfd):
    torch.manual_seed(7)
    with option("kv_windows", "8"):
        model = program().load()
    reference = Reference(8)
    for start, tokens in ((0, 8), (5, 1), (2, 3), (5, 6)):  # not round yet: anywhere
        call = step(start, tokens)
        torch.testing.assert_close(model(*call)[0], reference(*call))
    said = refused(model, capfd, step(9, 1))
    assert "the last 8 of 11 positions" in said and "go back to position 0, or to 10" in said
    call = step(10, 2)
    torch.testing.assert_close(model(*call)[0], reference(*call))


def test_a_ring_takes_no_more_than_its_window(delegate):
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
    assert mx.get_active_memory() - before < 1.1 * 100 * wide * 4
