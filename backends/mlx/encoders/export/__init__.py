"""Exports encoders: models that turn texts or pictures into vectors, scores or classes."""

from ...collector import paused_collector
from ...quiet import quiet_imports

with quiet_imports(), paused_collector():
    from .checkpoint import EncoderFolder, find_encoder, judge
    from .export import ExportedEncoder, export_encoder

__all__ = ["EncoderFolder", "ExportedEncoder", "export_encoder", "find_encoder", "judge"]
