"""Exports a speech model as a `.pte` that takes samples and returns tokens."""

from ....collector import paused_collector
from ....quiet import quiet_imports

with quiet_imports(), paused_collector():
    from .export import export_speech, is_speech

__all__ = ["export_speech", "is_speech"]
