"""Attention with a bool mask that may hide all keys from a query, which then gets zeros: one kernel for CPUs.

A profiled call runs each instruction by itself.
"""

import sys

import pytest
import torch
from irprograms import Graph, ir, lit
from test_cpu_kernels import attend
from test_product_groups import profiled

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the CPU kernels are built on Linux only")

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 40, 16
SHAPE = BATCH, HEADS, LENGTH, WIDTH


class Program(Graph):
    def __init__(self, mask_shape=(BATCH, 1, LENGTH, LENGTH)):
        super().__init__()
        self.qkv = [self.input(SHAPE) for _ in range(3)]
        self.mask = self.input(mask_shape, torch.bool)
        self.zero = self.constant(torch.zeros(()))
        self.attended, self.sees, self.y = self.new_temp(), self.new_temp(), self.output(SHAPE)

    def attention(self, **fields):
        q, k, v = self.qkv
        node = {"mask": self.mask, "out": self.attended, "scale": 0.25} | fields
        self.emit(ir.SdpaNode(q=q, k=k, v=v, **node))

    def any(self, **fields):
        self.emit(ir.AnyNode(**({"x": self.mask, "axes": [-1], "keepdims": True, "out": self.sees} | fields)))

    def where(self, **fields):
        node = {"condition": self.sees, "x": self.attended, "y": self.zero, "out": self.y}
        self.emit(ir.WhereNode(**(node | fields)))


def data(mask_shape=(BATCH, 1, LENGTH, LENGTH)):
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(mask_shape, generator=generator) < 0.5
    mask[..., 3:9, :] = False
    return *(torch.randn(SHAPE, generator=generator) for _ in range(3)), mask


@pytest.mark.parametrize(
    "mask_shape", [(BATCH, 1, LENGTH, LENGTH), SHAPE[:3] + (LENGTH,), (LENGTH, LENGTH), (LENGTH, 1)], ids=str
)
def test_queries_that_see_no_key_get_zeros(mask_shape):
    g = Program(mask_shape)
    g.attention()
    g.any()
    g.where()
    *qkv, mask = inputs = data(mask_shape)
    y = g.run(*inputs)[0]
    expected = torch.nn.functional.scaled_dot_product_attention(*qkv, mask.expand(*SHAPE[:3], LENGTH), scale=0.25)
    seen = mask.expand(*SHAPE[:3], LENGTH).any(-1, keepdim=True)
    assert not seen.all()
    torch.testing.assert_close(y, torch.where(seen, expected, 0), rtol=1e-5, atol=1e-5)
    assert torch.equal(y, profiled(g, *inputs)[0])


def test_infinite_values_of_hidden_keys_have_no_effect():
    g = Program()
    g.attention()
    g.any()
    g.where()
    *qkv, mask = data()
    qkv[2][-1] = torch.inf
    mask[-1] = False
    assert torch.equal(g.run(*qkv, mask)[0][-1], torch.zeros(SHAPE[1:]))


@pytest.mark.parametrize("contiguous", [True, False])
def test_kernel(library, contiguous):
    *qkv, mask = data()
    if not contiguous:
        mask = mask.transpose(2, 3).contiguous().transpose(2, 3)
    y, plain = (attend(library, *qkv, mask=mask, zero_if_unseen=zeros) for zeros in (True, False))
    seen = mask.any(-1, keepdim=True)
    assert torch.equal(y, torch.where(seen, plain, 0))
    assert plain[-1, :, 3].abs().min() > 0


def of_another_mask(g):
    g.emit(ir.LogicalNotNode(x=g.mask, out=(other := g.new_temp())))
    g.attention()
    g.any(x=other)
    g.where()


def of_the_heads(g):
    g.attention()
    g.any(axes=[1])
    g.emit(ir.SliceNode(x=g.sees, axis=lit(3), start=lit(0), stop=lit(1), step=1, out=g.sees))
    g.where()


def without_the_axis(g):
    g.attention()
    g.any(keepdims=False, out=(flat := g.new_temp()))
    g.emit(ir.ExpandDimsNode(x=flat, axis=-1, out=g.sees))
    g.where()


def another_number(g):
    g.attention()
    g.any()
    g.where(y=g.constant(torch.ones(())))


def an_array_of_zeros(g):
    g.attention()
    g.any()
    g.where(y=g.constant(torch.zeros(WIDTH)))


def the_other_way_round(g):
    g.attention()
    g.any()
    g.where(x=g.zero, y=g.attended)


def another_reader(g):
    g.attention()
    g.any()
    g.emit(ir.NegNode(x=g.attended, out=g.output(SHAPE)))
    g.where()


def all_in_place_of_any(g):
    g.attention()
    g.emit(ir.AllNode(x=g.mask, axes=[-1], keepdims=True, out=g.sees))
    g.where()


NEAR_MISSES = [
    of_another_mask,
    of_the_heads,
    without_the_axis,
    another_number,
    an_array_of_zeros,
    the_other_way_round,
    another_reader,
    all_in_place_of_any,
]


@pytest.mark.parametrize("near_miss", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses(near_miss):
    g = Program()
    near_miss(g)
    inputs = data()
    for result, expected in zip(g.run(*inputs), profiled(g, *inputs), strict=True):
        assert torch.equal(result, expected)
