"""mlx::sample as a module, and as a program."""

import functools

import executorch_mlx
import torch
from executorch_mlx.custom_kernel_ops.sample import sample

DTYPES = {"temperature": torch.float32, "top_p": torch.float32, "seed": torch.int64}
DTYPES |= {"top_k": torch.int64, "min_p": torch.float32}


class Sample(torch.nn.Module):
    def __init__(self, names):
        super().__init__()
        self.names = names

    def forward(self, logits, *values):
        parameters = dict(zip(self.names, values, strict=True))
        return sample(logits, parameters.pop("temperature"), parameters.pop("top_p"), **parameters)


def lower(model, arguments, **options):
    from executorch.exir import to_edge_transform_and_lower

    program = torch.export.export(model, arguments, **options)
    return to_edge_transform_and_lower(
        program, partitioner=[executorch_mlx.MLXPartitioner()]
    ).to_executorch()


@functools.cache
def load(shape, dtype, names):
    """A function that runs mlx::sample in the runtime."""
    from executorch_mlx import Runtime

    values = tuple(torch.zeros((), dtype=DTYPES[n]) for n in names)
    buffer = lower(Sample(names), (torch.zeros(shape, dtype=dtype), *values)).buffer
    program = Runtime.get().load_program(buffer)
    method = program.load_method("forward")
    # The program must outlive its method.
    return lambda arguments, program=program: method.execute(arguments)[0].clone()
