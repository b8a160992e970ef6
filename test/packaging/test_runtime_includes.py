"""Outside `ops`, the C++ runtime uses no CPU kernels directly. Only `mlx_internals` uses MLX's private interfaces."""

import re
from pathlib import Path

import pytest

RUNTIME = Path(__file__).resolve().parents[2] / "backends" / "mlx" / "runtime"
OPS = RUNTIME / "ops"
SHARED = ("cpu_kernels.h",)  # of ops/cpu
# What the rest uses in place of the kernels: when a kernel runs, and loops on its threads.
DOORS = {RUNTIME / "memory" / name for name in ("kernel_result.h", "parallel.h")}
KERNELS = RUNTIME / "kernels/cpu"
INTERNALS = RUNTIME / "mlx_internals"
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


# Members of MLX's classes that are no part of its documented interface.
PRIVATE = re.compile(
    r"\ballocator::|\bscheduler::|\bcu::(?!is_available)"
    r"|\b(?:data_shared_ptr|copy_shared_buffer|set_data|set_status|attach_event|overwrite_descriptor|siblings)\("
)


def files_outside(*folders: Path) -> list[Path]:
    files = [*RUNTIME.rglob("*.h"), *RUNTIME.rglob("*.cpp")]
    return sorted(file for file in files if not {*folders} & {*file.parents})


def neutral_files() -> list[Path]:
    return [file for file in files_outside(OPS, KERNELS, INTERNALS) if file not in DOORS]


def violations(source: str, folder: Path = RUNTIME) -> list[str]:
    """The includes of MLX's backends, of kernels, and of headers in `ops/cpu` other than SHARED.

    `source` is the content of a file in `folder`.
    """
    found = []
    for include in INCLUDE.findall(source):
        # The compiler searches the folder of the file and RUNTIME.
        candidates = ((base / include).resolve() for base in (folder, RUNTIME))
        header = next((path for path in candidates if path.exists()), None)
        is_in_cpu = header is not None and bool({OPS / "cpu", KERNELS} & {*header.parents})
        if include.startswith(("mlx/backend/", "mlx/scheduler")) or (is_in_cpu and header.name not in SHARED):
            found.append(include)
    return found


@pytest.mark.parametrize("file", neutral_files(), ids=lambda file: str(file.relative_to(RUNTIME)))
def test_runtime_includes_are_device_neutral(file):
    assert violations(file.read_text(), file.parent) == []


@pytest.mark.parametrize("file", files_outside(KERNELS, INTERNALS), ids=lambda file: str(file.relative_to(RUNTIME)))
def test_private_members_of_mlx_are_used_in_one_folder(file):
    code = re.sub(r"//.*", "", file.read_text()).replace("internals::siblings(", "")
    assert PRIVATE.findall(code) == []


def test_files_outside_ops_are_checked():
    assert len(neutral_files()) > 20


@pytest.mark.parametrize(
    "source",
    [
        "#include <mlx/backend/cpu/encoder.h>",
        "# include <mlx/backend/cuda/cuda.h>",
        '#pragma once\n#include "mlx/backend/metal/metal.h"',
        '#include "ops/cpu/attention_arrays.h"',
        '#include "../kernels/cpu/matmul.h"',
    ],
)
def test_device_specific_include_is_found(source):
    assert len(violations(source, RUNTIME / "ops")) == 1


@pytest.mark.parametrize("source", ["#include <mlx/mlx.h>", '#include "ops/cpu/cpu_kernels.h"', "#include <vector>"])
def test_neutral_include_is_accepted(source):
    assert violations(source) == []
