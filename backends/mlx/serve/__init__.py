"""A server for language models with the APIs of OpenAI and Anthropic, and a chat page."""

from .app import create_app
from .models import Models
from .server import serve
from .settings import Settings

__all__ = ["Models", "Settings", "create_app", "serve"]
