"""Finds, loads and registers the C++ delegate."""

import ctypes
import importlib.util
import threading
from pathlib import Path

_NAME = "libmlx_delegate"
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
    one in a repository's build folder. Calling it again does nothing. Raises
    FileNotFoundError where there is no library, and RuntimeError if the process
    already has an MLXBackend of somebody else's, which stays as it is.
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
        return _loaded
