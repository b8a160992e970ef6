"""An OpenAI-compatible server and a chat page for one language model."""

from .app import create_app
from .server import serve

__all__ = ["create_app", "serve"]
