"""`seed_random_ops`: torch's random operators as functions of a seed."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner, SamplingHead, verify
from executorch_mlx.random import rand, seed_random_ops
from executorch_mlx.random.distributions import largest_below
from loaded_method import LoadedMethod

CONFIG = EdgeCompileConfig(_check_ir_validity=False)


class Wrapped(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class Everything(torch.nn.Module):
    """Random operators of torch in the forms in which models call them.

    Returns two groups of results. The delegate must match the first group exactly, except for its results 0 and 2, and
    the second group within rounding.
    """

    def __init__(self):
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)
        self.linear = torch.nn.Linear(4, 4)
        self.head = SamplingHead(self.linear)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, *, scale):
        self.calls.add_(1)
        filled = torch.empty_like(x)
        weights = (torch.softmax(x, -1), torch.rand(x.shape[0], 3))
        exact = (
            *weights,
            self.dropout(self.linear(x)),
            F.dropout2d(x[None, :, :, None]),
            torch.rand_like(x) * scale,
            torch.rand(3, generator=None),
            torch.randint(2, 9, (5,)),
            torch.randint_like(x, 7),
            torch.randperm(x.shape[0]),
            torch.bernoulli(weights[0]),
            filled.clone().bernoulli_(0.3),
            filled.clone().uniform_(2, 5),
            filled.clone().random_(6),
            torch.multinomial(weights[0], 2),
            self.head(x[:1], temperature=1.0),
            self.calls.clone(),
        )
        rounded = (
            torch.randn(x.shape[0], 3),
            torch.randn_like(x),
            torch.normal(x, 2.0),
            torch.normal(0.0, 1.0, (3,)),
            filled.clone().normal_(1, 2),
            filled.clone().exponential_(2),
            filled.clone().log_normal_(),
            filled.clone().geometric_(0.2),
            filled.clone().cauchy_(),
            F.gumbel_softmax(x),
            F.alpha_dropout(x, 0.3, True),
            F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], dropout_p=0.5),
        )
        return exact, rounded


def lowered(program: torch.export.ExportedProgram) -> bytes:
    """Lower a program, check that all of it is delegated, and return the .pte."""
    partitioner = MLXPartitioner()
    manager = to_edge_transform_and_lower(program, partitioner=[partitioner], compile_config=CONFIG)
    assert partitioner.explain().refused == ()
    return manager.to_executorch().buffer


def test_the_program_draws_what_eager_torch_draws(delegate):
    scale = torch.tensor(2.0)
    rows = {"x": {0: torch.export.Dim("rows", min=2, max=100)}, "scale": None}
    exported = torch.export.export(Everything(), (torch.randn(3, 4),), {"scale": scale}, dynamic_shapes=rows)
    seeded = seed_random_ops(exported)
    eager, method = seeded.module(), LoadedMethod(lowered(seeded))
    for count, seed in ((3, 1), (3, 2), (17, -5), (17, 2**62)):
        x = torch.randn(count, 4)
        exact, rounded = eager(x, scale=scale, seed=torch.tensor(seed))
        results = method.execute([x, scale, torch.tensor(seed)])
        torch.testing.assert_close(results[0], exact[0])  # softmax
        torch.testing.assert_close(results[2], exact[2])  # a product before the dropout
        for index in {*range(len(exact))} - {0, 2}:
            assert torch.equal(results[index], exact[index]), index
        torch.testing.assert_close(results[len(exact) :], list(rounded))


def test_draws_differ_within_a_call_and_between_seeds():
    model = Wrapped(lambda x: [torch.rand_like(x) for _ in range(20)])
    seeded = seed_random_ops(torch.export.export(model, (torch.zeros(4),))).module()
    calls = [seeded(torch.zeros(4), seed=torch.tensor(seed)) for seed in (8, 8, 9, 10, -8)]
    assert all(map(torch.equal, calls[0], calls[1]))
    assert len({tuple(drawn.tolist()) for call in calls[1:] for drawn in call}) == 4 * 20


def test_seeds_of_draws_keep_the_upper_half_of_the_seed_and_lie_far_apart():
    # ExecuTorch's own MLX delegate reads the low 32 bits of a seed, with their sign.
    model = Wrapped(lambda x: [torch.rand_like(x) for _ in range(200)])
    graph = seed_random_ops(torch.export.export(model, (torch.zeros(4),))).graph
    keys = [0] + [n.args[1] for n in graph.nodes if n.target is torch.ops.aten.bitwise_xor.Scalar]
    assert len(keys) == 200 and all(0 <= key < 2**31 for key in keys)
    differences = [a ^ b for a, b in itertools.combinations(keys, 2)]
    assert min(2 ** d.bit_length() - d for d in differences) >= 2**23  # s ^ d is at least this far from s, for every s


class Counted(torch.nn.Module):
    """Keeps its seed in a buffer, and adds 1 to it in every call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls.add_(1)
        return x + rand(x.shape, seed=self.calls)


def test_a_buffer_can_count_the_calls(delegate):
    method = LoadedMethod(lowered(torch.export.export(Counted(), (torch.zeros(5),))))
    for call in range(1, 4):
        assert method.execute([torch.zeros(5)])[0].equal(rand([5], seed=call))


def test_the_first_draw_uses_the_seed_itself():
    program = seed_random_ops(torch.export.export(Wrapped(lambda x: torch.rand_like(x)), (torch.zeros(5),)))
    assert torch.equal(program.module()(torch.zeros(5), seed=torch.tensor(7)), rand([5], seed=7))
    assert program.graph_signature.user_inputs == ("args_0", "seed")
    assert program.run_decompositions().module()(torch.zeros(5), seed=torch.tensor(7)).equal(rand([5], seed=7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("low, high", [(1.0, 2.0), (100.0, 101.0), (-3.0, 0.1), (-2.0, -1.0)])
def test_uniform_numbers_are_below_the_upper_bound(dtype, low, high):
    x = torch.zeros(40000, dtype=dtype)
    program = seed_random_ops(torch.export.export(Wrapped(lambda x: torch.empty_like(x).uniform_(low, high)), (x,)))
    drawn = program.module()(x, seed=torch.tensor(1)).double()
    assert low <= drawn.min() and (drawn < high).all() and drawn.max() > high - 0.6


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.1, -0.1, 3.0, 2.0**-14, -(2.0**-24), 1e-7, 60000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_largest_number_below_a_number(dtype, value):
    nearest = torch.tensor(value, dtype=dtype)
    below = torch.nextafter(nearest, torch.tensor(-torch.inf, dtype=dtype))
    assert largest_below(value, dtype) == float(nearest if float(nearest) < value else below)


def test_integers_up_to_a_dynamic_size(delegate):
    """The size stays unrestricted: ExecuTorch cannot store a tensor with a size of at most 2^31."""
    model, shapes = Wrapped(lambda x: torch.randint(0, x.shape[0], (6,))), (({0: torch.export.Dim.DYNAMIC},),)
    seeded = seed_random_ops(torch.export.export(model, (torch.zeros(900),), dynamic_shapes=shapes))
    method = LoadedMethod(lowered(seeded))
    for x in (torch.zeros(4), torch.zeros(900)):
        (drawn,) = method.execute([x, torch.tensor(7)])
        assert drawn.equal(seeded.module()(x, seed=torch.tensor(7)))


def test_native_dropout_is_on_by_default():
    dropout = torch.export.export(Wrapped(lambda x: torch.native_dropout(x, 0.5, None)[0]), (torch.ones(1000),))
    drawn = seed_random_ops(dropout).module()(torch.ones(1000), seed=torch.tensor(1))
    assert 400 < (drawn == 0).sum() < 600


def test_given_seeds_stay_as_they_are():
    def function(x):
        return rand([5], seed=7), torch.rand_like(x), rand([5])

    seeded = seed_random_ops(torch.export.export(Wrapped(function), (torch.zeros(5),))).module()
    first, second = (seeded(torch.zeros(5), seed=torch.tensor(seed)) for seed in (1, 2))
    assert torch.equal(first[0], rand([5], seed=7)) and torch.equal(second[0], first[0])
    assert torch.equal(first[1], rand([5], seed=1)) and not torch.equal(first[2], second[2])


def test_verify_compares_a_seeded_program(delegate):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))  # in training mode
    x = torch.randn(3, 4)
    program = seed_random_ops(torch.export.export(model, (x,)))
    report = verify(lowered(program), program, (x,), {"seed": torch.tensor(3)})
    assert report.ok, str(report)


def test_a_program_without_inputs_is_seeded(delegate):
    program = seed_random_ops(torch.export.export(Wrapped(lambda: torch.randint(2, 9, (4,))), ()))
    (drawn,) = LoadedMethod(lowered(program)).execute([torch.tensor(7)])
    assert drawn.equal(program.module()(seed=torch.tensor(7)))


def branch(x):
    return torch.cond(x.sum() > 0, lambda x: torch.rand_like(x), lambda x: x.clone(), (x,))


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda x: x + 1, "got a program without random operators"),
        (lambda x: F.dropout(x, training=False), "got a program without random operators"),
        (lambda x: F.scaled_dot_product_attention(x, x, x), "got a program without random operators"),
        (lambda x: torch.poisson(x), "aten.poisson.default has no form with a seed"),
        (branch, "mlx.random_bits.default in a branch or a loop body has no form with a seed"),
        (lambda x: torch.rand(3, generator=torch.Generator()) + x[0, 0], "generator: got a torch.Generator"),
    ],
)
def test_programs_that_cannot_be_seeded_raise(function, message):
    exported = torch.export.export(Wrapped(function), (torch.rand(3, 4),))
    with pytest.raises(ValueError, match=message):
        seed_random_ops(exported)


def test_recurrent_dropout_cannot_be_seeded():
    lstm = torch.nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    with pytest.raises(ValueError, match="aten.lstm.input has no form with a seed"):
        seed_random_ops(torch.export.export(lstm, (torch.rand(3, 1, 4),)))


def test_an_input_named_seed_is_refused():
    class Model(torch.nn.Module):
        def forward(self, x, seed):
            return torch.rand_like(x) + seed

    with pytest.raises(ValueError, match="got a program with an input seed, expected another name"):
        seed_random_ops(torch.export.export(Model(), (torch.rand(3), torch.tensor(1))))
