"""Exports a speech model as a `.pte` that takes samples and returns tokens."""

from ...quiet import quiet_imports

with quiet_imports():
    from .export import export_speech, is_speech

__all__ = ["export_speech", "is_speech"]
