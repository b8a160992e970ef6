"""mlx::random_bits and torch's random operators.

`test/custom_ops/test_random_bits.py` compares mlx::random_bits with libmlx.
"""

import executorch_mlx.custom_ops  # noqa: F401  (defines torch.ops.mlx.random_bits)
import torch
import torch.nn.functional as F
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from loaded_method import LoadedMethod
from oprows import Dyn, bf16, data, f16, f32, floats, i32, i64, ints, lower, pytest_function, row

random_bits = torch.ops.mlx.random_bits
SEEDS = data([0, 1, 2**31 - 1, 2**31, 2**32 + 5, -1, 2**63 - 1])


def bits_of_seeds(seeds, shape, width):
    return [random_bits(shape, seed, width).to(torch.int64) for seed in seeds.unbind()]


def inside(draw, low, high):
    """Return a function that tests random numbers, which differ from those of eager torch.

    It returns zeros with the shape and dtype of the numbers, and whether all numbers lie in [low, high).
    """

    def function(x):
        drawn = draw(x)
        return drawn * 0 + 0, ((drawn >= low) & (drawn < high)).all()

    return function


N = Dyn("n", 3, also=(1, 6))
RANDOM = {"dtypes": (f32,), "edge_verified": False}

ROWS = [
    row("mlx::random_bits", lambda s: bits_of_seeds(s, [3, 5], 4), SEEDS, edge_verified=False),
    row(
        "mlx::random_bits/odd widths",
        lambda s: (bits_of_seeds(s, [7], 1), bits_of_seeds(s, [3], 2), bits_of_seeds(s, [1], 4)),
        data([3, 2**40]),
        edge_verified=False,
    ),
    row(
        "mlx::random_bits/dynamic",
        lambda x, s: random_bits([x.shape[0], 3], s, 4).to(torch.int64),
        floats(Dyn("n", 3, also=(1, 6)), dtype=f32),
        ints(),
        edge_verified=False,
    ),
    row("rand", inside(lambda x: torch.rand(x.shape[0], 3), 0, 1), floats(N), **RANDOM),
    row(
        "rand/half",
        inside(lambda x: torch.rand(500, dtype=x.dtype), 0, 1),
        floats(2),
        dtypes=(f16, bf16),
        edge_verified=False,
    ),
    row("rand_like", inside(torch.rand_like, 0, 1), floats(N, 4), **RANDOM),
    row("rand_like.generator", inside(lambda x: torch.rand_like(x, generator=None), 0, 1), floats(N, 4), **RANDOM),
    row("rand.generator", inside(lambda x: torch.rand(5, generator=None), 0, 1), floats(2), **RANDOM),
    row("randn.generator", inside(lambda x: torch.randn(5, generator=None), -7, 7), floats(2), **RANDOM),
    row("randint.generator", inside(lambda x: torch.randint(9, (5,), generator=None), 0, 9), floats(2), **RANDOM),
    row(
        "randint.low_generator", inside(lambda x: torch.randint(3, 9, (5,), generator=None), 3, 9), floats(2), **RANDOM
    ),
    row("randperm.generator", lambda x: torch.randperm(9, generator=None).sort().values, floats(2), **RANDOM),
    row("randn", inside(lambda x: torch.randn(x.shape[0], 3), -7, 7), floats(N), **RANDOM),
    row("randn_like", inside(torch.randn_like, -7, 7), floats(N, 4), **RANDOM),
    row("randn_like.generator", inside(lambda x: torch.randn_like(x, generator=None), -7, 7), floats(N, 4), **RANDOM),
    row("randint", inside(lambda x: torch.randint(9, (x.shape[0], 50)), 0, 9), floats(N), **RANDOM),
    row("randint.low", inside(lambda x: torch.randint(-3, 2, (50,), dtype=i32), -3, 2), floats(2), **RANDOM),
    row("randint_like", inside(lambda x: torch.randint_like(x, 5), 0, 5), floats(N, 4), **RANDOM),
    row("randint_like.low_dtype", inside(lambda x: torch.randint_like(x, -5, 5), -5, 5), floats(N, 4), **RANDOM),
    row("randperm", lambda x: torch.randperm(x.shape[0]).sort().values, floats(N), **RANDOM),
    row("bernoulli.Tensor", lambda x: torch.empty_like(x).bernoulli_(x), data([0.0, 1.0, 1.0]), **RANDOM),
    row("uniform", inside(lambda x: torch.empty_like(x).uniform_(-3, 2), -3, 2), floats(N, 4), **RANDOM),
    row("normal_functional", lambda x: torch.empty_like(x).normal_(3, 0), floats(N, 4), **RANDOM),
    row("normal.float_float", inside(lambda x: torch.normal(5.0, 2.0, (x.shape[0], 3)), -9, 19), floats(N), **RANDOM),
    row("log_normal", lambda x: torch.empty_like(x).log_normal_(0, 1e-9), floats(N, 4), **RANDOM),
    row("geometric", lambda x: [torch.empty_like(x).geometric_(p) >= 1 for p in (0.1, 0.9)], floats(N, 4), **RANDOM),
    row("cauchy", lambda x: torch.empty_like(x).cauchy_(2, 1e-20), floats(N, 4), **RANDOM),
    row("random.to", inside(lambda x: torch.empty_like(x).random_(7), 0, 7), floats(N, 40), **RANDOM),
    row("bernoulli", lambda p: torch.bernoulli(p), data([0.0, 1.0, 1.0]), **RANDOM),
    row("bernoulli.p", lambda x: [torch.bernoulli(x, p) for p in (0.0, 1.0)], floats(5), traced=True, **RANDOM),
    row("normal.Tensor_float", lambda m: torch.normal(m, 0.0), floats(5), **RANDOM),
    row("normal.float_Tensor", lambda s: torch.normal(2.0, s * 0), floats(5), **RANDOM),
    row("normal.Tensor_Tensor", lambda m, s: torch.normal(m, s * 0), floats(5), floats(5), **RANDOM),
    row("exponential", lambda x: torch.ops.aten.exponential(x, 2.0) > 0, floats(50), **RANDOM),
    row(
        "multinomial",
        lambda p: torch.multinomial(p, 2).sort().values,
        data([[0.0, 1.0, 5.0], [1.0, 0.0, 1.0]]),
        **RANDOM,
    ),
    row(
        "multinomial/replacement",
        lambda p: torch.multinomial(p, 20, replacement=True),
        data([[0.0, 1.0], [1.0, 0.0]]),
        **RANDOM,
    ),
    row(
        "native_dropout", lambda x: [F.dropout(x, p, True) for p in (0.0, 1.0)], floats(9), signed_zero=False, **RANDOM
    ),
]

test_op_row = pytest_function(ROWS)


def test_unseeded_bits_differ_within_a_call_and_between_calls(delegate):
    op_row = row(
        "mlx::random_bits",
        lambda x: [random_bits([8]).to(torch.int64) + x for _ in range(2)],
        ints(),
        edge_verified=False,
    )
    lowered = lower(op_row)
    method = LoadedMethod(lowered.pte)
    x = torch.zeros((), dtype=torch.int64)
    results = [t.tolist() for _ in range(3) for t in method.execute([x])]
    assert len({tuple(bits) for bits in results}) == 6


def test_a_payload_without_inputs(delegate):
    """`x` is unused, so that the delegated graph has no inputs."""
    lowered = lower(row("randint.low", lambda x: torch.randint(3, 4, (4,)), floats(2), **RANDOM))
    assert LoadedMethod(lowered.pte).execute([torch.zeros(2)])[0].tolist() == [3] * 4


def test_reasons_for_declined_draws_give_advice():
    class Model(torch.nn.Module):
        def forward(self, weights, x):
            drawn = torch.multinomial(weights, x.shape[0], replacement=True)
            return drawn, torch.poisson(weights), torch.empty(3, dtype=i64).random_()

    partitioner, inputs = MLXPartitioner(), (torch.rand(4), torch.rand(3))
    exported = torch.export.export(Model(), inputs, dynamic_shapes=(None, {0: torch.export.Dim("n", min=2, max=9)}))
    config = EdgeCompileConfig(_check_ir_validity=False)
    to_edge_transform_and_lower(exported, partitioner=[partitioner], compile_config=config)
    reasons = {d.target: d.reason for d in partitioner.explain().refused}
    assert "make it static at export" in reasons["aten.multinomial.default"]
    assert "draw these numbers on the host" in reasons["aten.poisson.default"]
    assert "use torch.randint" in reasons["aten.random.default"]


class Draws(torch.nn.Module):
    """Many draws, whose statistics are known. The input only gives the number of draws."""

    def forward(self, x):
        weights = torch.tensor([1.0, 0.0, 3.0, 4.0])
        drawn = torch.multinomial(weights, x.shape[0], replacement=True)
        first = torch.multinomial(weights.expand(x.shape[0], 4), 2)[:, 0]
        return (
            torch.rand_like(x),
            torch.randn_like(x),
            torch.bernoulli(torch.full_like(x, 0.3)),
            torch.randint_like(x, 10),
            F.one_hot(drawn, 4).float(),
            F.one_hot(first, 4).float(),
        )


def test_the_moments_of_draws(delegate):
    x = torch.zeros(20000)
    config = EdgeCompileConfig(_check_ir_validity=False)
    manager = to_edge_transform_and_lower(
        torch.export.export(Draws(), (x,)), partitioner=[MLXPartitioner()], compile_config=config
    )
    method = LoadedMethod(manager.to_executorch().buffer)
    uniform, normal, bernoulli, integers, drawn, first = method.execute([x])
    assert not torch.equal(uniform, method.execute([x])[0])

    def close(value, expected, deviation):
        """Whether the mean of 20,000 draws is within 5 standard errors. This fails once in two million runs."""
        return abs(value - expected) < 5 * deviation / len(x) ** 0.5

    assert close(uniform.mean(), 0.5, 12**-0.5) and close((uniform**2).mean(), 1 / 3, 0.3)
    assert close(normal.mean(), 0, 1) and close((normal**2).mean(), 1, 2**0.5) and close((normal**4).mean(), 3, 96**0.5)
    assert close(bernoulli.mean(), 0.3, 0.46) and set(bernoulli.tolist()) == {0.0, 1.0}
    assert close(integers.mean(), 4.5, 8.25**0.5) and set(integers.tolist()) == set(map(float, range(10)))
    for counts in (drawn, first):
        assert all(close(got, want, 0.5) for got, want in zip(counts.mean(0), (1 / 8, 0, 3 / 8, 1 / 2)))
        assert counts[:, 1].sum() == 0
