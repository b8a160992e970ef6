"""The KV cache of a program: updates, bounds, and steps that write it in place."""

import pytest
import torch
from cache_memory import memory_growth, two_layers
from executorch_mlx.llm.export import HeadConfig, export_llm
from row_programs import RowProgram

CAPACITY = 16384
BUFFER_BYTES = CAPACITY * 2 * 64 * 4  # each of the four buffers


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("cache") / "model.pte"
    head = HeadConfig(min_p=False)
    export_llm(two_layers(CAPACITY), max_context_len=CAPACITY, head=head, speculation=False, verify=False).save(path)
    program = RowProgram(path, head, 128)
    program.prefill([1, 2, 3], 0)  # the first call copies the buffers
    return program


# With filters, the step contains branches.
@pytest.mark.parametrize("parameters", [{}, {"temperature": 1.0, "top_k": 40, "top_p": 0.9}])
def test_a_step_does_not_copy_the_cache(program, parameters):
    program.prefill([1], 3, **parameters)
    assert max(memory_growth(lambda: program.prefill([1], 4, **parameters))) < BUFFER_BYTES / 2


def test_eager_update_writes_only_its_positions():
    cache, update = torch.zeros(1, 2, 6, 3), torch.ones(1, 2, 2, 3)
    updated = torch.ops.mlx.cache_update(cache, update, torch.tensor([3]))
    assert updated[:, :, 3:5].eq(1).all() and updated.sum() == update.sum()
    assert cache.eq(0).all()


@pytest.mark.parametrize(
    "start, message", [(-1, "start: got -1, expected"), (5, "got a capacity of 6 positions, expected at least 7")]
)
def test_eager_update_checks_its_positions(start, message):
    cache, update = torch.zeros(1, 2, 6, 3), torch.ones(1, 2, 2, 3)
    with pytest.raises(ValueError, match=message):
        torch.ops.mlx.cache_update(cache, update, torch.tensor([start]))
