"""mlx::sample as a module, and as a program.

`how` a program draws: "portable" has torch's operations, which run; "replaced" has the same operations, and the runtime
runs SampleNode in their place; "node" has SampleNode.
"""

import functools
from contextlib import nullcontext

import executorch_mlx
import torch
from executorch_mlx.custom_kernel_ops.sample import sample
from loaded_method import LoadedMethod
from oprows.portable import without_replacements

DTYPES = {"temperature": torch.float32, "top_p": torch.float32, "seed": torch.int64}
DTYPES |= {"top_k": torch.int64, "min_p": torch.float32}


class Sample(torch.nn.Module):
    """Calls mlx::sample with logits and the parameters `names`."""

    def __init__(self, names):
        super().__init__()
        self.names = names

    def forward(self, logits, *values):
        parameters = dict(zip(self.names, values, strict=True))
        return sample(logits, parameters.pop("temperature"), parameters.pop("top_p"), **parameters)


def lower(model, arguments, how="replaced", **options):
    from executorch.exir import to_edge_transform_and_lower

    program = torch.export.export(model, arguments, **options)
    partitioner = executorch_mlx.MLXPartitioner(allow_extensions=how == "node")
    with without_replacements() if how == "portable" else nullcontext():
        return to_edge_transform_and_lower(program, partitioner=[partitioner]).to_executorch()


@functools.cache
def load(shape, dtype, names, how):
    """Return a function that runs `Sample(names)` in the runtime. It takes a list: the logits, then the parameters."""
    values = tuple(torch.zeros((), dtype=DTYPES[n]) for n in names)
    buffer = lower(Sample(names), (torch.zeros(shape, dtype=dtype), *values), how).buffer
    method = LoadedMethod(buffer)
    return lambda arguments: method.execute(arguments)[0].clone()
