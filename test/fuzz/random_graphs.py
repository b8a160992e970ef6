"""Random graphs of supported operators.

A graph grows statement by statement. A template is a function that proposes an expression. The expression runs in
eager torch twice, at two values of the dynamic extent. It is dropped if it raises an error or if its result is too
large, so the templates need no rules for shapes. The size of a dimension is dynamic if it differs between the two
runs.

A graph may also have mutable buffers, which some statements write in place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from .programs import DYNAMIC, EXTENTS, SCOPE, Input, Program, Statement, evaluated

MAX_ELEMENTS = 600
MAX_STATEMENTS = 9
FLOATS = (torch.float32, torch.float32, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass
class Value:
    """A variable of the graph, with its values at EXTENTS[0] and EXTENTS[1]."""

    name: str
    at: tuple[torch.Tensor, torch.Tensor]

    @property
    def shape(self) -> torch.Size:
        return self.at[0].shape

    @property
    def ndim(self) -> int:
        return self.at[0].ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.at[0].dtype

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point

    def is_static(self, axis: int) -> bool:
        return self.at[0].shape[axis] == self.at[1].shape[axis]


class Skip(Exception):
    """Raised by a template that does not apply to the values of the graph."""


@dataclass
class Graph:
    """A program under construction."""

    draw: Callable
    values: list[Value] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    state: list[Value] = field(default_factory=list)
    initial: list[tuple[str, str]] = field(default_factory=list)

    # -- choices ---------------------------------------------------------------

    def choice(self, options):
        return self.draw(st.sampled_from(list(options)))

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def boolean(self) -> bool:
        return self.draw(st.booleans())

    def value(self, fits: Callable[[Value], bool] = lambda v: True) -> Value:
        found = [v for v in self.values if fits(v)]
        if not found:
            raise Skip
        return self.choice(found)

    def floating(self, min_ndim: int = 0) -> Value:
        return self.value(lambda v: v.is_float and v.ndim >= min_ndim)

    def axis(self, v: Value, static: bool = False) -> int:
        axes = [a for a in range(v.ndim) if not static or v.is_static(a)]
        if not axes:
            raise Skip
        axis = self.choice(axes)
        return axis - v.ndim if self.boolean() else axis

    def axes(self, v: Value) -> list[int]:
        if v.ndim == 0:
            raise Skip
        count = self.integer(1, v.ndim)
        axes = self.draw(st.permutations(range(v.ndim)))[:count]
        return [a - v.ndim if self.boolean() else a for a in axes]

    def number(self) -> str:
        return str(self.choice([0.5, -1.5, 2.0, 0, 1, 3, -2, 1.0, 0.1, 1.001]))

    # -- growing -----------------------------------------------------------------

    def add_input(self, shape: tuple, dtype: torch.dtype, low: int = -4, high: int = 5, special: bool = False) -> Value:
        source = Input(f"x{len(self.inputs)}", shape, dtype, low, high, special)
        self.inputs.append(source)
        value = Value(source.name, (source.make(EXTENTS[0]), source.make(EXTENTS[1])))
        self.values.append(value)
        return value

    def add_state(self, shape: tuple, dtype: torch.dtype) -> None:
        """Add a mutable buffer of a static shape."""
        name = f"b{len(self.state)}"
        expression = f"(torch.arange({math.prod(shape)}) % 5 - 1).reshape({shape}).to({dtype})"
        self.initial.append((name, expression))
        self.state.append(Value(name, (evaluated(expression).clone(), evaluated(expression).clone())))
        self.values.append(self.state[-1])

    def add(self, expression: str) -> bool:
        """Append a statement with `expression` if torch accepts it at both extents. Returns whether it was appended."""
        old = [[t.clone() for t in v.at] for v in self.state]
        if self._add(expression):
            return True
        for value, tensors in zip(self.state, old):
            for new, tensor in zip(value.at, tensors):
                new.copy_(tensor)
        return False

    def _add(self, expression: str) -> bool:
        results = []
        for index in (0, 1):
            scope = SCOPE | {v.name: v.at[index] for v in self.values}
            try:
                with torch.no_grad():
                    results.append(eval(expression, scope))
            except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
                return False
        if not all(isinstance(r, torch.Tensor) and r.numel() <= MAX_ELEMENTS for r in results):
            return False
        if results[0].dtype in (torch.float64, torch.complex64) or results[0].ndim != results[1].ndim:
            return False
        name = f"v{len(self.statements)}"
        self.statements.append(Statement(name, expression))
        self.values.append(Value(name, (results[0], results[1])))
        return True


# -- templates: each returns an expression ---------------------------------------------------------

_UNARY = """abs neg exp sin cos tanh sigmoid relu sqrt rsqrt log log1p expm1 erf floor ceil round trunc sign square
reciprocal atan asinh sinh logical_not isnan isinf frac exp2 log2""".split()
_ACTIVATIONS = """relu silu gelu elu leaky_relu hardtanh hardswish hardsigmoid softplus mish relu6 selu logsigmoid
softsign tanhshrink""".split()
_BINARY = """add sub mul div maximum minimum atan2 fmod remainder floor_divide eq ne lt le gt ge logical_and logical_or
logical_xor hypot""".split()


def unary(g: Graph):
    name = g.choice(_UNARY)
    return f"torch.{name}({g.value().name})"


def activation(g: Graph):
    name, x = g.choice(_ACTIVATIONS), g.floating()
    if name == "gelu":
        return f"F.gelu({x.name}, approximate={g.choice(['none', 'tanh'])!r})"
    return f"F.{name}({x.name})"


def binary(g: Graph):
    name, a, b = g.choice(_BINARY), g.value(), g.value()
    if name in ("add", "sub") and g.boolean() and a.dtype != torch.bool:
        return f"torch.{name}({a.name}, {b.name}, alpha={g.choice([2, -1, 3])})"
    if name == "div" and g.boolean():
        return f"torch.div({a.name}, {b.name}, rounding_mode={g.choice(['floor', 'trunc'])!r})"
    return f"torch.{name}({a.name}, {b.name})"


def with_number(g: Graph):
    x = g.value().name
    form = g.choice(
        [
            "{x} + {k}",
            "{x} - {k}",
            "{k} - {x}",
            "{x} * {k}",
            "{x} / {k}",
            "{k} / {x}",
            "{x} ** 2",
            "{x} ** 3",
            "{x} ** 0.5",
            "2.0 ** {x}",
            "{x} > {k}",
            "torch.clamp({x}, min={k})",
            "torch.clamp({x}, -1, 2)",
        ]
    )
    return form.format(x=x, k=g.number())


def integer_bits(g: Graph):
    integers = lambda v: not v.is_float  # noqa: E731
    a, b = g.value(integers), g.value(integers)
    return g.choice([f"{a.name} & {b.name}", f"{a.name} | {b.name}", f"{a.name} ^ {b.name}", f"~{a.name}"])


def select(g: Graph):
    mask = g.value(lambda v: v.dtype == torch.bool)
    a, b = g.value(), g.value()
    return g.choice(
        [f"torch.where({mask.name}, {a.name}, {b.name})", f"{a.name}.masked_fill({mask.name}, {g.number()})"]
    )


def cast(g: Graph):
    dtype = g.choice(
        [
            "torch.float32",
            "torch.float16",
            "torch.bfloat16",
            "torch.int64",
            "torch.int32",
            "torch.int16",
            "torch.int8",
            "torch.uint8",
            "torch.bool",
        ]
    )
    x = g.value(lambda v: v.is_float or dtype != "torch.bool")
    if x.is_float and "int" in dtype:
        return f"{x.name}.nan_to_num(0).clamp({0 if 'uint' in dtype else -99}, 99).to({dtype})"
    return f"{x.name}.to({dtype})"


def reduce(g: Graph):
    x, keep = g.value(lambda v: v.ndim > 0), g.boolean()
    name = g.choice(
        [
            "sum",
            "mean",
            "amax",
            "amin",
            "prod",
            "any",
            "all",
            "var",
            "std",
            "logsumexp",
            "argmax",
            "argmin",
            "max",
            "min",
            "linalg.vector_norm",
            "total",
            "median",
        ]
    )
    axes, axis = g.axes(x), g.axis(x)
    if name in ("prod", "any", "all", "argmax", "argmin"):
        return f"torch.{name}({x.name}, {axis}, keepdim={keep})"
    if name == "median":  # of an expanded tensor, torch would read memory outside the tensor
        return f"torch.median({x.name}.contiguous(), {axis}, keepdim={keep})[0]"
    if name in ("max", "min"):
        return f"torch.{name}({x.name}, {axis}, keepdim={keep})[{g.integer(0, 1)}]"
    if name in ("var", "std"):
        return f"torch.{name}({x.name}, {axes}, correction={g.integer(0, 1)}, keepdim={keep})"
    if name == "linalg.vector_norm":
        order = g.choice(["1", "2", "2.0", "math.inf"])
        return f"torch.linalg.vector_norm({x.name}, {order}, {axes}, keepdim={keep})"
    if name == "total":  # over all axes
        return f"{x.name}.{g.choice(['sum', 'mean', 'max', 'min', 'any'])}()"
    return f"torch.{name}({x.name}, {axes}, keepdim={keep})"


def scan(g: Graph):
    x = g.value(lambda v: v.ndim > 0)
    name = g.choice(
        ["cumsum", "cumprod", "softmax", "log_softmax", "sort", "argsort", "cummax", "logcumsumexp", "flip"]
    )
    axis = g.axis(x)
    if name == "sort":
        return f"torch.sort({x.name}, dim={axis}, descending={g.boolean()})[0]"
    if name == "argsort":
        return f"torch.argsort({x.name}, dim={axis}, stable=True)"
    if name == "cummax":
        return f"torch.cummax({x.name}, {axis})[0]"
    if name == "flip":
        return f"torch.flip({x.name}, {g.axes(x)})"
    return f"torch.{name}({x.name}, {axis})"


def topk(g: Graph):
    x = g.floating(1)
    axis = g.axis(x, static=True)
    return f"torch.topk({x.name}, {g.integer(min(1, x.shape[axis]), x.shape[axis])}, dim={axis})[0]"


def reorder(g: Graph):
    x = g.value(lambda v: v.ndim > 1)
    order = list(g.draw(st.permutations(range(x.ndim))))
    a, b = g.axis(x), g.axis(x)
    return g.choice(
        [f"{x.name}.permute({order})", f"{x.name}.transpose({a}, {b})", f"torch.movedim({x.name}, {a}, {b})"]
    )


def reshape(g: Graph):
    x = g.value()
    forms = [f"{x.name}.unsqueeze({g.integer(-x.ndim - 1, x.ndim)})", f"{x.name}.reshape(-1)"]
    if x.ndim:
        axis = g.axis(x)
        forms += [f"{x.name}.squeeze({axis})", f"{x.name}.flatten({min(axis % x.ndim, x.ndim - 1)})"]
    if x.ndim > 1:
        forms += [f"{x.name}.reshape({x.name}.shape[0], -1)", f"{x.name}.reshape(-1, {x.name}.shape[-1])"]
    return g.choice(forms)


def cut(g: Graph):
    x = g.value(lambda v: v.ndim > 0)
    axis = g.axis(x)
    size = x.shape[axis]
    start, stop, step = g.integer(-size, size), g.integer(-size, size + 2), g.integer(1, 2)
    place = g.integer(-1, 0)
    index = ", ".join([":"] * (axis % x.ndim) + [f"{start}:{stop}:{step}"])
    forms = [f"{x.name}[{index}]", f"{x.name}.select({axis}, {place})", f"{x.name}.narrow({axis}, 0, 1)"]
    if x.is_static(axis):  # torch.export makes the extent static for these
        forms += [f"torch.chunk({x.name}, 2, {axis})[0]", f"{x.name}.unbind({axis})[0]"]
    if all(map(x.is_static, range(x.ndim))):
        forms.append(f"torch.diagonal({x.name})")
    return g.choice(forms)


def join(g: Graph):
    a, b = g.value(lambda v: v.ndim > 0), g.value(lambda v: v.ndim > 0)
    axis = g.axis(a)
    return f"torch.{g.choice(['cat', 'stack'])}([{a.name}, {b.name}], {axis})"


def repeat(g: Graph):
    x = g.value(lambda v: v.ndim > 0)
    times = [g.integer(1, 2) for _ in range(x.ndim)]
    axis = g.axis(x)
    pads = [g.integer(0, 2) for _ in range(2)]
    return g.choice(
        [
            f"{x.name}.repeat({times})",
            f"{x.name}.repeat_interleave(2, {axis})",
            f"torch.roll({x.name}, {g.integer(-2, 2)}, {axis})",
            f"F.pad({x.name}, {pads}, value={g.number()})",
            f"{x.name}[None].expand(2, {', '.join(['-1'] * x.ndim)})",
            f"torch.tril({x.name}, {g.integer(-1, 1)})",
            f"torch.triu({x.name}, {g.integer(-1, 1)})",
            f"torch.zeros_like({x.name})",
            f"torch.full_like({x.name}, {g.number()})",
        ]
    )


def index(g: Graph):
    x = g.value(lambda v: v.ndim > 0)
    axis = g.axis(x)
    limit = min(t.shape[axis] for t in x.at)
    # Along a dynamic axis, only the index 0 is in range at every extent. Random indices need a static axis.
    if not x.is_static(axis) or limit == 0:
        raise Skip
    ids = g.add_input((g.choice([2, 3, DYNAMIC]),), torch.int64, 0, limit)
    return g.choice(
        [
            f"torch.index_select({x.name}, {axis}, {ids.name})",
            f"{x.name}[{', '.join([':'] * (axis % x.ndim) + [ids.name])}]",
            f"F.embedding({ids.name}, {x.name})" if axis % x.ndim == 0 else f"{x.name}.unsqueeze(0)",
            f"torch.gather({x.name}, {axis}, {ids.name}{'[None]' * (x.ndim - 1)})",
        ]
    )


def product(g: Graph):
    a, b = g.floating(1), g.floating(1)
    return g.choice(
        [
            f"{a.name} @ {b.name}",
            f"{a.name} @ {b.name}.mT" if b.ndim > 1 else f"{a.name} * {b.name}",
            f"F.linear({a.name}, {b.name})",
            f"torch.einsum('...i,...i->...', {a.name}, {b.name})",
        ]
    )


def linear(g: Graph):
    x = g.floating(1)
    if not x.is_static(-1):
        raise Skip
    w = g.add_input((4, x.shape[-1]), x.dtype)
    if g.boolean():
        return f"F.linear({x.name}, {w.name}, {g.add_input((4,), x.dtype).name})"
    return f"F.linear({x.name}, {w.name})"


def norm(g: Graph):
    x = g.floating(2)
    if not x.is_static(-1):
        raise Skip
    width = x.shape[-1]
    w = g.add_input((width,), x.dtype)
    return g.choice(
        [
            f"F.layer_norm({x.name}, [{width}])",
            f"F.layer_norm({x.name}, [{width}], {w.name}, eps=0.01)",
            f"F.rms_norm({x.name}, [{width}], {w.name}, eps=0.01)",
            f"F.rms_norm({x.name}, [{width}], eps=1e-5)",
            f"F.normalize({x.name}, dim=-1)",
        ]
    )


def convolution(g: Graph):
    x = g.floating(3)
    if x.ndim > 4 or not x.is_static(1):
        raise Skip
    spatial = x.ndim - 2
    kernel = [g.integer(1, 2) for _ in range(spatial)]
    w = g.add_input((2, x.shape[1], *kernel), x.dtype)
    return f"F.conv{spatial}d({x.name}, {w.name}, stride={g.integer(1, 2)}, padding={g.integer(0, 1)})"


def pool(g: Graph):
    x = g.floating(3)
    if x.ndim > 4:
        raise Skip
    spatial = x.ndim - 2
    return g.choice(
        [
            f"F.max_pool{spatial}d({x.name}, 2, padding=1)",
            f"F.avg_pool{spatial}d({x.name}, 2, padding=1)",
            f"F.adaptive_avg_pool{spatial}d({x.name}, 1)",
        ]
    )


def attention(g: Graph):
    q = g.floating(3)
    if not q.is_static(-1) or q.ndim > 4:
        raise Skip
    k = g.value(lambda v: v.dtype == q.dtype and v.ndim == q.ndim and v.shape[-1] == q.shape[-1])
    mask = g.choice(["", ", is_causal=True", ", scale=0.5"])
    # torch multiplies an infinite or NaN value by the weight 0, and this runtime ignores it.
    value = f"torch.nan_to_num({k.name}, 0, 0, 0)"
    return f"F.scaled_dot_product_attention({q.name}, {value if 'causal' in mask else k.name}, {value}{mask})"


def computed_indices(g: Graph):
    """Read and write at computed indices, such as scatter, index_put, index_add and gather."""
    x = g.value(lambda v: v.ndim > 0)
    axis = g.axis(x, static=True)
    limit = x.shape[axis]
    indices = "(torch.arange(" + str(limit) + ") * 3 + 1).remainder(" + str(limit) + ")"  # fixed values in range
    values = f"{x.name}.index_select({axis}, {indices})"
    expanded = f"{indices}.reshape([-1] + [1] * {x.ndim - 1 - axis % x.ndim}).expand({x.name}.shape)"
    before = ":, " * (axis % x.ndim)
    reduce = g.choice(["amax", "amin", "sum", "mean"])
    return g.choice(
        [
            f"torch.index_copy({x.name}, {axis}, torch.arange({limit}).flip(0), {x.name})",
            f"torch.index_add({x.name}, {axis}, {indices}, {x.name})",
            f"torch.index_fill({x.name}, {axis}, {indices}[:1], {g.number()})",
            f"torch.scatter({x.name}, {axis}, torch.arange({limit}).flip(0)"
            f".reshape([-1] + [1] * {x.ndim - 1 - axis % x.ndim}).expand({x.name}.shape), {x.name})",
            f"torch.scatter_add({x.name}, {axis}, {expanded}, {x.name})",
            f"torch.scatter_reduce({x.name}, {axis}, {expanded}, {x.name}, {reduce!r})",
            f"torch.select_scatter({x.name}, {x.name}.select({axis}, 0), {axis}, {limit - 1})",
            f"torch.slice_scatter({x.name}, {x.name}.narrow({axis}, 0, 1), {axis}, {limit - 1}, {limit})",
            f"torch.index_put({x.name}, ({indices},), torch.ones_like({x.name}[:1]))" if axis % x.ndim == 0 else values,
            f"torch.take_along_dim({x.name}, {expanded}, {axis})",
            f"{x.name}[{before}{indices}]",
        ]
    )


def three_operands(g: Graph):
    a, b, c = (g.value() for _ in range(3))
    k = g.number()
    return g.choice(
        [
            f"torch.addcmul({a.name}, {b.name}, {c.name}, value={k})",
            f"torch.addcdiv({a.name}, {b.name}, {c.name}, value={k})",
            f"torch.lerp({a.name}, {b.name}, {c.name})",
            f"torch.clamp({a.name}, {b.name}, {c.name})",
            f"torch.where({a.name} > {b.name}, {c.name}, {k})",
            f"torch.baddbmm({a.name}, {b.name}, {c.name}, beta=0.5, alpha=2)",
            f"torch.addmm({a.name}, {b.name}, {c.name}, beta=0.5)",
            # The sign comes from 1 or -1, not from a value of the graph: the sign of NaN and of zero is not specified.
            f"torch.copysign({a.name}, torch.where({b.name} > 0, 1.0, -1.0))",
            f"torch.isclose({a.name}, {b.name})",
        ]
    )


def decomposed(g: Graph):
    """Functions that torch expresses in several operators."""
    x = g.floating(2)
    forms = [
        f"F.glu({x.name}, -1)",
        f"F.softmin({x.name}, 0)",
        f"torch.cdist({x.name}, {x.name})",
        f"F.hardshrink({x.name})",
        f"F.softshrink({x.name}, 0.25)",
        f"F.threshold({x.name}, 0.5, -1.0)",
        f"F.celu({x.name}, 0.5)",
        f"F.rrelu({x.name})",
        f"torch.nan_to_num({x.name}, 1.0, 2.0, -2.0)",
        f"F.cosine_similarity({x.name}, {x.name}.flip(-1), -1)",
        f"{x.name}.unfold(-1, 2, 1)",
        f"torch.outer({x.name}.reshape(-1), {x.name}.reshape(-1)[:3])",
        f"F.mse_loss({x.name}, {x.name}.flip(-1))",
        f"F.one_hot({x.name}.argmax(-1), 9)",
        f"torch.diff({x.name}, dim=-1)",
        f"torch.cumulative_trapezoid({x.name}, dim=-1)",
        f"torch.nanmean({x.name}, -1)",
        f"torch.quantile({x.name}, 0.5, -1)",
        f"torch.trapezoid({x.name}, dim=-1)",
        f"torch.rot90({x.name}, 1, [0, 1])",
        f"torch.meshgrid({x.name}[0], {x.name}[0], indexing='ij')[0]",
    ]
    if x.ndim > 2:
        forms += [
            f"F.group_norm({x.name}, 1)",
            f"F.instance_norm({x.name})",
            f"F.local_response_norm({x.name}, 2)",
            f"F.interpolate({x.name}, scale_factor=2, mode='nearest')",
            f"F.channel_shuffle({x.name}, 1)",
        ]
    if x.ndim == 4:
        forms += [
            f"F.pixel_shuffle({x.name}, 1)",
            f"F.interpolate({x.name}, scale_factor=2, mode='bilinear', align_corners={g.boolean()})",
            f"F.pad({x.name}, [1, 1, 1, 0], mode={g.choice(['reflect', 'replicate', 'circular'])!r})",
            f"F.unfold({x.name}, 2)",
            f"F.lp_pool2d({x.name}, 2.0, 2)",
        ]
    if x.ndim == 3:
        forms += [
            f"F.pad({x.name}, [1, 1], mode={g.choice(['reflect', 'replicate', 'circular'])!r})",
            f"F.interpolate({x.name}, scale_factor=2, mode='linear')",
        ]
    return g.choice(forms)


def search(g: Graph):
    x = g.floating(1)
    return g.choice(
        [
            f"torch.bucketize({x.name}, torch.tensor([-2.0, 0.0, 1.5], dtype={x.dtype}))",
            f"torch.isin({x.name}, torch.tensor([0.5, 1.0], dtype={x.dtype}))",
            f"torch.sort({x.name}, dim=-1, stable=True)[1]",
            f"torch.searchsorted(torch.tensor([-2.0, 0.0, 1.5], dtype={x.dtype}), {x.name})",
            f"torch.aminmax({x.name}, dim=0)[1]",
            f"torch.count_nonzero({x.name}, 0)",
            f"torch.kthvalue({x.name}, 1)[0]",
        ]
    )


def write(g: Graph):
    """Write a mutable buffer, or a part of it, in place."""
    if not g.state:
        raise Skip
    b, x, k = g.choice(g.state), g.value(), g.number()
    forms = [
        f"{b.name}.add_({x.name})",
        f"{b.name}.sub_({k})",
        f"{b.name}.mul_({x.name})",
        f"{b.name}.copy_({x.name})",
        f"{b.name}.zero_()",
        f"{b.name}.clamp_(-2, 3)",
        f"{b.name}.masked_fill_({x.name} > 0, {k})",
    ]
    if b.ndim:
        axis, limit = g.axis(b), b.shape[0]
        forms += [
            f"{b.name}.narrow({axis}, 0, 1).copy_({x.name})",
            f"{b.name}.select({axis}, -1).fill_({k})",
            f"{b.name}.copy_(torch.roll({b.name}, 1, {axis}))",
            f"{b.name}[1:].add_({b.name}[:-1].clone())",
            f"{b.name}.index_copy_(0, torch.arange({limit}).flip(0), {x.name}.to({b.name}.dtype).expand_as({b.name}))",
            f"{b.name}.index_put_((torch.tensor([0, -1]),), {x.name}.to({b.name}.dtype))",
            f"{b.name}.index_add_(0, torch.tensor([0, 0]), {b.name}[:1].repeat({[2] + [1] * (b.ndim - 1)}))",
            f"{b.name}.index_fill_({axis}, torch.tensor([0]), {k})",
        ]
    return g.choice(forms)


# A template that is listed twice is chosen twice as often.
TEMPLATES = (
    computed_indices,
    three_operands,
    decomposed,
    search,
    unary,
    activation,
    binary,
    binary,
    with_number,
    with_number,
    integer_bits,
    select,
    cast,
    reduce,
    reduce,
    scan,
    topk,
    reorder,
    reorder,
    reshape,
    reshape,
    cut,
    join,
    repeat,
    index,
    product,
    linear,
    norm,
    convolution,
    pool,
    attention,
)

_SHAPES = (
    (2, 3),
    (3,),
    (2, 3, 4),
    (4,),
    (DYNAMIC, 4),
    (2, DYNAMIC),
    (2, DYNAMIC, 4),
    (1, 2, DYNAMIC, 4),
    (2, 3, 4, 4),
    (1, 4),
    (),
    (4, 4),
    (DYNAMIC,),
    (2, 1, 4),
    (),
    (0,),
    (2, 0, 4),
    (0, 4),
)
_STATIC_SHAPES = ((2, 3), (3,), (2, 3, 4), (4,), (), (4, 4))


@st.composite
def programs(draw, has_gradients: bool = False) -> Program:
    """A strategy for random graphs with at least one statement.

    With `has_gradients`, the first input has floats, no input has special values, and there is no state.
    """
    g = Graph(draw)
    for index in range(g.integer(1, 3)):
        dtypes = FLOATS if has_gradients and index == 0 else [*FLOATS, *INTEGERS, torch.bool]
        g.add_input(g.choice(_SHAPES), g.choice(dtypes), special=not has_gradients and g.integer(0, 3) == 0)
    for _ in range(0 if has_gradients else g.choice([0, 0, 0, 1, 2])):
        g.add_state(g.choice(_STATIC_SHAPES), g.choice([*FLOATS, *INTEGERS]))
    templates = TEMPLATES + (write,) * (8 if g.state else 0)
    wanted = g.integer(1, MAX_STATEMENTS)
    for _ in range(4 * wanted):
        if len(g.statements) == wanted:
            break
        with suppress(Skip):
            g.add(g.choice(templates)(g))
    if not g.statements:
        g.add(f"{g.values[0].name}.clone()")
    state = [(name, e) for name, e in g.initial if any(_reads(s.expression, name) for s in g.statements)]
    for name, _ in state:  # the program returns the buffer itself, or a value that it computes from the buffer
        g.statements.append(Statement(f"{name}_new", g.choice([name, f"{name} * 2"])))
    used = {s.target for s in g.statements if any(_reads(t.expression, s.target) for t in g.statements)}
    is_write = re.compile(r"b\d\S*_\(")
    outputs = [
        s.target for s in g.statements if s.target not in used and not (is_write.match(s.expression) and g.boolean())
    ]
    read = [i for i in g.inputs if any(_reads(s.expression, i.name) for s in g.statements)]
    return Program(tuple(read), tuple(g.statements), tuple(outputs), state=tuple(state))


def _reads(expression: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", expression) is not None
