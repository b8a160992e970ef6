"""Weights are used in the mapped file by a GPU that takes whole pages of memory, as Metal does.

No Apple GPU is needed: metal_like_allocator.cpp takes the place of MLX's CPU allocator, and behaves like the one for
Metal.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import executorch.runtime
import pytest
import small_llm
import torch
from compile_cpp import compile_cpp
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from executorch_mlx.inspect.pte import read_pte
from executorch_mlx.llm import LLM

HERE = Path(__file__).resolve().parent
PAGE = 16 << 10
MEGABYTE = 1 << 20
PROMPT = [5, 17, 200, 3, 77]
SAMPLED = dict(max_new_tokens=12, temperature=0.8, seed=3, ignore_eos=True)

if sys.platform != "linux":
    pytest.skip("replaces MLX's allocator by LD_PRELOAD", allow_module_level=True)

COUNTS = """
import ctypes, gc, json, os, sys
allocator = ctypes.CDLL(os.environ["LD_PRELOAD"])
def counts():
    names = ("mapped", "mapped_buffers", "refused", "large_buffers")
    functions = [getattr(allocator, "metal_like_" + name) for name in names]
    for function in functions:
        function.restype = ctypes.c_size_t
    return {name: function() for name, function in zip(names, functions)}
def dirty():
    # Pages of the file that the test has just written count as Private_Dirty until the system writes them to the disk.
    lines = open("/proc/self/smaps").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024
"""
RUN_LLM = (
    COUNTS
    + f"""
from executorch_mlx.llm import LLM
before = counts()
assert before["mapped"] == before["refused"] == 0
llm = LLM.load(sys.argv[1])
loaded = counts()
tokens = llm.generate({PROMPT}, **{SAMPLED}).result().tokens
del llm
gc.collect()
print(json.dumps(loaded | dict(tokens=tokens, left=counts()["mapped_buffers"])))
"""
)
RUN_TABLE = (
    COUNTS
    + """
import torch
from loaded_method import LoadedMethod
LoadedMethod(sys.argv[2]).execute([torch.tensor([7])])
before = dirty()
method = LoadedMethod(sys.argv[1])
(row,) = method.execute([torch.tensor([7])])
print(json.dumps(counts() | dict(dirty=dirty() - before, row=row.flatten().tolist())))
"""
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """`run(code, *arguments)` runs Python with the allocator, and returns what it prints."""
    include = Path(executorch.runtime.__file__).parents[2] / "mlx" / "include"
    library = tmp_path_factory.mktemp("allocator") / "libmetal_like.so"
    compile_cpp(library, HERE / "metal_like_allocator.cpp", "-shared", "-fPIC", f"-I{include}")

    def run(code: str, *arguments: Path) -> dict:
        environment = os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": str(HERE.parent)}
        command = [sys.executable, "-c", code, *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def large_constants(path: Path) -> list[int]:
    """The sizes of the constants of a program that have 16 KiB or more."""
    return [size for size in read_pte(path).named_data.values() if size >= PAGE]


@pytest.mark.parametrize("quantize", ["none", "int4"])
def test_all_large_constants_of_a_language_model_are_mapped(run, tmp_path_factory, quantize):
    path = small_llm.shared(tmp_path_factory, f"mapped-{quantize}", quantize=quantize)
    sizes = large_constants(path)
    assert sizes
    got = run(RUN_LLM, path)
    assert (got["mapped_buffers"], got["refused"], got["left"]) == (len(sizes), 0, 0)
    assert sum(sizes) <= got["mapped"] < sum(sizes) + 2 * PAGE * len(sizes)
    assert got["tokens"] == LLM.load(path).generate(PROMPT, **SAMPLED).result().tokens


class Table(torch.nn.Module):
    def __init__(self, rows: int):
        super().__init__()
        self.table = torch.nn.Embedding(rows, 1024)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.table(index)


def write_table(path: Path, rows: int) -> Table:
    module = Table(rows).eval()
    exported = torch.export.export(module, (torch.tensor([7]),))
    edge = to_edge_transform_and_lower(exported, partitioner=[MLXPartitioner()])
    path.write_bytes(edge.to_executorch().buffer)
    return module


def test_mapped_weights_are_no_dirty_memory(run, tmp_path):
    """Also in a file that does not align them to pages."""
    large, small = tmp_path / "large.pte", tmp_path / "small.pte"
    table = write_table(large, 8192).table.weight
    write_table(small, 16)
    offset = next(iter(read_pte(large).named_data_offsets.values()))
    assert offset % PAGE != 0
    got = run(RUN_TABLE, large, small)
    assert got["row"] == table[7].tolist()
    assert got["mapped"] >= 32 * MEGABYTE and got["refused"] == 0
    assert got["dirty"] < 4 * MEGABYTE
