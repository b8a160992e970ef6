"""NVRTC compiles every CUDA kernel of the runtime. Needs no GPU, but NVIDIA's wheel of NVRTC (tools/setup.sh nvrtc)."""

import ctypes
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
ARCHITECTURES = ("sm_80", "sm_90")  # without and with the kernels' code for an early start
if not (library := next((BUILD / "nvrtc").glob("**/libnvrtc.so.*"), None)):
    pytest.skip("no NVRTC in build/nvrtc", allow_module_level=True)
if "EXECUTORCH_MLX_BUILD" in os.environ:
    pytest.skip("only the build in build/ has the program that writes the sources", allow_module_level=True)


@pytest.fixture(scope="module")
def sources(cuda_kernel_sources, tmp_path_factory) -> dict[str, list[str]]:
    """The sources of each kernel, by the name of the kernel."""
    folder = tmp_path_factory.mktemp("sources")
    subprocess.run([cuda_kernel_sources, folder], check=True)
    sources: dict[str, list[str]] = {}
    for path in sorted(folder.iterdir()):
        sources.setdefault(path.name.partition(".")[0], []).append(path.read_text())
    return sources


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    ctypes.CDLL(next(library.parent.glob("libnvrtc-builtins.so.*")), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(library)


def compile_kernel(nvrtc, name: str, source: str, architecture: str) -> str:
    """Compile with the options of mlx_internals/cuda.cpp. Returns the compiler's messages, "" if there are none."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert not nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
    options = (ctypes.c_char_p * 2)(f"--gpu-architecture={architecture}".encode(), b"--std=c++20")
    failed = nvrtc.nvrtcCompileProgram(program, len(options), options)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return log.value.decode() if failed else ""


def test_sources_of_all_kernels_are_written(sources):
    """If a kernel is missing, `cuda_kernel_sources.cpp` does not call the function that uses it."""
    text = "".join(path.read_text() for path in (ROOT / "backends/mlx/runtime/gpu").glob("*.cpp"))
    named = set(re.findall(r'Kernel(?:sOfSpans)?(?: \w+)?\(\s*"(\w+)"', text))
    products = {"gated_products", "product_and_sum", *(f"products_of_row_{count}" for count in range(1, 5))}
    composed = {"update_positions", "dequantize_to_workspace", *products, *(f"quantized_{name}" for name in products)}
    assert named | composed == sources.keys()
    constants = ("kSpans = 1", "kSpans = 8", "kNorm = 0", "kNorm = 1", "kHasOffset = 0", "kHasOffset = 1")
    assert all(any(constant in source for source in sources["attention_step"]) for constant in constants)
    for name in ("products_of_row_1", "rms_norms"):
        for constant in ("kHasAlignedNorm = 0", "kHasAlignedNorm = 1"):
            assert any("kNorm = 1" in source and constant in source for source in sources[name])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles(sources, nvrtc, architecture):
    errors = {
        name: error
        for name, texts in sources.items()
        for text in texts
        if (error := compile_kernel(nvrtc, name, text, architecture))
    }
    assert not errors


def test_an_error_is_found(sources, nvrtc):
    source = sources["silu_multiply"][0].replace("expf", "no_such_function")
    assert "no_such_function" in compile_kernel(nvrtc, "silu_multiply", source, ARCHITECTURES[0])
