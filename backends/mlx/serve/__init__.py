"""OpenAI's API over one language model."""

from .app import create_app
from .server import serve

__all__ = ["create_app", "serve"]
