"""Float64 tensors: `legalize=("float64",)` replaces them by pairs of float32 tensors."""

import math

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from executorch_mlx.legalize.float64 import with_constants, with_float32_numbers
from function_module import Function
from loaded_method import LoadedMethod

DOUBLE = torch.float64


def frequencies():
    return 1.0 / 10000 ** (torch.arange(0, 8, 2, dtype=DOUBLE) / 8)


# Functions of a tensor of shape [3, 4] and of positions, a vector of dynamic size. Each result is float32 or float16.
FUNCTIONS = {
    "angles": lambda x, p: torch.outer(p, frequencies()).float(),
    "cosines": lambda x, p: torch.outer(p, frequencies()).cos().repeat_interleave(2, 1).float(),
    "sines": lambda x, p: torch.einsum("...i,j->...ij", p, frequencies()).sin().float(),
    "sines of small angles": lambda x, p: (x.double() * 1e-9).sin().float() + x.double().cos().float(),
    "products of a column and a row": lambda x, p: (p.double()[:, None] @ frequencies()[None]).float(),
    "transposed outer product": lambda x, p: torch.einsum("i,j->ji", p, x[0].double() * 0.1).float(),
    "cancellation": lambda x, p: ((x.double() + 1e6) * (1 / 3) - 1e6 / 3).float(),
    "cancellation of pairs": lambda x, p: (x.double() / 3 + 1e5 - (x.double() / 7 + 1e5)).float(),
    "quotients": lambda x, p: (x.double() / (x.double() + 3) - 1 / 7).float() + x.double().reciprocal().float(),
    "differences": lambda x, p: (1.1 - torch.sub(x.double(), x, alpha=0.25)).float(),
    "integers": lambda x, p: ((p.long() * 123456789012).double() * 1e-11 - 7).float(),
    "dynamic arange": lambda x, p: (torch.arange(p.shape[0], dtype=DOUBLE) * math.pi - 3).float(),
    "grid": lambda x, p: (
        torch.meshgrid(torch.arange(p.shape[0], dtype=DOUBLE), torch.arange(3.0, dtype=DOUBLE), indexing="ij")[0]
        .mul(0.1)
        .float()
    ),
    "constant": lambda x, p: x + (torch.linspace(0, 1, 4, dtype=DOUBLE).exp() - 1).float(),
    "infinities": lambda x, p: torch.stack([(x / 0).double() * 3, -(x / 0).double() + 1, x.double() * 1e35]).float(),
    "views": lambda x, p: torch.cat([x.double()[None].expand(2, 3, 4), (x.double() * math.pi)[None]])[1:].mT.half(),
}


class Functions(torch.nn.Module):
    def __init__(self, functions):
        super().__init__()
        self.functions = functions

    def forward(self, x, positions):
        return tuple(f(x, positions) for f in self.functions)


def lower(program, legalize=("float64",)):
    """Return the lowered method, and the report of the partitioner."""
    partitioner = MLXPartitioner(legalize=legalize)
    manager = to_edge_transform_and_lower(program, partitioner=[partitioner])
    return LoadedMethod(bytes(manager.to_executorch().buffer)), partitioner.explain()


def export(names):
    """Return a module of the functions `names`, its exported program, and two sets of inputs."""
    module = Functions([FUNCTIONS[name] for name in names])
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0.0, 1, 77, 4097.25, 12345.678, 0.001])
    size = torch.export.Dim("size", min=2, max=100)
    program = torch.export.export(module, (x, positions), dynamic_shapes=({}, {0: size}))
    return module, program, ((x, positions), (x, positions[2:5].clone()))


def compare(names, actual, expected):
    for name, a, e in zip(names, actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=3e-7, atol=0, msg=lambda text: f"{name}: {text}")


def test_functions_of_float64_tensors():
    module, program, calls = export(FUNCTIONS)
    program = with_float32_numbers(program)
    assert not any(getattr(n.meta.get("val"), "dtype", None) == DOUBLE for n in program.graph.nodes)
    for inputs in calls:
        compare(FUNCTIONS, program.module()(*inputs), module(*inputs))


def test_pairs_of_float32_tensors_in_the_delegate(delegate):
    names = ["cosines", "infinities", "dynamic arange"]
    module, program, calls = export(names)
    method, report = lower(program)
    assert not report.refused, str(report)
    for inputs in calls:
        compare(names, method.execute(inputs), module(*inputs))


class Tables(torch.nn.Module):
    """Reads a float64 parameter, a buffer and a constant, and a buffer that it writes."""

    def __init__(self):
        super().__init__()
        self.parameter = torch.nn.Parameter(torch.tensor([0.1, 0.2, 0.3], dtype=DOUBLE))
        self.register_buffer("buffer", torch.tensor([0.4, 0.5, 0.6], dtype=DOUBLE))
        self.register_buffer("count", torch.zeros((), dtype=DOUBLE))
        self.constant = torch.tensor([1e6, 2e6, 3e6], dtype=DOUBLE)

    def forward(self, x):
        self.count.add_(1)
        return (x.double() * self.parameter + self.constant - self.buffer).float(), self.count.float() * x


def test_float64_parameters_buffers_and_constants(delegate):
    x = torch.tensor([3.0, 4.0, 5.0])
    method, report = lower(torch.export.export(Tables(), (x,)))
    assert {"float64" in d.reason for d in report.refused} == {True}
    module = Tables()
    for _ in range(2):
        for actual, expected in zip(method.execute([x]), module(x), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-7, atol=0)


def written():
    table = torch.arange(3)
    table.view(3, 1).mul_(2)
    return table


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.double() * 2,
        lambda x: (x.double() * 2).sum().float(),
        lambda x: (x.double().cos() - 1).float(),
        lambda x: x.double().mul_(2).float(),
        lambda x: (x.double() * 1e200).mul(1e-200).float(),
        lambda x: x * torch.rand(3, dtype=DOUBLE).float(),
    ],
    ids=["output", "operator without a rule", "sum of a cosine", "write", "number out of range", "random"],
)
def test_float64_that_has_no_rule_stays(function):
    program = torch.export.export(Function(function), (torch.randn(3),))
    assert with_float32_numbers(program) is program


def test_only_the_group_with_an_operator_without_a_rule_stays():
    module = Function(lambda x: ((x.double() * 3).sum().float(), (x.double() * 3).float(), written().double() * 1))
    x = torch.randn(3)
    program = with_float32_numbers(torch.export.export(module, (x,)))
    values = [n.meta.get("val") for n in program.graph.nodes]
    assert sum(getattr(v, "dtype", None) == DOUBLE for v in values) == 5
    for actual, expected in zip(program.module()(x), module(x), strict=True):
        torch.testing.assert_close(actual, expected)


def test_a_constant_that_the_program_writes_before_it_is_cast():
    module = Function(lambda x: x * written().double().float())
    x = torch.randn(3)
    program = with_float32_numbers(torch.export.export(module, (x,)))
    torch.testing.assert_close(program.module()(x), module(x))


def test_float64_stays_by_default(delegate):
    """Float32 pairs would lose the range of float64: x * x is 1e40."""
    module, x = Function(lambda x: (x.double() * x.double() / x.double()).float()), torch.tensor([1e20])
    method, report = lower(torch.export.export(module, (x,)), legalize=())
    assert report.refused and all('legalize=("float64",)' in d.reason for d in report.refused)
    torch.testing.assert_close(method.execute([x])[0], x)


def test_float64_that_depends_on_no_input_is_computed_by_default(delegate):
    module, x = Function(lambda x: x * (1e200 * torch.arange(3, dtype=DOUBLE) / 3e200).float()), torch.randn(3)
    program = torch.export.export(module, (x,))
    values = [n.meta.get("val") for n in with_constants(program).graph.nodes]
    assert not any(getattr(v, "dtype", None) == DOUBLE for v in values)
    method, report = lower(program, legalize=())
    assert not report.refused, str(report)
    torch.testing.assert_close(method.execute([x])[0], module(x), rtol=0, atol=0)


@pytest.mark.parametrize("names", ["float64", ("float64", "complex128")])
def test_names_of_no_pass(names):
    with pytest.raises(ValueError, match=r"legalize: got '.*', expected a tuple of 'complex' and 'float64'"):
        MLXPartitioner(legalize=names)
