"""Programs of low priority run on threads that yield to others. Linux only: each thread has its own nice value."""

import os
import subprocess
import sys

from engine_rows import LONG, one_row, path  # noqa: F401 (fixtures)

PROGRAM = """
import os, sys
from pathlib import Path
from executorch_mlx.llm import LLM

def nice_values():
    process = os.getpriority(os.PRIO_PROCESS, os.getpid())
    return [os.getpriority(os.PRIO_PROCESS, int(task.name)) - process for task in Path("/proc/self/task").iterdir()]

def tokens(llm):
    return [token.id for token in llm.generate({prompt}, max_new_tokens=8, ignore_eos=True)]

with LLM.load(sys.argv[1]) as llm:
    expected = tokens(llm)
assert set(nice_values()) == {{0}}, nice_values()
usual = len(nice_values())
with LLM.load(sys.argv[1], low_priority=True) as llm:
    assert tokens(llm) == expected
    values = nice_values()
    # All threads that the second model has started: the engine's, those of the streams, and a second pool for kernels.
    assert values.count(10) == len(values) - usual >= 4, (usual, values)
print("ok")
"""


def test_threads_of_low_priority_yield(path):
    command = [sys.executable, "-c", PROGRAM.format(prompt=LONG), str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "3"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.stdout == "ok\n", result.stderr
