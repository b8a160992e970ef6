"""Runs a finished program and eager torch on the same inputs, and compares their values."""

from .report import Departure, OutputCheck, VerificationReport
from .verify import verify

__all__ = ["OutputCheck", "Departure", "VerificationReport", "verify"]
