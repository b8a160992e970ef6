"""Programs written by hand in the IR, and run by ExecuTorch's runtime through the delegate.

    g = Graph()
    x, y = g.input((2, 3)), g.output((2, 3))
    g.emit(ir.ExpNode(x=x, out=y))
    (result,) = g.run(torch.ones(2, 3))

`examples` has larger programs. `node_case` and `node_cases` test one IR node at a time. `options` sets load options.
"""

from executorch_mlx.serialization import ir  # noqa: F401

from .graph import BOOL, FLOAT32, INT32, Graph, Model, lit, lits, number, pte, value_of  # noqa: F401
