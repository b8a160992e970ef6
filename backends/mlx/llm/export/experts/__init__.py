"""Mixtures of experts that read only the weights of the chosen experts."""

from __future__ import annotations

from .gathered import use_gathered_experts

__all__ = ["use_gathered_experts"]
