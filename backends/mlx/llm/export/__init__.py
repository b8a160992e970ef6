"""Exports a causal language model as a `.pte` with KV caches and the sampling head."""

from ...collector import paused_collector
from ...quiet import quiet_imports

with quiet_imports(), paused_collector():
    from .check import ProgramCheck, VerificationError
    from .export import DTYPES, export_llm
    from .exported import ExportedLLM
    from .head_config import HeadConfig

__all__ = ["DTYPES", "ExportedLLM", "HeadConfig", "ProgramCheck", "VerificationError", "export_llm"]
