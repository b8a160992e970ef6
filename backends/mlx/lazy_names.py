"""Public names of a package that are imported on first use."""

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, str], quiet: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` of `package`.

    - `modules`: name → the module of the package that defines it.
    - `quiet`: the names that are imported within `quiet_imports`, because their modules import torch.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name not in quiet:
            return getattr(import_module(f".{modules[name]}", package), name)
        from .quiet import quiet_imports

        with quiet_imports():
            return getattr(import_module(f".{modules[name]}", package), name)

    return get, lambda: sorted({*vars(sys.modules[package]), *modules})
