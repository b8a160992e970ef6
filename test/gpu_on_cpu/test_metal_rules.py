"""The sources of the Metal kernels keep Metal's rules, as far as a compiler without Metal can check them.

Clang's C++ for OpenCL has the address spaces of Metal: `device`, `constant`, `threadgroup` and `thread` stand for
OpenCL's. The compiler is that of zig, which `make wheels` and the tests of the macOS wheel download.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

ZIG = Path(__file__).parents[2] / "build/macos/zig/ziglang/zig"
RULES = Path(__file__).with_name("opencl")
OPTIONS = "-x clcpp -cl-std=clc++2021 -cl-no-stdinc -target spir64 -fsyntax-only -Wno-unknown-pragmas".split()
NO_DOUBLE = ["-Xclang", "-cl-ext=-__opencl_c_fp64,-cl_khr_fp64"]
NOT_IN_METAL = r"\[[&=]?\]\s*\(|\bstatic\b|\bvirtual\b|\bnew\b|\btry\b|\bgoto\b|\bdynamic_cast\b"
# Without an address space, a pointer of OpenCL is generic, and one of Metal is an error. The compiler's own copy
# constructors have such parameters, without a name.
GENERIC = r"(?:ParmVar|Var|Field)Decl .* (?!used\b)([A-Za-z_]\w*) '[^']*__generic"

pytestmark = pytest.mark.skipif(not ZIG.exists(), reason="zig is not in build/macos")


@pytest.fixture(scope="module")
def sources(hold, tmp_path_factory):
    """The sources of all Metal kernels that their trials compile, by name."""
    folder = tmp_path_factory.mktemp("metal")
    hold("metal", "--sources", folder)
    return {path.name: path.read_text() for path in sorted(folder.glob("*.metal"))}


def errors(source: str, folder: Path) -> str:
    path = folder / "kernel.clcpp"
    path.write_text(source)
    command = [ZIG, "clang", *OPTIONS, *NO_DOUBLE, "-Xclang", "-ast-dump", f"-I{RULES}", path]
    cache = {"ZIG_GLOBAL_CACHE_DIR": str(folder), "ZIG_LOCAL_CACHE_DIR": str(folder)}
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | cache)
    generic = [f"no address space: {name}\n" for name in re.findall(GENERIC, run.stdout)]
    lacking = [f"not in Metal: {text}\n" for text in re.findall(NOT_IN_METAL, re.sub("//.*", "", source))]
    return "".join([run.stderr if run.returncode else "", *generic, *lacking])


def test_every_kernel_keeps_the_rules(sources, tmp_path):
    products = {"product", "gated_products", "product_and_sum"}
    names = {"sample_parts", "sample_rows", "norm_rope_2", *products, *(f"quantized_{name}" for name in products)}
    assert {name.partition(".")[0] for name in sources} == names
    assert {name: errors(source, tmp_path) for name, source in sources.items()} == dict.fromkeys(sources, "")


@pytest.mark.parametrize(
    "right, wrong, message",
    [
        ("GPU_GROUP_MEMORY float values[kThreads];", "float values[kThreads];", "no matching function"),
        ("own_thread = thread_position", "thread = thread_position", "expected"),
        (
            "GPU_FUNCTION float number(float x)",
            "GPU_FUNCTION float number(float x, float* p = 0)",
            "no address space: p",
        ),
        ("const float scale = gpu_divide", "const double scale = gpu_divide", "double"),
        ("const float below_one", "static const float below_one", "not in Metal: static"),
    ],
)
def test_errors_are_found(sources, right, wrong, message, tmp_path):
    source = next(source for name, source in sources.items() if name.startswith("sample_rows"))
    assert right in source
    assert message in errors(source.replace(right, wrong), tmp_path)
