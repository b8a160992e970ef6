"""Programs near the fusions of the runtime: layers as models have them, at sizes that reach its kernels.

As in `near_misses.py`, whether or not a fusion matches, the program must give the same results as eager torch.
"""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from .near_misses import BF16, DTYPES, F16, F32, Writer
from .programs import DYNAMIC, Program

_ACTIVATIONS = (
    "F.relu({p})",
    "F.gelu({p})",
    "F.gelu({p}, approximate='tanh')",
    "F.silu({p})",
    "{p}.clamp(min=0)",
    "{p} + {p}",
    "{p} + 1.5",
    "{p} + {p}.flip(-1)",
    "{p} * torch.sigmoid({p})",
    "{p}.relu() + {p}",
    "{p}[..., :1] + {p}",
    "1 - {p}",
    "torch.maximum({p}, {p} * 0)",
    "torch.maximum({p}, torch.zeros(1, dtype={p}.dtype))",
    "torch.maximum({p}, torch.zeros(3, 1, dtype={p}.dtype))",  # broadcasts the product
)
_GATES = (
    "F.silu({a}) * {b}",
    "{a} * {b}",
    "{b} * F.silu({a})",
    "F.gelu({a}) * {b}",
    "F.silu({a}) * {a} + {b}",
    "torch.cat([{a}, {b}], -1)",
    "torch.sigmoid({a}) * {a} * {b}",
    "{a} + {b}",
)


@st.composite
def projections(draw) -> Program:
    """Products of one value with several constant matrices, each perhaps with an activation, a gate or a residual."""
    s = Writer(draw)
    dtype, length, width = s.either(*DTYPES), s.either(3, 1, 40, DYNAMIC), s.either(32, 64, 33, 17, 5, 1)
    s.input("x", *s.either((2, length, width), (length, width), (width,), (1, length, 2, width)), dtype=dtype)
    if s.either(True, False):
        s.let("x", s.pick(f"F.rms_norm(x, [{width}])", f"F.layer_norm(x, [{width}])", "x * 0.5", "x.relu()"))
    results, columns = [], s.pick(width, 48, 7)
    for i in range(s.either(1, 2, 3)):
        w = _weights(s, i, columns, width, dtype)
        product = s.pick("F.linear(x, {w})", "F.linear(x, {w}, {b})", "x @ {w}.mT", "x @ {w}.t().contiguous()")
        bias = s.constant(f"b{i}", f"torch.linspace(-1, 1, {s.pick(columns, 1)}, dtype={dtype})")
        p = s.let(f"p{i}", product.format(w=w, b=bias))
        after = s.pick("", *_ACTIVATIONS, *(("{p} + x",) if columns == width else ()))
        results.append(s.let(f"a{i}", after.format(p=p)) if after else p)
    if len(results) == 1:
        return s.program(*results)
    a, b, *rest = results
    return s.program(s.let("y", s.pick(*_GATES).format(a=a, b=b)), *rest)


def _weights(s: Writer, i: int, rows: int, columns: int, dtype: torch.dtype) -> str:
    """Add a constant matrix [rows, columns], and return an expression for it."""
    kind = s.pick("float", "int8", "cast")
    if kind != "int8":
        w = s.constant(f"w{i}", _matrix(rows, columns, dtype if kind == "float" else s.either(F32, F16, BF16), i))
        return w if kind == "float" else f"{w}.to({dtype})"
    q = s.constant(
        f"w{i}", f"(torch.arange({rows * columns}) * 37 % 255 - 127).reshape({rows}, {columns}).to(torch.int8)"
    )
    scale = s.constant(f"s{i}", f"torch.linspace(0.5, 1.5, {rows}, dtype={dtype}).reshape({rows}, 1) / 256")
    arguments = f"{q}, [1, {columns}], {scale}, None, torch.int8, -127, 127, output_dtype={dtype}"
    return s.let(f"d{i}", f"torch.ops.torchao.dequantize_affine({arguments})")


def _matrix(rows: int, columns: int, dtype: torch.dtype, seed: int) -> str:
    values = f"(torch.arange({rows * columns}) * {31 + 6 * seed} % 61 - 30) / 32"
    return f"({values}).reshape({rows}, {columns}).to({dtype})"


_STEPS = (
    *("torch.sigmoid({a})", "F.silu({a})", "torch.tanh({a})", "torch.erf({a})", "F.gelu({a})", "F.relu({a})"),
    *("F.gelu({a}, approximate='tanh')", "{a} + {b}", "{a} - {b}", "{a} * {b}", "torch.maximum({a}, {b})"),
    *("{a} + 1", "0.3 * {a}", "1 - {a}", "torch.add({a}, {b}, alpha=2)", "torch.minimum({a}, {b})", "{a} * {a}"),
    *("{a}[..., :2]", "{a}[..., 1:]", "{a}[..., -1:]", "{a}[:1]", "{a}.clone()", "{a}.relu() * {a}"),
    *("torch.chunk({a}, 2, -1)[1]", "torch.split({a}, 3, -1)[0]", "torch.split({a}, 4, -1)[-1]"),
)
_RARE_STEPS = ("{a}.mT", "{a}.unsqueeze(0)", "{a}.float()", "{a}.half()")


@st.composite
def elementwise(draw) -> Program:
    """Chains of activations, sums, products, slices and splits, over operands that broadcast."""
    s = Writer(draw)
    dtype, length, width = s.either(*DTYPES), s.either(3, 1, DYNAMIC, DYNAMIC), s.either(64, 33, 6, 1, 300)
    shapes = {
        "x": s.either((2, length, width), (length, width)),
        "r": s.either((width,), (1,), (), (length, 1), (1, width), (2, 1, 1)),
        "z": s.either((length, width), (2, length, width), (3, 1, 1, width)),
    }
    for name, shape in shapes.items():
        s.input(name, *shape, dtype=s.pick(dtype, *DTYPES), special=s.pick(False, True))
    names = ["x", "r", "z", "x"]
    for i in range(s.either(2, 3, 4, 6, 9, 36)):
        step = s.either(*_STEPS, s.either(*_RARE_STEPS))
        s.let(f"v{i}", step.format(a=s.either(*names), b=s.either(*names)))
        if s.runs():
            names = [*names[-4:], f"v{i}"]
        else:
            s.drop()
    return s.program(names[-1], *s.either((), names[-2:-1]))


@st.composite
def recurrent(draw) -> Program:
    """LSTM, GRU and RNN layers."""
    s = Writer(draw)
    kind, dtype = s.either("lstm", "gru", "rnn_tanh", "rnn_relu"), s.pick(F32, F16, BF16)
    gates = {"lstm": 4, "gru": 3}.get(kind, 1)
    batch, length, features, hidden = s.either(1, 2, 3), s.either(4, 1, 9), s.either(3, 8), s.either(4, 16, 5)
    batch_first, directions, layers, has_bias = s.either(True, False), s.either(1, 2), s.pick(1, 2), s.pick(True, False)
    s.input("x", *((batch, length, features) if batch_first else (length, batch, features)), dtype=dtype)
    state = (layers * directions, batch, hidden)
    has_state = s.either(True, False)
    for name in "hc" if kind == "lstm" else "h":
        s.input(name, *state, dtype=dtype) if has_state else s.let(name, f"torch.zeros({state}, dtype={dtype})")
    weights = []
    for layer in range(layers):
        width = features if layer == 0 else hidden * directions
        for i in range(directions):
            for j, columns in enumerate((width, hidden)):
                matrix = f"{_matrix(gates * hidden, columns, dtype, j + layer)} / 4"
                weights.append(s.constant(f"w{layer}{i}{j}", matrix))
            for j in range(2 if has_bias else 0):
                bias = f"torch.linspace(-0.5, 0.5, {gates * hidden}, dtype={dtype})"
                weights.append(s.constant(f"b{layer}{i}{j}", bias))
    flags = f"{has_bias}, {layers}, 0.0, False, {directions == 2}, {batch_first}"
    layer = f"torch.{kind}(x, {'(h, c)' if kind == 'lstm' else 'h'}, [{', '.join(weights)}], {flags})"
    s.let("y", f"{layer}{s.pick('[0]', '[0] * 2', '[0][-1]', '[0].mT', '[1]', '[-1]')}")
    return s.program("y")


@st.composite
def handwritten_attentions(draw) -> Program:
    """softmax(q @ k.T * scale + mask) @ v, and attention whose rows without a key are set to zero."""
    s = Writer(draw)
    dtype, length, keys = s.either(*DTYPES), s.either(4, DYNAMIC, 1), s.either(6, DYNAMIC, 33)
    heads, width = s.either(1, 2, 4), s.pick(16, 8, 5)
    lead = s.either((2, heads), (heads,), (1, heads))
    s.input("q", *lead, length, width, dtype=dtype)
    s.input("k", *lead[:-1], s.pick(heads, 1), keys, width, dtype=dtype)
    s.input("v", *lead[:-1], s.pick(heads, 1), keys, s.pick(width, 4), dtype=dtype)
    is_bool = s.either(True, True, False)
    shape = s.either((length, keys), (1, keys), (1, length, keys), (length, 1))
    s.input("m", *shape, dtype=torch.bool if is_bool else dtype)
    others = ("~m", "m & False") if is_bool else ("m * 2", "m - 300")
    s.let("mask", s.pick("m", *others, "torch.zeros_like(m)"))
    scale = s.pick("0.25", "1", f"{width} ** -0.5")
    return _steps_of_attention(s, is_bool, scale) if s.either(True, False) else _attention_or_zeros(s, is_bool, lead)


def _steps_of_attention(s: Writer, is_bool: bool, scale: str) -> Program:
    scores = (f"(q @ k.mT) * {scale}", f"(q * {scale}) @ k.mT", f"q @ (k * {scale}).mT", "q @ k.mT")
    s.let("scores", s.pick(*scores, "torch.einsum('...id,...jd->...ij', q, k) / 4"))
    hidden = ("scores.masked_fill(~mask, -math.inf)", "torch.where(mask, scores, -1e4)", "scores")
    s.let("masked", s.pick(*hidden if is_bool else ("scores + mask", "mask + scores", "scores - mask", "scores")))
    weights = ("masked.softmax(-1)", "F.softmax(masked, -1, dtype=torch.float32).to(q.dtype)", "masked.softmax(-2)")
    s.let("p", s.pick(*weights, "F.softmax(masked - masked.amax(-1, keepdim=True), -1)"))
    s.let("p", s.pick("p", "p * mask", "p.nan_to_num(0)", "p / p.sum(-1, keepdim=True)", "p.masked_fill(mask > 0, 0)"))
    s.let("y", s.pick("p @ v", "torch.einsum('...ij,...jd->...id', p, v)", "(v.mT @ p.mT).mT"))
    return s.program(s.let("z", s.pick("y", "y.transpose(-3, -2).flatten(-2)", "y + q[..., :1]")))


def _attention_or_zeros(s: Writer, is_bool: bool, lead: tuple) -> Program:
    for name in "kv":
        s.let(name, f"{name}.expand({', '.join(map(str, lead))}, -1, -1)")
    s.let("a", "F.scaled_dot_product_attention(q, k, v, attn_mask=mask)")
    s.let("seen", f"{'mask' if is_bool else '(mask > 0)'}.any(-1, keepdim=True)")
    results = ("torch.where(seen, a, 0.0)", "torch.where(seen, a, 1.0)", "a.masked_fill(~seen, 0)", "a * seen", "a")
    return s.program(s.let("y", s.pick(*results, "torch.where((mask > 0).any(), a, 0.0)")))


@st.composite
def caches(draw) -> Program:
    """Buffers that are written at a position, and read by attention or sums, as KV caches are."""
    s = Writer(draw)
    dtype, heads, width, capacity = s.either(*DTYPES), s.either(1, 2), 8, s.pick(16, 12)
    length, start = s.either(1, 3, 2), s.pick(2, 0, 9)
    for name in "kv":
        s.state.append((f"{name}c", f"torch.zeros(1, {heads}, {capacity}, {width}, dtype={dtype})"))
        s.input(name, 1, heads, length, width, dtype=dtype)
    s.input("p", length, dtype=torch.int64, low=0, high=capacity - 3)
    s.let("places", s.pick(f"torch.arange({length}) + p[:1]", f"torch.arange({length}) + p[:1] - 1 + 1"))
    part = f"{start}:{start + length}"
    write = s.pick(
        "{c}.index_copy_(2, places, {x})",
        "{c}.index_copy_(2, places, {x} * 0.5)",
        "{c}.index_put_((None, None, places), {x})",
        f"{{c}}[:, :, {part}].copy_({{x}})",
        f"{{c}}[:, :, {part}].add_({{x}})",
        f"{{c}}.narrow(2, {start}, {length}).copy_({{x}})",
        f"{{c}}.copy_(torch.cat([{{c}}[:, :, {length}:], {{x}}], 2))",
        "{c}.copy_(torch.roll({c}, -1, 2))",
        "{c}.scatter_(2, places.reshape(1, 1, -1, 1).expand_as({x}), {x})",
    )
    outputs = ["y"]
    if s.pick(False, True):
        outputs.append(s.let("before", s.either("kc.sum()", "kc + 0", "kc[:, :, :1] * 2")))
    for name in "kv":
        s.write(write.format(c=f"{name}c", x=name))
    if s.pick(False, True):
        outputs.append(s.let("middle", "kc * 3"))
        s.write(s.either("kc.mul_(0.5)", "kc[:, :, :1].zero_()", "vc.copy_(kc)", "vc.add_(kc)"))
    s.let("mask", f"torch.arange({capacity})[None] <= (p[:1] + torch.arange({length}))[:, None]")
    attention = "F.scaled_dot_product_attention(k, kc, vc{})"
    results = attention.format(", attn_mask=mask"), attention.format(""), "(kc * vc).sum(2)"
    s.let("y", s.pick(*results, "(k @ kc.mT).softmax(-1) @ vc"))
    return s.program(*outputs, *s.pick((), ("kc",), ("kc", "vc"), ("vc", "kc")))


LAYERS = {
    "projections": projections(),
    "elementwise": elementwise(),
    "recurrent": recurrent(),
    "handwritten_attention": handwritten_attentions(),
    "cache": caches(),
}
