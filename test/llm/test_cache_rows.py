"""The calls of a program with rows write the KV caches in place."""

import pytest
from cache_memory import memory_growth, two_layers
from executorch_mlx.llm.export import HeadConfig, export_llm
from row_programs import RowProgram

CAPACITY, ROWS = 4096, 4
BUFFER_BYTES = ROWS * CAPACITY * 2 * 64 * 4  # each of the four buffers
HEAD = HeadConfig(min_p=False, penalties=8)
CALLS = {
    "prefill": lambda program: program.prefill([1, 2], 5, 2),
    "decode": lambda program: program.decode([(1, 3, 0), (2, 5, 3), (3, 4, 1), (4, 4000, 2)]),
    "decode, filters": lambda program: program.decode([(1, 3, 0), (2, 5, 3)], temperature=[0.9, 0.0], top_k=[40, 0]),
    "verify": lambda program: program.verify([1, 2, 3], 5, 1, temperature=0.9, top_p=0.9),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("cache") / "model.pte"
    export_llm(two_layers(CAPACITY), max_context_len=CAPACITY, batch=ROWS, head=HEAD, verify=False).save(path)
    program = RowProgram(path, HEAD, 128)
    for call in CALLS.values():  # the first call copies the buffers
        call(program)
    return program


@pytest.mark.parametrize("name", CALLS)
def test_a_call_does_not_copy_the_caches(program, name):
    CALLS[name](program)
    assert max(memory_growth(lambda: CALLS[name](program))) < BUFFER_BYTES / 2
