"""What the runtime computes together on a GPU with all kernels: it decides this at load, so no GPU is needed."""

import os
import subprocess
import sys

import pytest
import torch
from irprograms import Graph, ir, value_of
from irprograms.graph import SCALAR_TYPES

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the kernels for CUDA are built on Linux only"),
    pytest.mark.skipif("EXECUTORCH_MLX_BUILD" in os.environ, reason="only build/ has the program cuda_kernel_sources"),
]
D = 8


class Layer(Graph):
    def norm(self, x, out=None):
        y = out or self.new_temp()
        self.emit(ir.RMSNormNode(x=x, weight=self.constant(torch.ones(D)), out=y, eps=1e-5))
        return y

    def product(self, x, bias=None):
        transposed, y = self.new_temp(), self.new_temp()
        self.emit(ir.TransposeNode(x=self.constant(torch.ones(D, D)), out=transposed, perm=[1, 0]))
        self.emit(ir.AddmmNode(mat1=x, mat2=transposed, out=y, bias=bias))
        return y

    def quantized(self, x, mode="affine"):
        words, scale = torch.ones(D, D // 8, dtype=torch.int32).view(torch.uint32), torch.ones(D, 1)
        y = self.new_temp()
        slots = {"w": self.constant(words), "scales": self.constant(scale), "biases": self.constant(scale)}
        self.emit(ir.QuantizedMatmulNode(x=x, out=y, mode=mode, transpose=True, group_size=D, bits=4, **slots))
        return y

    def silu(self, x):
        y = self.new_temp()
        self.emit(ir.SiluNode(x=x, out=y))
        return y

    def binary(self, node, a, b, out=None):
        y = out or self.new_temp()
        self.emit(node(a=a, b=b, out=y))
        return y


@pytest.fixture(scope="module")
def fused(cuda_kernel_sources, tmp_path_factory):
    """A function that returns what the fused instructions of a graph compute, in the order of the chain."""
    path = tmp_path_factory.mktemp("fused") / "payload"

    def fused(graph):
        path.write_bytes(graph.payload())
        command = [cuda_kernel_sources, "--fused", path]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        return [line.partition(": ")[2] for line in lines]

    return fused


def test_layer(fused):
    g = Layer()
    x, y, n = g.input((1, D)), g.output((1, D)), g.output((1, D))
    h = g.norm(x)
    gate, up = g.product(h), g.product(h)
    down = g.product(g.binary(ir.MultiplyNode, g.silu(gate), up))
    g.norm(g.binary(ir.AddNode, x, down, out=y), out=n)
    gated = ["left product", "left product", "left silu", "norm, products, silu, product"]
    assert fused(g) == [*gated, "left product", "product, sum", "sum, norm"]


def test_products_of_the_same_vectors_are_a_group(fused):
    g = Layer()
    x, y = g.input((1, D)), g.output((1, D))
    h = g.norm(x)
    query, key = g.product(h), g.product(h)
    g.binary(ir.AddNode, g.product(query), query, out=y)  # the query has two readers
    g.binary(ir.MultiplyNode, key, key, out=y)
    assert fused(g) == ["norm, 2 products", "left product", "product, sum"]


def test_products_with_a_bias_are_left_to_mlx(fused):
    g = Layer()
    x, y = g.input((1, D)), g.output((1, D))
    g.binary(ir.AddNode, g.product(x, bias=g.constant(torch.ones(D))), x, out=y)
    assert fused(g) == []


def test_quantized_products(fused):
    g = Layer()
    x, y = g.input((1, D)), g.output((1, D))
    h = g.norm(x)
    gate, up = g.quantized(h), g.quantized(h)
    gated = g.binary(ir.MultiplyNode, g.silu(gate), up)
    g.binary(ir.AddNode, x, g.quantized(gated), out=y)
    gated = ["left product", "left product", "left silu", "norm, products, silu, product"]
    assert fused(g) == [*gated, "left product", "product, sum"]


def test_quantized_products_in_other_formats_are_left_to_mlx(fused):
    g = Layer()
    x, y = g.input((1, D)), g.output((1, D))
    g.binary(ir.AddNode, x, g.quantized(x, mode="mxfp4"), out=y)
    assert fused(g) == []


@pytest.mark.parametrize("overwritten", [False, True])
def test_a_slot_counts_only_until_it_is_overwritten(fused, overwritten):
    g = Layer()
    x, y = g.input((1, D)), g.output((1, D))
    activated = g.silu(x)
    if overwritten:
        g.emit(ir.NegNode(x=x, out=activated))
    g.binary(ir.MultiplyNode, activated, x, out=y)
    assert fused(g) == ([] if overwritten else ["left silu", "silu, product"])


def test_a_value_from_another_chain_is_not_fused(fused):
    g = Layer()
    x, y = g.input((1, D)), g.output((1, D))
    condition = g.item(g.constant(torch.ones((), dtype=torch.int64)))
    activated = g.silu(x)
    branches = [g.chain(ir.NegNode(x=x, out=activated)), g.chain()]
    g.emit(ir.IfNode(cond=value_of(condition), then_chain_idx=branches[0], else_chain_idx=branches[1]))
    g.binary(ir.MultiplyNode, activated, x, out=y)
    assert fused(g) == []


@pytest.mark.parametrize("case", ["read", "overwritten", "not called"])
def test_a_value_that_another_chain_may_read_is_not_left(fused, case):
    g = Layer()
    x, y = g.input((1, D)), g.output((1, D))
    condition = value_of(g.item(g.constant(torch.ones((), dtype=torch.int64))))
    activated = g.silu(x)
    g.binary(ir.MultiplyNode, activated, x, out=y)
    if case == "overwritten":
        g.emit(ir.NegNode(x=x, out=activated))
    reader = g.chain(ir.ExpNode(x=activated, out=y))
    if case != "not called":
        g.emit(ir.IfNode(cond=condition, then_chain_idx=reader, else_chain_idx=g.chain()))
    assert fused(g) == ([] if case == "read" else ["left silu", "silu, product"])


def test_rotations_of_query_and_key_are_one(fused):
    g = Layer()
    offset, freqs = g.input((1,), torch.int32), g.constant(torch.ones(D // 2))
    outputs = [g.output((1, 2, 1, D)) for _ in range(3)]
    for y in outputs:
        options = {"dims": D, "traditional": False, "base": 1e4, "scale": 1.0}
        x = g.input((1, 2, 1, D))
        g.emit(ir.RopeNode(x=x, out=y, offset=ir.VidOrTid(tid=offset, is_vid=False), freqs=freqs, **options))
    assert fused(g) == ["2 rope", "1 rope"]


def quantized_embedding(g, index, other_index, dtype=torch.bfloat16):
    """Rows of a quantized table. The scales have the rows of `other_index`."""
    table = [g.constant(x) for x in (torch.ones(4, 1, dtype=torch.uint32), *torch.ones(2, 4, 1, dtype=torch.bfloat16))]
    w, scales, biases, wide_scales, wide_biases, numbers = (g.new_temp() for _ in range(6))
    for x, out, at in zip(table, (w, scales, biases), (index, other_index, index), strict=True):
        g.emit(ir.TakeNode(x=x, out=out, index=ir.IntOrVidOrTid(tid=at, kind=2)))
    for x, out in ((scales, wide_scales), (biases, wide_biases)):
        g.emit(ir.AsTypeNode(x=x, out=out, scalar_type=SCALAR_TYPES[torch.float32]))
    slots = {"w": w, "scales": wide_scales, "biases": wide_biases, "out": numbers}
    g.emit(ir.DequantizeNode(group_size=D, bits=4, mode="affine", **slots))
    g.emit(ir.AsTypeNode(x=numbers, out=g.output((1, D), dtype), scalar_type=SCALAR_TYPES[dtype]))
    return wide_scales


def test_quantized_embedding(fused):
    g = Layer()
    tokens = g.input((1,), torch.int64)
    quantized_embedding(g, tokens, tokens)
    assert fused(g) == ["embedding"]


def test_embedding_of_other_rows(fused):
    g = Layer()
    quantized_embedding(g, g.input((1,), torch.int64), g.input((1,), torch.int64))
    assert fused(g) == []


def test_embedding_whose_scales_are_read_again(fused):
    g = Layer()
    tokens = g.input((1,), torch.int64)
    g.silu(quantized_embedding(g, tokens, tokens))
    assert fused(g) == []
