"""mlx::sample as a module, and as a program."""

import functools

import executorch_mlx
import torch
from executorch_mlx.custom_kernel_ops.sample import sample

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


def lower(model, arguments, allow_extensions=False, **options):
    from executorch.exir import to_edge_transform_and_lower

    program = torch.export.export(model, arguments, **options)
    partitioner = executorch_mlx.MLXPartitioner(allow_extensions=allow_extensions)
    return to_edge_transform_and_lower(program, partitioner=[partitioner]).to_executorch()


@functools.cache
def load(shape, dtype, names, allow_extensions=False):
    """Returns a function that runs `Sample(names)` in the runtime. It takes a list: the logits, then the parameters.

    With `allow_extensions`, the program has one instruction, SampleNode.
    """
    from executorch_mlx import Runtime

    values = tuple(torch.zeros((), dtype=DTYPES[n]) for n in names)
    buffer = lower(Sample(names), (torch.zeros(shape, dtype=dtype), *values), allow_extensions).buffer
    program = Runtime.get().load_program(buffer)
    method = program.load_method("forward")
    # The program must outlive its method.
    return lambda arguments, program=program: method.execute(arguments)[0].clone()
