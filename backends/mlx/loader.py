"""Finds, loads and registers the C++ delegate.

ExecuTorch keeps the first backend that is registered with a name. Its macOS wheel contains another delegate named
MLXBackend, which is registered when `executorch.runtime` is imported. The functions here load the C++ libraries by
their paths, before that import.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
import threading
import warnings
from pathlib import Path

_DELEGATE = "libmlx_delegate"
_ENGINE = "libmlx_llm_engine"
_SCALE_SEARCH = "libmlx_scale_search"
_BLAS = "libmlx_cpu_kernels.so"
_SUFFIXES = (".so", ".dylib")
# The libraries that the delegate links, each with the package whose wheel contains it.
_LINKED_LIBRARIES = (("executorch", "libexecutorch"), ("executorch", "libexecutorch_threadpool"), ("mlx", "libmlx"))
_OTHER_BACKEND_REGISTERED = 1  # a status of executorch_mlx_register, see delegate.h

_lock = threading.Lock()
_loaded: str | None = None


class OtherDelegateError(RuntimeError):
    """Another library registered an MLXBackend first. That backend runs all MLX programs of this process."""


def load_delegate(path: str | None = None) -> str:
    """Register the MLX delegate with the ExecuTorch runtime of this process. Later calls only return the path.

    Call this function before `executorch.runtime` is imported. On macOS, that import registers ExecuTorch's own MLX
    delegate, and ExecuTorch uses the one that is registered first. `from executorch_mlx import Runtime` does both in
    the right order. On Linux, this function also replaces MLX's BLAS by faster kernels. It warns if `mlx` was imported
    too early for the replacement.

    Args:
        path: The path of the delegate library. By default, the library in the folder that the environment variable
            EXECUTORCH_MLX_BUILD names, else the one in the installed package, else the one in the `build` folder of
            the repository.

    Returns:
        The path of the loaded library.

    Raises:
        FileNotFoundError: The delegate, or a library of the executorch and mlx wheels, is missing.
        RuntimeError: Another library has already registered a backend named MLXBackend, which stays registered; or
            the delegate is already loaded from another path.
    """
    global _loaded
    with _lock:
        if _loaded is not None:
            if path is not None and Path(path).resolve() != Path(_loaded):
                raise RuntimeError(f"load_delegate: path: got {path}, but {_loaded} is already loaded")
            return _loaded
        delegate = _find_delegate(path)
        has_blas = _load_blas(delegate.parent)
        for package, library in _LINKED_LIBRARIES:
            ctypes.CDLL(str(_find_in_wheel(package, library)))
        _register(delegate)
        _loaded = str(delegate)
        if has_blas:
            _warn_if_blas_is_slow(_loaded)
        return _loaded


def load_engine() -> str:
    """Register the delegate, and return the path of the library of the LLM engine, which lies beside the delegate.

    Raises:
        FileNotFoundError: The same as for `load_delegate`, or the engine is missing.
        RuntimeError: The same as for `load_delegate`.
    """
    return str(_find_library(_ENGINE, (Path(load_delegate()).parent,)))


@functools.cache
def load_scale_search() -> ctypes.CDLL | None:
    """Load the library with the kernel for quantization, and return it, or None if it is not built.

    The library is independent of the delegate. It is searched in the same folders.
    """
    try:
        return ctypes.CDLL(str(_find_library(_SCALE_SEARCH, _folders())))
    except FileNotFoundError:
        return None


def delegate_library() -> ctypes.CDLL:
    """Return the library of the delegate, also if the backend of another library is registered."""
    return ctypes.CDLL(_loaded or str(_find_delegate(None)))


def blas_name(delegate: str) -> str:
    """Return the name of the BLAS that multiplies float64 and complex matrices on a CPU.

    The name is the one that OpenBLAS reports, or "mlx" for MLX's own BLAS, or "mlx, loaded first" if libmlx was loaded
    too early to replace MLX's BLAS. In the last case, MLX's BLAS also multiplies float32 matrices.

    `delegate` is the path that `load_delegate` returned.
    """
    return library_text(delegate, "executorch_mlx_blas").strip()


def cpu_kernels(delegate: str) -> str:
    """Return the instruction set of the CPU kernels, such as "avx2", or "" on a platform without such kernels.

    `delegate` is the path that `load_delegate` returned.
    """
    return library_text(delegate, "executorch_mlx_cpu_kernels")


def library_text(library: str, name: str) -> str:
    """Return what the function `name` of a library returns: a text in C. The function takes no arguments."""
    function = getattr(ctypes.CDLL(library), name)
    function.restype = ctypes.c_char_p
    return function().decode()


def _find_delegate(path: str | None) -> Path:
    if path is not None:
        if not Path(path).exists():
            raise FileNotFoundError(f"load_delegate: {_DELEGATE} is not built (searched {path})")
        return Path(path).resolve()
    return _find_library(_DELEGATE, _folders())


def _folders() -> tuple[Path, ...]:
    """Return the folders in which libraries are searched, in order."""
    package = Path(__file__).resolve().parent
    build = os.environ.get("EXECUTORCH_MLX_BUILD")
    return (Path(build),) if build else (package / "lib", package.parent.parent / "build")


def _find_library(name: str, folders: tuple[Path, ...]) -> Path:
    candidates = [folder / (name + suffix) for folder in folders for suffix in _SUFFIXES]
    for candidate in candidates:
        if candidate.exists():
            return candidate.resolve()
    searched = ", ".join(map(str, candidates))
    raise FileNotFoundError(f"load_delegate: {name} is not built (searched {searched})")


def _find_in_wheel(package: str, library: str) -> Path:
    spec = importlib.util.find_spec(package)
    folders = [Path(folder) / "lib" for folder in (spec and spec.submodule_search_locations) or ()]
    for folder in folders:
        for suffix in _SUFFIXES:
            if (folder / (library + suffix)).exists():
                return folder / (library + suffix)
    searched = ", ".join(map(str, folders))
    raise FileNotFoundError(f"load_delegate: {library} is missing from the {package} wheel (searched {searched})")


def _load_blas(folder: Path) -> bool:
    """Load the BLAS in `folder`, and return whether there is one.

    This library is loaded with global symbols. libmlx calls the BLAS functions of the first such library that defines
    them. All libraries that `load_delegate` loads afterwards have local symbols. Otherwise torch, if it is imported
    later, would call the BLAS and LAPACK of the mlx wheel.
    """
    blas = folder / _BLAS
    if blas.exists():
        ctypes.CDLL(str(blas), mode=ctypes.RTLD_GLOBAL)
        return True
    return False


def _register(delegate: Path) -> None:
    status = ctypes.CDLL(str(delegate)).executorch_mlx_register()
    if status == _OTHER_BACKEND_REGISTERED:
        raise OtherDelegateError(
            "load_delegate: another library has already registered an MLXBackend, which stays registered. ExecuTorch "
            "on macOS registers its own when executorch.runtime is imported: write `from executorch_mlx import "
            "Runtime`, or call executorch_mlx.load_delegate(), before that import"
        )
    if status != 0:
        raise RuntimeError(f"load_delegate: ExecuTorch could not register the backend: error {status:#x}")


def _warn_if_blas_is_slow(delegate: str) -> None:
    if not blas_name(delegate).startswith("mlx,"):  # "mlx, loaded first"
        return
    cause = "mlx.core was imported" if "mlx.core" in sys.modules else "libmlx was loaded"
    warnings.warn(
        f"{cause} before the delegate: float32 products on a CPU use MLX's own BLAS, which is many times slower than "
        "the delegate's kernels; call executorch_mlx.load_delegate() before importing mlx",
        stacklevel=3,
    )
