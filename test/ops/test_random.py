"""mlx::random_bits. `test/custom_ops/test_random_bits.py` compares the operator with libmlx."""

import torch
from executorch_mlx import Runtime
import executorch_mlx.custom_ops  # noqa: F401  (defines torch.ops.mlx.random_bits)
from oprows import Dyn, data, f32, floats, ints, lower, pytest_function, row

random_bits = torch.ops.mlx.random_bits
SEEDS = data([0, 1, 2**31 - 1, 2**31, 2**32 + 5, -1, 2**63 - 1])


def bits_of_seeds(seeds, shape, width):
    return [random_bits(shape, seed, width).to(torch.int64) for seed in seeds.unbind()]


ROWS = [
    row("mlx::random_bits", lambda s: bits_of_seeds(s, [3, 5], 4), SEEDS, verified=False),
    row("mlx::random_bits/odd widths",
        lambda s: (bits_of_seeds(s, [7], 1), bits_of_seeds(s, [3], 2), bits_of_seeds(s, [1], 4)),
        data([3, 2**40]), verified=False),
    row("mlx::random_bits/dynamic", lambda x, s: random_bits([x.shape[0], 3], s, 4).to(torch.int64),
        floats(Dyn("n", 3, also=(1, 6)), dtype=f32), ints(), verified=False),
]

test_op_row = pytest_function(ROWS)


def test_unseeded_bits_differ_within_a_call_and_between_calls(delegate):
    op_row = row(
        "mlx::random_bits", lambda x: [random_bits([8]).to(torch.int64) + x for _ in range(2)], ints(), verified=False
    )
    lowered = lower(op_row)
    program = Runtime.get().load_program(lowered.pte)
    method = program.load_method("forward")
    x = torch.zeros((), dtype=torch.int64)
    results = [t.tolist() for _ in range(3) for t in method.execute([x])]
    assert len({tuple(bits) for bits in results}) == 6
