"""Finds, loads and registers the C++ delegate."""

import ctypes
import importlib.util
import os
import sys
import threading
import warnings
from pathlib import Path

_DELEGATE = "libmlx_delegate"
_BLAS = "libmlx_blas.so"
_SUFFIXES = (".so", ".dylib")
_OTHER_BACKEND_REGISTERED = 1  # a status of executorch_mlx_register, see delegate.h

_lock = threading.Lock()
_loaded: str | None = None


def load_delegate(path: str | None = None) -> str:
    """Registers the MLX delegate with the ExecuTorch runtime of this process. Later calls do nothing.

    On Linux it also replaces MLX's BLAS by OpenBLAS, and warns if `mlx` was imported too early for that.

    Args:
        path: The delegate library. By default the one in the folder that the environment variable
            EXECUTORCH_MLX_BUILD names, in the installed package, or in the `build` folder of the repository.

    Returns:
        The path of the loaded library.

    Raises:
        FileNotFoundError: The delegate, or a library of the executorch and mlx wheels, is missing.
        RuntimeError: Another library has registered an MLXBackend, which stays registered; or the delegate is
            already loaded from another path.
    """
    global _loaded
    with _lock:
        if _loaded is not None:
            if path is not None and Path(path).resolve() != Path(_loaded):
                raise RuntimeError(f"load_delegate: path: got {path}, but {_loaded} is already loaded")
            return _loaded
        delegate = _find_delegate(path)

        # The delegate registers with the libexecutorch that executorch.runtime loads.
        import executorch.runtime  # noqa: F401

        # libmlx calls the BLAS functions of the first loaded library that defines them.
        blas = delegate.parent / _BLAS
        if blas.exists():
            _load_globally(blas)
        _load_globally(_find_in_wheel("executorch", "libexecutorch"))
        _load_globally(_find_in_wheel("mlx", "libmlx"))
        _register(delegate)
        _loaded = str(delegate)
        if blas.exists():
            _warn_if_blas_is_slow(_loaded)
        return _loaded


def blas_name(delegate: str) -> str:
    """Returns the BLAS that multiplies matrices on a CPU.

    This is the name that OpenBLAS reports, or "mlx" for MLX's own BLAS. It is "mlx, loaded first" if libmlx was loaded
    too early for OpenBLAS to replace MLX's BLAS.

    `delegate` is the path that `load_delegate` returned.
    """
    function = ctypes.CDLL(delegate).executorch_mlx_blas
    function.restype = ctypes.c_char_p
    return function().decode().strip()


def _find_delegate(path: str | None) -> Path:
    if path is not None:
        candidates = [Path(path)]
    else:
        package = Path(__file__).resolve().parent
        build = os.environ.get("EXECUTORCH_MLX_BUILD")
        folders = (Path(build),) if build else (package / "lib", package.parent.parent / "build")
        candidates = [folder / (_DELEGATE + suffix) for folder in folders for suffix in _SUFFIXES]
    for candidate in candidates:
        if candidate.exists():
            return candidate.resolve()
    searched = ", ".join(map(str, candidates))
    raise FileNotFoundError(f"load_delegate: {_DELEGATE} is not built (searched {searched})")


def _find_in_wheel(package: str, library: str) -> Path:
    spec = importlib.util.find_spec(package)
    folders = [Path(folder) / "lib" for folder in (spec and spec.submodule_search_locations) or ()]
    for folder in folders:
        for suffix in _SUFFIXES:
            if (folder / (library + suffix)).exists():
                return folder / (library + suffix)
    searched = ", ".join(map(str, folders))
    raise FileNotFoundError(f"load_delegate: {library} is missing from the {package} wheel (searched {searched})")


def _load_globally(library: Path) -> None:
    """Loads a library so that libraries loaded later use its symbols."""
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _register(delegate: Path) -> None:
    status = ctypes.CDLL(str(delegate)).executorch_mlx_register()
    if status == _OTHER_BACKEND_REGISTERED:
        raise RuntimeError(
            "load_delegate: this process already has an MLXBackend from another library, which stays registered"
        )
    if status != 0:
        raise RuntimeError(f"load_delegate: ExecuTorch could not register the backend: error {status:#x}")


def _warn_if_blas_is_slow(delegate: str) -> None:
    if not blas_name(delegate).startswith("mlx,"):  # "mlx, loaded first"
        return
    cause = "mlx.core was imported" if "mlx.core" in sys.modules else "libmlx was loaded"
    warnings.warn(
        f"{cause} before the delegate: matrix products on a CPU use MLX's own BLAS, which is many times slower "
        "than OpenBLAS; call executorch_mlx.load_delegate() before importing mlx",
        stacklevel=3,
    )
