"""What importing the package does to the process, in a process of its own."""

import subprocess
import sys

import pytest


def run(source: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


# The dependencies come first: they may change what they like.
UNCHANGED = """
import executorch.exir
import executorch.extension.llm.cache.update_and_attend
import executorch.runtime
import logging, os, sys, torch, torchao.quantization.quant_primitives, warnings
from torch.utils import _pytree as pytree

def state():
    return {
        "pytree nodes": dict(pytree.SUPPORTED_NODES),
        "pytree serialized types": dict(pytree.SUPPORTED_SERIALIZED_TYPES),
        "pytree type names": dict(pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE),
        "environment": dict(os.environ),
        "warning filters": list(warnings.filters),
        "log handlers": list(logging.root.handlers),
        "default dtype": torch.get_default_dtype(),
        "random state": torch.get_rng_state().tolist(),
        "sys.path": list(sys.path),
    }

before = state()
import executorch_mlx.partitioner
import executorch_mlx.custom_ops.official
after = state()
print([name for name in before if before[name] != after[name]])
"""


def test_import_changes_no_global_state():
    assert run(UNCHANGED) == "[]\n"


LOADED = """
import executorch_mlx, sys
libraries = ("libexecutorch.", "libmlx.", "libmlx_delegate.")
print([name for name in libraries if name in open("/proc/self/maps").read()], "executorch.runtime" in sys.modules)
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no /proc, from which the test reads the libraries")
def test_import_loads_no_library():
    assert run(LOADED) == "[] False\n"


def test_runtime_is_that_of_executorch_with_the_delegate():
    source = "from executorch_mlx import Runtime; print(Runtime.get().backend_registry.is_available('MLXBackend'))"
    source += "; import executorch.runtime; print(Runtime is executorch.runtime.Runtime)"
    assert run(source) == "True\nTrue\n"


def test_torch_is_imported_on_first_use():
    source = "import sys, executorch_mlx; print('torch' in sys.modules, 'LLM' in dir(executorch_mlx))"
    assert run(source) == "False True\n"
