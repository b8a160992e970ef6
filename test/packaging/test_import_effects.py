"""What importing the package changes in a process, and which messages of dependencies the package hides."""

import logging
import subprocess
import sys
import warnings

import pytest
from executorch_mlx.quiet import quiet_imports, quiet_lowering


def run(source: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


# The dependencies are imported first, because they may change global state.
PRINT_CHANGED_STATE = """
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
    assert run(PRINT_CHANGED_STATE) == "[]\n"


# Compares the attributes of all modules and classes of the libraries, and the tables and operators that exports use.
# A child process finds out which of their modules this package imports.
PRINT_PATCHED_NAMES = """
import os, pkgutil, sys
from importlib import import_module

LIBRARIES = ("torch", "torchao", "executorch", "transformers")

def import_ours():
    import executorch_mlx
    for found in pkgutil.walk_packages(executorch_mlx.__path__, "executorch_mlx."):
        if not found.name.startswith(("executorch_mlx.ray", "executorch_mlx.serialization.generate")):
            import_module(found.name)

def theirs():
    names = [name for name in sys.modules if name.partition(".")[0] in LIBRARIES]
    return [name for name in names if sys.modules[name] is not None]

reader, writer = os.pipe()
if os.fork() == 0:
    os.close(reader)
    import_ours()
    with open(writer, "w") as file:
        file.write("\\n".join(theirs()))
    os._exit(0)
os.close(writer)
with open(reader) as file:
    names = file.read().split()
assert "torch.export" in names and "transformers.cache_utils" in names, names
for name in names:
    import_module(name)

import torch
from torch._decomp import decomposition_table
from torch.utils import _pytree

def own(name, value):
    return getattr(value, "__module__", None) == name and isinstance(value, type)

def attributes():
    found = {}
    for name in theirs():
        module = sys.modules[name]
        for key, value in list(vars(module).items()):
            found[name, key] = value
            if own(name, value):
                found.update(((name, key, inner), v) for inner, v in vars(value).items())
    for key, overload in list(overloads()):
        found.update(((key, str(k)), v) for k, v in overload.py_kernels.items())
    for table in (decomposition_table, *vars(_pytree).values()):
        if isinstance(table, dict):
            found.update(((id(table), k), v) for k, v in table.items())
    return found

def overloads():
    for packet in vars(torch.ops.aten).values():
        if isinstance(packet, torch._ops.OpOverloadPacket):
            for overload in packet.overloads():
                yield str(getattr(packet, overload)), getattr(packet, overload)

before = attributes()
import_ours()
after = attributes()
print(len(before), [key for key, value in before.items() if key in after and after[key] is not value])
"""


def test_import_patches_nothing():
    count, changed = run(PRINT_PATCHED_NAMES).split(" ", 1)
    assert int(count) > 100_000 and changed == "[]\n"


PRINT_LOADED_LIBRARIES = """
import executorch_mlx, sys
libraries = ("libexecutorch.", "libmlx.", "libmlx_delegate.")
print([name for name in libraries if name in open("/proc/self/maps").read()], "executorch.runtime" in sys.modules)
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no /proc, from which the test reads the libraries")
def test_import_loads_no_library():
    assert run(PRINT_LOADED_LIBRARIES) == "[] False\n"


def test_runtime_is_that_of_executorch_with_the_delegate():
    source = "from executorch_mlx import Runtime; print(Runtime.get().backend_registry.is_available('MLXBackend'))"
    source += "; import executorch.runtime; print(issubclass(Runtime, executorch.runtime.Runtime))"
    assert run(source) == "True\nTrue\n"


def test_server_of_texts_imports_no_large_package():
    source = "import sys, executorch_mlx.serve.server; "
    source += "print([name for name in ('numpy', 'torch', 'transformers', 'executorch') if name in sys.modules])"
    assert run(source) == "[]\n"


def test_torch_is_imported_on_first_use():
    source = "import sys, executorch_mlx; print('torch' in sys.modules, 'LLM' in dir(executorch_mlx))"
    assert run(source) == "False True\n"


@pytest.mark.parametrize("name", ["MLXPartitioner", "Runtime", "llm.export.export_llm"])
def test_import_prints_nothing(name):
    module, _, attribute = f"executorch_mlx.{name}".rpartition(".")
    done = subprocess.run([sys.executable, "-c", f"from {module} import {attribute}"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_loading_and_running_a_model_prints_nothing(chat_program):
    source = f"from executorch_mlx import LLM; LLM.load({str(chat_program)!r}).generate('Return').__next__()"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("level, seen", [(logging.INFO, []), (logging.DEBUG, ["DEBUG"])])
def test_hidden_messages_are_logged_at_debug_level(level, seen, caplog):
    logger = logging.getLogger("torchao")
    with caplog.at_level(level, "torchao"), quiet_imports():
        logger.warning("Failed to load /x/_C_mxfp8.so: no CUDA")
    assert [record.levelname for record in caplog.records] == seen


def test_other_messages_appear(caplog):
    with quiet_imports():
        logging.getLogger("torchao").warning("torch is too old")
        logging.getLogger("torchao.quantization").warning("Failed to load a table")
    logging.getLogger("torchao").warning("Failed to load /x/_C_mxfp8.so: no CUDA")
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    assert logging.getLogger("torchao").filters == []


def test_other_warnings_appear():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with quiet_lowering():
            warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated, use another", FutureWarning)
            warnings.warn("isinstance is deprecated", FutureWarning)
        warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated, use another", FutureWarning)
    assert [str(w.message)[:11] for w in seen] == ["isinstance ", "`isinstance"]
