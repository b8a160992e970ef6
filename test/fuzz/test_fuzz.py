"""A short run of the compiler's fuzzer. `test/fuzz_compiler.py` runs any number of programs."""

import pytest
import torch
from broken_lowering import changed_field
from executorch_mlx.serialization import ir
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fuzz.check import Counts, WrongAnswer, check, compare
from fuzz.direct import DirectRoute, PortableRoute
from fuzz.exported import ExportedRoute
from fuzz.gradients import GradientProgram, GradientRoute, gradient_programs
from fuzz.layers import LAYERS
from fuzz.near_misses import FAMILIES
from fuzz.programs import EXTENTS, Input, Program, Statement
from fuzz.random_graphs import programs

BATCH = 20


def short(examples: int):
    """Return the settings of a deterministic run with a number of examples. Here, an example is a list of programs."""
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_programs_near_a_fusion_equal_eager_torch(delegate, family):
    @short(2)
    @given(st.lists(FAMILIES[family], min_size=BATCH, max_size=BATCH))
    def generated(batch):
        check(batch)

    generated()


@pytest.mark.parametrize("family", LAYERS)
def test_layers_near_a_fusion_of_the_runtime_equal_eager_torch(delegate, family):
    counts = Counts()

    @short(1)
    @given(st.lists(LAYERS[family], min_size=12, max_size=12))
    def generated(batch):
        check(batch, counts, route=ExportedRoute if any(p.state for p in batch) else DirectRoute)

    generated()
    assert counts.compared >= 6


def test_random_graphs_equal_eager_torch(delegate):
    @short(2)
    @given(st.lists(programs(), min_size=BATCH, max_size=BATCH))
    def generated(batch):
        check(batch)

    generated()


def test_gradients_of_random_graphs_equal_eager_torch(delegate):
    counts = Counts()

    @short(1)
    @given(st.lists(gradient_programs(), min_size=6, max_size=6))
    def generated(batch):
        check(batch, counts, route=GradientRoute)

    generated()
    assert counts.compared > 0


def test_wrong_gradients_are_found():
    x = Input("x", (2, 3), torch.float32)
    program = GradientProgram((x,), (Statement("y", "x.sin() * x"),), ("y",))
    loss, gradient = program.run(EXTENTS[0])
    compare(program, EXTENTS[0], [loss, gradient])
    with pytest.raises(WrongAnswer, match="output 1"):
        compare(program, EXTENTS[0], [loss, gradient * 1.0001])


@pytest.mark.parametrize("family", FAMILIES)
def test_portable_programs_equal_eager_torch(family):
    """As ExecuTorch's own MLX delegate runs them."""

    @short(1)
    @given(st.lists(FAMILIES[family], min_size=BATCH, max_size=BATCH))
    def generated(batch):
        check(batch, route=PortableRoute)

    generated()


def example() -> Program:
    x = Input("x", (2, "n"), torch.float32)
    return Program((x,), (Statement("y", "x * 3 + 1"), Statement("z", "y.sum(-1)")), ("y", "z"))


def cancelling() -> Program:
    """Sum whose terms cancel: 1 + erf(x) in GELU, and the products in attention."""
    q, k, v = (Input(name, (1, 2, 7, 4), torch.float32) for name in "qkv")
    statements = Statement("y", "F.gelu(q - 1.5)"), Statement("z", "F.scaled_dot_product_attention(q, k, v) @ v.mT")
    return Program((q, k, v), statements, ("y", "z"))


def test_rounding_of_sums_that_cancel_is_no_finding():
    """If terms cancel, their rounding errors can be far larger than the sum."""
    program = cancelling()
    arguments = program.arguments(EXTENTS[0])
    y, z = (output.float() for output in program.function()(*[a.double() for a in arguments]))
    q = arguments[0] - 1.5
    y = 0.5 * q * (1 + torch.erf(q * 0.70710678))  # another order of the operations
    compare(program, EXTENTS[0], [y, z])
    with pytest.raises(WrongAnswer, match="output 0"):
        compare(program, EXTENTS[0], [y + 1e-5, z])
    with pytest.raises(WrongAnswer, match="output 1"):
        compare(program, EXTENTS[0], [y, z + 3e-4])


def test_wrong_values_are_found():
    program = example()
    y, z = program.run(EXTENTS[0])
    compare(program, EXTENTS[0], [y, z])
    with pytest.raises(WrongAnswer, match="output 1 at n = 7: 1 of 2 elements differ"):
        compare(program, EXTENTS[0], [y, z + torch.tensor([0.0, 0.01])])
    with pytest.raises(WrongAnswer, match="got torch.float16"):
        compare(program, EXTENTS[0], [y.half(), z])


@pytest.mark.parametrize("length", [7, "n"])
@pytest.mark.parametrize("route", [DirectRoute, ExportedRoute])
def test_programs_that_executorch_refuses_are_counted(delegate, route, length):
    """torch.export turns `w[i]` with `i` of rank 0 into a select by `i.item()`, on which ExecuTorch's passes fail."""
    w = "torch.ops.torchao.dequantize_affine(q, [1, 32], scale, None, torch.int8, -128, 127)"
    program = Program(
        (Input("i", (), torch.int64, 0, 8), Input("x", (length,), torch.float32)),
        (Statement("w", w), Statement("y", "w[i]"), Statement("z", "x + 1")),
        ("y", "z"),
        (("q", "torch.arange(512).reshape(8, 64).to(torch.int8)"), ("scale", "torch.ones(8, 2)")),
    )
    counts = Counts()
    check([program, example()], counts, route=route)
    assert (counts.programs, counts.compared, counts.not_exported.total()) == (2, 1, 1)


def test_source_of_a_program_runs(capsys):
    exec(example().source(), {})
    assert capsys.readouterr().out.startswith("(tensor([[")


# A field of a fused node for each family, and a function that changes its value.
BROKEN = {
    "rms_norm": (ir.RMSNormNode, "eps", lambda eps: eps + 0.001),
    "layer_norm": (ir.LayerNormNode, "eps", lambda eps: eps + 0.001),
    "gelu": (ir.GeluNode, "approximate", {"none": "tanh", "tanh": "none"}.get),
    "rope": (ir.RopeNode, "traditional", lambda traditional: True),
    "attention": (ir.SdpaNode, "scale", lambda scale: scale * 1.001),
    "linear": (ir.AddmmNode, "alpha", lambda alpha: 1.001),
}


@pytest.mark.parametrize("family", BROKEN)
def test_broken_fusion_is_found(delegate, family):
    """A fusion with a slightly wrong constant gives wrong answers for some programs of its family."""
    failures = []

    @short(8 if family in ("rope", "rms_norm") else 2)  # few of their programs match the fusion
    @given(st.lists(FAMILIES[family], min_size=BATCH, max_size=BATCH))
    def generated(batch):
        check(batch, report=failures.append, route=DirectRoute)

    with changed_field(*BROKEN[family]):
        generated()
    assert any(isinstance(failure, WrongAnswer) for failure in failures)
