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
    source += "; import executorch.runtime; print(Runtime is executorch.runtime.Runtime)"
    assert run(source) == "True\nTrue\n"


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
