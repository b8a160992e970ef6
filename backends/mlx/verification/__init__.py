"""Run a finished program beside eager torch and judge the differences."""

from .report import CallCheck, Departure, VerificationReport
from .verify import verify

__all__ = ["CallCheck", "Departure", "VerificationReport", "verify"]
