"""Programs that match a fusion, or almost do.

Each strategy generates programs that contain the subgraph of one fusion, with random changes: another axis,
another order of operands, a missing `keepdim`, another constant, a second user of a value, a broadcast along
another axis, a dynamic extent, another dtype. Whether or not the fusion matches, the program must give the same
results as eager torch.
"""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from .programs import DYNAMIC, Input, Program, Statement

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (F32, F32, F16, BF16)


class Writer:
    """Writes a program, with random choices. `draw` is the function that Hypothesis passes to a strategy."""

    def __init__(self, draw):
        self.draw = draw
        self.inputs: list[Input] = []
        self.constants: list[tuple[str, str]] = []
        self.statements: list[Statement] = []
        self.also_returned: list[str] = []
        self.state: list[tuple[str, str]] = []

    def pick(self, usual, *others):
        """Return `usual` in most cases, else one of `others`."""
        return self.draw(st.sampled_from([usual] * max(3, 2 * len(others)) + list(others)))

    def either(self, *options):
        """Return one of `options`, which are equally likely."""
        return self.draw(st.sampled_from(options))

    def input(self, name: str, *shape, dtype=F32, low=-4, high=5, special=False) -> str:
        """Add an input. In one of twelve cases, the program reads a transposed or a cut view of it."""
        form = self.draw(st.integers(0, 23))
        if form == 0 and len(shape) > 1:
            shape = (*shape[:-2], shape[-1], shape[-2])
            self.statements.append(Statement(name, f"{name}.mT"))
        elif form == 1 and shape and isinstance(shape[-1], int):
            shape = (*shape[:-1], shape[-1] + 3)
            self.statements.append(Statement(name, f"{name}[..., 1:-2]"))
        self.inputs.append(Input(name, tuple(shape), dtype, low, high, special))
        return name

    def write(self, expression: str) -> None:
        """Add the expression, which writes a buffer in place."""
        self.statements.append(Statement("_", expression))

    def runs(self) -> bool:
        """Whether eager torch runs the statements so far."""
        try:
            self.program(self.statements[-1].target).check_eager()
        except (RuntimeError, IndexError, ValueError, TypeError):
            return False
        return True

    def drop(self) -> None:
        """Remove the last statement."""
        last = self.statements.pop()
        self.also_returned = [n for n in self.also_returned if n != last.target]

    def constant(self, name: str, expression: str) -> str:
        self.constants.append((name, expression))
        return name

    def let(self, name: str, expression: str) -> str:
        """Add the statement `name = expression` and return `name`.

        In one of twenty cases, the value also becomes an output of the program, and so has a user outside the pattern.
        """
        self.statements.append(Statement(name, expression))
        if self.draw(st.integers(0, 19)) == 0:
            self.also_returned.append(name)
        return name

    def ordered(self, a: str, operator: str, b: str) -> str:
        """Return the expression of a commutative operation, with the operands in either order."""
        return self.either(f"{a} {operator} {b}", f"{b} {operator} {a}")

    def program(self, *outputs: str) -> Program:
        return Program(
            tuple(self.inputs),
            tuple(self.statements),
            (*outputs, *self.also_returned),
            tuple(self.constants),
            tuple(self.state),
        )


def _type(dtype: torch.dtype) -> str:
    return str(dtype)


@st.composite
def rms_norms(draw) -> Program:
    """x * rsqrt(mean(x², -1) + eps), then a weight."""
    s = Writer(draw)
    dtype, width = s.either(*DTYPES), s.pick(4, 1)
    length = s.either(4, DYNAMIC)
    shape = s.either((length, width), (2, length, width), (4, 4, width), (width,), (1, length, 1, width))
    x = s.input("x", *shape, dtype=dtype)
    inner = x if dtype == F32 else s.let("up", s.pick("x.float()", "x.to(torch.float32)", "x"))
    square = s.pick(
        f"{inner}.pow(2)",
        f"{inner} * {inner}",
        f"torch.square({inner})",
        f"{inner}.pow(3)",
        f"{inner} * x",
        f"{inner}.abs()",
        f"{inner} ** 2.0",
        f"{inner}.pow(2.5)",
    )
    s.let("square", square)
    axis = s.pick("-1", str(len(shape) - 1), "0", "-2", "[-1]", "(0, -1)", "[]")
    keep = s.pick(", keepdim=True", "", ", True", ", keepdim=False")
    s.let(
        "mean",
        s.pick(
            f"square.mean({axis}{keep})",
            f"torch.mean(square, {axis}{keep}, dtype=torch.float32)",
            f"square.sum({axis}{keep})",
            f"square.amax({axis if ',' not in axis and '[' not in axis else -1}{keep})",
        ),
    )
    eps = s.pick("1e-5", "0.5", "1e-6", "0", "-0.5", "2")
    s.let(
        "total",
        s.pick(
            s.ordered("mean", "+", eps),
            f"torch.add(mean, {eps}, alpha=2)",
            f"mean - {eps}",
            f"torch.clamp(mean, min={eps})",
            f"torch.add(torch.tensor({eps}), mean, alpha=3)",
        ),
    )
    s.let("scale", s.pick("torch.rsqrt(total)", "torch.sqrt(total)", "1 / torch.sqrt(total)", "total.pow(-0.5)"))
    s.let(
        "y",
        s.pick(
            s.ordered(inner, "*", "scale"),
            f"{inner} / scale",
            s.ordered("square", "*", "scale"),
            s.ordered(inner, "+", "scale"),
        ),
    )
    if dtype != F32:
        s.let("y", s.pick(f"y.to({_type(dtype)})", "y", "y.to(torch.float32)", "y.half()"))
    weight = s.either("", "w", "w1")
    if weight:
        values = f"torch.linspace(0.5, 1.5, {width}, dtype={_type(s.pick(dtype, F32))})"
        s.constant(
            "w", s.pick(values, f"{values}.reshape(1, {width})", f"{values}.reshape({width}, 1)", "torch.tensor(1.5)")
        )
        factor = "w" if weight == "w" else s.let("w1", s.pick("1.0 + w", "1 + w.float()", "w - 1"))
        s.let("y", s.pick(s.ordered("y", "*", factor), f"y + {factor}", f"y / {factor}"))
    return s.program("y")


@st.composite
def layer_norms(draw) -> Program:
    """(x - mean) / sqrt(variance + eps), then a weight and a bias."""
    s = Writer(draw)
    dtype, length = s.either(*DTYPES), s.either(4, DYNAMIC)
    shape = s.either((length, 4), (2, length, 4), (4, 4), (4, 4, 4))
    s.input("x", *shape, dtype=dtype)
    inner = "x" if dtype == F32 else s.let("up", s.pick("x.float()", "x"))
    axis, other = (s.pick("-1", str(len(shape) - 1), "0", "-2") for _ in range(2))
    keep = s.pick(", keepdim=True", "")
    s.let("mean", f"{inner}.mean({axis}{keep})")
    s.let(
        "centered",
        s.pick(f"{inner} - mean", f"mean - {inner}", f"torch.sub({inner}, mean, alpha=2)", f"{inner} + mean"),
    )
    s.let(
        "variance",
        s.pick(
            f"centered.pow(2).mean({axis}{keep})",
            f"(centered * centered).mean({axis}{keep})",
            f"{inner}.var({axis}, correction=0{keep if 'True' not in keep or '=' in keep else ', keepdim=True'})",
            f"{inner}.var({axis}, correction=1, keepdim=True)",
            f"centered.pow(2).mean({other}{keep})",
            f"({inner} - {inner}.mean({other}, keepdim=True)).pow(2).mean({axis}{keep})",
            f"centered.abs().mean({axis}{keep})",
            f"{inner}.var({axis}, unbiased=False, keepdim=True)",
        ),
    )
    eps = s.pick("1e-5", "0.5", "0", "1e-3")
    s.let("total", s.pick(s.ordered("variance", "+", eps), f"torch.add(variance, {eps}, alpha=2)", f"variance - {eps}"))
    s.let(
        "y",
        s.pick(
            "centered / torch.sqrt(total)",
            s.ordered("centered", "*", "torch.rsqrt(total)"),
            "centered / total",
            f"{inner} / torch.sqrt(total)",
            "torch.sqrt(total) / (centered + 9)",
            "torch.div(centered, torch.sqrt(total), rounding_mode='floor')",
        ),
    )
    if dtype != F32:
        s.let("y", s.pick(f"y.to({_type(dtype)})", "y"))
    if s.either(True, False):
        s.constant(
            "w",
            s.pick(
                "torch.linspace(0.5, 1.5, 4)",
                "torch.linspace(0.5, 1.5, 4).reshape(4, 1)",
                f"torch.linspace(0.5, 1.5, 4, dtype={_type(dtype)})",
            ),
        )
        s.let("y", s.pick(s.ordered("y", "*", "w"), "y / w"))
    if s.either(True, False):
        s.constant(
            "b",
            s.pick("torch.linspace(-1, 1, 4)", "torch.tensor(0.5)", f"torch.linspace(-1, 1, 4, dtype={_type(dtype)})"),
        )
        s.let(
            "y",
            s.pick(s.ordered("y", "+", "b"), "torch.add(y, b, alpha=2)", "torch.add(b, y, alpha=2)", "y - b", "b - y"),
        )
    return s.program("y")


@st.composite
def gelus(draw) -> Program:
    """x/2 · (1 + tanh(√(2/π)(x + 0.044715x³))) and x/2 · (1 + erf(x/√2))."""
    s = Writer(draw)
    dtype = s.either(*DTYPES)
    shape = s.either((2, 4), (DYNAMIC, 4), (4,))
    s.input("x", *shape, dtype=dtype)
    s.input("z", *shape, dtype=dtype)
    x2 = s.pick("x", "z")
    if s.either(True, False):
        inner = s.pick(
            f"{x2} / math.sqrt(2)",
            f"{x2} * 0.7071067811865476",
            f"{x2} * 0.7071",
            f"{x2} / 2",
            f"{x2} / math.sqrt(2.0) * 1.0",
        )
        gate = s.pick("torch.erf(inner)", "torch.tanh(inner)", "torch.sigmoid(inner)")
        s.let("gate", gate.replace("inner", f"({inner})"))
    else:
        cubic = s.pick("0.044715", "0.04", "0.0447")
        cube = s.pick("torch.pow(x, 3)", "x * x * x", "x.pow(2)", "z.pow(3)", "x * (x * x)", "x.pow(3.5)")
        s.let("cube", cube)
        total = s.pick(
            f"x + {cubic} * cube",
            f"{cubic} * cube + x",
            f"torch.add(x, cube, alpha={cubic})",
            f"z + {cubic} * cube",
            f"x - {cubic} * cube",
            f"torch.add(x, {cubic} * cube, alpha=2)",
        )
        s.let("total", total)
        factor = s.pick("math.sqrt(2 / math.pi)", "0.7978845608", "0.79", "math.sqrt(2) / math.pi")
        s.let(
            "gate",
            s.pick(f"torch.tanh({factor} * total)", f"torch.tanh(total * {factor})", f"torch.erf({factor} * total)"),
        )
    s.let(
        "one",
        s.pick(
            s.ordered("1.0", "+", "gate"),
            "gate + 1",
            "torch.add(gate, 1, alpha=2)",
            "gate - 1",
            "1 - gate",
            "torch.add(gate, 0.5, alpha=2)",
        ),
    )
    s.let(
        "y",
        s.pick(
            "0.5 * x * one",
            "x * 0.5 * one",
            "x * one * 0.5",
            "x * one / 2",
            "0.5 * (x * one)",
            "0.5 * z * one",
            "0.25 * x * one",
            "x * one",
            "0.5 * x + one",
            "x / 2 * one",
            "2 / x * one",
        ),
    )
    return s.program("y")


@st.composite
def ropes(draw) -> Program:
    """x * cos + rotate_half(x) * sin, on all or only the first features, in several layouts of heads and sequence."""
    s = Writer(draw)
    dtype = s.either(*DTYPES)
    length, half = s.either(4, DYNAMIC, DYNAMIC, 1), s.pick(2, 1, 4)
    batch, heads = s.either(1, 2), s.either(2, 4, 1)
    layout = s.pick("bhsd", "bshd", "bsd", "hsd", "sbhd", "bhsd")
    extents = {"b": batch, "h": heads, "s": length, "d": 2 * half}
    extra = s.pick(0, 2)  # features that are not rotated
    shape = [2 * half + extra if c == "d" else extents[c] for c in layout]
    s.input("x", *shape, dtype=dtype)
    s.input("start", s.pick(1, 1), dtype=torch.int64, low=0, high=9)
    inv_freq = f"1.0 / 100 ** (torch.arange(0, {2 * half}, 2).float() / {2 * half})"
    s.constant("inv_freq", s.pick(inv_freq, f"({inv_freq}).flip(0)"))
    axis = layout.index("s") - len(layout)
    steps = s.pick(
        f"torch.arange(x.shape[{axis}])",
        f"torch.arange(0, x.shape[{axis}])",
        f"torch.arange(1, x.shape[{axis}] + 1)",
        f"torch.arange(0, 2 * x.shape[{axis}], 2)",
        f"torch.arange(x.shape[{axis}] - 1, -1, -1)",
        f"torch.arange(x.shape[{axis}]).flip(0)",
    )
    s.let(
        "positions",
        s.pick(s.ordered(steps, "+", "start"), f"torch.add({steps}, start, alpha=2)", f"{steps} - start", steps),
    )
    s.let(
        "freqs",
        s.pick(
            "positions[:, None].float() * inv_freq",
            "inv_freq * positions.float()[:, None]",
            "positions[:, None].float() * inv_freq[None, :]",
            "(inv_freq[:, None] * positions.float()[None]).mT" if half > 1 else "positions[:, None].float() * inv_freq",
            "positions[:, None].float() / inv_freq",
            "torch.outer(positions.float(), inv_freq)",
        ),
    )
    s.let(
        "angles",
        s.pick(
            "torch.cat([freqs, freqs], dim=-1)",
            "torch.cat([freqs, freqs], dim=1)",
            "torch.cat([freqs, freqs * 2], -1)",
            "torch.repeat_interleave(freqs, 2, -1)",
            "torch.stack([freqs, freqs], -1).flatten(-2)",
        ),
    )
    scaling = s.pick("", " * 1.0", " * 0.5")
    s.let("cos", f"angles.cos(){scaling}")
    s.let("sin", s.pick(f"angles.sin(){scaling}", "angles.cos()", "(-angles).sin()"))
    # Unsqueeze cos and sin [S, D], so that their axes S and D line up with those of x.
    trailing = layout.index("d") - layout.index("s") - 1
    for name in ("cos", "sin"):
        view = f"{name}" + "".join([".unsqueeze(1)"] * trailing) + "".join([".unsqueeze(0)"] * layout.index("s"))
        if s.pick(False, False, False, False, False, True):
            view = f"{name}" + ".unsqueeze(0)" * 2  # S is axis -2 of the table, even if it is another axis of x
        s.let(name, f"{view}.to({_type(dtype)})" if dtype != F32 else view)
    rotated = "x" if not extra else s.let("part", f"x[..., :{2 * half}]")
    middle = s.pick(half, 1)
    s.let(
        "turned",
        s.pick(
            f"torch.cat([-{rotated}[..., {middle}:], {rotated}[..., :{middle}]], dim=-1)",
            f"torch.cat([{rotated}[..., {middle}:], -{rotated}[..., :{middle}]], dim=-1)",
            f"torch.cat([-{rotated}[..., :{middle}], {rotated}[..., {middle}:]], dim=-1)",
            f"torch.cat([-{rotated}[..., 1::2], {rotated}[..., ::2]], dim=-1)",
            f"torch.stack([-{rotated}[..., 1::2], {rotated}[..., ::2]], dim=-1).flatten(-2)",
        ),
    )
    s.let(
        "y",
        s.pick(
            f"({rotated} * cos) + (turned * sin)",
            f"(turned * sin) + (cos * {rotated})",
            f"({rotated} * cos) - (turned * sin)",
            f"torch.add({rotated} * cos, turned * sin, alpha=2)",
            f"({rotated} * sin) + (turned * cos)",
        ),
    )
    if extra:
        s.let(
            "y",
            s.pick(
                f"torch.cat([y, x[..., {2 * half}:]], dim=-1)",
                f"torch.cat([x[..., {2 * half}:], y], dim=-1)",
                f"torch.cat([y, x[..., {2 * half}:] * 1.5], dim=-1)",
            ),
        )
    if s.either(True, False) and "h" in layout and layout != "bhsd":
        a, b = layout.index("h"), layout.index("s")
        s.let("y", f"y.transpose({a}, {b})")
    return s.program("y")


@st.composite
def attentions(draw) -> Program:
    """Grouped-query attention with repeated keys and values, and masks of many shapes."""
    s = Writer(draw)
    dtype, length = s.either(*DTYPES), s.either(4, DYNAMIC)
    groups, times, width = s.either(1, 2), s.either(1, 2, 3), 4
    keys = s.pick(length, 3)
    s.input("q", 2, groups * times, length, width, dtype=dtype)
    for name in ("k", "v"):
        s.input(name, 2, groups, keys, width, dtype=dtype)
        if times > 1:
            s.let(
                f"{name}r",
                s.pick(
                    f"{name}[:, :, None].expand(2, {groups}, {times}, {name}.shape[2], {width})"
                    f".reshape(2, {groups * times}, {name}.shape[2], {width})",
                    f"{name}.repeat_interleave({times}, 1)",
                    f"{name}[:, None].expand(2, {times}, {groups}, {name}.shape[2], {width})"
                    f".reshape(2, {groups * times}, {name}.shape[2], {width})",
                    f"{name}.repeat(1, {times}, 1, 1)",
                ),
            )
    k, v = ("kr", "vr") if times > 1 else ("k", "v")
    mask = s.either("", "causal", "bool", "float", "empty", "column")
    options = {"": "", "causal": ", is_causal=True"}.get(mask, ", attn_mask=mask")
    if mask == "bool":
        s.input(
            "mask",
            *s.either((length, keys), (1, 1, length, keys), (2, 1, 1, keys), (2, groups * times, length, keys)),
            dtype=torch.bool,
        )
    elif mask == "float":
        s.input("mask", *s.either((length, keys), (2, 1, length, keys)), dtype=dtype)
    elif mask == "empty":  # some queries attend to no key; their result is zero
        s.let("mask", "(q[:1, :1, :, :1] > 0) & (k[:1, :1, :, 0][:, :, None] < 99)")
    elif mask == "column":
        s.let(
            "mask", "torch.where(q[:1, :1, :, :1] > 0, 0.0, -math.inf).to(q.dtype).expand(1, 1, q.shape[2], k.shape[2])"
        )
    options += s.pick("", ", scale=0.25", ", scale=2.0", f", scale={1 / math.sqrt(width)}")
    s.let("y", f"F.scaled_dot_product_attention(q, {k}, {v}{options})")
    return s.program("y")


@st.composite
def linears(draw) -> Program:
    """A matrix product between two views, as torch.export writes a linear layer over a tensor of rank 3."""
    s = Writer(draw)
    dtype, length = s.either(*DTYPES), s.either(3, DYNAMIC)
    s.input("x", 2, length, 4, dtype=dtype)
    s.input("w", 4, 4, dtype=dtype)
    s.input("b", s.pick(4, 1), dtype=dtype)
    s.let("flat", s.pick("x.reshape(-1, 4)", "x.transpose(0, 1).reshape(-1, 4)", "x.reshape(-1, 2, 2).flatten(1)"))
    s.let(
        "product",
        s.pick(
            "torch.addmm(b, flat, w)",
            "flat @ w",
            "torch.addmm(b, flat, w, beta=2)",
            "torch.addmm(b, flat, w, alpha=0.5)",
            "flat @ w.t()",
            "torch.mm(flat, w)",
        ),
    )
    s.let(
        "y",
        s.pick(
            "product.reshape(2, -1, 4)",
            "product.reshape(-1, 2, 4)",
            "product.reshape(2, -1, 2, 2)",
            "product.reshape(-1)",
        ),
    )
    return s.program("y")


@st.composite
def quantized(draw) -> Program:
    """A product or a lookup with a dequantized constant."""
    s = Writer(draw)
    dtype, length = s.either(*DTYPES), s.either(3, DYNAMIC)
    rows, columns = s.pick(8, 6), s.pick(64, 32, 128, 48)
    block = s.pick((1, 32), (1, columns), (1, 64), (2, 32), (rows, columns), (1, 16))
    if rows % block[0] or columns % block[1]:
        block = (1, columns)
    low, high, stored = s.either(
        (-8, 7, "int8"),
        (-128, 127, "int8"),
        (0, 15, "uint8"),
        (0, 255, "uint8"),
        (-2, 1, "int8"),
        (-16, 15, "int8"),
        (-8, 8, "int8"),
    )
    scale_shape = f"{rows // block[0]}, {columns // block[1]}"
    count = (rows // block[0]) * (columns // block[1])
    s.constant(
        "q",
        f"(torch.arange({rows * columns}) * 37 % {high - low + 1} + {low})"
        f".reshape({rows}, {columns}).to(torch.{stored})",
    )
    s.constant("scale", f"(torch.arange({count}) % 5 + 1).reshape({scale_shape}).to({_type(s.pick(dtype, F32))}) / 32")
    zero = s.either("zero", "None")
    if zero == "zero":
        dtype_of_zero = s.pick("int32", "int8")
        zeros = f"(torch.arange({count}) % 3 + {max(low, -1)}).reshape({scale_shape})"
        s.constant("zero", f"{zeros}.to(torch.{dtype_of_zero})")
    s.let(
        "w",
        f"torch.ops.torchao.dequantize_affine(q, {list(block)}, scale, {zero}, torch.{stored}, {low}, {high}, "
        f"output_dtype={_type(dtype)})",
    )
    w = "w" if s.pick(True, True, False) else s.let("w2", s.either("w * 1.0", "w.t().t()", "-w", "w + 0"))
    if s.either(True, False):
        s.input("ids", *s.pick((length,), (2, length), ()), dtype=torch.int64, low=0, high=rows)
        s.let(
            "y",
            s.pick(
                f"F.embedding(ids, {w})",
                f"F.embedding(ids, {w}, padding_idx=0)",
                f"{w}[ids]",
                f"F.embedding(ids, {w}.abs())",
            ),
        )
        return s.program("y")
    s.input("x", *s.pick((length, columns), (2, length, columns), (columns,)), dtype=dtype)
    product = s.pick(
        f"F.linear(x, {w})",
        f"x @ {w}.t()",
        f"F.linear(x, {w}, b)",
        f"torch.matmul(x, {w}.transpose(0, 1))",
        f"x[..., :{rows}] @ {w}",
        f"F.linear(x * 1.5, {w}, b)",
        f"F.linear(x, {w}) @ {w}",
    )
    if "b)" in product:
        s.constant("b", f"torch.linspace(-1, 1, {rows}, dtype={_type(dtype)})")
    s.let("y", product)
    return s.program("y")


@st.composite
def int8_products(draw) -> Program:
    """x @ q.t(), then a multiplication by scales. `q` is a constant int8 matrix that is cast to the dtype of x."""
    s = Writer(draw)
    dtype, length = s.either(*DTYPES), s.either(3, DYNAMIC)
    rows, columns = 8, s.pick(64, 32, 48)
    s.constant(
        "q",
        f"(torch.arange({rows * columns}) * 37 % 256 - 128)"
        f".reshape({rows}, {columns}).to(torch.{s.pick('int8', 'int32')})",
    )
    s.constant("scale", f"torch.linspace(0.1, 0.9, {rows}, dtype={_type(dtype)}) / 64")
    s.input("x", length, columns, dtype=dtype)
    matrix = s.pick(
        f"q.t().to({_type(dtype)})",
        f"q.to({_type(dtype)}).t()",
        f"q.permute(1, 0).to({_type(dtype)})",
        f"q.reshape({columns}, {rows}).to({_type(dtype)})",
        f"(q + 0).t().to({_type(dtype)})",
    )
    s.let("y", s.pick(f"torch.mm(x, {matrix})", f"x @ {matrix}", f"torch.addmm(scale, x, {matrix})"))
    s.let("z", s.pick("y * scale", "scale * y", "y", "y / (scale + 1)"))
    return s.program("z")


FAMILIES = {
    "rms_norm": rms_norms(),
    "layer_norm": layer_norms(),
    "gelu": gelus(),
    "rope": ropes(),
    "attention": attentions(),
    "linear": linears(),
    "quantized": quantized(),
    "int8_product": int8_products(),
}
