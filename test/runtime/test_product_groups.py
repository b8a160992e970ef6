"""Products with a common operand, which the CPU computes together: the results keep their bits.

A profiled call runs each instruction by itself, so that it shows what the products are without groups.
"""

import ctypes
import sys

import hypothesis.strategies as st
import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner, Runtime
from executorch_mlx.custom_ops.packing import pack
from executorch_mlx.serialization.read import read_payload
from hypothesis import given, settings
from irprograms import Graph, ir
from kernel_library import kernel_library
from loaded_method import LoadedMethod

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the CPU kernels are built on Linux only")

K = 128


@pytest.fixture
def calls(delegate):
    """A function that returns the number of calls of kernels for products so far."""
    count = kernel_library(delegate).product_calls
    count.restype = ctypes.c_uint64
    return count


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Products(Graph):
    """A graph with constants for products, by number. The matrices of different numbers differ in size."""

    def columns(self, number):
        return 5 + 64 * number

    def packed(self, number, bits=4, group_size=64, dtype=torch.float32):
        """The fields of a quantized matrix [columns(number), K]."""
        n, generator = self.columns(number), torch.Generator().manual_seed(number)
        words = pack(torch.randint(0, 2**bits, (n, K), generator=generator).to(torch.uint8), bits)
        scales, biases = (random(n, K // group_size, seed=number + s, dtype=dtype) for s in (100, 200))
        slots = {"w": self.constant(words), "scales": self.constant(scales), "biases": self.constant(biases)}
        return slots | {"group_size": group_size, "bits": bits}

    def quantized(self, x, out, number, **packing):
        self.emit(ir.QuantizedMatmulNode(x=x, out=out, mode="affine", transpose=True, **self.packed(number, **packing)))

    def int8(self, x, out, number, **packing):
        self.emit(ir.Int8QuantizedMatmulNode(x=x, out=out, **self.packed(number, **packing)))

    def float(self, x, out, number, dtype=torch.float32, has_bias=False, transposed=None, **scalars):
        """x @ w.T for a constant w. `transposed` is the slot for w.T."""
        n = self.columns(number)
        transposed = transposed or self.new_temp()
        bias = self.constant(random(n, seed=300, dtype=dtype)) if has_bias else None
        w = self.constant(random(n, K, seed=number, dtype=dtype))
        self.emit(
            ir.TransposeNode(x=w, perm=[1, 0], out=transposed),
            ir.AddmmNode(mat1=x, mat2=transposed, bias=bias, out=out, **scalars),
        )

    def product(self, kind, x, out, number, **options):
        getattr(self, kind)(x, out, number, **options)

    def result(self, *rows, number, dtype=torch.float32):
        return self.output((*rows, self.columns(number)), dtype)


def profiled(graph, *inputs):
    program = Runtime.get().load_program(graph.pte(), enable_etdump=True, debug_buffer_size=0)
    return [x.clone() for x in program.load_method("forward").execute(inputs)]


def assert_same_bits(results, expected):
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def checked_run(g, data, calls, expected_calls):
    """Run a program, which calls a kernel for products `expected_calls` times. Return the results.

    They must have the bits of a profiled run, which computes the products one by one.
    """
    model, before = g.load(), calls()
    results = model(data)
    assert calls() == before + expected_calls
    assert_same_bits(results, profiled(g, data))
    return results


KINDS = pytest.mark.parametrize("kind", ["quantized", "int8", "float"])
X_TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@KINDS
@X_TYPES
@pytest.mark.parametrize("rows", [(1,), (7,), (2, 16), (300,), ()], ids=str)
def test_products_with_a_common_operand_are_one_call(kind, dtype, rows, calls):
    """The results are outputs, and differ in their number of columns."""
    g = Products()
    x = g.input((*rows, K), dtype)
    for number in range(3):
        options = {"dtype": dtype} if kind == "float" else {}
        g.product(kind, x, g.result(*rows, number=number, dtype=dtype), number, **options)
    data = random(*rows, K, dtype=dtype)
    before = calls()
    checked_run(g, data, calls, 1)
    assert calls() == before + 4


@KINDS
def test_products_with_other_instructions_between(kind, calls):
    """The slot of a result is used again before the last product."""
    g = Products()
    x, first, last = g.input((2, K)), g.result(2, number=0), g.result(2, number=1)
    temp = g.new_temp()
    g.product(kind, x, temp, 0)
    g.emit(ir.NegNode(x=temp, out=first))
    g.product(kind, x, temp, 1)
    g.emit(ir.NegNode(x=temp, out=last))
    data = random(2, K)
    checked_run(g, data, calls, 1)


@X_TYPES
def test_products_with_and_without_bias(dtype, calls):
    g = Products()
    x = g.input((3, K), dtype)
    for number, has_bias in enumerate((True, False, True)):
        g.float(x, g.result(3, number=number, dtype=dtype), number, dtype=dtype, has_bias=has_bias)
    data = random(3, K, dtype=dtype)
    results = checked_run(g, data, calls, 1)
    for number, result in enumerate(results):
        w, b = random(g.columns(number), K, seed=number, dtype=dtype), random(g.columns(number), seed=300, dtype=dtype)
        expected = data.double() @ w.double().T + (0 if number == 1 else b.double())
        torch.testing.assert_close(result.double(), expected, rtol=1e-2, atol=0.3 if dtype != torch.float32 else 1e-4)


def other_input(g, x):
    g.quantized(x, g.result(2, number=0), 0)
    g.emit(ir.NegNode(x=x, out=(y := g.new_temp())))
    g.quantized(y, g.result(2, number=1), 1)


def overwritten_input(g, x):
    g.emit(ir.NegNode(x=x, out=(y := g.new_temp())))
    g.quantized(y, g.result(2, number=0), 0)
    g.emit(ir.ExpNode(x=x, out=y))
    g.quantized(y, g.result(2, number=1), 1)


def product_overwrites_its_operand(g, x):
    g.emit(ir.NegNode(x=x, out=(y := g.new_temp())))
    square = g.constant(random(K, K, seed=9))
    g.emit(ir.TransposeNode(x=square, perm=[1, 0], out=(t := g.new_temp())), ir.AddmmNode(mat1=y, mat2=t, out=y))
    g.float(y, g.result(2, number=0), 0)


def updated_buffer(g, x):
    buffer = g.buffer((2, K))
    g.emit(ir.IdCopyNode(x=x, out=buffer))
    g.quantized(buffer, g.result(2, number=0), 0)
    g.emit(ir.AddNode(a=x, b=x, out=buffer))
    g.quantized(buffer, g.result(2, number=1), 1)


def other_group_size(g, x):
    g.quantized(x, g.result(2, number=0), 0, group_size=64)
    g.quantized(x, g.result(2, number=1), 1, group_size=32)


def other_bits(g, x):
    g.quantized(x, g.result(2, number=0), 0, bits=4)
    g.quantized(x, g.result(2, number=1), 1, bits=8)


def other_activations(g, x):
    g.quantized(x, g.result(2, number=0), 0)
    g.int8(x, g.result(2, number=1), 1)


def other_kind(g, x):
    g.quantized(x, g.result(2, number=0), 0)
    g.float(x, g.result(2, number=1), 1)


def factor(g, x):
    g.float(x, g.result(2, number=0), 0, alpha=0.5)
    g.float(x, g.result(2, number=1), 1)


def computed_matrix(g, x):
    g.emit(ir.NegNode(x=g.constant(random(K, g.columns(0), seed=5)), out=(w := g.new_temp())))
    g.emit(ir.AddmmNode(mat1=x, mat2=w, out=g.result(2, number=0)))
    g.float(x, g.result(2, number=1), 1)


def branch_between(g, x):
    """A branch overwrites the operand."""
    g.emit(ir.NegNode(x=x, out=(y := g.new_temp())))
    g.quantized(y, g.result(2, number=0), 0)
    chain = g.chain(ir.ExpNode(x=x, out=y))
    g.emit(ir.IfNode(cond=ir.IntOrVid(literal=1), then_chain_idx=chain, else_chain_idx=chain))
    g.quantized(y, g.result(2, number=1), 1)


NEAR_MISSES = [
    other_input,
    overwritten_input,
    product_overwrites_its_operand,
    updated_buffer,
    other_group_size,
    other_bits,
    other_activations,
    other_kind,
    factor,
    computed_matrix,
    branch_between,
]


@pytest.mark.parametrize("near_miss", NEAR_MISSES, ids=lambda f: f.__name__)
def test_other_products_are_separate_calls(near_miss, calls):
    g = Products()
    near_miss(g, g.input((2, K)))
    data = random(2, K)
    checked_run(g, data, calls, 2)


@KINDS
def test_products_of_many_rows_are_separate_calls(kind, calls):
    g = Products()
    rows = 4097
    x = g.input((rows, K))
    for number in range(2):
        g.product(kind, x, g.result(rows, number=number), number)
    data = random(rows, K)
    model, before = g.load(), calls()
    assert_same_bits(model(data), profiled(g, data))
    assert calls() == before + 4


def test_transposed_matrix_that_is_overwritten():
    """The second product multiplies by what the slot of the transposed matrix holds then."""
    g = Products()
    x, t = g.input((2, K)), g.new_temp()
    g.float(x, g.result(2, number=0), 0, transposed=t)
    g.float(x, g.result(2, number=1), 1, transposed=t)
    other = random(K, g.columns(2), seed=8)
    g.emit(ir.NegNode(x=g.constant(other), out=t), ir.AddmmNode(mat1=x, mat2=t, out=g.result(2, number=2)))
    data = random(2, K)
    results = g.run(data)
    for number in range(2):
        expected = data @ random(g.columns(number), K, seed=number).T
        torch.testing.assert_close(results[number], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[2], -data @ other, rtol=1e-4, atol=1e-4)


def test_matrices_of_other_dtypes():
    g = Products()
    x = g.input((2, K))
    g.float(x, g.result(2, number=0), 0)
    g.float(x, g.result(2, number=1), 1, dtype=torch.bfloat16)
    data = random(2, K)
    assert_same_bits(g.run(data), profiled(g, data))


def test_invalid_matrix_is_an_error_of_its_own_instruction(capfd):
    g = Products()
    x = g.input((2, K))
    g.quantized(x, g.result(2, number=0), 0)
    fields = g.packed(1) | {"scales": g.constant(random(3, 2))}
    g.emit(ir.QuantizedMatmulNode(x=x, out=g.result(2, number=1), mode="affine", transpose=True, **fields))
    with pytest.raises(RuntimeError):
        g.run(random(2, K))
    assert "instruction 1 (QuantizedMatmulNode)" in capfd.readouterr().err


def test_more_products_than_a_group_holds(calls):
    g = Products()
    x = g.input((1, K))
    for number in range(11):
        g.quantized(x, g.result(1, number=number), number)
    data = random(1, K)
    checked_run(g, data, calls, 2)


def test_products_in_a_loop():
    """The operand is the state, which each iteration overwrites after its products."""
    g = Products()
    x, out = g.input((6, 1, K)), g.output((6, 1, K))
    state, part, y = g.new_temp(), g.new_temp(), g.new_temp()
    nodes, temps = [], [g.new_temp() for _ in range(2)]
    for number, temp in enumerate(temps):
        w = g.constant(random(K, K, seed=number) / 12)
        nodes += [
            ir.TransposeNode(x=w, perm=[1, 0], out=(t := g.new_temp())),
            ir.AddmmNode(mat1=state, mat2=t, out=temp),
        ]
    body = g.chain(*nodes, ir.MultiplyNode(a=temps[0], b=temps[1], out=y), ir.AddNode(a=y, b=part, out=state))
    g.emit(
        ir.TakeNode(x=x, index=ir.IntOrVidOrTid(literal=0, kind=0), out=state, axis=0),
        ir.ScanNode(originals=[x], sliced=[part], outputs=[y], carry=[state], body_chain_idx=body, scan_axis=0),
        ir.IdCopyNode(x=y, out=out),
    )
    data = random(6, 1, K)
    assert_same_bits(g.run(data), profiled(g, data))


class Layer(torch.nn.Module):
    """The products of a layer: three of the normalized input with different sizes and biases, then two of their sum.

    The matrices are so large that export does not fold their transposition.
    """

    def __init__(self, quantized):
        super().__init__()
        linear = self.quantized_linear if quantized else torch.nn.Linear
        self.norm = torch.nn.RMSNorm(256)
        self.q, self.k, self.v = linear(256, 512), linear(256, 256), linear(256, 256, bias=False)
        self.gate, self.up = linear(256, 1024, bias=False), linear(256, 1024, bias=False)

    @staticmethod
    def quantized_linear(columns, rows, bias=True):
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        layer = torch.nn.Linear(columns, rows, bias)
        quantize_(layer, Int8WeightOnlyConfig())
        return layer

    def forward(self, x):
        y = self.norm(x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        z = self.norm(x + q[..., :256] * q[..., 256:] + k * v)
        return torch.nn.functional.silu(self.gate(z)) * self.up(z)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exported_layer_has_two_groups(quantized, dtype, calls):
    torch.manual_seed(0)
    layer, x = Layer(quantized).to(dtype).eval(), random(1, 2, 256, dtype=dtype)
    exported = torch.export.export(layer, (x,))
    compiled = to_edge_transform_and_lower(exported, partitioner=[MLXPartitioner()]).to_executorch()
    (delegate,) = compiled.executorch_program.backend_delegate_data
    ops = [i.op for chain in read_payload(bytes(delegate.data)).instruction_chains for i in chain.instructions]
    assert sum(isinstance(op, ir.QuantizedMatmulNode if quantized else ir.AddmmNode) for op in ops) == 5
    method, before = LoadedMethod(compiled.buffer), calls()
    (result,) = method.execute([x])
    assert calls() == before + 2
    rtol, atol = (1e-4, 1e-4) if dtype == torch.float32 else (0.05, 0.1)
    torch.testing.assert_close(result, layer(x), rtol=rtol, atol=atol)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_products_keep_their_bits(data):
    """Random instructions over few slots, so that operands, results and transposed matrices are overwritten."""
    g = Products()
    rows = data.draw(st.sampled_from([1, 3, 32]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    operands = [g.input((rows, K), dtype)] + [g.new_temp() for _ in range(2)]
    transposed = [g.new_temp() for _ in range(2)]
    shared = g.new_temp()  # a result that later instructions overwrite
    g.emit(*(ir.NegNode(x=operands[0], out=slot) for slot in operands[1:]))
    for step in range(data.draw(st.integers(2, 14))):
        kind = data.draw(st.sampled_from(["quantized", "quantized", "int8", "float", "float", "overwrite"]))
        x = data.draw(st.sampled_from(operands))
        if kind == "overwrite":
            g.emit(ir.TanhNode(x=x, out=data.draw(st.sampled_from(operands[1:]))))
            continue
        number = data.draw(st.integers(0, 2))
        options = {"group_size": data.draw(st.sampled_from([64, 64, 32]))}
        if kind == "float":
            has_bias = data.draw(st.booleans())
            options = {"dtype": dtype, "has_bias": has_bias, "transposed": data.draw(st.sampled_from(transposed))}
        g.product(kind, x, shared, number, **options)
        g.emit(ir.IdCopyNode(x=shared, out=g.result(rows, number=number, dtype=dtype)))
    if g.outputs:
        x = random(rows, K, seed=data.draw(st.integers(0, 3)), dtype=dtype)
        assert_same_bits(g.run(x), profiled(g, x))
