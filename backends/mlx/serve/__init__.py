"""A server for language models with the APIs of OpenAI and Anthropic, and a chat page.

The names below are imported on first use, so that models can be loaded while the app is imported.
"""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from .app import create_app
    from .models import Models
    from .server import serve
    from .settings import Settings

_MODULES = {"Models": "models", "Settings": "settings", "create_app": "app", "serve": "server"}

__all__ = ["Models", "Settings", "create_app", "serve"]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
