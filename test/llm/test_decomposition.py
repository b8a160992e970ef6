"""`decompose` gives the graph that torch's `run_decompositions` gives."""

import pytest
import torch
from executorch.exir.passes.remove_graph_asserts_pass import RemoveNonCoreAtenOpGraphAssertsPass
from executorch_mlx.llm.export.passes.decomposition import _Decomposition, _Unsupported, decompose
from torch.export import default_decompositions

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
X = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))


class WithBuffer(torch.nn.Module):
    """Calls `function(x, buffer)`. The buffer has the shape of X."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("buffer", torch.ones_like(X))

    def forward(self, x):
        return self.function(x, self.buffer)


def exported(function, is_dynamic=False):
    shapes = ({1: torch.export.Dim("length", min=2, max=64)},) if is_dynamic else None
    return torch.export.export(WithBuffer(function), (X,), dynamic_shapes=shapes)


def described(program):
    """The nodes and the signature, without names. Sizes are described by their expressions."""
    signature = program.graph_signature
    inputs = [(spec.kind, spec.arg.name, spec.target, spec.persistent) for spec in signature.input_specs]
    outputs = [(spec.kind, spec.target) for spec in signature.output_specs]
    return described_nodes(program.graph_module), inputs, outputs


def described_nodes(module):
    module.graph.eliminate_dead_code()
    numbers, nodes = {}, []

    def describe(x):
        if isinstance(x, torch.fx.Node):
            return numbers[x] if x in numbers else str(x.meta["val"])
        if isinstance(x, (list, tuple)):
            return [describe(item) for item in x]
        return repr(x)

    for node in module.graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, SYMBOLIC):
            continue
        if node.op == "get_attr":
            numbers[node] = described_nodes(getattr(module, node.target))
            continue
        layout = (val.dtype, str(val.shape), str(val.stride())) if isinstance(val, torch.Tensor) else None
        target = "placeholder" if node.op == "placeholder" else str(node.target)
        nodes.append((target, describe(node.args), describe(sorted(node.kwargs.items())), layout))
        numbers[node] = len(numbers)
    return nodes


def norm(x, buffer):
    wide = x.to(torch.float64)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype).to(x.dtype)


def views(x, buffer):
    first, second = x.chunk(2, -1)
    third = x.split([1, 3, 4], -1)[2]
    y = torch.cat([-second, first + third], -1).transpose(1, 2)
    return y.reshape(x.shape[0], -1), y.contiguous().flatten(), x.reshape(2, x.shape[1] * 2, 4)


def products(x, buffer):
    return torch.nn.functional.linear(x, buffer[0, :, :]), torch.einsum("abc,dc->abd", x, buffer[0]), x @ x.mT


def scalars(x, buffer):
    """Call that differ in a scalar only, even if both are equal in Python."""
    sums = x.sum(-1)
    return torch.copysign(x, 0.0), torch.copysign(x, -0.0), sums + 1, sums + 1.0, x.clamp(min=0), x.clamp(max=0)


def same_operands(x, buffer):
    y = x + 1
    return y * buffer, y * y, torch.where(y > 0, y, y), torch.where(y > 0, y, x)


def new_value(x, buffer):
    before = buffer * 2
    buffer.copy_(x + 1)
    return before, buffer * 3


def counted(x, buffer):
    buffer.add_(1)
    buffer.mul_(2)
    return x + buffer


def in_place(x, buffer):
    values, indices = x.topk(2, -1)
    values /= values.sum(-1, keepdim=True)
    mask = torch.zeros_like(x).scatter_(-1, indices, 1.0)
    mask.masked_fill_(x > 0, 5)
    return values, mask * x


def two_sizes(x, buffer):
    y = x.reshape(-1, 8)
    return y.unsqueeze(0).expand(3, -1, -1).reshape(-1, 4) + y.shape[0], x.new_zeros(x.shape[1], 2) + x.shape[1]


def branches(x, buffer):
    """Branches that change a tensor of their own, and that have a branch."""

    def then(x, buffer):
        y = torch.nn.functional.hardtanh(x) + x.shape[1]
        y.mul_(2)
        return y, torch.cond(buffer.sum() > 0, torch.sin, torch.cos, (buffer,))

    def otherwise(x, buffer):
        return torch.nn.functional.linear(x, buffer[0, :, :]).sum(-1, keepdim=True) + x, buffer * 2

    buffer.add_(x.shape[1])
    first, second = torch.cond(x.sum() > 0, then, otherwise, (x + 1, buffer + 0))
    return first - 1, torch.nn.functional.hardtanh(second)


def dynamic_branches(x, buffer):
    def then(x, y):
        return torch.nn.functional.hardtanh(x) + x.shape[1], y * 2

    first, second = torch.cond(x.sum() > 0, then, lambda x, y: (x.sin(), y + 1), (x + 1, x * 2))
    return first - second, x.reshape(-1, 8)


ONE_BY_ONE = [branches, norm, views, products, scalars, same_operands, new_value, counted, in_place]
DYNAMIC = [norm, dynamic_branches, views, in_place, two_sizes]


def check(function, is_dynamic):
    program = exported(function, is_dynamic)
    expected = program.run_decompositions()
    RemoveNonCoreAtenOpGraphAssertsPass()(expected.graph_module)
    found = decompose(program, default_decompositions().materialize())
    assert described(found) == described(expected)
    eager, module = WithBuffer(function), found.module()
    for _ in range(2):
        torch.testing.assert_close(module(X), eager(X), rtol=0, atol=0)
    assert torch.equal(module.buffer, eager.buffer)
    return program


@pytest.mark.parametrize(
    "function, is_dynamic",
    [*((f, False) for f in ONE_BY_ONE), *((f, True) for f in DYNAMIC)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_decomposed_one_by_one(function, is_dynamic):
    program = check(function, is_dynamic)
    _Decomposition(program, default_decompositions().materialize()).run()  # raises no _Unsupported


def stale_view(x, buffer):
    view = buffer[0]
    buffer.copy_(x + 1)
    return view * 2


def changed_view(x, buffer):
    y = x + 1
    y[0].mul_(2)
    return y


def stale_reshape(x, buffer):
    y = x + 1
    flat = y.reshape(-1)
    y.mul_(2)
    return flat


def slice_of_buffer(x, buffer):
    buffer[0].copy_(x[0])
    return x * 2


def input_as_new_value(x, buffer):
    buffer.copy_(x)
    return x * 2


def returned_new_value(x, buffer):
    buffer.copy_(x + 1)
    return buffer


def other_layout(x, buffer):
    buffer.copy_((x + 1).mT.contiguous().mT)
    return buffer * 2


@pytest.mark.parametrize(
    "function",
    [stale_view, changed_view, stale_reshape, slice_of_buffer, input_as_new_value, returned_new_value, other_layout],
)
def test_decomposed_as_a_whole(function):
    program = check(function, False)
    with pytest.raises(_Unsupported):
        _Decomposition(program, default_decompositions().materialize()).run()


def test_a_preserved_operator_stays():
    table = default_decompositions()
    del table[torch.ops.aten.linear.default]
    found = decompose(exported(products), table.materialize())
    assert found.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert not found.graph.find_nodes(op="call_function", target=torch.ops.aten.einsum.default)


def test_each_different_call_is_traced_once():
    def layers(x, buffer):
        for _ in range(10):
            x = torch.nn.functional.silu(x.mT).mT + x.to(torch.float64).to(torch.float32)
        return x

    decomposition = _Decomposition(exported(layers), default_decompositions().materialize())
    program = decomposition.run()
    assert len(program.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)) == 10
    # silu, a transposition of each layout, two casts, and the sum.
    assert len(decomposition.traces) == 6
