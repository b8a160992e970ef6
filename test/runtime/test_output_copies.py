"""`Method.execute` copies outputs on one thread, and leaves the number of torch's threads as it was."""

import subprocess
import sys

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the copies change on Linux only")


class AddOne(torch.nn.Module):
    def forward(self, x):
        return x + 1


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A program that adds 1 to a vector of any length."""
    shapes = ({0: torch.export.Dim("length", min=2, max=1 << 22)},)
    exported = torch.export.export(AddOne(), (torch.zeros(8),), dynamic_shapes=shapes)
    path = tmp_path_factory.mktemp("program") / "add_one.pte"
    partitioners = [MLXPartitioner()]
    path.write_bytes(to_edge_transform_and_lower(exported, partitioner=partitioners).to_executorch().buffer)
    return path


START = """
import numpy, os, sys, threading, torch
from executorch_mlx import Runtime

program = Runtime.get().load_program(open(sys.argv[1], "rb").read())
method = program.load_method("forward")
torch.set_num_threads(3)

def call(length):
    x = torch.from_numpy(numpy.full(length, 2, "float32"))  # torch would fill it with several threads
    assert (method.execute([x])[0].numpy() == 3).all()

def threads_that_torch_starts():
    before = len(os.listdir("/proc/self/task"))
    torch.ones(1 << 20) + 1
    return len(os.listdir("/proc/self/task")) - before
"""


def run(script, path):
    done = subprocess.run([sys.executable, "-c", START + script, path], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and done.stdout == "done\n", done.stdout + done.stderr


@pytest.mark.parametrize("length, started", [(1 << 17, 2), ((1 << 21) + 1, 0)])
def test_copies_start_no_threads_unless_outputs_are_large(length, started, path, delegate):
    run(
        f"""
call({length})
call({length})
started = threads_that_torch_starts()
assert started == {started}, started
print("done")
""",
        path,
    )


def test_number_of_torch_threads_stays(path, delegate):
    run(
        """
call(40000)
assert torch.get_num_threads() == 3
assert threads_that_torch_starts() == 2
torch.set_num_threads(2)
try:
    method.execute([torch.ones(2, 2)])
except RuntimeError:
    assert torch.get_num_threads() == 2
else:
    assert False
counts = []
def in_another_thread():
    call(40000)
    counts.append(torch.get_num_threads())
    torch.set_num_threads(5)
    call(40000)
    counts.append(torch.get_num_threads())
thread = threading.Thread(target=in_another_thread)
thread.start()
thread.join()
assert counts == [2, 5], counts
call(40000)
assert torch.get_num_threads() == 2
print("done")
""",
        path,
    )
