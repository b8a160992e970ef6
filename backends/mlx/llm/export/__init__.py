"""Exports a causal language model as a `.pte` with KV caches and the sampling head."""

from ...collector import paused_collector
from ...quiet import quiet_imports

with quiet_imports(), paused_collector():
    from ..export_options import ExportOptions, HeadConfig
    from .check import ProgramCheck, VerificationError
    from .export import DTYPES, export_llm
    from .exported import ExportedLLM

__all__ = ["DTYPES", "ExportOptions", "ExportedLLM", "HeadConfig", "ProgramCheck", "VerificationError", "export_llm"]
