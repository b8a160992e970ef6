"""The kernels for CUDA are used only if MLX has the version and the functions that they need."""

import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from compile_cpp import compile_cpp

SOURCE = Path(__file__).with_name("check_cuda_functions.cpp")
RUNTIME = Path(__file__).parents[2] / "backends/mlx/runtime"


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """`check(version, stubs)` returns why the functions cannot be called.

    `stubs` are the names of those that exist, as the linker has them. None of them is called. `check.names` are all.
    """
    folder = tmp_path_factory.mktemp("cuda_functions")
    (executorch,), (mlx,) = (find_spec(name).submodule_search_locations for name in ("executorch", "mlx"))
    include = f"{executorch}/include"
    compiled = compile_cpp(
        folder / "check.o",
        "-c",
        SOURCE,
        "-DC10_USING_CUSTOM_GENERATED_MACROS",
        f"-I{RUNTIME}",
        f"-I{include}",
        f"-I{include}/executorch/runtime/core/portable_type/c10",
        f"-I{mlx}/include",
    )
    libraries = (f"-L{executorch}/lib", "-lexecutorch", f"-L{mlx}/lib", "-lmlx")
    paths = (f"-Wl,-rpath,{executorch}/lib", f"-Wl,-rpath,{mlx}/lib")

    def run(mlx_version, stubs=()):
        source = folder / f"stubs{len(stubs)}.cpp"
        source.write_text("\n".join(f'extern "C" void {name}() {{}}' for name in stubs))
        program = compile_cpp(source.with_suffix(""), compiled, source, *libraries, *paths, "-rdynamic")
        return subprocess.run([program, mlx_version], capture_output=True, text=True, check=True).stdout.strip()

    source = (RUNTIME / "mlx_internals/cuda.cpp").read_text()
    looked_up = re.sub(
        r'"\s*\n\s*"|(?<=\()\s+(?=")', "", source
    )  # a long name is two literals, or on a line of its own
    run.names = re.findall(r'(?<=")_ZN3mlx4core2cu\w+|(?<=\w\(")(?:cu[A-Z]|nvrtc)\w+', looked_up)
    return run


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has CUDA")
def test_version_and_functions_are_checked(check):
    built_with = version("mlx")
    assert len(check.names) == 31
    assert "lacks the function mx::cu::Device::make_current" in check(built_with)  # a build for CPUs
    assert check("0.0.1") == f"got MLX 0.0.1, expected the version {built_with} with which this library was built"
    assert check(built_with, check.names) == ""
    others = [name for name in check.names if "nvrtcGetCUBINSize" not in name]
    assert check(built_with, others) == f"MLX {built_with} lacks the function nvrtcGetCUBINSize"
