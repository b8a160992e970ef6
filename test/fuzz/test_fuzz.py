"""A short run of the compiler's fuzzer. `test/fuzz_compiler.py` runs any number of programs."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fuzz.check import WrongAnswer, check, compare
from fuzz.near_misses import FAMILIES
from fuzz.programs import EXTENTS, Input, Program, Statement
from fuzz.random_graphs import programs

BATCH = 20


def short(examples: int):
    """Settings of a run that is the same each time."""
    return settings(max_examples=examples, deadline=None, database=None, derandomize=True,
                    phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("family", FAMILIES)
def test_programs_near_a_fusion_equal_eager_torch(delegate, family):
    @short(3)
    @given(st.lists(FAMILIES[family], min_size=BATCH, max_size=BATCH))
    def generated(batch):
        check(batch)

    generated()


def test_random_graphs_equal_eager_torch(delegate):
    @short(4)
    @given(st.lists(programs(), min_size=BATCH, max_size=BATCH))
    def generated(batch):
        check(batch)

    generated()


def example() -> Program:
    x = Input("x", (2, "n"), torch.float32)
    return Program((x,), (Statement("y", "x * 3 + 1"), Statement("z", "y.sum(-1)")), ("y", "z"))


def test_wrong_values_are_found():
    program = example()
    y, z = program.run(program.arguments(EXTENTS[0]))
    compare(program, EXTENTS[0], [y, z])
    with pytest.raises(WrongAnswer, match="output 1 at n = 7: 1 of 2 elements differ"):
        compare(program, EXTENTS[0], [y, z + torch.tensor([0.0, 0.01])])
    with pytest.raises(WrongAnswer, match="got torch.float16"):
        compare(program, EXTENTS[0], [y.half(), z])


def test_source_of_a_program_runs(capsys):
    exec(example().source(), {})
    assert capsys.readouterr().out.startswith("(tensor([[")
