"""Finds, loads and registers the C++ delegate."""

import ctypes
import importlib.util
import sys
import threading
import warnings
from pathlib import Path

_NAME = "libmlx_delegate"
_BLAS = "libmlx_blas.so"
_FOREIGN_BACKEND = 1

_lock = threading.Lock()
_loaded: str | None = None


def _candidates() -> list[Path]:
    package = Path(__file__).resolve().parent
    folders = (package / "lib", package.parent.parent / "build")
    return [folder / f"{_NAME}{suffix}" for folder in folders for suffix in (".so", ".dylib")]


def _wheel_library(package: str, name: str) -> Path:
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in places:
        for suffix in (".so", ".dylib"):
            path = Path(place) / "lib" / (name + suffix)
            if path.exists():
                return path
    raise FileNotFoundError(f"load_delegate: {name} is not in the {package} wheel (looked in {places})")


def load_delegate(path: str | None = None) -> str:
    """Registers the MLX delegate with ExecuTorch's runtime and returns the library's path.

    `path` names the library; by default it is the one in the package, or else the
    one in a repository's build folder. Calling it again does nothing. On Linux it
    also puts OpenBLAS in the place of MLX's own BLAS, and warns where `mlx` was
    imported too early for that. Raises FileNotFoundError where there is no library,
    and RuntimeError if the process already has an MLXBackend of somebody else's,
    which stays as it is.
    """
    global _loaded
    with _lock:
        if _loaded is not None:
            if path is not None and Path(path).resolve() != Path(_loaded):
                raise RuntimeError(f"load_delegate: {_loaded} is loaded already, {path} was asked for")
            return _loaded
        candidates = [Path(path)] if path is not None else _candidates()
        found = next((candidate.resolve() for candidate in candidates if candidate.exists()), None)
        if found is None:
            looked = ", ".join(map(str, candidates))
            raise FileNotFoundError(f"load_delegate: {_NAME} is not built (looked for {looked})")

        # The registry the delegate enters has to be the one that Runtime reads.
        import executorch.runtime  # noqa: F401

        # The first library that defines a symbol answers for it: ours before libmlx's own.
        forwarding = found.parent / _BLAS
        if forwarding.exists():
            ctypes.CDLL(str(forwarding), mode=ctypes.RTLD_GLOBAL)
        for package, name in (("executorch", "libexecutorch"), ("mlx", "libmlx")):
            ctypes.CDLL(str(_wheel_library(package, name)), mode=ctypes.RTLD_GLOBAL)
        status = ctypes.CDLL(str(found)).executorch_mlx_register()
        if status == _FOREIGN_BACKEND:
            raise RuntimeError(
                "load_delegate: this process already has an MLXBackend that is not ours; "
                "it stays registered and runs the programs"
            )
        if status != 0:
            raise RuntimeError(f"load_delegate: ExecuTorch refused the backend with error {status:#x}")
        _loaded = str(found)
        if forwarding.exists():
            _warn_of_slow_products(_loaded)
        return _loaded


def blas(library: str) -> str:
    """The BLAS that products on a CPU come to, of a delegate that is loaded: OpenBLAS's
    name for itself, or "mlx" and why for the one that MLX brings."""
    name = ctypes.CDLL(library).executorch_mlx_blas
    name.restype = ctypes.c_char_p
    return name().decode().strip()


def _warn_of_slow_products(library: str) -> None:
    if not blas(library).startswith("mlx,"):
        return
    importer = "mlx.core was imported" if "mlx.core" in sys.modules else "libmlx was loaded"
    warnings.warn(
        f"{importer} before the delegate: products on a CPU keep MLX's own BLAS, which is many "
        "times slower than OpenBLAS; call executorch_mlx.load_delegate() before importing mlx",
        stacklevel=3,
    )
