"""Constants and a program with large temporaries, for tests of the memory limit."""

from .graph import Graph, ir

FAILED = "0x:?21$"  # matches the message of a RuntimeError with ExecuTorch's Error::MemoryAllocationFailed
MEGABYTE = 1 << 20
SLACK = 64 << 10
"""The bytes by which MLX's memory may exceed the sum of the arrays: an array may get a cached block that is larger."""


def products(size: int, count: int = 1) -> Graph:
    """Return a program that computes s = sin(s @ s.T) @ x `count` times, starting with s = x, and sums the rows of s.

    The input x is [n, 64]. Each computation needs two temporaries of n² floats.
    """
    g = Graph()
    x, total = g.input(((1, size), 64)), g.output(((1, size),))
    s, product = g.new_temp(), g.new_temp()
    g.emit(ir.IdCopyNode(x=x, out=s))
    for _ in range(count):
        g.emit(
            ir.TransposeNode(x=s, out=product, perm=[1, 0]),
            ir.AddmmNode(mat1=s, mat2=product, out=product),
            ir.SinNode(x=product, out=product),
            ir.AddmmNode(mat1=product, mat2=x, out=s),
        )
    g.emit(ir.SumNode(x=s, out=total, axes=[1]))
    return g
