"""An OpenAI-compatible server and a chat page for language models."""

from .app import create_app
from .models import Models
from .server import serve
from .settings import Settings

__all__ = ["Models", "Settings", "create_app", "serve"]
