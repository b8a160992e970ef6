"""A dispatch table with a missing op does not link, and each op is defined once."""

import re
import subprocess
from collections import Counter
from pathlib import Path

from compile_cpp import compile_cpp
from executorch_mlx.serialization import ir

BUILD = Path(__file__).resolve().parents[2] / "build"
OBJECTS = BUILD / "backends/mlx/runtime/CMakeFiles/mlx_delegate.dir"
OPS = {op.__name__ for op in ir.OPS.values()}


def functions(kind: str, *objects: Path) -> list[str]:
    """The ops of the functions run_*() that objects define ("T") or use ("U")."""
    symbols = subprocess.run(["nm", "-C", *objects], capture_output=True, text=True, check=True).stdout
    return re.findall(rf" {kind} executorch_mlx::run_(\w+)\(", symbols)


def test_each_op_of_the_schema_is_used_and_defined_once():
    table = OBJECTS / "program/dispatch_table.cpp.o"
    defined = functions("T", table, *(OBJECTS / "ops").glob("*.o"))
    assert set(functions("[TU]", table)) == OPS
    assert set(Counter(defined).values()) == {1} and set(defined) == OPS


def test_table_without_a_function_does_not_link(tmp_path):
    try:
        compile_cpp(tmp_path / "table.so", OBJECTS / "program/dispatch_table.cpp.o", "-shared", "-Wl,-z,defs")
    except subprocess.CalledProcessError:
        return
    raise AssertionError("linked")


def test_library_is_linked_with_this_check():
    assert "-z,defs" in (BUILD / "build.ninja").read_text()
