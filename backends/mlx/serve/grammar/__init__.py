"""Grammars for answers: JSON schemas, patterns, choices, grammars and calls, and the masks of tokens."""

from .grammars import Constraint, GrammarError, Grammars

__all__ = ["Constraint", "GrammarError", "Grammars"]
