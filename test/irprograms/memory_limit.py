"""For tests of the memory limit: constants, and a program with large temporaries."""

from .graph import Graph, ir

FAILED = "0x:?21$"  # ExecuTorch's Error::MemoryAllocationFailed, in a RuntimeError
MEGABYTE = 1 << 20
SLACK = 64 << 10
"""MLX may give an array a cached block that is up to two pages larger."""


def products(size: int, count: int = 1) -> Graph:
    """The row sums of sin(x @ x.T) @ x for x [n, 64], `count` times in a row. Each takes n² floats twice."""
    g = Graph()
    x, total = g.input(((1, size), 64)), g.output(((1, size),))
    scaled, product = g.new_temp(), g.new_temp()
    g.emit(ir.IdCopyNode(x=x, out=scaled))
    for _ in range(count):
        g.emit(
            ir.TransposeNode(x=scaled, out=product, perm=[1, 0]),
            ir.AddmmNode(mat1=scaled, mat2=product, out=product),
            ir.SinNode(x=product, out=product),
            ir.AddmmNode(mat1=product, mat2=x, out=scaled),
        )
    g.emit(ir.SumNode(x=scaled, out=total, axes=[1]))
    return g
