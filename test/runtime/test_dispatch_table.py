"""A dispatch table with a duplicate or a missing op row does not compile."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

BUILD = Path(__file__).resolve().parents[2] / "build"

SOURCE = """
#include "program/dispatch_table.h"

namespace executorch_mlx {{
void run(const void*, Context&) {{}}
#define ROW(Op) OpRow{{fb::OpNode::Op, #Op, run}}
constexpr OpRow kFirst[] = {{ROW(AddNode), ROW(ExpNode)}};
constexpr OpRow kSecond[] = {{ROW({op})}};
{table}
}}
"""

TABLE = "constexpr DispatchTable kTable = make_table<kFirst, kSecond>();"
DUPLICATE, MISSING = "an op has two rows in the dispatch table", "an op of the schema has no row in the dispatch table"


def compile_command() -> list[str]:
    """The command that compiled the real table, without its precompiled header, which includes all of MLX."""
    commands = json.loads((BUILD / "compile_commands.json").read_text())
    (command,) = [c["command"] for c in commands if c["file"].endswith("runtime/program/dispatch_table.cpp")]
    compiler, *arguments = shlex.split(command)
    kept = []
    for argument, following in zip(arguments, arguments[1:]):
        if argument in ("-isystem", "-isysroot"):
            kept += [argument, following]
        elif argument.startswith(("-D", "-I", "-std")):
            kept.append(argument)
    return [compiler, *kept, "-fsyntax-only", "-x", "c++", "-"]


@pytest.mark.parametrize(
    "op, table, message",
    [("SinNode", "", None), ("AddNode", TABLE, DUPLICATE), ("ExpNode", TABLE, DUPLICATE), ("SinNode", TABLE, MISSING)],
    ids=["no table", "duplicate first row", "duplicate second row", "missing"],
)
def test_table_needs_exactly_one_row_per_op(op, table, message):
    source = SOURCE.format(op=op, table=table)
    result = subprocess.run(compile_command(), input=source, cwd=BUILD, capture_output=True, text=True)
    if message is None:
        assert result.returncode == 0, result.stderr
        return
    assert result.returncode != 0
    assert message in result.stderr
    assert (DUPLICATE in result.stderr) == (message == DUPLICATE)
    assert message != DUPLICATE or f"OpNode::{op}" in result.stderr
