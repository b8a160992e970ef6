"""A server for language models with the APIs of OpenAI and Anthropic, and a chat page.

The names below are imported on first use, so that models can be loaded while the app is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import create_app
    from .models import Models
    from .server import serve
    from .settings import Settings

_MODULES = {"Models": "models", "Settings": "settings", "create_app": "app", "serve": "server"}

__all__ = ["Models", "Settings", "create_app", "serve"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
